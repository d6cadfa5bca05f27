"""Test that live_side reads the models of trainers and engines, so that parity finds every fault in them.

Modules of transformers are loaded. Those of vLLM 0.33.0 and SGLang 0.5.23 do not run here: their state is derived from
their sources, which each builder names. ``v/`` stands for vllm/model_executor/ and ``s/`` for sglang/srt/layers/.
"""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest

import fp4kit

torch = pytest.importorskip("torch")
ft = importlib.import_module("fp4kit.torch")

HIDDEN, INNER, EXPERTS = 80, 128, 3  # rows of K = 80 are padded to 96; 3 experts
WIDTHS = {"q_proj": 96, "k_proj": 48, "v_proj": 48}
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
RECIPE = {"nvfp4": "nvfp4-compressed-tensors", "mxfp4": "mxfp4-compressed-tensors", "mxfp8": "mxfp8-compressed-tensors"}


def weights(seed=0, columns=HIDDEN):
    """Return {layer: float32 matrix} of one decoder layer."""
    rng = np.random.default_rng(seed)
    shapes = {f"model.layers.0.self_attn.{name}": (rows, columns) for name, rows in WIDTHS.items()}
    shapes["model.layers.0.mlp.down_proj"] = columns, columns
    for e in range(EXPERTS):
        parent = f"model.layers.0.mlp.experts.{e}"
        shapes |= {f"{parent}.{name}": (INNER, columns) for name in ("gate_proj", "up_proj")}
        shapes[f"{parent}.down_proj"] = columns, INNER
    return {name: (rng.standard_normal(shape) * 0.1).astype(np.float32) for name, shape in shapes.items()}


def quantized(form, seed=0, recipe=None):
    """Return {layer: Quantized} in which layers that engines merge, and all matrices of an expert, share an amax."""
    found, every = {}, weights(seed, HIDDEN if form == "nvfp4" else 128)
    for name, w in every.items():
        group = name.rpartition(".")[0] if "proj" in name else name
        amax = max(fp4kit.amax(x) for other, x in every.items() if other.startswith(group))
        amax = np.float32(amax) if form == "nvfp4" else None
        found[name] = fp4kit.quantize(w, recipe or RECIPE[form], tensor_amax=amax)
    return found


# The layouts, stated here as the engines do.


