"""Test that of_module reads the models of trainers and engines, so that parity finds every fault in them.

Modules of transformers are loaded. Those of vLLM 0.33.0 and SGLang 0.5.23 do not run here: their state is derived from
their sources, which each builder names. ``v/`` stands for vllm/model_executor/ and ``s/`` for sglang/srt/layers/.
"""

import copy
import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from exhaustive import every

import fp4kit
from fp4kit.checkpoint import Activations, convert

torch = pytest.importorskip("torch")
ft = importlib.import_module("fp4kit.torch")

HIDDEN, INNER, EXPERTS = 80, 128, 3  # rows of K = 80 are padded to 96; 3 experts
WIDTHS = {"q_proj": 96, "k_proj": 48, "v_proj": 48}
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


def quantized(form, seed=0):
    """Return {layer: Quantized} in which layers that engines merge, and all matrices of an expert, share an amax."""
    found, every = {}, weights(seed, HIDDEN if form == "nvfp4" else 128)
    for name, w in every.items():
        parent = name.rpartition(".")[0]
        amax = max(fp4kit.amax(x) for other, x in every.items() if other.rpartition(".")[0] == parent)
        amax = np.float32(amax) if form == "nvfp4" else None
        found[name] = fp4kit.quantize(w, RECIPE[form], tensor_amax=amax)
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
    names = {
        "num_local_experts": EXPERTS,
        "num_experts": EXPERTS,
        "intermediate_size_per_partition": INNER,
        "moe_tp_size": 1,
    }
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
    contract, live = ft.of_module(model)
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
    _, live = ft.of_module(model)
    assert sorted(live) == sorted(expert_names(layers))
    for one in live:
        found, wanted = live[one].read(np.arange(live[one].shape[0])), layers[one]
        assert np.array_equal(found.packed, wanted.packed) and np.array_equal(found.block_scale, wanted.block_scale)
    assert fp4kit.parity(of_layers(layers, live), model).differing == ()
    assert fp4kit.parity(model, of_layers(layers, live)).differing == ()


# Faults -------------------------------------------------------------------------------------------------------------


def nvfp4_engine(kernel_name="FlashInferCutlassNvFp4LinearKernel"):
    layers = STORED["nvfp4"]
    qkv = vllm_nvfp4([layers[one] for one in QKV], kernel_name)
    experts = vllm_experts(layers, "nvfp4", "VLLM_CUTLASS")
    return engine(qkv, vllm_nvfp4([layers[DOWN]], kernel_name), experts), qkv, experts["routed_experts"]


def nibbles(model, qkv, experts):
    qkv.weight.data[100] = qkv.weight.data[100] >> 4 | qkv.weight.data[100] << 4


def every_nibble(model, qkv, experts):
    qkv.weight.data = qkv.weight.data >> 4 | qkv.weight.data << 4


def stale_alpha(model, qkv, experts):
    qkv.alpha.data *= 1.5


def stale_scale(model, qkv, experts):
    qkv.weight_global_scale.data *= 1.5
    qkv.alpha.data *= 1.5


def linear_scales(model, qkv, experts):
    scales = torch.zeros_like(qkv.weight_scale.view(torch.uint8))
    _, linear = tensors_of([STORED["nvfp4"][one] for one in QKV], "nvfp4")
    scales[: linear.shape[0], : linear.shape[1]] = linear.view(torch.uint8)
    qkv.weight_scale.data = scales


def exchanged(model, qkv, experts):
    order = [QKV[1], QKV[2], QKV[0]]
    parts = [STORED["nvfp4"][one] for one in order]
    other = vllm_nvfp4(parts, "FlashInferCutlassNvFp4LinearKernel")
    qkv.weight.data, qkv.weight_scale.data = other.weight.data, other.weight_scale.data


def stale_expert(model, qkv, experts):
    other = quantized("nvfp4", seed=1)
    fresh = vllm_experts(other, "nvfp4", "VLLM_CUTLASS")["routed_experts"]
    experts.w13_weight.data[1] = fresh.w13_weight.data[1]


def expert_scale(model, qkv, experts):
    experts.w2_weight_scale.data[2, :32] ^= 1


def expert_alpha(model, qkv, experts):
    experts.w2_weight_scale_2.data[0] *= 2


