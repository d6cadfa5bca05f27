"""Test AmaxState: names in both spellings, maxima over calls, shared amaxes, and that NaN is never hidden.

Files and ranks have their own tests.
"""

import json
import re
import struct
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from amax_inputs import BASE, FC1, FC2, QKV, SHAPES, assert_same_state, experts_of, state_of
from exhaustive import sampled
from float_modes import BITS, NEEDS_ENVIRONMENT, mode
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from together import together

import fp4kit
from examples.train_fp4 import on_threads
from fp4kit.arrays import imports
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.training.amax_state import AmaxCollector, AmaxName, AmaxState, merge
from fp4kit.training.communicators import SingleProcess

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


class OnDevice(np.ndarray):
    """Stand in for a CuPy array on the device ``index``."""

    index = 0

    @property
    def device(self):
        return f"cuda:{self.index}"


def test_amaxes_are_merged_on_one_device(monkeypatch):
    monkeypatch.setattr(imports, "on_device", lambda array: isinstance(array, OnDevice))
    monkeypatch.setattr(imports, "cupy", lambda: np)
    host = np.float32([1, 5, np.inf])
    first, same, other = (np.float32(values).view(OnDevice) for values in ([1, 5, 2], [3, 4, np.nan], [1, 1, 1]))
    other.index = 1
    name, named = AmaxName(FC1), {}
    for value in (first, same):
        merge(named, name, value, "op")
    assert_same_bits(np.asarray(named[name]), np.float32([3, 5, np.nan]))
    for old, new, text in (
        (first, other, "is (3,) on cuda:1, but was (3,) on cuda:0 before"),
        (host, first, "is (3,) on cuda:0, but was (3,) on the CPU before"),
        (first, host, "is (3,) on the CPU, but was (3,) on cuda:0 before"),
        (host, host[:2], "is (2,) on the CPU, but was (3,) on the CPU before"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"op: {FC1}._amax {text}; needs one shape and one device")):
            merge({name: old}, name, new, "op")


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


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("separator", [".", "_"])
@pytest.mark.parametrize("stacked", [False, True], ids=["single", "stacked"])
def test_save_and_load(shape, separator, stacked, tmp_path):
    values = {
        **experts_of(12, shape),
        **experts_of(3, (2, 1), FC2),
        QKV: np.float32(7),
        f"{FC1}.3._global_amax": np.float32(1),
    }
    values |= {f"{FC1}.{i}._global_amax": np.float32(i) for i in range(12)}
    state = state_of(values)
    state.save(tmp_path / "a.safetensors", separator=separator, stacked=stacked)
    assert_same_state(AmaxState.load(tmp_path / "a.safetensors"), values)
    file = load_file(tmp_path / "a.safetensors")
    if stacked:
        assert file[f"{FC1}._amax"].shape == (12, *shape) and len(file) == 4
    else:
        assert file[f"{FC1}{separator}11._amax"].shape == shape and len(file) == len(values)
    first = (tmp_path / "a.safetensors").read_bytes()
    backwards = AmaxState(dict(reversed(state.named.items())))
    backwards.save(tmp_path / "a.safetensors", separator=separator, stacked=stacked)
    assert (tmp_path / "a.safetensors").read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("kind", ["scalar", "channel", "nvfp4_scalar", "nvfp4_static_block"])
def test_experts_that_model_optimizer_saved(kind, golden, tmp_path):
    """Experts are read from Model-Optimizer's recordings in both of its forms.

    They are one key per expert, and a flat vector of all experts.
    """
    prefix = f"experts_state/{kind}/"
    keys = [key for key in golden.keys("modelopt_fake") if key.startswith(prefix)]
    recorded = {key.removeprefix(prefix): golden.get("modelopt_fake", key) for key in keys}
    gathered = recorded.pop("gathered_fp32", None)
    assert len(recorded) == 4
    save_file({f"m.{key}": value for key, value in recorded.items()}, tmp_path / "a")
    state = AmaxState.load(tmp_path / "a", experts={"*weight_quantizer": 4})
    assert_same_state(state, {f"m.{key}": value for key, value in recorded.items()})
    assert len({state[key].tobytes() for key in state}) == 4
    if gathered is not None:
        assert_same_bits(state.stacked()["m.weight_quantizer._amax"], gathered)
        save_file({"m.weight_quantizer._amax": gathered}, tmp_path / "b")
        assert_same_state(AmaxState.load(tmp_path / "b", experts={"m.*": 4}), dict(state))
        assert AmaxState.load(tmp_path / "b")["m.weight_quantizer._amax"].shape == (4,)


@NEEDS_ENVIRONMENT
@pytest.mark.parametrize("changed", BITS)
def test_subnormals_in_every_mode(tmp_path, changed):
    save_file({"m.weight_quantizer._amax": np.full((1, 2), 3, np.uint32).view(np.float32)}, tmp_path / "a")
    with mode(changed):
        found = AmaxState.load(tmp_path / "a")["m.weight_quantizer._amax"]
    assert (found.view(np.uint32) == 3).all()


