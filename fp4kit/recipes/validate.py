"""Check a new Recipe: each field by itself, then every combination of fields that a rule constrains.
Amax rules are those that custom_recipe uses, for formats of the user. All other rules belong to a producer.

A combination is either defined by the specification or rejected here. So code that receives a Recipe need not check it
again. Recipe calls check_recipe when it is created.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any, NoReturn

from fp4kit import formats
from fp4kit.formats import (
    E2M1,
    E4M3,
    E8M0,
    MAX_MAGNITUDE_EXPONENT,
    Codebook,
    ElementFormat,
    IntegerOrFloat,
    PairedMicroexponents,
)
from fp4kit.recipes import rules

_TEXTS = ("source", "exact")
_FLAGS = (
    *(
        "nan_is_max",
        "flush",
        "round_scaled",
        "repacked",
        "fast_error",
        "lane_sums",
        "keep_infinity",
        "static",
        "narrow",
    ),
    "fake_only",
)
_CHOICES: dict[str, tuple[Collection[str], bool]] = {  # {field: (allowed names, whether None is allowed)}
    "tensor_scaling": (rules.TENSOR_SCALINGS, False),
    "tensor_rule": (rules.TENSOR_RULES, True),
    "block_rule": (rules.BLOCK_RULES, True),
    "decode_rule": (rules.DECODE_RULES, False),
    "fake_rule": (rules.FAKE_RULES, True),
    "apply": (rules.APPLIES, False),
    "rounding": (rules.ROUNDINGS, False),
    "sign": (rules.SIGNS, False),
    "amax_nan": (rules.AMAX_NANS, False),
    "stochastic": (rules.STOCHASTICS, False),
    "four_over_six": (rules.ERRORS, True),
}


def check_recipe(r: Any) -> None:
    """Raise an error unless every field of the Recipe r is allowed, and all fields fit together."""
    _check_types(r)
    _check_element(r)
    _check_block(r)
    _check_block_rule(r)
    _check_tensor_rule(r)
    _check_decode_rule(r)
    _check_integer_or_float(r)
    _check_four_over_six(r)
    _check_fake_rule(r)
    _check_search(r)
    _check_options(r)
    _check_stochastic(r)
    _check_amax_rules(r)


def can_be_repacked(r: Any) -> bool:
    """Return whether a recipe may have repacked=True, judging by its other fields."""
    # The recipe must have float elements and a block rule with apply "multiply".
    # If the scales are E4M3, the field ``sign`` must not be "negative" or "not_positive".
    floats_in_blocks = r.block_rule is not None and r.apply == "multiply" and not r.element.is_integer
    keeps_signs = r.scale == E8M0 or r.sign in ("signbit", "unsigned_zero")
    return floats_in_blocks and keeps_signs and not (r.four_over_six or r.nan_is_max)


def as_block(id: object, block: Any) -> tuple[int, int] | None:
    """Return `block`, the field Recipe.block, in its standard form: None, or (rows, columns) as a tuple of two ints."""
    if block is None:
        return None
    try:
        if isinstance(block, (str, bytes)) or any(isinstance(n, bool) for n in block):
            raise TypeError
        pair = tuple(operator.index(n) for n in block)
    except TypeError:
        raise TypeError(f"Recipe {id}: block is {block!r}; needs (rows, columns), two positive ints, or None") from None
    if len(pair) != 2 or min(pair) < 1:
        raise ValueError(f"Recipe {id}: block is {block!r}; needs (rows, columns), two positive ints, or None")
    return pair


def as_integer(id: object, name: str, value: Any) -> int:
    """Return `value`, a field of a Recipe, as an int."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"Recipe {id}: {name} is {value!r}; needs an int")


def _refuse(r: Any, field: str, needed: str) -> NoReturn:
    """Raise the ValueError for a wrong field."""
    raise ValueError(f"Recipe {r.id}: {field} is {getattr(r, field)!r}; {needed}")


