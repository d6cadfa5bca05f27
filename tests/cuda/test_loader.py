"""Test the loader of kernels: what the key of a cubin depends on, how the cache is written and repaired, and its
errors.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from together import together

from fp4kit.arrays import imports
from fp4kit.cuda import compiler
from fp4kit.cuda.launch import THREADS

SOURCE = '#include "quantize.cu"\n'
CUBIN = b"a cubin"


# ---- the text that is compiled ----


def included(*names):
    """Return the names of the files that the text for some included files contains, in order."""
    source = "".join(f'#include "{name}"\n' for name in names)
    return re.findall(r'^#line 1 "(.*)"$', compiler.with_headers(source), re.MULTILINE)


def test_the_text_holds_what_is_included_and_nothing_else():
    assert included("scale_layout.cuh") == ["scale_layout.cuh", "types.cuh"]
    assert {"quantize.cu", "quantize.cuh", "block.cuh", "tensor_rules.cuh", "ptx.cuh"} <= {*included("quantize.cu")}
    assert "amax.cu" not in included("quantize.cu")


def test_lines_keep_their_numbers():
    """Error messages and profilers name the file and the line as they are in the package."""
    found, file, number = set(), "", 0
    text = compiler.with_headers(f"{SOURCE}int last;", "own.cu")
    for line in text.split("\n"):
        if directive := re.fullmatch(r'#line (\d+) "(.*)"', line):
            number, file = int(directive[1]), directive[2]
            continue
        found.add((file, number, line))
        number += 1
    assert ("own.cu", 2, "int last;") in found and "#include" not in text and "#pragma once" not in text
    for name in ("quantize.cu", "quantize.cuh", "types.cuh"):
        for i, line in enumerate(compiler.files(compiler.SOURCES)[name].read_text().split("\n")[:-1], 1):
            kept = "" if line.startswith(("#include", "#pragma once")) else line
            assert line.startswith("#include") or (name, i, kept) in found


def test_every_header_is_used():
    names, groups = compiler.files(compiler.SOURCES), [entry.source("amax", "") for entry in compiler.GROUPED.values()]
    headers = re.findall(r'"(\w+\.cuh)"', "".join(groups))
    assert {*included(*headers, *(name for name in names if name.endswith(".cu")))} == set(names)


def test_names_of_kernel_sources_are_unique():
    assert len(compiler.files(compiler.SOURCES)) == len([*compiler.SOURCES.rglob("*.cu*")])


def test_headers_are_included_once():
    for path in compiler.SOURCES.rglob("*.cuh"):
        assert path.read_text().count("#pragma once\n") == 1, path.name


# ---- the cache ----


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Set up an empty cache, a compiler that counts its calls, and a copy of the sources that a test may change."""
    sources, folder, compiled = tmp_path / "sources", tmp_path / "cache", []
    shutil.copytree(compiler.SOURCES, sources)
    folder.mkdir()

    def compile_cubin(source, options, name):
        compiled.append(options)
        return CUBIN, ""

    monkeypatch.setattr(compiler, "SOURCES", sources)
    monkeypatch.setattr(compiler, "cache_folder", lambda: folder)
    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    monkeypatch.setattr(compiler, "compiler_version", lambda: (13, 0))
    caches = (compiler.text_of, compiler.files, compiler.function)
    for cached in caches:
        cached.cache_clear()
    yield SimpleNamespace(sources=sources, folder=folder, compiled=compiled)
    for cached in caches:
        cached.cache_clear()


def test_a_cubin_is_compiled_once(cache):
    path = compiler.cubin_path(SOURCE, "sm_90")
    assert path == compiler.cubin_path(SOURCE, "sm_90")
    assert path.read_bytes() == CUBIN
    assert cache.compiled == [(*compiler.OPTIONS, "-arch=sm_90")]
    assert list(cache.folder.iterdir()) == [path]


