"""Test the compiled engine's hadamard and rotate against the specification, in every bit, NaN included."""

from unittest.mock import patch

import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE
from rotations import calls

import fp4kit
from fp4kit.cpu import engine as rotate
from fp4kit.formats import bit_patterns

pytestmark = NEEDS_ENGINE
CALLS = list(calls())


def check(chosen):
    with np.errstate(all="ignore"):
        for call in chosen:
            function, x, arguments, options = call.arguments()
            found = function(x, *arguments, **options)
            with fp4kit.specification():
                expected = function(x, *arguments, **options)
            assert found.shape == x.shape and found.dtype == x.dtype
            assert (bit_patterns(found) == bit_patterns(expected)).all(), call


def test_some_calls():
    check(CALLS[::13])


@pytest.mark.exhaustive
def test_all_calls():
    check(CALLS)


def test_large_arrays_are_cut():
    """A call of the library takes at most ELEMENTS_PER_CALL elements, and several threads share it."""
    with patch.object(rotate, "ELEMENTS_PER_CALL", 5000), patch.object(rotate, "threads_for", lambda count: 3):
        check(call for call in CALLS[::29] if len(call.shape) > 1)
