"""Test amaxes of -0 on a GPU, where the values of amaxes are not read: results have the bits of NumPy for an amax of
+0.
"""

from __future__ import annotations

import numpy as np
import pytest
from inputs import BF16, ordinary, seeded
from on_gpu import ON_GPU, agree, all_or_few, assert_same, cupy, differing, there

import fp4kit
from fp4kit.call.inputs import takes_e8m0_amaxes
from fp4kit.call.parse import Call
from fp4kit.cuda import dispatch, matrix
from fp4kit.ops import engines as call_cache
from fp4kit.quantized.container import scale_shape, tensor_amax_shape
from fp4kit.recipes import RECIPES

pytestmark = ON_GPU

X = ordinary(0, (32, 512))
X[0] = 0
X[1, 3] = np.inf  # so that the Hadamard transform of these 16 elements takes its exact path
SCALED = [name for name, r in RECIPES.items() if r.tensor_scaling != "none"]
STATIC = [name for name, r in RECIPES.items() if r.static or takes_e8m0_amaxes(r)]
FEW = (
    "nvfp4-modelopt",
    "nvfp4-te-rowscaled",
    "nvfp4-modelopt-fake",
    "int8-modelopt-channel",
    "nvfp4-qwix",
    "fp8-modelopt",
)


@pytest.fixture(autouse=True)
def no_cached_calls():
    call_cache._CALLS.clear()


def zeros(shape):
    """Return amaxes of +0 on the host, and of -0 on the device."""
    return np.zeros(shape, np.float32), cupy.asarray(np.full(shape, -0.0, np.float32))


@pytest.mark.parametrize("name", all_or_few(SCALED, FEW))
def test_minus_zero_amax_of_a_tensor(name):
    """A tensor amax of -0 gives the bits of NumPy for +0, in the first call and in the cached call."""
    r, x = RECIPES[name], cupy.asarray(X)
    zero, negative = zeros(tensor_amax_shape(X.shape, r))
    cpu = {"tensor_amax": zero, **seeded(r, X)}
    gpu = {"tensor_amax": negative, **{key: there(value) for key, value in seeded(r, X).items()}}
    for _ in range(2):
        assert differing(fp4kit.fake_quantize(x, name, **gpu), fp4kit.fake_quantize(X, name, **cpu)) == 0
        if not r.fake_only:
            assert_same(fp4kit.quantize(x, name, **gpu), fp4kit.quantize(X, name, **cpu))


def test_minus_zero_for_columns_and_both_directions():
    x = X.astype(BF16)
    d, (zero, negative) = cupy.asarray(x), zeros(())
    for _ in range(2):
        found = fp4kit.quantize_both(d, "nvfp4-te", tensor_amax=negative)
        for gpu, cpu in zip(found, fp4kit.quantize_both(x, "nvfp4-te", tensor_amax=zero), strict=True):
            assert_same(gpu, cpu)


def test_minus_zero_for_empty_arrays():
    zero, negative = zeros(())
    empty = np.zeros((0, 32), np.float32)
    found = fp4kit.quantize(cupy.asarray(empty), "nvfp4-modelopt", tensor_amax=negative)
    assert_same(found, fp4kit.quantize(empty, "nvfp4-modelopt", tensor_amax=zero))


@pytest.mark.parametrize(
    "name", all_or_few(STATIC, ("nvfp4-modelopt-static", "nvfp4-modelopt-static-fake", "mxfp4-ocp"))
)
def test_minus_zero_block_amaxes(name):
    r, x = RECIPES[name], cupy.asarray(X)
    given = np.abs(ordinary(1, scale_shape(X.shape, r)))
    given[:, ::3] = 0
    negative = cupy.asarray(np.where(given == 0, np.float32(-0.0), given))
    options = ({} if r.tensor_scaling == "none" else {"tensor_amax": given.max()}) | seeded(r, X)
    values = fp4kit.fake_quantize(x, name, block_amax=negative, **options)
    assert differing(values, fp4kit.fake_quantize(X, name, block_amax=given, **options)) == 0
    if not r.fake_only:
        found = fp4kit.quantize(x, name, block_amax=negative, **options)
        assert_same(found, fp4kit.quantize(X, name, block_amax=given, **options))


