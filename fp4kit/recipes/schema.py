"""Define Recipe: a producer's complete arithmetic for a format, as data that names rules.

A rule is one small function in reference/ (the specification). A recipe refers to it by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from fp4kit.formats import BlockFormat, ElementFormat
from fp4kit.recipes import rules
from fp4kit.recipes.validate import as_block, as_integer, check_recipe
from fp4kit.recipes.versions import Versions, as_versions
from fp4kit.registered import FUNCTIONS

TWO_WORDS = ("compressed-tensors", "auto-round", "triton-kernels")  # producers whose name contains a hyphen


@dataclass(frozen=True)
class Recipe:
    """Describe one producer's arithmetic for a format.

    A recipe is a value: two recipes with equal fields are equal, in any process. To make a variant, use
    dataclasses.replace: `replace(recipe("mxfp4-ocp"), block=(1, 16))`. recipes/rules.py lists the names of rules and
    which of them fit together.

    Attributes:
        id: a nonempty name; in the table `<format>-<producer>[-<variant>]`.
        element: the format of a value.
        scale: the format of a block scale. None: the recipe has float32 scales only, in tensor_scale.
        block: (rows, columns) that share a block scale; columns run along the quantized axis. None: no blocks.
        block_rule: name of the rule that computes the block scale, or None.
        source: the producer, its version, and the file or function.
        exact: what the recipe equals bit for bit, and the exceptions.
        versions: the oldest version of the producer known to give these bits, and the newest that was checked. None:
            not recorded. No bit depends on it.
        tensor_scaling: what one tensor_scale covers: "none", "tensor", "row" (channel) or "block".
        tensor_rule: name of the rule that computes the tensor scale, or None.
        decode_rule: name of the rule that decodes codes to values.
        fake_rule: name of the rule of fake_quantize. None: fake_quantize is dequantize(quantize(x)).
        apply: how the factor, which the rules compute from the scales, is applied. "multiply" or "divide":
            elements are multiplied or divided by it, then rounded. "compare": the code is chosen whose value times the
            factor is nearest to the element.
        rounding: how a scaled element is rounded to a code; see reference.codec.encode.
        sign: which codes get the sign bit; see reference.codec.encode.
        nan_code: the code of a NaN element. None: the NaN of the element format.
        nan_is_max: True if a NaN element becomes the largest value although the format has a NaN (FlashInfer's clamp).
        amax_nan: how NaN enters an amax. "ignore": a NaN loses every comparison. "propagate": the amax is NaN. "lanes":
            NaN is ignored unless all even or all odd elements are NaN.
        flush: True if subnormal elements and subnormal results of multiplications are replaced by zero (ftz).
        round_scaled: True if scaled elements are rounded to the input dtype before they are rounded to a code.
        repacked: True if codes are recomputed as in auto-round's packing: the decoded values are rounded to the dtype
            of the elements and encoded again. Values that become infinite in this dtype lose their codes; so do blocks
            whose scale becomes 0 in it. Not available with stochastic rounding.
        four_over_six: None, or the error measure ("mae", "mse" or "max": mean absolute, mean squared, largest) by which
            each block chooses between two scales, with the block maximum at 6 or at 4.
        fast_error: True if 4over6 compares float16(code * scale) with the element times the tensor's encode scale.
        lane_sums: True if 4over6 adds errors in eight lanes, as PyTorch does on a CPU. Elements under a scale of 0 then
            become zeros (fouroversix).
        keep_infinity: True if an infinite factor is kept, so that its elements saturate (fouroversix's Triton kernels).
            False: the factor becomes NaN (fouroversix on a CPU, where masks multiply infinities by 0). Only
            fouroversix's rules can give infinite factors.
        scale_max: the largest block scale that the tensor scale leaves room for: 448, or 256 for some 4over6 recipes.
        search: name of the search that chooses each block amax among candidates by the resulting error. "": the block
            amax is the largest magnitude.
        static: True if block amaxes are calibrated state, given as block_amax. If none is given, the largest magnitude
            of the block is used.
        narrow: True if integers use [-max, max] instead of [-max - 1, max].
        fake_only: True if the recipe gives values only and has no codes.

    Raises:
        TypeError: if a field has the wrong type.
        ValueError: if a name is unknown, or if fields do not fit together, such as an E8M0 scale under a rule that
            writes E4M3. The message names the field.
    """

    id: str
    element: ElementFormat
    scale: ElementFormat | None
    block: tuple[int, int] | None
    block_rule: str | None
    source: str
    exact: str
    versions: Versions | None = None
    tensor_scaling: Literal["none", "tensor", "row", "block"] = "none"
    tensor_rule: str | None = None
    decode_rule: str = "product"
    fake_rule: str | None = None
    apply: Literal["multiply", "divide", "compare"] = "multiply"
    rounding: str = "rn"
    sign: Literal["signbit", "negative", "not_positive", "unsigned_zero"] = "signbit"
    nan_code: int | None = None
    nan_is_max: bool = False
    amax_nan: Literal["ignore", "propagate", "lanes"] = "ignore"
    flush: bool = False
    round_scaled: bool = False
    repacked: bool = False
    four_over_six: Literal["mae", "mse", "max"] | None = None
    fast_error: bool = False
    lane_sums: bool = False
    keep_infinity: bool = False
    scale_max: int = 448
    search: str = ""
    static: bool = False
    narrow: bool = False
    fake_only: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", as_versions(self.id, self.versions))
        object.__setattr__(self, "block", as_block(self.id, self.block))
        object.__setattr__(self, "scale_max", as_integer(self.id, "scale_max", self.scale_max))
        if self.nan_code is not None:
            object.__setattr__(self, "nan_code", as_integer(self.id, "nan_code", self.nan_code))
        check_recipe(self)

    def __repr__(self) -> str:
        """Return Recipe('id')."""
        return f"Recipe({self.id!r})"

    def __str__(self) -> str:
        """Return a description of the recipe in several lines of text."""
        return str(FUNCTIONS["Recipe.panel"](self).text())

    def _repr_html_(self) -> str:
        """Return a description of the recipe as HTML, which notebooks display."""
        return str(FUNCTIONS["Recipe.panel"](self).html())

    def __hash__(self) -> int:
        return hash(self.id)  # equal recipes have equal ids; hashing all fields would double the time of a cache lookup

    @property
    def block_size(self) -> int:
        """The number of elements along the quantized axis that share a block scale; 1 without blocks."""
        return self.block[1] if self.block else 1

    @property
    def block_rows(self) -> int:
        """The number of rows that share a block scale; 1 without blocks."""
        return self.block[0] if self.block else 1

    @property
    def producer(self) -> str:
        """The producer that the id names: te, flashinfer, compressed-tensors, ..."""
        return producer_of(self.id)

    @property
    def is_packed(self) -> bool:
        """True if several codes share a byte."""
        return self.element.packing.codes > 1

    @property
    def length_multiple(self) -> int:
        """The number that the length of the quantized axis must be a multiple of: whole blocks and whole bytes."""
        return self.block_size if self.block else self.element.packing.codes

    @property
    def format_name(self) -> str:
        """The first part of the id, in capitals: NVFP4, MXFP4, ..."""
        return self.id.split("-", 1)[0].upper()


def producer_of(id: str) -> str:
    """Return the producer that an id names: te, flashinfer, compressed-tensors, ..."""
    without_format = id.partition("-")[2]
    return next((name for name in TWO_WORDS if without_format.startswith(name)), without_format.partition("-")[0])


@lru_cache(256)
def decoding(r: Recipe, dtype: Any) -> Recipe:
    """Return ``r`` with the decode rule that its producer uses for results of ``dtype``.

    This is ``r`` itself, unless ``dtype`` is float16 and the producer has another rule for float16.
    """
    rule = rules.DECODE_RULES[r.decode_rule].float16
    return replace(r, decode_rule=rule) if rule and dtype == "float16" else r


@lru_cache(256)
def faking(r: Recipe) -> Recipe:
    """Return ``r`` with the decode rule that its producer's fake quantizer uses; fake_quantize then decodes by it.

    This is ``r`` itself, unless the producer's fake quantizer has its own decode rule.
    """
    rule = rules.DECODE_RULES[r.decode_rule].fake
    return replace(r, decode_rule=rule) if rule else r


def then_encodes(r: Recipe) -> bool:
    """Return whether scaling has two steps: elements times the block factor, then times the tensor's encode scale."""
    return r.tensor_rule is not None and r.block_rule is not None and rules.BLOCK_RULES[r.block_rule].then_encode


class Alias(NamedTuple):
    """Record that a producer gives the same codes and scales as another producer's recipe, under a name of its own.

    Attributes:
        id: the name of the alias.
        of: the id of the recipe.
        source: the producer, its version, and the file or function.
        exact: what is equal, and the exceptions.
    """

    id: str
    of: str
    source: str
    exact: str


def of_format(fmt: BlockFormat, id: str, **fields: Any) -> Recipe:
    """Return a Recipe with the elements and scales of a block format, and blocks of one row.

    ``fields`` are the other fields of the Recipe.
    """
    scaling = {"tensor_scaling": "tensor"} if fmt.has_tensor_scale else {"decode_rule": "e8m0"}
    return Recipe(id=id, element=fmt.element, scale=fmt.scale, block=(1, fmt.block_size), **{**scaling, **fields})


def four_over_six(base: Recipe, prefix: str) -> Iterator[Recipe]:
    """Yield four 4over6 variants of ``base``: error measure mae or mse, each with scale_max 448 and 256.

    4over6 chooses between two scales per block. ``prefix`` begins the id of each variant.
    """
    for error in ("mae", "mse"):
        for scale_max in (448, 256):
            name = f"{prefix}-4over6-{error}-{scale_max}"
            yield replace(base, id=name, block_rule="four_over_six", four_over_six=error, scale_max=scale_max)