def change_header(cache, monkeypatch):
    path = compiler.files(cache.sources)["types.cuh"]  # quantize.cu includes it through other headers
    path.write_text(path.read_text() + "// changed\n")
    compiler.text_of.cache_clear()


def change_options(cache, monkeypatch):
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "-G"))


def change_compiler(cache, monkeypatch):
    monkeypatch.setattr(compiler, "compiler_version", lambda: (13, 1))


@pytest.mark.parametrize("change", [change_header, change_options, change_compiler])
def test_a_cubin_depends_on(cache, monkeypatch, change):
    before = compiler.cubin_path(SOURCE, "sm_90")
    change(cache, monkeypatch)
    assert compiler.cubin_path(SOURCE, "sm_90") != before
    assert len(cache.compiled) == 2


def test_a_cubin_depends_on_source_and_architecture(cache):
    sources = (SOURCE, SOURCE + "// changed\n")
    assert len({compiler.cubin_path(source, arch) for source in sources for arch in ("sm_90", "sm_100a")}) == 4


def test_a_cubin_does_not_depend_on_other_kernels(cache):
    before = compiler.cubin_path(SOURCE, "sm_90")
    compiler.files(cache.sources)["amax.cu"].write_text("")
    compiler.text_of.cache_clear()
    assert compiler.cubin_path(SOURCE, "sm_90") == before


def test_a_cubin_is_written_beside_and_renamed(cache, monkeypatch):
    """A cubin appears in the cache only when it is complete.

    Another process that reads at the same time never finds part of a file.
    """
    renamed = []

    def replace(source, target):
        source, target = Path(source), Path(target)
        assert source.parent == target.parent and source.suffix != ".cubin"
        assert source.read_bytes() == CUBIN and not target.exists()
        renamed.append(target)
        rename(source, target)

    rename = os.replace
    monkeypatch.setattr(os, "replace", replace)
    assert compiler.cubin_path(SOURCE, "sm_90") in renamed


def test_what_does_not_compile_leaves_nothing(cache, monkeypatch):
    def fail(*arguments):
        raise compiler.CompileError("no")

    monkeypatch.setattr(compiler, "compile_cubin", fail)
    with pytest.raises(compiler.CompileError):
        compiler.cubin_path(SOURCE, "sm_90")
    assert not list(cache.folder.iterdir())


def test_the_cache_is_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert compiler.cache_folder() == tmp_path / ".cache" / "fp4kit" / "cuda"
    assert compiler.cache_folder().is_dir()


def test_the_cache_is_elsewhere_without_a_home_folder(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "file")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))
    folder = compiler.cache_folder()
    assert folder.is_dir() and tmp_path / "temporary" in folder.parents


def test_no_folder_for_the_cache(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "file")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match=r"can neither use .*file/.cache/fp4kit/cuda nor .*needs one of these"):
        compiler.cache_folder()


# ---- loading, with a CuPy that accepts the bytes CUBIN as a cubin ----


class DriverError(Exception):
    """Stand in for the error that CuPy raises if the driver cannot load a cubin. Here only CUBIN can be loaded."""


class FakeModule:
    """Stand in for cupy.RawModule, which loads a cubin from a file."""

    def __init__(self, path):
        if Path(path).read_bytes() != CUBIN:
            raise DriverError("CUDA_ERROR_INVALID_IMAGE")

    def get_function(self, kernel):
        return kernel


class FakeDevice:
    """Stand in for cupy.cuda.Device: device 0 is an sm_90, device 1 an sm_100."""

    def __init__(self, number):
        self.compute_capability = {0: "90", 1: "100"}[number]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


@pytest.fixture
def cupy(monkeypatch):
    driver = SimpleNamespace(CUDADriverError=DriverError)
    fake = SimpleNamespace(RawModule=FakeModule, cuda=SimpleNamespace(Device=FakeDevice, driver=driver))
    monkeypatch.setattr(imports, "cupy", lambda: fake)