E = "model.layers.0.mlp.experts"
FAULTS = {
    nibbles: ([QKV[1]], "code", ""),
    every_nibble: (QKV, "code", "the even element of each byte is in the high nibble; swap the nibbles"),
    stale_alpha: (QKV, "tensor scale", "rollout: alpha is "),
    stale_scale: (QKV, "tensor scale", ""),
    linear_scales: (QKV, "block scale", ""),
    exchanged: (QKV, "block scale", ""),
    stale_expert: ([f"{E}.1.gate_proj", f"{E}.1.up_proj"], "code", ""),
    expert_scale: ([f"{E}.2.down_proj"], "block scale", ""),
    expert_alpha: ([f"{E}.0.down_proj"], "tensor scale", "the engine computes with a stale alpha"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: one.__name__)
def test_faults_are_found_and_named(fault):
    model, qkv, experts = nvfp4_engine()
    layers = STORED["nvfp4"]
    assert fp4kit.parity(layers, model).differing == ()
    fault(model, qkv, experts)
    wanted, step, text = FAULTS[fault]
    for train, rollout in ((layers, model), (model, layers)):
        found = fp4kit.parity(train, rollout)
        assert sorted(layer.name for layer in found.differing) == sorted(wanted)
        assert {layer.step for layer in found.differing} == {step}
    found = fp4kit.parity(layers, model)
    assert all(text in layer.setting for layer in found.differing)


GATED = {"g1_alphas": ("gate_proj", "up_proj"), "g2_alphas": ("down_proj",)}
ALPHAS = [("ct", one, leaves) for one, leaves in GATED.items()]
ALPHAS += [("modelopt", "g1_alphas", GATED["g1_alphas"][:1]), ("modelopt", "g1_alphas_up", ("up_proj",))]


@pytest.mark.parametrize(("form", "alpha", "leaves"), [*ALPHAS, ("modelopt", "g2_alphas", GATED["g2_alphas"])])
def test_stale_alphas_of_experts_are_named(form, alpha, leaves):
    layers = of_layers(STORED["nvfp4"], expert_names(STORED["nvfp4"]))
    experts = sglang_experts(STORED["nvfp4"], form)
    getattr(experts, alpha).data[1] *= 2
    found = fp4kit.parity(layers, engine(experts=experts)).differing
    assert sorted(layer.name for layer in found) == [f"{E}.1.{leaf}" for leaf in leaves]
    assert all("the engine computes with a stale alpha" in layer.setting for layer in found)


def test_faults_are_found_against_the_weights_of_a_trainer():
    contract = fp4kit.Contract(RECIPE["nvfp4"], shared_amax=[tuple(WIDTHS), ("gate_proj", "up_proj", "down_proj")])
    every = {name: torch.from_numpy(w) for name, w in weights().items()}
    for fault in (None, stale_alpha, stale_expert, every_nibble):
        model, qkv, experts = nvfp4_engine()
        if fault is not None:
            fault(model, qkv, experts)
        found = fp4kit.parity(contract, model, weights=every)
        assert sorted(layer.name for layer in found.differing) == sorted(FAULTS[fault][0] if fault else ())
        assert not fault or FAULTS[fault][2] in found.differing[0].setting


def test_a_layer_that_an_exclusion_of_the_engine_swallows():
    # verl 7519: the exclusion mlp.gate also matched gate_up_proj, so the engine served bf16 weights there
    parts = {f"model.layers.0.mlp.{name}": quantized_matrix for name, quantized_matrix in GATE_UP.items()}
    whole = torch.cat([torch.from_numpy(w) for w in GATE_UP_WEIGHTS.values()]).to(torch.bfloat16)
    swallowed = module_of("MergedColumnParallelLinear", weight=whole, **sizes(list(GATE_UP.values())))
    right = vllm_nvfp4(list(GATE_UP.values()), "EmulationNvFp4LinearKernel")
    for module, equal in ((right, True), (swallowed, False)):
        model = torch.nn.ModuleDict(
            {
                "model": torch.nn.ModuleDict(
                    {
                        "layers": torch.nn.ModuleList(
                            [torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"gate_up_proj": module})})]
                        )
                    }
                )
            }
        )
        found = fp4kit.parity(parts, model)
        assert (found.differing == ()) == equal
        for layer in found.differing:
            assert layer.step == "quantization"
            assert layer.setting.startswith("rollout does not quantize this layer, and train does")
    assert len(found.differing) == 2
    model["lm_head"] = vllm_nvfp4([STORED["nvfp4"][DOWN]], "EmulationNvFp4LinearKernel")
    assert set(ft.of_module(model)[0].excluded) == set(parts)


