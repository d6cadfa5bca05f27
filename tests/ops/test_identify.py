"""Test identify: it names the recipe, variants of it, a Hadamard transform or stochastic rounding, or else the nearest
recipe.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from exhaustive import by_default, exhaustive
from inputs import NAMES, STOCHASTIC, ordinary

import fp4kit
from fp4kit.checkpoint.identify.corruptions import code_orders
from fp4kit.formats import E8M0, MX4, NF4
from fp4kit.layouts import packed, swizzle_scales, unpacked
from fp4kit.ops.identify import Match, Variation, either
from fp4kit.recipes import RECIPES

identify_module = import_module("fp4kit.ops.identify")  # fp4kit.ops.identify is the function
X = (np.random.default_rng(7).standard_normal((64, 128)) * 0.02).astype(ml_dtypes.bfloat16)


def test_one_recipe_and_several() -> None:
    found = fp4kit.identify(fp4kit.quantize(X, "nvfp4-compressed-tensors"), X)
    assert found.verdict == "nvfp4-compressed-tensors made these bytes" and not found.variations
    found = fp4kit.identify(fp4kit.quantize(X, "mxfp4-flashinfer"), X)
    others = len(found.exact) - 1
    assert (
        others > 2
        and found.verdict == f"{found.exact[0]} or {others} others that agree on this tensor made these bytes"
    )
    few = fp4kit.Identification(tuple(found)[:2])
    assert few.verdict == f"{either(few.exact)} made these bytes (they agree on this tensor)"
    rows = str(found).splitlines()
    named = f"they are {', '.join(found.exact[:8])} and {others - 7} more (found.exact)"
    assert rows.pop(1) == named and named in found._repr_html_()
    four = fp4kit.Identification(tuple(found)[:4])
    assert str(four).splitlines()[1] == f"they are {', '.join(four.exact)}" and "they are" not in str(few)
    assert rows[2].split("  ")[0] == f"{found.exact[0]} and {others} more" and len(rows) == 13
    assert sum(int(row.split()[0]) for row in rows[12:]) < len(tuple(found)) and rows[12].split()[1:3] == [
        "more",
        "recipes",
    ]
    assert len(found.exact) > 1 and rows[0] == found.verdict and rows[1].startswith("recipe ")


def test_names_in_a_row() -> None:
    assert either(["a"]) == "a" and either(["a", "b"]) == "a or b" and either(["a", "b", "c"]) == "a, b or c"


@pytest.mark.parametrize("name", by_default(NAMES[::12], NAMES[::2]))
@pytest.mark.parametrize("axis, hadamard", [(0, True), pytest.param(-1, "no_signs", marks=pytest.mark.exhaustive)])
def test_transformed(name, axis, hadamard) -> None:
    x = ordinary(3).astype(ml_dtypes.bfloat16)
    q = fp4kit.quantize(x, name, axis=axis, hadamard=hadamard)
    found = fp4kit.identify(replace(q, tensor_amax=None), x)
    assert Variation(name, hadamard, False) in found.variations and not found.exact
    assert not any(v.stochastic for v in found.variations[:1])
    assert found.verdict.startswith("Hadamard-transformed: ")
    assert found.verdict.endswith(f"with hadamard={hadamard!r} reproduces all bytes")


@pytest.mark.parametrize("name", by_default(STOCHASTIC[::12], STOCHASTIC[::2]))
@pytest.mark.parametrize("hadamard", [True, *exhaustive([False])])
def test_stochastic(name, hadamard) -> None:
    x = ordinary(4, (128, 256)).astype(ml_dtypes.bfloat16)
    q = fp4kit.quantize(x, name, rounding="stochastic", seed=9, hadamard=hadamard)
    found = fp4kit.identify(q, x)
    assert Variation(name, hadamard, True) in found.variations and not found.exact
    start = "Hadamard-transformed, stochastic: " if hadamard else "stochastic: "
    assert found.verdict.startswith(f"{start}scales equal, and codes are each one of the two neighbors that ")
    codes = unpacked(q.packed.copy(), q.recipe.element.packing)
    # Set the largest code to 0, so that it is not one of the two codes that stochastic rounding may give.
    codes[np.unravel_index(np.argmax(q.recipe.element.decode(codes)), codes.shape)] = 0
    other = fp4kit.identify(replace(q, packed=packed(codes, q.recipe.element.packing)), x)
    assert not other.variations and other.verdict.startswith("no recipe reproduces all bytes; nearest is ")


@pytest.mark.parametrize("name", [name for name in STOCHASTIC if RECIPES[name].scale is not None][::16])
def test_stochastic_needs_every_scale(name) -> None:
    """Stochastic rounding is reported only if all scales fit.

    Zero codes are neighbors of zeros under any scale, so they prove nothing.
    """
    x = ordinary(4).astype(ml_dtypes.bfloat16)
    x[-1, -32:] = 0
    q = fp4kit.quantize(x, name, rounding="stochastic", seed=9)
    assert fp4kit.identify(q, x).variations
    scales = q.block_scale.copy()
    scales[-1, -1] += 1
    assert not fp4kit.identify(replace(q, block_scale=scales), x).variations


def test_scales_that_underflow_are_no_fault() -> None:
    """A zero scale over other codes is a fault only if the block is too large for it."""
    rows = np.random.default_rng(0).standard_normal((24, 128)) * np.exp2(np.arange(24)[:, None] - 18)
    x, underflow = rows.astype(ml_dtypes.bfloat16), 0
    for r in (RECIPES[name] for name in NAMES):
        if r.scale is None or not r.scale.has_zero or r.block_rows > 1:
            continue
        for hadamard in (False, True):
            q = fp4kit.quantize(x, r, hadamard=hadamard)
            codes, scales = unpacked(q.packed, r.element.packing), q.block_scale.copy()
            zero = (scales.view(np.uint8) == 0).repeat(r.block_size, -1)
            underflow += (codes[zero] & (r.element.sign_bit - 1)).any()
            assert not identify_module._fault(q, x), r.id
        scales[-1, -1] = 0
        lost = f"scales are zero in 1 of {scales.size} blocks, although their codes are not"
        q = replace(q, block_scale=scales)
        assert identify_module._fault(q, x) == lost, r.id
        codes[-1, -r.block_size :] = 0
        assert not identify_module._fault(replace(q, packed=packed(codes, r.element.packing)), x), r.id
    assert underflow > 50
    q = fp4kit.quantize(x, "nvfp4-jax-global-jit", rounding="stochastic", seed=9)
    assert Variation(q.recipe.id, False, True) in fp4kit.identify(q, x).variations
    codes = unpacked(q.packed, q.recipe.element.packing).copy()
    codes[-1, np.argmax(q.recipe.element.decode(codes[-1]))] = 0
    found = fp4kit.identify(replace(q, packed=packed(codes, q.recipe.element.packing)), x)
    assert found.verdict.startswith("no recipe reproduces all bytes; nearest is ")


def test_a_changed_code_is_not_stochastic() -> None:
    """One changed code is not taken for stochastic rounding, even if it is the other neighbor of its element.

    Stochastic rounding would not choose the nearest code for all other elements.
    """
    q = fp4kit.quantize(X, "nvfp4-compressed-tensors")
    bytes_ = q.packed.copy()
    upper = fp4kit.quantize(X, q.recipe, rounding="stochastic", seed=np.full(X.shape, 255, np.uint8)).packed
    at = np.argwhere(bytes_ != upper)[0]
    bytes_[tuple(at)] = upper[tuple(at)]
    found = fp4kit.identify(replace(q, packed=bytes_), X)
    assert found.verdict.endswith("; nearest is nvfp4-compressed-tensors with all but 1 of 4,608 bytes")
    assert not found.variations


@pytest.mark.parametrize("dtype", ["bfloat16", *exhaustive(["float32", "float16"])])
@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp8-te", "int8-modelopt"])
def test_variations_are_tried_where_signs_agree(name, dtype, monkeypatch) -> None:
    """identify tries a Hadamard transform only if the signs of the transformed x agree with the signs of the codes.

    One wrong code does not prevent the attempt. If x contains NaN, every transform is tried.
    """
    tried, untried = set(), {False} if name == "int8-modelopt" else set()  # integers are not rounded stochastically
    monkeypatch.setattr(
        "fp4kit.ops.identify._fits_probe", lambda q, x, r, hadamard, stochastic: bool(tried.add(hadamard))
    )
    mine, other = (np.random.default_rng(seed).standard_normal((32, 64)).astype(dtype) for seed in (1, 2))
    for hadamard in (False, True, "no_signs"):
        q = fp4kit.quantize(mine, name, hadamard=hadamard)
        fp4kit.identify(q, other)
        assert not tried
        changed = q.packed.copy()
        changed[0, 0] ^= 0x80
        fp4kit.identify(replace(q, packed=changed), mine)
        assert tried == {hadamard} - untried
        tried.clear()
    other[0, 0] = np.nan
    fp4kit.identify(q, other)
    assert tried == {False, True, "no_signs"} - untried


def test_a_share_never_rounds_to_all() -> None:
    for differing, said in ((1, "all but 1 of 1,000,000 bytes"), (1001, "99.89% of bytes")):
        found = fp4kit.Identification((Match("a", 10**6 - differing, 10**6, differing, 0),))
        assert found.verdict == f"no recipe reproduces all bytes; nearest is a with {said}"
    assert fp4kit.Identification(()).verdict == "no recipe has this format"


def test_variants() -> None:
    x = ordinary(1)
    own = replace(RECIPES["mxfp4-ocp"], rounding="rz")
    found = fp4kit.identify(fp4kit.quantize(x, own), x)
    assert found.verdict == "mxfp4-ocp with rounding=rz made these bytes"
    wide = replace(RECIPES["mxfp4-ocp"], block=(1, 64))
    made = fp4kit.quantize(x, replace(RECIPES["mxfp4-te"], block=(1, 64)))
    found = fp4kit.identify(replace(made, recipe=wide), x)
    assert "mxfp4-te with block=(1, 64)" in found.exact and "mxfp4-ocp with block=(1, 64)" not in found.exact
    assert not any("block" in m.recipe for m in fp4kit.identify(fp4kit.quantize(x, "mxfp4-ocp"), x))
    renamed = replace(RECIPES["mxfp4-ocp"], id="mine", rounding="rz")
    assert fp4kit.identify(fp4kit.quantize(x, renamed), x).verdict == "mine made these bytes"
    transformed = fp4kit.quantize(x, wide, hadamard=True)
    verdict = fp4kit.identify(transformed, x).verdict
    assert "mxfp4-ocp with block=(1, 64)" in verdict and "with hadamard=True reproduces all bytes" in verdict


def test_another_dtype_is_named_if_no_recipe_is_found() -> None:
    dtypes, told = [np.dtype(one) for one in (np.float32, np.float16, ml_dtypes.bfloat16)], set()
    for id, a, b in product(("nvfp4-te", "mxfp4-ocp", "int4-qat"), dtypes, dtypes):
        found = fp4kit.identify(fp4kit.quantize(ordinary(3).astype(a), id), ordinary(3).astype(b))
        note = f"x is {b}, but q.dtype is {a}; rounding x to another dtype may have changed codes"
        is_told = a != b and not (found.exact or found.variations)
        assert (note in str(found).splitlines(), "q.dtype" in found._repr_html_()) == (is_told, is_told), (id, a, b)
        told |= {note} if is_told else set()
    assert len(told) == 6


def test_larger_than_the_probe_and_other_shapes() -> None:
    """A difference is found beyond the first elements, which identify compares first."""
    x = ordinary(2, (3, 96, 128)).astype(ml_dtypes.bfloat16)
    for axis in (-1, 1):
        q = fp4kit.quantize(x, "nvfp4-te", axis=axis, hadamard=True)
        assert fp4kit.identify(q, x).variations
        bytes_ = q.packed.copy()
        bytes_[-1, -1, -1] ^= 1
        assert not fp4kit.identify(replace(q, packed=bytes_), x).variations
    empty = np.zeros((0, 128), np.float32)
    assert fp4kit.identify(fp4kit.quantize(empty, "nvfp4-te"), empty).exact


@pytest.mark.parametrize("name", by_default(("nvfp4-te", "nvfp4-te-2d", "nvfp4-te-rowscaled", "mxfp8-te"), NAMES))
@pytest.mark.parametrize("known", [True, False])
def test_large_arrays_by_a_sample(name, known, monkeypatch):
    """identify compares a sample of a large array first. If all bytes are equal, the verdict is still "exact".

    This holds for a given and for an implied tensor_amax.
    """
    x = ordinary(3, (64, 512), ml_dtypes.bfloat16)
    q = fp4kit.quantize(x, name)
    q = q if known else replace(q, tensor_amax=None)
    expected = fp4kit.identify(q, x)
    monkeypatch.setattr("fp4kit.ops.identify.SAMPLE", 1 << 13)
    found = fp4kit.identify(q, x)
    assert found.exact == expected.exact and name in found.exact
    assert {m.recipe for m in found} == {m.recipe for m in expected}
    assert all(m.whole for m in found if m.recipe in found.exact)
    assert all(m.fraction < 1 for m in found if not m.whole)


@pytest.mark.parametrize("axis", [-1, 0])
def test_a_sample_alone_proves_nothing(axis, monkeypatch):
    monkeypatch.setattr("fp4kit.ops.identify.SAMPLE", 1 << 13)
    x = ordinary(3, (512, 512), ml_dtypes.bfloat16)
    q = fp4kit.quantize(x, "mxfp4-ocp", axis=axis)
    bytes_ = q.packed.copy()
    bytes_[-1, -1] ^= 1
    found = fp4kit.identify(replace(q, packed=bytes_), x)
    assert not found.exact and found.verdict.startswith(
        "no recipe reproduces all bytes; nearest is mxfp4-ocp or mxfp4-torchao-floor-018 with all but 1 of"
    )
    assert "of 8,704 bytes" not in str(found).splitlines()[2] and "of 4,352 bytes" in str(found)


@pytest.mark.parametrize("recipe", ["nvfp4-te", "nvfp4-te-4over6-mse-256", "nvfp4-modelopt", "fp8-modelopt-channel"])
@pytest.mark.parametrize(
    "options", [{"hadamard": True}, {"rounding": "stochastic", "seed": 3}], ids=["hadamard", "stochastic"]
)
def test_tensor_scales_that_are_nan(recipe, options):
    """If the stored tensor scale is NaN, identify does not try rules that never give a NaN scale."""
    if "4over6" in recipe:
        options = {"hadamard": True}
    x = ordinary(3, (48, 64))
    x[5, 7] = np.nan
    q = fp4kit.quantize(x, recipe, **options)
    q = replace(q, tensor_scale=np.full_like(q.tensor_scale, np.nan), tensor_amax=None)
    assert fp4kit.identify(q, x).verdict
    assert "no recipe reproduces all bytes" in fp4kit.identify(q, np.nan_to_num(x)).verdict


def test_formats_without_a_sign_bit():
    x = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    for element, scale in ((NF4, "float32"), (MX4, E8M0)):
        q = fp4kit.quantize(x, fp4kit.custom_recipe("mine", element, scale, 32))
        assert fp4kit.identify(q, x).exact
        assert "no recipe reproduces all bytes; nearest is" in fp4kit.identify(q, x * 3).verdict


@pytest.mark.parametrize("wrong", [2, 3])
def test_a_probe_may_differ_in_one_of_1024_codes(wrong: int) -> None:
    """Two of 2,048 codes may be others, and may have the other sign; three may not."""
    x = X[:32, :64]
    q = fp4kit.quantize(x, "mxfp4-ocp")
    codes = unpacked(q.packed, q.recipe.element.packing)
    codes.flat[np.flatnonzero(codes & 7)[:wrong]] ^= 8
    changed = replace(q, packed=packed(codes, q.recipe.element.packing))
    assert identify_module._has_signs_of(changed, x, False) == (wrong == 2)
    assert identify_module._fits_probe(changed, x, q.recipe, False, False) == (wrong == 2)


def test_an_unrelated_array_is_probably_not_the_source() -> None:
    q = fp4kit.quantize(X, "nvfp4-te")
    found = fp4kit.identify(q, ordinary(77, X.shape).astype(X.dtype) * 3)
    assert 0 < found.matches[0].fraction < 0.5
    assert found.verdict.endswith("% of bytes; so few that x is probably not the source")


def faulty(q: fp4kit.Quantized) -> dict[str, fp4kit.Quantized]:
    """Return {fault, as `fp4kit identify` names it: q with this fault}."""
    codes, found = unpacked(q.packed, q.recipe.element.packing), {}
    for order in code_orders(q.recipe, codes.shape[-1])[1:]:
        stored = np.empty_like(codes)
        stored[:, order.undo(np.arange(codes.shape[-1])[None])[0]] = codes
        found[str(order.mishap)] = replace(q, packed=packed(stored, q.recipe.element.packing))
    swizzled = swizzle_scales(q.block_scale.view(np.uint8), "swizzled_128x4").reshape(q.block_scale.shape)
    found["block scales are swizzled_128x4, declared linear"] = replace(
        q, block_scale=swizzled.view(q.block_scale.dtype)
    )
    if q.tensor_scale is not None:
        inverse = replace(q, tensor_scale=1 / q.tensor_scale, tensor_amax=None)
        found["tensor scale is inverted: its reciprocal is stored"] = inverse
    return found


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-flashinfer"])
def test_faults_have_the_names_that_the_command_line_gives_them(name) -> None:
    x = ordinary(5, (128, 256))
    for fault, q in faulty(fp4kit.quantize(x, name)).items():
        found = fp4kit.identify(q, x)
        assert found.fault == fault and name in found.before_fault and not found.exact
        assert repr(found).startswith(f"Identification({fault}; before that, {name} or "), fault
    stack = x.reshape(2, 64, 256)
    q = fp4kit.quantize(stack, name, axis=1)
    assert fp4kit.identify(replace(q, packed=q.packed << 4 | q.packed >> 4), stack).fault == "nibbles are swapped"


def test_codes_that_others_made_under_the_scales_of_a_recipe() -> None:
    q = fp4kit.quantize(X, "nvfp4-te")
    verdict = fp4kit.identify(replace(q, packed=q.packed ^ np.uint8(0x11)), X).verdict
    assert "all block scales are those of a recipe" in verdict and "probably not" not in verdict


def test_a_verdict_names_few_recipes() -> None:
    """Each kind of verdict names one of more than three recipes and counts the others, as the table does."""
    matches = tuple(Match(name, 9, 10, 1, 0) for name in NAMES)
    exact = tuple(replace(match, equal=10) for match in matches)
    options = [{"variations": tuple(Variation(name, True, s) for name in NAMES)} for s in (False, True)]
    options += [{"fault": "zeros"}, {"fault": "swapped", "before_fault": tuple(NAMES)}, {}]
    for found in [fp4kit.Identification(exact), *(fp4kit.Identification(matches, **one) for one in options)]:
        plainest = str(found).splitlines()[-1].split(" and ")[0]
        assert found.verdict.count(f"{plainest} or {len(NAMES) - 1} others") == 1 and len(found.verdict) < 200


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["nvfp4-te", "nvfp4-modelopt", "mxfp4-ocp", "fp8-modelopt", "hif4-hifloat4"])
def test_decoded_values_tell_no_producer(name: str, dtype: type) -> None:
    """Many recipes keep the values that q decodes to, so none is named; nor for half of them."""
    x = np.random.default_rng(0).standard_normal((64, 2048), dtype=np.float32)
    q = fp4kit.quantize(x, name)
    values = np.asarray(fp4kit.dequantize(q)).astype(dtype)
    found = fp4kit.identify(q, values)
    assert found.decoded and found.verdict.startswith("x already holds decoded values: ") and not found.fault
    first, second, *_ = str(found).splitlines()
    assert "made" not in first and second == "give the array that q was made from"
    values[32:] = x[32:].astype(dtype)
    assert not fp4kit.identify(q, values).decoded and not fp4kit.identify(q, x).decoded
    assert not fp4kit.identify(fp4kit.quantize(x * 0, name), x * 0).decoded
