"""Provide a faulty producer for tests of fp4kit.evidence.live: mxfp4-ocp with planted faults, and correct calls."""

from functools import partial

import numpy as np

import fp4kit
from fp4kit.evidence.live.adapter import Adapter, ProducerCall
from fp4kit.evidence.live.exceptions import Exempt

AT = 3  # the column with wrong codes


def sound(x, recipe="mxfp4-ocp"):
    """Return the parts that the recipe gives."""
    q = fp4kit.quantize(x, recipe)
    return {"codes": fp4kit.unpack(q.packed), "block_scale": q.block_scale, "values": fp4kit.dequantize(q, np.float32)}


def faulty(x, above):
    """Return parts with a wrong code in one column of blocks that have an element larger than `above`."""
    parts = sound(x)
    large = np.abs(x.astype(np.float32)).reshape(len(x), -1, 32).max(axis=-1) > above
    parts["codes"].reshape(len(x), -1, 32)[..., AT] ^= large.astype(np.uint8)
    return parts


def one_byte_more(x):
    """Return parts with one byte too many."""
    parts = sound(x)
    return {"block_scale": parts["block_scale"] + np.uint8(1)}


def changed(x):
    raise AttributeError("quantize is gone")


def large_blocks(x, q):
    """Return which blocks have a large element."""
    amax = np.abs(x.astype(np.float32)).reshape(len(x), -1, 32).max(axis=-1)
    return np.repeat(amax > 8, 32, axis=-1)


FAULTY = ProducerCall(partial(faulty, above=8.0))
EXEMPT = ProducerCall(partial(faulty, above=8.0), exempt=(Exempt("large blocks", large_blocks),))


def adapter(call, id="mxfp4-ocp", **fields):
    return Adapter("numpy", "numpy", {id: call}, **fields)


def decode(q):
    return fp4kit.dequantize(q)


def decode_without_sign(q):
    """Decode code 8 to 0 instead of -0."""
    return fp4kit.dequantize(q) + np.zeros((), q.dtype)


DECODER = ProducerCall(sound, decode=decode)
FAULTY_DECODER = ProducerCall(sound, decode=decode_without_sign)
