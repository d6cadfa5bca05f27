"""Test AmaxState: names in both spellings, maxima over calls, shared amaxes, and that NaN is never hidden.

Files and ranks have their own tests.
"""

import re

import ml_dtypes
import numpy as np
import pytest
from amax_inputs import FC1, FC2, QKV, SHAPES, assert_same_state, state_of
from hypothesis import given, settings
from hypothesis import strategies as st
from together import together

from fp4kit.evidence.testing import assert_same_bits
from fp4kit.training.amax_state import AmaxCollector, AmaxName

# ---- names ----


@together(
    "key, expected",
    [
        ("m.weight_quantizer.3._amax", ("m.weight_quantizer", 3, "_amax")),
        ("m.weight_quantizer_3._amax", ("m.weight_quantizer", 3, "_amax")),
        ("m.weight_quantizer_17", ("m.weight_quantizer", 17, "_amax")),
        ("m.weight_quantizer._global_amax", ("m.weight_quantizer", None, "_global_amax")),
        ("weight_quantizer.0._global_amax", ("weight_quantizer", 0, "_global_amax")),
        ("a.3.input_quantizer", ("a.3.input_quantizer", None, "_amax")),
        ("a.k_bmm_quantizer._amax", ("a.k_bmm_quantizer", None, "_amax")),
        ("a.weight_quantizers.1._amax", ("a.weight_quantizers", 1, "_amax")),
        ("my_quantizer_2.weight_quantizer_5._amax", ("my_quantizer_2.weight_quantizer", 5, "_amax")),
    ],
)
def test_names(key, expected):
    name = AmaxName.parse(key)
    assert (name.base, name.index, name.buffer) == expected
    for separator in "._":
        assert AmaxName.parse(name.key(separator)) == name


@together(
    "key",
    [
        "m.weight",
        "m.weight_quantizer.3._scale",
        "m.weight_quantizer.3.0._amax",
        "m.weight_quantizer.x",
        "m.weight_quantizer.-1._amax",
        "m.weight_quantizer.٣._amax",
        "_amax",
        "",
    ],
)
def test_invalid_names_are_rejected(key):
    assert AmaxName.find(key) is None
    with pytest.raises(ValueError, match=re.escape(f"{key!r} names no quantizer; needs")):
        AmaxCollector().collect(key, np.float32(1))
    with pytest.raises(KeyError):
        state_of({})[key]


@together(
    "pattern, hits",
    [
        ("*weight_quantizer", ["a.weight_quantizer.0", "a.weight_quantizer.11", "b.weight_quantizer"]),
        ("*weight_quantizer._amax", ["a.weight_quantizer.0", "a.weight_quantizer.11", "b.weight_quantizer"]),
        ("*weight_quantizer.11", ["a.weight_quantizer.11"]),
        ("*weight_quantizer_1?", ["a.weight_quantizer.11"]),
        ("a.*", ["a.weight_quantizer.0", "a.weight_quantizer.11", "a.input_quantizer"]),
        ("*input_quantizer*", ["a.input_quantizer"]),
    ],
)
@together("separator", [".", "_"])
def test_wildcards_match_both_spellings(pattern, hits, separator):
    keys = ["a.weight_quantizer.0", "a.weight_quantizer.11", "b.weight_quantizer", "a.input_quantizer"]
    spelled = [re.sub(r"quantizer\.(\d+)", rf"quantizer{separator}\1", key) for key in keys]
    state = state_of({key: i for i, key in enumerate(spelled)})
    assert sorted(state.select(pattern)) == sorted(f"{key}._amax" for key in hits)
    with pytest.raises(ValueError, match=re.escape("select: '*output*' matches none of 4 keys")):
        state.select(pattern, "*output*")


# ---- collecting ----


