"""Test fp4kit.save and fp4kit.load: every kind of array comes back, other programs can read the files, and damage is
found.
"""

import json
import os
import re
import struct
import zlib
from dataclasses import fields, replace

import ml_dtypes
import numpy as np
import pytest
from inputs import BF16, INPUTS, NAMES, ORDINARY, SEEDED, seeded
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from together import together

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E2M1, E3M0, ElementFormat
from fp4kit.layouts import SCALE_LAYOUTS
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.recipes.table import as_data, from_data
from fp4kit.storage.files import CheckpointError, nbytes_of, read_header
from fp4kit.storage.quantized_file import _CHUNK, ENTRY, SUMS

F32 = np.float32
E2M1_BIAS3 = ElementFormat("E2M1_BIAS3", 2, 1, 3)
VARIANTS = {
    "block": replace(RECIPES["mxfp4-ocp"], block=(1, 16)),  # has the id of another recipe
    "id": replace(RECIPES["nvfp4-te"], id="nvfp4-mine", source="<b>\n\u00e9\u6f22", exact=""),
    "options": replace(RECIPES["nvfp4-te"], id="x-y", sign="negative", amax_nan="propagate", scale_max=256),
    "nan": replace(RECIPES["mxfp4-ocp"], id="nan", nan_code=0),
    "format": replace(RECIPES["mxfp4-ocp"], id="bias", element=E2M1_BIAS3),
    "2d": replace(RECIPES["nvfp4-te"], id="2d", block=(8, 16)),
}


def quantized(x, name, **options):
    with np.errstate(all="ignore"):
        return fp4kit.quantize(x, name, **seeded(name, x), **options)


def round_trip(path, arrays):
    fp4kit.save(path, arrays)
    found = fp4kit.load(path)
    assert list(found) == list(arrays)
    for name, q in arrays.items():
        assert found[name].equals(q)
        assert type(found[name].packed) is np.ndarray and found[name].recipe == q.recipe
    return found


# ---- round trips ----


def test_every_recipe(tmp_path):
    """load returns what save wrote to one file, for arrays of every recipe.

    The arrays have ordinary and unusual numbers, blocks along both axes, and an amax or none.
    """
    arrays = {}
    for name in (*NAMES, *SEEDED):
        for kind in ("ordinary", "nonfinite", "bf16", "f16"):
            arrays[f"{name}/{kind}"] = quantized(INPUTS[kind], name)
        arrays[f"{name}/columns"] = quantized(ORDINARY, name, axis=0)
        arrays[f"{name}/no amax"] = replace(arrays[f"{name}/ordinary"], tensor_amax=None)
    found = round_trip(tmp_path / "a.safetensors", arrays)
    for name, q in arrays.items():
        with np.errstate(all="ignore"):
            assert_same_bits(fp4kit.dequantize(found[name]), fp4kit.dequantize(q))


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant, tmp_path):
    q = quantized(ORDINARY, VARIANTS[variant])
    found = round_trip(tmp_path / "a", {"w": q})["w"]
    assert all(getattr(found.recipe, field.name) == getattr(q.recipe, field.name) for field in fields(Recipe))
    assert found.recipe.element.values.tobytes() == q.recipe.element.values.tobytes()


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("shape", [(100, 48), (128, 64), (3, 7, 32), (2, 3, 5, 16)])
def test_layouts(layout, shape, tmp_path):
    x = np.resize(ORDINARY, shape)
    round_trip(tmp_path / "a", {"w": fp4kit.quantize(x, "nvfp4-te", scale_layout=layout)})


@pytest.mark.parametrize("shape", [(64,), (1, 64), (0, 64), (4, 0), (0, 0), (3, 0, 64)])
def test_shapes(shape, tmp_path):
    for name in ("nvfp4-te", "nvfp4-te-rowscaled", "int4-modelopt", "mxfp8-te"):
        round_trip(tmp_path / "a", {"w": fp4kit.quantize(np.zeros(shape, F32), name)})


def test_experts_views_and_amaxes(tmp_path):
    stack = np.stack([ORDINARY, 2 * ORDINARY])
    q = fp4kit.quantize(stack.astype(BF16), "nvfp4-te", tensor_amax=[3.0, 5.0])
    strided = fp4kit.Quantized.from_parts(q.packed[:, ::2], q.block_scale[:, ::2], q.tensor_scale, recipe="nvfp4-te")
    assert not strided.packed.flags.c_contiguous
    found = round_trip(tmp_path / "a", {"experts": q, "part": q[1:], "strided": strided})
    assert found["experts"].tensor_amax.tolist() == [3.0, 5.0] and found["strided"].tensor_amax is None


