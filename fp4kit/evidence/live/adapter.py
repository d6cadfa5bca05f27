"""Define adapters: data that says how to call a producer's function for each recipe that must match it bit for bit.
A producer is a library that quantizes, such as torchao. Adapters are the constants of frameworks.py, standalone.py and
toolkits.py.

The functions of an adapter import the producer only when they are called.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import fp4kit
from fp4kit.evidence.golden.check import unpack_fp6
from fp4kit.formats import E2M3, E8M0, ELEMENT_FORMATS
from fp4kit.reference.codec import decode

Where = Callable[[np.ndarray, Any], np.ndarray]  # function (x, fp4kit's Quantized of x) -> mask of x's shape


class Exempt(NamedTuple):
    """A named exception: elements whose codes and values are not compared.

    Attributes:
        name: name of the exception in the report.
        where: function that takes x and fp4kit's Quantized of x, and returns a mask in the shape of x.
        scales: True if the scales of blocks with such elements are not compared either.
    """

    name: str
    where: Where
    scales: bool = False


def block_amax(x: np.ndarray, size: int) -> np.ndarray:
    """Return, for each element of x, the largest magnitude in its block of ``size`` elements of one row, as float32."""
    blocks = np.abs(x.astype(np.float32)).reshape(*x.shape[:-1], -1, size)
    return np.repeat(blocks.max(axis=-1), size, axis=-1)


def _scale(q: Any) -> np.ndarray:
    """Return, for each element of q, the value of its block scale."""
    return np.repeat(decode(q.block_scale, q.recipe.scale or E8M0), q.recipe.block_size, axis=-1)


def _rounds_beyond_dtype(x: np.ndarray, q: Any) -> np.ndarray:
    """Return a mask of elements in blocks whose amax overflows the dtype of x when compressed-tensors rounds it."""
    limit = 1.9375 if q.recipe.element is E2M3 else 1.75
    return ~(block_amax(x, q.recipe.block_size) < limit * 2.0 ** (15 if x.dtype == np.float16 else 127))


# A stored 2^-126 does not tell whether Quark divided by this scale or by 2^-127.
QUARK_SMALLEST_SCALE = Exempt("values under 2^-127, which Quark stores as 2^-126", lambda x, q: _scale(q) <= 2.0**-126)
QUARK_INFINITE = Exempt(  # Quark divides blocks with the scale code 0 by 2^-23
    "quotients that overflow in Quark",
    lambda x, q: (_scale(q) == 0) & (np.abs(x.astype(np.float64)) * 2.0**23 >= 2.0**128),
)
ONEDNN_NEGATIVE_ZERO = Exempt(  # fp4kit gives +0, whose sign bit is not set, only if the product underflows
    "-0 of a product that underflows in oneDNN",
    lambda x, q: (x < 0) & ((fp4kit.unpack(q.packed) if q.recipe.is_packed else q.packed) == 0),
)
NAN_SCALE = Exempt("codes under a NaN scale", lambda x, q: np.isnan(_scale(q)))
NAN_VALUE = Exempt("codes that decode to NaN", lambda x, q: np.isnan(_scale(q) * np.asarray(q.tensor_scale)))
ZERO_OF_ZEROS = Exempt("-0 in a block of zeros", lambda x, q: (block_amax(x, q.recipe.block_size) == 0) & np.signbit(x))
ROUNDS_BEYOND_DTYPE = Exempt("block amax that rounds to a power beyond the dtype", _rounds_beyond_dtype, scales=True)


# {part that a producer may give: fp4kit expression that must equal it}. In the expressions, x is the input, r the
# recipe, q the Quantized and v the producer's array.
PARTS = {
    # Producers give one code per element, although q.packed may hold two codes per byte.
    "codes": "fp4kit.unpack(q.packed) if q.recipe.is_packed else q.packed",
    "block_scale": "q.block_scale",  # compared as bit patterns
    "tensor_scale": "q.tensor_scale.reshape(v.shape)",  # float32, multiplies on decode
    "values": "fp4kit.dequantize(q, v.dtype)",  # decoded values
    "values_float16": "fp4kit.dequantize(q, v.dtype)",
    "values_bfloat16": "fp4kit.dequantize(q, v.dtype)",
    "decoded": "fp4kit.dequantize(q)",  # decoded values of a given Quantized
    "fake": "fp4kit.fake_quantize(x, r).astype(v.dtype)",  # values of a fake quantizer
}
Parts = Mapping[str, np.ndarray]  # {name in PARTS: array of the producer}
DTYPES = ("float32", "float16", "bfloat16")
SATURATING_CASTS = {"torch": ("2.13", "")}  # before torch 2.13, values that overflow in a cast to E4M3 became NaN


@dataclass(frozen=True)
class ProducerCall:
    """A producer's function that must match a recipe bit for bit, and how its result is compared.

    Attributes:
        function: takes a 2-d array whose rows hold whole blocks, and returns the producer's result as Parts, {name in
            PARTS: array}.
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
        calls: {recipe id: call}.
        module: the package that must be importable, or "" if it has the distribution's name. None if the distribution
            has no Python package.
        dependencies: distributions whose versions are reported too, because the bits may depend on them.
        left_out: {reason: ids of recipes of the producer that have no call}.
        needs: the modules that the calls import, if not only ``module``, and functions that load what they need. These
            raise ImportError or OSError, with the reason as the message, if this machine lacks something.
        title: the producer's name in the report, or "" to use ``name``.
    """

    name: str
    calls: Mapping[str, ProducerCall]
    _: KW_ONLY
    module: str | None = ""
    dependencies: tuple[str, ...] = ("torch",)
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needs: tuple[str | Callable[[], Any], ...] = ()
    title: str = ""

    @property
    def package(self) -> str:
        """Return the name of the package that must be importable."""
        return self.module or self.name.replace("-", "_")


def parts(x: np.ndarray, codes: Any, block_scale: Any, **others: Any) -> Parts:
    """Return the Parts of a producer's result for x, from tensors or arrays. Others that are None are left out.

    Codes are unpacked, so that there is one code per element. Block scales get the shape (rows, blocks per row).
    """
    arrays = {name: _array(value) for name, value in others.items() if value is not None}
    stored, scales = (_array(part).view(np.uint8).reshape(len(x), -1) for part in (codes, block_scale))
    if stored.size < x.size:
        is_fp6 = stored.size * 4 == x.size * 3
        stored = unpack_fp6(stored) if is_fp6 else np.asarray(fp4kit.unpack(stored))
    return {"codes": stored, "block_scale": scales, **arrays}


def _array(value: Any) -> Any:
    return value if isinstance(value, (np.ndarray, np.generic)) else to_numpy(value)


def decoded(decode: Callable[[Any], Any], *names: str) -> Parts:
    """Return the Parts that a producer decodes to the torch dtypes with the given names."""
    import torch

    values = {name: to_numpy(decode(getattr(torch, name))) for name in names}
    return {"values" if name == "float32" else f"values_{name}": each for name, each in values.items()}


def to_torch(x: np.ndarray) -> Any:
    """Return a torch tensor with a copy of an array's elements and its dtype, bfloat16 included."""
    import torch

    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.array(x).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def to_numpy(tensor: Any) -> np.ndarray:
    """Return a NumPy array with the elements and dtype of a torch tensor on the CPU, bfloat16 included."""
    import torch

    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8).numpy()
    return tensor.numpy()


