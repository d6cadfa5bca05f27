"""Write source/recipes.inc: a C++ struct for each rule that a recipe of the table needs, and lists of their keys.
A key is a text that lists the fields of a recipe on which the results of a rule depend (codec.py).

    python -m fp4kit.cpu.generate

Run it after a change to the recipes or rules. A test fails if the file is not up to date.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fp4kit.cpu.codec import computed_format, decode_key, element_key, rule_key, tensor_key, top_rule
from fp4kit.cuda.compiler import constant, decode_rule, format_struct
from fp4kit.formats import E2M1, E4M3, ElementFormat, IntegerOrFloat
from fp4kit.recipes import ALL_RECIPES, Recipe
from fp4kit.recipes.rules import BLOCK_RULES, DECODE_RULES
from fp4kit.recipes.schema import as_stored, by_divisor, decoding, encodes_first, faking, takes_divisor, then_encodes

PATH = Path(__file__).parent / "source" / "recipes.inc"
DTYPES = ("float32", "float16", "bfloat16")


Facts = dict[str, object]  # members of a C++ struct: {name of a type: type} and {"type name" of a constant: value}


def text() -> str:
    """Return the C++ text that recipes.inc should have for the current recipes of the table."""
    table = [r for r in ALL_RECIPES.values() if not r.specification_only]
    formats = {f.name: f for r in table for f in (r.element, r.scale or E4M3)}
    rules = {key: r for r in reversed(table) if (key := rule_key(r)) is not None}
    four_over_six = {key: rules.pop(key) for key, r in tuple(rules.items()) if r.four_over_six}
    whole = {key: rules.pop(key) for key, r in tuple(rules.items()) if BLOCK_RULES[str(r.block_rule)].whole}
    by_divisors = [by_divisor(r) for r in table if takes_divisor(r)]
    tensors = {key: r for r in reversed([*table, *by_divisors]) if (key := tensor_key(r)) is not None}
    elements = {element_key(r): r for r in reversed(table) if rule_key(r) not in whole}
    decoded = [other for r in table for other in {faking(r), *(decoding(r, dtype) for dtype in DTYPES)}]
    for r in table:  # decoders of checkpoints, which may store the tensor scale or its reciprocal
        has_both = r.tensor_scaling == "tensor" and r.scale is not None
        is_stored = not (r.fake_only or r.levels)
        decoded += [as_stored(r, divides) for divides in (False, True)[: 1 + has_both] if is_stored]
        loads = has_both or (r.scale is None and not r.element.is_integer)
        decoded += _loaded(r) if loads else []
    decodes = {decode_key(r): r for r in reversed(decoded)}
    # (struct, macro that lists the structs, {key: a recipe with this key}, the members of a recipe's struct)
    kinds: tuple[tuple[str, str, dict[str, Recipe], Callable[[Recipe], Facts]], ...] = (
        ("FourOverSix", "FP4KIT_FOUR_OVER_SIX_RULE", four_over_six, _four_over_six),
        ("Whole", "FP4KIT_WHOLE_RULE", whole, _whole),
        ("Element", "FP4KIT_ELEMENT", elements, _element),
        ("Decoder", "FP4KIT_DECODER", decodes, _decode),
    )
    lines = ["// Written by cpu/generate.py from the recipes of the table.", "// clang-format off"]
    lines += [format_struct(f, _format(f)) for _, f in sorted(formats.items())]
    for name, _, found, facts in kinds:
        lines += [f"struct {name}{i} {{ {_members(facts(found[key]))} }};" for i, key in enumerate(sorted(found))]
    for macro, of, found in (("BLOCK", _block_rule, rules), ("TENSOR", _tensor_rule, tensors)):
        entries = (f'FP4KIT_{macro}_RULE("{key}", {of(found[key])})' for key in sorted(found))
        lines.append(f"#define FP4KIT_{macro}_RULES " + " ".join(entries))
    for name, macro, found, _ in kinds:
        entries = (f'{macro}("{key}", {name}{i})' for i, key in enumerate(sorted(found)))
        lines.append(f"#define {macro}S " + " ".join(entries))
    return "\n".join([*lines, ""])


def _loaded(r: Recipe) -> list[Recipe]:
    """Return copies of a recipe with the decode rules of loaders that fit its scales."""
    scale = r.scale and r.scale.name
    fitting = [name for name, rule in DECODE_RULES.items() if rule.loader and scale in rule.scales]
    return [decoding(replace(r, decode_rule=name), dtype) for name in fitting for dtype in DTYPES]


def _format(f: ElementFormat) -> str:
    """Return the name of the C++ struct of an element or scale format, such as "Format_E2M1"."""
    return f"Format_{f.name}"


def _members(facts: Facts) -> str:
    """Return the definitions of the members of a C++ struct."""
    return " ".join(constant(k, v) if " " in k else f"using {k} = {v};" for k, v in facts.items())


def _block_rule(r: Recipe) -> str:
    """Return the C++ struct of a recipe's block rule."""
    flags = f"{r.scale_max}, {int(r.keep_infinity)}, {int(r.amax_nan == 'propagate')}"
    return f"BlockRuleOf<{_format(r.element)}, {_format(r.scale or E4M3)}, block_{r.block_rule}, {flags}>"


