"""Test on a GPU that kernels launched by the documented fields of fp4kit.cuda.source give the bits of fp4kit."""

from __future__ import annotations

import numpy as np
import pytest
from exhaustive import half
from inputs import BF16, ordinary
from on_gpu import DEVICES, ON_GPU, cupy, differing

import fp4kit
import fp4kit.cuda
from fp4kit.cuda import compiler

pytestmark = ON_GPU
SHAPE = (64, 256)
ARCH = f"sm_{cupy.cuda.Device().compute_capability}"
X = ordinary(5, SHAPE, BF16)


def launch(operation, recipe, dtype=BF16, numbers=(), **given):
    """Launch a kernel: what is no option of source() is an array for a field; `numbers` are further fields."""
    names = {"axis", "scale_layout", "rounding", "hadamard", "given", "shape"}
    options = {name: given.pop(name) for name in names & given.keys()}
    kernel = fp4kit.cuda.source(operation, recipe, np.dtype(dtype).name, ARCH, **({"shape": SHAPE} | options))
    start(kernel, **{name: a.data.ptr for name, a in given.items()}, **dict(numbers))


def start(kernel, function=None, **values):
    """Launch a kernel with these values of its fields."""
    data = bytearray(kernel.pack(**values))
    function = function or compiler.function(kernel._instantiation, kernel.name, 0)
    function((kernel.grid,), (kernel.block,), (np.frombuffer(data, np.dtype((np.void, len(data)))),))


def new(array):
    """Return zeros on the device, in the shape and dtype of an array."""
    return cupy.zeros(array.shape, array.dtype)


def there(q):
    return {name: cupy.asarray(getattr(q, name)) for name in ("packed", "block_scale", "tensor_scale", "tensor_amax")}


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
def test_quantize(layout):
    q, x = fp4kit.quantize(X, "nvfp4-te", scale_layout=layout), cupy.asarray(X)
    amax, out = new(q.tensor_amax), [new(a) for a in (q.packed, q.block_scale, q.tensor_scale, q.tensor_amax)]
    launch("tensor_amax", "nvfp4-te", x=x, amax=amax)
    names = dict(zip(("packed", "scales", "tensor_scale", "amax_out"), out, strict=True))
    launch("quantize", "nvfp4-te", x=x, tensor_amax=amax, scale_layout=layout, **names)
    for a, b in zip(out, (q.packed, q.block_scale, q.tensor_scale, q.tensor_amax), strict=True):
        assert differing(a, b) == 0


def test_a_kernel_that_computes_the_amax():
    q = fp4kit.quantize(X, "nvfp4-te")
    packed, scales, scale, amax = (new(a) for a in (q.packed, q.block_scale, q.tensor_scale, q.tensor_amax))
    arrays = {"packed": packed, "scales": scales, "tensor_scale": scale, "tensor_amax": amax}
    launch("quantize", "nvfp4-te", x=cupy.asarray(X), given="none", **arrays)
    assert differing(packed, q.packed) == differing(scales, q.block_scale) == differing(amax, q.tensor_amax) == 0


def test_both_directions_after_a_hadamard_transform():
    row, column = fp4kit.quantize_both(X, "mxfp8-te")
    out = [new(a) for a in (row.packed, row.block_scale, column.packed, column.block_scale)]
    names = dict(zip(("packed", "scales", "column_packed", "column_scales"), out, strict=True))
    launch("quantize", "mxfp8-te", x=cupy.asarray(X), axis="both", **names)
    for a, b in zip(out, (row.packed, row.block_scale, column.packed, column.block_scale), strict=True):
        assert differing(a, b) == 0


def test_the_amax_of_columns_after_a_hadamard_transform():
    q = fp4kit.quantize(X, "nvfp4-te", axis=0, hadamard=True)
    amax = new(q.tensor_amax)
    launch("tensor_amax", "nvfp4-te", x=cupy.asarray(X), axis=0, hadamard=True, amax=amax)
    assert differing(amax, q.tensor_amax) == 0