def _check_types(r: Any) -> None:
    """Check id, texts, flags and names of rules, each by itself, and raise an error for one that is not allowed."""
    if not isinstance(r.id, str):
        raise TypeError(f"Recipe: id is {r.id!r}; needs a str, such as 'nvfp4-te'")
    if not r.id:
        raise ValueError("Recipe: id is ''; needs a name, such as 'nvfp4-te'")
    for name in _TEXTS:
        if not isinstance(getattr(r, name), str):
            raise TypeError(f"Recipe {r.id}: {name} is {getattr(r, name)!r}; needs a str")
    for name in _FLAGS:
        if not isinstance(getattr(r, name), bool):
            raise TypeError(f"Recipe {r.id}: {name} is {getattr(r, name)!r}; needs True or False")
    for name, (choices, may_be_none) in _CHOICES.items():
        value = getattr(r, name)
        if not ((isinstance(value, str) and value in choices) or (value is None and may_be_none)):
            _refuse(r, name, f"needs one of {', '.join(choices)}" + ", or None" * may_be_none)


def _check_element(r: Any) -> None:
    """Raise an error unless the fields element, scale and nan_code are allowed."""
    # element and scale must be formats that recipes support. nan_code must be None or a code of an element.
    # The error is TypeError for an object that is not an ElementFormat, otherwise ValueError.
    if not isinstance(r.element, ElementFormat):
        raise TypeError(f"Recipe {r.id}: element is {r.element!r}; needs an ElementFormat, such as fp4kit.formats.E2M1")
    if r.scale is not None and not isinstance(r.scale, ElementFormat):
        raise TypeError(f"Recipe {r.id}: scale is {r.scale!r}; needs fp4kit.formats.E4M3, E8M0, or None")
    if not r.element.signed or not r.element.has_zero:
        _refuse(r, "element", "needs a format with a sign and a zero")
    is_float = not (r.element.is_integer or isinstance(r.element, Codebook))
    if is_float and r.element.emin - r.element.mantissa_bits < -126:
        _refuse(
            r,
            "element",
            "needs values that are normal in float32, in which recipes compute; its smallest value is subnormal there",
        )
    if isinstance(r.scale, IntegerOrFloat):
        _refuse(r, "scale", "needs a format whose codes have values; those of IF4 depend on the scale of a block")
    if r.scale not in (None, E4M3, E8M0) and not (r.block_rule is not None and r.is_custom):
        _refuse(
            r,
            "scale",
            "needs E4M3 or E8M0, the formats that rules of producers write, or None; for another format"
            " use block_rule 'amax'",
        )
    if r.scale is not None and r.element.name == r.scale.name and r.element != r.scale:
        _refuse(r, "element", f"needs another name: the scale format {r.scale.name} has other fields")
    if isinstance(r.element, Codebook) and not r.is_custom:
        _refuse(
            r,
            "element",
            "is a table of values; needs block_rule 'amax' or tensor_rule 'amax', because rules of"
            " producers are for their own formats",
        )
    if isinstance(r.element, PairedMicroexponents) and r.scale != E8M0:
        _refuse(r, "scale", f"needs E8M0 for elements {r.element}, whose microexponents count from a power of two")
    if r.nan_code is not None and not 0 <= r.nan_code < 2**r.element.bits:
        _refuse(r, "nan_code", f"needs a code of {r.element}, 0 to {2**r.element.bits - 1}, or None")


