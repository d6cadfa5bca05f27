"""Recipe: a producer's complete arithmetic for a format, as data that names rules.

A rule is one small function, written in reference/ (the specification) under the name that stands here.
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

TWO_WORDS = ("compressed-tensors", "auto-round", "triton-kernels")  # names of producers that have a hyphen themselves


@dataclass(frozen=True)
class Recipe:
    """One producer's arithmetic. dataclasses.replace makes a variant: replace(recipe("mxfp4-ocp"), block=(1, 16)).

    id: not empty; <format>-<producer>[-<variant>] in the table.
    element, scale: formats of a value and of a block scale (None: float32 scales only, in tensor_scale).
    block: (rows, columns) that share a block scale; columns run along the quantized axis. None: no blocks.
    tensor_scaling: what one tensor_scale covers: "none", "tensor", "row" (channel) or "block".
    tensor_rule, block_rule, decode_rule, fake_rule: names of functions in reference/ (no fake_rule:
    dequantize(quantize(x))). apply: whether elements are multiplied with or divided by the factor that the rules give,
    or compared with codes times it. rounding, sign, nan_code: see reference.codec.encode (nan_code None: the format's
    own). amax_nan: "ignore" (a NaN loses every comparison), "propagate", or "lanes" (ignored unless all even or all odd
    elements are). flush: subnormal elements and products are zero (ftz). round_scaled: they are rounded to the input
    dtype. repacked: codes are found again, from their values and scales in the dtype of the elements, as auto-round
    packs them. Values
        that this dtype makes infinite then lose their codes, and so do blocks whose scale it makes 0. Not with random
        rounding.
    nan_is_max: a NaN element saturates (FlashInfer's clamp) although the format has a NaN.
    four_over_six: None, "mae", "mse" or "max": each block takes the better of two scales, block maximum at 6 or at 4,
    by the mean
        absolute, mean squared or largest error.
    lane_sums: 4over6 adds errors in eight lanes, as PyTorch does on a CPU; elements under a scale of 0 are zeros
    (fouroversix). keep_infinity: an infinite factor stays one, under which elements saturate (fouroversix's Triton
    kernels); else it is NaN
        (its masks on a CPU, which multiply infinities with 0). Only its rules have one.
    fast_error: 4over6 compares float16(code * scale) with x times the tensor's encode scale.
    scale_max: the largest block scale that the tensor scale leaves room for (448, or 256 for some 4over6 recipes).
    search: the rule that chooses the amax of each block among candidates, by the error that they make; "": the largest
    magnitude. static: block amaxes are calibrated state: given as block_amax, or the plain block amax. narrow: integers
    use [-max, max] instead of [-max - 1, max]. fake_only: values only; there are no codes. source: producer, version,
    file or function. exact: what it equals bit for bit, and where not. versions: the oldest version of the producer
    known to give these bits, and the newest that was checked; None: not recorded.
        No bit depends on it.

    A recipe is a value: equal fields are equal recipes, in any process.
    Raises TypeError for a field of another type; ValueError for an unknown name, or for fields that no rule takes
    together (an E8M0 scale under a rule that writes E4M3, narrow floats, ...), naming the field. Names and pairs:
    recipes/rules.py.
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
        return f"Recipe({self.id!r})"

    def __str__(self) -> str:
        return str(FUNCTIONS["Recipe.panel"](self).text())

    def _repr_html_(self) -> str:
        return str(FUNCTIONS["Recipe.panel"](self).html())

    def __hash__(self) -> int:
        return hash(self.id)  # a hash of all fields takes as long as the rest of a lookup

    @property
    def block_size(self) -> int:
        """Elements along the quantized axis that share a block scale (1 where there are no blocks)."""
        return self.block[1] if self.block else 1

    @property
    def block_rows(self) -> int:
        """Rows that share a block scale."""
        return self.block[0] if self.block else 1

    @property
    def producer(self) -> str:
        """The second part of the id: te, flashinfer, compressed-tensors, ..."""
        return producer_of(self.id)

    @property
    def is_packed(self) -> bool:
        """Whether codes share bytes."""
        return self.element.packing.codes > 1

    @property
    def length_multiple(self) -> int:
        """What the length of the quantized axis must be a multiple of: whole blocks, whole bytes."""
        return self.block_size if self.block else self.element.packing.codes

    @property
    def format_name(self) -> str:
        """NVFP4, MXFP4, ...: the first part of the id."""
        return self.id.split("-", 1)[0].upper()


def producer_of(id: str) -> str:
    """The producer that an id names: te, flashinfer, compressed-tensors, ..."""
    rest = id.partition("-")[2]
    return next((name for name in TWO_WORDS if rest.startswith(name)), rest.partition("-")[0])


@lru_cache(256)
def decoding(r: Recipe, dtype: Any) -> Recipe:
    """The recipe whose decode rule gives values of a dtype: r, but where its producer decodes float16 by another."""
    rule = rules.DECODE_RULES[r.decode_rule].float16
    return replace(r, decode_rule=rule) if rule and dtype == "float16" else r


@lru_cache(256)
def faking(r: Recipe) -> Recipe:
    """Return the recipe that fake_quantize decodes by: r unless its producer's fake quantizer has another decode
    rule.
    """
    rule = rules.DECODE_RULES[r.decode_rule].fake
    return replace(r, decode_rule=rule) if rule else r


class Alias(NamedTuple):
    """A producer's name of another's recipe, which gives its codes and scales of every finite input; exact: and what
    not.
    """

    id: str
    of: str
    source: str
    exact: str


def of_format(fmt: BlockFormat, id: str, **fields: Any) -> Recipe:
    """A recipe of a block format, with the format's elements, scales and blocks of one row."""
    scaling = {"tensor_scaling": "tensor"} if fmt.has_tensor_scale else {"decode_rule": "e8m0"}
    return Recipe(id=id, element=fmt.element, scale=fmt.scale, block=(1, fmt.block_size), **{**scaling, **fields})


def four_over_six(base: Recipe, prefix: str) -> Iterator[Recipe]:
    """The four variants of a recipe whose blocks take the better of two scales: by error, and by the largest scale."""
    for error in ("mae", "mse"):
        for scale_max in (448, 256):
            name = f"{prefix}-4over6-{error}-{scale_max}"
            yield replace(base, id=name, block_rule="four_over_six", four_over_six=error, scale_max=scale_max)
