"""Define Recipe: a producer's complete arithmetic for a format, as data that names rules.

A rule is a small function in fp4kit/reference/, the specification. A recipe refers to it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from fp4kit.arguments import explains_class, suggestion, title_of
from fp4kit.formats import BlockFormat, ElementFormat
from fp4kit.lazy import FUNCTIONS
from fp4kit.recipes import rules
from fp4kit.recipes.validate import as_block, as_integer, check_recipe, tensor_scale_dtype


class Versions(NamedTuple):
    """The oldest version of a producer known to give a recipe's bits (first), and the newest that was checked (last).

    Each is named as the producer names it: a release ("0.32.4"), a development version ("0.19 dev") or a commit
    ("d0067d0").

    >>> str(Versions("0.32.2", "0.32.4")), str(Versions("d0067d0", "d0067d0"))
    ('0.32.2 to 0.32.4', 'd0067d0')
    """

    first: str
    last: str

    def __str__(self) -> str:
        """Return "first to last", or one version if both are equal."""
        return self.first if self.first == self.last else f"{self.first} to {self.last}"


def as_versions(id: object, versions: Any) -> Versions | None:
    """Return `versions`, the field Recipe.versions, in its standard form: None, or a Versions."""
    if versions is None:
        return None
    is_pair = isinstance(versions, (tuple, list)) and len(versions) == 2
    if not is_pair or not all(isinstance(version, str) for version in versions):
        raise TypeError(f"Recipe {id}: versions is {versions!r}; needs a pair of str (oldest, newest checked), or None")
    if not all(versions):
        raise ValueError(f"Recipe {id}: versions is {versions!r}; needs two nonempty strings, or None")
    return Versions(*versions)


class Level(NamedTuple):
    """One level of scales of a hierarchical recipe. Recipe.levels lists the levels, outermost first.

    Attributes:
        columns: the number of elements along the quantized axis that share a scale of this level.
        format: "float32", "float16" or "bfloat16": the scales are in tensor_scale, as float32 numbers of this type. The
            name of Recipe.scale, such as "E8M0": the scales are the codes in block_scale. "exponent1": one bit per
            scale, which multiplies by 2 if it is set. Such bits are stored in block_scale behind the byte of their
            block, level by level, the first scale in bit 7 of a byte.
    """

    columns: int
    format: str

    def __repr__(self) -> str:
        """Return the pair (columns, format) as a tuple shows it."""
        return repr(tuple(self))


class ScaleLevel(NamedTuple):
    """One level of scales of any recipe, as Recipe.scale_levels returns it.

    Attributes:
        rows, columns: the size of the block that shares a scale. None stands for all rows or columns of the array, or
            of the expert in a stack of matrices with one scale per expert.
        format: as in Level.

    >>> str(ScaleLevel(1, 16, "E4M3")), str(ScaleLevel(None, None, "float32"))
    ('E4M3 per 1 x 16 block', 'float32 per tensor')
    """

    rows: int | None
    columns: int | None
    format: str

    def __str__(self) -> str:
        """Return the format and what shares a scale: a block, a row or the tensor."""
        if self.columns is None:
            return f"{self.format} per {'tensor' if self.rows is None else 'row'}"
        return f"{self.format} per {self.rows} x {self.columns} block"


def as_levels(name: str, levels: Any) -> tuple[Level, ...]:
    """Return the field Recipe.levels in its standard form. Raise TypeError unless it holds pairs (int, str)."""
    found = tuple(levels) if isinstance(levels, (tuple, list)) else (levels,)
    for level in found:
        if not isinstance(level, (tuple, list)) or [type(part) for part in level] != [int, str]:
            raise TypeError(f"{name} is {levels!r:.80}; needs pairs (columns, format), outermost first")
    return tuple(Level(*level) for level in found)


# {kind of evidence that a recipe gives its producer's bits: what it says}, the strongest recordings first
EVIDENCE = {
    "GPU": "recorded on a GPU",
    "CPU": "recorded on a CPU",
    "emulated": "recorded from its kernels, executed on a CPU",
    "reference": "recorded from a reference implementation of the producer",
    "live": "live",
}
# The levels of HiF4 that all engines compute; only the specification computes others
HIF4_LEVELS = (Level(64, "E6M2"), Level(8, "exponent1"), Level(4, "exponent1"))
# The operations that work for recipes that only the specification computes, on arrays in host memory
_SPECIFIED = (
    *("recipe", "quantize", "fake_quantize", "dequantize", "quantize_grouped", "fake_quantize_grouped"),
    *("Quantized", "from_parts", "compare_recipes", "explain", "plot.block", "plot.error_against_scale"),
)
# The operations that work for recipes with levels, or with a search of the whole array, that all engines compute
_WITH_LEVELS = (*_SPECIFIED, "GroupedPlan", "source", "kernels", "tensor_amax")
# The operations that round to nearest and take no seed
_TO_NEAREST = (
    *("requantize", "search_scales", "quantize_static", "quantize_kv", "partial_amax", "partial_cast"),
    *("cast_master_weights", "engine_keys", "compare_recipes", "FakeQuantSettings", "fake_quantize_model"),
    *("plot.block", "plot.error_against_scale"),
)
# The operations that work for a Quantized with several levels of scales
_LEVELED = ("dequantize", "Quantized", "equals", "compare", "statistics", "identify", "plot.histogram")


def is_simple(r: Recipe) -> bool:
    """Return whether every operation supports r: all engines compute it, with one level of scales, block by block."""
    return not (r.levels or r.specification_only or (r.search and rules.SEARCHES[r.search].whole_array))


def check_engines(op: str, r: Recipe) -> None:
    """Raise NotImplementedError or ValueError if `op` does not support r because of its levels or its rules."""
    alone = r.specification_only
    if not is_simple(r) and op not in (_SPECIFIED if alone else _WITH_LEVELS):
        what = f"has {len(r.levels)} levels of scales" if r.levels else "searches a constant for the whole array"
        what = "is computed by the specification alone" if alone else f"{what}, which {op} does not support"
        raise NotImplementedError(f"{op}: {r.id} {what}; needs another recipe, or {', '.join(_SPECIFIED[1:4])}")
    if op in _TO_NEAREST:
        check_nearest(op, r)


def check_nearest(op: str, r: Recipe) -> None:
    """Raise ValueError if a recipe has no rounding to nearest."""
    if r.stochastic_only:
        function = "fp4kit.fake_quantize" if r.fake_only else "fp4kit.quantize"
        needed = f"needs rounding='stochastic' and seed, as {function} takes them: {seeds_of(r)}"
        raise ValueError(f"{op}: rounding is 'nearest', but {r.id} only rounds stochastically; {needed}")


def seeds_of(r: Recipe) -> str:
    """Return which seeds a recipe accepts for stochastic rounding, for an error message."""
    numbers = "numbers from 0 to 1 in the shape of x"
    needed = {"comfyui_nvfp4": f"an int, or {numbers}", "comfyui_nvfp4_cuda": numbers}
    bytes_too = "an int" + ", or random bytes (uint8, shape of x)" * (r.stochastic not in rules.SCALE_STOCHASTICS)
    return needed.get(r.stochastic, bytes_too)


def check_one_level(op: str, r: Recipe) -> None:
    """Raise NotImplementedError if a Quantized of r has several levels of scales, and `op` does not read them."""
    name = op.partition(":")[0]
    if r.levels and name not in _LEVELED:
        what = f"has {len(r.levels)} levels of scales, which {name} does not read"
        raise NotImplementedError(f"{op}: {r.id} {what}; dequantize it first, or use a recipe with one level")


@explains_class
@dataclass(frozen=True)
class Recipe:
    """One producer's complete arithmetic for a format: how it computes scales, codes and decoded values.

    Two recipes with equal fields are equal, in any process. To make a variant, use dataclasses.replace:
    `replace(recipe("mxfp4-ocp"), block=(1, 16))`. A variant loses source, exact and versions, which speak of the
    recipe in the table alone, unless you state others. recipes/rules.py lists the names of rules and which of them fit
    together.

    Attributes:
        id: a nonempty name. The ids of fp4kit's table have the form `<format>-<producer>[-<variant>]`.
        element: the format of an element code.
        scale: the format of a block scale. None if the recipe has only float32 scales, in tensor_scale.
        block: (rows, columns) of the elements that share a block scale, or a tensor_scale with tensor_scaling "block".
            Columns run along the quantized axis. None if there are no blocks.
        block_rule: name of the rule that computes the block scale, or None.
        source: the producer, its version, and the file or function; "" if none is stated.
        exact: what the recipe equals bit for bit, and the exceptions; "" if it was compared with nothing.
        versions: the oldest version of the producer known to give these bits, and the newest that was checked. None if
            they are not recorded. This field has no effect on results.
        tensor_scaling: what one tensor_scale covers: "none", "tensor", "row" (channel) or "block".
        tensor_rule: name of the rule that computes the tensor scale, or None.
        decode_rule: name of the rule that decodes codes to values.
        fake_rule: name of the rule by which fake_quantize computes. None if it computes dequantize(quantize(x)).
        apply: how the factor of a block, which the block rule computes, is applied to its elements. "multiply" or
            "divide": elements are multiplied or divided by the factor, then rounded. "compare": each element gets the
            code whose value times the factor is nearest to it.
        rounding: how a scaled element is rounded to a code; see reference.codec.encode.
        sign: which codes get the sign bit; see reference.codec.encode.
        nan_code: the code of a NaN element. None stands for the NaN of the element format, or the code of its largest
            value if it has no NaN.
        nan_sign: True if the code of a NaN has the sign of the NaN that x86-64 computes when it scales the element:
            that of a NaN element, minus for inf / inf and 0 * inf, and otherwise plus. A NaN that a Hadamard transform
            or a decoding (0 * inf) makes has either sign. False if all NaNs have one code.
        nan_is_max: True if a NaN element becomes the largest value although the format has a NaN (FlashInfer's clamp).
        amax_nan: the effect of NaN elements on an amax. "ignore": NaN elements are left out. "propagate": the amax is
            NaN. "lanes": NaN elements are left out, but a block's amax is NaN if all its elements at odd indices are
            NaN.
        flush: True if subnormal elements and subnormal results of multiplications are replaced by zero (ftz).
        round_scaled: True if scaled elements are rounded to the input dtype before they are rounded to a code.
        stochastic: how rounding="stochastic" rounds, and from which random numbers; see reference/stochastic.py. "te":
            as Transformer Engine does. "comfy_kitchen_fp8": as comfy-kitchen does for FP8, in float16. "comfyui_nvfp4",
            "comfyui_nvfp4_cuda": as ComfyUI does for NVFP4 in the dtype of x, on a CPU and on a GPU. "mslk": as MSLK
            does for MXFP4, where block scales are random too. "ms_eden": only block scales are rounded stochastically,
            by the fake rules of fouroversix's MS-EDEN. All but the first two never round to nearest (stochastic_only).
        repacked: True if codes are recomputed as in auto-round's packing: the decoded values are rounded to the dtype
            of the elements and encoded again. A code can change, for example to that of zero, if its value becomes
            infinite in this dtype or if the scale of its block becomes 0 in it. It cannot be combined with stochastic
            rounding.
        four_over_six: None, or the error measure ("mae", "mse" or "max": mean absolute, mean squared, largest) by which
            each block chooses between two scales, with the block maximum at 6 or at 4. With elements IF4, each block
            chooses between E2M1 and INT4 instead, under one scale.
        fast_error: True if 4over6 measures errors before the tensor scale is applied: float16(value * block scale)
            minus the element times the tensor's encode scale.
        lane_sums: True if 4over6 adds errors in eight lanes, as PyTorch does on a CPU. Elements whose block scale is 0
            then become zeros, as in fouroversix.
        keep_infinity: True if an infinite factor is kept, so that the elements of its block saturate (fouroversix's
            Triton kernels, and its INT4). False if it becomes NaN (fouroversix's E2M1 on a CPU, where masks multiply
            infinities by 0). Only fouroversix's rules can give infinite factors.
        scale_max: the block scale that the block with the tensor's amax gets: 448, the largest value of E4M3, or 256
            in some 4over6 recipes.
        search: name of the search that chooses each block amax, among candidates by the resulting error, or by a
            statistic of the block ("quest"). "" if the block amax is the largest magnitude. The error is that of the
            producer's own decoding, whatever decode_rule is.
        static: True if block amaxes come from calibration and are passed to quantize as block_amax. If block_amax is
            not passed, the largest magnitude of each block is used.
        narrow: True if integer elements are limited to [-max, max] instead of [-max - 1, max].
        fake_only: True if the producer only fake-quantizes: the recipe gives values, but no codes.
        levels: the levels of scales of a hierarchical recipe, outermost first; () for all other recipes. block is then
            that of scale. tensor_rule computes a level of float32 or 16-bit numbers, and block_rule all others. A last
            outer block may be incomplete. scale_levels lists the levels of every recipe.

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
    sign: Literal["signbit", "negative", "not_positive", "unsigned_zero", "unscaled"] = "signbit"
    nan_code: int | None = None
    nan_sign: bool = False
    nan_is_max: bool = False
    amax_nan: Literal["ignore", "propagate", "lanes"] = "ignore"
    flush: bool = False
    round_scaled: bool = False
    stochastic: Literal["te", "comfy_kitchen_fp8", "comfyui_nvfp4", "comfyui_nvfp4_cuda", "mslk", "ms_eden"] = "te"
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
    levels: tuple[Level, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", as_versions(self.id, self.versions))
        object.__setattr__(self, "block", as_block(self.id, self.block))
        object.__setattr__(self, "scale_max", as_integer(self.id, "scale_max", self.scale_max))
        object.__setattr__(self, "levels", as_levels(f"Recipe {self.id}: levels", self.levels))
        if self.nan_code is not None:
            object.__setattr__(self, "nan_code", as_integer(self.id, "nan_code", self.nan_code))
        check_recipe(self)
        for name, value in _own_texts(self):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        """Return "Recipe('id')", or for a variant of a listed recipe, "Recipe('id with field=value')"."""
        return f"Recipe({self.title!r})"

    def __str__(self) -> str:
        """Return a description of the recipe in several lines of text, which print() shows."""
        return str(FUNCTIONS["Recipe.panel"](self).text())

    def _repr_html_(self) -> str:
        """Return a description of the recipe as HTML, which notebooks display."""
        return str(FUNCTIONS["Recipe.panel"](self).html())

    def __hash__(self) -> int:
        return hash(self.id)  # equal recipes have equal ids; hashing all fields would double the time of a cache lookup

    if not TYPE_CHECKING:  # type checkers know all attributes

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError."""
            near = "; did you mean id?" if name == "name" else suggestion(name, [one.name for one in fields(self)])
            raise AttributeError(f"'Recipe' object has no attribute {name!r}{near}", name=name, obj=self)

    @property
    def title(self) -> str:
        """The id and, for a variant of a listed recipe, the fields that it changes: "nvfp4-te with block=(1, 32)"."""
        return title_of(self, ALL_RECIPES.get(self.id), TEXTS)

    @property
    def block_size(self) -> int:
        """The number of elements along the quantized axis that share a block scale; 1 for a recipe without blocks."""
        return self.block[1] if self.block else 1

    @property
    def block_rows(self) -> int:
        """The number of rows that share a block scale; 1 for a recipe without blocks."""
        return self.block[0] if self.block else 1

    @property
    def scale_bytes(self) -> int:
        """The number of bytes per block in block_scale: 1, or more for a hierarchical recipe with exponent bits."""
        return 1 + -(-sum(self.block_size // level.columns for level in self.exponent_levels) // 8)

    @property
    def scale_levels(self) -> tuple[ScaleLevel, ...]:
        """The levels of scales of any recipe, outermost first. They follow from its other fields.

        >>> from fp4kit import recipe
        >>> [str(level) for level in recipe("nvfp4-te").scale_levels]
        ['float32 per tensor', 'E4M3 per 1 x 16 block']
        """
        if self.levels:
            found = [ScaleLevel(1, level.columns, level.format) for level in self.levels]
        else:
            found = [] if self.scale is None else [ScaleLevel(self.block_rows, self.block_size, self.scale.name)]
        by_block = self.tensor_scaling == "block"
        if self.tensor_scaling == "none" or (by_block and self.levels):
            return tuple(found)
        rows = None if self.tensor_scaling == "tensor" else self.block_rows
        return (ScaleLevel(rows, self.block_size if by_block else None, tensor_scale_dtype(self)), *found)

    @property
    def exponent_levels(self) -> tuple[Level, ...]:
        """The levels whose scales are exponent bits, outermost first; () for recipes without such levels."""
        return tuple(level for level in self.levels if level.format == "exponent1")

    @property
    def tensor_columns(self) -> int:
        """The number of elements along the quantized axis per tensor_scale, if tensor_scaling is "block"."""
        return self.levels[0].columns if self.levels else self.block_size

    @property
    def specification_only(self) -> bool:
        """True if only the specification computes the recipe, on arrays in host memory.

        It is False for HiF4 (E6M2 scales per 64 elements, and exponent bits per 8 and 4 elements) and for msmodelslim's
        dual-level MXFP4.
        """
        has_rules = self.tensor_rule == "msmodelslim" or (self.levels == HIF4_LEVELS and not self.is_custom)
        return bool(self.levels) and not has_rules

    @property
    def stochastic_only(self) -> bool:
        """True if the producer never rounds to nearest, so that only rounding="stochastic" with a seed gives its bits.

        It follows from the field stochastic, so it also holds for variants.
        """
        return self.stochastic not in rules.WITH_NEAREST

    @property
    def cut_multiple(self) -> int:
        """The number of columns at whose multiples an array can be cut: that of the outermost level, or of a block."""
        return self.levels[0].columns if self.levels else self.length_multiple

    @property
    def evidence(self) -> Mapping[str, tuple[str, ...]]:
        """How it is known that the recipe gives the bits of its producer.

        {"GPU", "CPU": files of outputs that the producer's code computed there, which `fp4kit recipes --check`
        compares; "emulated": files of outputs of its kernels, executed on a CPU; "reference": files of outputs of a
        reference implementation, which the producer compares with its kernels; "live": producers with versions that
        `fp4kit recipes --live` ran and found equal}. Empty if the recipe was derived from the producer's source code
        only, and for a variant that is not in fp4kit's table.
        """
        found: Mapping[str, tuple[str, ...]] = FUNCTIONS["Recipe.evidence"](self)
        return found

    @property
    def producer(self) -> str:
        """The producer that the id names, such as te, flashinfer or compressed-tensors; "" if the id has no hyphen."""
        return producer_of(self.id)

    @property
    def is_custom(self) -> bool:
        """True if the recipe has amax rules, as the recipes of custom_recipe for user-defined formats have."""
        if self.block_rule is not None:
            return rules.BLOCK_RULES[self.block_rule].scale == rules.ANY_FORMAT
        return self.tensor_rule is not None and rules.TENSOR_RULES[self.tensor_rule] == rules.ANY_FORMAT

    @property
    def is_packed(self) -> bool:
        """True if several codes share a byte, as 4-bit codes do."""
        return self.element.packing.codes > 1

    @property
    def length_multiple(self) -> int:
        """The length of the quantized axis must be a multiple of this number.

        With blocks, it is the number of columns per block, or the unit of a fake_only recipe's fake_rule if that is
        larger. Without blocks, it is the smallest number of codes that fill whole bytes.
        """
        return max(self.block_size, fake_unit(self)) if self.block else self.element.packing.codes

    @property
    def format_name(self) -> str:
        """The id up to its first hyphen, in capitals, such as NVFP4 or MXFP4."""
        return self.id.split("-", 1)[0].upper()


ALL_RECIPES: dict[str, Recipe] = {}  # {id: recipe}: the table, which table.py fills
TEXTS = {"source": "", "exact": "", "versions": None}  # {field that changes no bit: its value if nothing is claimed}


@cache
def _stated(name: str) -> set[Any]:
    """Return the values that a field of TEXTS has in the table, and the one that claims nothing."""
    return {TEXTS[name], *(getattr(r, name) for r in ALL_RECIPES.values())}


def _own_texts(r: Recipe) -> Iterator[tuple[str, Any]]:
    """Yield (field, value) pairs that turn the texts of another recipe of the table into the claims of r."""
    listed = ALL_RECIPES.get(r.id)
    if listed and any(getattr(r, name) != getattr(listed, name) for name in _arithmetic()):
        listed = None
    if ALL_RECIPES and (listed is None or r.exact != listed.exact):
        for name, none in TEXTS.items():
            if getattr(r, name) in _stated(name):
                yield name, getattr(listed, name, none)


@cache
def _arithmetic() -> tuple[str, ...]:
    return tuple(field.name for field in fields(Recipe) if field.name not in TEXTS)


def producer_of(id: str) -> str:
    """Return the producer that a recipe id names, such as te, flashinfer or compressed-tensors."""
    without_format = id.partition(" ")[0].partition("-")[2]
    two_words = (name for name in PRODUCERS if "-" in name and without_format.startswith(name))
    return next(two_words, without_format.partition("-")[0])


@lru_cache(256)
def decoding(r: Recipe, dtype: Any) -> Recipe:
    """Return the recipe by which codes and scales of r are decoded to the given dtype."""
    decode = rules.DECODE_RULES[r.decode_rule]
    rule = decode.float16 if dtype == "float16" else decode.bfloat16 if dtype == "bfloat16" else ""
    return replace(r, decode_rule=rule) if rule else r


@lru_cache(256)
def faking(r: Recipe) -> Recipe:
    """Return the recipe by which fake_quantize decodes the codes and scales of r."""
    rule = rules.DECODE_RULES[r.decode_rule].fake
    return replace(r, decode_rule=rule) if rule else r


@lru_cache(256)
def with_row_blocks(r: Recipe) -> Recipe:
    """Return a copy of r with blocks of one row if it has taller blocks with float32 scales; otherwise r itself."""
    return replace(r, block=(1, r.block_size)) if has_tall_scales(r) else r


def has_tall_scales(r: Recipe) -> bool:
    """Return whether a recipe's blocks have several rows and float32 scales, such as FP8 in 128x128 blocks."""
    return r.tensor_scaling == "block" and r.block_rows > 1


@lru_cache(256)
def searching(r: Recipe) -> Recipe:
    """Return the recipe with which r's search encodes and decodes a candidate, to measure its error."""
    rule = rules.SEARCHES[r.search].decode_rule
    return replace(r, decode_rule=r.decode_rule if r.is_custom or not rule else rule, repacked=False)


@lru_cache(256)
def as_stored(r: Recipe, divides: bool) -> Recipe:
    """Return a copy of r with the decode rule of a program that loads the codes and scales from a checkpoint.

    A rule that is a loader's already stays.
    """
    if rules.DECODE_RULES[r.decode_rule].loader:
        rule = r.decode_rule
    elif r.scale is not None and r.scale.name == "E8M0":
        rule = "e8m0"
    elif not divides:
        rule = "product"
    else:
        rule = "compressed_tensors" if r.tensor_rule == "compressed_tensors" else "stored_divisor"
    return replace(r, decode_rule=rule, fake_rule=None)


@lru_cache(256)
def by_divisor(r: Recipe) -> Recipe:
    """Return a copy of r that takes the divisor of a checkpoint, in the place of the tensor amax."""
    return replace(r, id=f"{r.id} by divisor", tensor_rule="divisor")


def takes_divisor(r: Recipe) -> bool:
    """Return whether by_divisor accepts r: its arithmetic reads the tensor's encode scale, but not its amax."""
    chooses = r.four_over_six or r.search or r.fake_rule or r.scale is None or r.block_rule is None
    stores = r.tensor_rule in rules.STORES_DIVISOR and r.tensor_scaling == "tensor"
    return stores and not chooses and not rules.BLOCK_RULES[str(r.block_rule)].needs_tensor


def fake_unit(r: Recipe) -> int:
    """Return how many elements share a correction of scales in r's fake_rule; 1 without such corrections."""
    return rules.FAKE_RULES[r.fake_rule].unit if r.fake_rule else 1


def then_encodes(r: Recipe) -> bool:
    """Return whether recipe r scales elements in two steps: by the factor of their block and by the encode scale."""
    if r.tensor_rule is None or r.block_rule is None:
        return False
    return rules.BLOCK_RULES[r.block_rule].then_encode or encodes_first(r)


def encodes_first(r: Recipe) -> bool:
    """Return whether recipe r multiplies elements by the encode scale before it applies the factor of their block."""
    return r.tensor_rule is not None and rules.BLOCK_RULES[r.block_rule or "te"].first_encode


class Alias(NamedTuple):
    """A second name for a recipe, which names another producer with equal codes and scales.

    Attributes:
        id: the alias, by which users may call the recipe.
        of: the id of the recipe.
        source: the producer that the alias names, its version, and the file or function.
        exact: what is equal, and the exceptions.
    """

    id: str
    of: str
    source: str
    exact: str


class Producer(NamedTuple):
    """A producer of recipes, which is a library that quantizes, or a specification.

    Attributes:
        name: its full name, such as "Transformer Engine".
        versions: the versions of the recipes that do not state others.
        package: the distribution that a package index such as PyPI has of it; "" if there is none.
    """

    name: str
    versions: Versions
    package: str


PRODUCERS: dict[str, Producer] = {}  # {the producer in an id: its record}; the decorator `producer` fills it
Made = Iterator[Recipe | Alias]


def producer(
    id: str, name: str, first: str, last: str = "", package: str = ""
) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Decorate a generator of a producer's recipes and aliases: set the versions of recipes that have none.

    first, last: the oldest version known to give the recipes' bits, and the newest that was checked, if it is another.
    package: see Producer.
    """
    usual = Versions(first, last or first)
    PRODUCERS[id] = Producer(name, usual, package)

    def with_versions(made: Recipe | Alias) -> Recipe | Alias:
        if isinstance(made, Alias):
            return made
        versions = made.versions or usual
        named = any(version in made.exact for version in versions)
        return replace(made, versions=versions, exact=made.exact if named else f"{made.exact} ({versions})")

    return lambda define: lambda: map(with_versions, define())


def fields_of(text: str) -> dict[str, Any]:
    """Return the fields of a Recipe that a text such as "block_rule=te flush=True nan_code=0xB block=16x16" sets."""
    found: dict[str, Any] = dict(word.split("=") for word in text.split())
    for name, value in found.items():
        if name == "block":
            found[name] = tuple(map(int, value.split("x")))
        elif name in ("nan_code", "scale_max"):
            found[name] = int(value, 0)
        else:
            found[name] = {"True": True, "False": False, "None": None}.get(value, value)
    return found


def of_format(fmt: BlockFormat, id: str, text: str, **fields: Any) -> Recipe:
    """Return a Recipe with the element format, scale format and block length of a block format such as NVFP4."""
    scaling = {"tensor_scaling": "tensor"} if fmt.has_tensor_scale else {"decode_rule": "e8m0"}
    usual: dict[str, Any] = {"element": fmt.element, "scale": fmt.scale, "block": (1, fmt.block_size), **scaling}
    return Recipe(id=id, **usual | fields_of(text) | fields)


def unscaled(element: ElementFormat, id: str, text: str, **fields: Any) -> Recipe:
    """Return a Recipe without block scales, only with float32 scales."""
    return Recipe(
        id=id, element=element, **{"scale": None, "block": None, "block_rule": None} | fields_of(text) | fields
    )


def variant(r: Recipe, id: str, text: str = "", **fields: Any) -> Recipe:
    """Return a copy of r with another id and other fields."""
    return replace(r, id=id, **fields_of(text) | fields)


def four_over_six(base: Recipe, prefix: str) -> Iterator[Recipe]:
    """Yield four 4over6 variants of a recipe: error measures mae and mse, each with scale_max 448 and 256."""
    for error in ("mae", "mse"):
        for top in (448, 256):
            text = f"block_rule=four_over_six four_over_six={error} scale_max={top}"
            yield variant(base, f"{prefix}-4over6-{error}-{top}", text)