GATE_UP_WEIGHTS = {name: weights(3)[f"{E}.0.{name}"] for name in ("gate_proj", "up_proj")}
GATE_UP = {
    name: fp4kit.quantize(w, RECIPE["nvfp4"], tensor_amax=max(map(fp4kit.amax, GATE_UP_WEIGHTS.values())))
    for name, w in GATE_UP_WEIGHTS.items()
}


# Errors -------------------------------------------------------------------------------------------------------------


def with_leaf(name, tensor):
    module = torch.nn.Linear(32, 16)
    module.register_buffer(name, tensor)
    return module


def qkv_with(**changes):
    parts = [STORED["nvfp4"][one] for one in QKV]
    module = vllm_nvfp4(parts, "CutlassNvFp4LinearKernel")
    for name, value in changes.items():
        setattr(module, name, torch.nn.Parameter(value, False) if isinstance(value, torch.Tensor) else value)
    return module


def experts_with(backend="VLLM_CUTLASS", **changes):
    module = vllm_experts(STORED["nvfp4"], "nvfp4", "VLLM_CUTLASS")["routed_experts"]
    module.quant_method.nvfp4_backend.name = backend
    for name, value in changes.items():
        setattr(module, name, value)
    return module


ERRORS = (
    (
        lambda: with_leaf("weight_tiles", torch.zeros(4, 4, dtype=torch.int32)),
        "has weight_tiles, torch.int32 (4, 4), which is not known",
    ),
    (lambda: with_leaf("shadow", torch.zeros(4, 4, dtype=torch.uint8)), "has shadow, torch.uint8 (4, 4)"),
    (lambda: qkv_with(scheme=kernel("MarlinNvFp4LinearKernel")), "stores weights for MarlinNvFp4LinearKernel; needs"),
    (lambda: qkv_with(scheme=kernel("FlashInferTrtllmNvFp4LinearKernel")), "FlashInferTrtllmNvFp4LinearKernel; needs"),
    (lambda: qkv_with(scheme=None), "stores weights for no kernel; needs one of"),
    (lambda: qkv_with(weight=torch.zeros(0, dtype=torch.uint8)), "has emptied its weight"),
    (lambda: qkv_with(output_size=4096), "holds 192 of 4096 outputs, those of one rank; needs an engine on one rank"),
    (lambda: qkv_with(weight_global_scale=torch.ones(3)), "has one weight_global_scale per part"),
    (lambda: qkv_with(input_size_per_partition=4096, input_size=4096), "has codes of shape (192, 96); needs at least"),
    (lambda: experts_with("FLASHINFER_TRTLLM"), "stores experts for nvfp4_backend FLASHINFER_TRTLLM; needs one of"),
    (lambda: experts_with(local_num_experts=1), "holds 1 of 3 experts, those of one rank"),
    (lambda: experts_with(tp_size=2), "is sharded over 2 ranks"),
    (lambda: experts_with(quant_method=None), "does not say for which backend it stores its experts"),
    (
        lambda: experts_with(intermediate_size_per_partition=256),
        "has w13_weight of 256 rows; needs those of gate and up",
    ),
    (lambda: module_of(weight=torch.zeros(16, 32).to(torch.float8_e4m3fn)), "has no weight_scale_inv, which its other"),
    (
        lambda: module_of(weight=torch.zeros(16, 32).to(torch.float8_e4m3fn), weight_scale=torch.zeros(7)),
        "has FP8 scales of shape (7,); needs one per tensor, row or 128x128 block",
    ),
    (
        lambda: module_of(weight_packed=torch.zeros(16, 4, dtype=torch.int32), weight_scale=torch.zeros(16, 1)),
        "has weight_packed of torch.int32 and weight_scale of torch.float32; needs codes of FP4",
    ),
    (
        lambda: module_of(
            "Linear",
            weight_packed=torch.zeros(16, 16, dtype=torch.uint8),
            quant_method=object(),
            weight_scale=torch.zeros(16, 2, dtype=torch.uint8),
        ),
        "not processed yet",
    ),
    (
        lambda: module_of("ParallelLMHead", weight=torch.zeros(64, 32), org_vocab_size=128),
        "holds 64 of 128 rows, those of one rank; needs an engine on one rank",
    ),
)


