"""Define the adapters of packages that need CUDA when they are imported: fouroversix, SGLang, Transformer Engine,
triton_kernels, vLLM. Their files of plain PyTorch are loaded without the packages.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

import fp4kit
from fp4kit.evidence.live.adapter import (
    SATURATING_CASTS,
    Adapter,
    Parts,
    ProducerCall,
    cached,
    codes_of,
    load,
    packages,
    to_numpy,
    to_torch,
    triton,
)

FOUROVERSIX_QUANTIZE = "fouroversix.quantize"


@cached
def _fouroversix_modules() -> dict[str, ModuleType]:
    """Load fouroversix's plain PyTorch modules, and return {module name: module}, stand-ins (empty modules)
    included.
    """
    found = packages(
        "fouroversix",
        FOUROVERSIX_QUANTIZE,
        f"{FOUROVERSIX_QUANTIZE}.pytorch",
        "fouroversix.kernels",
        "fouroversix.kernels.triton",
    )
    found = {**triton(), **found, "fouroversix.kernels.triton.constants": packages("constants")["constants"]}
    files = ("utils", "quantize/utils", "quantize/dequantize_utils", "quantize/pytorch/reference")
    for file in files:
        found[f"fouroversix.{file}".replace("/", ".")] = load("fouroversix", f"{file}.py", found)
    return found


def _fouroversix_quantize(x: np.ndarray, rule: str, format: str = "nvfp4", both: bool = False) -> Parts:
    """Quantize x with fouroversix's PyTorch code."""
    modules = _fouroversix_modules()
    kinds = modules["fouroversix.utils"]
    codes, scales, _ = modules[f"{FOUROVERSIX_QUANTIZE}.pytorch.reference"].quantize_to_fp4(
        to_torch(x),
        fp4_format=kinds.DataType(format),
        scale_rule=kinds.ScaleRule(rule),
        block_scale_2d=both,
        use_blackwell_scale_layout=False,
    )
    size = 32 if format == "mxfp4" else 16
    return {
        "codes": fp4kit.unpack(to_numpy(codes)),
        "block_scale": to_numpy(scales).reshape(len(x), x.shape[1] // size),
    }


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
    name="fouroversix",
    module="fouroversix",
    dependencies=("torch",),
    prepare=_fouroversix_modules,
    calls={
        id: ProducerCall(
            partial(_fouroversix_quantize, **options),
            dependency_versions={} if options.get("format") == "mxfp4" else SATURATING_CASTS,
        )
        for id, options in FOUROVERSIX_RULES.items()
    },
    left_out={id: reason for reason, ids in FOUROVERSIX_LEFT_OUT.items() for id in ids},
)


SGLANG_QUANTIZATION = "srt/layers/quantization"


@cached
def _sglang_mxfp4_tensor() -> Any:
    """Return SGLang's module mxfp4_tensor, which the first call loads. Raise ImportError if it is missing."""
    return load("sglang", f"{SGLANG_QUANTIZATION}/mxfp4_tensor.py")


@cached
def _sglang_kvfp4_tensor() -> Any:
    """Return SGLang's module kvfp4_tensor, which the first call loads."""
    return load(
        "sglang",
        f"{SGLANG_QUANTIZATION}/kvfp4_tensor.py",
        packages("sglang", "sglang.srt", "sglang.srt.runtime_context"),
    )


@cached
def _sglang_stored() -> Any:
    """Return a subclass of SGLang's MXFP4QuantizeUtil with a constructor (shape, dtype, data), which keeps data."""

    def keep(self: Any, shape: Any, dtype: Any, data: Any) -> None:
        self.data = data

    # SGLang's fp8_utils.py defines an equivalent subclass.
    return type("Stored", (_sglang_mxfp4_tensor().MXFP4QuantizeUtil,), {"__init__": keep})


def _sglang_mxfp4(x: np.ndarray) -> Parts:
    """Quantize and dequantize x to MXFP4 with SGLang's class MXFP4QuantizeUtil."""
    import torch

    t, scale = _sglang_stored().quantize(to_torch(x), 32)
    values = _sglang_stored().dequantize(t.data, torch.float32, scale, [32])
    return {
        "codes": fp4kit.unpack(to_numpy(t.data)),
        "block_scale": to_numpy(scale).reshape(len(x), -1),
        "values": to_numpy(values),
    }