def _check_block(r: Any) -> None:
    """Raise ValueError unless the field block fits the other fields."""
    if r.block is None:
        if r.tensor_scaling == "block":
            _refuse(r, "tensor_scaling", "needs a block (rows, columns), but block is None")
        return
    rows, columns = r.block
    if r.block_rule is None and r.tensor_scaling != "block":
        _refuse(r, "block", "needs block_rule or tensor_scaling 'block', which give a block its scale; otherwise None")
    if rows > 1 and isinstance(r.element, PairedMicroexponents):
        _refuse(r, "block", f"needs blocks of one row, in which pairs of elements {r.element} lie")
    if columns % r.element.packing.codes:
        _refuse(r, "block", f"needs a multiple of {r.element.packing.codes} columns: codes of {r.element} share bytes")
    if r.amax_nan == "lanes" and columns % 2:
        _refuse(
            r, "block", "needs an even number of columns, because amax_nan 'lanes' separates even from odd elements"
        )
    if rows > 1 and r.tensor_scaling == "row":
        _refuse(r, "block", "needs blocks of one row, because with tensor_scaling 'row' each row has its own scale")


def _check_block_rule(r: Any) -> None:
    """Raise ValueError unless the other fields fit the block rule."""
    # Without a block rule, scale must be None.
    # With a block rule, these fields must fit: scale, block, element, apply, flush, static and tensor_scaling.
    # rules.BLOCK_RULES says which values fit.
    if r.block_rule is None:
        if r.scale is not None:
            _refuse(r, "block_rule", f"needs a rule that writes {r.scale} scales; or scale None")
        return
    rule = rules.BLOCK_RULES[r.block_rule]
    _check_scale(r, rule)
    if r.block is None:
        _refuse(r, "block", f"block_rule {r.block_rule!r} needs (rows, columns)")
    if rule.six and r.element.max != E2M1.max:
        _refuse(r, "element", f"block_rule {r.block_rule!r} is for elements up to {E2M1.max:g}, such as E2M1")
    if r.apply != rule.apply:
        _refuse(r, "apply", f"block_rule {r.block_rule!r} needs {rule.apply!r}")
    if rule.flush is not None and r.flush != rule.flush:
        _refuse(r, "flush", f"block_rule {r.block_rule!r} needs {rule.flush}")
    if rule.needs_tensor and r.tensor_scaling not in ("tensor", "row"):
        _refuse(r, "tensor_scaling", f"block_rule {r.block_rule!r} needs 'tensor' or 'row': it reads the tensor's amax")
    if rule.reads_amax and r.static:
        _refuse(r, "static", f"needs False, because block_rule {r.block_rule!r} recomputes the amax of the elements")
    if rule.one_level and r.tensor_scaling != "none":
        _refuse(r, "tensor_scaling", f"block_rule {r.block_rule!r} does not support a tensor scale; needs 'none'")
    if r.tensor_scaling == "block":
        _refuse(
            r,
            "tensor_scaling",
            f"block_rule {r.block_rule!r} already gives each block a scale; needs 'none', 'tensor' or 'row'",
        )


def _check_scale(r: Any, rule: rules.BlockRuleTraits) -> None:
    """Raise ValueError unless the block rule can write the recipe's scale format for the recipe's elements."""
    f, bound = r.scale, MAX_MAGNITUDE_EXPONENT
    if rule.scale != rules.ANY_FORMAT:
        if f is None or f.name != rule.scale:
            _refuse(r, "scale", f"block_rule {r.block_rule!r} writes {rule.scale}")
        if r.element.is_integer and not rule.integers:
            _refuse(r, "element", f"block_rule {r.block_rule!r} needs a float format")
        return
    if f is None or f.is_integer or isinstance(f, Codebook):
        other = "tensor_rule 'amax', for float32 scales"
        _refuse(r, "scale", f"block_rule {r.block_rule!r} needs a float format, such as E4M3; or use {other}")
    known = getattr(formats, f.name, None)
    if isinstance(known, ElementFormat) and known != f:
        _refuse(r, "scale", f"is not fp4kit.formats.{f.name}, although it has this name; needs another name")
    if f.has_zero and not (f.emin - f.mantissa_bits >= -bound and f.emax <= bound):
        _refuse(r, "scale", f"block_rule {r.block_rule!r} needs a format with values from 2^-100 to 2^100, or E8M0")


