"""Call other libraries on the same device arrays in this process: torch, torchao and Model-Optimizer, if installed.

Functions named after an operation return {name: call} for `Bench.row(peers=...)`. They return an empty dict if the
library is missing or does not offer the operation, or if `Bench.peers` is False. With --quick, torch.compile is not
used, because it takes seconds per function. Versions tried: torch 2.11, torchao 0.18, nvidia-modelopt 0.47.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from measure import BF16, F16, F32, Bench, Call

MX_MODES = {  # recipe that torchao's to_mx computes: (element dtype, scale mode)
    "mxfp4-ocp": ("float4_e2m1fn_x2", "FLOOR"),
    "mxfp4-torchao-rceil": ("float4_e2m1fn_x2", "RCEIL"),
    "mxfp8-torchao-rceil": ("float8_e4m3fn", "RCEIL"),
}


@cache
def module(name: str) -> Any:
    """Import a module and return it. If the import raises any error, print the error and return None.

    Warnings during the import are suppressed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torchao").setLevel(logging.ERROR)
        try:
            return importlib.import_module(name)
        except Exception as error:
            print(f"peers: no {name} ({type(error).__name__}: {error})")
            return None


def torch() -> Any:
    """Return the module torch, or None if it is not installed or sees no CUDA device."""
    found = module("torch")
    return found if found is not None and found.cuda.is_available() else None


def tensor(x: Any) -> Any:
    """Return a torch tensor that shares the memory of a contiguous CuPy array."""
    signed = {1: np.int8, 2: np.int16, 4: np.int32}[x.dtype.itemsize]
    dtypes = {BF16: torch().bfloat16, F16: torch().float16, F32: torch().float32, np.dtype(np.uint8): torch().uint8}
    return torch().from_dlpack(x.view(signed)).view(dtypes[x.dtype])


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled by torch.compile, for the one shape and dtype of its first call.

    The function must not call functions of this module.
    """
    return torch().compile(function, dynamic=False, fullgraph=True)


def both_ways(bench: Bench, name: str, function: Callable[..., Any], *arguments: Any) -> dict[str, Call]:
    """Return {"<name> eager": call, "<name> compiled": call} of a function of tensors.

    The calls are function(*arguments). The compiled call is left out of quick runs.
    """
    calls: dict[str, Call] = {f"{name} eager": lambda: function(*arguments)}
    if not bench.quick:
        torch().compiler.reset()  # otherwise another dtype or shape would be compiled as a dynamic one
        fast = compiled(function)
        calls[f"{name} compiled"] = lambda: fast(*arguments)
    return calls


def copy(bench: Bench, x: Any, y: Any) -> dict[str, Call]:
    """Return {name: call} of torch's y.copy_(x), which converts if the dtypes differ.

    The dict is empty if torch is not installed or other libraries are not timed.
    """
    if not bench.peers or torch() is None:
        return {}
    source, target = tensor(x), tensor(y)
    return {"torch copy": lambda: target.copy_(source)}


@cache
def _to_mx(element: str, mode: str) -> Callable[[Any], Any]:
    """Return a function that quantizes a tensor with torchao's to_mx, for an element dtype and a scale mode."""
    mx = module("torchao.prototype.mx_formats.mx_tensor")
    to_mx, dtype, scaling = mx.to_mx, getattr(torch(), element), getattr(mx.ScaleCalculationMode, mode)
    return lambda x: to_mx(x, dtype, 32, scaling)


@cache
def _from_mx(element: str, dtype: Any) -> Callable[[Any, Any], Any]:
    """Return a function that decodes codes and scales with torchao's to_dtype, from an element dtype to `dtype`."""
    to_dtype, element_dtype = module("torchao.prototype.mx_formats.mx_tensor").to_dtype, getattr(torch(), element)
    return lambda data, scale: to_dtype(data, scale, element_dtype, 32, dtype)


def _has_torchao(bench: Bench) -> bool:
    """Return True if torchao is installed and peers are to be timed."""
    return bench.peers and torch() is not None and module("torchao.prototype.mx_formats.mx_tensor") is not None


def quantize_mx(bench: Bench, x: Any, recipe: str) -> dict[str, Call]:
    """Return {name: call} of torchao's to_mx on x.

    The dict is empty for float16 and for recipes that MX_MODES lacks. It is also empty if torchao is not installed, or
    if other libraries are not timed.
    """
    if recipe not in MX_MODES or x.dtype == F16 or not _has_torchao(bench):
        return {}
    return both_ways(bench, "torchao", _to_mx(*MX_MODES[recipe]), tensor(x))


