"""Define the adapters of libraries for training and inference: gguf, Hugging Face kernels, JAX, microxcaling, MLX,
NNCF, oneDNN, qwix, torchao, transformers.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

import fp4kit
from fp4kit.arithmetic import exponent_field
from fp4kit.evidence.live.adapter import (
    NAN_SCALE,
    ONEDNN_NEGATIVE_ZERO,
    SATURATING_CASTS,
    Adapter,
    Parts,
    ProducerCall,
    cached,
    decoded,
    load,
    packages,
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


@cached
def _hf_pack() -> Any:
    """Load and return _pack.py of the kernel nvfp4-gemm, without its compiled operators."""
    return load("nvfp4_gemm", "_pack.py", packages("nvfp4_gemm", "nvfp4_gemm._ops"))


def _hf_kernels_fake(x: np.ndarray) -> Parts:
    return {"fake": to_numpy(_hf_pack().quantize_reference(to_torch(x)))}


HF_KERNELS = Adapter(  # the folder of the kernel from the Hub, which is no distribution, must be in PYTHONPATH
    "nvfp4-gemm",
    module="nvfp4_gemm",
    needs=(_hf_pack,),
    calls={"nvfp4-hf-kernels-reference": ProducerCall(_hf_kernels_fake)},
    left_out={"the kernel needs a GPU of sm_100": ("nvfp4-hf-kernels",)},
    title="Hugging Face kernels",
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


def _nncf_compressed(x: np.ndarray, mode: str, elements: int = 0) -> Parts:
    """Compress x as the weight of an OpenVINO model, below enough copies of its rows to have at least ``elements``
    elements, and decode it as OpenVINO does with the inference precision float32.
    """
    import nncf
    import openvino
    from nncf.quantization.algorithms.weight_compression import config, openvino_backend
    from nncf.tensor import Tensor

    w = np.tile(x, (-(-elements // x.size) or 1, 1))
    kind = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[w.dtype.name]
    stored = openvino.Tensor(w.view(np.uint8), openvino.Shape(w.shape), getattr(openvino.Type, kind))
    how = config.WeightCompressionConfig(getattr(nncf.CompressWeightsMode, mode), 16 if mode == "NVFP4" else 32)
    backend: Any = openvino_backend.OVWeightCompressionAlgoBackend
    node, _ = backend._create_compression_subgraph(
        None,
        Tensor(stored),
        how,
        (1,),
        "w",
        weight_port_id=1,
        const_dtype=openvino.Type.f32,
        should_add_convert_node=True,
    )
    model = openvino.Model([node], [])
    parts_of = {"w": "codes", "w/scale": "block_scale", "w/second_order_scale": "tensor_scale"}
    if mode == "FP4":
        del parts_of["w/scale"]  # float16, which fp4kit has before they are rounded
    found = {parts_of[op.get_friendly_name()]: op.data for op in model.get_ops() if op.get_friendly_name() in parts_of}
    values = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})({})[0]
    codes = found["codes"] if mode == "MXFP8_E4M3" else np.asarray(fp4kit.unpack(found["codes"].reshape(len(w), -1)))
    found |= {"codes": codes.reshape(w.shape), "values": np.asarray(values)}
    return {
        name: part if name == "tensor_scale" else part.reshape(len(w), -1)[: len(x)] for name, part in found.items()
    }


NNCF_FROM = 10_000  # the number of elements, or of block scales, from which NNCF computes with OpenVINO
NNCF = Adapter(
    "nncf",
    dependencies=("openvino", "numpy"),
    needs=("nncf", "openvino"),
    calls={
        f"{kind}-nncf{suffix}": ProducerCall(partial(_nncf_compressed, mode=mode, elements=elements))
        for kind, mode in (("nvfp4", "NVFP4"), ("mxfp4", "MXFP4"), ("mxfp8", "MXFP8_E4M3"), ("fp4", "FP4"))
        for suffix, elements in (("-small", 0), ("", NNCF_FROM))
    }
    | {
        "nvfp4-nncf-medium": ProducerCall(partial(_nncf_compressed, mode="NVFP4", elements=NNCF_FROM)),
        "nvfp4-nncf": ProducerCall(partial(_nncf_compressed, mode="NVFP4", elements=16 * NNCF_FROM)),
    },
)


# From dnnl_types.h of oneDNN 3.13: dnnl_data_type_t, dnnl_quantization_mode_t, DNNL_ARG_*, dnnl_cpu and
# dnnl_stream_in_order
ONEDNN_TYPES = {"bfloat16": 2, "float32": 3, "e5m2": 9, "e4m3": 10, "e8m0": 13, "e2m1": 14}
ONEDNN_MODES = {"dynamic_mx": 2, "dynamic_fp": 3}
ONEDNN_SRC, ONEDNN_DST, ONEDNN_WEIGHTS, ONEDNN_SCALES = 1, 17, 33, 4096
ONEDNN_CPU, ONEDNN_IN_ORDER = 1, 1
ONEDNN_NEEDS = ("libimf.so", "libintlc.so.5", "libsvml.so", "libtbb.so.12", "libsycl.so.9")  # not in its search path


@cached
def _onednn_library() -> Any:
    """Load oneDNN's library from this environment, and return it. It has no Python interface, only that of C."""
    folder = Path(sys.prefix, "lib")
    os.putenv("OCL_ICD_FILENAMES", str(folder / "libintelocl.so"))  # oneDNN's CPU needs OpenCL, of intel-opencl-rt
    for name in ONEDNN_NEEDS:
        ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(folder / "libdnnl.so.3"))