@pytest.mark.parametrize("name", ["nvfp4-modelopt", "int8-modelopt-channel"])
def test_minus_zero_amaxes_of_groups(name):
    zero, negative = zeros(tensor_amax_shape(X.shape, RECIPES[name]))
    arrays = [X, X[:16], X[:0]]
    amaxes = [(zero[: len(x)], negative[: len(x)]) if zero.ndim else (zero, negative) for x in arrays]
    found = fp4kit.quantize_grouped([cupy.asarray(x) for x in arrays], name, tensor_amax=[d for _, d in amaxes])
    for gpu, x, (amax, _) in zip(found, arrays, amaxes, strict=True):
        assert_same(gpu, fp4kit.quantize(x, name, tensor_amax=amax))


@pytest.mark.parametrize("name", ["nvfp4-te-2d", "nvfp4-modelopt", "mxfp4-ocp"])
def test_minus_zero_amax_of_shards(name):
    """Shards whose block amaxes are given as -0 get the codes that +0 gives, even if their elements are large."""
    x = np.abs(X) + 1
    amax = np.zeros(fp4kit.partial_amax(x.ravel(), x.shape, 0, name).shape, np.float32)
    out, gpu = np.zeros((32, 256), np.uint8), cupy.asarray(np.zeros((32, 256), np.uint8))
    fp4kit.partial_cast(x.ravel(), out, amax, x.shape, 0, name)
    fp4kit.partial_cast(cupy.asarray(x.ravel()), gpu, cupy.asarray(-amax), x.shape, 0, name)
    assert differing(gpu, out) == 0


@pytest.mark.parametrize("options", [{}, {"hessian": True}], ids=["alone", "hessian"])
def test_minus_zero_amax_of_a_search(options):
    zero, negative = zeros(())
    x, name = X[2:], "nvfp4-modelopt-static"
    hessian = np.broadcast_to(np.eye(16, dtype=np.float32), (32, 16, 16)).copy()
    host, device = ({"hessian": h} if options else {} for h in (hessian, cupy.asarray(hessian)))
    found = fp4kit.search_scales(cupy.asarray(x), name, tensor_amax=negative, **device)
    assert differing(found, fp4kit.search_scales(x, name, tensor_amax=zero, **host)) == 0


def test_minus_zero_amax_of_an_amax_search():
    zero, negative = zeros(())
    found = fp4kit.search_scales(cupy.asarray(X[2:]), "fp8-modelopt", tensor_amax=negative)
    assert differing(found, fp4kit.search_scales(X[2:], "fp8-modelopt", tensor_amax=zero)) == 0


ROW_SCALED = ("nvfp4-te-rowscaled", "nvfp4-flashinfer-token", "nvfp4-flashinfer-token-4over6-mae-448")


