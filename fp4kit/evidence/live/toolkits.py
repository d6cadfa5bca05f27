"""Define the adapters of toolkits: auto-round, comfy-kitchen, compressed-tensors, Model-Optimizer and Quark."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import fp4kit
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
    to_numpy,
    to_torch,
)
from fp4kit.layouts import swizzle_scales, unswizzle_scales


def _auto_round_prepare() -> None:
    """Import the modules of auto-round that this adapter's calls use. Raise ImportError if one is missing."""
    import auto_round.data_type.mxfp
    import auto_round.data_type.nvfp
    import auto_round.export.export_to_autoround.qlinear_fp  # noqa: F401


def _auto_round_packed(
    values: Any, scales: Any, bits: int, size: int, kind: str, global_scale: Any = None
) -> dict[str, np.ndarray]:
    """Pack quantized weights with auto-round's QuantLinear, and return what it stores."""
    import torch
    from auto_round.export.export_to_autoround.qlinear_fp import QuantLinear

    linear = torch.nn.Linear(values.shape[1], values.shape[0], bias=False)
    linear.weight = torch.nn.Parameter(values, requires_grad=False)
    stored = QuantLinear(bits, size, values.shape[1], values.shape[0], False, data_type=kind, act_bits=16)
    stored.pack(linear, scales, global_scale=global_scale)
    codes = to_numpy(stored.weight) if bits == 8 else fp4kit.unpack(to_numpy(stored.weight_packed))
    return {"codes": codes, "block_scale": to_numpy(stored.weight_scale).reshape(values.shape[0], -1)}


def _auto_round_mx(x: np.ndarray, function: str, bits: int) -> Parts:
    """Quantize x to MXFP4 or MXFP8 with a function of auto_round.data_type.mxfp, and pack the result."""
    from auto_round.data_type import mxfp

    values, exponents, _ = getattr(mxfp, function)(to_torch(x), bits=bits, group_size=32)
    return _auto_round_packed(values, exponents, bits, 32, f"mx_fp{bits}")


def _auto_round_nvfp4(x: np.ndarray, function: str, fake: bool = False) -> Parts:
    """Quantize x to NVFP4 with a function of auto_round.data_type.nvfp."""
    import torch
    from auto_round.data_type import nvfp

    t = to_torch(x)
    global_scale = nvfp.calculate_gparam(t)
    values, scales, _ = getattr(nvfp, function)(t, global_scale=global_scale)
    if fake:
        return {"fake": to_numpy(values)}
    parts = _auto_round_packed(values, scales, 4, 16, "nv_fp4", global_scale)
    return {**parts, "tensor_scale": to_numpy(nvfp.get_reciprocal(global_scale).to(torch.float32))}


def _auto_round_mx_call(function: str, bits: int) -> ProducerCall:
    """Return the ProducerCall for a function of auto_round.data_type.mxfp, such as "quant_mx"."""
    return ProducerCall(partial(_auto_round_mx, function=function, bits=bits))


AUTO_ROUND = Adapter(
    name="auto-round",
    module="auto_round",
    dependencies=("torch",),
    prepare=_auto_round_prepare,
    calls={
        "nvfp4-auto-round": ProducerCall(partial(_auto_round_nvfp4, function="nv_fp4")),
        "nvfp4-auto-round-fake": ProducerCall(partial(_auto_round_nvfp4, function="nv_fp4", fake=True)),
        "nvfp4-auto-round-opt": ProducerCall(partial(_auto_round_nvfp4, function="opt_rtn_fast_nvfp4")),
        "mxfp4-auto-round": _auto_round_mx_call("quant_mx", 4),
        "mxfp4-auto-round-opt": _auto_round_mx_call("quant_mx_opt_rtn", 4),
        "mxfp4-auto-round-rceil": _auto_round_mx_call("quant_mx_rceil", 4),
        "mxfp4-auto-round-rceil-v2": _auto_round_mx_call("quant_mx_rceil_v2", 4),
        "mxfp8-auto-round": replace(_auto_round_mx_call("quant_mx", 8), dependency_versions=SATURATING_CASTS),
        "mxfp8-auto-round-rceil": replace(
            _auto_round_mx_call("quant_mx_rceil", 8), dependency_versions=SATURATING_CASTS
        ),
    },
)


