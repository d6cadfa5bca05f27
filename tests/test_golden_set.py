"""The reader of the golden vectors: both forms give the same arrays, and asking for what is absent says so."""

import ml_dtypes
import numpy as np
import pytest

from fp4kit.evidence.golden import RECORDED, GoldenSet
from tools import pack_golden


@pytest.fixture
def original(tmp_path):
    """A small directory of the original form: equal arrays, NaNs, 0-d, empty, several dtypes, and a file to exclude."""
    codes = np.arange(12, dtype=np.uint8).reshape(3, 4)
    nan = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)
    directory = tmp_path / "original"
    directory.mkdir()
    np.savez(directory / "inputs.npz", a__f32=nan, b__bf16=np.array([[0x3F80, 0xFF80]], np.uint16))
    np.savez(
        directory / "te.npz",
        **{
            "a__f32/one/codes": codes,
            "b__bf16/one/codes": codes.copy(),
            "b__bf16/two/more/codes": codes.reshape(4, 3),
            "b__bf16/one/amax": np.float32(3),
            "other/one/values": nan[::-1],
            "b__bf16/none": np.empty((0, 4), np.int64),
        },
    )
    np.savez(directory / "rcp_approx_sm90.npz", delta=codes)
    return directory


@pytest.fixture(params=["original", "packed"])
def small(request, original, tmp_path):
    """The small set in either form."""
    if request.param == "original":
        return GoldenSet.open(original)
    source = pack_golden.source_arrays(GoldenSet.open(original))
    pack_golden.write(pack_golden.pack(source), tmp_path / "golden.npz")
    pack_golden.verify(source, GoldenSet.open(tmp_path / "golden.npz"))
    return GoldenSet.open(tmp_path)


def test_sets_are_merged(tmp_path, original):
    old, new = GoldenSet.open(original), tmp_path / "new"
    new.mkdir()
    file, key = "te", "a__f32/one/codes"
    added = {"any/new/codes": np.arange(3, dtype=np.uint8)}
    np.savez(new / "another.npz", **added)
    np.savez(new / f"{file}.npz", **{key: old.get(file, key)} | added)
    both = pack_golden.merged([old, GoldenSet.open(new)])
    assert both.keys() - pack_golden.source_arrays(old).keys() == {("another", *added), (file, *added)}
    np.savez(new / f"{file}.npz", **{key: old.get(file, key) + 1})
    with pytest.raises(ValueError, match=f"{file}/{key} of .*new is another one before"):
        pack_golden.merged([old, GoldenSet.open(new)])


def test_names(small):
    assert set(small.files()) - {"rcp_approx_sm90"} == {"te"}
    assert small.inputs() == ("a__f32", "b__bf16")
    assert len(small.keys("te")) == 6
    assert small.variants("te") == {"one": ("a__f32", "b__bf16"), "two/more": ("b__bf16",)}


def test_arrays(small):
    assert small.get("te", "b__bf16/one/amax").shape == ()
    assert small.get("te", "b__bf16/none").shape == (0, 4)
    assert small.get("te", "b__bf16/two/more/codes").tolist() == np.arange(12).reshape(4, 3).tolist()
    assert small.get("te", "other/one/values").view(np.uint32).tolist() == [0xFFC00001, 0x7FC00000]
    assert small.input("b__bf16").dtype == ml_dtypes.bfloat16
    assert small.input("b__bf16").tolist() == [[1.0, -np.inf]]
    assert small.input("a__f32").dtype == np.float32


def test_arrays_are_read_only(small):
    with pytest.raises(ValueError, match="read-only"):
        small.get("te", "a__f32/one/codes")[0] = 1


def test_what_is_absent(small):
    assert (small.keys("ao"), small.variants("ao")) == ((), {})
    with pytest.raises(KeyError, match=r"GoldenSet\.get: no 'x' in 'ao' of .*; files: .*te"):
        small.get("ao", "x")
    with pytest.raises(KeyError, match=r"GoldenSet\.get: no 'x' in 'te' of .*; the file has 6 keys"):
        small.get("te", "x")
    with pytest.raises(KeyError, match=r"no 'c__f32' in 'inputs'"):
        small.input("c__f32")


def test_a_set_without_inputs(tmp_path):
    np.savez(tmp_path / "te.npz", **{"a__f32/one/codes": np.zeros(3)})
    golden = GoldenSet.open(tmp_path)
    assert (golden.inputs(), golden.variants("te"), golden.keys("te")) == ((), {}, ("a__f32/one/codes",))


def test_no_set(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"GoldenSet\.open: .* is neither a golden\.npz nor a directory"):
        GoldenSet.open(tmp_path)


def test_the_recorded_set(golden):
    count = sum(len(golden.keys(file)) for file in golden.files()) + len(golden.inputs())
    assert f" {count} arrays " in (RECORDED / "README.md").read_text(), f"the set has {count} arrays"
    assert "nvfp4_1d" in golden.variants("te")


def test_verify_sees_a_difference(original, tmp_path):
    source = pack_golden.source_arrays(GoldenSet.open(original))
    pack_golden.write(pack_golden.pack(source), tmp_path / "golden.npz")
    source["te", "other/one/values"] = source["te", "other/one/values"][::-1]
    with pytest.raises(ValueError, match="te/other/one/values reads back differently"):
        pack_golden.verify(source, GoldenSet.open(tmp_path))
