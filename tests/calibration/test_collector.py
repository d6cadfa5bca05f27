"""Test Collector: amaxes, counts and histograms of NumPy, PyTorch and JAX arrays, experts, merging, ranks and files."""

import contextlib
import io
import json
import math
import re
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from exhaustive import sampled
from float_modes import BITS, NEEDS_ENVIRONMENT, mode
from hypothesis import strategies as st
from safetensors.numpy import load, save
from together import together

from examples.train_fp4 import on_threads
from fp4kit.calibration import BINS, ENTRY, Collector, Headroom, bin_of, edges, input_global_scale, input_scale
from fp4kit.training.communicators import SingleProcess

STACK = "model.layers.0.mlp.experts.up_proj"
FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16)


def expert(i):
    return f"model.layers.0.mlp.experts.{i}.up_proj"


def random(seed, rows=5, columns=40, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(dtype)


def collected(*calls, **options):
    """Return a Collector after calls of collect, each given as (layer, x) or (layer, x, {keyword: value})."""
    collector = Collector(**options)
    for layer, x, *keywords in calls:
        collector.collect(layer, x, **(keywords[0] if keywords else {}))
    return collector


def contents(collector, folder=None):
    """Return the bytes of the file x.safetensors that a Collector saves in a folder, by default a temporary one.

    Equal bytes prove equal amaxes, counts and histograms.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return contents(collector, Path(temporary))
    collector.save(folder / "x.safetensors")
    return (folder / "x.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", FLOATS)
def test_amax_and_tokens(dtype):
    x = random(0, 12, 40, dtype).reshape(3, 4, 40)
    collector = collected(("a", x), ("a", -2 * x[0]), ("b", x[0, 0]))
    assert collector.amaxes() == {"a": 2 * np.abs(x[0]).max().astype(np.float32), "b": np.abs(x[0, 0]).max()}
    assert collector.tokens() == {"a": 16, "b": 1} and collector.columns() == {"a": 40, "b": 40}
    assert collector.layers == ("a", "b")


def test_histogram_counts_every_nonzero_block_of_every_token(tmp_path):
    """The histogram counts the nonzero blocks of every token; rows are padded with zeros to whole blocks."""
    x = np.zeros((2, 20), np.float32)
    x[0, 3], x[1, 17] = 1.0, -0.25
    tensors = load(contents(collected(("a", x)), tmp_path))
    assert tensors["bins"].tolist() == [[0, 243], [0, 256]] and tensors["counts"].tolist() == [1, 1]


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_other_libraries_give_the_same_bits(library, dtype, tmp_path):
    module, x = pytest.importorskip(library), random(3, dtype=dtype)
    if library == "torch":
        other = module.from_numpy(x.astype(np.float32)).to(getattr(module, np.dtype(dtype).name)).requires_grad_()
    else:
        other = module.asarray(x)
    assert contents(collected(("a", other)), tmp_path) == contents(collected(("a", x)), tmp_path)


EXTREMES = np.array([0, -0.0, 1e-45, -(2.0**-149), 2.0**-126, np.finfo(np.float32).max], np.float32)


def test_subnormals_zeros_and_the_largest_number():
    assert collected(("a", EXTREMES[:4])).amaxes()["a"] == np.float32(1e-45)
    assert collected(("a", -EXTREMES)).amaxes()["a"] == EXTREMES[-1]
    assert collected(("a", EXTREMES[:2])).found() == {"a": 0}


@pytest.mark.parametrize(("value", "kind"), [(np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "infinity")])
@pytest.mark.parametrize("owner", [{}, {"expert": 1}, {"expert": np.zeros(5, int), "experts": 2}])
def test_nonfinite_inputs_are_refused_and_change_nothing(value, kind, owner, tmp_path):
    x = random(1)
    collector = collected((STACK, x, owner))
    before = contents(collector, tmp_path)
    x[3, 4] = value
    with pytest.raises(ValueError, match=rf"collect: {re.escape(STACK)}: x holds {kind}; needs finite inputs"):
        collector.collect(STACK, x, **owner)
    assert contents(collector, tmp_path) == before


@sampled(20, 80, st.data(), st.integers(1, 5), st.booleans())
def test_calls_merging_and_order_do_not_matter(data, experts, histogram):
    """Tokens given at once, one by one in any order, or to several collectors that are merged, give equal bits."""
    x = random(experts, 12) * np.exp2(np.arange(12, dtype=np.float32) - 6)[:, None]
    owner = np.random.default_rng(experts).integers(0, experts, 12)
    whole = contents(collected((STACK, x, {"expert": owner, "experts": experts}), histogram=histogram))
    parts = [Collector(histogram=histogram) for _ in range(data.draw(st.integers(1, 3)))]
    for i in data.draw(st.permutations(range(12))):
        part = parts[data.draw(st.integers(0, len(parts) - 1))]
        if data.draw(st.booleans()):
            part.collect(STACK, x[i], expert=int(owner[i]), experts=experts)
        else:
            part.collect(expert(owner[i]), x[i : i + 1])
    parts[0].add_layer(STACK, 40, experts)
    assert contents(Collector.merge(data.draw(st.permutations(parts)))) == whole


def test_merging_leaves_the_collectors_as_they_were(tmp_path):
    a, b = collected(("a", random(0))), collected(("a", random(1)))
    before = contents(a, tmp_path), contents(b, tmp_path)
    merged = Collector.merge([a, b])
    merged.collect("a", 100 * random(2))
    assert (contents(a, tmp_path), contents(b, tmp_path)) == before


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks(ranks, tmp_path):
    """After gather, every rank has the Collector that one process would have for all inputs.

    It includes layers that only one rank has seen.
    """

    def gather(comm):
        calls = [("all", random(comm.rank)), (f"only {comm.rank}", random(7))]
        return collected(*calls, (STACK, random(comm.rank), {"expert": comm.rank, "experts": ranks})).gather(comm)

    calls = [call for i in range(ranks) for call in (("all", random(i)), (f"only {i}", random(7)))]
    stack = [(STACK, random(i), {"expert": i, "experts": ranks}) for i in range(ranks)]
    expected = contents(collected(*calls, *stack), tmp_path)
    assert [contents(one, tmp_path) for one in on_threads(ranks, gather)] == [expected] * ranks
    assert contents(collected(*calls, *stack).gather(SingleProcess()), tmp_path) == expected


def test_gather_raises_on_every_rank_if_one_rank_cannot_send(monkeypatch):
    """No rank waits for a message that never comes; the error of the rank at fault names the reason."""

    def gather(comm):
        one = collected(("mlp.fc1", np.ones((2, 16), np.float32)))
        if comm.rank == 1:
            monkeypatch.setattr(one, "_entries", lambda op: raise_value_error("an input was NaN"))
        with pytest.raises(ValueError) as raised:
            one.gather(comm)
        return str(raised.value)

    first, second, third = on_threads(3, gather)
    assert second == "an input was NaN"
    assert first == third == "gather: rank 1 has no inputs to send; see the error of that rank"


def raise_value_error(text):
    raise ValueError(text)


def test_experts_by_number_by_name_and_by_token(tmp_path):
    x, owner = random(2, 6), np.array([0, 2, 2, 0, 0, 2])
    by_token = collected((STACK, x.reshape(2, 3, 40), {"expert": owner.reshape(2, 3), "experts": 4}))
    by_number = collected(*((STACK, x[owner == i], {"expert": i, "experts": 4}) for i in (0, 2)))
    by_name = collected(*((expert(i), x[owner == i]) for i in (0, 2)))
    for i in (1, 3):
        by_name.add_layer(expert(i), 40)
    assert contents(by_token, tmp_path) == contents(by_number, tmp_path) == contents(by_name, tmp_path)
    assert by_token.tokens() == {expert(0): 3, expert(1): 0, expert(2): 3, expert(3): 0}


@pytest.mark.parametrize("numbers", ["torch", "jax.numpy"])
def test_expert_numbers_of_other_libraries(numbers, tmp_path):
    module, owner = pytest.importorskip(numbers), np.array([0, 1, 1, 0, 1])
    found = collected((STACK, random(1), {"expert": module.asarray(owner), "experts": 2}))
    expected = collected((STACK, random(1), {"expert": owner, "experts": 2}))
    assert contents(found, tmp_path) == contents(expected, tmp_path)


# ---- experts that saw no token


def seen_by(*numbers, experts=4):
    collector = Collector()
    collector.add_layer(STACK, 16, experts)
    collector.add_layer("attn.q_proj", 16)
    collector.collect("attn.q_proj", np.full(16, 9, np.float32))
    for i in numbers:
        collector.collect(STACK, np.full(16, i + 1, np.float32), expert=i, experts=experts)
    return collector


def test_unseen_experts_are_an_error():
    text = f"amaxes: 2 layers have seen no input other than zero: {expert(1)}, {expert(3)}; run more tokens"
    with pytest.raises(ValueError, match=rf"{re.escape(text)}.*unseen='layer' takes the largest amax"):
        seen_by(0, 2).amaxes()


def test_unseen_experts_get_the_largest_amax_of_their_layer():
    found = seen_by(0, 2).amaxes(unseen="layer")
    assert found == {"attn.q_proj": 9, expert(0): 1, expert(1): 3, expert(2): 3, expert(3): 3}


def test_unseen_experts_are_left_out():
    assert seen_by(0, 2).amaxes(unseen="none") == {"attn.q_proj": 9, expert(0): 1, expert(2): 3}


def test_an_expert_that_saw_only_zeros_counts_as_unseen():
    collector = seen_by(0, 2)
    collector.collect(STACK, np.zeros((3, 16), np.float32), expert=1, experts=4)
    assert collector.tokens()[expert(1)] == 3 and collector.amaxes(unseen="layer")[expert(1)] == 3


@pytest.mark.parametrize("unseen", ["error", "layer"])
def test_a_layer_of_which_no_expert_saw_a_token(unseen):
    with pytest.raises(ValueError, match="4 layers have seen no input other than zero"):
        seen_by().amaxes(unseen=unseen)


@pytest.mark.parametrize("unseen", ["error", "layer", "none"])
def test_a_layer_that_is_no_expert_needs_an_input(unseen):
    collector = Collector()
    collector.add_layer("lm.down_proj", 16)
    with pytest.raises(ValueError, match=r"1 layer has seen no input other than zero: lm\.down_proj; run more tokens"):
        collector.amaxes(unseen=unseen)


def test_headroom_fills_with_amaxes_of_the_same_rule():
    collector = seen_by(0, 2)
    assert collector.amaxes("headroom", unseen="layer")[expert(1)] == collector.found("headroom")[expert(2)] > 3


# ---- input scales


@sampled(50, 2000, st.integers(1, 0x7F7FFFFF))
def test_scales_are_those_of_the_producers(bits):
    """Input scales have the bits that the producers compute.

    Model-Optimizer divides the amax by 2688. compressed-tensors multiplies the rounded reciprocal of the amax by 2688.
    """
    torch, amax = pytest.importorskip("torch"), np.uint32(bits).view(np.float32)
    assert input_scale(amax).tobytes() == (torch.tensor(amax) / (6.0 * 448.0)).numpy().tobytes()
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    tensor = torch.tensor([float(amax)])
    assert input_global_scale(amax).tobytes() == helpers.generate_gparam(-tensor, tensor).numpy().tobytes()


@pytest.mark.parametrize(("amax", "expected"), [(0, 1), (1e-45, 1), (1e-38, 1), (np.nan, 1), (2688, 1), (1344, 2)])
def test_divisors_that_overflow_are_one(amax, expected):
    assert input_global_scale(amax) == expected


@pytest.mark.parametrize("function", [input_scale, input_global_scale])
def test_input_scales_need_a_number(function):
    for amax in (None, "3", [1.0], np.ones(2, np.float32), 1j):
        with pytest.raises(TypeError, match=rf"^{function.__name__}: amax is .*; needs a number"):
            function(amax)
    with pytest.raises(ValueError, match=rf"^{function.__name__}: amax is -3.0; needs a number >= 0"):
        function(-3)


@NEEDS_ENVIRONMENT
@pytest.mark.parametrize("changed", BITS)
def test_subnormal_amaxes_in_every_mode(tmp_path, changed):
    for layer, code in {"a": 7, "b": 8}.items():
        collector = Collector()
        collector.collect("l", np.full((1, 32), code, np.uint32).view(np.float32))
        collector.save(tmp_path / layer)
    with mode(changed):
        found = Collector.load(tmp_path / "a", tmp_path / "b").found()
    assert found["l"].view(np.uint32) == 8


def test_input_scales_of_a_collector():
    assert seen_by(0, 2).input_scales(unseen="layer")[expert(3)] == input_scale(3) == np.float32(3) / np.float32(2688)


# ---- files


def test_a_file_holds_everything(tmp_path):
    collector = seen_by(0, 2)
    collector.save(tmp_path / "a.safetensors")
    again = Collector.load(tmp_path / "a.safetensors")
    assert contents(again, tmp_path) == contents(collector, tmp_path) and again.layers == collector.layers
    twice = Collector.load(tmp_path / "a.safetensors", str(tmp_path / "a.safetensors"))
    assert twice.tokens() == {name: 2 * n for name, n in collector.tokens().items()}
    assert twice.found() == collector.found()
    plain = contents(collected(("a", random(0)), histogram=False), tmp_path)
    assert contents(Collector.load(tmp_path / "x.safetensors"), tmp_path) == plain


@pytest.mark.parametrize("histogram", [True, False])
def test_an_empty_collector(histogram, tmp_path):
    data = contents(Collector(histogram=histogram), tmp_path)
    assert Collector.load(tmp_path / "x.safetensors").layers == () and len(data) < 700


def rewritten(tensors, facts):
    return save(tensors, {ENTRY: json.dumps(facts)})


DAMAGE = [  # a change of the tensors t and facts f, and the fault
    (lambda t, f: t["amax"].__setitem__(0, -1), "an amax is negative, NaN or infinite"),
    (lambda t, f: t["amax"].__setitem__(0, np.nan), "an amax is negative, NaN or infinite"),
    (lambda t, f: t["tokens"].__setitem__(0, -1), "a number of tokens or columns is impossible"),
    (lambda t, f: t["tokens"].__setitem__(0, 0), "a number of tokens or columns is impossible"),
    (lambda t, f: t["columns"].__setitem__(0, 0), "a number of tokens or columns is impossible"),
    (lambda t, f: t["bins"].__setitem__((0, 1), 512), "a histogram entry is out of range"),
    (lambda t, f: t["bins"].__setitem__((0, 1), -1), "a histogram entry is out of range"),
    (lambda t, f: t["bins"].__setitem__((0, 0), 9), "a histogram entry is out of range"),
    (lambda t, f: t["counts"].__setitem__(0, 0), "a histogram entry is out of range"),
    (lambda t, f: t["amax"].__setitem__(0, 0), "histograms do not belong to its amaxes"),
    (lambda t, f: f.update(layers=["a", 3]), "its layers have no names"),
    (lambda t, f: f.update(layers=f["layers"][::-1]), "its layers are not sorted, or occur twice"),
    (lambda t, f: f["layers"].append("z"), "its tensors have the shapes"),
    (lambda t, f: t.update(amax=t["amax"].astype(np.float64)), "its tensors have other dtypes"),
    (lambda t, f: t.pop("counts"), "its tensors have the shapes"),
    (lambda t, f: f.update(histogram=False), "it has histogram entries, and says that it has none"),
]


@together("change, text", DAMAGE)
def test_damaged_files(change, text, tmp_path):
    data = contents(collected(("a", random(0)), ("b", random(1))), tmp_path)
    tensors = {key: array.copy() for key, array in load(data).items()}
    facts = {"version": 1, "layers": ["a", "b"], "histogram": True}
    change(tensors, facts)
    (tmp_path / "bad").write_bytes(rewritten(tensors, facts))
    with pytest.raises(ValueError, match=rf"load: \S*/bad: is damaged: .*{text}.*; collect again"):
        Collector.load(tmp_path / "bad")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", r"load: \S*/bad: not a usable safetensors file"),
        (save({"a": np.zeros(3)}), r"load: \S*/bad: holds no activations; needs a file that fp4kit"),
        (rewritten({}, {"version": 2}), r"load: \S*/bad: has version 2; needs version 1; update fp4kit"),
    ],
)
def test_other_files(data, text, tmp_path):
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(ValueError, match=text):
        Collector.load(tmp_path / "bad")


def test_loading_nothing():
    with pytest.raises(ValueError, match="load: got no path; needs one or more files"):
        Collector.load()


# ---- refusals


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "text"),
    [
        ((3, random(0)), {}, TypeError, "collect: layer is 3; needs a string"),
        (("", random(0)), {}, ValueError, "needs a name and positive numbers"),
        (("a", [1.0]), {}, TypeError, "collect: a: x is a builtins.list; needs"),
        (("a", random(0).astype(np.float64)), {}, TypeError, "collect: a: x is float64"),
        (("a", np.float32(1)), {}, ValueError, r"collect: a: x has shape \(\); needs \(\.\.\., K\)"),
        (("a", np.zeros((3, 0), np.float32)), {}, ValueError, r"collect: a: x has shape \(3, 0\)"),
        (("a", random(0)), {"expert": 0}, ValueError, "'a' is given with an expert; needs the name of a layer of all"),
        ((expert(3), random(0)), {"expert": 0}, ValueError, "is given with an expert; needs the name of a layer of"),
        ((STACK, random(0)), {"expert": -1}, ValueError, "expert is -1; needs 0"),
        ((STACK, random(0)), {"expert": 4, "experts": 4}, ValueError, "expert is 4; needs 0 to 3"),
        ((STACK, random(0)), {"expert": True}, TypeError, "expert is"),
        ((STACK, random(0)), {"expert": np.zeros(5, int)}, ValueError, "expert is an array; needs experts="),
        ((STACK, random(0)), {"experts": 4}, ValueError, "experts is 4, without expert; needs expert="),
        ((STACK, random(0)), {"expert": np.zeros(5), "experts": 2}, TypeError, "expert is float64; needs an integer"),
        ((STACK, random(0)), {"expert": np.zeros(4, int), "experts": 2}, ValueError, r"has shape \(4,\); needs \(5,\)"),
        ((STACK, random(0)), {"expert": np.full(5, 2), "experts": 2}, ValueError, "experts are 2 to 2; needs 0 to 1"),
        (("seen", random(0, 5, 32)), {}, ValueError, "seen has 32 columns, but had 40 before; needs one number of"),
    ],
)
def test_refusals(arguments, keywords, error, text, tmp_path):
    collector = collected(("seen", random(0)))
    before = contents(collector, tmp_path)
    with pytest.raises(error, match=text):
        collector.collect(*arguments, **keywords)
    assert contents(collector, tmp_path) == before


def test_columns_that_differ_between_files():
    with pytest.raises(ValueError, match="merge: a has 32 columns, but had 40 before; needs one number of columns per"):
        Collector.merge([collected(("a", random(0))), collected(("a", random(0, 5, 32)))])


@pytest.mark.parametrize(
    ("collectors", "error", "text"),
    [
        ([], ValueError, "merge: collectors are none; needs one or more"),
        ([Collector(), Collector(histogram=False)], ValueError, "merge: collectors are some without histograms"),
        ([Collector(), 3], TypeError, "merge: collectors has an int; needs Collectors"),
        (3, TypeError, "merge: collectors is an int; needs a sequence"),
    ],
)
def test_collectors_that_cannot_be_merged(collectors, error, text):
    with pytest.raises(error, match=text):
        Collector.merge(collectors)


@pytest.mark.parametrize("rule", ["mean", None, 3])
def test_unknown_rule(rule):
    with pytest.raises(ValueError, match=r"amaxes: rule is .*; needs 'max' or 'headroom', or a Headroom"):
        Collector().amaxes(rule)


def test_unknown_policy():
    with pytest.raises(ValueError, match="amaxes: unseen is 'skip'; needs one of error, layer, none"):
        Collector().amaxes(unseen="skip")


def inputs(case):
    """Return the inputs (64, 70) of a case of RECORDED, whose rows end with a part of a block."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((64, 70)).astype(np.float32)
    if case == "tail":
        x *= np.ldexp(1.0, rng.integers(-30, 10, (64, 1))).astype(np.float32)
    if case == "outlier":
        x[0, 0] = 5000
    if case == "constant":
        x[:] = 0.5
    return x


# (inputs, arguments, bit pattern of the amax that NVFP4ActHeadroomCalibrator of Model-Optimizer 0.47.0 returned with
# PyTorch 2.13 on a CPU)
RECORDED = [
    ("normal", {}, 0x46728177),
    ("normal", {"upper_percentile": 100.0}, 0x46728177),
    ("normal", {"rho": 1.0}, 0x405E60F5),
    ("normal", {"anchor_percentile": 50.0, "rho": 1024.0}, 0x450164D2),
    ("tail", {}, 0x44728177),
    ("tail", {"upper_percentile": 100.0}, 0x4466E47F),
    ("tail", {"rho": 1.0}, 0x44728177),
    ("tail", {"anchor_percentile": 50.0, "rho": 1024.0}, 0x45BF179A),
    ("outlier", {}, 0x46728177),
    ("outlier", {"upper_percentile": 100.0}, 0x46728177),
    ("outlier", {"rho": 1.0}, 0x4599E046),
    ("outlier", {"anchor_percentile": 50.0, "rho": 1024.0}, 0x4599E046),
    ("constant", {}, 0x45FD3E0C),
    ("constant", {"upper_percentile": 100.0}, 0x45FD3E0C),
    ("constant", {"rho": 1.0}, 0x3EFD3E0C),
    ("constant", {"anchor_percentile": 50.0, "rho": 1024.0}, 0x43FD3E0C),
]


@together("case, arguments, bits", RECORDED)
def test_amax_of_the_producer(case, arguments, bits):
    collector = Collector()
    collector.collect("a", inputs(case))
    found = collector.amaxes(Headroom(**arguments))["a"]
    assert (found.dtype, int(found.view(np.uint32))) == (np.dtype(np.float32), bits)


@pytest.mark.parametrize("percentile, found", [(50.0, 200), (50.1, 300), (100.0, 300)])
def test_a_percentile_is_the_first_bin_that_reaches_it(percentile, found):
    histogram = np.zeros(BINS, np.int64)
    histogram[[200, 300]] = 50
    anchor = 2.0 ** (-40 + (found + 0.5) * 80 / BINS)
    rule = Headroom(anchor_percentile=percentile, upper_percentile=100.0, rho=1024.0)
    assert rule.amax(histogram, np.float32(2**-30)) == np.float32(1024 * anchor)


def test_the_default_is_the_rule_by_name():
    collector = Collector()
    collector.collect("a", inputs("tail"))
    assert collector.amaxes("headroom") == collector.amaxes(Headroom()) != collector.amaxes("max")


def producer_bins(amaxes):
    """Return the bins of amaxes by the producer's formula in PyTorch."""
    torch = pytest.importorskip("torch")
    fraction = (torch.log2(torch.from_numpy(amaxes)) + 40.0) / 80.0
    return (fraction * BINS).floor().long().clamp(0, BINS - 1).numpy()


def test_every_edge_is_the_producers():
    """Each edge and its 64 neighbors on both sides fall in the bins that the producer's logarithm gives."""
    near = (edges()[:, None].astype(np.int64) + np.arange(-64, 65)).astype(np.uint32)
    found = np.searchsorted(edges(), near.reshape(-1), side="right")
    assert np.array_equal(found, producer_bins(near.reshape(-1).view(np.float32)))


def test_an_edge_belongs_to_the_bin_above_it():
    """An amax equal to an edge is counted in the bin above the edge, and the next smaller number in the bin below it.

    The producer counts in the same way.
    """
    collector, tested = Collector(), edges()[[0, 100, 255, 510]]
    amaxes = np.concatenate([tested, tested - np.uint32(1)]).view(np.float32)
    collector.collect("a", np.repeat(amaxes[:, None], 16, axis=1))
    assert [bin_of(amax) for amax in amaxes] == [1, 101, 256, 511, 0, 100, 255, 510]
    histogram = collector._entries("test")["a"].histogram
    assert np.flatnonzero(histogram).tolist() == [0, 1, 100, 101, 255, 256, 510, 511]


def test_amaxes_outside_the_histogram_are_counted_at_its_ends():
    assert [bin_of(np.float32(x)) for x in (1e-45, 2.0**-40, 1.0, 2.0**39.9, 3e38)] == [0, 0, 256, 511, 511]


def counted(**blocks):
    """Return a Collector of a layer "a" with blocks of equal elements: {"e" and the exponent of 2: number of blocks}.

    In an exponent, "m" stands for a minus sign: em30=1000 gives 1000 blocks of 2^-30.
    """
    collector = Collector()
    for name, count in blocks.items():
        magnitude = np.float32(2.0 ** int(name[1:].replace("m", "-")))
        collector.collect("a", np.full((count, 16), magnitude, np.float32))
    return collector


def test_blocks_far_below_the_upper_end_do_not_lower_the_anchor():
    """The anchor ignores block amaxes below a millionth of the upper end, whatever their share of the blocks."""
    center = 2.0 ** (-40 + 256.5 * 80 / 512)
    assert counted(e0=1, em30=1000).amaxes(Headroom(upper_percentile=100))["a"] == np.float32(16384 * center)
    assert counted(e0=1, em10=1000).amaxes(Headroom(upper_percentile=100))["a"] < 16384 * center / 512


def test_more_blocks_than_float32_can_count():
    """With 2^40 blocks, more than float32 counts exactly, the anchor is in the bin that its percentile reaches."""
    histogram = np.zeros(BINS, np.int64)
    histogram[100], histogram[300] = 1, 1 << 40
    found = Headroom(anchor_percentile=1e-9, rho=1.0).amax(histogram, np.float32(100))
    assert found == np.float32(2.0 ** (-40 + 300.5 * 80 / 512))


@together("name", ["anchor_percentile", "upper_percentile"])
@together("value", [0, -1, 100.1, math.nan])
def test_percentile_out_of_range(name, value):
    with pytest.raises(ValueError, match=rf"Headroom: {name} is {value}; needs a number above 0 and at most 100"):
        Headroom(**{name: value})


@pytest.mark.parametrize("rho", [0, -1.0, 28672, math.inf, math.nan])
def test_rho_out_of_range(rho):
    with pytest.raises(ValueError, match=rf"Headroom: rho is {rho}; needs a number above 0 and below 28672"):
        Headroom(rho=rho)


def test_headroom_without_histograms():
    collector = Collector(histogram=False)
    collector.collect("a", inputs("normal"))
    assert collector.amaxes()["a"] == np.abs(inputs("normal")).max()
    with pytest.raises(ValueError, match="the rule headroom needs histograms, which were not collected"):
        collector.amaxes("headroom")


GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "calibrate.md"


def test_examples_print_what_the_guide_shows():
    """Every Python block that is followed by a text block prints that text."""
    pairs = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert pairs
    for code, text in pairs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, GUIDE.name, "exec"), {})
        assert printed.getvalue() == text
