"""Provide producers for tests of fp4kit.evidence.live: a correct one, and ones with planted faults.

All of them quantize by the recipe mxfp4-ocp.
"""

from functools import partial

import numpy as np

import fp4kit
from fp4kit.evidence.live.adapter import Adapter, Exempt, ProducerCall

WRONG_ELEMENT = 3  # the element of each block whose code is wrong


def correct_parts(x, recipe="mxfp4-ocp"):
    """Return the outputs of a correct producer for x as {name of the output: array}: codes, block scales and values."""
    q = fp4kit.quantize(x, recipe)
    return {"codes": fp4kit.unpack(q.packed), "block_scale": q.block_scale, "values": fp4kit.dequantize(q, np.float32)}


def faulty(x, above):
    """Return the outputs of a faulty producer for x (m, k): a code is wrong in every block whose amax exceeds `above`.

    In each such block of 32 elements, the code of element WRONG_ELEMENT is wrong.
    """
    parts = correct_parts(x)
    large = np.abs(x.astype(np.float32)).reshape(len(x), -1, 32).max(axis=-1) > above
    parts["codes"].reshape(len(x), -1, 32)[..., WRONG_ELEMENT] ^= large.astype(np.uint8)
    return parts


def scales_one_too_large(x):
    """Return {"block_scale": array} with block scale codes that are one too large, and no other output."""
    parts = correct_parts(x)
    return {"block_scale": parts["block_scale"] + np.uint8(1)}


def without_function(x):
    """Raise AttributeError, like a producer's release that no longer has the function to call."""
    raise AttributeError("quantize is gone")


def large_blocks(x, q):
    """Return a mask of x (m, k), True for all elements of blocks of 32 whose amax exceeds 8.

    q is not used. Exempt.where requires it.
    """
    amax = np.abs(x.astype(np.float32)).reshape(len(x), -1, 32).max(axis=-1)
    return np.repeat(amax > 8, 32, axis=-1)


CORRECT = ProducerCall(correct_parts)
FAULTY = ProducerCall(partial(faulty, above=8.0))
EXEMPT = ProducerCall(partial(faulty, above=8.0), exempt=(Exempt("large blocks", large_blocks),))


def adapter(call, id="mxfp4-ocp", **fields):
    return Adapter("numpy", {id: call}, **fields)


def decode(q):
    return fp4kit.dequantize(q)


def decode_without_sign(q):
    """Dequantize with a fault: return 0 in place of -0."""
    return fp4kit.dequantize(q) + np.zeros((), q.dtype)


DECODER = ProducerCall(correct_parts, decode=decode)
FAULTY_DECODER = ProducerCall(correct_parts, decode=decode_without_sign)