@pytest.mark.parametrize(("build", "message"), ERRORS)
def test_what_is_not_known_is_refused_by_name(build, message):
    with pytest.raises(ValueError, match=r"^of_module: layers\.0\.odd ") as error:
        ft.of_module(torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.ModuleDict({"odd": build()})])}))
    assert message in str(error.value)


def test_other_errors(monkeypatch):
    for of_module in (ft.of_module, fp4kit.contract.of_module):
        with pytest.raises(TypeError, match="of_module: model is 3; needs a Module"):
            of_module(3)
    joined = qkv_with()
    with pytest.raises(ValueError, match="of_module: odd joins 3 layers; their names are not known"):
        ft.of_module(torch.nn.ModuleDict({"odd": joined}))
    named = torch.nn.ModuleDict({"odd": joined})
    named.packed_modules_mapping = {"odd": ["a", "b", "c"]}
    assert list(ft.of_module(named)[1]) == list(fp4kit.contract.of_module(named)[1]) == ["a", "b", "c"]
    with pytest.raises(
        ValueError, match="q_proj has codes as nvfp4-compressed-tensors; needs a recipe for such codes, not"
    ):
        ft.of_module(engine(joined), recipe="mxfp4")
    assert ft.of_module(engine(joined), recipe="nvfp4-te")[1][QKV[0]].recipe.id == "nvfp4-te"
    backend = SimpleNamespace(is_flashinfer_trtllm=lambda: True)
    place = SimpleNamespace(get_fp4_gemm_runner_backend=lambda: backend)
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.quantization.fp4_utils", place)
    for form in ("ct", "modelopt"):
        with pytest.raises(ValueError, match=r"qkv_proj .* is shuffled for the backend flashinfer_trtllm"):
            ft.of_module(engine(sglang_nvfp4([STORED["nvfp4"][one] for one in QKV], form)))
    for word in ("enable_flashinfer_trtllm_moe", "_is_cutedsl_v2_standard"):
        experts = sglang_experts(STORED["nvfp4"], "modelopt")
        setattr(experts.quant_method, word, True)
        with pytest.raises(ValueError, match=f"is shuffled or interleaved for its kernel \\({word}\\)"):
            ft.of_module(engine(experts=experts))


def test_unquantized_merged_layers_and_others():
    rng = torch.Generator().manual_seed(0)
    whole, bias = torch.randn((192, 80), generator=rng), torch.randn(192, generator=rng)
    rows = list(WIDTHS.values())
    module = module_of("QKVParallelLinear", weight=whole, bias=bias, output_sizes=rows)
    embedding = module_of("VocabParallelEmbedding", weight=torch.randn((128, 80), generator=rng), org_vocab_size=100)
    model = engine(module)
    model["model"]["embed_tokens"] = embedding
    model["lm_head"] = torch.nn.Linear(80, 100, bias=False)
    model["lm_head"].weight = embedding.weight  # tied, so it is no layer of its own
    contract, live = ft.of_module(model)
    first = dict(zip(QKV, np.split(whole.numpy(), np.cumsum(rows)[:-1]), strict=True))
    for name in QKV:
        assert np.array_equal(live[name].read(np.arange(live[name].shape[0])), first[name])
    assert live["model.embed_tokens"].shape == (100, 80) and "excluded" in contract.unknown
    assert np.array_equal(live.others[f"{QKV[1]}.bias"], bias[96:144]) and len(live.others) == 4
    changed = {name: torch.from_numpy(x.copy()) for name, x in first.items()}
    changed[QKV[2]][3, 4] = 7
    found = fp4kit.parity({**changed, "model.embed_tokens": embedding.weight[:100].detach()}, model)
    assert [layer.name for layer in found.differing] == [QKV[2]] and "element [3, 4]" in found.differing[0].element


