"""Facts about number formats: small frozen descriptors from which codes, maxima and midpoints are derived.

A *code* is a bit pattern, a *value* the number it stands for. Sources: OCP Microscaling Formats (MX) v1.0 and OCP 8-bit
Floating Point (OFP8) v1.0; NVFP4 as in the NVIDIA PTX ISA (cvt to e2m1x2, ue4m3 block scales).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit import rounding as rounding_of
from fp4kit.arguments import as_flag
from fp4kit.arithmetic import ieee
from fp4kit.lazy import lazy_property

FLOATS = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))  # of what is quantized, and of values
FLT_MAX = np.finfo(np.float32).max
FLT_MIN = np.finfo(np.float32).tiny  # smallest normal


def unsigned(dtype: np.dtype) -> np.dtype:
    """The unsigned integers of a dtype's width, which hold its bit patterns."""
    return np.dtype(f"u{dtype.itemsize}")


def bit_patterns(x: np.ndarray) -> np.ndarray:
    """The bits of numbers as unsigned integers: an array of x's shape, and a view of x where that is contiguous."""
    return np.ascontiguousarray(x).view(unsigned(x.dtype)).reshape(x.shape)


class Packing(NamedTuple):
    """How codes lie in memory: `codes` of them, the first in the lowest bits, share `bytes` bytes."""

    codes: int
    bytes: int

    @property
    def stored_bits(self) -> int:
        """Bits of memory that a code takes."""
        return 8 * self.bytes // self.codes

    def length(self, n: int) -> int:
        """Bytes of n codes, n a multiple of `codes`."""
        return n // self.codes * self.bytes


