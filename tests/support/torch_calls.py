"""Provide PyTorch tensors, and calls to public functions on them, for comparison with calls on NumPy arrays.

Importing this module skips the importing tests if PyTorch is missing.
"""

import numpy as np
import pytest
from inputs import BF16, ordinary

import fp4kit
from fp4kit.training.communicators import SingleProcess

torch = pytest.importorskip("torch")
DTYPES = {np.dtype(np.float32): torch.float32, np.dtype(np.float16): torch.float16, BF16: torch.bfloat16}
X = {dtype: ordinary(3, dtype=dtype)[:32] for dtype in DTYPES}


def tensor(a):
    """Return a PyTorch tensor with the bits of a NumPy array."""
    a = np.ascontiguousarray(a)
    return torch.from_numpy(a.view(np.uint16)).view(torch.bfloat16) if a.dtype == BF16 else torch.from_numpy(a)


def array(t):
    """Return a NumPy array with the bits of a PyTorch tensor. Raise AssertionError for anything else."""
    assert type(t) is torch.Tensor
    return t.view(torch.uint16).numpy().view(BF16) if t.dtype == torch.bfloat16 else t.numpy()


def quantized(x, recipe="nvfp4-te", **options):
    return fp4kit.quantize(x, recipe, **options)


CALLS = {
    "quantize": lambda x: quantized(x),
    "columns": lambda x: quantized(x, axis=0, scale_layout="swizzled_128x4"),
    "hadamard": lambda x: quantized(x, hadamard=True),
    "stochastic": lambda x: quantized(x, rounding="stochastic", seed=3),
    "rows": lambda x: quantized(x, "nvfp4-te-rowscaled"),
    "no scales": lambda x: quantized(x, "fp8-modelopt-channel"),
    "quantize_both": lambda x: fp4kit.quantize_both(x, "nvfp4-te"),
    "dequantize": lambda x: fp4kit.dequantize(quantized(x)),
    "dequantize columns": lambda x: fp4kit.dequantize(quantized(x, axis=0)),
    "fake_quantize": lambda x: fp4kit.fake_quantize(x, "mxfp4-ocp"),
    "fake columns": lambda x: fp4kit.fake_quantize(x, "nvfp4-te", axis=0),
    "clip": lambda x: fp4kit.fake_quantize_backward(x, x, "nvfp4-te", amax=0.5, pass_through=False),
    "pass": lambda x: fp4kit.fake_quantize_backward(x, x, "nvfp4-te"),
    "amax": lambda x: fp4kit.amax(x),
    "amax of rows": lambda x: fp4kit.amax(x, axis=1),
    "amax of blocks": lambda x: fp4kit.amax(x, "nvfp4-te"),
    "quantize_grouped": lambda x: fp4kit.quantize_grouped([x, x[:16]], "nvfp4-te"),
    "of an iterator": lambda x: fp4kit.quantize_grouped(iter([x, x[:16]]), "nvfp4-te"),
    "fake_quantize_grouped": lambda x: fp4kit.fake_quantize_grouped([x, x[:16]], "fp8-modelopt"),
    "grouped clip": lambda x: fp4kit.fake_quantize_grouped_backward(
        [x, x], [x, x], "nvfp4-te", amax=[1, 2], pass_through=False
    ),
    "amax_grouped": lambda x: fp4kit.amax_grouped(iter([x, x[:16]])),
    "a stack": lambda x: fp4kit.quantize_grouped(x.reshape(2, 16, -1), "nvfp4-te"),
    "plan": lambda x: fp4kit.GroupedPlan([x, x[:16]], "nvfp4-te").quantize(),
    "plan's amaxes": lambda x: fp4kit.GroupedPlan([x, x[:16]], "nvfp4-te").amax(),
    "partial_amax": lambda x: fp4kit.partial_amax(x.reshape(-1)[5:], tuple(x.shape), 5, "nvfp4-te-2d"),
    "cast_master_weights": lambda x: fp4kit.cast_master_weights(
        [fp4kit.Shard(x.reshape(-1), tuple(x.shape))], SingleProcess(), columnwise=True
    ),
    "requantize": lambda x: fp4kit.requantize(quantized(x, "mxfp4-ocp"), "nvfp4-te"),
    "transpose": lambda x: fp4kit.transpose(quantized(x, "nvfp4-te-2d")),
    "swizzle": lambda x: fp4kit.swizzle(quantized(x), "swizzled_8x4"),
    "swizzle scales": lambda x: fp4kit.swizzle(quantized(x).block_scale, "swizzled_8x4"),
    "unswizzle": lambda x: fp4kit.unswizzle(quantized(x, scale_layout="swizzled_128x4")),
    "pack": lambda x: fp4kit.pack(fp4kit.unpack(quantized(x).packed)),
}