def test_fp8_in_every_shape():
    w = torch.from_numpy(weights(columns=128)[DOWN])
    for recipe, shape in (("fp8-modelopt", (1,)), ("fp8-modelopt-channel", (128, 1)), ("fp8-deepgemm-block", (1, 1))):
        q = fp4kit.quantize(w.numpy(), recipe)
        scale = torch.from_numpy(np.array(q.tensor_scale)).reshape(-1)[: np.prod(shape)].reshape(shape)
        codes = torch.from_numpy(q.packed).view(torch.float8_e4m3fn)
        module = module_of("Linear", weight=codes, weight_scale=scale)
        assert fp4kit.parity({DOWN: q}, engine(down=module)).differing == ()
        module.weight.data = codes.t()  # v/layers/quantization/utils/fp8_utils.py:1482 (K, N), a transposed view
        assert fp4kit.parity({DOWN: q}, engine(down=module)).differing == ()
        module.weight_scale.data = scale.to(torch.bfloat16)  # transformers
        found = fp4kit.parity({DOWN: q}, engine(down=module))
        assert found.differing[0].step == "tensor scale"
        assert "the scales are torch.bfloat16, to which the engine rounded them" in found.differing[0].setting


# transformers: loaded models ------------------------------------------------------------------------------------------


def loaded(tmp_path, kind, recipe):
    """Return (folder of the source, folder of the checkpoint, model) of a tiny model that transformers loaded."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    experts = {"moe_intermediate_size": 64, "num_experts": 2, "num_experts_per_tok": 1} if "Moe" in kind else {}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **experts)
    source = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    source.save_pretrained(tmp_path / "source")
    given = {"input_scale": 0.01} if recipe.startswith("nvfp4") else {}
    convert(tmp_path / "source", tmp_path / "served", recipe, format="compressed-tensors", **given)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "served", dtype=torch.bfloat16)
    return source, tmp_path / "served", model


@pytest.mark.parametrize("recipe", RECIPE.values())
def test_models_of_transformers_before_and_after_they_decompress(tmp_path, recipe):
    source, served, model = loaded(tmp_path, "Llama", recipe)
    contract = ft.of_module(model)[0]
    assert contract.excluded == ("lm_head", "model.embed_tokens")
    assert contract.input_scales == ("static" if recipe.startswith("nvfp4") else None)
    trained = copy.deepcopy(source)
    ft.fake_quantize_model(trained, recipe, format="compressed-tensors", activations=None)
    q_proj = model.model.layers[0].self_attn.q_proj
    for state in ("weight_packed" if recipe != RECIPE["mxfp8"] else "weight", "weight"):
        assert hasattr(q_proj, state)
        found = fp4kit.parity(served, model)
        assert found.equal and len([x for x in found.layers if x.kind == "weight"]) == 9
        assert len([x for x in found.layers if x.kind == "other tensor"]) == 3
        kinds = [x.kind for x in fp4kit.parity(trained, model).differing]  # this trainer quantizes no inputs
        assert kinds == (["input"] if recipe.startswith("nvfp4") or recipe == RECIPE["mxfp8"] else [])
        found = fp4kit.parity(served, source)
        assert len(found.differing) == 7 and {x.step for x in found.differing} == {"quantization"}
        with torch.no_grad():
            model(torch.tensor([[1, 2, 3]]))  # transformers decompresses in the first call
    assert q_proj.weight.dtype == torch.bfloat16
    with torch.no_grad():
        q_proj.weight[5, 7] += 1
    found = fp4kit.parity(served, model)
    assert [x.name for x in found.differing] == ["model.layers.0.self_attn.q_proj"]
    assert found.differing[0].element.startswith("element [5, 7]") and found.differing[0].values[0] == 1


SERVED_BY = {"engine": "transformers", "scheme": "nvfp4-w4a4"}


@pytest.fixture(scope="module")
def w4a4(tmp_path_factory):
    """Return (unquantized model, trained model, amaxes of inputs, folder of checkpoints, function that loads one)."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    folder = tmp_path_factory.mktemp("w4a4")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 32}
    config = transformers.Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    with ft.collect(model) as collector, torch.no_grad():
        model(TOKENS)
    base, amaxes = copy.deepcopy(model), {name: float(amax) for name, amax in collector.amaxes().items()}
    ft.fake_quantize_model(model, **SERVED_BY, inputs=amaxes)
    model.save_pretrained(folder / "trained")
    for name, factor in (("served", 1), ("other", 1.5)):
        given = Activations({layer: np.float32(amax * factor) for layer, amax in amaxes.items()}, {})
        convert(folder / "trained", folder / name, **SERVED_BY, activations=given)

    def load(runs):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "served", dtype=torch.bfloat16)
        with torch.no_grad():
            _ = loaded(TOKENS) if runs else None  # transformers decompresses in the first call
        return loaded

    return base, model, amaxes, folder, {"served": folder / "served", "live": load(False), "decompressed": load(True)}


