"""Test the sizes of tensors in safetensors files."""

import pytest

from fp4kit.storage.safetensors_file import nbytes_of

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