def swizzle(scales):
    """v/layers/quantization/utils/nvfp4_utils.py:15 swizzle_blockscale; s/quantization/utils.py:574."""
    rows, columns = -(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4
    padded = torch.zeros((rows, columns), dtype=torch.uint8)
    padded[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    tiles = padded.reshape(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows, columns).contiguous()


def pad(codes, alignment=32):
    """v/layers/quantization/utils/nvfp4_utils.py:65 pad_nvfp4_weight_for_cutlass."""
    rows, columns = -codes.shape[0] % alignment, -(2 * codes.shape[1]) % alignment // 2
    return torch.nn.functional.pad(codes, (0, columns, 0, rows))


def tensors_of(parts, form):
    """Return (codes, block scales) of layers that an engine merges, in the dtypes of checkpoints."""
    codes = torch.cat([torch.from_numpy(q.packed) for q in parts])
    scales = torch.cat([torch.from_numpy(q.block_scale) for q in parts])
    codes = codes.view(torch.float8_e4m3fn) if form == "mxfp8" else codes
    return codes, scales.view(torch.float8_e4m3fn) if form == "nvfp4" else scales


def module_of(class_name="Module", **attributes):
    """Return a module with tensors as parameters, and the other attributes as they are."""
    module = type(class_name, (torch.nn.Module,), {})()
    for name, value in attributes.items():
        if isinstance(value, torch.Tensor):
            value = torch.nn.Parameter(value.contiguous(), requires_grad=False)
        setattr(module, name, value)
    return module


def kernel(name):
    return SimpleNamespace(kernel=type(name, (), {})())


def sizes(parts):
    rows, columns = [q.shape[0] for q in parts], parts[0].shape[1]
    own = {"logical_widths": rows, "input_size_per_partition": columns, "output_size_per_partition": sum(rows)}
    return own | {"input_size": columns, "output_size": sum(rows)}


INPUT = np.float32(0.037)  # multiplier of the input scale


def vllm_nvfp4(parts, kernel_name, form="ct", a16=False):
    """v/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py:97-144; form "modelopt":
    v/layers/quantization/modelopt.py:2056-2090, 2112-2130, 2411-2419. Kernels: v/kernels/linear/nvfp4/.
    """
    codes, scales = tensors_of(parts, "nvfp4")
    if kernel_name != "EmulationNvFp4LinearKernel":
        codes, scales = pad(codes), swizzle(scales)
    if kernel_name == "FbgemmNvFp4LinearKernel":  # fbgemm.py: swizzled.view(-1).view(torch.uint8)
        scales = scales.reshape(-1)
    scale = max(np.float32(q.tensor_scale) for q in parts)
    held = {"weight": codes, "weight_scale": scales, "weight_global_scale": torch.tensor(scale)}
    if not a16:
        held |= {"input_global_scale": torch.tensor(INPUT), "input_global_scale_inv": torch.tensor(1 / INPUT)}
        held["alpha"] = held["input_global_scale"] * held["weight_global_scale"]
    own = {"scheme": kernel(kernel_name)} if form == "ct" else {"quant_method": kernel(kernel_name)}
    return module_of("QKVParallelLinear", **held, **own, **sizes(parts))


def vllm_mx(parts, kernel_name, form):
    """v/kernels/linear/mxfp4/flashinfer.py:37, emulation.py:103 and v/kernels/linear/mxfp8/flashinfer.py:76, 151,
    emulation.py:29, pytorch.py:42, with scales of v/layers/quantization/utils/mxfp8_utils.py:14 (flat).
    """
    codes, scales = tensors_of(parts, form)
    if "Emulation" not in kernel_name:
        scales = swizzle(scales)
        scales = scales.reshape(-1) if form == "mxfp8" else scales
    if kernel_name == "FlashInferCutedslMxfp8LinearKernel":
        module = module_of("Linear", weight_scale=scales, quant_method=kernel(kernel_name), **sizes(parts))
        module.weight = torch.nn.Parameter(codes.t(), requires_grad=False)
        return module
    return module_of("Linear", weight=codes, weight_scale=scales, quant_method=kernel(kernel_name), **sizes(parts))


def sglang_nvfp4(parts, form):
    """s/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py:94-132 (no padding of codes), and
    s/quantization/modelopt_quant.py:1886-2028 (weight_scale_interleaved; weight_scale_2 and input_scale stay).
    """
    codes, scales = tensors_of(parts, "nvfp4")
    scale = max(np.float32(q.tensor_scale) for q in parts)
    if form == "ct":
        divisor, given = torch.tensor(np.float32(1) / scale), torch.tensor(np.float32(1) / INPUT)
        held = {"weight_packed": codes, "weight_scale": swizzle(scales), "weight_global_scale": divisor}
        held |= {"input_global_scale": given, "alpha": 1 / (given * divisor)}
        return module_of("QKVParallelLinear", **held, quant_method=SimpleNamespace(), scheme=object(), **sizes(parts))
    second, given = torch.tensor([np.float32(q.tensor_scale) for q in parts]), torch.full((len(parts),), INPUT)
    held = {"weight": pad(codes), "weight_scale": scales, "weight_scale_interleaved": swizzle(scales)}
    held |= {"weight_scale_2": second, "input_scale": given, "alpha": given.max() * second.max()}
    held["input_scale_inv"] = 1 / given.max()
    return module_of("QKVParallelLinear", **held, quant_method=SimpleNamespace(), **sizes(parts))


def sglang_mxfp8(parts, backend):
    """s/quantization/fp8.py:1027-1100: weight_scale_inv stays linear; FlashInfer reads weight_scale_inv_swizzled."""
    codes, scales = tensors_of(parts, "mxfp8")
    held = {"weight": codes, "weight_scale_inv": scales}
    if backend == "flashinfer":
        held["weight_scale_inv_swizzled"] = swizzle(scales).reshape(-1)
    return module_of("QKVParallelLinear", **held, quant_method=SimpleNamespace(), **sizes(parts))


def stacks(layers, form, up_first=False):
    """Return codes, scales and tensor scales (E, ...) of w13 and w2."""
    names = ("up_proj", "gate_proj") if up_first else ("gate_proj", "up_proj")
    found = {}
    for stem, leaves in (("w13", names), ("w2", ("down_proj",))):
        every = [[layers[f"model.layers.0.mlp.experts.{e}.{leaf}"] for leaf in leaves] for e in range(EXPERTS)]
        pairs = [tensors_of(parts, form) for parts in every]
        found[stem] = [torch.stack([pair[i] for pair in pairs]) for i in range(2)]
        if form == "nvfp4":
            found[stem].append(torch.tensor([np.float32(parts[0].tensor_scale) for parts in every]))
    return found


MOE = {"local_num_experts": EXPERTS, "global_num_experts": EXPERTS, "intermediate_size_per_partition": INNER}


def vllm_experts(layers, form, backend, checkpoint="ct"):
    """v/layers/quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_w4a4_nvfp4.py:198-257,
    w4a4_mxfp4.py:170-205, v/layers/quantization/modelopt.py:1039-1102, 1454-1482, and the layouts of
    v/layers/fused_moe/oracle/nvfp4.py:324 and v/layers/quantization/utils/flashinfer_fp4_moe.py:335. The experts of
    CUTLASS multiply the tensor scale by the input scale (v/layers/fused_moe/experts/cutlass_moe.py:704).
    """
    held, given = {}, torch.tensor([INPUT, INPUT * 2, INPUT * 3])
    for stem, (codes, scales, *second) in stacks(layers, form, backend == "FLASHINFER_CUTLASS").items():
        if "CUTLASS" in backend:
            scales = torch.stack([swizzle(one) for one in scales])
        held |= {f"{stem}_weight": codes, f"{stem}_weight_scale": scales}
        if second:
            held[f"{stem}_weight_scale_2"] = second[0] * given if "CUTLASS" in backend else second[0]
            held[f"{stem}_input_scale"] = given
            if checkpoint == "ct":
                divisor = (1 / second[0]).reshape(-1, 1)
                held[f"{stem}_weight_global_scale"] = divisor.repeat(1, 2) if stem == "w13" else divisor
    method = SimpleNamespace(**{f"{form}_backend": SimpleNamespace(name=backend)})
    return torch.nn.ModuleDict({"routed_experts": module_of("RoutedExperts", **held, quant_method=method, **MOE)})


def sglang_experts(layers, form):
    """s/quantization/modelopt_quant.py:2712-3032 (CUTLASS) and compressed_tensors_w4a4_nvfp4_moe.py:169-262."""
    up_first, held, given = form == "modelopt", {}, torch.full((EXPERTS,), INPUT)
    for stem, (codes, scales, second) in stacks(layers, "nvfp4", up_first).items():
        swizzled = torch.stack([swizzle(one) for one in scales])
        held[f"{stem}_weight"] = codes
        held[f"{stem}_weight_scale"] = scales if up_first else swizzled
        held[f"{stem}_input_scale_quant"] = 1 / given
        both = second.reshape(-1, 1).repeat(1, 2) if stem == "w13" and up_first else second
        held[f"{stem}_weight_scale_2"] = both
        held["g2_alphas" if stem == "w2" else "g1_alphas"] = second * given
        if up_first:
            held[f"{stem}_blockscale_swizzled"] = swizzled
    if up_first:
        held["g1_alphas_up"] = held["g1_alphas"].clone()
    names = {"num_local_experts": EXPERTS, "num_experts": EXPERTS, "intermediate_size_per_partition": INNER}
    method = SimpleNamespace(load_up_proj_weight_first=up_first, enable_flashinfer_trtllm_moe=False)
    return module_of("FusedMoE", **held, quant_method=method, **names)


def engine(qkv=None, down=None, experts=None):
    """Return a model of one decoder layer with the given modules."""
    attention = torch.nn.ModuleDict({} if qkv is None else {"qkv_proj": qkv})
    mlp = torch.nn.ModuleDict({name: x for name, x in (("down_proj", down), ("experts", experts)) if x is not None})
    layer = torch.nn.ModuleDict({"self_attn": attention, "mlp": mlp, "input_layernorm": torch.nn.RMSNorm(HIDDEN)})
    return torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})})