def test_stochastic_rounding_from_a_seed():
    q = fp4kit.quantize(X, "mxfp4-ocp", rounding="stochastic", seed=7)
    packed, scales = new(q.packed), new(q.block_scale)
    arrays = {"x": cupy.asarray(X), "packed": packed, "scales": scales}
    launch("quantize", "mxfp4-ocp", rounding="stochastic", numbers={"seed": 7}, **arrays)
    assert differing(packed, q.packed) == differing(scales, q.block_scale) == 0


def test_given_scales():
    q = fp4kit.quantize(X, "nvfp4-modelopt")
    packed, arrays = new(q.packed), there(q)
    known = {"scales": arrays["block_scale"], "tensor_scale": arrays["tensor_scale"]}
    launch("quantize", "nvfp4-modelopt", x=cupy.asarray(X), given="scales", packed=packed, **known)
    assert differing(packed, q.packed) == 0


def test_fake_quantize_and_its_gradient():
    x, amax, values = cupy.asarray(X), cupy.asarray(np.float32(2)), new(X)
    launch("fake_quantize", "nvfp4-te", x=x, tensor_amax=amax, values=values)
    assert differing(values, fp4kit.fake_quantize(X, "nvfp4-te", tensor_amax=2.0)) == 0
    grad, out = ordinary(6, SHAPE, BF16), new(X)
    launch("fake_quantize_backward", "nvfp4-te", grad=cupy.asarray(grad), x=x, amax=amax, out=out)
    assert differing(out, fp4kit.fake_quantize_backward(grad, X, "nvfp4-te", pass_through=False, amax=2.0)) == 0


def test_dequantize():
    q = fp4kit.quantize(X, "nvfp4-te")
    arrays, values = there(q), new(X)
    names = {"packed": "packed", "scales": "block_scale", "tensor_scale": "tensor_scale"}
    launch("dequantize", "nvfp4-te", values=values, **{field: arrays[name] for field, name in names.items()})
    assert differing(values, fp4kit.dequantize(q)) == 0


def test_transpose_and_swizzle():
    q = fp4kit.quantize(X, "nvfp4-te-2d")
    turned, arrays = fp4kit.transpose(q), there(q)
    codes, scales = new(turned.packed), new(turned.block_scale)
    known = {"codes": arrays["packed"], "scales": arrays["block_scale"]}
    launch("transpose", "nvfp4-te-2d", codes_out=codes, scales_out=scales, **known)
    assert differing(codes, turned.packed) == differing(scales, turned.block_scale) == 0
    tiled = fp4kit.swizzle(q, "swizzled_128x4").block_scale
    out, back = new(tiled), new(q.block_scale)
    launch("swizzle", "nvfp4-te-2d", scale_layout="swizzled_128x4", **{"in": arrays["block_scale"], "out": out})
    launch("unswizzle", "nvfp4-te-2d", scale_layout="swizzled_128x4", **{"in": out, "out": back})
    assert differing(out, tiled) == differing(back, q.block_scale) == 0


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("name", half(["nvfp4-te", "nvfp4-te-2d", "int8-modelopt", "hif4-amct"]))
def test_arrays_may_begin_at_the_alignment_of_their_field(name, aligned):
    for kernel in fp4kit.cuda.kernels(name, "bfloat16", ARCH, shape=SHAPE):
        kernel = eval(f"{kernel.call[:-1]}, aligned={aligned})", vars(fp4kit.cuda))
        arrays = {f: cupy.zeros(1 << 17, np.uint8) for f in kernel.fields if f.needed}
        start(kernel, **{f.name: -(-a.data.ptr // 32) * 32 + f.alignment for f, a in arrays.items()})


@pytest.mark.skipif(not DEVICES, reason="no CUDA device")
def test_a_cubin_that_is_loaded_from_a_file(tmp_path):
    kernel = fp4kit.cuda.source("tensor_amax", "nvfp4-te", "bfloat16", ARCH, shape=SHAPE)
    (tmp_path / "amax.cubin").write_bytes(fp4kit.cuda.compile(kernel))
    function = cupy.RawModule(path=str(tmp_path / "amax.cubin")).get_function(kernel.name)
    x, amax = cupy.asarray(X), cupy.zeros((), np.float32)
    start(kernel, function, x=x.data.ptr, amax=amax.data.ptr)
    assert differing(amax, fp4kit.amax(X)) == 0
