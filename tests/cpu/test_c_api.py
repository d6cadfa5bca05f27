"""Test the C API of the CPU engine: the header's structs are those of ctypes, and both examples give fp4kit's bits."""

from __future__ import annotations

import ctypes
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from exhaustive import by_default
from host.compiler import find_compiler

import fp4kit
from fp4kit.cpu import c_api, codec
from fp4kit.cpu import library as native

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "c_api"
X = ((np.arange(256) * 37 % 101 - 50) / 16).astype(np.float32).reshape(4, 64)
NEEDS_ENGINE = pytest.mark.skipif(native.library().functions is None, reason="the engine is not compiled here")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    found = find_compiler(tmp_path_factory.mktemp("compiler"))
    if isinstance(found, str):
        pytest.skip(found)
    return ["cc", "-std=c11", "-Wall", "-Werror", f"-I{fp4kit.get_include()}"]


def output_of(*command, folder=ROOT):
    return subprocess.run([*map(str, command)], cwd=folder, check=True, capture_output=True, text=True).stdout


def build(name, source, compiler, folder):
    """Compile a program for a recipe, and return its path."""
    with pytest.MonkeyPatch.context() as patch, open(folder / "recipe.h", "w") as header, redirect_stdout(header):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["recipe_header.py", name])
        runpy.run_path(str(EXAMPLES / "recipe_header.py"))
    output_of(*compiler, source, f"-I{folder}", fp4kit.get_library(), "-o", "quantize", folder=folder)
    return folder / "quantize"


def has_keys(name):
    try:
        return bool(fp4kit.engine_keys(name))
    except (ValueError, NotImplementedError):
        return False


SOME = ["nvfp4-te", "nvfp4-te-2d", "nvfp4-te-rowscaled", "mxfp8-te", "nvfp4-compressed-tensors", "nvfp4-flashinfer"]


@NEEDS_ENGINE
@pytest.mark.parametrize("name", by_default(SOME, [name for name in fp4kit.recipes() if has_keys(name)]))
def test_the_example_in_c_gives_the_bits(name, compiler, tmp_path):
    program = build(name, EXAMPLES / "quantize.c", [*compiler, "-fsanitize=undefined"], tmp_path)
    packed, scales, tensor, values = output_of(program, folder=tmp_path).splitlines()
    q = fp4kit.quantize(X, name)
    assert packed == q.packed.tobytes().hex()
    assert scales == (q.block_scale.tobytes().hex() if q.block_scale is not None else scales)
    assert [*map(float.fromhex, tensor.split())] == np.ravel(1 if q.tensor_scale is None else q.tensor_scale).tolist()
    assert [float.fromhex(value) for value in values.split()] == fp4kit.dequantize(q).reshape(-1).tolist()


SET = "  fp4kit_set_reciprocals(reciprocals);\n"
KEYS = "BLOCK_RULE", "TENSOR_RULE", "ELEMENT", "DECODER"
CHANGES = [("nvfp4-te", SET, "", 0), ("nvfp4-flashinfer", SET, "", 1)]


@NEEDS_ENGINE
@pytest.mark.parametrize("name, old, new, code", CHANGES + [("nvfp4-te", f"({k})", f'({k} "?")', 2) for k in KEYS])
def test_the_status_of_a_changed_example(name, old, new, code, compiler, tmp_path):
    """Without the table, a recipe that needs it has no result. A key that the library does not know is an error."""
    (tmp_path / "changed.c").write_text((EXAMPLES / "quantize.c").read_text().replace(old, new))
    found = subprocess.run([build(name, "changed.c", compiler, tmp_path)], cwd=tmp_path, capture_output=True)
    assert found.returncode == code and bool(found.stdout) == (code == 0)


@NEEDS_ENGINE
def test_the_example_by_ctypes_gives_the_bits():
    q = fp4kit.quantize(X, "nvfp4-te")
    expected = ["0", q.packed.tobytes().hex(), q.block_scale.tobytes().hex()]
    assert output_of(sys.executable, EXAMPLES / "quantize_ctypes.py").splitlines() == expected


def test_the_structs_of_the_header_are_those_of_the_engine(compiler, tmp_path):
    structs = {"matrix": native.SourceMatrix, "encode_call": native.EncodeCall, "decode_call": native.DecodeCall}
    names = [(struct, name) for struct, kind in structs.items() for name, *_ in kind._fields_]
    lines = [f'printf("%zu\\n", offsetof(fp4kit_{struct}, {name}));' for struct, name in names]
    (tmp_path / "offsets.c").write_text(
        "#include <fp4kit.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n" + "\n".join(lines) + "\n}\n"
    )
    output_of(*compiler, "offsets.c", "-o", "offsets", folder=tmp_path)
    found = [int(line) for line in output_of(tmp_path / "offsets").splitlines()]
    assert found == [getattr(structs[struct], name).offset for struct, name in names]


@NEEDS_ENGINE
def test_unknown_keys():
    for name in filter(has_keys, fp4kit.recipes()):
        for kind in map(str.lower, KEYS):
            index, key = getattr(native.library().functions, f"fp4kit_{kind}"), fp4kit.engine_keys(name)[kind].encode()
            assert index(key) > 0 if key else index(key) == -1
            assert {index(other) for other in (key + b"?", key[:-1] + b"?", None)} == {-2}