ROLLOUTS = ("served", "live", "decompressed")
TOKENS = torch.arange(24).reshape(1, 24)
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("rollout", ROLLOUTS)
def test_activations_that_are_equal_are_compared(w4a4, rollout):
    _, model, _, folder, rollouts = w4a4
    for train in (model, folder / "served"):
        found = fp4kit.parity(train, rollouts[rollout])
        assert found.equal and not found.uncompared and not [note for note in found.notes if "input_global" in note]
        kind = "input scale" if (train, rollout) != (folder / "served", "served") else "other tensor"
        assert len([x for x in found.layers if x.kind == kind]) >= 14
    contract = ft.of_module(model)[0]
    assert contract.activations.id == "nvfp4-compressed-tensors-static" and contract.input_scales == "static"
    if rollout != "served":
        live = ft.of_module(rollouts[rollout])[0]
        assert (live.activations, live.input_scales, live.served_dtype) == (contract.activations, "static", "bfloat16")


@pytest.mark.parametrize("rollout", ROLLOUTS)
def test_other_input_scales_of_a_trainer_are_named(w4a4, rollout):
    """By the amaxes of another collector, or by other stored divisors, every layer differs and says both numbers."""
    base, _, amaxes, _, rollouts = w4a4
    stored = ft.of_module(rollouts["live"])[1].input_scales
    for change in ({"inputs": {name: 1.5 * amax for name, amax in amaxes.items()}}, None):
        model = copy.deepcopy(base)
        if change is None:
            given = {"activations": "nvfp4-compressed-tensors-static", "served_dtype": "bfloat16"}
            given["input_global_scales"] = {name: float(stored[name].value) for name in stored} | {Q_PROJ: 1000.0}
            ft.fake_quantize_model(model, "nvfp4-compressed-tensors", format="compressed-tensors", **given)
        else:
            ft.fake_quantize_model(model, **SERVED_BY, **change)
        found = fp4kit.parity(model, rollouts[rollout])
        named = {x.name: x for x in found.differing}
        assert not found.equal and {x.kind for x in found.differing} == {"input scale"}
        assert len(named) == (1 if change is None else 14)
        number = "stores the input_global_scale 1000.0" if change is None else f"uses the amax {1.5 * amaxes[Q_PROJ]}"
        text = named[Q_PROJ].setting
        assert text.startswith(f"input scale of {Q_PROJ}: train {number}") and "rollout stores the input_global" in text
        assert f"(amax {amaxes[Q_PROJ]}"[:9] in text and "calibrate once" in text


@pytest.mark.parametrize("rollout", every(3, ROLLOUTS))
def test_another_recipe_of_activations_is_named(w4a4, rollout):
    base, _, amaxes, folder, rollouts = w4a4
    model = copy.deepcopy(base)
    given = {"format": "compressed-tensors", "served_dtype": "bfloat16"}
    ft.fake_quantize_model(model, "nvfp4-compressed-tensors", **given, activations="nvfp4-te")
    found = fp4kit.parity(model, rollouts[rollout])
    texts = {x.kind: x.setting for x in found.differing}
    both = "recipe nvfp4-te in train and nvfp4-compressed-tensors-static in rollout"
    assert texts.keys() == {"input", "input scale"} and texts["input"].startswith(both)
    assert (
        texts["input scale"].startswith(f"activations: {both}") and "train computes it in each" in texts["input scale"]
    )
    model = copy.deepcopy(base)
    ft.fake_quantize_model(model, "nvfp4-compressed-tensors", **given, activations="nvfp4-te", input_amaxes=amaxes)
    train = fp4kit.serving(**SERVED_BY), model  # the contract does not hide what the model does
    (layer,) = fp4kit.parity(train, rollouts[rollout], weights=folder / "trained").differing
    assert layer.kind == "input" and layer.setting.startswith(both)
    model = copy.deepcopy(base)
    ft.fake_quantize_model(model, "nvfp4-compressed-tensors", **given)
    (layer,) = fp4kit.parity(model, rollouts[rollout]).differing
    assert layer.kind == "input" and layer.setting.startswith("train does not quantize the inputs, and rollout does")


