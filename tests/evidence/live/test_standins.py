"""Test loading a single file of a package that cannot be imported as a whole.

Stand-in modules take the place of the missing imports, and are removed afterwards.
"""

import sys

import pytest

from fp4kit.evidence.live import adapter as standins


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a package that cannot be imported, with a file in it that can be."""
    root = tmp_path / "needs_cuda"
    (root / "deep").mkdir(parents=True)
    (root / "__init__.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    (root / "plain.py").write_text("LIMIT = 6.0")
    (root / "deep" / "kernels.py").write_text(
        "import triton\nimport triton.language as tl\nfrom needs_cuda.plain import LIMIT\nfrom needs_cuda.tools import"
        " register\n@triton.jit\ndef kernel(x: tl.constexpr):\n    return x\ndef quantize(x):\n    return min(x, LIMIT)"
        " * triton.cdiv(5, 2)\nregister(name='quantize', function=quantize)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "needs_cuda"


def load(package):
    plain = standins.load(package, "plain.py")
    needed = {**standins.triton(), **standins.packages(package, f"{package}.tools"), f"{package}.plain": plain}
    return standins.load(package, "deep/kernels.py", needed)


def test_a_file_is_loaded_without_its_package(package):
    module = load(package)
    assert module.quantize(100.0) == 18.0 and module.kernel(3) == 3
    assert module.__name__ == "needs_cuda.deep.kernels"


def test_stand_ins_are_gone_afterwards(package):
    before = {name for name in sys.modules if name.partition(".")[0] in (package, "triton")}
    load(package)
    assert {name for name in sys.modules if name.partition(".")[0] in (package, "triton")} == before
    with pytest.raises(OSError, match="libcuda"):
        __import__(package)


def test_missing_files_are_an_import_error(package):
    with pytest.raises(ImportError, match="needs_cuda has no gone"):
        standins.load(package, "gone.py")
    with pytest.raises(ImportError, match="No module named 'no_such_package'"):
        standins.load("no_such_package", "plain.py")
    with pytest.raises(OSError, match="libcuda"):  # without a stand-in, the package itself is imported
        standins.load(package, "deep/kernels.py", standins.triton())