@pytest.mark.parametrize(
    "names", [["a", "a.packed", "a.tensor_scale"], ["layers.0.weight", '\u6f22 \x00\n"\\', "__metadata__"]]
)
def test_names(names, tmp_path):
    round_trip(tmp_path / "a", {name: fp4kit.quantize(ORDINARY[i : i + 4], "nvfp4-te") for i, name in enumerate(names)})


def test_no_arrays_at_all(tmp_path):
    fp4kit.save(tmp_path / "a", {})
    assert fp4kit.load(tmp_path / "a") == {}


@pytest.mark.parametrize("name", ["README.md", "w.safetensors"])
def test_a_file_of_another_kind_is_not_downloaded_again(tmp_path, name):
    path = tmp_path / name
    path.write_text("# A title and some text")
    with pytest.raises(CheckpointError, match="not a usable safetensors file") as caught:
        fp4kit.load(path)
    assert ("download or copy it again" in str(caught.value)) == (name == "w.safetensors")


def test_loaded_arrays_are_writable(tmp_path):
    fp4kit.save(tmp_path / "a", {"w": fp4kit.quantize(ORDINARY, "nvfp4-te")})
    found = fp4kit.load(str(tmp_path / "a"))["w"]
    found.packed[:] = 0
    assert not fp4kit.load(tmp_path / "a")["w"].equals(found)


def test_equal_arrays_give_equal_bytes_and_replace_what_was_there(tmp_path):
    arrays = {"b": fp4kit.quantize(ORDINARY, "nvfp4-te"), "a": fp4kit.quantize(ORDINARY, VARIANTS["nan"])}
    fp4kit.save(tmp_path / "a", arrays)
    (tmp_path / "b").write_text("something else")
    fp4kit.save(tmp_path / "b", arrays)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    q = fp4kit.quantize(ORDINARY, "nvfp4-te")
    fp4kit.save(tmp_path / "a", {"w": q})
    before = (tmp_path / "a").read_bytes()

    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("fp4kit.storage.quantized_file.SafetensorsWriter.finish", fail)
    with pytest.raises(KeyboardInterrupt):
        fp4kit.save(tmp_path / "a", {"w": q[:4]})
    assert (tmp_path / "a").read_bytes() == before and os.listdir(tmp_path) == ["a"]


# ---- other readers ----


def test_safetensors_alone_reads_it(tmp_path):
    q = fp4kit.quantize(INPUTS["bf16"], "nvfp4-te")
    fp4kit.save(tmp_path / "a", {"w": q, "v": fp4kit.quantize(ORDINARY, "mxfp4-ocp", axis=0)})
    tensors = load_file(tmp_path / "a")
    assert sorted(tensors) == sorted([*TENSORS, "v.block_scale", "v.packed"])
    for part in ("packed", "block_scale", "tensor_scale", "tensor_amax"):
        assert_same_bits(tensors[f"w.{part}"], getattr(q, part))
    with safe_open(tmp_path / "a", "np") as file:
        facts = json.loads(file.metadata()[ENTRY])
    w = FACTS | {"shape": [128, 128], "dtype": "bfloat16"}
    v = FACTS | {"recipe": "mxfp4-ocp", "shape": [128, 128], "axis": 0, "parts": ["packed", "block_scale"]}
    assert facts == {"version": 1, "arrays": {"w": w, "v": v}}
    scales = tensors["w.block_scale"].view(ml_dtypes.float8_e4m3fn)
    found = fp4kit.Quantized.from_parts(tensors["w.packed"], scales, tensors["w.tensor_scale"], recipe="nvfp4-te")
    assert_same_bits(found.dequantize(F32), q.dequantize(F32))


# ---- recipes as data ----


def test_recipes_as_data():
    """A recipe of the table is stored by its id, a variant by all its fields.

    This includes a variant that has the id of a table recipe.
    """
    for r in (*RECIPES.values(), *VARIANTS.values()):
        data = json.loads(json.dumps(as_data(r)))
        assert from_data(data) == r and type(from_data(data).block) is type(r.block)
        assert isinstance(data, str) == (RECIPES.get(r.id) == r)


def test_fields_with_a_default_may_be_missing():
    """A stored recipe without a field that has a default can be read.

    So later versions with more fields read the files of this version.
    """
    data = as_data(VARIANTS["id"])
    fewer = {name: value for name, value in data.items() if name not in ("narrow", "rounding")}
    assert from_data(fewer) == VARIANTS["id"]