@settings(max_examples=80)
@given(
    shape=st.sampled_from(list(SHAPES.values())),
    calls=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["f4", "f2", ml_dtypes.bfloat16]), st.integers(0, 99)), min_size=1
    ),
)
def test_maximum_over_calls(shape, calls):
    collector, expected = AmaxCollector(), {}
    for expert, dtype, seed in calls:
        value = np.exp2(np.random.default_rng(seed).uniform(-20, 15, shape)).astype(dtype)
        key = f"{FC1}.{expert}._amax"
        collector.collect(key if seed % 2 else f"{FC1}_{expert}", value)
        expected[key] = np.maximum(expected.get(key, 0), value.astype(np.float32)).astype(np.float32)
    assert_same_state(collector.freeze(), expected)


@pytest.mark.parametrize("dtype", ["f4", "f2", ml_dtypes.bfloat16])
def test_every_magnitude_of_16_bits_comes_in_exactly(dtype):
    """Every amax in a 16-bit dtype is stored exactly, subnormals and infinity included; -0 becomes +0."""
    infinity = 0x7F80 if dtype == ml_dtypes.bfloat16 else 0x7C00
    values = np.arange(infinity + 1, dtype=np.uint16).view("f2" if dtype == "f4" else dtype).astype(dtype)
    collector = AmaxCollector()
    for part in (values[::-1], np.zeros_like(values), -np.zeros_like(values)):
        collector.collect("m.weight_quantizer", part)
    assert_same_bits(collector.freeze()["m.weight_quantizer"], values[::-1].astype(np.float32) + np.float32(0))


def test_grouped_is_the_loop_of_single_calls():
    rng = np.random.default_rng(1)
    one, all_at_once = AmaxCollector(), AmaxCollector()
    for _ in range(3):
        values = rng.random((5, 4, 1)).astype(np.float32)
        all_at_once.collect_grouped(FC1, values)
        for i, value in enumerate(values):
            one.collect(f"{FC1}.{i}", value)
    assert_same_state(all_at_once.freeze(), dict(one.freeze()))
    flat = AmaxCollector()
    flat.collect_grouped(FC1, np.arange(3, dtype=np.float32))
    assert_same_state(flat.freeze(), {f"{FC1}.{i}": np.float32(i) for i in range(3)})


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_nan_is_never_hidden(shape):
    """A NaN or negative amax makes freeze raise an error with the key, whatever values come before or after it."""
    for bad, what in ((np.nan, "NaN"), (-np.nan, "NaN"), (-1e-30, "negative values")):
        for order in ((1, bad, np.inf), (bad, 1, 2), (np.inf, bad)):
            collector = AmaxCollector()
            collector.collect(f"{FC1}.0", np.ones(shape, np.float32))
            for value in order:
                collector.collect(f"{FC1}.1", np.full(shape, value, np.float32))
            count = int(np.prod(shape))
            with pytest.raises(ValueError, match=re.escape(f"freeze: {FC1}.1._amax holds {what} ({count} of")):
                collector.freeze()


def test_later_changes_of_an_array_do_not_count():
    value, collector = np.ones(3, np.float32), AmaxCollector()
    collector.collect("a.weight_quantizer", value)
    value[:] = 5
    state = collector.freeze()
    collector.collect("a.weight_quantizer", value)
    assert_same_state(state, {"a.weight_quantizer": np.ones(3)})
    assert_same_state(collector.freeze(), {"a.weight_quantizer": np.full(3, 5)})
    with pytest.raises(ValueError, match="read-only"):
        state["a.weight_quantizer"][0] = 7


def test_a_torch_tensor_is_collected():
    torch = pytest.importorskip("torch")
    collector = AmaxCollector()
    collector.collect("a.weight_quantizer", torch.tensor([1.5, 2.0], dtype=torch.bfloat16))
    assert_same_state(collector.freeze(), {"a.weight_quantizer": [1.5, 2]})