def _check_tensor_rule(r: Any) -> None:
    """Raise ValueError unless the tensor rule fits tensor_scaling, scale, scale_max and element."""
    if (r.tensor_rule is None) != (r.tensor_scaling == "none"):
        _refuse(
            r,
            "tensor_rule",
            f"tensor_scaling is {r.tensor_scaling!r}; needs both a rule and what it covers, or None and 'none'",
        )
    if r.tensor_rule is None:
        if r.scale is None:
            _refuse(r, "tensor_rule", "scale is None too; needs a tensor scale, block scales, or both")
        if r.scale_max != 448:
            _refuse(r, "scale_max", "needs 448 without a tensor_rule, because only tensor rules read it")
        return
    over = rules.TENSOR_RULES[r.tensor_rule]
    if r.is_custom or over == rules.ANY_FORMAT:
        _check_amax_tensor_rule(r)
        return
    if over == "E4M3":
        if r.scale is None or r.scale.name != over:
            _refuse(r, "tensor_rule", f"scale is {r.scale}; this rule needs E4M3 block scales")
        if not (0 < r.scale_max <= E4M3.max and r.scale_max in E4M3.values):
            _refuse(r, "scale_max", "needs a positive value of E4M3, at most 448")
        return
    if r.scale is not None:
        _refuse(r, "tensor_rule", f"scale is {r.scale}; this rule needs None, because it scales elements directly")
    if r.element.is_integer != (over == "integer"):
        _refuse(r, "element", f"tensor_rule {r.tensor_rule!r} needs {over} elements")
    if r.scale_max != 448:
        _refuse(r, "scale_max", "needs 448 without block scales, because it limits block scales")


def _check_amax_tensor_rule(r: Any) -> None:
    """Check a recipe with a tensor_rule, of whose two rules (tensor_rule and block_rule) at least one is an amax
    rule.
    """
    if rules.TENSOR_RULES[r.tensor_rule] != rules.ANY_FORMAT:
        _refuse(r, "tensor_rule", f"block_rule is {r.block_rule!r}; needs 'amax' or None")
    if r.block_rule is not None and not r.is_custom:
        _refuse(r, "tensor_rule", f"block_rule is {r.block_rule!r}, a producer's; needs a tensor rule of a producer")
    if r.scale_max != 448:
        _refuse(r, "scale_max", "needs 448, because tensor_rule 'amax' uses the largest value of the scale format")
    if r.scale is not None and r.scale.max > 2.0**100:
        largest = f"{float(r.scale.max):.3g}"
        _refuse(
            r,
            "tensor_rule",
            f"scale is {r.scale}, whose largest value {largest} leaves no range to a tensor scale; needs None",
        )


def _check_decode_rule(r: Any) -> None:
    """Raise ValueError unless the recipe has what its decode rule needs."""
    rule = rules.DECODE_RULES[r.decode_rule]
    if r.is_custom:
        if r.decode_rule != "product":
            _refuse(r, "decode_rule", "needs 'product' with the amax rules")
        return
    if (r.scale and r.scale.name) not in rule.scales:
        _refuse(r, "decode_rule", f"scale is {r.scale}; this rule needs {' or '.join(map(str, rule.scales))}")
    if rule.needs_amax and r.tensor_rule is None:
        _refuse(r, "decode_rule", "needs a tensor_rule, because it decodes with the tensor amax")


