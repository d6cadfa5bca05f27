"""Benchmark dequantize to bfloat16 and float32."""

from __future__ import annotations

import peers
from measure import BF16, F32, Bench, check_rows, main, poison
from rows import element_bytes, quantized_bytes

import fp4kit

TARGET, HIERARCHICAL = 0.93, 0.70  # target efficiencies: time of a copy / time of the call
RECIPES = (
    "mxfp4-ocp",
    "nvfp4-te",
    "nvfp4-te-2d",
    "nvfp4-flashinfer",
    "nvfp4-modelopt",
    "nvfp4-torchao",
    "mxfp4-flashinfer",
    "mxfp8-te",
    "mxfp8-torchao-rceil",
    "fp8-modelopt",
    "hif4-hifloat4",
    "mxfp4-msmodelslim-dual",
)


def _rows_of(q: fp4kit.Quantized, part: slice, dtype: object) -> object:
    """Return the values of the rows `part` (a slice) of q, decoded on the CPU."""
    scales = None if q.block_scale is None else q.block_scale[part].get()
    packed = q.packed[part].get()
    amax, scale = (
        None if of is None else (of[part] if of.ndim else of).get() for of in (q.tensor_amax, q.tensor_scale)
    )
    cut = fp4kit.Quantized(packed, scales, scale, amax, (len(packed), q.shape[1]), q.dtype, q.axis, q.recipe)
    return fp4kit.dequantize(cut, dtype)


def run(bench: Bench) -> None:
    """Time dequantize and add one row to `bench` per recipe and output dtype."""
    for recipe in RECIPES:
        target = HIERARCHICAL if fp4kit.recipe(recipe).levels else TARGET
        q = fp4kit.quantize(bench.normal(BF16), recipe)
        for dtype in (BF16, F32):
            values = bench.cupy.empty(q.shape, dtype)
            poison(values)
            fp4kit.dequantize(q, dtype, out=values)
            check_rows(values, lambda part, q=q, dtype=dtype: _rows_of(q, part, dtype), f"{recipe} to {dtype}")
            bench.row(
                "dequantize",
                recipe,
                values,
                quantized_bytes(recipe) | element_bytes(values=dtype),
                lambda q=q, dtype=dtype, values=values: fp4kit.dequantize(q, dtype, out=values),
                target=target,
                peers=peers.dequantize_mx(bench, q, dtype),
            )


if __name__ == "__main__":
    main(run)