def test_a_function_is_compiled_for_its_device_once(cache, cupy):
    assert [compiler.function(SOURCE, "quantize_kernel", device) for device in (0, 1, 0, 1)] == ["quantize_kernel"] * 4
    assert [options[-1] for options in cache.compiled] == ["-arch=sm_90", "-arch=sm_100a"]


@pytest.mark.parametrize("rubbish", [b"", CUBIN[:-1], b"\x7fELF and nothing"])
def test_a_corrupt_entry_is_built_again(cache, cupy, rubbish):
    path = compiler.cubin_path(SOURCE, "sm_90")
    path.write_bytes(rubbish)
    assert compiler.function(SOURCE, "quantize_kernel", 0) == "quantize_kernel"
    assert path.read_bytes() == CUBIN
    assert len(cache.compiled) == 2


def test_a_cubin_that_the_driver_refuses_twice_is_an_error(cache, cupy, monkeypatch):
    monkeypatch.setattr(compiler, "compile_cubin", lambda *arguments: (b"of another driver", ""))
    with pytest.raises(DriverError):
        compiler.function(SOURCE, "quantize_kernel", 0)


@pytest.mark.parametrize(
    ("capability", "arch"), [("75", "sm_75"), ("90", "sm_90"), ("100", "sm_100a"), ("120", "sm_120a")]
)
def test_architecture(capability, arch):
    assert compiler.architecture(capability) == arch


# ---- missing packages and drivers ----


def with_runtime(monkeypatch, count):
    """Install a CuPy whose getDeviceCount is `count`, a function that returns a number or raises DriverError."""
    runtime = SimpleNamespace(getDeviceCount=count, CUDARuntimeError=DriverError)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))


def test_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match=r'CuPy is missing; .*pip install "fp4kit\[cuda12\]" or "fp4kit\[cuda13\]"'):
        imports.cupy.__wrapped__()


def test_without_a_driver(monkeypatch):
    def count():
        raise DriverError("cudaErrorInsufficientDriver")

    with_runtime(monkeypatch, count)
    with pytest.raises(RuntimeError, match=r"no usable CUDA driver \(cudaErrorInsufficientDriver\); install or update"):
        imports.cupy.__wrapped__()


def test_without_a_device(monkeypatch):
    with_runtime(monkeypatch, lambda: 0)
    with pytest.raises(RuntimeError, match="sees no device; check nvidia-smi and CUDA_VISIBLE_DEVICES"):
        imports.cupy.__wrapped__()


def test_without_nvrtc(monkeypatch):
    monkeypatch.setattr(compiler, "_candidates", lambda: iter(["no-such-folder/libnvrtc.so.13"]))
    with pytest.raises(RuntimeError, match=r'NVRTC was not found .*"fp4kit\[cuda12\]" or "fp4kit\[cuda13\]"'):
        compiler.nvrtc_library.__wrapped__()


FILES = sorted(compiler.files(compiler.SOURCES).values())
README = (compiler.SOURCES / "README.md").read_text()
BELOW = {"entries": {"entries", "shared", "rules"}, "shared": {"shared", "rules"}, "rules": {"rules"}}


def test_threads_of_a_block_are_those_that_launchers_count():
    texts = "\n".join(path.read_text() for path in FILES)
    assert re.findall(r"^constexpr int kThreads = (\w+);", texts, re.MULTILINE) == ["FP4KIT_THREADS"]
    assert re.findall(r"#define FP4KIT_THREADS.*", texts) == [f"#define FP4KIT_THREADS {THREADS}"]


@together("path", FILES, ids=lambda path: path.name)
def test_includes_point_down(path: Path):
    names = re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
    assert {compiler.files(compiler.SOURCES)[name].parent.name for name in names} <= BELOW[path.parent.name]


@together("path", [path for path in FILES if path.suffix == ".cuh"], ids=lambda path: path.name)
def test_the_picture_has_every_header(path: Path):
    assert re.search(rf"\b{path.stem}\b", README)