QKV = [f"model.layers.0.self_attn.{name}" for name in WIDTHS]
DOWN = "model.layers.0.mlp.down_proj"


def of_layers(layers, names):
    return {name: layers[name] for name in names}


def expert_names(layers):
    return [name for name in layers if ".experts." in name]


NVFP4_KERNELS = (
    *("EmulationNvFp4LinearKernel", "CutlassNvFp4LinearKernel", "FlashInferCutlassNvFp4LinearKernel"),
    *("FlashInferCuteDslNvFp4LinearKernel", "FlashInferCudnnNvFp4LinearKernel", "FlashInferB12xNvFp4LinearKernel"),
    *("TorchNvFp4LinearKernel", "FbgemmNvFp4LinearKernel"),
)
LINEAR = {
    **{
        f"vllm {form} {name}": ("nvfp4", lambda q, n=name, f=form: vllm_nvfp4(q, n, f))
        for name in NVFP4_KERNELS
        for form in ("ct", "modelopt")
    },
    "vllm w4a16": ("nvfp4", lambda q: vllm_nvfp4(q, "EmulationNvFp4LinearKernel", a16=True)),
    **{
        f"vllm {name}": ("mxfp4", lambda q, n=name: vllm_mx(q, n, "mxfp4"))
        for name in ("EmulationMxfp4LinearKernel", "FlashInferMxFp4LinearKernel")
    },
    **{
        f"vllm {name}": ("mxfp8", lambda q, n=name: vllm_mx(q, n, "mxfp8"))
        for name in (
            "EmulationMxfp8LinearKernel",
            "FlashInferCutlassMxfp8LinearKernel",
            "FlashInferCutedslMxfp8LinearKernel",
            "TorchMxFp8LinearKernel",
        )
    },
    "sglang ct": ("nvfp4", lambda q: sglang_nvfp4(q, "ct")),
    "sglang modelopt": ("nvfp4", lambda q: sglang_nvfp4(q, "modelopt")),
    "sglang mxfp8": ("mxfp8", lambda q: sglang_mxfp8(q, "triton")),
    "sglang mxfp8 flashinfer": ("mxfp8", lambda q: sglang_mxfp8(q, "flashinfer")),
}
STORED = {form: quantized(form) for form in RECIPE}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_layers_of_engines(name):
    form, build = LINEAR[name]
    layers = STORED[form]
    model = engine(build([layers[one] for one in QKV]), build([layers[DOWN]]))
    contract, live = ft.live_side(model)
    assert list(live) == [*QKV, DOWN] and list(live.others) == ["model.layers.0.input_layernorm"]
    for one in live:  # every code and scale, in linear order and without padding
        found, wanted = live[one].read(np.arange(live[one].shape[0])), layers[one]
        assert found.shape == wanted.shape and np.array_equal(found.packed, wanted.packed)
        assert np.array_equal(found.block_scale, wanted.block_scale)
    assert fp4kit.parity(of_layers(layers, live), model, elements=500).differing == ()
    assert contract.excluded == () and ("input_scales" in contract.unknown) == (contract.input_scales is None)
    assert (contract.input_scales == "static") == (form == "nvfp4" and "w4a16" not in name)