def _check_four_over_six(r: Any) -> None:
    """Raise ValueError unless four_over_six fits the other fields."""
    chooses = r.block_rule is not None and rules.BLOCK_RULES[r.block_rule].chooses
    if (r.four_over_six is None) == chooses:
        needed = f"'mae', 'mse' or 'max' with {r.block_rule if chooses else 'four_over_six'!r}, else None"
        _refuse(r, "four_over_six", f"block_rule is {r.block_rule!r}; needs {needed}")
    if r.four_over_six is None:
        if r.fast_error:
            _refuse(r, "fast_error", "needs four_over_six")
        if r.lane_sums:
            _refuse(r, "lane_sums", "needs four_over_six")
        return
    if r.element != E2M1 and not isinstance(r.element, IntegerOrFloat):
        _refuse(r, "element", "four_over_six needs E2M1")
    if r.block_rows & (r.block_rows - 1):
        _refuse(
            r,
            "block",
            "needs a number of rows that is a power of two, because four_over_six adds the errors of rows in pairs",
        )
    if r.fast_error and (r.flush or r.rounding == "rnw"):
        _refuse(r, "fast_error", "needs flush=False and a rounding other than 'rnw', whose values may exceed float16")
    if r.lane_sums and (r.flush or r.fast_error or r.block_size % 8):
        _refuse(r, "lane_sums", "needs a multiple of 8 columns per block, and neither flush nor fast_error")
    if r.four_over_six == "max" and (r.flush or r.fast_error):
        _refuse(r, "four_over_six", "needs neither flush nor fast_error")
    _need_plain(r, "four_over_six", ("static",))


def _check_integer_or_float(r: Any) -> None:
    """Raise ValueError unless IF4 elements and block_rule "fouroversix_if4" occur together, and with lane_sums=True."""
    is_if4, rule = isinstance(r.element, IntegerOrFloat), "fouroversix_if4"
    if is_if4 != (r.block_rule == rule):
        needed = f"needs block_rule {rule!r}" if is_if4 else f"block_rule {rule!r} needs fp4kit.formats.IF4"
        _refuse(r, "element", needed)
    if is_if4 and not r.lane_sums:
        _refuse(r, "lane_sums", f"needs True with block_rule {rule!r}, which adds errors as PyTorch does on a CPU")


def _check_fake_rule(r: Any) -> None:
    """Raise ValueError unless the other fields fit fake_rule, the rule by which fake_quantize computes values."""
    # If fake_rule is None, fake_only must be False.
    if r.fake_rule is None:
        if r.fake_only:
            _refuse(r, "fake_only", "needs a fake_rule, which computes the values")
        return
    rule = rules.FAKE_RULES[r.fake_rule]
    if (r.scale and r.scale.name) != rule.scale:
        _refuse(r, "fake_rule", f"scale is {r.scale}; this rule needs {rule.scale}")
    if r.element.is_integer != (rule.scale is None):
        _refuse(
            r, "fake_rule", f"element is {r.element}; this rule needs {'integers' if rule.scale is None else 'floats'}"
        )
    if rule.six and r.element != E2M1:
        _refuse(r, "fake_rule", f"element is {r.element}; this rule needs E2M1")
    if rule.scale == "E4M3" and r.tensor_rule is None and not rule.one_level:
        _refuse(r, "fake_rule", "tensor_rule is None; this rule needs a tensor scale")
    if rule.one_level and r.tensor_rule is not None:
        _refuse(r, "tensor_rule", f"fake_rule {r.fake_rule!r} does not support a tensor scale; needs None")
    if rule.scale == "E4M3" and r.scale_max != 448 and not rule.reads_scale_max:
        _refuse(r, "scale_max", f"fake_rule {r.fake_rule!r} uses 448 in its formula; needs 448")
    if r.block_rows > 1 or r.four_over_six:
        _refuse(r, "fake_rule", "needs blocks of one row, with one scale each")
    if rule.unit > 1 and (not r.fake_only or rule.unit % r.block_size):
        needed = f"needs fake_only and a number of columns that divides {rule.unit}"
        _refuse(r, "block", f"fake_rule {r.fake_rule!r} {needed}; block is {r.block}, fake_only {r.fake_only}")
    if r.fake_rule.startswith("microxcaling") and (r.amax_nan == "ignore" or r.element.emax > 15):
        needed = "needs amax_nan 'propagate' or 'lanes', and an element format whose values are below 2^16"
        _refuse(r, "fake_rule", f"{needed}; amax_nan is {r.amax_nan!r}, element {r.element}")
    _need_plain(r, f"fake_rule {r.fake_rule!r}", ("flush",))