@pytest.mark.parametrize("rollout", ROLLOUTS)
def test_other_input_scales_of_a_checkpoint_are_named(w4a4, rollout):
    _, _, _, folder, rollouts = w4a4
    found = fp4kit.parity(folder / "other", rollouts[rollout])
    kind, text = ("other tensor", "another calibration") if rollout == "served" else ("input scale", "calibrate once")
    assert len(found.differing) == 14 and {x.kind for x in found.differing} == {kind}
    assert all(text in x.setting and "stale" not in x.setting for x in found.differing)


@pytest.mark.parametrize("rollout", every(3, ROLLOUTS))
def test_the_contract_of_an_engine_needs_no_exclusions_and_no_input_scales(w4a4, rollout):
    """It leaves the layers unquantized that the other side does; without input scales it uses those of the other."""
    base, model, _, folder, rollouts = w4a4
    contract, inputs, hooks = fp4kit.serving(**SERVED_BY), {}, []
    for name, module in base.named_modules():
        if isinstance(module, torch.nn.Linear):
            keep = lambda _, args, name=name: inputs.update({name: args[0][0] / 3})  # noqa: E731
            hooks.append(module.register_forward_pre_hook(keep))
    with torch.no_grad():
        base(TOKENS)
    for hook in hooks:
        hook.remove()
    for train in (contract, (contract, model)):
        found = fp4kit.parity(train, rollouts[rollout], weights=folder / "trained", inputs=inputs)
        assert found.equal and len([x for x in found.layers if x.kind == "input"]) == len(inputs) == 15
        assert ("input scales were not compared" in found.verdict) == (train is contract)
        assert any(note.startswith("whether train also leaves 2 layers") for note in found.notes) == (train is contract)
    assert fp4kit.parity(model, contract, weights=folder / "trained").equal
    assert not fp4kit.parity(base, contract, weights=folder / "trained").equal  # it quantizes nothing


@pytest.mark.parametrize("rollout", every(3, ROLLOUTS))
def test_layers_that_all_differ_are_not_called_stale(w4a4, rollout):
    """With the unquantized weights, recipes are named, also if q, k and v share an amax; without, nothing is blamed."""
    base, model, _, folder, rollouts = w4a4
    other = copy.deepcopy(base)
    ft.fake_quantize_model(other, "nvfp4-te", format="modelopt")
    found = [x for x in fp4kit.parity(other, rollouts[rollout]).differing if x.kind == "weight"]
    assert len(found) == 14 and not any("stale" in x.setting for x in found)
    texts = ("so the recipe or the weights are others", "the recipes differ (nvfp4-te, nvfp4-compressed-tensors)")
    assert all(any(one in x.setting for one in texts) and "every quantized layer differs" in x.setting for x in found)
    found = fp4kit.parity(other, rollouts[rollout], weights=folder / "trained").differing
    recipes = [x.setting.partition(" (")[0] for x in found if x.kind == "weight"]
    assert recipes == ["recipe nvfp4-te in train and nvfp4-compressed-tensors in rollout"] * 14
    one = copy.deepcopy(model)
    with torch.no_grad():
        one.model.layers[0].mlp.down_proj.parametrizations.weight.original.mul_(1.01)
    (layer,) = fp4kit.parity(one, rollouts[rollout]).differing
    assert layer.name == "model.layers.0.mlp.down_proj" and "a stale one" in layer.setting


