"""Define number formats: small frozen descriptors, from which codes, largest values and midpoints are derived.

A *code* is a bit pattern, and a *value* is the number that a code stands for. Sources: OCP Microscaling Formats (MX)
v1.0 and OCP 8-bit Floating Point (OFP8) v1.0. NVFP4 is defined as in the NVIDIA PTX ISA (cvt to e2m1x2, ue4m3 block
scales).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import ml_dtypes
import numpy as np

from fp4kit import arithmetic
from fp4kit.arguments import as_flag, suggestion
from fp4kit.arithmetic import ieee
from fp4kit.lazy import FUNCTIONS, lazy_property

FLOATS = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))  # dtypes that quantize accepts
FLT_MAX = np.finfo(np.float32).max
FLT_MIN = np.finfo(np.float32).tiny  # smallest normal float32


def unsigned(dtype: np.dtype) -> np.dtype:
    """Return the unsigned integer dtype as wide as ``dtype`` (1, 2, 4 or 8 bytes), for viewing the bits of an array."""
    return np.dtype(f"u{dtype.itemsize}")


def bit_patterns(x: np.ndarray) -> np.ndarray:
    """Return the bits of x as unsigned integers of the width of its dtype, in the shape of x.

    The result shares memory with x if x is contiguous.
    """
    return np.ascontiguousarray(x).view(unsigned(x.dtype)).reshape(x.shape)


class Packing(NamedTuple):
    """The storage of codes in memory: `codes` codes fill `bytes` bytes, with the first code in the lowest bits.

    E2M1 has Packing(codes=2, bytes=1): two 4-bit codes per byte.
    """

    codes: int
    bytes: int

    @property
    def stored_bits(self) -> int:
        """The number of bits that one code takes in memory, such as 8 for a 6-bit code."""
        return 8 * self.bytes // self.codes

    def length(self, n: int) -> int:
        """Return the number of bytes that n codes fill. n must be a multiple of `codes`."""
        return n // self.codes * self.bytes

    def pack(self, codes: Any) -> Any:
        """Return codes (..., K), uint8 with one code per byte, as they are stored; codes of over 4 bits unchanged."""
        return codes if self.codes == 1 else codes[..., 0::2] | codes[..., 1::2] << 4

    def unpack(self, stored: Any) -> Any:
        """Return stored codes with one code per byte: the inverse of pack."""
        if self.codes == 1:
            return stored
        codes = np.empty_like(stored, shape=(*stored.shape[:-1], stored.shape[-1] * 2))
        codes[..., 0::2] = stored & 0xF
        codes[..., 1::2] = stored >> 4
        return codes


@dataclass(frozen=True)
class ElementFormat:
    """A number format of at most 8 bits: a float (sign, exponent, mantissa) or a two's complement integer.

    Elements and block scales use the same descriptor. Every value must be exact in float32. Two formats with equal
    fields are equal, in any process. Arrays derived from a format, such as `values`, are read-only and are not pickled.

    Args:
        name: a Python identifier such as "E2M1". CUDA kernels use it too.
        exponent_bits: number of exponent bits; 0 for an integer.
        mantissa_bits: number of mantissa bits, without the hidden one; for an integer, the bits besides the sign.
        bias: exponent bias; 0 for an integer.
        specials: "none" if every code is a number. "nan" if the code whose exponent and mantissa bits are all ones is
            NaN, and there is no infinity. "ieee" if the codes with the top exponent are infinities and NaN.
        signed: True if the top bit is a sign.
        has_zero: False only for E8M0 and E6M2, whose codes with exponent bits 0 are normal numbers.

    Raises:
        TypeError: a field does not have its declared type.
        ValueError: the fields do not describe a valid format; the message says why.

    Examples:
        >>> from fp4kit.formats import E2M1
        >>> E2M1.magnitudes.tolist()
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        >>> E2M1.bits, E2M1.emax, float(E2M1.max)
        (4, 2, 6.0)
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
            hint = "; for a format without a sign pass signed=False" if self.signed and self.bits == 9 else ""
            raise ValueError(
                f"ElementFormat {self.name}: exponent_bits is {self.exponent_bits}, mantissa_bits is"
                f" {self.mantissa_bits}; needs both >= 0, and 1 to 8 bits including the sign{hint}"
            )
        if self.specials not in ("none", "nan", "ieee"):
            raise ValueError(f"ElementFormat {self.name}: specials is {self.specials!r}; needs 'none', 'nan' or 'ieee'")
        if self.is_integer:
            self._check_integer()
        else:
            self._check_float()

    def _check_types(self) -> None:
        """Raise TypeError unless every field has its declared type: bools for flags, and no bools for ints."""
        kinds = (str, int, int, int, str, bool, bool)
        for (name, value), kind in zip(vars(self).items(), kinds, strict=True):
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise TypeError(f"ElementFormat: {name} is {value!r}; needs {kind.__name__}")

    def _check_integer(self) -> None:
        """Raise ValueError unless the fields describe a two's complement integer."""
        if not self.signed:
            raise ValueError(
                f"ElementFormat {self.name}: signed is False; needs True for an integer, which is two's complement"
            )
        if self.mantissa_bits == 0 or self.bias or self.specials != "none" or not self.has_zero:
            raise ValueError(
                f"ElementFormat {self.name}: exponent_bits is 0, so it is an integer; an integer needs mantissa_bits"
                " > 0, bias 0, specials 'none' and has_zero True"
            )

    def _check_float(self) -> None:
        """Raise ValueError unless the fields describe a float format whose values are all exact in float32.

        The format must have a finite value other than zero. Only E8M0 and E6M2 may lack a zero.
        """
        facts = (self.exponent_bits, self.mantissa_bits, self.bias, self.specials, self.signed)
        if not self.has_zero and facts not in ((8, 0, 127, "nan", False), (6, 2, 48, "nan", False)):
            raise ValueError(
                f"ElementFormat {self.name}: has_zero is False; needs True for every format but E8M0 and E6M2"
            )
        if self.specials == "ieee" and (self.mantissa_bits == 0 or self.exponent_bits == 1):
            raise ValueError(
                f"ElementFormat {self.name}: specials is 'ieee'; needs mantissa_bits >= 1 and exponent_bits >= 2"
            )
        top = 2**self.exponent_bits - 1 - self.bias
        if self.has_zero and not (self.emin - self.mantissa_bits >= -149 and top <= 127):
            raise ValueError(
                f"ElementFormat {self.name}: bias is {self.bias}, so some values are not float32 numbers; needs"
                " exponents from -149 to 127"
            )
        if len(self.magnitudes) < 2:
            raise ValueError(
                f"ElementFormat {self.name}: zero is the only finite value; needs more exponent or mantissa bits"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return ElementFormat, astuple(self)  # drop the derived arrays, which would be writeable after unpickling

    def __repr__(self) -> str:
        return self.name

    def _repr_html_(self) -> str:
        """Return the columns of `fp4kit formats` for this format as HTML, which notebooks display."""
        return str(FUNCTIONS["ElementFormat._repr_html_"](self))

    @property
    def bits(self) -> int:
        """Number of bits per code."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def packing(self) -> Packing:
        """The Packing of codes in memory: two 4-bit codes per byte, or one code of any other width per byte."""
        return Packing(2, 1) if self.bits == 4 else Packing(1, 1)

    @property
    def is_integer(self) -> bool:
        """True if the format is a two's complement integer."""
        return self.exponent_bits == 0

    @property
    def sign_bit(self) -> int:
        """Bit mask of the sign in a code, such as 8 for E2M1; 0 for unsigned formats."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal value, 2^emin, such as 0 for E2M1.

        Subnormal values are spaced like the values from 2^emin to 2^(emin + 1). For an integer format, emin is 1 and
        means nothing.
        """
        return (1 if self.has_zero else 0) - self.bias

    @lazy_property
    @ieee("ElementFormat.values")  # 2^-127, a value of E8M0, is subnormal, and a flushed value would stay in the cache
    def values(self) -> np.ndarray:
        """The float32 value of every code, in code order: 2**bits entries, read-only. NaN codes give NaN."""
        codes = np.arange(2**self.bits)
        values = self._integer_values(codes) if self.is_integer else self._float_values(codes)
        values = values.astype(np.float32)
        values.setflags(write=False)
        return values

    def _integer_values(self, codes: np.ndarray) -> np.ndarray:
        """Return the values of two's complement codes, as integers."""
        return np.where(codes & self.sign_bit, codes - 2**self.bits, codes)

    def _float_values(self, codes: np.ndarray) -> np.ndarray:
        """Return the values of float codes, as float64."""
        # bits: [s] e..e m..m, with M bits of mantissa; value = (-1)^s * 2^(max(e, 1) - bias - M) * ((e > 0) * 2^M + m)
        # format without a zero (E8M0): value = 2^(e - bias - M) * (2^M + m)
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
        """The finite values of the codes whose sign bit is 0, in ascending order: float32, read-only.

        The index of a magnitude is its code.
        """
        positive = self.values[: self.sign_bit or None]
        magnitudes = positive[np.isfinite(positive)]
        magnitudes.setflags(write=False)
        return magnitudes

    @property
    def max(self) -> np.float32:
        """The largest finite value."""
        return self.magnitudes[-1]

    @property
    def max_code(self) -> int:
        """The code of the largest finite value."""
        return len(self.magnitudes) - 1

    @property
    def nan_code(self) -> int:
        """The code that `encode` gives for NaN: the format's NaN code, or the code of the largest value without one.

        The PTX instruction cvt with .satfinite gives NaN this code, too.
        """
        return self.max_code if self.specials == "none" else (self.sign_bit or 2**self.bits) - 1

    @property
    def amax_target(self) -> np.float32:
        """The value to which recipes of custom_recipe scale the amax of a block: the largest finite value."""
        return self.max

    @property
    def min_normal(self) -> np.float32:
        """The smallest positive normal value, 2^emin. For an integer format, it is 2 and means nothing."""
        return np.float32(2.0**self.emin)

    @property
    def min_subnormal(self) -> np.float32:
        """The smallest positive value. It equals min_normal in a format without subnormals, such as E8M0."""
        return self.magnitudes[1 if self.has_zero else 0]

    @property
    def emax(self) -> int:
        """Exponent of the largest finite value: floor(log2(max))."""
        return int(np.frexp(np.float64(self.max))[1]) - 1

    @lazy_property
    def midpoints(self) -> np.ndarray:
        """The midpoints of neighboring magnitudes, where rounding to nearest has a tie: float64, exact, read-only."""
        magnitudes = self.magnitudes.astype(np.float64)
        midpoints = (magnitudes[1:] + magnitudes[:-1]) / 2
        midpoints.setflags(write=False)
        return midpoints

    # ---- encode and decode ----

    @ieee("ElementFormat.encode")
    def encode(self, x: Any, rounding: str = "rn", *, saturate: bool = True, random: Any = None) -> Any:
        """Round numbers to this format, and return their codes. Each number is rounded once.

        Roundings:

        - "rn": to nearest, ties to the even code
        - "rna": to nearest, ties away from zero
        - "rnz": to nearest, ties toward zero
        - "rz": toward zero
        - "rp": up
        - "rm": down
        - "rs": stochastic. A magnitude between two neighboring values is rounded up if (magnitude - lower) /
          (upper - lower) is at least 1 - random / 2^n, where n is the number of bits of `random`.

        Args:
            x: a number, or an array on the host: floats of at most 64 bits (ml_dtypes floats included) or integers up
                to 2^53.
            rounding: a name from the list above.
            saturate: if True, every number beyond the largest value becomes the largest value with its sign, infinities
                included. If False, such a number becomes the format's infinity, or NaN if the format has NaN but no
                infinity. A format with neither (E2M1, INT8, ...) always saturates.
            random: random bits, required for "rs" and rejected otherwise: uint8, uint16 or uint32 in the shape of x,
                which means n = 8, 16 or 32. Bits of 0 round toward zero.

        Returns:
            uint8 codes in the shape of x; a NumPy scalar if x is a number.

        Raises:
            TypeError: x is not a number or an array of the dtypes above, or saturate is not a bool.
            ValueError: rounding is unknown; random bits are missing, not needed, or not in the shape of x; or an
                integer is beyond 2^53.

        Numerics:
            float64 is rounded directly, not through float32. Overflow is judged after rounding, as in IEEE 754, so a
            finite number that is rounded toward zero never overflows. NaN becomes nan_code.

            -0, and negative numbers that round to zero, become the code of -0. Integers have a single zero. E8M0 has
            neither a sign nor a zero: negative numbers become NaN, and zero and numbers below 2^-127 become 2^-127. In
            a format without mantissa bits (E8M0, E3M0), "rn" rounds a tie between two powers of two up. E6M2 is treated
            as E8M0 is, with 2^-48 as its smallest value.

        Exact:
            Equals PTX cvt .satfinite with the same rounding, if PTX has that rounding. Recipes use the same formula,
            with their own rules for signs and NaN. "rs" evaluates its condition exactly.
            reference.stochastic.encode_stochastic instead adds random bits in float32, as Transformer Engine does.

        Examples:
            >>> from fp4kit.formats import E2M1
            >>> int(E2M1.encode(2.4))
            4
            >>> E2M1.encode([0.3, -7.0]).tolist()
            [1, 15]
            >>> E2M1.decode(E2M1.encode([0.3, -7.0])).tolist()
            [0.5, -6.0]
        """
        saturate = as_flag(f"{self.name}.encode", "saturate", saturate)
        return arithmetic.encode(x, self, rounding, saturate, random)

    def decode(self, codes: Any) -> Any:
        """Return the values of codes: float32, exact.

        Args:
            codes: integers of any type from 0 to 2**bits - 1. Use fp4kit.unpack to get them from packed 4-bit codes.

        Returns:
            float32 values in the shape of codes; a NumPy scalar for a single code. NaN codes give NaN.

        Raises:
            TypeError: codes are not integers.
            ValueError: a code is out of range.

        Examples:
            >>> from fp4kit.formats import E2M1
            >>> E2M1.decode([1, 7, 15]).tolist()
            [0.5, 6.0, -6.0]
        """
        op, array = f"{self.name}.decode", np.asarray(codes)
        if array.dtype.kind not in "iu":
            raise TypeError(f"{op}: codes are {array.dtype}; needs integers, such as uint8")
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < 2**self.bits:
            beyond = int(array.min()) if array.min() < 0 else int(array.max())
            raise ValueError(
                f"{op}: codes hold {beyond}; needs 0 to {2**self.bits - 1}; if the bytes are packed, call fp4kit.unpack"
            )
        return np.take(self.values, array)


# the fields of an ElementFormat that decide the value of every code
_NUMBERS = attrgetter("exponent_bits", "mantissa_bits", "bias", "specials", "signed", "has_zero")


def is_same(a: ElementFormat, b: ElementFormat) -> bool:
    """Return whether two formats give every code the same value, whatever their names are.

    A Codebook is never the same as a format of another class, and neither is IF4.
    """
    if isinstance(a, IntegerOrFloat) or isinstance(b, IntegerOrFloat):
        return a == b
    if isinstance(a, Codebook) or isinstance(b, Codebook):
        return isinstance(a, Codebook) and isinstance(b, Codebook) and a.table == b.table
    return bool(_NUMBERS(a) == _NUMBERS(b))


MAX_MAGNITUDE_EXPONENT = 100  # the values of a Codebook are zeros, or magnitudes from 2^-100 to 2^100


@dataclass(frozen=True)
class Codebook(ElementFormat):
    """A 4-bit element format whose sixteen values are a table, such as NF4 and the FP4 of bitsandbytes.

    Code i stands for table[i]. The table may have any order and may repeat values. Only recipes with the amax rules
    (fp4kit.custom_recipe) accept a Codebook, because the rules of producers are made for their own formats.

    Args:
        table: two to sixteen numbers, which are rounded to float32. Each is 0 or has a magnitude from 2^-100 to 2^100,
            and at least one is not 0. If the table has fewer than sixteen numbers, the remaining codes have its last
            value, but `encode` never gives these codes.
        name: a Python identifier that is not the name of another format of this module.

    Raises:
        TypeError: table is not a sequence of numbers, or name is not a str.
        ValueError: the table has too few or too many values, a value is out of range, or the name is not allowed.

    Numerics:
        A number is encoded to the nearest value. If values v and w are neighbors in ascending order, numbers up to
        float32((v + w) / 2) get the code of v, and larger numbers get the code of w. So a tie goes to the lower value.

        If several codes share a value, numbers up to this value get the first of these codes, and larger numbers get
        the last. Numbers beyond the largest or the smallest value, infinities included, get the code of that value. -0
        is encoded as 0 is. NaN gets the code of the largest value; Recipe.nan_code can name another code.

        Other roundings and random bits are rejected.

    Exact:
        Equals quantize_nf4 and quantize_fp4 of bitsandbytes 0.50.2 on a CPU.

    Examples:
        >>> from fp4kit.formats import Codebook
        >>> thirds = Codebook([0, 1, -1, 1 / 3, -1 / 3], name="Thirds")
        >>> thirds.encode([0.3, -0.9, 0.1]).tolist()
        [3, 2, 0]
        >>> thirds.decode([3, 2, 0]).tolist()
        [0.3333333432674408, -1.0, 0.0]
    """

    exponent_bits: int = field(init=False, default=0, repr=False)
    mantissa_bits: int = field(init=False, default=0, repr=False)
    bias: int = field(init=False, default=0, repr=False)
    specials: Literal["none", "nan", "ieee"] = field(init=False, default="none", repr=False)
    signed: bool = field(init=False, default=True, repr=False)
    has_zero: bool = field(init=False, default=True, repr=False)
    table: tuple[float, ...] = ()
    name: str = field(default="Codebook", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"Codebook: name is {self.name!r}; needs a str")
        object.__setattr__(self, "table", _as_table(self.name, self.table))
        known = globals().get(self.name)
        is_taken = isinstance(known, (ElementFormat, BlockFormat)) and getattr(known, "table", None) != self.table
        if not self.name.isidentifier() or is_taken:
            raise ValueError(
                f"Codebook: name is {self.name!r}; needs an identifier that is not the name of another format"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _codebook, (self.table, self.name)

    def __repr__(self) -> str:
        return self.name

    @property
    def bits(self) -> int:
        """Number of bits per code. It is 4 even if the table has fewer than sixteen values."""
        return 4

    @property
    def is_integer(self) -> bool:
        """False, because the format is not an integer."""
        return False

    @property
    def sign_bit(self) -> int:
        """0, because no bit of a code is a sign."""
        return 0

    @lazy_property
    def values(self) -> np.ndarray:
        """The float32 value of every code, in code order: sixteen entries, read-only."""
        values = np.full(16, self.table[-1], np.float32)
        values[: len(self.table)] = self.table
        values.setflags(write=False)
        return values

    @lazy_property
    def order(self) -> np.ndarray:
        """The codes of the table in ascending order of their values: uint8, read-only.

        Codes of equal values stay in code order.
        """
        order = np.argsort(self.values[: len(self.table)], kind="stable").astype(np.uint8)
        order.setflags(write=False)
        return order

    @lazy_property
    def midpoints(self) -> np.ndarray:
        """The means of neighboring values in ascending order, rounded to float32: read-only.

        A number above a mean is encoded to the larger of the two values, and any other number to the smaller one.
        """
        ascending = self.values[self.order].astype(np.float64)
        midpoints = ((ascending[1:] + ascending[:-1]) / 2).astype(np.float32)
        midpoints.setflags(write=False)
        return midpoints

    @lazy_property
    def magnitudes(self) -> np.ndarray:
        """The distinct magnitudes of the values in ascending order: float32, read-only. Their indices are not codes."""
        magnitudes = np.unique(np.abs(self.values))
        magnitudes.setflags(write=False)
        return magnitudes

    @property
    def max_code(self) -> int:
        """The code of the largest value, which is also the code of numbers above it."""
        return int(self.order[-1])

    @property
    def nan_code(self) -> int:
        """The code that `encode` returns for NaN, which is the code of the largest value."""
        return self.max_code

    @property
    def min_subnormal(self) -> np.float32:
        """The smallest magnitude that is not 0."""
        return self.magnitudes[self.magnitudes > 0][0]

    @property
    def min_normal(self) -> np.float32:
        """The smallest magnitude that is not 0, because a table has no subnormals."""
        return self.min_subnormal

    @property
    def emin(self) -> int:
        """Exponent of the smallest magnitude that is not 0: the floor of its log2."""
        return int(np.frexp(np.float64(self.min_subnormal))[1]) - 1

    @ieee("Codebook.encode")
    def encode(self, x: Any, rounding: str = "rn", *, saturate: bool = True, random: Any = None) -> Any:
        """Return the codes of numbers, each rounded to the nearest value of the table (see the class for ties).

        Args:
            x: a number, or an array on the host, as in ElementFormat.encode.
            rounding: "rn". Other roundings are rejected.
            saturate: True or False, without effect: a table has neither an infinity nor a NaN.
            random: None.

        Returns:
            uint8 codes in the shape of x; a NumPy scalar if x is a number.

        Raises:
            TypeError: x is not an array of numbers, or saturate is not a bool.
            ValueError: rounding is not "rn", random is not None, or an integer is beyond 2^53.
        """
        op = f"{self.name}.encode"
        as_flag(op, "saturate", saturate)
        if rounding != "rn" or random is not None:
            raise ValueError(f"{op}: {self.name} is a table of values; needs rounding 'rn' and no random bits")
        return self.nearest(arithmetic.as_float64(op, x))[()]

    def nearest(self, x: np.ndarray) -> np.ndarray:
        """Return the codes of the values nearest to the floats in x, without checks: uint8, in the shape of x.

        A number at the midpoint of two values gets the code of the smaller value. NaN gets the code of the largest
        value.
        """
        return np.asarray(self.order[np.searchsorted(self.midpoints, x, side="left")])


@dataclass(frozen=True, repr=False)
class PairedMicroexponents(Codebook):
    """The element format of MX4, in which two neighboring elements share one bit of exponent (shared microexponents).

    Each number has a sign and a mantissa of two bits. The bit that a pair shares, its microexponent, halves the values
    of both elements:

        value = (-1)^sign * mantissa / 2 * 2^-microexponent        mantissa = 0, 1, 2 or 3

    The paper stores a pair in 7 bits. fp4kit stores the microexponent in both codes, so a pair fills one byte. Use
    fp4kit.formats.MX4, the only instance, with block scales in E8M0 and blocks of 16.

    Numerics:
        bits of a code, highest first: [microexponent] [sign] [mantissa 1] [mantissa 0]

        The microexponent is 1 if both numbers of a pair have magnitudes below 1. Then each number is rounded to
        nearest, ties to the even mantissa, and mantissas saturate at 3. -0, and negative numbers that round to zero,
        become the code of -0. Infinities saturate. NaN gets the code of the largest value, and the microexponent of its
        pair is 0.

    Exact:
        Equals the MX4 of "With Shared Microexponents, A Little Shifting Goes a Long Way" (Rouhani et al., 2023), if the
        block scale is the power of two at or below the block's amax: custom_recipe with scale_rounding="down".

    Examples:
        >>> from fp4kit.formats import MX4
        >>> MX4.decode(MX4.encode([1.2, 0.4, 0.7, -0.4])).tolist()
        [1.0, 0.5, 0.75, -0.5]
        >>> [f"{code:04b}" for code in MX4.encode([1.2, 0.4, 0.7, -0.4])]
        ['0010', '0001', '1011', '1110']
    """

    table: tuple[float, ...] = field(
        init=False, default=tuple(sign * m / step for step in (2, 4) for sign in (1, -1) for m in range(4))
    )
    name: str = field(init=False, default="MX4")

    def __reduce__(self) -> tuple[Any, ...]:
        return PairedMicroexponents, ()

    @property
    def amax_target(self) -> np.float32:
        """The number 1, so that a block scale that is rounded down is the power of two at or below the block's amax."""
        return np.float32(1)

    @lazy_property
    def values(self) -> np.ndarray:
        """The float32 value of every code, in code order: sixteen entries with two codes of -0, read-only."""
        values = np.array(self.table, np.float32)
        values[[4, 12]] = -0.0
        values.setflags(write=False)
        return values

    def encode(self, x: Any, rounding: str = "rn", *, saturate: bool = True, random: Any = None) -> Any:
        """Return the codes of numbers, where each pair along the last axis shares a microexponent (see the class).

        Args:
            x: an array on the host, as in ElementFormat.encode. Elements 2i and 2i + 1 of the last axis are a pair.
            rounding: "rn". Other roundings are rejected.
            saturate: True or False, without effect: the format has neither an infinity nor a NaN.
            random: None.

        Returns:
            uint8 codes in the shape of x.

        Raises:
            TypeError: x is not an array of numbers, or saturate is not a bool.
            ValueError: the last axis of x has an odd length, or as in Codebook.encode.
        """
        shape = np.shape(x)
        if not shape or shape[-1] % 2:
            raise ValueError(
                f"{self.name}.encode: x has shape {shape}; needs pairs, so an even length of the last axis"
            )
        return super().encode(x, rounding, saturate=saturate, random=random)

    def nearest(self, x: np.ndarray) -> np.ndarray:
        """Return the MX4 codes of x, a float array, rounded to nearest: uint8, in the shape of x.

        Elements 2i and 2i + 1 of the last axis are a pair, so its length must be even. Nothing is checked.
        """
        return self.nearest_under(x, self.microexponents(x))

    def microexponents(self, x: np.ndarray) -> np.ndarray:
        """Return, for each number, the microexponent that its pair shares, without checks: bool, in the shape of x.

        It is True if both numbers of the pair have magnitudes below 1. A NaN makes it False.
        """
        is_small = (np.abs(x) < 1).reshape(*x.shape[:-1], -1, 2)
        return np.repeat(is_small.all(-1), 2, axis=-1)

    def nearest_under(self, x: np.ndarray, microexponent: Any) -> np.ndarray:
        """Return the codes of numbers for given microexponents, without checks: uint8, in the shape of x.

        NaN gives the code of the largest magnitude under its microexponent, without a sign.

        microexponent: bool, in a shape that broadcasts to x. Where it is True, numbers of 1 and more saturate.
        """
        doubled = np.fmin(np.abs(x), 2) * np.where(microexponent, x.dtype.type(4), x.dtype.type(2))
        sign = np.signbit(x) & ~np.isnan(x)
        codes = np.fmin(np.rint(doubled), 3).astype(np.uint8)
        return codes | np.where(sign, np.uint8(4), np.uint8(0)) | np.where(microexponent, np.uint8(8), np.uint8(0))


@dataclass(frozen=True)
class IntegerOrFloat(ElementFormat):
    """The element format IF4, whose 4-bit codes are E2M1 or INT4 codes, depending on the scale of their block.

    Bit 7 of a block scale selects the format of the block. The other seven bits are the scale in E4M3:

        value = E2M1(code) * scale                  bit 7 is 0
        value = INT4(code) * float32(6/7) * scale   bit 7 is 1

    Both formats have magnitudes up to 6. Use fp4kit.formats.IF4, the only instance, with the recipes if4-fouroversix.
    magnitudes, midpoints and max are those of E2M1.

    A code has no value without its block scale, so `values`, `encode` and `decode` raise TypeError.

    Numerics:
        bits of a block scale, highest first: [1: INT4] [E4M3 exponent: 4 bits] [E4M3 mantissa: 3 bits]

        INT4 codes are two's complement. Quantizing gives integers from -7 to 7, and code 8 decodes to -8 * 6/7.

        Bit 7 is the sign of E4M3. So fp4kit.explain shows the block scale of an INT4 block as a negative number.

    Examples:
        >>> from fp4kit.formats import IF4
        >>> IF4.values_under(False)[[1, 7, 15]].tolist()
        [0.5, 6.0, -6.0]
        >>> IF4.values_under(True)[[1, 7, 15]].tolist()
        [0.8571428656578064, 6.0, -0.8571428656578064]
    """

    name: str = field(init=False, default="IF4")
    exponent_bits: int = field(init=False, default=2)
    mantissa_bits: int = field(init=False, default=1)
    bias: int = field(init=False, default=1)
    specials: Literal["none", "nan", "ieee"] = field(init=False, default="none")
    signed: bool = field(init=False, default=True)
    has_zero: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        """Check nothing, because no field can be passed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return IntegerOrFloat, ()

    def __repr__(self) -> str:
        return self.name

    @property
    def magnitudes(self) -> np.ndarray:
        """The magnitudes of E2M1, in ascending order: float32, read-only."""
        return E2M1.magnitudes

    @property
    def values(self) -> np.ndarray:
        """Raise TypeError, because a code has no value without the scale of its block."""
        raise self._needs_scale("values")

    def values_under(self, is_integer: bool) -> np.ndarray:
        """Return the float32 values of the codes 0 to 15, in this order, before the block scale is applied.

        Args:
            is_integer: True if bit 7 of the block scale is set: the values are those of INT4, times 6/7. False: they
                are those of E2M1.
        """
        return INT4.values * IF4_INTEGER_STEP if is_integer else E2M1.values

    def are_integers(self, scales: np.ndarray) -> np.ndarray:
        """Return whether the codes of each block are INT4: bool, in the shape of the block scales, which are uint8."""
        return (scales & IF4_INTEGER_BIT) != 0

    def scale_codes(self, scales: np.ndarray) -> np.ndarray:
        """Return the E4M3 codes of block scales, which are their lower seven bits: uint8, in the shape of scales."""
        return scales & ~IF4_INTEGER_BIT

    def values_of(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Return the float32 values of codes, before they are multiplied by the block scales.

        Bit 7 of a block's scale says whether its codes are INT4 or E2M1 (see values_under).

        codes: uint8 (..., blocks, elements per block).
        scales: the block scales, uint8 (..., blocks).
        """
        floats, integers = (np.take(self.values_under(is_integer), codes) for is_integer in (False, True))
        return np.where(self.are_integers(scales)[..., None], integers, floats)

    def encode(self, x: Any, rounding: str = "rn", *, saturate: bool = True, random: Any = None) -> Any:
        """Raise TypeError, because a number has no code without its block: the block's scale selects the format."""
        raise self._needs_scale("encode")

    def decode(self, codes: Any) -> Any:
        """Raise TypeError, because a code has no value without the scale of its block."""
        raise self._needs_scale("decode")

    def _needs_scale(self, name: str) -> TypeError:
        """Return the TypeError that the attribute `name` raises, because a block scale is needed to compute it."""
        return TypeError(
            f"{self.name}.{name}: bit 7 of each block scale says whether codes are E2M1 or INT4; needs whole blocks:"
            " use fp4kit.quantize and fp4kit.dequantize with a recipe such as 'if4-fouroversix'"
        )


def _codebook(table: tuple[float, ...], name: str) -> Codebook:
    """Return Codebook(table, name=name). pickle calls this function, because it passes no keywords."""
    return Codebook(table, name=name)


def _as_table(name: str, table: Any) -> tuple[float, ...]:
    """Return the values of a Codebook as floats, rounded to float32.

    Raise TypeError for an object that holds no numbers, and ValueError for numbers that Codebook does not allow. name
    is the Codebook that the message names.
    """
    if isinstance(table, (str, bytes)) or not isinstance(table, Iterable):
        raise TypeError(f"Codebook {name}: table is {table!r:.60}; needs two to sixteen numbers")
    given = list(table)
    numbers = (int, float, np.integer, np.floating, ml_dtypes.bfloat16)
    wrong = next((v for v in given if isinstance(v, bool) or not isinstance(v, numbers)), None)
    if wrong is not None:
        raise TypeError(f"Codebook {name}: table holds {wrong!r:.60}; needs numbers")
    if not 2 <= len(given) <= 16:
        raise ValueError(f"Codebook {name}: table has {len(given)} values; needs two to sixteen")
    with np.errstate(all="ignore"):
        values = np.array([float(v) for v in given]).astype(np.float32)
    size, bound = np.abs(values), 2.0**MAX_MAGNITUDE_EXPONENT
    bad = ~((size == 0) & (np.array(given, np.float64) == 0) | (size >= 1 / bound) & (size <= bound))
    if bad.any():
        raise ValueError(
            f"Codebook {name}: table holds {given[int(bad.argmax())]!r}; needs 0, or magnitudes from 2^-100 to 2^100"
        )
    if not size.any():
        raise ValueError(f"Codebook {name}: every value of table is 0; needs one that is not 0")
    return tuple((values + np.float32(0)).tolist())  # -0 becomes 0, which is equal


E2M1 = ElementFormat("E2M1", 2, 1, 1)
E1M2 = ElementFormat("E1M2", 1, 2, 1)
E3M0 = ElementFormat("E3M0", 3, 0, 3)
E2M3 = ElementFormat("E2M3", 2, 3, 1)
E3M2 = ElementFormat("E3M2", 3, 2, 3)
E4M3 = ElementFormat("E4M3", 4, 3, 7, specials="nan")
E5M2 = ElementFormat("E5M2", 5, 2, 15, specials="ieee")
E8M0 = ElementFormat("E8M0", 8, 0, 127, specials="nan", signed=False, has_zero=False)
# the scales of HiF4: 2^-48 to 2^15 * 1.5, without a zero
E6M2 = ElementFormat("E6M2", 6, 2, 48, specials="nan", signed=False, has_zero=False)
# the block scales of Transformer Engine's NVFP4BlockScaling with Format.UE5M3: 2^-17 to 114688
UE5M3 = ElementFormat("UE5M3", 5, 3, 15, specials="nan", signed=False)
INT4 = ElementFormat("INT4", 0, 3)
INT8 = ElementFormat("INT8", 0, 7)

ELEMENT_FORMATS = (E2M1, E1M2, E3M0, E2M3, E3M2, E4M3, E5M2, E8M0, E6M2, UE5M3, INT4, INT8)


@dataclass(frozen=True)
class BlockFormat:
    """A format with one scale per block of elements: value = element * block_scale [* tensor_scale].

    Args:
        name: the name that repr shows.
        element: format of the elements.
        scale: format of the block scales.
        block_size: elements per block.
        has_tensor_scale: True if every value is also multiplied by one float32 scale per tensor.

    Raises:
        TypeError: element or scale is not an ElementFormat.
        ValueError: block_size is not a positive int.

    Examples:
        >>> from fp4kit.formats import MXFP4, NVFP4
        >>> NVFP4.bits_per_value, NVFP4.max
        (4.5, 2688.0)
        >>> MXFP4.bits_per_value
        4.25
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
        """Restore the fields of a pickled or copied format, with the checks of a new format."""
        BlockFormat.__init__(self, **state)

    def __repr__(self) -> str:
        return self.name

    @property
    def bits_per_value(self) -> float:
        """Bits of storage per value: the bits of its code, plus its share of the bits of the block scale.

        For NVFP4 this is 4 + 8 / 16 = 4.5.
        """
        return self.element.bits + self.scale.bits / self.block_size

    @property
    def max(self) -> float:
        """The largest value before a tensor scale is applied: the largest element times the largest block scale."""
        return float(self.element.max) * float(self.scale.max)


NVFP4 = BlockFormat("NVFP4", E2M1, E4M3, 16, has_tensor_scale=True)
MXFP4 = BlockFormat("MXFP4", E2M1, E8M0, 32)
MXFP6_E2M3 = BlockFormat("MXFP6_E2M3", E2M3, E8M0, 32)
MXFP6_E3M2 = BlockFormat("MXFP6_E3M2", E3M2, E8M0, 32)
MXFP8_E4M3 = BlockFormat("MXFP8_E4M3", E4M3, E8M0, 32)
MXFP8_E5M2 = BlockFormat("MXFP8_E5M2", E5M2, E8M0, 32)

BLOCK_FORMATS = (NVFP4, MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, MXFP8_E5M2)

# The tables of bitsandbytes 0.50.2, rounded to float32: quantiles of the normal distribution, and a float format whose
# values are divided by 12.
NF4 = Codebook(
    (
        -1.0,
        -0.6961928,
        -0.52507305,
        -0.3949175,
        -0.28444138,
        -0.18477343,
        -0.091050036,
        0.0,
        0.0795803,
        0.1609302,
        0.2461123,
        0.33791524,
        0.44070983,
        0.562617,
        0.72295684,
        1.0,
    ),
    name="NF4",
)
BNB_FP4 = Codebook(
    (
        0.0,
        0.0052083335,
        0.6666667,
        1.0,
        0.33333334,
        0.5,
        0.16666667,
        0.25,
        0.0,
        -0.0052083335,
        -0.6666667,
        -1.0,
        -0.33333334,
        -0.5,
        -0.16666667,
        -0.25,
    ),
    name="BNB_FP4",
)

# The elements of MX4, for blocks of 16 under E8M0 scales.
MX4 = PairedMicroexponents()

# The elements of IF4, for blocks under E4M3 scales whose bit 7 selects the format.
IF4 = IntegerOrFloat()
# the factor of INT4 values in IF4, by which 7 has the value of 6 in E2M1
IF4_INTEGER_STEP = np.float32(6 / 7)
IF4_INTEGER_BIT = np.uint8(0x80)  # bit 7 of a block scale


def __dir__() -> list[str]:
    """Return the names of the formats and their classes, so that completion shows no others."""
    kinds = (ElementFormat, BlockFormat, type)
    return [name for name, value in globals().items() if isinstance(value, kinds) and value is not NamedTuple]


if not TYPE_CHECKING:  # type checkers would accept any attribute

    def __getattr__(name: str) -> NoReturn:
        near = suggestion(name, __dir__(), 3)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{near}", name=name)
