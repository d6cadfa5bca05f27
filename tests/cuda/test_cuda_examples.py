"""Test the programs of examples/cuda: they launch fp4kit's kernels themselves, and get the bits of fp4kit.quantize.

Without a GPU, the kernels are compiled for the CPU, and driver.cpp stands in for the CUDA driver.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from exhaustive import half
from host.compiler import find_compiler
from host.instantiations import Instantiation
from on_gpu import DEVICES, cupy, importable

import fp4kit
import fp4kit.cuda
from fp4kit.cuda import compiler

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "cuda"
X = ((np.arange(64 * 256) * 37 % 101 - 50) / 16).astype(np.float32).reshape(64, 256)
GPU = [pytest.mark.gpu] if DEVICES else []


def missing(what):
    """Skip the test because something is not installed, but fail under CI=true."""
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"{what} is not installed")


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Return a command that compiles C++ against the headers of CUDA, with every warning an error."""
    found = find_compiler(tmp_path_factory.mktemp("compiler"))
    places = [Path(p, "nvidia", name, "include") for p in sys.path for name in ("cu13", "cuda_runtime")]
    places += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")]
    headers = next((place for place in places if (place / "cuda.h").exists()), None)
    if isinstance(found, str) or headers is None:
        missing("a C++ compiler" if headers else "the wheel nvidia-cuda-runtime, which has cuda.h,")
    return [found.command[0], "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{headers}"]


@pytest.fixture(scope="module")
def driver(command, tmp_path_factory):
    """Return the path of a library that stands in for libcuda.so.1."""
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = ROOT / "tests/support/host/driver.cpp"
    subprocess.run([*command, "-shared", "-fPIC", "-fvisibility=default", source, "-o", path, "-ldl"], check=True)
    return path


def stand_ins(libraries, kernels):
    """Return what driver.cpp loads in place of the cubins of kernels."""
    path = libraries.compiled([Instantiation(kernel._instantiation, kernel.name) for kernel in kernels])
    return [f"{path} {i} {8 * len(kernel.fields)}".encode() for i, kernel in enumerate(kernels)]


def expected(x):
    """Return the bytes of the codes, the block scales and the tensor scale of x on the CPU."""
    q = fp4kit.quantize(x, "nvfp4-te")
    return [np.asarray(a).tobytes() for a in (q.packed, q.block_scale, q.tensor_scale)]


def example(name):
    """Import an example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("place", [pytest.param("gpu" if DEVICES else "cpu", marks=GPU)])
def test_the_program_in_cpp(place, command, driver, libraries, tmp_path):
    try:
        compiler.nvrtc_library()
    except RuntimeError:
        missing("NVRTC")
    arch = f"sm_{cupy.cuda.Device().compute_capability}" if DEVICES else "sm_90"
    export = [sys.executable, EXAMPLES / "export_kernels.py", arch, tmp_path]
    subprocess.run(export, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    link = ["-l:libcuda.so.1"] if DEVICES else [f"-L{driver.parent}", "-l:libcuda.so.1", f"-Wl,-rpath,{driver.parent}"]
    program = [EXAMPLES / "quantize_driver.cpp", f"-I{tmp_path}", "-o", tmp_path / "quantize", *link]
    subprocess.run([*command, *program], check=True)
    if not DEVICES:
        kernels = [
            fp4kit.cuda.source(name, "nvfp4-te", "float32", "sm_90", shape=X.shape)
            for name in ("tensor_amax", "quantize")
        ]
        for kernel, text in zip(kernels, stand_ins(libraries, kernels), strict=True):
            cubin = tmp_path / f"{kernel.operation}.cubin"
            assert cubin.read_bytes().startswith(b"\x7fELF")
            cubin.write_bytes(text)
    found = subprocess.run(tmp_path / "quantize", cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert [bytes.fromhex(line) for line in found.split()] == expected(X)


@pytest.mark.parametrize("place", [pytest.param("gpu" if DEVICES else "cpu", marks=GPU)])
@pytest.mark.parametrize("dtype", half(["bfloat16", "float32"]))
def test_the_operator_of_pytorch(place, dtype, monkeypatch, libraries, request):
    torch = pytest.importorskip("torch")
    module, device = example("quantize_torch"), "cuda" if DEVICES else "cpu"
    if DEVICES and not torch.cuda.is_available():
        pytest.skip("PyTorch has no CUDA")
    x = torch.from_numpy(X).to(device, getattr(torch, dtype))
    if not DEVICES:
        library = ctypes.CDLL(str(request.getfixturevalue("driver")))
        monkeypatch.setattr(module, "driver", lambda: library)
        monkeypatch.setattr(fp4kit.cuda, "compile", lambda kernel: stand_ins(libraries, [kernel])[0])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    found, fake = module.quantize(x), module.results(x.to("meta"))
    assert [a.cpu().numpy().tobytes() for a in found] == expected(x.cpu())
    assert [(a.shape, a.dtype) for a in found] == [(a.shape, a.dtype) for a in fake]


@pytest.mark.parametrize("place", [pytest.param("gpu" if DEVICES else "cpu", marks=GPU)])
@pytest.mark.parametrize("start", [0, 1])
def test_the_program_for_cupy(place, start, monkeypatch, libraries, capsys):
    with nullcontext() if DEVICES else libraries.playing(), importable():
        module = example("quantize_cupy")
        if DEVICES:
            module.main()
            assert capsys.readouterr().out.count("equal") == 3
        else:
            monkeypatch.setattr(module, "load", lambda k: compiler.function(k._instantiation, k.name, 0))
        flat = cupy.asarray(np.concatenate([np.zeros(start, np.float32), X.reshape(-1)]))
        found = module.quantize(flat[start:].reshape(X.shape))
        assert [a.get().tobytes() for a in found] == expected(X)


@pytest.mark.parametrize(
    "name", half(["cuda/export_kernels", "cuda/quantize_torch", "cuda/quantize_cupy", "c_api/recipe_header"])
)
def test_help_ends_in_one_line(name):
    command = [sys.executable, EXAMPLES.parent / f"{name}.py", "--help"]
    lines = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True).stderr.splitlines()
    assert len([line for line in lines if not line.startswith("Failed to load")]) <= 1, lines