COMFY_KITCHEN_LAYOUT = "swizzled_128x4"


def _comfy_kitchen_eager() -> Any:
    """Import and return the module of comfy-kitchen that holds its eager back end."""
    from comfy_kitchen.backends.eager import quantization

    return quantization


def _comfy_kitchen_linear(scales: Any, rows: int, blocks: int) -> np.ndarray:
    """Return comfy-kitchen's swizzled block scales in the linear layout, without padding: uint8 (rows, blocks)."""
    import torch

    return np.asarray(unswizzle_scales(to_numpy(scales.view(torch.uint8)), COMFY_KITCHEN_LAYOUT, (rows, blocks)))


def _comfy_kitchen_nvfp4(x: np.ndarray, is_given: bool) -> Parts:
    """Quantize and dequantize x to NVFP4 as TensorCoreNVFP4Layout does."""
    import torch

    t = to_torch(x)
    amax = torch.amax(t.abs())
    scale = ((amax.float() if is_given else amax) / 2688.0).to(torch.float32)
    codes, scales = _comfy_kitchen_eager().quantize_nvfp4(t, scale)
    values = {
        d: _comfy_kitchen_eager().dequantize_nvfp4(codes, scale, scales, d) for d in (torch.float32, torch.bfloat16)
    }
    packed = to_numpy(codes)
    return {
        "codes": fp4kit.unpack(packed << 4 | packed >> 4),
        "block_scale": _comfy_kitchen_linear(scales, len(x), x.shape[1] // 16),
        "tensor_scale": to_numpy(scale),
        "values": to_numpy(values[torch.float32]),
        "values_bfloat16": to_numpy(values[torch.bfloat16]),
    }


def _comfy_kitchen_mxfp8(x: np.ndarray) -> Parts:
    """Quantize x to MXFP8 with comfy-kitchen, and dequantize the result."""
    import torch

    codes, scales = _comfy_kitchen_eager().quantize_mxfp8(to_torch(x))
    values = {d: _comfy_kitchen_eager().dequantize_mxfp8(codes, scales, d) for d in (torch.float32, torch.bfloat16)}
    return {
        "codes": to_numpy(codes.view(torch.uint8)),
        "block_scale": _comfy_kitchen_linear(scales, len(x), x.shape[1] // 32),
        "values": to_numpy(values[torch.float32]),
        "values_bfloat16": to_numpy(values[torch.bfloat16]),
    }


def _comfy_kitchen_fp8(x: np.ndarray, name: str) -> Parts:
    """Quantize and dequantize x to FP8 with the scale that ComfyUI computes: amax / max, in float32."""
    import torch

    t, dtype = to_torch(x), getattr(torch, name)
    scale = torch.amax(t.abs()).to(torch.float32) / torch.finfo(dtype).max
    codes = _comfy_kitchen_eager().quantize_per_tensor_fp8(t, scale, dtype)
    values = {
        d: _comfy_kitchen_eager().dequantize_per_tensor_fp8(codes, scale, d) for d in (torch.float32, torch.bfloat16)
    }
    return {
        "codes": to_numpy(codes.view(torch.uint8)),
        "tensor_scale": to_numpy(scale),
        "values": to_numpy(values[torch.float32]),
        "values_bfloat16": to_numpy(values[torch.bfloat16]),
    }


def _comfy_kitchen_swizzled(q: fp4kit.Quantized) -> Any:
    """Return the block scales of q, which are in the linear layout, as the swizzled torch tensor for comfy-kitchen."""
    rows = -(-q.block_scale.shape[0] // 128) * 128
    return to_torch(np.asarray(swizzle_scales(q.block_scale, COMFY_KITCHEN_LAYOUT)).reshape(rows, -1))


def _comfy_kitchen_decode_nvfp4(q: fp4kit.Quantized) -> np.ndarray:
    """Return the values that comfy-kitchen's dequantize_nvfp4 decodes from q, in q's shape and dtype."""
    import torch

    codes, scale = to_torch(q.packed << 4 | q.packed >> 4), to_torch(np.asarray(q.tensor_scale))
    scales = _comfy_kitchen_swizzled(q).view(torch.float8_e4m3fn)
    return to_numpy(_comfy_kitchen_eager().dequantize_nvfp4(codes, scale, scales, getattr(torch, str(q.dtype))))


def _comfy_kitchen_decode_mxfp8(q: fp4kit.Quantized) -> np.ndarray:
    """Return the values that comfy-kitchen's dequantize_mxfp8 decodes from q, in q's shape and dtype."""
    import torch

    codes, scales = to_torch(q.packed).view(torch.float8_e4m3fn), _comfy_kitchen_swizzled(q).view(torch.float8_e8m0fnu)
    return to_numpy(_comfy_kitchen_eager().dequantize_mxfp8(codes, scales, getattr(torch, str(q.dtype))))


COMFY_KITCHEN = Adapter(
    name="comfy-kitchen",
    module="comfy_kitchen",
    dependencies=("torch",),
    calls={
        **{
            id: ProducerCall(
                partial(_comfy_kitchen_nvfp4, is_given=is_given),
                exempt=(NAN_VALUE,),
                dependency_versions=SATURATING_CASTS,
                decode=_comfy_kitchen_decode_nvfp4,
            )
            for id, is_given in (("nvfp4-comfy-kitchen", False), ("nvfp4-comfy-kitchen-static", True))
        },
        "mxfp8-comfy-kitchen": ProducerCall(
            _comfy_kitchen_mxfp8,
            columns=32,
            exempt=(ZERO_OF_ZEROS,),
            dependency_versions=SATURATING_CASTS,
            decode=_comfy_kitchen_decode_mxfp8,
        ),
        **{
            id: ProducerCall(partial(_comfy_kitchen_fp8, name=name))
            for id, name in (("fp8-comfy-kitchen", "float8_e4m3fn"), ("fp8-comfy-kitchen-e5m2", "float8_e5m2"))
        },
    },
    left_out=dict.fromkeys(
        ("nvfp4-comfy-kitchen-stochastic", "nvfp4-comfy-kitchen-stochastic-cuda"),
        "ComfyUI, whose stochastic rounding this is, is not a package; recorded outputs are compared by --check",
    ),
)


def _compressed_tensors_prepare() -> None:
    """Import the modules of compressed-tensors that this adapter's calls use. Raise ImportError if one is missing."""
    import compressed_tensors.compressors  # noqa: F401


def _compressed_tensors_scheme(bits: int) -> Any:
    """Return compressed-tensors' QuantizationScheme for weights in an MX format (blocks of 32)."""
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    group = {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    args = QuantizationArgs(num_bits=bits, type="float", symmetric=True, **group)
    return QuantizationScheme(targets=["Linear"], weights=args)


def _compressed_tensors_nvfp4(x: np.ndarray) -> Parts:
    """Compress and decompress x in NVFP4."""
    import torch
    from compressed_tensors.compressors import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    group = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, **group)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = to_torch(x)
    divisor = generate_gparam(weight.min(), weight.max())
    groups = weight.unflatten(-1, (-1, 16))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, divisor)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": divisor}
    stored = NVFP4PackedCompressor.compress(state, scheme)
    return {
        "codes": fp4kit.unpack(to_numpy(stored["weight_packed"])),
        "block_scale": to_numpy(stored["weight_scale"]),
        "tensor_scale": np.float32(1) / to_numpy(divisor),
        "values_bfloat16": to_numpy(NVFP4PackedCompressor.decompress(stored, scheme)["weight"]),
    }


def _compressed_tensors_stored(x: np.ndarray, bits: int, compressor: Any) -> tuple[Any, Any]:
    """Compress x in MXFP4, MXFP6 or MXFP8, and decompress the result."""
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme, weight = _compressed_tensors_scheme(bits), to_torch(x)
    groups = weight.unflatten(-1, (-1, 32))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    stored = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    return stored, compressor.decompress(stored, scheme)["weight"]


def _compressed_tensors_mxfp4(x: np.ndarray) -> Parts:
    """Compress x to MXFP4 with compressed-tensors, and decompress the result."""
    from compressed_tensors.compressors import MXFP4PackedCompressor

    stored, values = _compressed_tensors_stored(x, 4, MXFP4PackedCompressor)
    codes = fp4kit.unpack(to_numpy(stored["weight_packed"]))
    return {"codes": codes, "block_scale": to_numpy(stored["weight_scale"]), "values_bfloat16": to_numpy(values)}


def _compressed_tensors_mxfp6(x: np.ndarray) -> Parts:
    """Compress and decompress x in MXFP6 E2M3."""
    from compressed_tensors.compressors import MXFP6PackedCompressor

    stored, values = _compressed_tensors_stored(x, 6, MXFP6PackedCompressor)
    bytes_ = to_numpy(stored["weight_packed"]).reshape(x.shape[0], -1, 3).astype(np.uint32)
    words = bytes_[..., 0] | bytes_[..., 1] << 8 | bytes_[..., 2] << 16
    codes = (words[..., None] >> np.arange(0, 24, 6, dtype=np.uint32) & 63).astype(np.uint8).reshape(x.shape)
    return {"codes": codes, "block_scale": to_numpy(stored["weight_scale"]), "values_bfloat16": to_numpy(values)}


def _compressed_tensors_mxfp8(x: np.ndarray) -> Parts:
    """Compress and decompress x in MXFP8."""
    from compressed_tensors.compressors import MXFP8QuantizationCompressor

    stored, values = _compressed_tensors_stored(x, 8, MXFP8QuantizationCompressor)
    return {
        "codes": to_numpy(stored["weight"]),
        "block_scale": to_numpy(stored["weight_scale"]),
        f"values_{values.dtype}".replace("torch.", "").replace("values_float32", "values"): to_numpy(values),
    }


COMPRESSED_TENSORS_MX = partial(ProducerCall, exempt=(ROUNDS_BEYOND_DTYPE,))
COMPRESSED_TENSORS = Adapter(
    name="compressed-tensors",
    module="compressed_tensors",
    dependencies=("torch",),
    prepare=_compressed_tensors_prepare,
    calls={
        "nvfp4-compressed-tensors": ProducerCall(_compressed_tensors_nvfp4),
        "mxfp4-compressed-tensors": COMPRESSED_TENSORS_MX(_compressed_tensors_mxfp4),
        "mxfp6-compressed-tensors": COMPRESSED_TENSORS_MX(_compressed_tensors_mxfp6),
        "mxfp8-compressed-tensors": COMPRESSED_TENSORS_MX(_compressed_tensors_mxfp8),
    },
)


def _modelopt_prepare() -> None:
    """Import the quantized tensor classes of Model-Optimizer. Raise ImportError if they are missing."""
    import modelopt.torch.quantization.qtensor  # noqa: F401


def _modelopt_values(t: Any, **scales: Any) -> dict[str, np.ndarray]:
    """Decode a quantized tensor of Model-Optimizer to float32, float16 and bfloat16."""
    import torch

    names = {"values": torch.float32, "values_float16": torch.float16, "values_bfloat16": torch.bfloat16}
    return {name: to_numpy(t.dequantize(dtype, **scales)) for name, dtype in names.items()}


def _modelopt_nvfp4(x: np.ndarray) -> Parts:
    """Quantize x with NVFP4QTensor."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    t, scale, double_scale = NVFP4QTensor.quantize(to_torch(x), 16)
    return {
        "codes": fp4kit.unpack(to_numpy(t._quantized_data)),
        "block_scale": to_numpy(scale),
        "tensor_scale": to_numpy(double_scale),
        **_modelopt_values(t, scale=scale, double_scale=double_scale, block_sizes={-1: 16}),
    }


def _modelopt_mxfp4(x: np.ndarray) -> Parts:
    """Quantize x with MXFP4QTensor."""
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    t, scale = MXFP4QTensor.quantize(to_torch(x), 32)
    return {
        "codes": fp4kit.unpack(to_numpy(t._quantized_data)),
        "block_scale": to_numpy(scale).reshape(*x.shape[:-1], -1),
        **_modelopt_values(t, scale=scale, block_sizes={-1: 32}),
    }


def _modelopt_mxfp8(x: np.ndarray) -> Parts:
    """Quantize x with MXFP8QTensor."""
    from modelopt.torch.quantization.qtensor import MXFP8QTensor

    t, scale = MXFP8QTensor.quantize(to_torch(x))
    return {"codes": to_numpy(t._quantized_data), "block_scale": to_numpy(scale), **_modelopt_values(t, scale=scale)}


def _modelopt_decode(q: fp4kit.Quantized, kind: str) -> np.ndarray:
    """Return the values that Model-Optimizer decodes from q, in q's dtype and shape."""
    import torch
    from modelopt.torch.quantization import qtensor

    dtype = getattr(torch, str(q.dtype))
    codes, scales = to_torch(q.packed), to_torch(q.block_scale)
    given: dict[str, Any] = {"scale": scales, "block_sizes": {-1: q.recipe.block_size}}
    if kind == "NVFP4QTensor":
        given = {
            **given,
            "scale": scales.view(torch.float8_e4m3fn),
            "double_scale": to_torch(np.asarray(q.tensor_scale)),
        }
    if kind == "MXFP8QTensor":
        codes = codes.view(torch.float8_e4m3fn)
    t = getattr(qtensor, kind)(torch.Size(q.shape), dtype, codes)
    return to_numpy(t.dequantize(dtype, **given)).reshape(q.shape)


MODELOPT_KERNEL = "a kernel of Model-Optimizer, which needs a GPU"
MODELOPT_DIVIDED = (
    *("fp8-modelopt", "fp8-modelopt-channel", "int8-modelopt", "int8-modelopt-channel", "int8-modelopt-narrow"),
    *("int8-modelopt-channel-narrow", "int4-modelopt-channel", "int4-modelopt"),
)
MODELOPT = Adapter(
    name="nvidia-modelopt",
    module="modelopt",
    dependencies=("torch",),
    prepare=_modelopt_prepare,
    calls={
        "nvfp4-modelopt": ProducerCall(_modelopt_nvfp4, decode=partial(_modelopt_decode, kind="NVFP4QTensor")),
        "mxfp4-modelopt": ProducerCall(_modelopt_mxfp4, decode=partial(_modelopt_decode, kind="MXFP4QTensor")),
        "mxfp8-modelopt": ProducerCall(_modelopt_mxfp8, decode=partial(_modelopt_decode, kind="MXFP8QTensor")),
    },
    left_out={
        **dict.fromkeys(
            ("nvfp4-modelopt-static", "nvfp4-modelopt-static-4over6"), "needs a calibrated quantizer of a model"
        ),
        "nvfp4-modelopt-mse": f"its sweep is {MODELOPT_KERNEL}",
        **dict.fromkeys(("nvfp4-modelopt-fake", "nvfp4-modelopt-static-fake"), f"is {MODELOPT_KERNEL}"),
        **dict.fromkeys(
            ("nvfp4-modelopt-fake-cuda", "mxfp4-modelopt-fake", "mxfp8-modelopt-fake"), f"is {MODELOPT_KERNEL}"
        ),
        **dict.fromkeys(
            MODELOPT_DIVIDED, "is stated for a GPU: PyTorch on a CPU divides a number by a tensor in two roundings"
        ),
    },
)


def _quark_prepare() -> None:
    """Import the modules of Quark that this adapter's calls use. Raise ImportError if one is missing."""
    import quark.torch.export.nn.modules.realquantizer
    import quark.torch.quantization.tensor_quantize  # noqa: F401


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
    """Return the object with which Quark exports the weight ``t``."""
    # ``quantizer`` must have computed its scales from ``t``.
    import torch
    from quark.torch.export.nn.modules.realquantizer import get_real_quantizer

    where = {"device": torch.device("cpu"), "float_dtype": t.dtype}
    return get_real_quantizer(qspec=config, quantizer=quantizer, reorder=False, real_quantized=True, **where)


def _quark_mx(x: np.ndarray, spec: str, mode: str) -> Parts:
    """Quantize and fake-quantize x to MXFP4, MXFP6 or MXFP8 with Quark."""
    from quark.torch.quantization.config import config as specs

    t = to_torch(x)
    config = getattr(specs, spec)(is_dynamic=False, ch_axis=-1).to_quantization_spec()
    config.scale_calculation_mode = mode
    exporter = _quark_exporter(t, config, _quark_observed(t, config))
    fake = exporter.to_fake_quantize_params(t)
    if spec == "OCP_MXFP8E4M3Spec":
        return {"fake": to_numpy(fake)}
    packed = to_numpy(exporter.to_real_quantize_params(t))
    exporter.maybe_convert_and_transpose_scale()
    codes = fp4kit.unpack(packed) if "FP4" in spec else _quark_six_bits(packed)
    return {"codes": codes, "block_scale": to_numpy(exporter.scale).view(np.uint8), "fake": to_numpy(fake)}


def _quark_six_bits(packed: np.ndarray) -> np.ndarray:
    """Unpack 6-bit codes: each three bytes hold four codes, the first in the lowest bits. Return one code per byte."""
    triples = packed.reshape(len(packed), -1, 3).astype(np.uint32)
    words = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    return (words[..., None] >> np.arange(0, 24, 6, dtype=np.uint32) & 63).astype(np.uint8).reshape(len(packed), -1)


def _quark_nvfp4(x: np.ndarray, realigned: bool) -> Parts:
    """Quantize x to NVFP4 with Quark."""
    from quark.torch.quantization.config.template import FP4Block16ScaleE4M3Scheme
    from quark.torch.quantization.post_calibration import realign_single_sequential_quantizer

    t = to_torch(x)
    config = FP4Block16ScaleE4M3Scheme().config.weight
    quantizer = _quark_observed(t, config)
    if realigned:
        realign_single_sequential_quantizer(quantizer)
    exporter = _quark_exporter(t, config, quantizer)
    global_scale = to_numpy(exporter[1].scale)
    codes = fp4kit.unpack(to_numpy(exporter.to_real_quantize_params(t)))
    exporter.maybe_convert_and_transpose_scale()
    scales = to_numpy(exporter[0].scale).reshape(len(x), -1)
    return {"codes": codes, "block_scale": scales, "tensor_scale": global_scale.astype(np.float32)}


def _quark_mx_call(spec: str, mode: str = "even") -> ProducerCall:
    """Return the ProducerCall for MXFP4, MXFP6 or MXFP8 of Quark."""
    # Differences are excused in elements whose stored scale is 2^-126 or less, because Quark may have divided them by
    # 2^-127.
    return ProducerCall(partial(_quark_mx, spec=f"OCP_MX{spec}Spec", mode=mode), exempt=(QUARK_SMALLEST_SCALE,))


QUARK = Adapter(
    name="amd-quark",
    module="quark",
    dependencies=("torch",),
    prepare=_quark_prepare,
    calls={
        "nvfp4-quark": ProducerCall(
            partial(_quark_nvfp4, realigned=True), exempt=(QUARK_INFINITE,), dependency_versions=SATURATING_CASTS
        ),
        "nvfp4-quark-file2file": ProducerCall(
            partial(_quark_nvfp4, realigned=False), exempt=(QUARK_INFINITE,), dependency_versions=SATURATING_CASTS
        ),
        "mxfp4-quark-even": _quark_mx_call("FP4"),
        "mxfp4-quark-floor": _quark_mx_call("FP4", "floor"),
        "mxfp4-quark-ceil": _quark_mx_call("FP4", "ceil"),
        "mxfp6-quark-e2m3-even": _quark_mx_call("FP6E2M3"),
        "mxfp6-quark-e3m2-even": _quark_mx_call("FP6E3M2"),
        "mxfp8-quark-even": _quark_mx_call("FP8E4M3"),
    },
)

ADAPTERS = {
    "auto_round": AUTO_ROUND,
    "comfy_kitchen": COMFY_KITCHEN,
    "compressed_tensors": COMPRESSED_TENSORS,
    "modelopt": MODELOPT,
    "quark": QUARK,
}
