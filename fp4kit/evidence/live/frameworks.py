"""Define the adapters of libraries for training and inference: gguf, microxcaling, MLX, qwix, torchao, transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

import fp4kit
from fp4kit.arithmetic import exponent_field
from fp4kit.evidence.live.adapter import (
    NAN_SCALE,
    SATURATING_CASTS,
    Adapter,
    Parts,
    ProducerCall,
    decoded,
    parts,
    to_numpy,
    to_torch,
)
from fp4kit.evidence.live.draw import MAX_ELEMENTS


def _gguf_mxfp4(x: np.ndarray) -> Parts:
    """Quantize and dequantize x in MXFP4 with the gguf package."""
    from gguf import quants

    blocks = quants.quantize(x, quants.GGMLQuantizationType.MXFP4)
    stored = blocks.reshape(*x.shape[:-1], -1, 17)
    codes = np.concatenate([stored[..., 1:] & 15, stored[..., 1:] >> 4], axis=-1).reshape(x.shape)
    values = quants.dequantize(blocks, quants.GGMLQuantizationType.MXFP4)
    return {"codes": codes, "block_scale": stored[..., 0], "values": values}


def _gguf_decode(q: fp4kit.Quantized) -> np.ndarray:
    """Return the float32 values that the gguf package decodes from q, a Quantized in MXFP4."""
    from gguf import quants

    codes = fp4kit.unpack(q.packed).reshape(*q.block_scale.shape, 2, 16)
    blocks = np.concatenate([q.block_scale[..., None], codes[..., 0, :] | codes[..., 1, :] << 4], axis=-1)
    return quants.dequantize(blocks.reshape(len(blocks), -1), quants.GGMLQuantizationType.MXFP4)


GGUF = Adapter(
    "gguf",
    dependencies=("numpy",),
    calls={"mxfp4-gguf": ProducerCall(_gguf_mxfp4, ("float32",), decode=_gguf_decode, decodes=("float32",))},
    left_out={"gguf has no quantizer of NVFP4; the recipe is llama.cpp's C function": ("nvfp4-gguf",)},
)


def _microxcaling_quantize(x: np.ndarray, element: str, rounding: str, flush: bool = False) -> Parts:
    """Fake-quantize x with quantize_mx_op, and return {"fake": values}."""
    from mx.mx_ops import quantize_mx_op
    from mx.specs import finalize_mx_specs

    given = {"w_elem_format": element, "a_elem_format": element, "round": rounding, "mx_flush_fp32_subnorms": flush}
    specs = finalize_mx_specs({"scale_bits": 8, "block_size": 32, "custom_cuda": False, **given})
    y = quantize_mx_op(to_torch(x), specs, elem_format=element, axes=[-1], round=rounding)
    return {"fake": to_numpy(y)}


MICROXCALING_OPTIONS: dict[str, dict[str, Any]] = {
    "mxfp4-microxcaling-nearest": {"element": "fp4_e2m1", "rounding": "nearest"},
    "mxfp4-microxcaling-nearest-flush": {"element": "fp4_e2m1", "rounding": "nearest", "flush": True},
    "mxfp4-microxcaling-even": {"element": "fp4_e2m1", "rounding": "even"},
    "mxfp4-microxcaling-floor": {"element": "fp4_e2m1", "rounding": "floor"},
    "mxfp8-microxcaling-nearest": {"element": "fp8_e4m3", "rounding": "nearest"},
    "mxfp8-microxcaling-even": {"element": "fp8_e4m3", "rounding": "even"},
}
MICROXCALING = Adapter(
    "microxcaling",
    module="mx",
    needs=("mx.mx_ops", "mx.specs"),
    calls={
        id: ProducerCall(partial(_microxcaling_quantize, **options), ("float32", "bfloat16"))
        for id, options in MICROXCALING_OPTIONS.items()
    },
)


def _mlx_array(x: np.ndarray) -> Any:
    """Return an MLX array with the elements and the dtype of x, bfloat16 included."""
    import mlx.core as mx

    return mx.array(x.view(np.uint16)).view(mx.bfloat16) if x.dtype == ml_dtypes.bfloat16 else mx.array(x)


def _mlx_numpy(a: Any) -> np.ndarray:
    """Return a NumPy array with the elements and the dtype of an MLX array, bfloat16 included."""
    import mlx.core as mx

    return np.array(a.view(mx.uint16)).view(ml_dtypes.bfloat16) if a.dtype == mx.bfloat16 else np.array(a)


def _mlx_quantize(x: np.ndarray, mode: str, with_global: bool = False) -> Parts:
    """Quantize and dequantize x in a mode of MLX, on the CPU."""
    import mlx.core as mx

    with mx.stream(mx.cpu):
        amax = mx.array(np.abs(x.astype(np.float32)).max()) if with_global else None
        words, scales, *_ = mx.quantize(_mlx_array(x), mode=mode, global_scale=amax)
        values = {}
        for name in ("float32",) if with_global else ("float32", "float16", "bfloat16"):
            y = mx.dequantize(words, scales, mode=mode, global_scale=amax, dtype=getattr(mx, name))
            values["values" if name == "float32" else f"values_{name}"] = _mlx_numpy(y)
        return parts(x, _mlx_numpy(words), _mlx_numpy(scales), **values)


def _mlx_decode(q: fp4kit.Quantized, mode: str) -> np.ndarray:
    """Return the values that mx.dequantize decodes from q, in q's dtype."""
    import mlx.core as mx

    with mx.stream(mx.cpu):
        words, scales = mx.array(q.packed.view(np.uint32)), mx.array(q.block_scale)
        return _mlx_numpy(mx.dequantize(words, scales, mode=mode, dtype=getattr(mx, str(q.dtype))))


