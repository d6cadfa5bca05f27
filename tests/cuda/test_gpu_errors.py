"""Test the errors of grouped functions: they name the function and the index of the tensor, and are equal on CPU and
GPU.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from on_gpu import ON_GPU, cupy
from together import together

import fp4kit

pytestmark = ON_GPU

A = np.ones((16, 64), np.float32)
SHORT = np.ones((16, 40), np.float32)
LONG, DOUBLE = A[:, :32], np.ones((16, 64))


def moved(a, put):
    return put(a) if isinstance(a, np.ndarray) else a


def grouped(function, recipe="nvfp4-te", second=A, **options):
    """Return a function that calls a grouped function or makes a plan for the tensors A and `second`, to see it fail.

    The returned function takes `put`, which moves an array to the device.

    function: the name of a grouped function, or of the class of a plan, in fp4kit.
    second, options: the second tensor and the options, among which is the wrong argument.
    """
    given = options.pop("grads", None)

    def call(put):
        xs = [put(A), put(second)]
        found = {name: [moved(a, put) for a in v] if isinstance(v, list) else v for name, v in options.items()}
        if function == "fake_quantize_grouped_backward":
            return fp4kit.fake_quantize_grouped_backward(list(map(put, given or [A, second])), xs, recipe, **found)
        result = getattr(fp4kit, function)(xs, recipe, **found)
        # A plan may check some arguments only when it is used, so use it.
        return result.quantize() if function == "GroupedPlan" else result

    return call


FUNCTIONS = (
    "quantize_grouped",
    "fake_quantize_grouped",
    "amax_grouped",
    "fake_quantize_grouped_backward",
    "GroupedPlan",
)
QUANTIZERS = ("quantize_grouped", "fake_quantize_grouped", "GroupedPlan")
CASES = [
    (f, grouped(f, second=SHORT), "xs[1]: axis 1 has length 40; nvfp4-te needs a multiple of 16") for f in FUNCTIONS
]
CASES += [(f, grouped(f, second=DOUBLE), "xs[1] is float64; needs float32, float16 or bfloat16") for f in FUNCTIONS]
CASES += [(f, grouped(f, axis=2), "xs[0]: axis 2 is out of range for a 2-d array; needs -2 to 1") for f in FUNCTIONS]
CASES += [(f, grouped(f, tensor_amax=[1.0, -1.0]), "tensor_amax[1] holds 1 negative value(s) of 1") for f in QUANTIZERS]
CASES += [
    (f, grouped(f, tensor_amax=[1.0, A]), "tensor_amax[1] has shape (16, 64); nvfp4-te needs ()") for f in QUANTIZERS
]
CASES += [(f, grouped(f, tensor_amax=[1.0]), "tensor_amax has 1 entries and xs 2 arrays") for f in QUANTIZERS]
CASES += [
    (f, grouped(f, "mxfp4-ocp", tensor_amax=[1.0, 1.0]), "tensor_amax[0] was given, but mxfp4-ocp") for f in QUANTIZERS
]
CASES += [
    (f, grouped(f, block_amax=[A, A]), "block_amax[0] was given, but nvfp4-te computes it from x") for f in QUANTIZERS
]
CASES += [
    (f, grouped(f, rounding="up"), "xs[0]: rounding is 'up'; needs 'nearest' or 'stochastic'") for f in QUANTIZERS
]
CASES += [(f, grouped(f, rounding="stochastic"), "xs[0]: stochastic rounding needs seed") for f in QUANTIZERS]
CASES += [(f, grouped(f, seed=1), "xs[0]: seed was given with rounding='nearest'") for f in QUANTIZERS]
CASES += [
    (
        "quantize_grouped",
        grouped("quantize_grouped", hadamard="no"),
        "xs[0]: hadamard is 'no'; needs False, True or 'no_signs'",
    ),
    ("quantize_grouped", grouped("quantize_grouped", scale_layout="tiled"), "xs[0]: scale_layout is 'tiled'"),
    (
        "quantize_grouped",
        grouped("quantize_grouped", "mxfp4-modelopt-fake"),
        "xs[0]: mxfp4-modelopt-fake is a fake quantizer",
    ),
    (
        "amax_grouped",
        lambda put: fp4kit.amax_grouped([put(A), put(A[0])], axis=1),
        "xs[1]: axis 1 is out of range for a 1-d array; needs -1 to 0",
    ),
]
_BACKWARD = (
    ({"grads": [A, LONG]}, "grads[1] has shape (16, 32); needs the shape of x, (16, 64)"),
    ({"grads": [A, DOUBLE]}, "grads[1] is float64; needs float32, float16 or bfloat16"),
    ({"grads": [A]}, "grads has 1 arrays and xs 2; needs equally many"),
    ({"amax": [1.0, -1.0]}, "amax[1] holds 1 negative value(s) of 1"),
    (
        {"amax": [np.ones(16, np.float32), np.ones(3, np.float32)]},
        "amax[1] has shape (3,); x (16, 64) needs (), (16,) (rows)",
    ),
)
CASES += [
    (f, grouped(f, pass_through=passed, **given), text)
    for f in ("fake_quantize_grouped_backward",)
    for given, text in _BACKWARD
    for passed in (False, True)
]


@together("function, call, text", CASES)
def test_grouped_functions_name_themselves(function, call, text) -> None:
    texts = []
    for put in (np.asarray, cupy.asarray):
        with pytest.raises((ValueError, TypeError), match=re.escape(f"{function}: {text}")) as caught:
            call(put)
        texts.append((caught.type, str(caught.value)))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("axis", "text"),
    [
        (2, "amax: axis 2 is out of range for a 2-d array; needs -2 to 1"),
        ((0, -2), "amax: axis (0, -2) names one axis twice; needs different axes"),
    ],
)
def test_axes_of_amax(axis, text) -> None:
    for x in (A, cupy.asarray(A)):
        with pytest.raises(ValueError, match=re.escape(text)):
            fp4kit.amax(x, axis=axis)