def test_other_tensors_and_dtypes(tmp_path):
    tensors = {
        "m.weight": np.ones((2, 2), np.int64),
        "m.weight_quantizer._amax": np.float16([1.5]),
        "m.weight_quantizer._scale": np.ones(1),
    }
    save_file(tensors, tmp_path / "a")
    assert_same_state(AmaxState.load(tmp_path / "a"), {"m.weight_quantizer": [1.5]})
    write_raw(
        tmp_path / "a", {"m.weight_quantizer._amax": ("BF16", [2], np.array([1, 3], ml_dtypes.bfloat16).tobytes())}
    )
    assert_same_state(AmaxState.load(tmp_path / "a"), {"m.weight_quantizer": [1, 3]})
    save_file({"m.weight_quantizer._amax": np.array([-0.0, 1], np.float32)}, tmp_path / "a")
    assert_same_state(AmaxState.load(tmp_path / "a"), {"m.weight_quantizer": [0, 1]})


def write_raw(path, tensors, metadata=None, twice=False):
    """Write a safetensors file byte by byte from {key: (dtype, shape, bytes)}.

    metadata: the entry __metadata__; None for none.
    twice: True to list every tensor twice in the header.
    """
    items, data = [] if metadata is None else [f'"__metadata__":{json.dumps(metadata)}'], b""
    for key, (dtype, shape, raw) in tensors.items():
        entry = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        items += [f"{json.dumps(key)}:{json.dumps(entry)}"] * (1 + twice)
        data += raw
    header = ("{" + ",".join(items) + "}").encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


ONE = np.float32(1)


