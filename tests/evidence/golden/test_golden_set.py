"""Test the reader of recorded outputs: their original and packed form give equal arrays; a missing name gives a clear
error.
"""

import zipfile

import ml_dtypes
import numpy as np
import pytest

from fp4kit.evidence.golden.golden_set import BASES, RECORDED, GoldenSet, is_packed, references
from tools import pack_golden


@pytest.fixture
def original(tmp_path):
    """Write a small set of recordings in the original form; return its folder.

    It has equal arrays, NaN, 0-d and empty arrays, several dtypes, and a file that packing must exclude.
    """
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
    """Return the small set of recordings, once in each form."""
    if request.param == "original":
        return GoldenSet.open(original)
    return packed(original, tmp_path / "packed")


def packed(original, folder):
    """Pack the files of an original set into a folder and return the packed set."""
    golden = GoldenSet.open(original)
    for name in ("inputs", "te"):
        assert pack_golden.add(folder, name, pack_golden.arrays_of(golden, name)) == [name]
    return GoldenSet.open(folder)


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.npz")}


def test_a_producer_adds_only_itself(tmp_path, original):
    folder = packed(original, tmp_path / "packed").path
    before = bytes_of(folder)
    new = {"a__f32/one/codes": np.arange(3, dtype=np.uint8)}
    assert pack_golden.add(folder, "another", new) == ["another"]
    after = bytes_of(folder)
    assert before.items() <= after.items() and after.keys() - before.keys() == {"another.npz"}
    assert GoldenSet.open(folder).files() == ("another", "te")


def test_arrays_are_added_to_a_producers_file(tmp_path, original):
    folder = packed(original, tmp_path / "packed").path
    key, count = "a__f32/one/codes", len(GoldenSet.open(original).keys("te"))
    pack_golden.add(folder, "te", {"a__f32/new/codes": np.arange(3, dtype=np.uint8)})
    assert len(GoldenSet.open(folder).keys("te")) == count + 1
    other = {key: np.arange(4, dtype=np.uint8)}
    with pytest.raises(ValueError, match=f"te/{key} differs from the recorded one"):
        pack_golden.add(folder, "te", other)
    pack_golden.add(folder, "te", other, replace=True)
    assert GoldenSet.open(folder).get("te", key).tolist() == [0, 1, 2, 3]


@pytest.fixture
def similar_arrays(tmp_path):
    """Return (a packed folder, an array) for two arrays that differ in one byte.

    The folder's file "te" has the other array, and its file "quark" the returned one.
    """
    codes = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    near = codes.copy()
    near[7] ^= 1
    pack_golden.add(tmp_path, "te", {"a__f32/one/codes": codes, "a__f32/one/values": codes.view(np.float32)})
    pack_golden.add(tmp_path, "quark", {"a__f32/its/codes": near, "a__f32/its/values": near.view(np.float32)})
    return tmp_path, near


def test_an_array_like_one_of_a_base_is_stored_as_the_difference(similar_arrays):
    folder, near = similar_arrays
    assert references(folder / "quark.npz") == {
        "a__f32/its/codes": ("te", "a__f32/one/codes"),
        "a__f32/its/values": ("te", "a__f32/one/values"),
    }
    assert (folder / "quark.npz").stat().st_size < 900 < (folder / "te.npz").stat().st_size
    for golden in (GoldenSet.open(folder), GoldenSet.open(folder / "quark.npz")):
        assert golden.get("quark", "a__f32/its/codes").tobytes() == near.tobytes()
        assert golden.get("quark", "a__f32/its/values").tobytes() == near.tobytes()


def test_bases_refer_to_earlier_bases_alone(golden):
    ranks = {name: pack_golden.rank(name) for name in ("inputs", *golden.files())}
    for name in ranks:
        for file, _ in filter(None, references(RECORDED / f"{name}.npz").values()):
            assert file in BASES and ranks[file] < ranks[name]


def test_files_that_refer_to_a_replaced_array_are_packed_again(similar_arrays):
    folder, near = similar_arrays
    changed = np.zeros(1000, np.uint8)
    written = pack_golden.add(folder, "te", {"a__f32/one/codes": changed}, replace=True)
    assert written == ["te", "quark"]
    golden = GoldenSet.open(folder)
    assert golden.get("te", "a__f32/one/codes").tobytes() == changed.tobytes()
    assert golden.get("quark", "a__f32/its/codes").tobytes() == near.tobytes()


def test_only_the_files_that_are_asked_for_are_read(similar_arrays):
    folder, _ = similar_arrays
    (folder / "ao.npz").write_bytes(b"no file of arrays")
    golden = GoldenSet.open(folder)
    assert golden.files() == ("ao", "quark", "te")
    assert golden.keys("quark") == ("a__f32/its/codes", "a__f32/its/values")
    with pytest.raises(zipfile.BadZipFile):
        golden.keys("ao")


def test_one_file_is_opened_with_its_inputs(tmp_path, original):
    packed(original, tmp_path / "packed")
    for path in (original / "te.npz", tmp_path / "packed" / "te.npz"):
        golden = GoldenSet.open(path)
        assert (golden.files(), golden.inputs()) == (("te",), ("a__f32", "b__bf16"))
        assert golden.variants("te") == {"one": ("a__f32", "b__bf16"), "two/more": ("b__bf16",)}


def test_the_tool_packs_files_into_a_directory(tmp_path, original, monkeypatch, capsys):
    files = [str(path) for path in original.glob("*.npz")]
    monkeypatch.setattr("sys.argv", ["pack_golden", *files, "--into", str(tmp_path / "packed")])
    pack_golden.main()
    assert sorted(bytes_of(tmp_path / "packed")) == ["inputs.npz", "te.npz"]
    assert capsys.readouterr().out.count("read back and equal") == 2
    for name in ("inputs", "te"):
        pack_golden.verify(
            pack_golden.arrays_of(GoldenSet.open(original), name), GoldenSet.open(tmp_path / "packed"), name
        )


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


def test_missing_names_are_reported(small):
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
    (tmp_path / "README.md").write_text("no set")
    for path in (tmp_path, tmp_path / "README.md", tmp_path / "te.npz"):
        with pytest.raises(
            FileNotFoundError, match=r"GoldenSet\.open: .* is neither a \.npz file of recorded outputs nor"
        ):
            GoldenSet.open(path)


def test_the_recorded_set(golden):
    count = sum(len(golden.keys(file)) for file in golden.files()) + len(golden.inputs())
    assert f" {count} arrays " in (RECORDED / "README.md").read_text(), f"the set has {count} arrays"
    assert "nvfp4_1d" in golden.variants("te")
    assert all(is_packed(path) for path in RECORDED.glob("*.npz"))


def test_verify_sees_a_difference(original, tmp_path):
    source = pack_golden.arrays_of(GoldenSet.open(original), "te")
    pack_golden.write(pack_golden.pack(source, {}), tmp_path / "te.npz")
    source["other/one/values"] = source["other/one/values"][::-1]
    with pytest.raises(ValueError, match="te/other/one/values reads back differently"):
        pack_golden.verify(source, GoldenSet.open(tmp_path), "te")