def _check_search(r: Any) -> None:
    """Raise ValueError unless the field search is "" or names a search that fits the other fields."""
    if not isinstance(r.search, str) or r.search not in ("", *rules.SEARCHES):
        _refuse(r, "search", f"needs one of {', '.join(rules.SEARCHES)}, or '' for the largest magnitude")
    if not r.search:
        return
    rule = rules.SEARCHES[r.search]
    if r.scale is None or r.scale.name != rule.scale:
        _refuse(r, "search", f"scale is {r.scale}; this search needs {rule.scale} block scales")
    if r.block_rows > 1 or r.block_size % rule.lanes:
        _refuse(r, "block", f"search {r.search!r} needs one row and a multiple of {rule.lanes} columns")
    if rule.nvfp4 and (unfit := unfit_for_sweep(r)):
        needed = (
            "needs E2M1 elements in blocks of 16 columns, tensor_scaling 'tensor', scales of amax / 6, and rounding "
            "to nearest"
        )
        _refuse(r, "search", f"{needed}; {unfit} is {getattr(r, unfit)!r}")
    for name, plain in (("four_over_six", None), ("static", False), ("fake_rule", None)):
        if getattr(r, name) != plain:
            _refuse(
                r, name, f"has no effect with search {r.search!r}, which chooses each amax by the codes; needs {plain}"
            )


def unfit_for_sweep(r: Any) -> str | None:
    """Return the name of the first field that rules out Model-Optimizer's scale sweep for r; None if r can use it."""
    fits = {
        "element": r.element == E2M1,
        "scale": r.scale == E4M3,
        "block": r.block_size == 16,
        "tensor_scaling": r.tensor_scaling == "tensor",
        "block_rule": r.block_rule not in rules.TOPS,
        "tensor_rule": r.tensor_rule not in rules.TOPS,
        "rounding": r.rounding not in ("rz", "rnw"),
    }
    return next((name for name, fit in fits.items() if not fit), None)


def _need_plain(r: Any, rule: str, flags: tuple[str, ...]) -> None:
    """Reject values of fields that would have no effect, because a rule replaces the usual arithmetic."""
    if r.rounding != "rn" and not (r.four_over_six and r.rounding == "rnw"):
        _refuse(r, "rounding", f"{rule} rounds to nearest; needs 'rn'")
    for name in (*flags, "round_scaled", "repacked", "nan_is_max"):
        if getattr(r, name):
            _refuse(r, name, f"has no effect with {rule}; needs False")


def _check_options(r: Any) -> None:
    """Raise ValueError if an option has a value that the element format or the rules of the recipe do not support."""
    if r.element.is_integer and r.sign != "signbit":
        _refuse(r, "sign", f"needs 'signbit' for {r.element}, which has one zero")
    if r.rounding == "first":
        _check_first(r)
    if r.rounding == "rnw" and r.element != E2M1 and not isinstance(r.element, IntegerOrFloat):
        _refuse(r, "rounding", f"needs E2M1, because it continues the steps of E2M1; element is {r.element}")
    if r.apply == "compare":
        _check_comparison(r)
    if r.narrow and not r.element.is_integer:
        _refuse(r, "narrow", f"element is {r.element}; needs an integer format, whose negative range is one larger")
    if r.static and r.scale is None:
        _refuse(r, "static", "needs block scales, whose amaxes are the calibrated state; scale is None")
    if r.flush and r.block_rule is None:
        _refuse(r, "flush", "needs a block_rule, because only block rules have flushed arithmetic")
    if r.keep_infinity and not (r.lane_sums or rules.BLOCK_RULES[r.block_rule or "te"].may_overflow):
        _refuse(
            r,
            "keep_infinity",
            "needs lane_sums or a block_rule of fouroversix, because only their factors may be infinite",
        )
    if r.repacked and not can_be_repacked(r):
        needed = "needs float elements, a block_rule with apply 'multiply', and neither four_over_six nor nan_is_max"
        _refuse(r, "repacked", f"{needed}; under E4M3 scales also sign 'signbit' or 'unsigned_zero'")
    if r.nan_is_max and (r.element.specials == "none" or r.nan_code is not None):
        _refuse(
            r,
            "nan_is_max",
            f"needs an element format with a NaN, and no nan_code; element is {r.element}, nan_code {r.nan_code}",
        )


