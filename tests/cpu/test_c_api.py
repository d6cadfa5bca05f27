"""Test the C API of the CPU engine: the header's structs are those of ctypes, and both examples give fp4kit's bits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
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


@NEEDS_ENGINE
@pytest.mark.parametrize("name", ["nvfp4-te", "nvfp4-modelopt", "mxfp4-ocp", "nvfp4-te-2d"])
def test_the_example_in_c_gives_the_bits(name, compiler, tmp_path):
    (tmp_path / "recipe.h").write_text(output_of(sys.executable, EXAMPLES / "recipe_header.py", name))
    output_of(
        *compiler, EXAMPLES / "quantize.c", f"-I{tmp_path}", fp4kit.get_library(), "-o", "quantize", folder=tmp_path
    )
    packed, scales, tensor, values = output_of(tmp_path / "quantize").splitlines()
    q = fp4kit.quantize(X, name)
    assert (packed, scales) == (q.packed.tobytes().hex(), q.block_scale.tobytes().hex())
    assert float.fromhex(tensor) == (1 if q.tensor_scale is None else q.tensor_scale)
    assert [float.fromhex(value) for value in values.split()] == fp4kit.dequantize(q).reshape(-1).tolist()


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