# ---- errors of save ----


@pytest.mark.parametrize(
    ("arrays", "kind", "text"),
    [
        ({"w": ORDINARY}, TypeError, "save: 'w' is ndarray; needs a Quantized, as fp4kit.quantize returns"),
        ({"w": None}, TypeError, "save: 'w' is NoneType; needs a Quantized"),
        ({3: fp4kit.quantize(ORDINARY, "nvfp4-te")}, TypeError, "save: the name 3 is an int; needs a str"),
        ({"": fp4kit.quantize(ORDINARY, "nvfp4-te")}, ValueError, "save: a name is empty; needs one, such as 'weight'"),
        ({"a\ud800": fp4kit.quantize(ORDINARY, "nvfp4-te")}, ValueError, "save: the name 'a\\ud800' contains a lone"),
    ],
)
def test_save_rejects(arrays, kind, text, tmp_path):
    with pytest.raises(kind, match=f"^{re.escape(text)}"):
        fp4kit.save(tmp_path / "a", arrays)
    assert not list(tmp_path.iterdir())


def test_invalid_paths_are_rejected(tmp_path):
    with pytest.raises(FileNotFoundError):
        fp4kit.save(tmp_path / "missing" / "a", {})
    text = f"{tmp_path}/missing/a: there is no folder {tmp_path}/missing; create it first"
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(text)}$"):
        fp4kit.save(tmp_path / "missing" / "a", {})
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match=f"'{tmp_path}/folder'$"):  # and not the temporary file beside it
        fp4kit.save(tmp_path / "folder", {})
    with pytest.raises(FileNotFoundError, match=r"^load: .*/missing does not exist; a file that fp4kit.save wrote is"):
        fp4kit.load(tmp_path / "missing")
    with pytest.raises(ValueError, match=f"^load: {tmp_path}: not a regular file; a safetensors file is needed$"):
        fp4kit.load(tmp_path)


# ---- errors of load ----

Q = fp4kit.quantize(ORDINARY[:4], "nvfp4-te")
TENSORS = {f"w.{part}": getattr(Q, part) for part in ("packed", "block_scale", "tensor_scale", "tensor_amax")}
FACTS = {
    "recipe": "nvfp4-te",
    "shape": [4, 128],
    "dtype": "float32",
    "axis": 1,
    "scale_layout": "linear",
    "parts": ["packed", "block_scale", "tensor_scale", "tensor_amax"],
}
VARIANT = as_data(VARIANTS["id"])


def written(path, facts, tensors=TENSORS, version=1):
    metadata = facts if isinstance(facts, str) else json.dumps({"version": version, "arrays": facts})
    save_file({name: np.array(a) for name, a in tensors.items()}, path, {ENTRY: metadata})


def test_the_unchanged_test_file_is_valid(tmp_path):
    written(tmp_path / "a", {"w": FACTS})
    assert fp4kit.load(tmp_path / "a")["w"].equals(Q)


METADATA = [  # a metadata entry, and the error of load
    ("{", "not valid JSON (Expecting property name"),
    ("[]", "holds a JSON list; an object is needed"),
    ('{"version": 1, "version": 1}', "the key 'version' occurs twice"),
    ('{"arrays": {"w": 1, "w": 2}}', "the key 'w' occurs twice; keep one of them"),
    ("[" * 100_000, "not valid JSON (maximum recursion"),
    ('{"version": ' + "1" * 5000 + "}", "not valid JSON (Exceeds the limit"),
    ('{"arrays": {}}', "has version None; needs 1; read it with the fp4kit that wrote it"),
    ('{"version": 2, "arrays": {}}', "has version 2; needs 1; read it with the fp4kit that wrote it"),
    ('{"version": true, "arrays": {}}', "has version True; needs 1"),
    (json.dumps({"version": "x" * 999}), f"has version '{'x' * 76}...; needs 1"),
    (json.dumps({"version": "x" * 78}), f"has version '{'x' * 78}'; needs 1"),
    (json.dumps({"version": "x" * 79}), f"has version '{'x' * 76}...; needs 1"),
    ('{"version": 1}', "arrays is None; needs an object {name: fields}"),
    ('{"version": 1, "arrays": [1]}', "arrays is [1]; needs an object"),
]


def rejects(path, text):
    with pytest.raises(ValueError, match=f"^{re.escape(f'load: {path}: {text}')}"):
        fp4kit.load(path)