@pytest.mark.parametrize(
    "shape", [(64, 4096), (1, 16384), (131, 272), (300, 16), (3, 16400), (33, 24), (70, 1024), (65, 784), (66, 2048)]
)
@pytest.mark.parametrize("name", [*ROW_SCALED, "fp8-modelopt-channel", "int8-modelopt-channel"])
def test_kernels_find_the_amaxes_of_rows(name, shape):
    """A small array takes one launch, rows of more than 16384 elements or not of whole 16 bytes take two."""
    r = RECIPES[name]
    if r.block and shape[1] % 16:
        shape = (shape[0], 48)
    x = ordinary(3, shape).astype(BF16)
    x[::7] *= np.float32(2.0**-120)
    x[0, -1], x[-1, 0], x[len(x) // 2, 5] = np.nan, np.inf, -np.inf
    x[len(x) // 3] = -0.0
    d = cupy.asarray(x)
    for _ in range(2):
        agree(fp4kit.fake_quantize, x, name)
        for layout in ("linear", "swizzled_128x4") if r.scale else ("linear",):
            if not r.fake_only:
                found, expected = (fp4kit.quantize(a, name, scale_layout=layout) for a in (d, x))
                assert found.tensor_amax.shape == (len(x),)
                assert_same(found, expected)


@pytest.mark.parametrize("name", ["nvfp4-te-rowscaled", "nvfp4-flashinfer-token-4over6-mae-448"])
def test_kernels_find_the_amaxes_of_wide_rows(monkeypatch, name):
    """Thread blocks are larger for rows that do not fit into one step of 256 threads."""
    monkeypatch.setattr(dispatch, "MANY_ROWS", 2)
    for columns in (2**14 + 16, 2**16 + 32):
        x = ordinary(6, (3, columns)).astype(BF16)
        x[0, 40_000 % columns], x[1, -1] = np.nan, np.inf
        assert_same(fp4kit.quantize(cupy.asarray(x), name), fp4kit.quantize(x, name))


@pytest.mark.parametrize("columns", [4096, 4104, 9000, 4097, 2**15])
@pytest.mark.parametrize("name", ["fp8-modelopt-channel", "int8-modelopt-channel"])
def test_kernels_find_the_amaxes_of_rows_without_blocks(monkeypatch, name, columns):
    monkeypatch.setattr(dispatch, "MANY_ROWS", 3)
    r = RECIPES[name]
    x = ordinary(7, (3, columns)).astype(BF16)
    x[0, 1000], x[1, -1], x[2] = np.nan, np.inf, x[2] / 1024
    request = matrix.launch_request(Call("quantize", x, r, 1, x, None))._replace(finds_amax=True)
    assert dispatch.finds_rows(request)
    for _ in range(2):
        agree(fp4kit.fake_quantize, x, name)
        if not r.fake_only:
            assert_same(fp4kit.quantize(cupy.asarray(x), name), fp4kit.quantize(x, name))


@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
@pytest.mark.parametrize("columns", [2**15 + 16, 2**15 + 8, 3 * 2**14])
def test_several_thread_blocks_share_a_long_row(columns, dtype):
    """Later calls are for smaller numbers, so that amaxes of earlier ones would be seen."""
    x = np.random.default_rng(5).standard_normal((1, columns), np.float32)
    for i, place in enumerate((0, 2**14 - 1, 2**14, columns - 1, columns // 2)):
        a = (x / 2**i).astype(dtype)
        a[0, place] = 7.9 / 2**i
        if place == columns // 2:
            a[0, place - 1] = np.nan
        d = cupy.asarray(a)
        assert differing(fp4kit.amax(d, axis=-1), fp4kit.amax(a, axis=-1)) == 0
        for name in ("fp8-modelopt-channel", *(("nvfp4-te-rowscaled",) if columns % 16 == 0 else ())):
            for _ in range(2):
                assert_same(fp4kit.quantize(d, name), fp4kit.quantize(a, name))


@pytest.mark.parametrize("name", ["nvfp4-te-rowscaled", "fp8-modelopt-channel"])
def test_kernels_find_the_amaxes_of_rows_of_stacks_and_out(name):
    x = ordinary(4, (2, 24, 64))
    d = cupy.asarray(x)
    for layout in ("linear", "swizzled_128x4") if RECIPES[name].scale else ("linear",):
        expected = fp4kit.quantize(x, name, scale_layout=layout)
        out = fp4kit.quantize(d, name, scale_layout=layout)
        assert_same(out, expected)
        for part in (out.packed, out.tensor_scale, out.tensor_amax):
            part.fill(7)
        assert_same(fp4kit.quantize(d, name, scale_layout=layout, out=out), expected)
        agree(fp4kit.fake_quantize, x, name)