def codes_of(values: np.ndarray, format: str) -> np.ndarray:
    """Convert values to codes (uint8, one per value), for producers that return decoded values instead of codes."""
    fmt = next(f for f in ELEMENT_FORMATS if f.name.lower() == format)
    magnitudes = np.asarray(fmt.magnitudes, np.float64)
    size = np.abs(values.astype(np.float64))
    codes = np.minimum(np.searchsorted(magnitudes, size), len(magnitudes) - 1)
    if not np.array_equal(magnitudes[codes], size):
        raise ValueError(
            f"codes_of: {values[magnitudes[codes] != size][0]} is not a value of {fmt.name}; needs "
            "values that have a code"
        )
    return (codes + np.signbit(values) * (1 << (fmt.bits - 1))).astype(np.uint8)


class Anything(ModuleType):
    """A stand-in for any module: every attribute exists and is another stand-in, except unset names that begin with __.

    A stand-in can be called. A call with exactly one positional argument returns the argument, so that a stand-in also
    works as a decorator that changes nothing. Any other call returns the stand-in itself.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # marks a package, so that its modules can be imported

    def __getattr__(self, name: str) -> Any:
        """Create, store and return another stand-in as the attribute `name`, which this stand-in does not have yet."""
        if name.startswith("__"):
            raise AttributeError(name)
        attribute = Anything(f"{self.__name__}.{name}")
        setattr(self, name, attribute)
        return attribute

    def __call__(self, *given: Any, **options: Any) -> Any:
        """Return the argument if the call has exactly one and no keywords, otherwise this stand-in."""
        return given[0] if len(given) == 1 and not options else self


def triton() -> dict[str, ModuleType]:
    """Return {name: stand-in} for the modules of Triton. Kernels are not run, but triton.cdiv works."""
    whole = Anything("triton")
    whole.cdiv = lambda a, b: -(-a // b)  # type: ignore[attr-defined]
    return {"triton": whole, "triton.language": whole.language}


@contextlib.contextmanager
def _standing_in(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Return a context manager that puts modules into sys.modules for the time of a ``with`` statement."""
    before = dict(sys.modules)
    tops = {name.partition(".")[0] for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
            if name not in before:
                del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if name.partition(".")[0] in tops})


def directory(package: str) -> Path:
    """Return the directory of an installed package without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"No module named {package!r}")
    return Path(next(iter(spec.submodule_search_locations)))


def load(package: str, file: str, modules: Mapping[str, ModuleType] = {}) -> ModuleType:
    """Load one file of an installed package and return its module, such as load("vllm", "scalar_type.py")."""
    path = directory(package) / file
    name = ".".join([package, *Path(file).with_suffix("").parts])
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"{package} has no {file}")
    module = importlib.util.module_from_spec(spec)
    with _standing_in({**modules, name: module}):
        spec.loader.exec_module(module)
    return module


cached = lru_cache(None)  # decorator for functions that load a file, so that each file is loaded only once


@cached
def packages(*names: str) -> dict[str, ModuleType]:
    """Return {name: stand-in} for modules with the given names, as the argument ``modules`` of ``load``."""
    return {name: Anything(name) for name in names}
