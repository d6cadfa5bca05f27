"""Use fp4kit as a user does, for a check by mypy --strict (project/test_wheel.py).

mypy must accept this file, and must reject every line with "# wrong:" if the text after that mark replaces the line.
"""
# fmt: off
# ruff: noqa: E501

import numpy as np
import numpy.typing as npt

import fp4kit
from fp4kit import Quantized
from fp4kit.types import Power, RecipeId, ScaleLayout

recipe: RecipeId = "nvfp4-te"
layout: ScaleLayout = "swizzled_128x4"  # wrong: layout: ScaleLayout = "swizzled"


def error(x: npt.NDArray[np.float32], recipe: RecipeId) -> float:
    fake = fp4kit.fake_quantize(x, recipe, rounding="stochastic", seed=1)  # wrong:     fake = fp4kit.fake_quantize(x, recipe, rounding="stohastic", seed=1)
    difference: npt.NDArray[np.float32] = fake - x
    return float(np.abs(difference).max())


x = np.ones((32, 64), np.float32)
q: Quantized = fp4kit.quantize(x, recipe, scale_layout=layout)
q = fp4kit.quantize(x, recipe, scale_layout="linear")  # wrong: q = fp4kit.quantize(x, recipe, scale_layout="lineal")
q = fp4kit.quantize(x, fp4kit.recipe("mxfp4"))  # wrong: q = fp4kit.quantize(x, 4)
linear: Quantized = fp4kit.unswizzle(fp4kit.swizzle(q, "swizzled_8x4"))
out: npt.NDArray[np.float32] = fp4kit.dequantize(q, out=np.empty_like(x))
largest: npt.NDArray[np.float32] = fp4kit.amax(x)
best = fp4kit.search_scales(x, "nvfp4-modelopt-static", objective=Power("p2.4"))
best = fp4kit.search_scales(x, "nvfp4-modelopt-static", objective="mae")  # wrong: best = fp4kit.search_scales(x, "nvfp4-modelopt-static", objective="msa")
row, column = fp4kit.quantize_both(x, "mxfp4", rounding="nearest")  # wrong: row, column = fp4kit.quantize_both(x, "mxfp4", rounding="neerest")
grad: npt.NDArray[np.float32] = fp4kit.fake_quantize_backward(x, x, recipe)
print(error(x, recipe), q.scale_layout, fp4kit.engine().why)
q = fp4kit.quantize(x, recipe, scale_layout=q.scale_layout)  # wrong: q = fp4kit.quantize([1.0], recipe)
