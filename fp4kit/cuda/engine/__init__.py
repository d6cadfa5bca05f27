"""The operations of the CUDA engine: the functions of fp4kit/host/engine.py, for CuPy arrays.

The functions launch kernels on the current stream of the device that holds the arrays. They do not wait for the device,
except quantize of an array without elements. Their results are bit-identical to the results of host/engine.py.

There is one module per operation. The other modules are shared:

- matrices.py splits the arrays of a call into matrices.
- amax.py computes tensor amaxes.
- group.py prepares launches for many arrays.
- cached_calls.py repeats calls quickly, and buffers.py allocates their arrays.
"""

from fp4kit.cuda.engine.amax import amax, clip_amax, plain_amax
from fp4kit.cuda.engine.clip_group import CudaClipGroup
from fp4kit.cuda.engine.dequantize import dequantize
from fp4kit.cuda.engine.fake_quantize import clip, fake_quantize
from fp4kit.cuda.engine.group import CudaGroup, amax_group, plain_amax_group
from fp4kit.cuda.engine.layouts import pack, swizzle, transpose, unpack
from fp4kit.cuda.engine.master_weights import DeviceStages
from fp4kit.cuda.engine.matmul import matmul
from fp4kit.cuda.engine.partial import partial_amax, partial_cast
from fp4kit.cuda.engine.quantize import quantize, quantize_both
from fp4kit.cuda.engine.quantize_with_scales import quantize_with_scales
from fp4kit.cuda.engine.requantize import requantize
from fp4kit.cuda.engine.rotate import rotate
from fp4kit.cuda.engine.search_scales import search_scales

__all__ = [
    "CudaClipGroup",
    "CudaGroup",
    "DeviceStages",
    "amax",
    "amax_group",
    "clip",
    "clip_amax",
    "dequantize",
    "fake_quantize",
    "matmul",
    "pack",
    "partial_amax",
    "partial_cast",
    "plain_amax",
    "plain_amax_group",
    "quantize",
    "quantize_both",
    "quantize_with_scales",
    "requantize",
    "rotate",
    "search_scales",
    "swizzle",
    "transpose",
    "unpack",
]
