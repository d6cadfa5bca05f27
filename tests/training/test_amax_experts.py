"""Test AmaxState on several ranks: experts are gathered from any number of ranks and distributed to any other number.

Every error names the key.
"""

import re
from itertools import pairwise

import numpy as np
import pytest
from amax_inputs import FC1, FC2, QKV, SHAPES, assert_same_state, experts_of, state_of
from exhaustive import sampled
from hypothesis import given, settings
from hypothesis import strategies as st

import fp4kit
from examples.train_fp4 import on_threads
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.training.amax_state import AmaxCollector, AmaxName, AmaxState
from fp4kit.training.communicators import SingleProcess

EXPERTS = st.integers(1, 12)
RANKS = st.integers(1, 5)


def local(values, held, base=FC1):
    """Return the state of a rank that holds the experts `held`, which it numbers 0, 1, ...

    values: {name: amax} of all experts.
    base: the name of the quantizer, without the number of the expert.
    """
    return state_of({f"{base}.{i}": values[f"{base}.{number}"] for i, number in enumerate(held)})


def edges(draw, n, ranks):
    return [0, *sorted(draw(st.lists(st.integers(0, n), min_size=ranks - 1, max_size=ranks - 1))), n]


@sampled(30, 400, st.data(), EXPERTS, RANKS, RANKS, st.sampled_from(list(SHAPES.values())), st.booleans())
def test_any_reshard(data, n, ranks, others, shape, explicit):
    """Amaxes of experts keep their bits if they are gathered, split among other ranks, and gathered again.

    ranks, others: the numbers of ranks before and after.
    """
    values = experts_of(n, shape, seed=n)
    if explicit:
        owner = data.draw(st.lists(st.integers(0, ranks - 1), min_size=n, max_size=n))
        order = data.draw(st.permutations(range(n)))
        held = [[i for i in order if owner[i] == rank] for rank in range(ranks)]
    else:
        cut = edges(data.draw, n, ranks)
        held = [list(range(low, high)) for low, high in pairwise(cut)]

    def gather(comm):
        return local(values, held[comm.rank]).gather(comm, numbers=held[comm.rank] if explicit else None, count=n)

    for state in on_threads(ranks, gather):
        assert_same_state(state, values)
        assert_same_bits(state.stacked()[f"{FC1}._amax"], np.stack(list(values.values())))
    parts = [state.part(rank, others) for rank in range(others)]
    assert [key for part in parts for key in part] == [f"{FC1}.{i}._amax" for part in parts for i in range(len(part))]
    assert_same_bits(np.stack([part[key] for part in parts for key in part]), np.stack(list(values.values())))
    for state in on_threads(others, lambda comm: parts[comm.rank].gather(comm)):
        assert_same_state(state, values)


@pytest.mark.exhaustive
@settings(max_examples=100)
@given(
    st.data(), st.integers(2, 12), st.integers(1, 4), st.sampled_from(["drop", "duplicate", "nan", "negative", "shape"])
)
def test_faults_are_named_on_every_rank(data, n, ranks, fault):
    """If an expert has a fault, all ranks raise an equal error that names its key.

    The expert is missing, duplicate, NaN, negative or of another shape.
    """
    values = {key: value.reshape(1) for key, value in experts_of(n).items()}
    held = [list(range(n))[rank::ranks] for rank in range(ranks)]
    victim = data.draw(st.integers(1 if fault == "shape" else 0, n - 1))
    key = f"{FC1}.{victim}._amax"
    if fault == "drop":
        held[victim % ranks].remove(victim)
        message = f"{key} is missing; needs experts 0 to {n - 1}, and has {n - 1}"
    elif fault == "duplicate":
        held[data.draw(st.integers(0, ranks - 1))].append(victim)
        message = f"{key} is present twice"
    elif fault == "shape":
        values[key.removesuffix("._amax")] = np.ones(2, np.float32)
        message = f"{key} has shape (2,), and expert 0 has (1,)"
    else:
        values[key.removesuffix("._amax")] = np.float32([np.nan if fault == "nan" else -1])
        message = f"{key} holds {'NaN' if fault == 'nan' else 'negative values'} (1 of 1)"

    def gather(comm):
        numbers = held[comm.rank]
        state = AmaxState({AmaxName(FC1, i): values[f"{FC1}.{number}"] for i, number in enumerate(numbers)})
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            state.gather(comm, numbers=numbers, count=n)
        return str(error.value)

    assert len(set(on_threads(ranks, gather))) == 1


@settings(max_examples=60)
@given(EXPERTS, RANKS)
def test_parts_are_consecutive_and_balanced(n, ranks):
    state = state_of({**experts_of(n), QKV: 3})
    parts = [state.part(rank, ranks) for rank in range(ranks)]
    assert all(float(part[QKV]) == 3 for part in parts)
    sizes = [len(part) - 1 for part in parts]
    assert sum(sizes) == n and max(sizes) - min(sizes) <= 1


