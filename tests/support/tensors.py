"""Convert between NumPy arrays and PyTorch tensors, bfloat16 included, and mark tests of new versions of PyTorch."""

from importlib import metadata

import pytest

from fp4kit.evidence.live.adapter import to_numpy, to_torch

__all__ = ["since_2_13", "to_numpy", "to_torch"]


def since_2_13():
    """Return a pytest mark that skips a test on PyTorch before 2.13.

    Earlier versions do not trace objects that are made without their constructor, such as Quantized and Recipe.
    """
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        version = "0.0"
    old = tuple(map(int, version.split(".")[:2])) < (2, 13)
    return pytest.mark.skipif(old, reason=f"PyTorch {version} does not trace a Quantized, or a Recipe")
