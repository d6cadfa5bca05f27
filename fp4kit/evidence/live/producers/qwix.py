"""Define the adapter of qwix: qarray.quantize, as XLA computes it on a CPU. An adapter holds the calls to a producer (a
library that quantizes) that are compared with recipes. A call returns Parts, {name: array}, such as {"codes": codes}.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from fp4kit.evidence.live.adapter import Adapter, Parts, ProducerCall
from fp4kit.evidence.live.draw import MAX_ELEMENTS
from fp4kit.rounding import exponent_field


def _prepare() -> None:
    """Import JAX and qwix. Raise ImportError if that fails, and RuntimeError if JAX has no CPU device."""
    import jax
    import qwix._src.core.qarray  # noqa: F401

    jax.devices("cpu")


def _padded(x: np.ndarray, size: int) -> np.ndarray:
    """Return an array whose rows are the blocks of x (`size` elements each), padded with rows of zeros."""
    blocks = np.zeros((max(MAX_ELEMENTS // size, x.size // size), size), x.dtype)
    blocks[: x.size // size] = x.reshape(-1, size)
    return blocks


def _quantize(x: np.ndarray, kind: str) -> Parts:
    """Quantize x with qarray.quantize, as XLA computes it on a CPU."""
    import jax
    import jax.numpy as jnp
    from qwix._src.core import qarray

    size = 16 if kind == "nvfp4" else 32
    how = qarray.HowToQuantize(qtype=kind, channelwise_axes=(0,), tiled_axes={1: size})
    with jax.default_device(jax.devices("cpu")[0]):
        q = qarray.quantize(jnp.asarray(_padded(x, size)), how)
        used = x.size // size
        scale = np.asarray(q.scale)[:used].astype(np.float32).reshape(len(x), -1)
        codes, values = (np.asarray(a)[:used].reshape(x.shape) for a in (q.qvalue, qarray.dequantize(q)))
        codes = codes.view(np.uint8)
    if kind == "nvfp4":
        return {"codes": codes, "block_scale": np.asarray(jnp.asarray(scale).astype(jnp.float8_e4m3fn)).view(np.uint8)}
    # The E8M0 code of a scale is the exponent field of its float32 value; inf and NaN give 255.
    return {
        "codes": codes,
        "block_scale": exponent_field(scale).astype(np.uint8),
        "fake": values,
    }


_ROUNDED_LOG = {"jax": ("", "0.10.99")}  # later versions do not round the steps of log2 to bfloat16

ADAPTER = Adapter(
    name="qwix",
    module="qwix",
    dependencies=("jax", "jaxlib"),
    prepare=_prepare,
    calls={"nvfp4-qwix": ProducerCall(partial(_quantize, kind="nvfp4"))}
    | {
        f"{kind}-qwix": ProducerCall(partial(_quantize, kind=kind), dependency_versions=_ROUNDED_LOG)
        for kind in ("mxfp4", "mxfp8")
    },
)