@together("entry, text", METADATA)
def test_metadata_that_is_wrong(entry, text, tmp_path):
    written(tmp_path / "a", entry)
    rejects(tmp_path / "a", text if text.startswith("has") else f"metadata fp4kit_quantized: {text}")


ARRAYS = [  # changed facts about w, and the error of load
    ({"x": 1}, "its metadata has recipe, shape, dtype, axis, scale_layout, parts, x; needs"),
    ({"recipe": 3}, "its recipe is 3; needs an id or an object of fields"),
    ({"recipe": "nvfp4-tee"}, "recipe: no recipe is called 'nvfp4-tee'; did you mean"),
    ({"recipe": "mxfp4-ocp"}, "Quantized: block_scale is uint8 (4, 8); mxfp4-ocp of"),
    ({"recipe": {**VARIANT, "x": 1}}, "Recipe: unknown field 'x'; a later version"),
    (
        {"recipe": {**VARIANT, "element": {"name": "X", "exponent_bits": 2, "mantissa_bits": 1, "bias": 10**400}}},
        "ElementFormat X: bias is 1000",
    ),
    ({"shape": [4.0, 128]}, "its shape is [4.0, 128]; needs a list of integers"),
    ({"shape": [True, 128]}, "its shape is [True, 128]; needs a list of integers"),
    ({"shape": [8, 128]}, "Quantized: packed is uint8 (4, 64); nvfp4-te of (8, 128) needs"),
    ({"shape": [10**30, 128]}, "Quantized: packed is uint8 (4, 64); nvfp4-te of (1000000000000"),
    ({"dtype": "int32"}, "its dtype is 'int32'; needs one of float32, float16, bfloat16"),
    ({"dtype": ["float32"]}, "its dtype is ['float32']; needs one of float32, float16, bfloat16"),
    ({"axis": "1"}, "its axis is '1'; needs an integer"),
    ({"scale_layout": 1}, "its scale_layout is 1; needs the name of a layout"),
    ({"parts": ["packed", "x"]}, "its parts is ['packed', 'x']; needs packed first, then the other parts"),
    ({"parts": ["packed", "packed"]}, "its parts is ['packed', 'packed']; needs packed first"),
    ({"parts": ["block_scale"]}, "its parts is ['block_scale']; needs packed first, then the other parts"),
    ({"parts": "packed"}, "its parts is 'packed'; needs packed first, then the other parts"),
    ({"parts": ["packed", "block_scale", "tensor_scale"]}, "its metadata does not list the tensors w.tensor_amax"),
]


@together("changes, text", ARRAYS)
def test_facts_that_are_wrong(changes, text, tmp_path):
    written(tmp_path / "a", {"w": FACTS | changes})
    rejects(tmp_path / "a", text if text.startswith("its metadata does") else f"w: {text}")


def test_facts_that_are_missing(tmp_path):
    less = {name: value for name, value in FACTS.items() if name != "axis"}
    for facts, has in ((3, "3"), ({}, "nothing"), (less, "recipe, shape, dtype, scale_layout, parts")):
        written(tmp_path / "a", {"w": facts})
        rejects(tmp_path / "a", f"w: its metadata has {has}; needs recipe, shape, dtype, axis, scale_layout, parts")


CONTENTS = [  # changed tensors, and the error of load
    ({"w.packed": None}, "the tensor w.packed is missing; write the file again with fp4kit.save"),
    ({"bias": F32([1])}, "its metadata does not list the tensors bias; write it with fp4kit.save"),
    ({"w.packed": Q.packed.view(np.int8)}, "the tensor w.packed is I8; needs U8"),
    ({"w.tensor_scale": np.float64(1)}, "the tensor w.tensor_scale is F64; needs F32"),
    ({"w.packed": Q.packed[:3]}, "w: Quantized: packed is uint8 (3, 64); nvfp4-te of (4, 128) needs"),
    ({"w.tensor_scale": F32(-1)}, "w: Quantized: tensor_scale is negative; needs tensor_scale >= 0"),
    ({"w.tensor_scale": np.ones(4, F32)}, "w: Quantized: tensor_scale is float32 (4,); nvfp4-te of (4, 128)"),
    ({"\x1b[2J": F32([1])}, r"its metadata does not list the tensors \x1b[2J"),
]


@together("changes, text", CONTENTS)
def test_tensors_that_are_wrong(changes, text, tmp_path):
    tensors = {name: a for name, a in (TENSORS | changes).items() if a is not None}
    written(tmp_path / "a", {"w": FACTS}, tensors)
    rejects(tmp_path / "a", text)