# The wrong numbers of each field. The only wrong number of fields that stay 0 is 1.
WRONG = {name: (0, -1, 1 + (1 << 31)) for name in ("x.rows", "rows", "tile_rows")}
WRONG |= {name: (0, -1, 1 + (1 << 31), 40) for name in ("x.columns", "columns", "tile_columns")}
WRONG |= {"packed_step": (0, -1, 31), "scales_step": (0, -1, 3), "out_step": (0, -1, 63), "block_rows": (0, -1, 3)}
WRONG |= {"block_rule": (0, -2, 1 << 20), "element": (0, -1, -2, 1 << 20), "decoder": (0, -1, -2, 1 << 20)}
WRONG |= {"x.row_step": (0,), "x.column_step": (0,), "x.hadamard": (-1, 65537), "tensor_step": (-1, 2)}
WRONG |= {"min_factor": (np.nan,), "max_factor": (0, -1, np.nan), "block": (0, -1, 24, 4096), "block_step": (1, -1)}
WRONG |= {"input": (-1, 3), "output": (-1, 3), "row_step": (-1, 2), "tables_from": (), "x.data": (), "x": ()}


def check(function, call, arrays, may_be_null, others, outputs):
    """Check that a valid call of a function of the header writes `outputs` again, and that wrong ones write nothing."""
    wanted = [out.tobytes() for out in outputs]

    def status(call, arrays=arrays, others=others):
        for out in outputs:
            out.fill(9)
        pointers = [None if array is None else ctypes.c_void_p(array.ctypes.data) for array in arrays]
        code = function(call and ctypes.byref(call), *pointers, *others)
        assert code == 0 or all((out == 9).all() for out in outputs)
        return code

    assert status(call) == 0 and [out.tobytes() for out in outputs] == wanted
    assert (status(None), status(type(call)())) == (4, 2)
    for i in range(len(arrays)):
        assert status(call, [*arrays[:i], None, *arrays[i + 1 :]]) == (0 if i in may_be_null else 4)
    for index in WRONG["block_rule"]:
        assert others == (1,) or status(call, others=(index, 1)) == 2
    for name in [*(f"x.{name}" for name, *_ in native.SourceMatrix._fields_), *(name for name, *_ in call._fields_)]:
        numbers = WRONG.get(name, (1,)) if hasattr(call, name[0]) or name[:2] != "x." else ()
        for number in numbers:
            other = type(call).from_buffer_copy(call)
            number = ctypes.pointer(ctypes.c_uint64(1)) if name == "seed" else number
            setattr(other.x if name[:2] == "x." else other, name.removeprefix("x."), number)
            is_index = name in ("input", "output", "block_rule", "element", "decoder")
            assert status(other) == (2 if is_index else 3), (name, number)


@NEEDS_ENGINE
def test_wrong_arguments_are_rejected_and_nothing_is_written():
    """Zero is wrong in each field that must be set. The valid matrix has contiguous columns, and transformed rows."""
    engine, x = native.library().functions, np.asfortranarray(np.random.default_rng(1).standard_normal((32, 64), "f4"))
    q = fp4kit.quantize(x, "nvfp4-te", hadamard="no_signs")
    values, tensor, parts = fp4kit.dequantize(q), codec.tensors_of(q), [*q.parts().values()]
    encode = codec.encode_call(x, codec.kernels_of(q.recipe), 32, 4, 0)
    decode = codec.decode_call(x.shape, x.dtype, q.recipe, 64, 32, 4)
    decode.tables_from, decode.tile_columns = 0, 32
    check(engine.fp4kit_dequantize, decode, [*parts[:2], tensor, values], {}, (1,), [values])
    rule, count, pointer = engine.fp4kit_tensor_rule(codec.tensor_key(q.recipe).encode()), ctypes.c_int64, ctypes.byref
    check(engine.fp4kit_quantize, encode, [x, None, *parts], {1, 3, 4, 5}, (rule, 2), parts)

    out, amax, nan = (ctypes.c_float * 3)(9, 9, 9), pointer(ctypes.c_float(1)), pointer(ctypes.c_float(np.nan))
    valid, of = [rule, 0, amax, count(1), out], engine.fp4kit_tensor_scales
    for status, i, value in (
        (2, 0, 0),
        (2, 0, -2),
        (2, 1, 3),
        (4, 2, None),
        (1, 2, nan),
        (3, 3, count(0)),
        (4, 4, None),
    ):
        assert of(*valid[:i], value, *valid[i + 1 :]) == status and [*out] == [9, 9, 9]
    assert of(-1, 0, None, count(1), out) == 0 and [*out] == [1, 1, 1]


@NEEDS_ENGINE
def test_the_library_has_every_declared_function():
    header = (Path(fp4kit.get_include()) / "fp4kit.h").read_text()
    names = set(re.findall(r"\b(fp4kit_\w+)\(", header)) - {"fp4kit_matrix"}
    assert len(names) >= 10 and all(hasattr(native.library().functions, name) for name in names)
    version = native.library().functions.fp4kit_api_version()
    assert f"FP4KIT_API_VERSION {version} " in header
    assert f"_version() != {version}:" in (EXAMPLES / "quantize_ctypes.py").read_text()


def test_recipes_outside_of_the_c_api_are_rejected():
    with pytest.raises(ValueError, match="engine_keys: the C API cannot compute"):
        fp4kit.engine_keys(next(name for name in fp4kit.recipes() if fp4kit.recipe(name).fake_only))


def test_without_a_library(monkeypatch):
    monkeypatch.setattr(c_api, "library", lambda: native.CompiledLibrary(None, "it is not compiled here"))
    with pytest.raises(OSError, match="get_library: the CPU engine is not available: it is not compiled here"):
        fp4kit.get_library()
