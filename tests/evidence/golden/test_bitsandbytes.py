"""Test NF4 and the FP4 of bitsandbytes against recorded outputs of bitsandbytes 0.50.2 on a CPU."""

import numpy as np
import pytest
from engine_cases import agree
from recorded import groups

import fp4kit
from fp4kit.formats import BNB_FP4, NF4

BOOKS = {"nf4": NF4, "fp4": BNB_FP4}
COUNTS = {"nf4": 19, "fp4": 19}
# bitsandbytes 0.50.2 flushes subnormal bfloat16 values to zero. If rows are not whole blocks, it decodes them with the
# scales of other blocks.
NOT_DECODED = ("tiny__bf16", "amax_sweep__f32")


@pytest.mark.parametrize("name", BOOKS)
def test_tables(name, golden):
    recorded = golden.get("bitsandbytes", f"table/{name}/code")
    assert np.array_equal(BOOKS[name].values, recorded)


@pytest.mark.parametrize("name", BOOKS)
def test_recorded_outputs(name, golden):
    """Codes, scales and values are equal, for blocks that run along the flattened tensor."""
    prefixes = [p for p in groups(golden, "bitsandbytes", "/codes_hi_first") if f"/{name}_b" in p]
    assert len(prefixes) == COUNTS[name]
    for prefix in prefixes:
        source, block = prefix.split("/")[0], int(prefix.rpartition("_b")[2])
        r = fp4kit.custom_recipe(name, BOOKS[name], "float32", block)
        x = golden.input(source).reshape(1, -1)
        q = agree(fp4kit.quantize, x, r)
        high_first = golden.get("bitsandbytes", f"{prefix}/codes_hi_first").reshape(1, -1)
        assert np.array_equal(q.packed, high_first >> 4 | high_first << 4), prefix
        absmax = golden.get("bitsandbytes", f"{prefix}/absmax").reshape(1, -1)
        assert np.array_equal(q.tensor_scale, absmax, equal_nan=True), prefix
        if source not in NOT_DECODED and block == 64:  # only blocks of 64 were decoded
            values = golden.get("bitsandbytes", f"{prefix}/dequant")
            values = values.view(x.dtype).reshape(1, -1).astype(np.float32)
            assert np.array_equal(agree(fp4kit.dequantize, q).astype(np.float32), values, equal_nan=True), prefix