@dataclass(frozen=True)
class ElementFormat:
    """One number of `bits` bits: a float (sign, exponent, mantissa) or a two's complement integer (no exponent bits).

    Block scales use the same descriptors: E8M0 is unsigned, has no mantissa and no zero.
    name: an identifier, which names the format in CUDA too. exponent_bits: 0 for an integer. At most 8 bits in all.
    specials: "none"; "nan": the pattern of all ones is NaN and there is no infinity; "ieee": the top exponent holds inf
    and NaN. has_zero: False for E8M0 alone. Every value must be a float32. A format is a value: equal fields are equal
    formats, in any process; arrays derived from them are read-only and not pickled. Raises TypeError for a field of
    another type, ValueError for fields that make no such format.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int = 0
    specials: Literal["none", "nan", "ieee"] = "none"
    signed: bool = True
    has_zero: bool = True

    def __post_init__(self) -> None:
        self._check_types()
        if not self.name.isidentifier():
            raise ValueError(f"ElementFormat: name is {self.name!r}; needs an identifier, such as 'E2M1'")
        if self.exponent_bits < 0 or self.mantissa_bits < 0 or not 1 <= self.bits <= 8:
            raise ValueError(
                f"ElementFormat {self.name}: exponent_bits is {self.exponent_bits}, mantissa_bits {self.mantissa_bits};"
                " needs neither negative, and 1 to 8 bits with the sign"
            )
        if self.specials not in ("none", "nan", "ieee"):
            raise ValueError(f"ElementFormat {self.name}: specials is {self.specials!r}; needs 'none', 'nan' or 'ieee'")
        if self.is_integer:
            self._check_integer()
        else:
            self._check_float()

    def _check_types(self) -> None:
        kinds = (str, int, int, int, str, bool, bool)
        for (name, value), kind in zip(vars(self).items(), kinds, strict=True):
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise TypeError(f"ElementFormat: {name} is {value!r}; needs {kind.__name__}")

    def _check_integer(self) -> None:
        if not self.signed:
            raise ValueError(
                f"ElementFormat {self.name}: signed is False; needs True for an integer, which is two's complement"
            )
        if self.mantissa_bits == 0 or self.bias or self.specials != "none" or not self.has_zero:
            raise ValueError(f"ElementFormat {self.name}: an integer has mantissa_bits, and no bias or specials")

    def _check_float(self) -> None:
        facts = (self.exponent_bits, self.mantissa_bits, self.bias, self.specials, self.signed)
        if not self.has_zero and facts != (8, 0, 127, "nan", False):
            raise ValueError(f"ElementFormat {self.name}: has_zero is False, which only E8M0's fields may have")
        if self.specials == "ieee" and (self.mantissa_bits == 0 or self.exponent_bits == 1):
            raise ValueError(
                f"ElementFormat {self.name}: specials is 'ieee'; needs mantissa bits, and exponents below the top"
            )
        top = 2**self.exponent_bits - 1 - self.bias
        if self.has_zero and not (self.emin - self.mantissa_bits >= -149 and top <= 127):
            raise ValueError(
                f"ElementFormat {self.name}: bias is {self.bias}; some values are no float32; needs 2^-149 to 2^127"
            )
        if len(self.magnitudes) < 2:
            raise ValueError(f"ElementFormat {self.name}: no finite value but zero")

    def __reduce__(self) -> tuple[Any, ...]:
        return ElementFormat, astuple(self)  # without the derived arrays, which would come back writeable

    def __repr__(self) -> str:
        return self.name

    @property
    def bits(self) -> int:
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def packing(self) -> Packing:
        """Two codes of 4 bits share a byte; wider ones have one each."""
        return Packing(2, 1) if self.bits == 4 else Packing(1, 1)

    @property
    def is_integer(self) -> bool:
        return self.exponent_bits == 0

    @property
    def sign_bit(self) -> int:
        """The bit of a code that holds the sign; 0 for unsigned formats."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal value; subnormals share its step."""
        return (1 if self.has_zero else 0) - self.bias

    @lazy_property
    @ieee("ElementFormat.values")  # 2^-127 of E8M0 is a subnormal, and what is cached here stays
    def values(self) -> np.ndarray:
        """float32 value of every code, in code order (2**bits entries, read-only). NaN codes are NaN."""
        codes = np.arange(2**self.bits)
        values = self._integer_values(codes) if self.is_integer else self._float_values(codes)
        values = values.astype(np.float32)
        values.setflags(write=False)
        return values

    def _integer_values(self, codes: np.ndarray) -> np.ndarray:
        return np.where(codes & self.sign_bit, codes - 2**self.bits, codes)

    def _float_values(self, codes: np.ndarray) -> np.ndarray:
        # bit picture: [s] e..e m..m ; value = (-1)^s * 2^(max(e, 1) - bias - M) * ((e > 0) * 2^M + m)
        mantissa = codes & (2**self.mantissa_bits - 1)
        field = (codes >> self.mantissa_bits) & (2**self.exponent_bits - 1)
        hidden = np.where((field > 0) | (not self.has_zero), 2**self.mantissa_bits, 0)
        exponent = np.maximum(field - self.bias, self.emin) - self.mantissa_bits
        magnitude = np.ldexp((hidden + mantissa).astype(np.float64), exponent)
        top = field == 2**self.exponent_bits - 1
        if self.specials == "nan":
            magnitude[top & (mantissa == 2**self.mantissa_bits - 1)] = np.nan
        elif self.specials == "ieee":
            magnitude[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
        return np.where(codes & self.sign_bit, -magnitude, magnitude)

    @lazy_property
    def magnitudes(self) -> np.ndarray:
        """Finite values of the non-negative codes, ascending; the index is the code."""
        positive = self.values[: self.sign_bit or None]
        magnitudes = positive[np.isfinite(positive)]
        magnitudes.setflags(write=False)
        return magnitudes

    @property
    def max(self) -> np.float32:
        """Largest finite value."""
        return self.magnitudes[-1]

    @property
    def max_code(self) -> int:
        """Code of the largest finite value."""
        return len(self.magnitudes) - 1

    @property
    def nan_code(self) -> int:
        """Code that a NaN becomes: the format's NaN, or its largest value where it has none (as PTX cvt .satfinite
        does).
        """
        return self.max_code if self.specials == "none" else (self.sign_bit or 2**self.bits) - 1

    @property
    def min_normal(self) -> np.float32:
        return np.float32(2.0**self.emin)

    @property
    def min_subnormal(self) -> np.float32:
        """Smallest positive value."""
        return self.magnitudes[1 if self.has_zero else 0]

    @property
    def emax(self) -> int:
        """Exponent of the largest finite value: floor(log2(max))."""
        return int(np.frexp(np.float64(self.max))[1]) - 1

    @lazy_property
    def midpoints(self) -> np.ndarray:
        """Values half way between neighbouring magnitudes, where rounding has a tie (float64: exact)."""
        magnitudes = self.magnitudes.astype(np.float64)
        midpoints = (magnitudes[1:] + magnitudes[:-1]) / 2
        midpoints.setflags(write=False)
        return midpoints

    # ---- numbers and codes
    # ----------------------------------------------------------------------------------------------

    @ieee("ElementFormat.encode")
    def encode(self, x: Any, rounding: str = "rn", *, saturate: bool = True, random: Any = None) -> Any:
        """Codes of numbers, each rounded once: uint8 of the shape of x, a NumPy scalar for a number.

            E2M1.encode(2.4) == 4;   E2M1.encode([0.3, -7.0]) == [1, 15];   E2M1.decode(E2M1.encode(x)) is x, rounded

        x: a number, or an array of floats of at most 64 bits (also those of ml_dtypes) or of integers up to 2^53, on
        the host. rounding: nearest, ties to the even code "rn", away from zero "rna", toward zero "rnz"; toward zero
        "rz", up "rp", down
            "rm"; stochastic "rs": up in magnitude where the part beyond the code below, in steps, is 1 - random / 2^n
            or more.
        saturate: whether what is beyond the largest value, infinities too, becomes that. Else it becomes the format's
        infinity,
            or NaN where it has only that; a format with neither (E2M1, INT8, ...) saturates all the same.
        random: with "rs" alone: uint8, uint16 or uint32 of the shape of x (n = 8, 16, 32); 0 rounds toward zero.

        Raises TypeError for an x of another kind and a saturate that is no bool, ValueError for an unknown rounding,
        random bits
            that are missing, left over or of another shape, and integers beyond 2^53.
        Numerics: float64 is rounded as it is, not by way of float32. Overflow is judged after rounding, so that a
        finite number
            that is rounded toward zero stays finite, as in IEEE 754. -0, and negative numbers that round to zero, are
            the code of -0 (integers have one zero). NaN becomes nan_code: the format's NaN, or its largest value. E8M0
            has no sign and no zero: negative numbers are NaN, zero and what is below 2^-127 become 2^-127. Without
            mantissa bits (E8M0, E3M0) a tie between powers of two goes up under "rn".
        Exact: PTX cvt .satfinite of the same rounding, where there is one. Recipes have other rules for signs and NaN
        on this
            formula; "rs" is exact where reference.stochastic.encode_stochastic adds in float32, as Transformer Engine
            does.
        """
        saturate = as_flag(f"{self.name}.encode", "saturate", saturate)
        return rounding_of.encode(x, self, rounding, saturate, random)

    def decode(self, codes: Any) -> Any:
        """Values of codes: float32, exactly, of the shape of codes; a NumPy scalar for one code.

        codes: integers of any type from 0 to 2**bits - 1 (fp4kit.unpack makes them of packed 4-bit codes). Raises
        TypeError for what is no integer, ValueError for one that is out of range. NaN codes are NaN.
        """
        op, array = f"{self.name}.decode", np.asarray(codes)
        if array.dtype.kind not in "iu":
            raise TypeError(f"{op}: codes are {array.dtype}; needs integers, such as uint8")
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < 2**self.bits:
            beyond = int(array.min()) if array.min() < 0 else int(array.max())
            raise ValueError(f"{op}: codes hold {beyond}; needs 0 to {2**self.bits - 1}; packed bytes: fp4kit.unpack")
        return np.take(self.values, array)


E2M1 = ElementFormat("E2M1", 2, 1, 1)
E1M2 = ElementFormat("E1M2", 1, 2, 1)
E3M0 = ElementFormat("E3M0", 3, 0, 3)
E2M3 = ElementFormat("E2M3", 2, 3, 1)
E3M2 = ElementFormat("E3M2", 3, 2, 3)
E4M3 = ElementFormat("E4M3", 4, 3, 7, specials="nan")
E5M2 = ElementFormat("E5M2", 5, 2, 15, specials="ieee")
E8M0 = ElementFormat("E8M0", 8, 0, 127, specials="nan", signed=False, has_zero=False)
INT4 = ElementFormat("INT4", 0, 3)
INT8 = ElementFormat("INT8", 0, 7)

ELEMENT_FORMATS = (E2M1, E1M2, E3M0, E2M3, E3M2, E4M3, E5M2, E8M0, INT4, INT8)


@dataclass(frozen=True)
class BlockFormat:
    """Elements of one format in blocks that share a scale: value = element * block_scale [* tensor_scale].

    Raises TypeError unless element and scale are formats; ValueError for a block_size below 1.
    """

    name: str
    element: ElementFormat
    scale: ElementFormat
    block_size: int
    has_tensor_scale: bool = False

    def __post_init__(self) -> None:
        for name in ("element", "scale"):
            if not isinstance(getattr(self, name), ElementFormat):
                raise TypeError(f"BlockFormat {self.name}: {name} is {getattr(self, name)!r}; needs an ElementFormat")
        if type(self.block_size) is not int or self.block_size < 1:
            raise ValueError(f"BlockFormat {self.name}: block_size is {self.block_size!r}; needs a positive int")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the fields of what was pickled or copied; they are checked as those of a new format."""
        BlockFormat.__init__(self, **state)

    def __repr__(self) -> str:
        return self.name

    @property
    def bits_per_value(self) -> float:
        """Storage of one value including its share of the block scale."""
        return self.element.bits + self.scale.bits / self.block_size

    @property
    def max(self) -> float:
        """Largest value that a block can hold (before the tensor scale)."""
        return float(self.element.max) * float(self.scale.max)


NVFP4 = BlockFormat("NVFP4", E2M1, E4M3, 16, has_tensor_scale=True)
MXFP4 = BlockFormat("MXFP4", E2M1, E8M0, 32)
MXFP6_E2M3 = BlockFormat("MXFP6_E2M3", E2M3, E8M0, 32)
MXFP6_E3M2 = BlockFormat("MXFP6_E3M2", E3M2, E8M0, 32)
MXFP8_E4M3 = BlockFormat("MXFP8_E4M3", E4M3, E8M0, 32)
MXFP8_E5M2 = BlockFormat("MXFP8_E5M2", E5M2, E8M0, 32)

BLOCK_FORMATS = (NVFP4, MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, MXFP8_E5M2)