def test_collect_errors():
    collector = AmaxCollector()
    collector.collect(f"{FC1}.0", np.float32(1))
    collector.collect_grouped(FC2, np.ones((2, 3), np.float32))
    errors = [
        (f"{FC1}_0", np.ones(2, np.float32), f"collect: {FC1}.0._amax is (2,) on the CPU, but was () on the CPU"),
        (f"{FC2}.1", np.ones(3, np.float32), "is collected by collect_grouped already"),
    ]
    for key, value, message in errors:
        with pytest.raises(ValueError, match=re.escape(message)):
            collector.collect(key, value)
    with pytest.raises(TypeError, match=re.escape(f"collect: {FC1}.0._amax: amax is float64; needs float32, float16")):
        collector.collect(f"{FC1}.0", np.ones(1))
    grouped_errors = [
        (f"{FC2}.1", np.ones(2, np.float32), "names one expert"),
        (FC1, np.ones(2, np.float32), "has some"),
        (QKV, np.float32(1), "is 0-d; needs [N, ...]"),
        (FC2, np.ones((3, 3), np.float32), "(3, 3) on"),
    ]
    for key, value, message in grouped_errors:
        with pytest.raises(ValueError, match=re.escape(message)):
            collector.collect_grouped(key, value)


SHARE = [("gate_proj", "up_proj"), ("q_proj", "k_proj", "v_proj")]


def test_sharing():
    """Quantizers of one parent, one expert and one kind share an amax, if their amaxes are scalars."""
    values = {
        "l.0.mlp.gate_proj.weight_quantizer": 1,
        "l.0.mlp.up_proj.weight_quantizer": 2,
        "l.1.mlp.up_proj.weight_quantizer": 9,
        "l.0.attn.q_proj.weight_quantizer": 3,
        "l.0.attn.k_proj.weight_quantizer": 5,
        "l.0.attn.v_proj.weight_quantizer": [4],
        "l.0.attn.q_proj.input_quantizer": 7,
        "l.0.attn.k_proj.input_quantizer": 6,
        "l.0.attn.o_proj.weight_quantizer": 8,
        "e.gate_proj.weight_quantizer.0": 1,
        "e.up_proj.weight_quantizer.0": 2,
        "e.gate_proj.weight_quantizer.1": 4,
        "e.up_proj.weight_quantizer.1": 3,
        "e.3.gate_proj.weight_quantizer": 6,
        "e.3.up_proj.weight_quantizer": 5,
        "r.gate_proj.weight_quantizer": [[1], [2]],
        "r.up_proj.weight_quantizer": [[2], [1]],
        "gate_proj.weight_quantizer": 1,
        "up_proj.weight_quantizer": 3,
    }
    collector = AmaxCollector()
    for key, value in values.items():
        collector.collect(key, np.asarray(value, np.float32))
    assert_same_state(collector.freeze(), values)
    shared = dict(values)
    for key, value in {
        "l.0.mlp.gate_proj.weight_quantizer": 2,
        "l.0.attn.q_proj.weight_quantizer": 5,
        "l.0.attn.v_proj.weight_quantizer": [5],
        "l.0.attn.k_proj.input_quantizer": 7,
        "e.gate_proj.weight_quantizer.0": 2,
        "e.up_proj.weight_quantizer.1": 4,
        "e.3.up_proj.weight_quantizer": 6,
        "gate_proj.weight_quantizer": 3,
    }.items():
        shared[key] = value
    assert_same_state(collector.freeze(SHARE), shared)
    with pytest.raises(ValueError, match="needs each name in one group only"):
        collector.freeze([("a", "b"), ("b", "c")])


def test_sharing_hides_no_nan():
    collector = AmaxCollector()
    collector.collect("m.gate_proj.weight_quantizer", np.float32(np.nan))
    collector.collect("m.up_proj.weight_quantizer", np.float32(2))
    with pytest.raises(ValueError, match=re.escape("m.gate_proj.weight_quantizer._amax holds NaN")):
        collector.freeze(SHARE)


def test_loaders_fusions_can_be_shared():
    from fp4kit.checkpoint.selection.names import FUSIONS

    collector = AmaxCollector()
    for i, leaf in enumerate(("gate_proj", "up_proj", "w1", "w3")):
        collector.collect(f"m.{leaf}.weight_quantizer", np.float32(i))
    state = collector.freeze(fusion.members for fusion in FUSIONS)
    assert [float(state[f"m.{leaf}.weight_quantizer"]) for leaf in ("gate_proj", "up_proj", "w1", "w3")] == [1, 1, 3, 3]
