"""Test the C API of the CPU engine: the header's structs are those of ctypes, and both examples give fp4kit's bits."""

from __future__ import annotations

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
from fp4kit.cpu import c_api
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


@NEEDS_ENGINE
def test_no_result_without_the_table_of_reciprocals(compiler, tmp_path):
    """Before the table is set, a recipe that needs it returns 1, and so do later calls."""
    text = (EXAMPLES / "quantize.c").read_text()
    (tmp_path / "without.c").write_text(text.replace("  fp4kit_set_reciprocals(reciprocals);\n", ""))
    for name, code in (("nvfp4-te", 0), ("nvfp4-flashinfer", 1)):
        program = build(name, "without.c", compiler, tmp_path)
        assert subprocess.run([program], cwd=tmp_path, capture_output=True).returncode == code


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
def test_the_library_has_every_declared_function():
    header = (Path(fp4kit.get_include()) / "fp4kit.h").read_text()
    names = set(re.findall(r"\b(fp4kit_\w+)\(", header)) - {"fp4kit_matrix"}
    assert len(names) >= 9 and all(hasattr(native.library().functions, name) for name in names)


def test_recipes_outside_of_the_c_api_are_rejected():
    with pytest.raises(ValueError, match="engine_keys: the C API cannot compute"):
        fp4kit.engine_keys(next(name for name in fp4kit.recipes() if fp4kit.recipe(name).fake_only))


def test_without_a_library(monkeypatch):
    monkeypatch.setattr(c_api, "library", lambda: native.CompiledLibrary(None, "it is not compiled here"))
    with pytest.raises(OSError, match="get_library: the CPU engine is not available: it is not compiled here"):
        fp4kit.get_library()