def test_a_file_of_somebody_else(tmp_path):
    for metadata in ({"format": "pt"}, None):
        save_file({"w.packed": Q.packed}, tmp_path / "a", metadata)
        rejects(tmp_path / "a", "has no metadata fp4kit_quantized; it was not written by fp4kit.save")


def test_truncations(tmp_path):
    fp4kit.save(tmp_path / "whole", {"w": Q[:1]})
    whole = (tmp_path / "whole").read_bytes()
    for length in range(0, len(whole), 5):
        (tmp_path / "a").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"^load: \S*/a: not a usable safetensors file: "):
            fp4kit.load(tmp_path / "a")
    (tmp_path / "a").write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match=r"^load: \S*/a: not a usable safetensors file: its tensors do not fill it"):
        fp4kit.load(tmp_path / "a")


# ---- checksums ----


def test_flipped_bits(tmp_path):
    """A flipped bit of the header or of the data is found, and the error names the file."""
    fp4kit.save(tmp_path / "whole", {"w": Q[:1]})
    whole = (tmp_path / "whole").read_bytes()
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    assert len(whole) - start == 64 + 8 + 4 + 4
    header = [8 * at + (5 if at % 2 else at // 2 % 8) for at in range(0, start, 3)]  # bit 5 changes the case of letters
    damaged = r"the tensor w\.\w+ has CRC-32 \w{8}; '\w{8}' is stored; the file is damaged; copy it again$"
    for bit in (*header, *range(8 * start, 8 * len(whole), 7)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "a").write_bytes(changed)
        with pytest.raises(ValueError, match=r"^load: \S*/a: " + damaged * (bit >= 8 * start)):
            fp4kit.load(tmp_path / "a")


def test_bits_of_large_tensors_flipped(tmp_path):
    """Checksums find a flipped bit in any chunk of a tensor that is read in several chunks."""
    q = fp4kit.quantize(np.resize(ORDINARY, (4100, 2048)), "nvfp4-te")
    fp4kit.save(tmp_path / "a", {"w": q})
    assert fp4kit.load(tmp_path / "a")["w"].equals(q) and q.packed.size > 2 * _CHUNK
    file = read_header(tmp_path / "a")
    entry = next(entry for entry in file.entries if entry.name == "w.packed")
    for at in (0, _CHUNK - 1, _CHUNK, 2 * _CHUNK - 1, 2 * _CHUNK, entry.nbytes - 1):
        with (tmp_path / "a").open("r+b") as stream:
            stream.seek(entry.start + at)
            before = stream.read(1)
            stream.seek(entry.start + at)
            stream.write(bytes([before[0] ^ 16]))
            stream.flush()
            with pytest.raises(ValueError, match=r"^load: \S*/a: the tensor w\.packed has CRC-32"):
                fp4kit.load(tmp_path / "a")
            stream.seek(entry.start + at)
            stream.write(before)
    assert fp4kit.load(tmp_path / "a")["w"].equals(q)


def rewritten(path, change):
    """Rewrite a file as another program would, after change(tensors, metadata) has changed both in place."""
    tensors = load_file(path)
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    change(tensors, metadata)
    save_file(tensors, path, metadata)


def facts_of_w(change):
    """Return a function for `rewritten` that calls change(facts) to change the metadata of the array "w" in place."""

    def do(tensors, metadata):
        facts = json.loads(metadata[ENTRY])
        change(facts["arrays"]["w"])
        metadata[ENTRY] = json.dumps(facts)

    return do


def renamed(tensors, metadata):
    for part in [name for name in tensors if name.startswith("w.")]:
        tensors["v" + part[1:]] = tensors.pop(part)
    metadata[ENTRY] = metadata[ENTRY].replace('"w"', '"v"')
    metadata[SUMS] = metadata[SUMS].replace('"w.', '"v.')


CHANGES = {  # changes of a file of mxfp4-ocp, each of which still gives an array
    "recipe": facts_of_w(lambda facts: facts.update(recipe="mxfp4-te")),
    "dtype": facts_of_w(lambda facts: facts.update(dtype="float16")),
    "axis": facts_of_w(lambda facts: facts.update(axis=0)),
    "shape": facts_of_w(lambda facts: facts.update(shape=[1, 128, 128])),
    "name": renamed,
    "shape of a tensor": lambda tensors, metadata: tensors.update({"w.packed": tensors["w.packed"].reshape(64, 128)}),
    "dtype of a tensor": lambda tensors, metadata: tensors.update({"w.packed": tensors["w.packed"].view(np.int8)}),
    "checksum": lambda tensors, metadata: metadata.update(
        {SUMS: metadata[SUMS].replace('"header": "', '"header": "0')}
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_headers_that_were_changed(change, tmp_path):
    fp4kit.save(tmp_path / "a", {"w": fp4kit.quantize(ORDINARY, "mxfp4-ocp")})
    rewritten(tmp_path / "a", CHANGES[change])
    said = r"^load: \S*/a: its header has CRC-32 \w{8}; '\w+' is stored; the file is damaged; copy it again$"
    with pytest.raises(ValueError, match=said):
        fp4kit.load(tmp_path / "a")


def test_files_rewritten_by_another_program(tmp_path):
    """load accepts tensors and metadata in another order, and the name of the library that rewrote the file."""
    q = fp4kit.quantize(ORDINARY, "nvfp4-te")
    fp4kit.save(tmp_path / "a", {"w": q})
    rewritten(tmp_path / "a", lambda tensors, metadata: metadata.update(format="pt"))
    assert fp4kit.load(tmp_path / "a")["w"].equals(q)


SUMS_THAT_ARE_NONE = [
    ("{", "not valid JSON"),
    ("{}", "does not list exactly the header and the tensors of the file"),
    ('{"header": "0", "tensors": 1}', "does not list exactly the header and the tensors of the file"),
    ('{"header": "0", "tensors": {}}', "does not list exactly the header and the tensors of the file"),
]


@together("text, said", SUMS_THAT_ARE_NONE)
def test_invalid_checksums_are_rejected(text, said, tmp_path):
    fp4kit.save(tmp_path / "a", {"w": Q})
    rewritten(tmp_path / "a", lambda tensors, metadata: metadata.update({SUMS: text}))
    rejects(tmp_path / "a", f"metadata fp4kit_crc32: {said}")


def test_files_without_checksums(tmp_path):
    """Files without checksums, as older versions wrote them, are read.

    Unknown metadata is rejected, because it may be damaged checksums.
    """
    fp4kit.save(tmp_path / "a", {"w": Q})
    rewritten(tmp_path / "a", lambda tensors, metadata: metadata.pop(SUMS))
    assert fp4kit.load(tmp_path / "a")["w"].equals(Q)
    rewritten(tmp_path / "a", lambda tensors, metadata: metadata.update({"fp4kit_crc33": "{}"}))
    with pytest.raises(
        ValueError, match=r"^load: \S*/a: holds metadata fp4kit_crc33, which fp4kit.save does not write"
    ):
        fp4kit.load(tmp_path / "a")


def test_checksums_are_those_of_zlib(tmp_path):
    fp4kit.save(tmp_path / "a", {"w": Q, "v": fp4kit.quantize(ORDINARY[:0], "mxfp4-ocp")})
    with safe_open(tmp_path / "a", "np") as file:
        metadata = file.metadata()
    tensors = load_file(tmp_path / "a")
    found = json.loads(metadata[SUMS])
    assert found["tensors"] == {name: f"{zlib.crc32(a.tobytes()):08x}" for name, a in tensors.items()}
    dtypes = {np.dtype(np.uint8): "U8", np.dtype(F32): "F32"}
    listed = sorted([name, dtypes[a.dtype], list(a.shape)] for name, a in tensors.items())
    text = json.dumps([metadata[ENTRY], listed], separators=(",", ":"))
    assert found["header"] == f"{zlib.crc32(text.encode()):08x}"


def test_formats_of_the_table_are_named_in_the_data_of_variants():
    assert as_data(VARIANTS["id"])["element"] == "E2M1" == E2M1.name
    assert as_data(VARIANTS["format"])["element"]["name"] == "E2M1_BIAS3"
    assert as_data(replace(RECIPES["mxfp4-ocp"], id="e3m0", element=E3M0))["element"] == "E3M0"


SIZES = [
    ("F4", (), 1),
    ("F4", (3, 5), 8),
    ("F4", (2, 4), 4),
    ("F4", (0, 3), 0),
    ("F6_E2M3", (3,), 3),
    ("F6_E3M2", (4,), 3),
    ("U8", (3, 5), 15),
]


@pytest.mark.parametrize(("dtype", "shape", "nbytes"), SIZES, ids=str)
def test_incomplete_bytes_count(dtype, shape, nbytes):
    """A last byte that is only partly used counts as a whole byte."""
    assert nbytes_of(dtype, shape) == nbytes