def _mlx_call(mode: str, first: str, last: str = "", **options: Any) -> ProducerCall:
    """Return the ProducerCall for a mode and for MLX versions from ``first`` to ``last``."""
    decode = None if options else partial(_mlx_decode, mode=mode)
    return ProducerCall(partial(_mlx_quantize, mode=mode, **options), columns=32, first=first, last=last, decode=decode)


MLX = Adapter(
    "mlx",
    dependencies=("mlx-cpu",),
    calls={
        "nvfp4-mlx-cpu": _mlx_call("nvfp4", "0.32.3"),
        "nvfp4-mlx-cpu-global": _mlx_call("nvfp4", "0.32.3", with_global=True),
        "nvfp4-mlx-cpu-0322": _mlx_call("nvfp4", "0.31.2", "0.32.2"),
        "nvfp4-mlx-cpu-0322-global": _mlx_call("nvfp4", "0.31.2", "0.32.2", with_global=True),
        "mxfp4-mlx-cpu": _mlx_call("mxfp4", "0.32.2"),
        "mxfp4-mlx-cpu-0321": _mlx_call("mxfp4", "", "0.32.1"),
        "mxfp8-mlx-cpu": _mlx_call("mxfp8", "0.32.3"),
        "mxfp8-mlx-cpu-0322": _mlx_call("mxfp8", "0.32.2", "0.32.2"),
        "mxfp8-mlx-cpu-0321": _mlx_call("mxfp8", "", "0.32.1"),
    },
    left_out={
        "Metal kernels need an Apple GPU": (
            *("nvfp4-mlx-metal", "nvfp4-mlx-metal-global", "mxfp4-mlx-metal-0321", "mxfp8-mlx-metal-0321"),
        )
    },
)