def test_several_layers_and_shared_quantizers():
    """Experts are renumbered per layer.

    Amaxes of quantizers without a number, or not in `experts`, become the maximum over the ranks.
    """
    sequential = "decoder.layers.0.mlp.linear_fc1.weight_quantizer"  # two quantizers in a row, not experts

    def gather(comm):
        r = comm.rank
        mine = {f"{FC1}.{i}": 10 * r + i for i in range(2)} | {f"{FC2}_{i}": [[100 * r + i]] for i in range(2 + r)}
        mine |= {QKV: [1 + r, 5 - r], f"{sequential}.0": 3, f"{sequential}.1": [4, r]}
        if r == 1:
            mine["only.here.weight_quantizer"] = 9
        return state_of(mine).gather(comm, experts="*experts*")

    expected = {f"{FC1}.{i}": v for i, v in enumerate((0, 1, 10, 11))}
    expected |= {f"{FC2}.{i}": [[v]] for i, v in enumerate((0, 1, 100, 101, 102))}
    expected |= {QKV: [2, 5], f"{sequential}.0": 3, f"{sequential}.1": [4, 1], "only.here.weight_quantizer": 9}
    for state in on_threads(2, gather):
        assert_same_state(state, expected)
        part = state.part(1, 2, experts="*experts*")
        assert_same_bits(part[f"{sequential}.1"], np.float32([4, 1]))
        assert [part[f"{FC2}.{i}"].item() for i in range(3)] == [100, 101, 102]


def test_nan_of_one_rank_is_not_hidden_by_the_others():
    def gather(comm):
        state = AmaxState({AmaxName(QKV): np.asarray(np.nan if comm.rank == 1 else 5, np.float32)})
        with pytest.raises(ValueError, match=re.escape(f"gather: {QKV}._amax holds NaN")):
            state.gather(comm)

    on_threads(3, gather)


def test_gather_errors():
    state = state_of(experts_of(3))
    alone = SingleProcess()
    assert_same_state(state.gather(alone), experts_of(3))
    errors = [
        ({"count": 4}, f"gather: {FC1}.3._amax is missing"),
        ({"count": 2}, f"gather: {FC1}.2._amax is surplus; needs exactly 2 experts"),
        ({"numbers": [0, 1]}, f"gather: rank 0: {FC1}.2._amax has no global number: numbers is [0, 1]"),
        ({"numbers": [0, 1, -1]}, "needs one >= 0 for each"),
        ({"numbers": [0, 1, 1]}, f"gather: {FC1}.1._amax is present twice; rank 0 has it as local expert 2"),
        ({"numbers": [0, 1, 3]}, f"gather: {FC1}.2._amax is missing"),
    ]
    for options, message in errors:
        with pytest.raises(ValueError, match=re.escape(message)):
            state.gather(alone, **options)
    with pytest.raises(ValueError, match=re.escape(f"gather: rank 0: {FC1}.0._amax is missing; needs experts 0 to 1")):
        state_of({f"{FC1}.1": 1}).gather(alone)

    def shapes(comm):
        with pytest.raises(ValueError, match=re.escape(f"gather: rank 1: {QKV}._amax is (2,) on the CPU, but was")):
            state_of({QKV: [1] * (comm.rank + 1)}).gather(comm)

    on_threads(2, shapes)


def test_part_errors():
    state = state_of(experts_of(3))
    for arguments, options, message in (
        ((2, 2), {}, "part: rank 2 of 2; needs 0 to 1"),
        ((-1, 2), {}, "part: rank -1 of 2"),
        ((0, 1), {"numbers": [0, 3]}, "numbers [0, 3]; needs different ones from 0 to 2"),
        ((0, 1), {"numbers": [1, 1]}, "numbers [1, 1]; needs different ones"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            state.part(*arguments, **options)
    with pytest.raises(ValueError, match=re.escape(f"part: {FC1}.0._amax and 1 more are missing")):
        state_of({f"{FC1}.2": 1}).part(0, 2)
    assert_same_state(state.part(0, 1, numbers=[2, 0]), {f"{FC1}.0": state[f"{FC1}.2"], f"{FC1}.1": state[f"{FC1}.0"]})


def test_from_weights_to_another_number_of_ranks(tmp_path):
    """Amaxes of weights on 2 ranks can be gathered, saved, loaded on 4 ranks, and used there per expert."""
    weights = (
        np.random.default_rng(5).standard_normal((8, 32, 64)).astype(np.float32)
        * np.arange(1, 9, dtype=np.float32)[:, None, None]
    )

    def save(comm):
        collector = AmaxCollector()
        for i, w in enumerate(weights[4 * comm.rank :][:4]):
            collector.collect(f"{FC1}.{i}", fp4kit.amax(w))
        state = collector.freeze().gather(comm)
        if comm.rank == 0:
            state.save(tmp_path / "amax.safetensors", separator="_", stacked=True)

    on_threads(2, save)
    for rank in range(4):
        mine = AmaxState.load(tmp_path / "amax.safetensors").part(rank, 4)
        for i, w in enumerate(weights[2 * rank :][:2]):
            y = fp4kit.fake_quantize(w, "nvfp4-te", tensor_amax=mine[f"{FC1}.{i}"])
            assert_same_bits(y, fp4kit.fake_quantize(w, "nvfp4-te"))
