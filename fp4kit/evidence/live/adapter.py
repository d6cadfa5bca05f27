"""Adapters: a producer's calls as data, by the id of the recipe that must give the same bits.

An adapter is a module of `producers/` with one Adapter named ADAPTER. Its functions import the producer when they are
called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from fp4kit.evidence.live.exceptions import Exempt

Parts = Mapping[str, np.ndarray]  # a producer's arrays by the names of compare.PARTS
DTYPES = ("float32", "float16", "bfloat16")
SATURATING_CASTS = {"torch": ("2.13", "")}  # before it, what overflows in a cast to E4M3 becomes NaN


@dataclass(frozen=True)
class ProducerCall:
    """One function of a producer, and how its result is compared.

    function: from an array of two dimensions, whole blocks along the last one, to the producer's Parts.
    dtypes: those of x that the producer takes. columns: what the length of x's rows must be a multiple of.
    exempt: named exceptions, which excuse differences and are counted.
    first, last: the range of the producer's versions for which the recipe is stated; "" has no end.
    beside: the same of other distributions, {name: (first, last)}: the torch whose casts, or the jax whose logarithm it
    has. decode: from a Quantized to the values, in its dtype, that the producer decodes from its codes and scales; or
    None. It is
        given codes and scales that no quantizer makes, such as NaN scales. decodes: the dtypes that it takes.
    """

    function: Callable[[np.ndarray], Parts]
    dtypes: tuple[str, ...] = DTYPES
    _: KW_ONLY
    columns: int = 16
    exempt: tuple[Exempt, ...] = ()
    first: str = ""
    last: str = ""
    beside: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    decode: Callable[[Any], np.ndarray] | None = None
    decodes: tuple[str, ...] = DTYPES


@dataclass(frozen=True)
class Adapter:
    """A producer's package and its calls.

    name: the name of the distribution, whose version is reported. module: the package that must be importable.
    beside: distributions whose versions the bits may depend on, too.
    calls: by the ids of recipes. left_out: recipes of this producer that no call runs, and why.
    title: what the report calls the producer, if that is not the distribution's name.
    prepare: imports the producer; raises ImportError or OSError, with the reason, where that needs what the machine has
    not.
    """

    name: str
    module: str
    calls: Mapping[str, ProducerCall]
    beside: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[], Any] | None = None
    title: str = ""
