"""Define the adapters of packages that need CUDA when they are imported: fouroversix, SGLang, Transformer Engine,
triton_kernels, vLLM. Their files of plain PyTorch are loaded without the packages.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from fp4kit.evidence.live.adapter import (
    SATURATING_CASTS,
    Adapter,
    Parts,
    ProducerCall,
    cached,
    codes_of,
    load,
    packages,
    parts,
    to_numpy,
    to_torch,
    triton,
)


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


SGLANG = Adapter(
    "sglang",
    needs=(partial(_sglang, "mxfp4_tensor"), partial(_sglang, "kvfp4_tensor")),
    calls={"mxfp4-sglang-util": ProducerCall(_sglang_mxfp4), "mxfp4-sglang-kv": ProducerCall(_sglang_kv)},
    left_out={"SGLang quantizes weights online on GPUs of compute capability 10 only": ("nvfp4-sglang-online",)},
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
        )
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
