"""Write source/recipes.inc: a C++ struct for each rule that a recipe of the table needs, and lists of their keys.
A key is a text that lists the fields of a recipe on which the results of a rule depend (coverage.py).

    python -m fp4kit.cpu.generate

Run it after a change to the recipes or rules. A test fails if the file is not up to date.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fp4kit.cpu.coverage import computed_format, decode_key, element_key, rule_key, tensor_key, top_rule
from fp4kit.cuda.compiler import decode_rule, format_struct
from fp4kit.formats import E2M1, E4M3, ElementFormat, IntegerOrFloat
from fp4kit.recipes import Recipe, recipes
from fp4kit.recipes.schema import as_stored, decoding, faking, then_encodes
from fp4kit.recipes.table import recipe

PATH = Path(__file__).parent / "source" / "recipes.inc"


def text() -> str:
    """Return the C++ text that recipes.inc should have for the current recipes of the table."""
    table = [recipe(name) for name in recipes()]
    formats = {f.name: f for r in table for f in (r.element, r.scale or E4M3)}
    rules = {key: r for r in reversed(table) if (key := rule_key(r)) is not None}
    four_over_six = {key: rules.pop(key) for key, r in tuple(rules.items()) if r.four_over_six}
    tensors = {key: r for r in reversed(table) if (key := tensor_key(r)) is not None}
    elements = {element_key(r): r for r in reversed(table)}
    dtypes = ("float32", "float16", "bfloat16")
    decoded = [other for r in table for other in {faking(r), *(decoding(r, dtype) for dtype in dtypes)}]
    decoded += [as_stored(r, divides) for r in table if not r.fake_only for divides in _stored_directions(r)]
    decodes = {decode_key(r): r for r in reversed(decoded)}
    return "\n".join(
        [
            "// Written by cpu/generate.py from the recipes of the table.",
            "// clang-format off",
            *(format_struct(f, _format(f)) for _, f in sorted(formats.items())),
            *_structs("BlockRule", rules, _rule),
            *_structs("FourOverSix", four_over_six, _four_over_six),
            *_structs("TensorRule", tensors, _tensor),
            *_structs("Element", elements, _element),
            *_structs("Decoder", decodes, _decode),
            _list("FP4KIT_BLOCK_RULES", "FP4KIT_BLOCK_RULE", "BlockRule", rules),
            _list("FP4KIT_FOUR_OVER_SIX_RULES", "FP4KIT_FOUR_OVER_SIX_RULE", "FourOverSix", four_over_six),
            _list("FP4KIT_TENSOR_RULES", "FP4KIT_TENSOR_RULE", "TensorRule", tensors),
            _list("FP4KIT_ELEMENTS", "FP4KIT_ELEMENT", "Element", elements),
            _list("FP4KIT_DECODERS", "FP4KIT_DECODER", "Decoder", decodes),
            "",
        ]
    )


def _stored_directions(r: Recipe) -> tuple[bool, ...]:
    """Return the values of schema.as_stored's argument `divides` for which a recipe needs a decoder of checkpoints."""
    return (False, True) if r.tensor_scaling == "tensor" and r.scale is not None else (False,)


def _format(f: ElementFormat) -> str:
    """Return the name of the C++ struct of an element or scale format, such as "Format_E2M1"."""
    return f"Format_{f.name}"


def _structs(name: str, found: dict[str, Recipe], facts: Callable[[Recipe], list[str]]) -> list[str]:
    """Return the definitions of C++ structs, one per key of `found` in sorted order."""
    return [f"struct {name}{i} {{ {' '.join(facts(found[key]))} }};" for i, key in enumerate(sorted(found))]


def _rule(r: Recipe) -> list[str]:
    """Return the C++ definitions of the members of a recipe's block rule struct."""
    assert r.scale is not None
    return [
        f"using Element = {_format(r.element)};",
        f"using Scale = {_format(r.scale)};",
        f"using BlockRule = block_{r.block_rule};",
        f"static constexpr int kScaleMax = {r.scale_max};",
        f"static constexpr bool kKeepInfinity = {_bool(r.keep_infinity)};",
        f"static constexpr bool kPropagateNan = {_bool(r.amax_nan == 'propagate')};",
    ]


def _two_formats(r: Recipe) -> list[str]:
    """Return the C++ definition of FloatElement for an IF4 recipe, as a list; otherwise an empty list."""
    return [f"using FloatElement = {_format(E2M1)};"] if isinstance(r.element, IntegerOrFloat) else []


def _four_over_six(r: Recipe) -> list[str]:
    """Return the C++ definitions of the members of the struct of a recipe's 4over6 or IF4 rule."""
    facts = {
        "kSquaredError": r.four_over_six == "mse",
        "kLargestError": r.four_over_six == "max",
        "kFastError": r.fast_error,
        "kLaneSums": r.lane_sums,
        "kKeepInfinity": r.keep_infinity,
        "kFlush": r.flush,
    }
    return [
        f"using Element = {_format(computed_format(r))};",
        f"using Scale = {_format(r.scale or E4M3)};",
        f"using TensorRule = tensor_{top_rule(r)};",
        f"static constexpr int kScaleMax = {r.scale_max};",
        f"static constexpr Rounding kRounding = Rounding::{r.rounding};",
        *(f"static constexpr bool {name} = {_bool(value)};" for name, value in facts.items()),
        *_two_formats(r),
    ]


def _tensor(r: Recipe) -> list[str]:
    """Return the C++ definitions of the members of a recipe's tensor rule struct."""
    return [
        f"using Element = {_format(computed_format(r))};",
        f"using TensorRule = tensor_{r.tensor_rule};",
        f"static constexpr int kScaleMax = {r.scale_max};",
    ]


def _element(r: Recipe) -> list[str]:
    """Return the C++ definitions of the members of a recipe's element arithmetic struct."""
    flags = {
        "kDivide": r.apply != "multiply",
        "kCompare": r.apply == "compare",
        "kFlush": r.flush,
        "kRoundScaled": r.round_scaled,
        "kNarrow": r.narrow,
        "kStochasticFloat16": r.stochastic == "comfy_kitchen_fp8",
        "kThenEncode": then_encodes(r),
    }
    return [
        f"using Format = {_format(computed_format(r))};",
        f"static constexpr Rounding kRounding = Rounding::{r.rounding};",
        f"static constexpr Sign kSign = Sign::{r.sign};",
        *(f"static constexpr bool {name} = {_bool(value)};" for name, value in flags.items()),
    ]


def _decode(r: Recipe) -> list[str]:
    """Return the C++ definitions of the members of a recipe's decoder struct."""
    return [
        f"using Element = {_format(r.element)};",
        f"using Scale = {_format(r.scale or E4M3)};",
        f"using DecodeRule = {decode_rule(r)};",
        f"using TensorRule = tensor_{top_rule(r)};",
        f"static constexpr int kScaleMax = {r.scale_max};",
        f"static constexpr bool kHasScales = {_bool(r.scale is not None)};",
        *_two_formats(r),
    ]


def _bool(value: bool) -> str:
    """Return a bool as C++ spells it: "true" or "false"."""
    return str(value).lower()


def _list(name: str, entry: str, struct: str, found: dict[str, Recipe]) -> str:
    """Return the definition of a C++ macro called `name`, which calls the macro `entry` for every key in `found`."""
    entries = (f'{entry}("{key}", {struct}{i})' for i, key in enumerate(sorted(found)))
    return f"#define {name} " + " ".join(entries)


if __name__ == "__main__":
    PATH.write_text(text())