def _qwix_quantize(x: np.ndarray, kind: str) -> Parts:
    """Quantize x with qarray.quantize, as XLA computes it on a CPU."""
    import jax
    import jax.numpy as jnp
    from qwix._src.core import qarray

    size = 16 if kind == "nvfp4" else 32
    used = x.size // size
    # The rows are the blocks of x, padded with rows of zeros, so that JAX compiles for few shapes.
    blocks = np.zeros((max(MAX_ELEMENTS // size, used), size), x.dtype)
    blocks[:used] = x.reshape(-1, size)
    how = qarray.HowToQuantize(qtype=kind, channelwise_axes=(0,), tiled_axes={1: size})
    with jax.default_device(jax.devices("cpu")[0]):
        q = qarray.quantize(jnp.asarray(blocks), how)
        scale = np.asarray(q.scale)[:used].astype(np.float32).reshape(len(x), -1)
        codes, values = (np.asarray(a)[:used].reshape(x.shape) for a in (q.qvalue, qarray.dequantize(q)))
    if kind == "nvfp4":
        return parts(x, codes, np.asarray(jnp.asarray(scale).astype(jnp.float8_e4m3fn)))
    # The E8M0 code of a scale is the exponent field of its float32 value; inf and NaN give 255.
    return parts(x, codes, exponent_field(scale).astype(np.uint8), fake=values)


def _jax_quantize(x: np.ndarray, mode: str, jitted: bool = False) -> Parts:
    """Quantize x with the quantizer of jax.nn.scaled_dot_general, as XLA computes it on a CPU, 16 blocks at a time."""
    import jax
    import jax.numpy as jnp
    from jax._src.cudnn import scaled_matmul_stablehlo as producer

    size, element, scale = (
        (16, "float4_e2m1fn", "float8_e4m3fn") if mode == "nvfp4" else (32, "float8_e4m3fn", "float8_e8m0fnu")
    )
    g = None if mode == "mxfp8" else np.float32(1)
    blocks = np.zeros((-(-x.size // size // 16), 16, size), x.dtype)
    blocks.reshape(-1, size)[: x.size // size] = x.reshape(-1, size)

    def quantize(part: Any, factor: Any) -> Any:
        config = producer.BlockScaleConfig(mode, size, getattr(jnp, element), getattr(jnp, scale), factor, True)
        return producer.quantize(part, config)

    with jax.default_device(jax.devices("cpu")[0]):
        function = jax.jit(quantize) if jitted else quantize
        found = [function(jnp.asarray(part), None if g is None else jnp.asarray(g)) for part in blocks]
        codes, scales = (np.concatenate([np.asarray(q[i]) for q in found]) for i in (0, 1))
    codes, scales = (a.view(np.uint8)[: x.size // size] for a in (codes, scales.reshape(-1, 1)))
    return {"codes": codes.reshape(x.shape), "block_scale": scales.reshape(len(x), -1)}


JAX = Adapter(
    "jax",
    dependencies=("jaxlib",),
    needs=("jax._src.cudnn.scaled_matmul_stablehlo",),
    calls={
        "nvfp4-jax": ProducerCall(partial(_jax_quantize, mode="nvfp4")),
        "mxfp8-jax": ProducerCall(partial(_jax_quantize, mode="mxfp8")),
        # XLA of some processors folds the reciprocal of bfloat16, and then leaves zeros of a zero block.
        "mxfp8-jax-jit": ProducerCall(partial(_jax_quantize, mode="mxfp8", jitted=True), ("float32", "float16")),
    },
    left_out={
        "it is for a GPU": tuple(id for id in fp4kit.recipes() if "jax-gpu" in id),
        "its global_scale must be normal, which drawn arrays do not ensure": (
            "nvfp4-jax-global",
            "nvfp4-jax-global-jit",
        ),
    },
)


QWIX_ROUNDED_LOG = {"jax": ("", "0.10.99")}  # later versions do not round the steps of log2 to bfloat16

QWIX = Adapter(
    "qwix",
    dependencies=("jax", "jaxlib"),
    needs=("jax", "qwix._src.core.qarray"),
    calls={"nvfp4-qwix": ProducerCall(partial(_qwix_quantize, kind="nvfp4"))}
    | {
        f"{kind}-qwix": ProducerCall(partial(_qwix_quantize, kind=kind), dependency_versions=QWIX_ROUNDED_LOG)
        for kind in ("mxfp4", "mxfp8")
    },
)


def _torchao_mx(x: np.ndarray, element: str, mode: str) -> Parts:
    """Quantize and dequantize x to MXFP4, MXFP6 or MXFP8 with torchao's class MXTensor."""
    import torch
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode

    dtype = getattr(torch, element, element)  # FP6 formats are strings
    t = MXTensor.to_mx(to_torch(x), dtype, 32, ScaleCalculationMode(mode))
    return parts(x, t.qdata.view(torch.uint8), t.scale, **decoded(t.dequantize, "float32", "bfloat16"))


def _torchao_nvfp4(x: np.ndarray, single: bool) -> Parts:
    """Quantize and dequantize x to NVFP4 with torchao's class NVFP4Tensor."""
    import torch
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    t = to_torch(x)
    scale = None if single else per_tensor_amax_to_scale(t.abs().max())
    q = NVFP4Tensor.to_nvfp4(t, 16, scale)
    values = decoded(q.dequantize, "float32", "bfloat16")
    return parts(x, q.qdata.view(torch.uint8), q.scale, tensor_scale=scale, **values)


def _torchao_decode_mx(q: fp4kit.Quantized, element: str) -> np.ndarray:
    """Return the values that torchao's function to_dtype decodes from q, a Quantized in an MX format, in q's dtype."""
    import torch
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    kind = getattr(torch, element, element)
    codes, scales = to_torch(q.packed), to_torch(q.block_scale).view(torch.float8_e8m0fnu)
    codes = codes.view(kind) if element.startswith("float8") else codes
    return to_numpy(to_dtype(codes, scales, kind, 32, getattr(torch, str(q.dtype))))


def _torchao_decode_nvfp4(q: fp4kit.Quantized) -> np.ndarray:
    """Return the values that torchao's class NVFP4Tensor decodes from q, in q's dtype. q may lack a tensor scale."""
    import torch
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    dtype = getattr(torch, str(q.dtype))
    scale = None if q.tensor_scale is None else to_torch(np.asarray(q.tensor_scale))
    scales = to_torch(q.block_scale).view(torch.float8_e4m3fn)
    return to_numpy(NVFP4Tensor(to_torch(q.packed), scales, 16, dtype, scale).dequantize(dtype))


def _torchao_calls() -> Iterator[tuple[str, ProducerCall]]:
    """Yield (recipe id, call) for all recipes of torchao: for its releases up to 0.18, and from 0.19 on."""
    functions: dict[str, tuple[Any, Any]] = {
        "nvfp4-torchao": (partial(_torchao_nvfp4, single=False), _torchao_decode_nvfp4),
        "nvfp4-torchao-single": (partial(_torchao_nvfp4, single=True), _torchao_decode_nvfp4),
    }
    for id, element in TORCHAO_ELEMENTS.items():
        for mode in ("floor", "rceil", "ceil", "even"):
            decode = partial(_torchao_decode_mx, element=element)
            functions[id.format(mode)] = partial(_torchao_mx, element=element, mode=mode), decode
    dtypes, ids = ("float32", "bfloat16"), fp4kit.recipes("torchao")
    for id, (function, decode) in functions.items():
        call = ProducerCall(function, dtypes, exempt=(NAN_SCALE,), decode=decode, decodes=dtypes)
        has_older = f"{id}-018" in ids
        if has_older:
            yield f"{id}-018", replace(call, last="0.18.99")
        if id in ids or id == "mxfp4-torchao-floor":  # an alias
            yield fp4kit.recipe(id).id, replace(call, first="0.19" if has_older else "")


TORCHAO_ELEMENTS = {
    "mxfp4-torchao-{}": "float4_e2m1fn_x2",
    "mxfp6-torchao-{}-e2m3": "fp6_e2m3",
    "mxfp6-torchao-{}-e3m2": "fp6_e3m2",
    "mxfp8-torchao-{}": "float8_e4m3fn",
    "mxfp8-torchao-{}-e5m2": "float8_e5m2",
}
TORCHAO = Adapter("torchao", calls=dict(_torchao_calls()))


TRANSFORMERS_SIZE = 128  # rows and columns per block


def _transformers_quantize(x: np.ndarray) -> Parts:
    """Quantize x to FP8 in blocks of 128x128 with transformers."""
    # Before quantization, x is padded with rows of zeros to whole blocks, because transformers leaves weights with
    # partial blocks unquantized.
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    padded = np.zeros((-(-len(x) // TRANSFORMERS_SIZE) * TRANSFORMERS_SIZE, x.shape[1]), x.dtype)
    padded[: len(x)] = x
    config = SimpleNamespace(weight_block_size=(TRANSFORMERS_SIZE, TRANSFORMERS_SIZE), scale_fmt=None)
    stored = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"p.weight": to_torch(padded)})
    scales = np.repeat(to_numpy(stored["p.weight_scale_inv"]), TRANSFORMERS_SIZE, axis=0)
    return {"codes": to_numpy(stored["p.weight"])[: len(x)], "tensor_scale": scales[: len(x)]}


TRANSFORMERS = Adapter(
    "transformers",
    needs=("transformers.integrations.finegrained_fp8",),
    calls={
        "fp8-transformers-block": ProducerCall(
            _transformers_quantize, columns=TRANSFORMERS_SIZE, dependency_versions=SATURATING_CASTS
        )
    },
)