def _tensor_rule(r: Recipe) -> str:
    """Return the C++ struct of a recipe's tensor rule."""
    return f"TensorRuleOf<{_format(computed_format(r))}, tensor_{r.tensor_rule}, {r.scale_max}>"


def _two_formats(r: Recipe) -> Facts:
    """Return the definition of FloatElement for an IF4 recipe; otherwise no members."""
    return {"FloatElement": _format(E2M1)} if isinstance(r.element, IntegerOrFloat) else {}


def _four_over_six(r: Recipe) -> Facts:
    """Return the members of the struct of a recipe's 4over6 or IF4 rule."""
    return {
        "Element": _format(computed_format(r)),
        "Scale": _format(r.scale or E4M3),
        "TensorRule": f"tensor_{top_rule(r)}",
        "int kScaleMax": r.scale_max,
        "Rounding kRounding": f"Rounding::{r.rounding}",
        "bool kSquaredError": r.four_over_six == "mse",
        "bool kLargestError": r.four_over_six == "max",
        "bool kFastError": r.fast_error,
        "bool kIsCute": r.block_rule == "four_over_six_cute",
        "bool kLaneSums": r.lane_sums,
        "bool kKeepInfinity": r.keep_infinity,
        "bool kFlush": r.flush,
        **_two_formats(r),
    }


def _whole(r: Recipe) -> Facts:
    """Return the members of the struct of a rule that computes scales and codes together."""
    names: Facts = {"BlockRule": f"block_{r.block_rule}", "FakeRule": f"fake_{r.fake_rule or 'hif4'}"}
    return {"Element": _format(r.element)} | names


def _element(r: Recipe) -> Facts:
    """Return the members of a recipe's element arithmetic struct."""
    return {
        "Format": _format(computed_format(r)),
        "Rounding kRounding": f"Rounding::{r.rounding}",
        "Sign kSign": f"Sign::{r.sign}",
        "bool kDivide": r.apply != "multiply",
        "bool kCompare": r.apply == "compare",
        "bool kFlush": r.flush,
        "bool kRoundScaled": r.round_scaled,
        "bool kNarrow": r.narrow,
        "bool kStochasticFloat16": r.stochastic == "comfy_kitchen_fp8",
        "bool kThenEncode": then_encodes(r),
        "bool kEncodeFirst": encodes_first(r),
    }


def _decode(r: Recipe) -> Facts:
    """Return the members of a recipe's decoder struct."""
    return {
        "Element": _format(r.element),
        "Scale": _format(r.scale or E4M3),
        "DecodeRule": decode_rule(r),
        "TensorRule": f"tensor_{top_rule(r)}",
        "int kScaleMax": r.scale_max,
        "bool kHasScales": r.scale is not None,
        **_two_formats(r),
    }


if __name__ == "__main__":
    PATH.write_text(text())
