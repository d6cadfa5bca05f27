"""Define adapters: data that says how to call a producer's function for each recipe that must match it bit for bit.
A producer is a library that quantizes, such as torchao. Each module of `producers/` defines one Adapter named ADAPTER.

The functions of an adapter import the producer only when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from fp4kit.evidence.live.exceptions import Exempt

Parts = Mapping[str, np.ndarray]  # {name in compare.PARTS: array of the producer}
DTYPES = ("float32", "float16", "bfloat16")
SATURATING_CASTS = {"torch": ("2.13", "")}  # before torch 2.13, values that overflow in a cast to E4M3 became NaN


@dataclass(frozen=True)
class ProducerCall:
    """A producer's function that must match a recipe bit for bit, and how its result is compared.

    Attributes:
        function: takes a 2-d array whose rows hold whole blocks, and returns the producer's result as Parts, {name in
            compare.PARTS: array}.
        dtypes: the dtypes of the array that the producer accepts.
        columns: the row length must be a multiple of this number.
        exempt: the exceptions, which name elements whose differences are excused. Every use is counted.
        first: the first version of the producer that the recipe claims to match, or "" for no limit.
        last: the last version that the recipe claims to match, or "" for no limit.
        dependency_versions: {distribution: (first, last)} for other packages that affect the bits, such as torch, which
            does casts, or jax, which computes logarithms.
        decode: a function from a Quantized to the values that the producer decodes, in the dtype of the Quantized; or
            None if decoding is not compared. It must accept codes and scales that no quantizer gives, such as NaN
            scales.
        decodes: the dtypes to which ``decode`` can decode.
    """

    function: Callable[[np.ndarray], Parts]
    dtypes: tuple[str, ...] = DTYPES
    _: KW_ONLY
    columns: int = 16
    exempt: tuple[Exempt, ...] = ()
    first: str = ""
    last: str = ""
    dependency_versions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    decode: Callable[[Any], np.ndarray] | None = None
    decodes: tuple[str, ...] = DTYPES


@dataclass(frozen=True)
class Adapter:
    """A producer's package, and the calls to it that are compared with recipes.

    Attributes:
        name: the name of the producer's distribution, whose version is reported.
        module: the package that must be importable.
        calls: {recipe id: call}.
        dependencies: distributions whose versions are reported too, because the bits may depend on them.
        left_out: {recipe id: reason} for recipes of the producer that have no call.
        prepare: imports what the calls need, or None to import ``module``. It raises ImportError or OSError, with the
            reason as the message, if this machine lacks something.
        title: the producer's name in the report, or "" to use ``name``.
    """

    name: str
    module: str
    calls: Mapping[str, ProducerCall]
    dependencies: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[], Any] | None = None
    title: str = ""
