"""Test AmaxState in files: both spellings of names, single and stacked experts, the old flat vector, and malformed
files.
"""

import json
import re
import struct

import ml_dtypes
import numpy as np
import pytest
from amax_inputs import BASE, FC1, FC2, QKV, SHAPES, assert_same_state, experts_of, state_of
from float_modes import BITS, NEEDS_ENVIRONMENT, mode
from safetensors.numpy import load_file, save_file

from fp4kit.evidence.testing import assert_same_bits
from fp4kit.training.amax_state import AmaxName, AmaxState


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
    AmaxState(dict(reversed(state.named.items()))).save(
        tmp_path / "a.safetensors", separator=separator, stacked=stacked
    )
    assert (tmp_path / "a.safetensors").read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("kind", ["scalar", "channel", "nvfp4_scalar", "nvfp4_static_block"])
def test_experts_that_model_optimizer_saved(kind, golden, tmp_path):
    """Experts are read from Model-Optimizer's recordings in both of its forms.

    They are one key per expert, and a flat vector of all experts.
    """
    prefix = f"experts_state/{kind}/"
    recorded = {
        k.removeprefix(prefix): golden.get("modelopt_fake", k)
        for k in golden.keys("modelopt_fake")
        if k.startswith(prefix)
    }
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
    "content, message",
    [
        (b"", "not a usable safetensors file"),
        (b"\xff" * 40, "not a usable safetensors file"),
    ],
)
def test_other_files_are_rejected(content, message, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"load: a.safetensors: {message}")):
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
        with pytest.raises(
            ValueError, match=re.escape(f"fit: {message}") if "separators" not in message else re.escape(message)
        ):
            state.fit(shapes)