EXPERT_MODULES = {
    **{
        f"vllm {form} {backend} {checkpoint}": (
            form,
            lambda q, f=form, b=backend, c=checkpoint: vllm_experts(q, f, b, c),
        )
        for form, backends in (
            ("nvfp4", ("EMULATION", "VLLM_CUTLASS", "FLASHINFER_CUTLASS")),
            ("mxfp4", ("EMULATION", "CUTLASS_MXFP4_MXFP4")),
            ("mxfp8", ("EMULATION", "TRITON_MXFP8")),
        )
        for backend in backends
        for checkpoint in ("ct", "modelopt")
    },
    "sglang ct": ("nvfp4", lambda q: sglang_experts(q, "ct")),
    "sglang modelopt": ("nvfp4", lambda q: sglang_experts(q, "modelopt")),
}


@pytest.mark.parametrize("name", EXPERT_MODULES)
def test_experts_of_engines(name):
    form, build = EXPERT_MODULES[name]
    layers = STORED[form]
    model = engine(experts=build(layers))
    _, live = ft.live_side(model)
    assert sorted(live) == sorted(expert_names(layers))
    for one in live:
        found, wanted = live[one].read(np.arange(live[one].shape[0])), layers[one]
        assert np.array_equal(found.packed, wanted.packed) and np.array_equal(found.block_scale, wanted.block_scale)
    assert fp4kit.parity(of_layers(layers, live), model).differing == ()
    assert fp4kit.parity(model, of_layers(layers, live)).differing == ()
