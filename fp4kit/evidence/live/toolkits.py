"""Define the adapters of toolkits: auto-round, comfy-kitchen, compressed-tensors, Model-Optimizer, msmodelslim and
Quark; and of packages that need CUDA when they are imported: fouroversix, SGLang, Transformer Engine, triton_kernels
and vLLM.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

import fp4kit
from fp4kit.calibration import input_global_scale
from fp4kit.evidence.live.adapter import (
    NAN_VALUE,
    QUARK_INFINITE,
    QUARK_SMALLEST_SCALE,
    ROUNDS_BEYOND_DTYPE,
    SATURATING_CASTS,
    ZERO_OF_ZEROS,
    Adapter,
    Parts,
    ProducerCall,
    cached,
    codes_of,
    decoded,
    load,
    packages,
    parts,
    to_numpy,
    to_torch,
    triton,
)
from fp4kit.layouts import swizzle_scales, unswizzle_scales

SATURATING = partial(ProducerCall, dependency_versions=SATURATING_CASTS)

# ---- auto-round: its quantization functions, and codes as its QuantLinear.pack stores them


def _auto_round_packed(values: Any, scales: Any, bits: int, size: int, kind: str, global_scale: Any = None) -> Any:
    """Return the QuantLinear of auto-round that stores the given values."""
    import torch
    from auto_round.export.export_to_autoround.qlinear_fp import QuantLinear

    linear = torch.nn.Linear(values.shape[1], values.shape[0], bias=False)
    linear.weight = torch.nn.Parameter(values, requires_grad=False)
    stored = QuantLinear(bits, size, values.shape[1], values.shape[0], False, data_type=kind, act_bits=16)
    stored.pack(linear, scales, global_scale=global_scale)
    return stored


def _auto_round_mx(x: np.ndarray, function: str, bits: int) -> Parts:
    from auto_round.data_type import mxfp

    values, exponents, _ = getattr(mxfp, function)(to_torch(x), bits=bits, group_size=32)
    stored = _auto_round_packed(values, exponents, bits, 32, f"mx_fp{bits}")
    return parts(x, stored.weight if bits == 8 else stored.weight_packed, stored.weight_scale)


def _auto_round_nvfp4(x: np.ndarray, function: str, fake: bool = False) -> Parts:
    import torch
    from auto_round.data_type import nvfp

    t = to_torch(x)
    global_scale = nvfp.calculate_gparam(t)
    values, scales, _ = getattr(nvfp, function)(t, global_scale=global_scale)
    if fake:
        return {"fake": to_numpy(values)}
    stored = _auto_round_packed(values, scales, 4, 16, "nv_fp4", global_scale)
    tensor_scale = nvfp.get_reciprocal(global_scale).to(torch.float32)
    return parts(x, stored.weight_packed, stored.weight_scale, tensor_scale=tensor_scale)


AUTO_ROUND = Adapter(
    "auto-round",
    needs=(
        "auto_round.data_type.mxfp",
        "auto_round.data_type.nvfp",
        "auto_round.export.export_to_autoround.qlinear_fp",
    ),
    calls={
        "nvfp4-auto-round": ProducerCall(partial(_auto_round_nvfp4, function="nv_fp4")),
        "nvfp4-auto-round-fake": ProducerCall(partial(_auto_round_nvfp4, function="nv_fp4", fake=True)),
        "nvfp4-auto-round-opt": ProducerCall(partial(_auto_round_nvfp4, function="opt_rtn_fast_nvfp4")),
        "mxfp4-auto-round": ProducerCall(partial(_auto_round_mx, function="quant_mx", bits=4)),
        "mxfp4-auto-round-opt": ProducerCall(partial(_auto_round_mx, function="quant_mx_opt_rtn", bits=4)),
        "mxfp4-auto-round-rceil": ProducerCall(partial(_auto_round_mx, function="quant_mx_rceil", bits=4)),
        "mxfp4-auto-round-rceil-v2": ProducerCall(partial(_auto_round_mx, function="quant_mx_rceil_v2", bits=4)),
        "mxfp8-auto-round": SATURATING(partial(_auto_round_mx, function="quant_mx", bits=8)),
        "mxfp8-auto-round-rceil": SATURATING(partial(_auto_round_mx, function="quant_mx_rceil", bits=8)),
    },
)

# ---- comfy-kitchen: its eager back end, on a CPU

LAYOUT = "swizzled_128x4"


def _comfy(name: str) -> Any:
    """Return a function of comfy-kitchen's eager back end."""
    from comfy_kitchen.backends.eager import quantization

    return getattr(quantization, name)


