"""Test the products of one side: they approximate the unquantized product, with every transform."""

import numpy as np
import pytest

import fp4kit
from fp4kit import Contract
from fp4kit.contract.compare_layer import products, why_no_products
from fp4kit.contract.sides import Side, Weights

RNG = np.random.default_rng(0)
X, W = RNG.standard_normal((2, 16, 256), np.float32)


@pytest.mark.parametrize("transform", [{}, {"hadamard": 16}, {"hadamard": 64, "hadamard_signs": "+--+" * 16}])
@pytest.mark.parametrize("activations", ["nvfp4-te", "mxfp8-modelopt-fake", None])
def test_products_approximate_those_of_values(transform, activations):
    side = Side("train", Contract("nvfp4-te", activations=activations, unit="sm100", **transform))
    q = fp4kit.quantize(side.transformed(W), "nvfp4-te")
    exact = X @ W.T
    for weights in (Weights(q, None), Weights(None, q.dequantize(np.float32))):
        found = products(side, X, weights, quantized=True)
        assert found.dtype == np.float32 and np.linalg.norm(found - exact) < 0.2 * np.linalg.norm(exact)
    assert np.linalg.norm(products(side, X, Weights(None, W), False) - exact) < 0.02 * np.linalg.norm(exact)


def test_why_products_are_unknown():
    assert why_no_products(None) == "no contract states the matrix unit"
    assert why_no_products(Contract()) == "the contract states no matrix unit"
    assert why_no_products(Contract(unit="sm100", unknown=("activations",))) == "the recipe of activations is unknown"
    assert why_no_products(Contract(unit="sm100")) == ""
