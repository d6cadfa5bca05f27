"""The operations of the CUDA engine: the functions of fp4kit/host/engine.py, for CuPy arrays, with equal bits.

The functions launch kernels on the current stream of the device that holds the arrays. They do not wait for the device,
except quantize of an array without elements.
"""

# ruff: noqa: F401 - ops/engines.py calls these functions by their names
from fp4kit.cuda.amax import amax, clip_amax, plain_amax
from fp4kit.cuda.groups import CudaClipGroup, CudaGroup, amax_group, plain_amax_group
from fp4kit.cuda.matmul import matmul
from fp4kit.cuda.quantize import (
    clip,
    dequantize,
    fake_quantize,
    quantize,
    quantize_both,
    quantize_with_scales,
    requantize,
)
from fp4kit.cuda.search import search_scales
from fp4kit.cuda.shards import DeviceStages, partial_amax, partial_cast
from fp4kit.cuda.transforms import pack, rotate, swizzle, transpose, unpack
