"""Provide names of quantizers, amaxes that differ per expert, and a comparison, for tests of AmaxState."""

import numpy as np

from fp4kit.evidence.testing import assert_same_bits
from fp4kit.training.amax_state import AmaxCollector

FC1, FC2 = (f"decoder.layers.0.mlp.experts.linear_{name}.weight_quantizer" for name in ("fc1", "fc2"))
QKV = "decoder.layers.0.self_attention.linear_qkv.input_quantizer"
BASE = "m.weight_quantizer"
SHAPES = {"scalar": (), "rows": (6, 1), "blocks": (4, 3)}


def state_of(values):
    """Return a frozen AmaxState with the given values: {name of a quantizer: amax}."""
    collector = AmaxCollector()
    for key, value in values.items():
        collector.collect(key, np.asarray(value, np.float32))
    return collector.freeze()


def experts_of(n, shape=(), base=FC1, seed=0):
    """Return {"<base>.<i>": amax} for experts i = 0 to n - 1. The amaxes have the given shape and are all different."""
    rng = np.random.default_rng(seed)
    return {f"{base}.{i}": (i + 1 + rng.random(shape)).astype(np.float32) for i in range(n)}


def assert_same_state(state, values):
    """Assert that an AmaxState holds exactly the quantizers of `values`, with bit-identical amaxes.

    Names may be spelled differently in the state, provided that looking up a key of `values` finds the amax.

    Args:
        state: the AmaxState.
        values: {name of a quantizer: amax}.
    """
    assert len(state) == len(values)
    for key, value in values.items():
        assert_same_bits(state[key], np.asarray(value, np.float32), key)