@pytest.mark.parametrize(
    "tensors, experts, message",
    [
        ({f"{BASE}.0._amax": ONE, f"{BASE}.2._amax": ONE}, {}, f"{BASE}.1._amax is missing; needs experts 0 to 2, and"),
        ({f"{BASE}.0._amax": ONE, f"{BASE}.2._amax": ONE}, {"*": 4}, f"{BASE}.1._amax and 1 more are missing; needs"),
        ({f"{BASE}.{i}._amax": ONE for i in range(4)}, {"*": 3}, f"{BASE}.3._amax is surplus; needs exactly 3 experts"),
        ({f"{BASE}.{i}._amax": ONE for i in range(4)}, {"*": 5}, f"{BASE}.4._amax is missing"),
        ({f"{BASE}._amax": np.ones(4, np.float32)}, {"*": 5}, f"{BASE}._amax has shape (4,); needs (5, ...), one amax"),
        ({f"{BASE}._amax": ONE}, {"*": 1}, f"{BASE}._amax has shape (); needs (1, ...)"),
        ({f"{BASE}._amax": np.ones(2, np.float32), f"{BASE}_0._amax": ONE}, {"*": 2}, "holds all experts, but"),
        ({f"{BASE}.0._amax": ONE, f"{BASE}_0._amax": ONE}, {}, "occurs with both separators, '.' and '_'; needs one"),
        ({f"{BASE}.0._amax": ONE, f"{BASE}_1._amax": np.float32(np.nan)}, {}, f"{BASE}.1._amax holds NaN (1 of 1)"),
        ({f"{BASE}._amax": np.float32([1, np.nan])}, {"*": 2}, f"{BASE}.1._amax holds NaN (1 of 1)"),
        ({f"{BASE}._amax": np.float32([1, -2])}, {}, f"{BASE}._amax holds negative values (1 of 2)"),
        ({f"{BASE}._amax": np.ones(1)}, {}, f"'{BASE}._amax' is F64; needs F32, F16 or BF16"),
        ({f"{BASE}._amax": ONE}, {"x.*": 1}, "'x.*' matches no key"),
        ({"m.weight": ONE}, {}, "has no tensor whose name ends in 'amax'"),
        ({"m.weird_amax": ONE}, {}, "'m.weird_amax' names no quantizer"),
    ],
)
def test_load_errors(tensors, experts, message, tmp_path):
    save_file({key: np.asarray(value) for key, value in tensors.items()}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        AmaxState.load(tmp_path / "a.safetensors", experts=experts)
    assert "a.safetensors" in str(error.value)


@pytest.mark.parametrize("stacked", [False, True])
def test_our_files_know_how_many_experts_there_are(stacked, tmp_path):
    path = tmp_path / "a"
    state_of(experts_of(4)).save(path, stacked=stacked)
    with pytest.raises(ValueError, match=re.escape(f"{FC1}._amax has 4 experts in this file; 5 were requested")):
        AmaxState.load(path, experts={"*": 5})
    kept = {key: ("F32", list(v.shape), v.tobytes()) for key, v in load_file(path).items()}
    said = {"fp4kit_amax": json.dumps({"experts": {f"{FC1}._amax": 4}})}
    if stacked:
        (key,) = kept
        kept[key] = ("F32", [3], kept[key][2][:12])
        message = f"{key} has shape (3,); needs (4, ...)"
    else:
        del kept[f"{FC1}.3._amax"]
        message = f"{FC1}.3._amax is missing; needs experts 0 to 3, and has 3"
    write_raw(path, kept, said)
    with pytest.raises(ValueError, match=re.escape(message)):
        AmaxState.load(path)
    write_raw(path, {f"{FC2}._amax": ("F32", [], ONE.tobytes())}, said)  # every expert is missing
    with pytest.raises(ValueError, match=re.escape(f"{FC1}.0._amax and 3 more are missing")):
        AmaxState.load(path)


@pytest.mark.parametrize(
    "content, message", [(b"", "not a usable safetensors file"), (b"\xff" * 40, "not a usable safetensors file")]
)
def test_other_files_are_rejected(content, message, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=rf"^load: \S*/a\.safetensors: {message}"):
        AmaxState.load(tmp_path / "a.safetensors")


def test_damaged_headers(tmp_path):
    entry = {f"{BASE}._amax": ("F32", [], ONE.tobytes())}
    write_raw(tmp_path / "a", entry, twice=True)
    with pytest.raises(ValueError, match=r"occurs twice; keep one of them|not a usable safetensors file"):
        AmaxState.load(tmp_path / "a")
    for experts in ([1], {"x": 1}, {BASE: "4"}, {BASE: 0}, {BASE: True}):
        write_raw(tmp_path / "a", entry, {"fp4kit_amax": json.dumps({"experts": experts})})
        with pytest.raises(ValueError, match="its metadata says experts"):
            AmaxState.load(tmp_path / "a")
    for text, message in (
        ("{", "metadata fp4kit_amax: not valid JSON"),
        ("[1]", "metadata fp4kit_amax: holds a JSON list"),
    ):
        write_raw(tmp_path / "a", entry, {"fp4kit_amax": text})
        with pytest.raises(ValueError, match=message):
            AmaxState.load(tmp_path / "a")
    write_raw(tmp_path / "a", entry, {"experts": "{", "format": "pt"})  # metadata of another program
    assert_same_state(AmaxState.load(tmp_path / "a"), {BASE: 1})


def test_save_errors(tmp_path):
    with pytest.raises(ValueError, match=re.escape("save: separator is '/'; needs '.' or '_'")):
        state_of({BASE: 1}).save(tmp_path / "a", separator="/")
    with pytest.raises(ValueError, match=re.escape(f"save: {BASE}.0._amax is missing")):
        state_of({f"{BASE}.1": 1}).save(tmp_path / "a")
    with pytest.raises(ValueError, match=re.escape(f"stacked: {BASE}.1._amax has shape (2,), and expert 0 has ()")):
        state_of({f"{BASE}.0": 1, f"{BASE}.1": [1, 2]}).save(tmp_path / "a", stacked=True)
    with pytest.raises(ValueError, match=re.escape(f"stacked: {BASE}._amax is present for all experts and for each")):
        state_of({f"{BASE}.0": 1, BASE: 1}).save(tmp_path / "a", stacked=True)
    bad = AmaxState({AmaxName(BASE): np.float32([np.nan, 1])})
    for act in (lambda: bad.save(tmp_path / "a"), bad.checked, bad.stacked):
        with pytest.raises(ValueError, match=re.escape(f"{BASE}._amax holds NaN (1 of 2)")):
            act()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    state_of({BASE: 1}).save(path)
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        state_of({BASE: 2}).save(path)
    assert_same_state(AmaxState.load(path), {BASE: 1})
    assert list(tmp_path.iterdir()) == [path]


def test_fit():
    state = state_of({f"{BASE}.0": 1, f"{BASE}.1": [[2]], QKV: [[1], [2]]})
    found = state.fit({f"{BASE}_0._amax": (1,), f"{BASE}.1": (), QKV: (2, 1)})
    assert {key: value.shape for key, value in found.items()} == {f"{BASE}_0._amax": (1,), f"{BASE}.1": (), QKV: (2, 1)}
    for shapes, message in (
        ({f"{BASE}.0": (), QKV: (2, 1)}, f"{BASE}.1._amax is in the state, but not requested"),
        ({f"{BASE}.{i}": () for i in range(3)} | {QKV: (2, 1)}, f"{BASE}.2._amax is missing in the state"),
        ({f"{BASE}.0": (), f"{BASE}.1": (), QKV: (2,)}, f"{QKV}._amax has shape (2, 1); needs (2,)"),
        ({f"{BASE}.0": (2,), f"{BASE}.1": (), QKV: (2, 1)}, f"{BASE}.0._amax has shape (); needs (2,)"),
        ({f"{BASE}.0": (), f"{BASE}_0": ()}, "occurs with both separators"),
    ):
        with pytest.raises(ValueError, match=f"^fit: .*{re.escape(message)}"):
            state.fit(shapes)


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
