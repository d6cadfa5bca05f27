"""A producer for the tests of fp4kit.evidence.live: mxfp4-ocp with a fault, which an adapter holds beside sound
calls.
"""

from functools import partial

import numpy as np

import fp4kit
from fp4kit.evidence.live.adapter import Adapter, ProducerCall
from fp4kit.evidence.live.exceptions import Exempt

AT = 3  # the column whose codes are wrong


def sound(x, recipe="mxfp4-ocp"):
    q = fp4kit.quantize(x, recipe)
    return {"codes": fp4kit.unpack(q.packed), "block_scale": q.block_scale, "values": fp4kit.dequantize(q, np.float32)}


def faulty(x, above):
    """Give a wrong code at one column of blocks that hold a large number."""
    parts = sound(x)
    large = np.abs(x.astype(np.float32)).reshape(len(x), -1, 32).max(axis=-1) > above
    parts["codes"].reshape(len(x), -1, 32)[..., AT] ^= large.astype(np.uint8)
    return parts


def one_byte_more(x):
    parts = sound(x)
    return {"block_scale": parts["block_scale"] + np.uint8(1)}


def changed(x):
    raise AttributeError("quantize is gone")


def large_blocks(x, q):
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