def _comfy_linear(scales: Any, rows: int, blocks: int) -> np.ndarray:
    """Return comfy-kitchen's swizzled block scales in the linear layout, without padding: uint8 (rows, blocks)."""
    return np.asarray(unswizzle_scales(to_numpy(scales).view(np.uint8), LAYOUT, (rows, blocks)))


def _comfy_nvfp4(x: np.ndarray, is_given: bool) -> Parts:
    """Quantize and dequantize x to NVFP4 as TensorCoreNVFP4Layout does."""
    import torch

    t = to_torch(x)
    amax = torch.amax(t.abs())
    scale = ((amax.float() if is_given else amax) / 2688.0).to(torch.float32)
    codes, scales = _comfy("quantize_nvfp4")(t, scale)
    packed = to_numpy(codes)
    values = decoded(partial(_comfy("dequantize_nvfp4"), codes, scale, scales), "float32", "bfloat16")
    linear = _comfy_linear(scales, len(x), x.shape[1] // 16)
    return parts(x, packed << 4 | packed >> 4, linear, tensor_scale=scale, **values)


def _comfy_mxfp8(x: np.ndarray) -> Parts:
    codes, scales = _comfy("quantize_mxfp8")(to_torch(x))
    values = decoded(partial(_comfy("dequantize_mxfp8"), codes, scales), "float32", "bfloat16")
    return parts(x, codes, _comfy_linear(scales, len(x), x.shape[1] // 32), **values)


def _comfy_fp8(x: np.ndarray, name: str) -> Parts:
    """Quantize and dequantize x to FP8 with the scale that ComfyUI computes: amax / max, in float32."""
    import torch

    t, dtype = to_torch(x), getattr(torch, name)
    scale = torch.amax(t.abs()).to(torch.float32) / torch.finfo(dtype).max
    codes = _comfy("quantize_per_tensor_fp8")(t, scale, dtype)
    values = decoded(partial(_comfy("dequantize_per_tensor_fp8"), codes, scale), "float32", "bfloat16")
    return {"codes": to_numpy(codes), "tensor_scale": to_numpy(scale), **values}


def _comfy_decode(q: fp4kit.Quantized) -> np.ndarray:
    """Return the values that comfy-kitchen's dequantize_nvfp4 or dequantize_mxfp8 decodes from q, in q's dtype."""
    import torch

    rows = -(-q.block_scale.shape[0] // 128) * 128
    scales = to_torch(np.asarray(swizzle_scales(q.block_scale, LAYOUT)).reshape(rows, -1))
    dtype = getattr(torch, str(q.dtype))
    if q.recipe.is_packed:
        codes, scale = to_torch(q.packed << 4 | q.packed >> 4), to_torch(np.asarray(q.tensor_scale))
        return to_numpy(_comfy("dequantize_nvfp4")(codes, scale, scales.view(torch.float8_e4m3fn), dtype))
    codes = to_torch(q.packed).view(torch.float8_e4m3fn)
    return to_numpy(_comfy("dequantize_mxfp8")(codes, scales.view(torch.float8_e8m0fnu), dtype))


COMFY_KITCHEN = Adapter(
    "comfy-kitchen",
    calls={
        **{
            id: SATURATING(partial(_comfy_nvfp4, is_given=is_given), exempt=(NAN_VALUE,), decode=_comfy_decode)
            for id, is_given in (("nvfp4-comfy-kitchen", False), ("nvfp4-comfy-kitchen-static", True))
        },
        "mxfp8-comfy-kitchen": SATURATING(_comfy_mxfp8, columns=32, exempt=(ZERO_OF_ZEROS,), decode=_comfy_decode),
        "fp8-comfy-kitchen": ProducerCall(partial(_comfy_fp8, name="float8_e4m3fn")),
        "fp8-comfy-kitchen-e5m2": ProducerCall(partial(_comfy_fp8, name="float8_e5m2")),
    },
    left_out={
        "ComfyUI, whose stochastic rounding this is, is not a package; recorded outputs are compared by --check": (
            *("nvfp4-comfy-kitchen-stochastic", "nvfp4-comfy-kitchen-stochastic-cuda"),
        )
    },
)

# ---- compressed-tensors: its computation of scales, and its compressors of weights


def _compressed(x: np.ndarray, compressor: str, bits: int, with_global: bool = False) -> Parts:
    """Compress x with a compressor of compressed-tensors, and decompress the result."""
    import torch
    from compressed_tensors import compressors
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    size, dtype = (16, torch.float8_e4m3fn) if with_global else (32, torch.uint8)
    group = {"strategy": "tensor_group" if with_global else "group", "group_size": size, "scale_dtype": dtype}
    args = QuantizationArgs(num_bits=bits, type="float", symmetric=True, **group)
    scheme, weight = QuantizationScheme(targets=["Linear"], weights=args), to_torch(x)
    divisor = generate_gparam(weight.min(), weight.max()) if with_global else None
    groups = weight.unflatten(-1, (-1, size))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args, *([divisor] if with_global else []))
    state = {"weight": weight, "weight_scale": scale}
    state |= {"weight_global_scale": divisor} if with_global else {"weight_zero_point": zero}
    stored = getattr(compressors, compressor).compress(state, scheme)
    values = getattr(compressors, compressor).decompress(stored, scheme)["weight"]
    name = f"values_{values.dtype}".replace("torch.", "").replace("values_float32", "values")
    tensor = {"tensor_scale": np.float32(1) / to_numpy(divisor)} if with_global else {}
    codes = stored["weight" if bits == 8 else "weight_packed"]
    return parts(x, codes, stored["weight_scale"], **tensor, **{name: values})


def _compressed_inputs(x: np.ndarray, strategy: str, bits: int = 8, size: int | None = None) -> Parts:
    """Fake-quantize x as forward_quantize does to the inputs of a layer, in the dtype of x."""
    import torch
    from compressed_tensors.quantization import QuantizationArgs, fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    given = {"dynamic": True, "strategy": strategy, "group_size": size}
    inputs, divisor = to_torch(x)[None], None  # 2-d inputs would have one scale per tensor, whatever the strategy
    if strategy == "tensor_group":
        given |= {"dynamic": "local", "scale_dtype": torch.float8_e4m3fn}
        divisor = torch.from_numpy(input_global_scale(np.fmax(np.abs(x).max(), 1e-8)).reshape(1))
    args = QuantizationArgs(num_bits=bits, type="float", symmetric=True, **given)
    scale, zero = compute_dynamic_scales_and_zp(inputs, args, torch.nn.Module(), divisor)
    values = fake_quantize(inputs, scale, zero, args, divisor)[0]
    return {"fake": to_numpy(values)}


COMPRESSED_TENSORS = Adapter(
    "compressed-tensors",
    needs=("compressed_tensors.compressors",),
    calls={
        "nvfp4-compressed-tensors": ProducerCall(
            partial(_compressed, compressor="NVFP4PackedCompressor", bits=4, with_global=True)
        ),
        "nvfp4-compressed-tensors-static": ProducerCall(
            partial(_compressed_inputs, strategy="tensor_group", bits=4, size=16)
        ),
        "fp8-compressed-tensors": SATURATING(partial(_compressed_inputs, strategy="tensor")),
        "fp8-compressed-tensors-token": SATURATING(partial(_compressed_inputs, strategy="token")),
        "fp8-compressed-tensors-group": SATURATING(
            partial(_compressed_inputs, strategy="group", size=128), columns=128
        ),
        **{
            f"mxfp{bits}-compressed-tensors": ProducerCall(
                partial(_compressed, compressor=compressor, bits=bits), exempt=(ROUNDS_BEYOND_DTYPE,)
            )
            for bits, compressor in (
                (4, "MXFP4PackedCompressor"),
                (6, "MXFP6PackedCompressor"),
                (8, "MXFP8QuantizationCompressor"),
            )
        },
    },
)

# ---- Model-Optimizer: its quantized tensor classes, on a CPU


def _modelopt(x: np.ndarray, kind: str) -> Parts:
    """Quantize x with a quantized tensor class of Model-Optimizer, and decode to float32, float16 and bfloat16."""
    from modelopt.torch.quantization import qtensor

    size = {"NVFP4QTensor": (16,), "MXFP4QTensor": (32,)}.get(kind, ())
    t, scale, *double_scale = getattr(qtensor, kind).quantize(to_torch(x), *size)
    given: dict[str, Any] = {"scale": scale} | ({"block_sizes": {-1: size[0]}} if size else {})
    given |= {"double_scale": double_scale[0]} if double_scale else {}
    values = decoded(partial(t.dequantize, **given), "float32", "float16", "bfloat16")
    return parts(x, t._quantized_data, scale, tensor_scale=given.get("double_scale"), **values)


def _modelopt_decode(q: fp4kit.Quantized, kind: str) -> np.ndarray:
    """Return the values that Model-Optimizer decodes from q, in q's dtype and shape."""
    import torch
    from modelopt.torch.quantization import qtensor

    dtype = getattr(torch, str(q.dtype))
    codes, scales = to_torch(q.packed), to_torch(q.block_scale)
    given: dict[str, Any] = {"scale": scales, "block_sizes": {-1: q.recipe.block_size}}
    if kind == "NVFP4QTensor":
        given |= {"scale": scales.view(torch.float8_e4m3fn), "double_scale": to_torch(np.asarray(q.tensor_scale))}
    if kind == "MXFP8QTensor":
        codes = codes.view(torch.float8_e4m3fn)
    t = getattr(qtensor, kind)(torch.Size(q.shape), dtype, codes)
    return to_numpy(t.dequantize(dtype, **given)).reshape(q.shape)


def _modelopt_fake_fp8(x: np.ndarray) -> Parts:
    """Fake-quantize x to FP8 with one amax per row, as Model-Optimizer does on a CPU."""
    from modelopt.torch.quantization.tensor_quant import scaled_e4m3

    t = to_torch(x)
    return {"fake": to_numpy(scaled_e4m3(t, t.abs().amax(dim=1, keepdim=True), None, 4, 3))}


MODELOPT_LEFT_OUT = {
    "needs a calibrated quantizer of a model": ("nvfp4-modelopt-static", "nvfp4-modelopt-static-4over6"),
    "its sweep is a kernel of Model-Optimizer, which needs a GPU": ("nvfp4-modelopt-mse",),
    "is a kernel of Model-Optimizer, which needs a GPU": (
        *("nvfp4-modelopt-fake", "nvfp4-modelopt-static-fake"),
        *("nvfp4-modelopt-fake-cuda", "mxfp4-modelopt-fake", "mxfp8-modelopt-fake"),
    ),
    "is stated for a GPU: PyTorch on a CPU divides a number by a tensor in two roundings": (
        *("fp8-modelopt", "fp8-modelopt-channel", "int8-modelopt", "int8-modelopt-channel", "int8-modelopt-narrow"),
        *("int8-modelopt-channel-narrow", "int4-modelopt-channel", "int4-modelopt"),
    ),
}
MODELOPT = Adapter(
    "nvidia-modelopt",
    module="modelopt",
    needs=("modelopt.torch.quantization.qtensor",),
    calls={
        f"{format}-modelopt": ProducerCall(
            partial(_modelopt, kind=f"{format.upper()}QTensor"),
            decode=partial(_modelopt_decode, kind=f"{format.upper()}QTensor"),
        )
        for format in ("nvfp4", "mxfp4", "mxfp8")
    }
    | {"fp8-modelopt-channel-cpu": ProducerCall(_modelopt_fake_fp8)},
    left_out=MODELOPT_LEFT_OUT,
)

# ---- msmodelslim: its quantizers of weights, and codes and scale bytes as its files store them


def _msmodelslim(x: np.ndarray, format: str, method: str, **settings: Any) -> Parts:
    """Quantize the weight x with AutoWeightQuantizer. settings: those of the method."""
    import torch
    from msmodelslim.core.quant_service.modelslim_v1.save.utils.pack import pack_fp4_to_uint8
    from msmodelslim.core.quantizer.base import AutoWeightQuantizer, QConfig
    from msmodelslim.ir.qal import QDType, QScope, QStorage

    is_dual = method == "dualscale"
    how = {"scope": QScope.DUAL_SCALE if is_dual else QScope.PER_BLOCK, "ext": {"axes": -1, **settings}}
    config = QConfig(dtype=QDType[format], symmetric=True, method=method, **how)
    quantizer = AutoWeightQuantizer.from_config(config)
    quantizer.init_weight(QStorage(QDType.FLOAT, to_torch(x)))
    values, scales = quantizer.get_q_storage().value, quantizer.get_q_param().ext
    codes = pack_fp4_to_uint8(values) if format == "MXFP4" else values.to(torch.float8_e4m3fn)
    exponents = (scales["scale"].reshape(len(x), -1) + 127).to(torch.uint8)
    # The decoders of mse_round and of dual-level MXFP4 fail for matrices.
    fake = None if is_dual or method == "mse_round" else quantizer(None)
    return parts(x, codes, exponents, tensor_scale=scales.get("dual_scale"), fake=fake)


MSMODELSLIM_OPTIONS: dict[str, dict[str, Any]] = {
    "mxfp4-msmodelslim": {"format": "MXFP4", "method": "minmax"},
    "mxfp4-msmodelslim-ceil-x": {"format": "MXFP4", "method": "ceil_x"},
    "mxfp4-msmodelslim-4over6": {"format": "MXFP4", "method": "fouroversix"},
    "mxfp4-msmodelslim-dual": {"format": "MXFP4", "method": "dualscale", "dual_block_size": 512},
    "mxfp4-msmodelslim-dual-64": {"format": "MXFP4", "method": "dualscale", "dual_block_size": 64},
    "mxfp8-msmodelslim": {"format": "MXFP8", "method": "minmax"},
    "mxfp8-msmodelslim-mse": {"format": "MXFP8", "method": "mse_round"},
}
MSMODELSLIM = Adapter(
    "msmodelslim",
    needs=("msmodelslim.core.quantizer.base", "msmodelslim.core.quant_service.modelslim_v1.save.utils.pack"),
    calls={
        id: (SATURATING if options["format"] == "MXFP8" else ProducerCall)(partial(_msmodelslim, **options))
        for id, options in MSMODELSLIM_OPTIONS.items()
    },
    left_out={
        "PyTorch adds the errors in an order of its own, so that nearly equal means may choose another constant": (
            *("mxfp4-msmodelslim-ceil-x-search",),
        )
    },
)

# ---- Quark: weights are scaled by its quantizers and packed by its exporter. It compiles C++ code when it is imported.


def _quark_observed(t: Any, config: Any) -> Any:
    """Return a Quark quantizer for ``config`` that has computed its scales from the weight ``t``, a torch tensor."""
    import torch
    from quark.torch.quantization.tensor_quantize import FakeQuantizeBase

    quantizer = FakeQuantizeBase.get_fake_quantize(config, device=torch.device("cpu"))
    quantizer.enable_observer()
    quantizer.disable_fake_quant()
    with torch.no_grad():
        quantizer(t)
    return quantizer


def _quark_exporter(t: Any, config: Any, quantizer: Any) -> Any:
    """Return the object with which Quark exports ``t``. ``quantizer`` must have computed its scales from ``t``."""
    import torch
    from quark.torch.export.nn.modules.realquantizer import get_real_quantizer

    where = {"device": torch.device("cpu"), "float_dtype": t.dtype}
    return get_real_quantizer(qspec=config, quantizer=quantizer, reorder=False, real_quantized=True, **where)


def _quark_mx(x: np.ndarray, spec: str, mode: str) -> Parts:
    from quark.torch.quantization.config import config as specs

    t = to_torch(x)
    config = getattr(specs, spec)(is_dynamic=False, ch_axis=-1).to_quantization_spec()
    config.scale_calculation_mode = mode
    exporter = _quark_exporter(t, config, _quark_observed(t, config))
    fake = exporter.to_fake_quantize_params(t)
    if spec == "OCP_MXFP8E4M3Spec":
        return {"fake": to_numpy(fake)}
    packed = exporter.to_real_quantize_params(t)
    exporter.maybe_convert_and_transpose_scale()
    return parts(x, packed, exporter.scale, fake=fake)


def _quark_nvfp4(x: np.ndarray, realigned: bool) -> Parts:
    from quark.torch.quantization.config.template import FP4Block16ScaleE4M3Scheme
    from quark.torch.quantization.post_calibration import realign_single_sequential_quantizer

    t = to_torch(x)
    config = FP4Block16ScaleE4M3Scheme().config.weight
    quantizer = _quark_observed(t, config)
    if realigned:
        realign_single_sequential_quantizer(quantizer)
    exporter = _quark_exporter(t, config, quantizer)
    global_scale = to_numpy(exporter[1].scale).astype(np.float32)
    packed = exporter.to_real_quantize_params(t)
    exporter.maybe_convert_and_transpose_scale()
    return parts(x, packed, exporter[0].scale, tensor_scale=global_scale)


QUARK_MX = {
    "mxfp4-quark-even": ("FP4", "even"),
    "mxfp4-quark-floor": ("FP4", "floor"),
    "mxfp4-quark-ceil": ("FP4", "ceil"),
    "mxfp6-quark-e2m3-even": ("FP6E2M3", "even"),
    "mxfp6-quark-e3m2-even": ("FP6E3M2", "even"),
    "mxfp8-quark-even": ("FP8E4M3", "even"),
}
QUARK = Adapter(
    "amd-quark",
    module="quark",
    needs=("quark.torch.export.nn.modules.realquantizer", "quark.torch.quantization.tensor_quantize"),
    calls={
        "nvfp4-quark": SATURATING(partial(_quark_nvfp4, realigned=True), exempt=(QUARK_INFINITE,)),
        "nvfp4-quark-file2file": SATURATING(partial(_quark_nvfp4, realigned=False), exempt=(QUARK_INFINITE,)),
        **{
            # Quark may have divided elements with a stored scale of 2^-126 or less by 2^-127.
            id: ProducerCall(partial(_quark_mx, spec=f"OCP_MX{spec}Spec", mode=mode), exempt=(QUARK_SMALLEST_SCALE,))
            for id, (spec, mode) in QUARK_MX.items()
        },
    },
)


# packages that need CUDA ----------------------------------------------------------------------------------------------
# Their files of plain PyTorch are loaded without the packages.


@cached
def _fouroversix_modules() -> dict[str, ModuleType]:
    """Load fouroversix's plain PyTorch modules, and return {module name: module}, stand-ins (empty modules)
    included.
    """
    names = ("", ".quantize", ".quantize.pytorch", ".kernels", ".kernels.triton", ".kernels.triton.constants")
    found = {**triton(), **packages(*(f"fouroversix{name}" for name in names))}
    files = ("utils", "quantize/utils", "quantize/dequantize_utils", "quantize/pytorch/reference")
    for file in files:
        found[f"fouroversix.{file}".replace("/", ".")] = load("fouroversix", f"{file}.py", found)
    return found


def _fouroversix_quantize(x: np.ndarray, rule: str, format: str = "nvfp4", both: bool = False) -> Parts:
    """Quantize x with fouroversix's PyTorch code."""
    modules = _fouroversix_modules()
    kinds = modules["fouroversix.utils"]
    codes, scales, _ = modules["fouroversix.quantize.pytorch.reference"].quantize_to_fp4(
        to_torch(x),
        fp4_format=kinds.DataType(format),
        scale_rule=kinds.ScaleRule(rule),
        block_scale_2d=both,
        use_blackwell_scale_layout=False,
    )
    return parts(x, codes, scales)


FOUROVERSIX_RULES: dict[str, dict[str, Any]] = {
    "nvfp4-fouroversix": {"rule": "mse"},
    "nvfp4-fouroversix-mae": {"rule": "mae"},
    "nvfp4-fouroversix-absmax": {"rule": "abs_max"},
    "nvfp4-fouroversix-6": {"rule": "static_6"},
    "nvfp4-fouroversix-6-2d": {"rule": "static_6", "both": True},
    "nvfp4-fouroversix-4": {"rule": "static_4"},
    "mxfp4-fouroversix-6": {"rule": "static_6", "format": "mxfp4"},
    "mxfp4-fouroversix-4": {"rule": "static_4", "format": "mxfp4"},
}
FOUROVERSIX_LEFT_OUT = {
    "fouroversix's Triton kernels need a GPU; recorded outputs are compared by --check": (
        *("nvfp4-fouroversix-triton", "nvfp4-fouroversix-triton-mae", "nvfp4-fouroversix-triton-6"),
        *("nvfp4-fouroversix-ms-eden", "if4-fouroversix-ms-eden"),
    ),
    "fouroversix 1.1.0 has no INT4 any more; recorded outputs are compared by --check": ("nvint4-fouroversix",),
    "fouroversix 1.1.0 has no IF4 any more; recorded outputs are compared by --check": (
        *("if4-fouroversix", "if4-fouroversix-mae", "if4-fouroversix-absmax"),
    ),
}
FOUROVERSIX = Adapter(
    "fouroversix",
    needs=(_fouroversix_modules,),
    calls={
        id: ProducerCall(
            partial(_fouroversix_quantize, **options),
            dependency_versions={} if options.get("format") == "mxfp4" else SATURATING_CASTS,
        )
        for id, options in FOUROVERSIX_RULES.items()
    },
    left_out=FOUROVERSIX_LEFT_OUT,
)


@cached
def _sglang(name: str) -> Any:
    """Return the module mxfp4_tensor or kvfp4_tensor of SGLang, which the first call loads."""
    stand_ins = packages("sglang", "sglang.srt", "sglang.srt.runtime_context") if name == "kvfp4_tensor" else {}
    return load("sglang", f"srt/layers/quantization/{name}.py", stand_ins)


@cached
def _sglang_stored() -> Any:
    """Return a subclass of SGLang's MXFP4QuantizeUtil with a constructor (shape, dtype, data), which keeps data."""

    def keep(self: Any, shape: Any, dtype: Any, data: Any) -> None:
        self.data = data

    # SGLang's fp8_utils.py defines an equivalent subclass.
    return type("Stored", (_sglang("mxfp4_tensor").MXFP4QuantizeUtil,), {"__init__": keep})


def _sglang_mxfp4(x: np.ndarray) -> Parts:
    """Quantize and dequantize x to MXFP4 with SGLang's class MXFP4QuantizeUtil."""
    import torch

    t, scale = _sglang_stored().quantize(to_torch(x), 32)
    values = _sglang_stored().dequantize(t.data, torch.float32, scale, [32])
    return parts(x, t.data, scale, values=values)


def _sglang_kv(x: np.ndarray) -> Parts:
    """Quantize x to blocks of 16 with SGLang's utility for key-value caches, without torch.compile."""
    quantize = inspect.unwrap(_sglang("kvfp4_tensor").FP4MXBlock16KVQuantizeUtil.batched_quantize)
    return parts(x, *quantize(to_torch(x)[None]))


SGLANG_ONLINE = ("nvfp4-sglang-online", "nvfp4-sglang-online-a022252")
SGLANG = Adapter(
    "sglang",
    needs=(partial(_sglang, "mxfp4_tensor"), partial(_sglang, "kvfp4_tensor")),
    calls={"mxfp4-sglang-util": ProducerCall(_sglang_mxfp4), "mxfp4-sglang-kv": ProducerCall(_sglang_kv)},
    left_out={"SGLang quantizes weights online on GPUs of compute capability 10 only": SGLANG_ONLINE},
)


TE_RECIPES = "transformer_engine.pytorch.custom_recipes"


@cached
def _te_reference() -> Any:
    """Return TE's module reference_nvfp4, which the first call loads."""

    class Quantizer:  # stands in for the class in transformer_engine.pytorch.quantized_tensor
        def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    tensors = ModuleType("transformer_engine.pytorch.quantized_tensor")
    tensors.Quantizer, tensors.QuantizedTensorStorage = Quantizer, object  # type: ignore[attr-defined]
    names = ("transformer_engine", "transformer_engine.pytorch", TE_RECIPES, f"{TE_RECIPES}.gemm")
    stand_ins = {**packages(*names), tensors.__name__: tensors}
    utils = load("transformer_engine", "pytorch/custom_recipes/reference_utils.py", stand_ins)
    stand_ins[TE_RECIPES].reference_utils = utils  # type: ignore[attr-defined]
    stand_ins[f"{TE_RECIPES}.reference_utils"] = utils
    return load("transformer_engine", "pytorch/custom_recipes/reference_nvfp4.py", stand_ins)


def _te_nvfp4(x: np.ndarray, tile: tuple[int, int] = (1, 16), **options: Any) -> Parts:
    """Quantize x to NVFP4 with Transformer Engine's class NVFP4QuantizerRef."""
    module = _te_reference()
    kind = module.reference_utils.Fp4Formats.E2M1
    quantizer = module.NVFP4QuantizerRef(kind, rowwise=True, columnwise=False, quant_tile_shape=tile, **options)
    codes, scales, *_ = quantizer._quantize(to_torch(x))
    return parts(x, codes, scales)


def _te_mxfp4(x: np.ndarray) -> Parts:
    """Quantize x to MXFP4 with NVFP4QuantizerRef and power-of-two scales."""
    quantize = _te_reference().NVFP4QuantizerRef._quantize_blockwise_reference
    codes, scales = quantize(to_torch(x), None, 32, 1, pow_2_scales=True, eps=0.0)
    exponents = np.frexp(to_numpy(scales).astype(np.float64))[1] + 126  # the E8M0 code of a power of two
    return parts(x, codes, exponents.astype(np.uint8))


def _te_four_over_six(error: str, scale_max: int, **options: Any) -> ProducerCall:
    """Return the ProducerCall for a variant of TE's 4over6, which tries two scales per block and keeps the better."""
    options |= {"nvfp4_4over6_err_mode": error.upper(), "nvfp4_e4m3_max": scale_max}
    return ProducerCall(partial(_te_nvfp4, nvfp4_use_4over6=True, **options))


TE = Adapter(
    "transformer_engine",
    needs=(_te_reference,),
    calls={
        "nvfp4-te-reference": ProducerCall(_te_nvfp4),
        "nvfp4-te-reference-2d": ProducerCall(partial(_te_nvfp4, tile=(16, 16))),
        "nvfp4-te-rowscaled": ProducerCall(partial(_te_nvfp4, row_scaled_nvfp4=True)),
        **{
            f"nvfp4-te-4over6-{error}-{scale_max}{suffix}": _te_four_over_six(error, scale_max, tile=tile)
            for error in ("mae", "mse")
            for scale_max in (448, 256)
            for suffix, tile in (("", (1, 16)), ("-2d", (16, 16)))
        },
        "nvfp4-te-4over6-mse-256-fasterr": _te_four_over_six("mse", 256, nvfp4_4over6_err_use_fast_math=True),
        "mxfp4-te": ProducerCall(_te_mxfp4),
    },
    left_out={
        "Transformer Engine's CUDA kernels need a GPU; recorded outputs are compared by --check": (
            *("nvfp4-te", "nvfp4-te-2d", "mxfp8-te", "mxfp8-te-2d", "mxfp8-te-e5m2", "mxfp8-te-e5m2-2d"),
        ),
        "NVFP4Quantizer1x64Ref is in no release; recorded outputs are compared by --check": ("nvfp4-te-1x64",),
    },
)


@cached
def _triton_kernels_mxfp() -> Any:
    """Load and return the module numerics_details.mxfp. Stand-ins replace the Triton kernels that it imports."""
    details = "vllm.third_party.triton_kernels.numerics_details"
    kernels = f"{details}.mxfp_details"
    outer = ("vllm", "vllm.third_party", "vllm.third_party.triton_kernels", details)
    stand_ins = packages(*outer, kernels, f"{kernels}._upcast_from_mxfp", f"{kernels}._downcast_to_mxfp")
    stand_ins[f"{kernels}._downcast_to_mxfp"].MXFP_BLOCK_SIZE = 32  # type: ignore[attr-defined]
    file = "third_party/triton_kernels/numerics_details/mxfp.py"
    return load("vllm", file, {**triton(), **stand_ins})


def _triton_kernels_downcast(x: np.ndarray, element: str, mode: str) -> Parts:
    """Quantize x to MXFP4 or MXFP8 with downcast_to_mxfp_torch."""
    import torch

    rounding = getattr(_triton_kernels_mxfp().DequantScaleRoundingMode, mode)
    codes, scales = _triton_kernels_mxfp().downcast_to_mxfp_torch(to_torch(x), getattr(torch, element), -1, rounding)
    return parts(x, codes, scales)


TRITON_KERNELS = Adapter(
    "vllm",
    needs=(_triton_kernels_mxfp,),
    calls={
        id: ProducerCall(partial(_triton_kernels_downcast, element=element, mode=mode))
        for id, element, mode in (
            ("mxfp4-triton-kernels", "uint8", "ROUND_UP"),
            ("mxfp4-triton-kernels-down", "uint8", "ROUND_DOWN"),
            ("mxfp8-triton-kernels", "float8_e4m3fn", "ROUND_UP"),
            ("mxfp8-triton-kernels-down", "float8_e4m3fn", "ROUND_DOWN"),
            ("mxfp8-triton-kernels-e5m2", "float8_e5m2", "ROUND_UP"),
        )
    },
    left_out={"no release holds that version of triton_kernels": ("mxfp4-triton-kernels-main",)},
    title="triton_kernels in vllm",
)


@cached
def _vllm(name: str) -> Any:
    """Load and return the module nvfp4_emulation_utils or mxfp8_utils of vLLM, with stand-ins for what it imports."""
    platform = ModuleType("vllm.platforms")
    platform.current_platform = SimpleNamespace(is_cuda_alike=lambda: False)  # type: ignore[attr-defined]
    tools = ModuleType("vllm.triton_utils")
    tools.triton, tools.tl = triton()["triton"], triton()["triton.language"]  # type: ignore[attr-defined]
    stand_ins = packages("vllm", "vllm.utils", "vllm.utils.torch_utils")
    if name == "nvfp4_emulation_utils":
        scalar_type = load("vllm", "scalar_type.py")
        named = {"platforms": platform, "triton_utils": tools, "scalar_type": scalar_type}
        stand_ins = stand_ins | {f"vllm.{name}": module for name, module in named.items()}
    return load("vllm", f"model_executor/layers/quantization/utils/{name}.py", stand_ins)


def _vllm_nvfp4(x: np.ndarray) -> Parts:
    """Quantize and fake-quantize x to NVFP4 with vLLM's emulation, which runs in PyTorch on a CPU."""
    import torch

    t = to_torch(x)
    amax = torch.clamp(t.abs().max().float(), min=1e-8)
    global_scale = 2688.0 / amax
    values, scales = _vllm("nvfp4_emulation_utils").ref_nvfp4_quant(t, global_scale, 16)
    decoded = _vllm("nvfp4_emulation_utils").ref_nvfp4_quant_dequant(t, global_scale, 16)
    codes = codes_of(to_numpy(values), "e2m1")
    return parts(x, codes, scales.to(torch.float8_e4m3fn), tensor_scale=1 / global_scale, fake=decoded)


def _vllm_mxfp8(x: np.ndarray) -> Parts:
    """Quantize and dequantize x in MXFP8 with vLLM's PyTorch code."""
    codes, scales = _vllm("mxfp8_utils")._mxfp8_e4m3_quantize_torch(to_torch(x))
    decoded = _vllm("mxfp8_utils").dequant_mxfp8_to_bf16(codes, scales)
    return parts(x, codes, scales, values_bfloat16=decoded)


VLLM = Adapter(
    "vllm",
    needs=(partial(_vllm, "nvfp4_emulation_utils"), partial(_vllm, "mxfp8_utils")),
    calls={
        "nvfp4-vllm-emulation": ProducerCall(_vllm_nvfp4),
        "mxfp8-modelopt": ProducerCall(_vllm_mxfp8),  # also named mxfp8-vllm
    },
    left_out={
        "vLLM's CUDA kernel needs a GPU of compute capability 10 or 12": (
            *("nvfp4-vllm-kv", "nvfp4-vllm-static-divisor"),
        ),
        "vLLM quantizes weights online on GPUs of compute capability 10 only": ("nvfp4-vllm-online",),
        "vLLM's Triton kernels need a GPU": ("nvfp4-vllm-emulation-cuda", "mxfp4-vllm"),
        "vLLM's Triton kernels need a GPU, or Triton's interpreter": ("mxfp4-vllm-cpu",),
    },
)