def _sglang_kv(x: np.ndarray) -> Parts:
    """Quantize x to blocks of 16 with SGLang's utility for key-value caches, without torch.compile."""
    quantize = inspect.unwrap(_sglang_kvfp4_tensor().FP4MXBlock16KVQuantizeUtil.batched_quantize)
    codes, scale = quantize(to_torch(x)[None])
    return {"codes": fp4kit.unpack(to_numpy(codes[0])), "block_scale": to_numpy(scale).reshape(len(x), -1)}


def _sglang_prepare() -> None:
    """Load both modules of SGLang that this adapter's calls use. Raise ImportError if one of them cannot be loaded."""
    _sglang_mxfp4_tensor()
    _sglang_kvfp4_tensor()


SGLANG = Adapter(
    name="sglang",
    module="sglang",
    dependencies=("torch",),
    prepare=_sglang_prepare,
    calls={"mxfp4-sglang-util": ProducerCall(_sglang_mxfp4), "mxfp4-sglang-kv": ProducerCall(_sglang_kv)},
    left_out={"nvfp4-sglang-online": "SGLang quantizes weights online on GPUs of compute capability 10 only"},
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
    return {"codes": fp4kit.unpack(to_numpy(codes)), "block_scale": to_numpy(scales)}


def _te_mxfp4(x: np.ndarray) -> Parts:
    """Quantize x to MXFP4 with NVFP4QuantizerRef and power-of-two scales."""
    quantize = _te_reference().NVFP4QuantizerRef._quantize_blockwise_reference
    codes, scales = quantize(to_torch(x), None, 32, 1, pow_2_scales=True, eps=0.0)
    exponents = np.frexp(to_numpy(scales).astype(np.float64))[1] + 126  # the E8M0 code of a power of two
    return {"codes": fp4kit.unpack(to_numpy(codes)), "block_scale": exponents.astype(np.uint8)}


def _te_four_over_six(error: str, scale_max: int, **options: Any) -> ProducerCall:
    """Return the ProducerCall for a variant of TE's 4over6, which tries two scales per block and keeps the better."""
    options |= {"nvfp4_4over6_err_mode": error.upper(), "nvfp4_e4m3_max": scale_max}
    return ProducerCall(partial(_te_nvfp4, nvfp4_use_4over6=True, **options))


TE_KERNELS = "Transformer Engine's CUDA kernels need a GPU; recorded outputs are compared by --check"
TE = Adapter(
    name="transformer_engine",
    module="transformer_engine",
    dependencies=("torch",),
    prepare=_te_reference,
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
    left_out=dict.fromkeys(
        ("nvfp4-te", "nvfp4-te-2d", "mxfp8-te", "mxfp8-te-2d", "mxfp8-te-e5m2", "mxfp8-te-e5m2-2d"), TE_KERNELS
    ),
)


TRITON_KERNELS_DETAILS = "vllm.third_party.triton_kernels.numerics_details"


@cached
def _triton_kernels_mxfp() -> Any:
    """Load and return the module numerics_details.mxfp. Stand-ins replace the Triton kernels that it imports."""
    names = (
        "vllm",
        "vllm.third_party",
        "vllm.third_party.triton_kernels",
        TRITON_KERNELS_DETAILS,
        f"{TRITON_KERNELS_DETAILS}.mxfp_details",
    )
    kernels = {
        f"{TRITON_KERNELS_DETAILS}.mxfp_details.{name}": None for name in ("_upcast_from_mxfp", "_downcast_to_mxfp")
    }
    stand_ins = packages(*names, *kernels)
    stand_ins[f"{TRITON_KERNELS_DETAILS}.mxfp_details._downcast_to_mxfp"].MXFP_BLOCK_SIZE = 32  # type: ignore[attr-defined]
    file = "third_party/triton_kernels/numerics_details/mxfp.py"
    return load("vllm", file, {**triton(), **stand_ins})


def _triton_kernels_downcast(x: np.ndarray, element: str, mode: str) -> Parts:
    """Quantize x to MXFP4 or MXFP8 with downcast_to_mxfp_torch."""
    import torch

    rounding = getattr(_triton_kernels_mxfp().DequantScaleRoundingMode, mode)
    codes, scales = _triton_kernels_mxfp().downcast_to_mxfp_torch(to_torch(x), getattr(torch, element), -1, rounding)
    stored = to_numpy(codes)
    return {"codes": fp4kit.unpack(stored) if element == "uint8" else stored, "block_scale": to_numpy(scales)}


TRITON_KERNELS = Adapter(
    name="vllm",
    module="vllm",
    dependencies=("torch",),
    prepare=_triton_kernels_mxfp,
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
    left_out={"mxfp4-triton-kernels-main": "no release holds that version of triton_kernels"},
    title="triton_kernels in vllm",
)


VLLM_UTILS = "model_executor/layers/quantization/utils"
VLLM_NAMES = ("vllm", "vllm.utils", "vllm.utils.torch_utils")


@cached
def _vllm_emulation() -> Any:
    """Return vLLM's module nvfp4_emulation_utils, which the first call loads."""
    platform = ModuleType("vllm.platforms")
    platform.current_platform = _vllm_Cpu()  # type: ignore[attr-defined]
    tools = ModuleType("vllm.triton_utils")
    tools.triton, tools.tl = triton()["triton"], triton()["triton.language"]  # type: ignore[attr-defined]
    needed = {
        "vllm.platforms": platform,
        "vllm.triton_utils": tools,
        "vllm.scalar_type": load("vllm", "scalar_type.py"),
    }
    return load("vllm", f"{VLLM_UTILS}/nvfp4_emulation_utils.py", {**packages(*VLLM_NAMES), **needed})


class _vllm_Cpu:
    """A stand-in for vLLM's platform object, for machines without a GPU."""

    def is_cuda_alike(self) -> bool:
        return False


@cached
def _vllm_mxfp8_utils() -> Any:
    """Load and return vLLM's module mxfp8_utils. Stand-ins replace the modules of vLLM that it imports."""
    return load("vllm", f"{VLLM_UTILS}/mxfp8_utils.py", packages(*VLLM_NAMES))


def _vllm_nvfp4(x: np.ndarray) -> Parts:
    """Quantize and fake-quantize x to NVFP4 with vLLM's emulation, which runs in PyTorch on a CPU."""
    import torch

    t = to_torch(x)
    amax = torch.clamp(t.abs().max().float(), min=1e-8)
    global_scale = 2688.0 / amax
    values, scales = _vllm_emulation().ref_nvfp4_quant(t, global_scale, 16)
    decoded = _vllm_emulation().ref_nvfp4_quant_dequant(t, global_scale, 16)
    return {
        "codes": codes_of(to_numpy(values), "e2m1"),
        "block_scale": to_numpy(scales.to(torch.float8_e4m3fn)),
        "tensor_scale": to_numpy(1 / global_scale),
        "fake": to_numpy(decoded),
    }


def _vllm_mxfp8(x: np.ndarray) -> Parts:
    """Quantize and dequantize x in MXFP8 with vLLM's PyTorch code."""
    codes, scales = _vllm_mxfp8_utils()._mxfp8_e4m3_quantize_torch(to_torch(x))
    decoded = _vllm_mxfp8_utils().dequant_mxfp8_to_bf16(codes, scales)
    return {"codes": to_numpy(codes), "block_scale": to_numpy(scales), "values_bfloat16": to_numpy(decoded)}


def _vllm_prepare() -> None:
    """Load both modules of vLLM that this adapter's calls use. Raise ImportError if one of them cannot be loaded."""
    _vllm_emulation()
    _vllm_mxfp8_utils()


VLLM = Adapter(
    name="vllm",
    module="vllm",
    dependencies=("torch",),
    prepare=_vllm_prepare,
    calls={
        "nvfp4-vllm-emulation": ProducerCall(_vllm_nvfp4),
        "mxfp8-modelopt": ProducerCall(_vllm_mxfp8),  # also named mxfp8-vllm
    },
    left_out={
        "nvfp4-vllm-kv": "vLLM's CUDA kernel needs a GPU of compute capability 10 or 12",
        "nvfp4-vllm-static-divisor": "vLLM's CUDA kernel needs a GPU of compute capability 10 or 12",
        "nvfp4-vllm-online": "vLLM quantizes weights online on GPUs of compute capability 10 only",
        "nvfp4-vllm-emulation-cuda": "vLLM's Triton kernels need a GPU",
        "mxfp4-vllm": "vLLM's Triton kernels need a GPU",
        "mxfp4-vllm-cpu": "vLLM's Triton kernels need a GPU, or Triton's interpreter",
    },
)
