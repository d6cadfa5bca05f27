"""What no kernel has of a recipe, beside shapes of blocks: refused before a launch, with what is needed instead."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from fp4kit.cuda.traits import is_same
from fp4kit.formats import E2M1, E4M3, E8M0, ElementFormat
from fp4kit.recipes import Recipe

WIDEST = 100  # exponents of values of elements, of either sign: then no step of encode or decode leaves float32
ROUNDINGS = ("rn", "rz", "rnz")
FOUR_OVER_SIX_COLUMNS = 16


def check_formats(op: str, r: Recipe) -> None:
    """Raise NotImplementedError, with what is needed and the way out, where no kernel does as the recipe says."""
    wrong = unsupported(r)
    if wrong:
        raise NotImplementedError(f"{op}: {r.id} has {wrong}; compute on the CPU with cupy.asnumpy(x)")


@lru_cache(256)
def unsupported(r: Recipe) -> str | None:
    """What of a recipe no CUDA kernel has, and what is needed instead; None where kernels have all of it."""
    return next((f"{what}, which no CUDA kernel has; needs {needed}" for is_wrong, what, needed in _limits(r) if is_wrong), None)


def _limits(r: Recipe) -> Iterator[tuple[bool, str, str]]:
    """Whether something is wrong, what it is, and what is needed."""
    e, rule = r.element, r.block_rule
    yield not _has_kernels(e), f"elements {e} with bias {e.bias}", "signed numbers of at most 8 bits within 2^-100 ... 2^100"
    rounds = r.rounding == "rn" if e.is_integer else r.rounding in ROUNDINGS
    yield not rounds, f"rounding={r.rounding!r} of {e}", "'rn', or of floats 'rz' or 'rnz'"
    yield r.flush and r.apply == "divide", "flush=True with apply='divide'", "apply='multiply'"
    yield (r.scale is None) != (rule is None), f"scale={r.scale} with block_rule={rule!r}", "both or neither"
    if r.scale is not None:
        scale = E8M0 if (rule or "").startswith("e8m0") else E4M3
        yield not is_same(r.scale, scale), f"scale={r.scale} with block_rule={rule!r}", f"scale={scale}"
        decodes = r.decode_rule.startswith("e8m0") == (scale is E8M0)
        yield not decodes, f"decode_rule={r.decode_rule!r} with scale={r.scale}", "a rule for such scales"
    if r.block_rows > 1:
        covers = r.scale is not None and r.tensor_scaling in ("none", "tensor")
        yield (
            not covers,
            f"blocks of {r.block_rows} rows with tensor_scaling={r.tensor_scaling!r}",
            "block scales under one tensor scale",
        )
    if r.fake_rule:
        yield from _limits_of_fake_rule(r, r.fake_rule)
    if r.four_over_six:
        yield from _limits_of_four_over_six(r)


def _has_kernels(e: ElementFormat) -> bool:
    if e.is_integer:
        return e.bits <= 8
    moderate = -WIDEST <= e.emin - e.mantissa_bits and e.emax <= WIDEST and e.bias >= 0
    return e.signed and e.has_zero and e.bits <= 8 and moderate


def _limits_of_fake_rule(r: Recipe, rule: str) -> Iterator[tuple[bool, str, str]]:
    is_nvfp4 = is_same(r.element, E2M1) and r.scale is not None and is_same(r.scale, E4M3)
    wrong = not is_nvfp4 if rule.startswith("nvfp4") else rule.startswith("int") != r.element.is_integer
    yield wrong, f"fake_rule={rule!r} of {r.element} with scale={r.scale}", "the formats that the rule is made for"
    both = r.static and r.tensor_scaling == "block"  # the kernel takes one amax for a block and for what its tensor scale covers
    yield both, f"fake_rule={rule!r} with static=True and tensor_scaling='block'", "one of the two"


def _limits_of_four_over_six(r: Recipe) -> Iterator[tuple[bool, str, str]]:
    yield not is_same(r.element, E2M1), f"4over6 of {r.element}", "E2M1"
    shape = f"4over6 of blocks of {r.block_size} columns"
    yield r.block_size != FOUR_OVER_SIX_COLUMNS, shape, f"{FOUR_OVER_SIX_COLUMNS}"
    plain = (r.rounding, r.apply, r.round_scaled, r.nan_is_max) == ("rn", "multiply", False, False)
    yield not plain, "4over6 with another rounding or scaling of elements", "rounding='rn', apply='multiply' and nothing else"
    yield r.tensor_scaling == "block", "4over6 with tensor_scaling='block'", "'tensor', 'row' or 'none'"