def _onednn_call(name: str, *arguments: Any) -> None:
    status = getattr(_onednn_library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} returns status {status}")


def _onednn_made(after: ExitStack, name: str, *arguments: Any) -> ctypes.c_void_p:
    """Create an object with a function of oneDNN's C interface, and return its handle. ``after`` destroys it."""
    handle = ctypes.c_void_p()
    _onednn_call(name, ctypes.byref(handle), *arguments)
    kind = name.partition("_create")[0].replace("matmul_", "")
    after.callback(_onednn_call, f"{kind}_destroy", handle)
    return handle


class OnednnArgument(ctypes.Structure):
    """dnnl_exec_arg_t: an argument of a primitive."""

    _fields_ = (("arg", ctypes.c_int), ("memory", ctypes.c_void_p))


def _onednn_quantize(x: np.ndarray, element: str, scale: str = "e8m0", mode: str = "dynamic_mx") -> Parts:
    """Multiply x by an identity matrix, with dynamic scales of the product."""
    size, bits = (16, 4) if mode == "dynamic_fp" else (32, 4 if element == "e2m1" else 8)
    codes, scales = (np.zeros((len(x), n), np.uint8) for n in (x.shape[1] * bits // 8, x.shape[1] // size))
    eye = np.eye(x.shape[1], dtype=x.dtype)

    def dims(*numbers: int) -> Any:
        return (ctypes.c_int64 * 12)(*numbers)

    with ExitStack() as after:
        made = partial(_onednn_made, after)
        engine = made("dnnl_engine_create", ONEDNN_CPU, ctypes.c_size_t(0))
        stream = made("dnnl_stream_create", engine, ONEDNN_IN_ORDER)
        attributes = made("dnnl_primitive_attr_create")
        how = 0b11, 2, dims(1, size), ONEDNN_TYPES[scale], 0, ONEDNN_MODES[mode]
        _onednn_call("dnnl_primitive_attr_set_scales_v3", attributes, ONEDNN_DST, *how)
        given = (
            (ONEDNN_SRC, x, x.shape, x.dtype.name),
            (ONEDNN_WEIGHTS, eye, eye.shape, x.dtype.name),
            (ONEDNN_DST, codes, x.shape, element),
            (ONEDNN_DST | ONEDNN_SCALES, scales, scales.shape, scale),
        )
        described = [
            made("dnnl_memory_desc_create_with_strides", 2, dims(*shape), ONEDNN_TYPES[kind], dims(shape[1], 1))
            for _, _, shape, kind in given
        ]
        src, weights, dst, _ = described
        product = made("dnnl_matmul_primitive_desc_create", engine, src, weights, None, dst, attributes)
        primitive = made("dnnl_primitive_create", product)
        arguments = [
            OnednnArgument(number, made("dnnl_memory_create", one, engine, a.ctypes.data_as(ctypes.c_void_p)))
            for one, (number, a, _, _) in zip(described, given, strict=True)
        ]
        several = (OnednnArgument * len(given))(*arguments)
        _onednn_call("dnnl_primitive_execute", primitive, stream, len(given), several)
        _onednn_call("dnnl_stream_wait", stream)
    return parts(x, codes, scales)


ONEDNN_OPTIONS: dict[str, dict[str, Any]] = {
    "nvfp4-onednn": {"element": "e2m1", "scale": "e4m3", "mode": "dynamic_fp"},
    "mxfp4-onednn": {"element": "e2m1"},
    "mxfp8-onednn": {"element": "e4m3"},
    "mxfp8-onednn-e5m2": {"element": "e5m2"},
}
ONEDNN = Adapter(
    "onednn",
    module=None,
    dependencies=("intel-opencl-rt",),
    needs=(_onednn_library,),
    calls={
        id: ProducerCall(partial(_onednn_quantize, **options), ("float32", "bfloat16"), exempt=(ONEDNN_NEGATIVE_ZERO,))
        for id, options in ONEDNN_OPTIONS.items()
    },
    title="oneDNN",
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


def _jax_quantize(x: np.ndarray, mode: str, *, jitted: bool = False) -> Parts:
    """Quantize x with the quantizer of jax.nn.scaled_dot_general, as XLA computes it on a CPU, 16 blocks at a time."""
    import jax
    import jax.numpy as jnp
    from jax._src.cudnn import scaled_matmul_stablehlo as producer

    size, scale, g = (16, "float8_e4m3fn", np.float32(1)) if mode == "nvfp4" else (32, "float8_e8m0fnu", None)
    element = "float8_e4m3fn" if mode == "mxfp8" else "float4_e2m1fn"
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
        **{
            f"{mode}-jax{jit}": ProducerCall(partial(_jax_quantize, mode=mode, jitted=bool(jit)), first="0.12")
            for mode in ("mxfp4", "mxfp8")
            for jit in ("", "-jit")
        },
        "mxfp8-jax-011": ProducerCall(partial(_jax_quantize, mode="mxfp8"), last="0.11.99"),
        # XLA of some processors folds the reciprocal of bfloat16, and then leaves zeros of a zero block.
        "mxfp8-jax-011-jit": ProducerCall(
            partial(_jax_quantize, mode="mxfp8", jitted=True), ("float32", "float16"), last="0.11.99"
        ),
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
