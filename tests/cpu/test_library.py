"""Test the compiled library: all processor levels give equal bytes.

If the library is missing or stale, the specification is used instead.
"""

from __future__ import annotations

import os
import pickle
import shutil
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE, agree, as_large_ones, assert_equal
from everything import everything
from exhaustive import by_default
from inputs import BF16, ordinary

import fp4kit
from fp4kit.cpu import codec, generate
from fp4kit.cpu import library as native
from fp4kit.evidence.testing import adversarial_blocks
from fp4kit.ops import engines
from fp4kit.recipes import RECIPES
from fp4kit.reference.arith import reciprocal_table

ROOT = Path(__file__).resolve().parents[2]
LEVELS = ("base", "avx2", "avx512")
FEW = ("nvfp4-te", "nvfp4-te-2d", "nvfp4-flashinfer", "mxfp4-ocp", "mxfp8-te", "int8-modelopt-channel")
FEW += ("nvfp4-flashinfer-4over6-mae-448", "nvfp4-te-4over6-mse-448-2d", "nvfp4-fouroversix")


@contextmanager
def using(monkeypatch, library):
    """Make fp4kit use the CompiledLibrary `library` in the with block, with an empty call cache."""
    with monkeypatch.context() as patch:
        for module in (native, engines):
            patch.setattr(module, "library", lambda: library)
        patch.setattr(engines, "_CALLS", {})
        as_large_ones(patch)
        codec.kernels_of.cache_clear()
        try:
            yield
        finally:
            codec.kernels_of.cache_clear()


def library_of(level):
    """Return the library of a processor level. Skip the test if there is none or this processor lacks the level."""
    best = native.library()
    if best.functions is None or LEVELS.index(level) > LEVELS.index(best.level):
        pytest.skip(f"this processor is not one of {level}")
    try:
        functions = native._load(level)
    except OSError as error:
        pytest.skip(f"{level}: {error}")
    functions.fp4kit_set_reciprocals(reciprocal_table().ctypes.data)
    return native.CompiledLibrary(functions, level)


def test_the_engine_is_there():
    """In CI, fp4kit uses the compiled engine. Without this check, a missing engine would only skip its tests."""
    if os.environ.get("CI") != "true":
        pytest.skip("not in CI")
    assert fp4kit.engine().startswith("cpu-"), native.library().level


@NEEDS_ENGINE
def test_the_engines_name():
    assert fp4kit.engine() == f"cpu-{native.library().level}"
    with fp4kit.specification():
        assert fp4kit.engine() == "reference"
    assert fp4kit.engine() != "reference"


@NEEDS_ENGINE
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", by_default(FEW, RECIPES))
def test_levels_give_the_same_bytes(name, level, monkeypatch):
    library = library_of(level)
    arrays = ordinary(3, (32, 128)), np.resize(adversarial_blocks(BF16), (32, 128)), ordinary(5, (32, 128), np.float16)
    for x in arrays:
        with fp4kit.specification():
            expected = list(everything(name, x))
        with using(monkeypatch, library):
            assert fp4kit.engine() == f"cpu-{level}"
            assert_equal(list(everything(name, x)), expected, f"{name} {level}")


@NEEDS_ENGINE
def test_a_call_is_done_by_the_level_that_is_chosen(monkeypatch):
    """A call uses the chosen library. Otherwise the comparison of levels would compare one library with itself."""
    seen, right = [], native.library().functions

    class Spy:
        def __getattr__(self, name):
            seen.append(name)
            return getattr(right, name)

    with using(monkeypatch, native.CompiledLibrary(Spy(), "base")):
        q = fp4kit.quantize(ordinary(1, (32, 64)), "nvfp4-te")
        fp4kit.dequantize(q)
    assert any("encode" in name or "quantize" in name for name in seen)
    assert any("decode" in name or "dequantize" in name for name in seen)


# ---- no library ----


def works_without(monkeypatch, reason, warns=False):
    """Assert that fp4kit finds no library and gives `reason`, and that every kind of call still works.

    warns: True if a RuntimeWarning with the reason is expected.
    """
    native.library.cache_clear()
    monkeypatch.setattr(native, "_warned", [])
    try:
        with pytest.warns(RuntimeWarning, match=reason) if warns else nullcontext():
            found = native.library()
        assert found.functions is None and reason in found.level
        with using(monkeypatch, found):
            assert fp4kit.engine() == "reference" and reason in fp4kit.engine().why
            for name in ("nvfp4-te", "mxfp4-ocp", "int8-modelopt-channel", "nvfp4-te-4over6-mse-256"):
                x = ordinary(2, (32, 128))
                list(everything(name, x))
                agree(fp4kit.quantize, x, name)
    finally:
        native.library.cache_clear()