def _check_stochastic(r: Any) -> None:
    """Raise ValueError unless the elements, scales and blocks fit the field stochastic."""
    rule = rules.FAKE_RULES.get(r.fake_rule)
    if (r.stochastic == "ms_eden") != (rule is not None and rule.stochastic == "ms_eden"):
        _refuse(r, "stochastic", "'ms_eden' and fake_rule 'ms_eden' or 'ms_eden_if4' need each other")
    if r.stochastic != "te" and (r.element.is_integer or r.is_custom):
        _refuse(r, "stochastic", f"needs float elements under rules of a producer, or 'te'; element is {r.element}")
    if r.stochastic in rules.COMFYUI_STOCHASTICS and r.element != E2M1:
        _refuse(r, "stochastic", f"needs E2M1, whose codes it computes; element is {r.element}")
    if r.stochastic == "mslk" and (r.element != E2M1 or r.scale != E8M0 or r.block_rows > 1):
        needed = "needs elements E2M1 and E8M0 scales of blocks of one row"
        _refuse(r, "stochastic", f"{needed}; element is {r.element}, scale {r.scale}, block {r.block}")


def _check_first(r: Any) -> None:
    """Raise ValueError unless elements are floats and nan_code is 0, which rounding "first" needs."""
    if r.element.is_integer:
        _refuse(r, "rounding", f"needs a float format, because values are compared; element is {r.element}")
    if r.nan_code != 0:
        _refuse(r, "nan_code", "rounding 'first' takes the first code with the smallest error, for a NaN too; needs 0")


def _check_comparison(r: Any) -> None:
    """Raise ValueError unless a recipe with apply "compare" has a block_rule, rounding "first" and round_scaled
    False.
    """
    # So a field that changes scaled elements would have no effect, and is rejected.
    if r.block_rule is None:
        _refuse(r, "apply", "needs a block_rule, because apply 'compare' multiplies the values of codes by its factor")
    if r.rounding != "first":
        _refuse(r, "rounding", "apply 'compare' takes the first of the nearest values; needs 'first'")
    if r.round_scaled:
        _refuse(r, "round_scaled", "has no effect with apply 'compare', which does not scale elements; needs False")


_AMAX_ROUNDINGS = ("rn", "rz", "rna", "rnz")  # roundings of elements that the amax rules accept


def _check_amax_rules(r: Any) -> None:
    """Raise ValueError if a recipe with an amax rule has a value in a field that amax rules do not support."""
    if not r.is_custom:
        return
    plain = {"apply": "multiply", "fake_rule": None, "search": "", "round_scaled": False, "repacked": False}
    if isinstance(r.element, Codebook):
        plain |= {"rounding": "rn", "sign": "signbit"}
        if r.nan_code is not None and r.nan_code >= len(r.element.table):
            _refuse(r, "nan_code", f"needs a code of the {len(r.element.table)} values of {r.element}, or None")
    for name, value in plain.items():
        if getattr(r, name) != value:
            _refuse(r, name, f"needs {value!r} with the amax rules and elements {r.element}")
    if r.rounding not in _AMAX_ROUNDINGS:
        _refuse(r, "rounding", f"needs one of {', '.join(_AMAX_ROUNDINGS)} with the amax rules")
