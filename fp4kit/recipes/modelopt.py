"""Define the recipes of NVIDIA Model-Optimizer 0.47: its quantized tensors (class QTensor) and its fake quantizers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp4kit.formats import E4M3, INT4, INT8, MXFP4, MXFP8_E4M3, NVFP4, BlockFormat
from fp4kit.recipes.schema import Recipe, Versions, of_format

VERSIONS = Versions("0.47", "0.47")


def recipes() -> Iterator[Recipe]:
    """Yield Model-Optimizer's recipes for NVFP4, MXFP4 and MXFP8, and then those for FP8 and integers."""
    yield from _nvfp4()
    yield from _mx()
    yield from _per_tensor()


def _nvfp4() -> Iterator[Recipe]:
    """Yield the NVFP4 recipes."""
    dynamic = of_format(
        NVFP4,
        "nvfp4-modelopt",
        tensor_rule="divided",
        block_rule="modelopt",
        decode_rule="modelopt",
        apply="divide",
        sign="negative",
        amax_nan="propagate",
        source="Model-Optimizer 0.47 qtensor/nvfp4_tensor.py NVFP4QTensor",
        exact="NVFP4QTensor, which decodes code 8 (-0) to +0",
    )
    yield dynamic
    static = replace(
        dynamic,
        id="nvfp4-modelopt-static",
        block_rule="modelopt_static",
        static=True,
        exact="NVFP4QTensor with calibrated block amaxes",
    )
    yield static
    yield replace(static, id="nvfp4-modelopt-static-4over6", scale_max=256)
    yield replace(
        static,
        id="nvfp4-modelopt-mse",
        static=False,
        search="modelopt_sweep",
        exact="NVFP4QTensor with the block amaxes that nvfp4_fp8_scale_sweep chooses on an H200",
        source="Model-Optimizer 0.47 nvfp4_fp8_scale_sweep (Triton), qtensor/nvfp4_tensor.py NVFP4QTensor",
    )
    fake = replace(
        dynamic,
        id="nvfp4-modelopt-fake",
        decode_rule="product",
        fake_only=True,
        fake_rule="nvfp4_modelopt_triton",
        exact="values of the Triton fake quantizer on a GPU",
        source="Model-Optimizer 0.47 kernels/quantization fp4_fake_quant_block (Triton)",
    )
    yield fake
    yield replace(
        fake,
        id="nvfp4-modelopt-fake-cuda",
        fake_rule="nvfp4_modelopt_cuda",
        exact="values of the CUDA fake quantizer",
        source="Model-Optimizer 0.47 tensor_quant_mx.cu fused_amax_convert",
    )
    yield replace(
        fake,
        id="nvfp4-modelopt-static-fake",
        fake_rule="nvfp4_modelopt_static",
        static=True,
        exact="values of the Triton fake quantizer with calibrated block amaxes",
        source="Model-Optimizer 0.47 static_blockwise_fp4_fake_quant (Triton)",
    )


def _mx() -> Iterator[Recipe]:
    """Yield the MXFP4 and then the MXFP8 recipes, each first for quantized tensors and then for the fake quantizer."""
    yield of_format(
        MXFP4,
        "mxfp4-modelopt",
        block_rule="e8m0_modelopt",
        decode_rule="e8m0_infinite",
        rounding="rnz",
        sign="not_positive",
        amax_nan="propagate",
        source="Model-Optimizer 0.47 qtensor/mxfp4_tensor.py MXFP4QTensor",
        exact="MXFP4QTensor, where ties round toward zero, every zero is code 8, and scale byte 255 decodes to inf. "
        "Except for blocks with inf or NaN, which the producer leaves undefined",
    )
    yield _fake(MXFP4, "mxfp4-modelopt-fake")
    yield of_format(
        MXFP8_E4M3,
        "mxfp8-modelopt",
        block_rule="e8m0_modelopt",
        decode_rule="e8m0_infinite",
        amax_nan="propagate",
        source="Model-Optimizer 0.47 qtensor/mxfp8_tensor.py MXFP8QTensor",
        exact="MXFP8QTensor, which decodes scale byte 255 to inf",
    )
    yield _fake(MXFP8_E4M3, "mxfp8-modelopt-fake")


def _fake(fmt: BlockFormat, id: str) -> Recipe:
    """Return the recipe of Model-Optimizer's CUDA fake quantizer for an MX format."""
    return of_format(
        fmt,
        id,
        block_rule="e8m0_modelopt",
        fake_only=True,
        fake_rule="mx_modelopt",
        source="Model-Optimizer 0.47 tensor_quant_mx.cu fused_amax_convert",
        exact="values of the CUDA fake quantizer, except for NaN elements, which the producer leaves undefined",
    )


def _per_tensor() -> Iterator[Recipe]:
    """Yield the FP8 and integer recipes, which have one float32 scale per tensor, channel or block."""
    fp8 = Recipe(
        id="fp8-modelopt",
        element=E4M3,
        scale=None,
        block=None,
        block_rule=None,
        tensor_scaling="tensor",
        tensor_rule="fp8_modelopt",
        amax_nan="propagate",
        source="Model-Optimizer 0.47 tensor_quant.py scaled_e4m3",
        exact="values of the fake quantizer on a GPU",
    )
    yield fp8
    yield replace(fp8, id="fp8-modelopt-channel", tensor_scaling="row")
    int8 = replace(
        fp8,
        id="int8-modelopt",
        element=INT8,
        tensor_rule="int_modelopt",
        decode_rule="int_modelopt",
        fake_rule="int_modelopt",
        source="Model-Optimizer 0.47 tensor_quant.py _tensor_quant",
    )
    yield int8
    channel = replace(int8, id="int8-modelopt-channel", tensor_scaling="row")
    yield channel
    yield replace(int8, id="int8-modelopt-narrow", narrow=True)
    yield replace(channel, id="int8-modelopt-channel-narrow", narrow=True)
    yield replace(channel, id="int4-modelopt-channel", element=INT4)
    yield replace(int8, id="int4-modelopt", element=INT4, tensor_scaling="block", block=(1, 32))