def test_a_trained_model_states_the_settings_of_its_weights():
    """The settings of fake_quantize_model are stated, those that it does not know are unknown."""
    linear = {"k_proj": torch.nn.Linear(32, 16), "q_proj": torch.nn.Linear(32, 16), "head": torch.nn.Linear(32, 4)}
    for options in (
        {"recipe": "nvfp4-te"},
        {"recipe": "mxfp4-ocp", "format": "compressed-tensors", "served_dtype": "bfloat16"},
        {"engine": "transformers", "scheme": "nvfp4-w4a16"},
        {"engine": "vLLM", "scheme": "mxfp8-w8a16"},
    ):
        model = torch.nn.ModuleDict(copy.deepcopy(linear))
        ft.fake_quantize_model(model, **options, exclude=("head*",))
        contract, _ = ft.of_module(model)
        row = fp4kit.serving(options["engine"], options["scheme"]) if "engine" in options else None
        wanted = fp4kit.recipe(options["recipe"]) if row is None else row.weights
        assert contract.weights == wanted and contract.excluded == ("head",) and contract.activations is None
        assert not {"weights", "shared_amax", "excluded", "hadamard"} & {*contract.unknown}
        assert ("unit" in contract.unknown) == (row is None or row.unit is not None) and contract.unit is None
        for name in ("served_dtype", "container"):
            given = options.get({"container": "format"}.get(name, name)) or getattr(row, name, None)
            assert (name in contract.unknown) == (not given) or row is not None
    plain, _ = ft.of_module(torch.nn.ModuleDict(linear))
    assert "weights" in plain.unknown


def test_what_one_side_does_not_know_of_inputs_is_in_the_verdict(w4a4):
    _, model, _, _, rollouts = w4a4
    tensors = {name: x.detach() for name, x in model.state_dict().items() if name.endswith("proj.weight")}
    found = fp4kit.parity(lambda name, x: fp4kit.fake_quantize(x, RECIPE["nvfp4"]), rollouts["live"], weights=tensors)
    assert found.uncompared == "activations and input scales"
    assert "; activations and input scales were not compared; compared" in found.verdict


def test_experts_of_transformers(tmp_path):
    source, served, model = loaded(tmp_path, "Qwen3Moe", RECIPE["mxfp4"])
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    assert {f"{E}.{e}.{name}" for e in range(2) for name in ("gate_proj", "up_proj", "down_proj")} < {
        *ft.of_module(model)[1]
    }
    assert fp4kit.parity(served, model).equal
    trained = copy.deepcopy(source)
    ft.fake_quantize_model(trained, RECIPE["mxfp4"], format="compressed-tensors")
    assert fp4kit.parity(trained, model).equal
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj[1, 70, 3] += 1  # row 6 of up_proj
    for train in (served, trained):
        found = fp4kit.parity(train, model)
        assert [x.name for x in found.differing] == [f"{E}.1.up_proj"]
        assert found.differing[0].element.startswith("element [6, 3]")


def test_gpt_oss_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_local_experts": 2}
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**sizes, **heads, num_experts_per_tok=1, eos_token_id=1)
    source = transformers.GptOssForCausalLM(config).to(torch.bfloat16)
    source.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "served", "mxfp4-ocp", format="gpt-oss")
    decoded = {"quantization_config": transformers.Mxfp4Config(dequantize=True), "dtype": torch.bfloat16}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "served", **decoded)
    assert "excluded" in ft.of_module(model)[0].unknown
    found = fp4kit.parity(tmp_path / "served", model)
    assert found.equal and len([x for x in found.layers if "experts" in x.name and x.kind == "weight"]) == 4
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj[1, 5, 9] += 1  # stored transposed
    found = fp4kit.parity(tmp_path / "served", model)
    assert [x.name for x in found.differing] == [f"{E}.1.gate_up_proj"]
    assert found.differing[0].element.startswith("element [9, 5]")


def test_transposed_and_interleaved_experts_of_gpt_oss():
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_local_experts=2)
    experts = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts(config)
    torch.nn.init.normal_(experts.gate_up_proj)
    torch.nn.init.normal_(experts.down_proj)
    model = torch.nn.ModuleDict({"experts": experts})
    live = ft.of_module(model)[1]
    assert {name: live[name].shape for name in live} == {
        **{f"experts.{e}.gate_up_proj": (64, 64) for e in range(2)},
        **{f"experts.{e}.down_proj": (64, 32) for e in range(2)},
    }
    wanted = experts.down_proj.detach().numpy()[1].T[[3, 9]]
    assert np.array_equal(live["experts.1.down_proj"].read(np.array([3, 9])), wanted)
