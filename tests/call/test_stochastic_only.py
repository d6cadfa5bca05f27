"""Test recipes that only round stochastically: a call without a seed refuses them before any work."""

from dataclasses import replace

import numpy as np
import pytest
from inputs import SEEDED, ordinary, seeded

import fp4kit
from fp4kit.cuda import kernels, source
from fp4kit.layouts.kv import KV_LAYOUTS, PageShape
from fp4kit.ops import engines
from fp4kit.recipes import ALL_RECIPES, RECIPES
from fp4kit.training.communicators import SingleProcess
from fp4kit.training.settings import FakeQuantSettings

X = ordinary(1, (64, 64))
FLAT, ONES, PAGES = (X.ravel(), X.shape, 0), np.ones((64, 4), np.float32), KV_LAYOUTS["vllm-nhd"]
EDEN = ["nvfp4-fouroversix-ms-eden", "if4-fouroversix-ms-eden"]
CODED = ["nvfp4-comfy-kitchen-stochastic", "nvfp4-comfy-kitchen-stochastic-cuda", "mxfp4-mslk-stochastic"]
OWN = replace(RECIPES["nvfp4-te"], id=CODED[0], stochastic="comfyui_nvfp4")
NUMBERS = "numbers from 0 to 1 in the shape of x"
SEEDS = {CODED[0]: f"an int, or {NUMBERS}", CODED[1]: NUMBERS}
Q, TE = fp4kit.quantize(X, "mxfp4-ocp"), "nvfp4-te"
# Calls with a recipe, and options that they take: those with a seed for one array, for several arrays, and without one
ONE = {
    "quantize": lambda r, **o: fp4kit.quantize(X, r, **o),
    "columns": lambda r, **o: fp4kit.quantize(X, r, axis=0, hadamard=True, **o),
    "fake_quantize": lambda r, **o: fp4kit.fake_quantize(X, r, **o),
    "explain": lambda r, **o: fp4kit.explain(X, r, (1, 2), **o),
}
SEVERAL = {
    "quantize_both": lambda r, **o: fp4kit.quantize_both(X, r, **o),
    "quantize_grouped": lambda r, **o: fp4kit.quantize_grouped([X, X[:3]], r, **o),
    "stacked": lambda r, **o: fp4kit.quantize_grouped(X[None], r, **o),
    "fake_quantize_grouped": lambda r, **o: fp4kit.fake_quantize_grouped([X, X[:3]], r, **o),
    "GroupedPlan": lambda r, **o: fp4kit.GroupedPlan([X, X[:3]], r, **o).fake_quantize(),
}
TO_NEAREST = {
    "given scales": lambda r: fp4kit.quantize(X, r, block_scale=ONES.astype(np.uint8), tensor_scale=1.0),
    "requantize": lambda r: fp4kit.requantize(Q, r),
    "search_scales": lambda r: fp4kit.search_scales(X, r),
    "quantize_static": lambda r: fp4kit.quantize_static(X, r, input_scale=1.0),
    "quantize_kv": lambda r: fp4kit.quantize_kv(PAGES.zeros(PageShape(4, 16, 1, 64)), X, X, [0], recipe=r),
    "partial_amax": lambda r: fp4kit.partial_amax(*FLAT, r),
    "partial_cast": lambda r: fp4kit.partial_cast(FLAT[0], Q.packed, ONES, *FLAT[1:], r),
    "cast_master_weights": lambda r: fp4kit.cast_master_weights([fp4kit.Shard(*FLAT[:2])], SingleProcess(), r),
    "compare_recipes": lambda r: fp4kit.compare_recipes(X, [TE, r]),
    "error_budget": lambda r: fp4kit.error_budget(X, X, TE, r),
    "parity": lambda r: fp4kit.parity(*2 * [fp4kit.Contract(r)], weights={"up": X}),
    "plot": lambda r: fp4kit.plot.error_against_scale(X[0, :32], r),
    "source": lambda r: source("fake_quantize", r),
    "engine_keys": fp4kit.engine_keys,
    "FakeQuantSettings": FakeQuantSettings,
}


@pytest.mark.parametrize("call", [*ONE, *SEVERAL, *TO_NEAREST])
def test_a_call_without_a_seed_is_refused(call, monkeypatch) -> None:
    for engine in ("reference", "cpu", "cpu_cached", "_cuda"):
        monkeypatch.setattr(engines, engine, None)
    for r in (*(RECIPES[name] for name in (*EDEN, *CODED)), OWN):
        text = f"rounding is 'nearest', but {r.id} only rounds stochastically; needs rounding='stochastic' and seed, as"
        text += f" fp4kit.{'fake_' * r.fake_only}quantize takes them: {SEEDS.get(r.id, 'an int')}$"
        text += "|is a fake quantizer and has values only" * r.fake_only + f"|rounds weights stochastically .{r.id}"
        for given in {r, r.id} if RECIPES[r.id] == r else {r}:
            with pytest.raises(ValueError, match=text):
                (ONE | SEVERAL | TO_NEAREST)[call](given)


@pytest.mark.parametrize("call", [*ONE, *SEVERAL])
def test_a_seed_is_enough(call) -> None:
    """Fake quantizers have no codes, and random numbers for one shape do not fit several arrays."""
    for name in (*CODED, *EDEN * (call in ("fake_quantize", "explain", "fake_quantize_grouped", "GroupedPlan"))):
        if call in ONE or name != CODED[1]:
            (ONE | SEVERAL)[call](name, **seeded(name, X))


def test_the_recipes() -> None:
    assert {id for id, r in ALL_RECIPES.items() if r.stochastic_only} == {*EDEN, *CODED} and {*CODED} == {*SEEDED}
    assert {r.stochastic for r in RECIPES.values() if not r.stochastic_only} == {"te", "comfy_kitchen_fp8"}
    assert not replace(RECIPES[CODED[2]], id="own", stochastic="te").stochastic_only
    for id in ("mxfp4-msmodelslim-ceil-x-search", "mxfp4-hifloat4", "nvfp4-te-4over6-mae-448"):
        with pytest.raises(ValueError, match="stochastic is 'comfyui_nvfp4'; only rounds stochastically, unlike"):
            replace(ALL_RECIPES[id], stochastic="comfyui_nvfp4")


@pytest.mark.parametrize("name", SEEDED)
def test_arrays_of_these_recipes_are_read_as_others_are(name) -> None:
    q = fp4kit.quantize(X, name, **seeded(name, X))
    plain = replace(q, recipe=replace(q.recipe, id="plain", stochastic="te"))
    found = fp4kit.identify(q, X)
    assert found.matches and name not in [match.recipe for match in found] and str(q)
    assert (fp4kit.dequantize(q) == fp4kit.dequantize(plain)).all() and fp4kit.compare(q, plain).equal
    assert fp4kit.requantize(q, TE).quantized.equals(fp4kit.requantize(plain, TE).quantized)
    assert (
        fp4kit.fake_quantize_backward(X, X, name) is X and fp4kit.amax_grouped([X], name) and len(q[:32].packed) == 32
    )
    other = {"up": fp4kit.quantize(X, name, **seeded(name, X, 8))}
    assert not any(fp4kit.parity({"up": one}, other, weights={"up": X}).equal for one in (q, fp4kit.dequantize(q)))
    operations = {(kernel.operation, "rounding=" in kernel.call) for kernel in kernels(name)}
    assert {("quantize", True), ("dequantize", False), ("fake_quantize_backward", False)} <= operations
    assert not operations & {("quantize", False), ("fake_quantize", False)}
