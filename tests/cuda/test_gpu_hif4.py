"""Test recipes with several levels of scales, HiF4 and dual-level MXFP4: CuPy arrays give the bytes of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from exhaustive import exhaustive
from hif4_inputs import CODED, COMPILED, OTHER_LEVELS, VARIANTS, drawn
from on_gpu import ON_GPU, agree, check, cupy, differing

import fp4kit
from fp4kit.formats import FLOATS
from fp4kit.recipes import ALL_RECIPES

pytestmark = ON_GPU


@pytest.mark.parametrize("id", COMPILED)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("seed", [0, *exhaustive(range(1, 8))])
def test_drawn_arrays(seed, dtype, id):
    x = drawn(seed, (23, 1216), dtype)
    agree(fp4kit.fake_quantize, x, id)
    agree(fp4kit.fake_quantize_grouped, [x, x[:5], x[:0], x[3:]], id)
    if id in CODED:
        q = check(x, id)
        agree(fp4kit.quantize_grouped, [x, x[:5], x[:0], x[3:]], id)
        for target in FLOATS:
            agree(fp4kit.dequantize, fp4kit.quantize(x, id), target)
        columns = slice(unit := ALL_RECIPES[id].cut_multiple, 2 * unit)
        assert differing(q[2:9, columns].dequantize(), fp4kit.quantize(x, id)[2:9, columns].dequantize()) == 0


@pytest.mark.parametrize("r", VARIANTS, ids=lambda r: r.id)
def test_variants(r):
    for dtype in FLOATS:
        x = drawn(7, (16, 1024), dtype)
        agree(fp4kit.fake_quantize, x, r)
        if not r.fake_only:
            check(x, r)


@pytest.mark.parametrize("id", ["hif4-amct", "hifx5-hifloat4", "mxfp4-msmodelslim-dual", "mxfp4-msmodelslim-dual-64"])
def test_axes_outputs_and_unaligned_memory(id):
    x = drawn(9, (2, 64, 192), FLOATS[0], False)
    agree(fp4kit.quantize, x, id, axis=1)
    agree(fp4kit.quantize, x, id, hadamard=True)
    agree(fp4kit.fake_quantize, x, id, axis=1)
    q = fp4kit.quantize(x, id)
    memory = cupy.asarray(np.concatenate([np.zeros(1, np.float32), x.reshape(-1)]))
    shifted = memory[1:].reshape(x.shape)
    found = fp4kit.quantize(shifted, id)
    assert differing(found.packed, q.packed) == 0 and differing(found.block_scale, q.block_scale) == 0
    assert differing(fp4kit.fake_quantize(shifted, id), q.dequantize()) == 0
    out = fp4kit.quantize(cupy.asarray(-x), id)
    assert fp4kit.quantize(shifted, id, out=out) is out and differing(out.packed, q.packed) == 0
    values = cupy.empty(x.size + 1, np.float32)[1:].reshape(x.shape)
    assert differing(fp4kit.dequantize(found, out=values), q.dequantize()) == 0


@pytest.mark.parametrize("r", OTHER_LEVELS, ids=lambda r: r.id)
def test_other_levels_are_refused(r):
    with pytest.raises(NotImplementedError, match=f"{r.id} has rules of the specification alone"):
        fp4kit.quantize(cupy.asarray(drawn(1, (4, 128), FLOATS[0])), r)