def test_without_a_library(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    works_without(monkeypatch, "it is not compiled here; install fp4kit where there is a C++ compiler")


@NEEDS_ENGINE
def test_a_stale_library_is_not_used(monkeypatch):
    monkeypatch.setattr(native, "digest", lambda: "0" * 32)
    works_without(monkeypatch, "it was compiled from other sources; install fp4kit again", warns=True)


@NEEDS_ENGINE
def test_a_file_that_is_no_library_is_not_used(monkeypatch, tmp_path):
    (tmp_path / "_base.cpython.so").write_bytes(b"no library")
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    works_without(monkeypatch, "_base.cpython.so")


# ---- a level that is missing ----


@contextmanager
def installed_levels(monkeypatch, folder, levels, stale=()):
    """Simulate, in the with block, an installation in `folder` that has only the libraries of the given levels.

    stale: the levels whose libraries are out of date.
    """
    for level in levels:
        (path,) = (path for path in native_folder().glob(f"_{level}.*") if path.suffix in (".so", ".dylib"))
        shutil.copy(path, folder / path.name)
    right, name_of = native.digest, {}
    opened = native._open

    def spy(level):
        name_of["level"] = level
        return opened(level)

    monkeypatch.setattr(native, "_open", spy)
    monkeypatch.setattr(native, "digest", lambda: "0" * 32 if name_of["level"] in stale else right())
    monkeypatch.setattr(native, "_warned", [])
    monkeypatch.setattr(native, "__file__", str(folder / "native.py"))
    native.library.cache_clear()
    try:
        yield
    finally:
        native.library.cache_clear()


def native_folder():
    return ROOT / "fp4kit" / "cpu"


def best_levels():
    """Return the levels that this processor supports, lowest first. Skip the test if there is only one."""
    best = native.library()
    if best.functions is None or best.why or best.level == "base":
        pytest.skip(f"one level alone: {best}")
    library_of("base")  # skips if it is stale
    return list(LEVELS[: LEVELS.index(best.level) + 1])


@NEEDS_ENGINE
def test_the_next_lower_level_is_used_with_one_warning(monkeypatch, tmp_path):
    *_, best = best_levels()
    with installed_levels(monkeypatch, tmp_path, ["base"]):
        with pytest.warns(
            RuntimeWarning, match=f"engine for base processors.*cpu-{best}: it is not compiled here"
        ) as seen:
            found = native.library()
        assert found.level == "base" and len(seen) == 1
        native.library.cache_clear()
        assert native.library().level == "base"  # a second warning would be an error here
        monkeypatch.setattr(engines, "library", native.library)
        assert fp4kit.engine() == "cpu-base" and f"cpu-{best}: it is not compiled here" in fp4kit.engine().why
        assert repr(fp4kit.engine()).startswith("'cpu-base' (cpu-")


@NEEDS_ENGINE
def test_a_stale_level_is_not_used(monkeypatch, tmp_path):
    *_, best = best_levels()
    with (
        installed_levels(monkeypatch, tmp_path, ["base", best], stale=[best]),
        pytest.warns(RuntimeWarning, match=f"cpu-{best}: it was compiled from other sources"),
    ):
        assert native.library().level == "base"


@NEEDS_ENGINE
def test_a_stale_base_still_tells_the_level(monkeypatch, tmp_path):
    *_, best = best_levels()
    with installed_levels(monkeypatch, tmp_path, ["base", best], stale=["base"]):
        assert native.library()[1:] == (best, "")


@NEEDS_ENGINE
def test_a_warning_that_is_an_error_comes_once(monkeypatch, tmp_path):
    best_levels()
    with installed_levels(monkeypatch, tmp_path, ["base"]):
        with pytest.raises(RuntimeWarning, match="engine for base processors"):
            native.library()
        assert native.library().level == "base"


def test_the_engines_name_is_a_string_that_can_be_pickled():
    name = pickle.loads(pickle.dumps(engines.Engine("cpu-base", "no other")))
    assert name == "cpu-base" and name.why == "no other" and repr(name) == "'cpu-base' (no other)"


@NEEDS_ENGINE
def test_the_digest_is_of_the_sources():
    assert native.library().functions.fp4kit_digest().decode() == native.digest()


# ---- generated files ----


def test_the_generated_file_is_what_the_recipes_make():
    assert generate.PATH.read_text(encoding="utf-8") == generate.text(), "run python -m fp4kit.cpu.generate"