def dequantize_mx(bench: Bench, q: Any, dtype: Any) -> dict[str, Call]:
    """Return {name: call} of torchao's to_dtype on the codes and scales of q, which decodes them to `dtype`.

    The dict is empty for recipes that MX_MODES lacks. It is also empty if torchao is not installed, or if other
    libraries are not timed.
    """
    if q.recipe.id not in MX_MODES or not _has_torchao(bench):
        return {}
    element, _ = MX_MODES[q.recipe.id]
    data, scale = tensor(q.packed), tensor(q.block_scale).view(torch().float8_e8m0fnu)
    data = data if q.recipe.is_packed else data.view(getattr(torch(), element))
    wanted = {BF16: torch().bfloat16, F32: torch().float32}[np.dtype(dtype)]
    return both_ways(bench, "torchao", _from_mx(element, wanted), data, scale)


@cache
def _nvfp4(given: bool) -> Callable[..., Any]:
    """Return a function that calls torchao's nvfp4_quantize with a tensor scale.

    If `given` is true, the function takes the tensor amax as second argument; otherwise it computes the amax.
    """
    nv = module("torchao.prototype.mx_formats.nvfp4_tensor")
    quantize, scale = nv.nvfp4_quantize, nv.per_tensor_amax_to_scale
    if given:
        return lambda x, amax: quantize(x, 16, scale(amax))
    return lambda x: quantize(x, 16, scale(x.abs().max()))


def quantize_nvfp4(bench: Bench, x: Any, amax: Any = None) -> dict[str, Call]:
    """Return {name: call} of torchao's nvfp4_quantize with a tensor scale.

    The dict is empty for float16. It is also empty if torchao is not installed, or if other libraries are not timed.

    amax: the tensor amax, or None to compute it in the call.
    """
    if x.dtype == F16 or not _has_torchao(bench):
        return {}
    if amax is None:
        return both_ways(bench, "torchao", _nvfp4(False), tensor(x))
    return both_ways(bench, "torchao", _nvfp4(True), tensor(x), tensor(amax.reshape(1)).reshape(()))


def modelopt_nvfp4(bench: Bench, x: Any, amax: Any = None) -> dict[str, Call]:
    """Return {"Model-Optimizer": call} of NVFP4QTensor.quantize.

    The dict is empty if Model-Optimizer or torch is not installed, or if other libraries are not timed.

    amax: the tensor amax, from which the tensor scale is computed; None to compute it in the call.
    """
    qtensor = module("modelopt.torch.quantization.qtensor") if bench.peers and torch() is not None else None
    if qtensor is None:
        return {}
    source, quantize = tensor(x), qtensor.NVFP4QTensor.quantize
    if amax is None:
        return {"Model-Optimizer": lambda: quantize(source, 16)}
    scale = tensor(amax.reshape(1)).reshape(()) / (6 * 448)
    return {"Model-Optimizer": lambda: quantize(source, 16, weights_scaling_factor_2=scale)}


def modelopt_fake_nvfp4(bench: Bench, x: Any, amax: Any) -> dict[str, Call]:
    """Return {name: call} of Model-Optimizer's Triton kernel fp4_fake_quant_block on x, with the given tensor amax.

    The dict is empty if torch is not installed, if Model-Optimizer is not installed or has no such kernel, or if other
    libraries are not timed.
    """
    gemm = module("modelopt.torch.kernels.quantization.gemm") if bench.peers and torch() is not None else None
    if gemm is None or not hasattr(gemm, "fp4_fake_quant_block"):
        return {}
    source, limit = tensor(x), tensor(amax.reshape(1)).reshape(())
    return {"Model-Optimizer Triton": lambda: gemm.fp4_fake_quant_block(source, limit)}


def amax(bench: Bench, x: Any) -> dict[str, Call]:
    """Return {name: call} of torch's abs().max() of x, eager and compiled.

    The dict is empty if torch is not installed or other libraries are not timed.
    """
    if not bench.peers or torch() is None:
        return {}
    return both_ways(bench, "torch", _abs_max, tensor(x))


def _abs_max(x: Any) -> Any:
    return x.abs().max()
