"""Describe matrix units, and other orders of addition, by the data that decide the bits of fp4kit.matmul's result.

A *step* is what one instruction adds at once: D = C + sum over k of a_k * b_k. A Unit says how wide a step is and which
bits it keeps, for each kind of operands. Source: MMA-Sim (arXiv 2511.10909, package mmasim 2.1.1).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal, get_args

from fp4kit.arguments import explains_calls, explains_class, suggestion, title_of, with_article

Order = Literal["exact", "float64", "float32-blocks", "dequantized", "mlx-cpu", "ggml-avx2", "ggml-avx2-repacked"]
ORDERS: tuple[str, ...] = get_args(Order)
# The orders of engines on a CPU: A is an array, which the engine may quantize itself, and B is a Quantized.
ENGINE_ORDERS = ORDERS[4:]


@explains_class
@dataclass(frozen=True)
class DotAdd:
    """The arithmetic of one step (one instruction) of an NVIDIA matrix unit, which adds k products to a sum C.

    The terms of a step are C and the exact sums of groups of `group` products. All terms are aligned to the largest
    exponent among them, and each is truncated toward zero to fraction_bits fraction bits. Their sum is exact; it is
    normalized and truncated toward zero to output_bits fraction bits. Or, if output is "float16", it is rounded once to
    float16, to nearest even.

    Args:
        k: number of products per step.
        fraction_bits: the number of fraction bits kept for each term after alignment to the largest exponent, 1 to 40.
        output_bits: the number of fraction bits kept for the result, 1 to 23; 10 if output is "float16".
        zero_exponent: the exponent of a term that is zero. The largest exponent is never below it.
        group: number of products whose exact sum is one term. It is 1, or 4 or 16 for block-scaled FP4. k must be a
            multiple of group.
        output: the format of the sums, "float32" or "float16".

    Raises:
        TypeError: a field other than output is not an int.
        ValueError: a field is out of range, or k is not a multiple of group.
    """

    k: int
    fraction_bits: int
    output_bits: int
    zero_exponent: int
    group: int = 1
    output: Literal["float32", "float16"] = "float32"

    def __post_init__(self) -> None:
        limits = {
            "k": (1, 128),
            "fraction_bits": (1, 40),
            "output_bits": (1, 23),
            "zero_exponent": (-900, 0),
            "group": (1, 128),
        }
        _check_ints(self, limits)
        if self.k % self.group:
            raise ValueError(f"DotAdd: k is {self.k} and group {self.group}; needs k to be a multiple of group")
        if self.output not in ("float32", "float16") or (self.output == "float16" and self.output_bits != 10):
            raise ValueError(
                f"DotAdd: output is {self.output!r:.60} and output_bits {self.output_bits}; needs 'float32', or"
                " 'float16' with 10 output_bits"
            )


@explains_class
@dataclass(frozen=True)
class IntegerAdd:
    """The arithmetic of one step (one instruction) on 8-bit integers, which adds k exact products to an int32 C.

    Args:
        k: number of products per step.
        saturate: whether a sum outside of int32 becomes the nearest int32 after every step, as with the modifier
            .satfinite of PTX. If it is False, sums wrap around.

    Raises:
        TypeError: k is not an int, or saturate not a bool.
        ValueError: k is out of range.
    """

    k: int = 32
    saturate: bool = False

    def __post_init__(self) -> None:
        _check_ints(self, {"k": (1, 128)})
        if type(self.saturate) is not bool:
            raise TypeError(f"IntegerAdd: saturate is {self.saturate!r:.60}; needs a bool")


@explains_class
@dataclass(frozen=True)
class FloorDotAdd:
    """The arithmetic of one step (one instruction) of AMD's CDNA3 matrix unit, which adds k products to a sum C.

    The products are divided among `sums` partial sums: product i belongs to partial sum i % sums. "Rounded down" means
    toward minus infinity. One step does the following:

    - The products of a partial sum are aligned to their largest exponent, truncated toward zero to fraction_bits
      fraction bits, and added exactly.
    - If there are two partial sums, each is aligned to the larger of their two exponents and rounded down to
      fraction_bits fraction bits. The two are then added exactly.
    - This sum and C are aligned to the larger of their two exponents. The sum is rounded down to sum_bits + 1 fraction
      bits, and C to fraction_bits. The two are then added exactly.
    - The total is normalized, rounded down to sum_bits fraction bits, and rounded to float32, to nearest even.

    The exponent of a product is the sum of the exponents of its factors. The exponent of a partial sum is the largest
    exponent of its products, and that of the sum of two is the larger of theirs.

    Args:
        k: number of products per step.
        fraction_bits, sum_bits: see above, 1 to 40.
        sums: the number of partial sums, 1 or 2.
        c_vanishes: True if C counts as 0 where its exponent is more than fraction_bits + 1 below that of the sum.
        zero_exponent: the exponent of a product that is zero.

    Raises:
        TypeError: a field other than c_vanishes is not an int.
        ValueError: a field is out of range.
    """

    k: int
    fraction_bits: int
    sum_bits: int
    sums: int = 1
    c_vanishes: bool = False
    zero_exponent: int = -900

    def __post_init__(self) -> None:
        _check_ints(
            self,
            {"k": (1, 128), "fraction_bits": (1, 40), "sum_bits": (1, 40), "sums": (1, 2), "zero_exponent": (-900, 0)},
        )


def _check_ints(step: Any, limits: dict[str, tuple[int, int]]) -> None:
    """Raise an error unless the fields of a step named in `limits` are ints within these limits, both included.

    The error is TypeError for a field that is not an int, bools included, and ValueError for a field out of range.
    limits: {name of a field: (lowest, highest)}.
    """
    name = type(step).__name__
    for field, (low, high) in limits.items():
        value = getattr(step, field)
        if type(value) is not int:
            raise TypeError(f"{name}: {field} is {value!r:.60}; needs an int")
        if not low <= value <= high:
            raise ValueError(f"{name}: {field} is {value}; needs {low} to {high}")


@explains_class
@dataclass(frozen=True)
class Unit:
    """A matrix unit, described by one step per kind of operands; or an order of addition that no hardware uses.

    `dataclasses.replace` makes a variant: `replace(fp4kit.unit("sm90"), promote=128)` adds as cuBLASLt does with slow
    accumulation.

    Args:
        id: a nonempty name, such as "sm90".
        float16, bfloat16: the step (a DotAdd or FloorDotAdd) for two operands of that dtype. This and the other steps
            are None if the unit has no such instruction.
        tf32: the step for two float32 operands, whose low 13 bits are dropped first: the format TF32.
        fp8: the step for E4M3 and E5M2 operands without block scales, in any pair.
        fp8_fnuz: the step for AMD's E4M3FNUZ and E5M2FNUZ operands, in any pair.
        fp6_fp4: the step for pairs of E4M3, E5M2, E2M3, E3M2 and E2M1 without block scales, of which at least one has 6
            or 4 bits.
        mx: the step for pairs of these five formats with E8M0 scales of 32 elements.
        int8: the step for int8 and uint8 operands, in any pair, an IntegerAdd.
        fp4: the step for two E2M1 operands with E4M3 scales of 16 elements, or E8M0 scales of 16 or 32. If it is None,
            operands with E8M0 scales of 32 use `mx`.
        promote: None if one chain of steps covers all of K. Otherwise, each chain covers `promote` elements of K and
            starts from zero, and the results of chains are added in float32, rounded to nearest even. It is a multiple
            of each step's k.
        fp8_as: None, or "float16" if FP8 operands without block scales are converted to float16 and added by that step:
            of each 32 elements of K first those with k % 4 < 2, then the others, starting from zero. The sums of 32 are
            added to C in float32, rounded to nearest even. `fp8` is then None.
        order: None for a matrix unit. Otherwise the name of an order that fp4kit.matmul describes, such as "exact" or
            "mlx-cpu"; the other fields besides id and checked are then None.
        checked: what was compared with hardware; or "no" and, after a semicolon, what it was compared with instead. A
            variant of a unit in the table has "no" unless you state something, or what the unit's `checked` says of it.

    Raises:
        TypeError: a step has the wrong type, or id or checked is not a nonempty str.
        ValueError: the other fields have wrong values or do not fit together; the message says why.

    Examples:
        >>> import fp4kit
        >>> from dataclasses import replace
        >>> sm90 = fp4kit.unit("sm90")
        >>> sm90.fp8.k, sm90.fp8.fraction_bits, sm90.fp4
        (32, 13, None)
        >>> slow = replace(sm90, promote=128)
    """

    id: str
    float16: DotAdd | FloorDotAdd | None = None
    bfloat16: DotAdd | FloorDotAdd | None = None
    tf32: DotAdd | None = None
    fp8: DotAdd | FloorDotAdd | None = None
    fp8_fnuz: DotAdd | FloorDotAdd | None = None
    fp6_fp4: DotAdd | FloorDotAdd | None = None
    mx: DotAdd | None = None
    fp4: DotAdd | None = None
    int8: IntegerAdd | None = None
    promote: int | None = None
    fp8_as: Literal["float16"] | None = None
    order: Order | None = None
    checked: str = "no"

    def __repr__(self) -> str:
        """Return "Unit('id')", or for a variant of a listed unit, "Unit('id with field=value')"."""
        return f"Unit({self.title!r})"

    def __str__(self) -> str:
        """Return the title, what was compared with hardware, and the other fields, one per line."""
        facts = {name: getattr(self, name) for name in ("checked", "order", "promote", "fp8_as")} | self.steps()
        return "\n".join(
            [f"Unit {self.title}", *(f"  {name:10}{fact}" for name, fact in facts.items() if fact is not None)]
        )

    def __post_init__(self) -> None:
        for name in ("id", "checked"):
            if type(getattr(self, name)) is not str or not getattr(self, name):
                raise TypeError(f"Unit: {name} is {getattr(self, name)!r:.60}; needs a nonempty str")
        if self.order is not None:
            if self.order not in ORDERS:
                raise ValueError(
                    f"Unit {self.id}: order is {self.order!r:.60}; needs None or one of {', '.join(ORDERS)}"
                )
            if self.steps() or self.promote is not None or self.fp8_as is not None:
                raise ValueError(f"Unit {self.id}: it has an order, but also steps or promote; needs one of the two")
        elif not self.steps():
            raise ValueError(f"Unit {self.id}: it has no step and no order; needs one of the two")
        fits = self.fp8_as == "float16" and self.float16 is not None and 32 % getattr(self.float16, "k", 1) == 0
        if self.fp8_as is not None and (not fits or self.fp8 is not None or self.promote is not None):
            raise ValueError(
                f"Unit {self.id}: fp8_as is {self.fp8_as!r:.60}; needs None, or 'float16' with a step float16 whose k"
                " divides 32, and without fp8 and promote"
            )
        for kind, step in self.steps().items():
            self._check_step(kind, step)
        if self.checked in ("no", *(one.checked for one in UNITS.values())):
            object.__setattr__(self, "checked", self._evidence())

    def _check_step(self, kind: str, step: Any) -> None:
        """Raise an error unless the unit can have `step`, not None, for the kind of operands `kind`, one of KINDS.

        The error is TypeError if the step has another type than _STEP_TYPES says, and ValueError in these cases:

        - group is neither 4 nor 16 for "fp4", or not 1 for another kind
        - output is "float16" for a kind other than those of _HALF_SUMS
        - k is not a multiple of 32, for "mx" and "fp4"
        - promote is neither None nor a positive multiple of k
        """
        types = _STEP_TYPES.get(kind, (DotAdd, FloorDotAdd))
        if type(step) not in types:
            needed = " or ".join(with_article(one.__name__) for one in types)
            raise TypeError(f"Unit {self.id}: {kind} is {step!r:.60}; needs {needed}, or None")
        group = getattr(step, "group", 1)
        if kind == "fp4" and (group not in (4, 16) or step.k % 32):
            raise ValueError(
                f"Unit {self.id}: the step fp4 has k {step.k} and group {group}; needs k a multiple of 32, and group 4"
                " or 16"
            )
        if kind != "fp4" and group > 1:
            raise ValueError(f"Unit {self.id}: the step {kind} has group {group}; needs 1")
        if getattr(step, "output", "float32") == "float16" and kind not in _HALF_SUMS:
            raise ValueError(f"Unit {self.id}: the step {kind} has float16 sums; only {', '.join(_HALF_SUMS)} can")
        if kind == "mx" and step.k % 32:
            raise ValueError(f"Unit {self.id}: the step mx has k {step.k}; needs a multiple of 32")
        if self.promote is not None and (type(self.promote) is not int or self.promote < 1 or self.promote % step.k):
            raise ValueError(
                f"Unit {self.id}: promote is {self.promote!r:.60}; needs a positive multiple of {step.k}, the"
                f" k of {kind}"
            )

    def _evidence(self) -> str:
        """Return what the table says was checked of a unit with this id and arithmetic; "no" if it says nothing."""
        listed = UNITS.get(self.id)
        if listed is None:
            return "no"
        changed = {one.name for one in fields(self) if getattr(self, one.name) != getattr(listed, one.name)}
        is_stated = changed <= {"promote", "checked"} and f" promote={self.promote}" in listed.checked
        return listed.checked if changed <= {"checked"} or is_stated else "no"

    @property
    def title(self) -> str:
        """The id and, for a variant of a listed unit, the fields that it changes: "sm90 with promote=128"."""
        return title_of(self, UNITS.get(self.id), ("checked",))

    def steps(self) -> dict[str, Any]:
        """Return {kind of operands: step} for the steps that the unit has, in the order of KINDS.

        For a unit with an order instead of steps, the dict is empty.
        """
        return {kind: getattr(self, kind) for kind in KINDS if getattr(self, kind) is not None}


UNITS: dict[str, Unit] = {}  # {id: unit}: the table, which is filled below
KINDS = ("float16", "bfloat16", "tf32", "fp8", "fp8_fnuz", "fp6_fp4", "mx", "fp4", "int8")
_STEP_TYPES: dict[str, tuple[type, ...]] = {kind: (DotAdd,) for kind in ("tf32", "mx", "fp4")} | {"int8": (IntegerAdd,)}
_HALF_SUMS = ("float16", "fp8", "fp6_fp4")

_NO = "no; compared only with MMA-Sim, whose authors tested their model on this hardware"
_PUBLISHED = "published sums of mma.sync"  # MATLAB-tensor-core, TACO 10.1145/3830409
_DRAWN = "more than 10 million drawn chains of each mma.sync"  # tests/cuda/test_gpu_silicon.py
_HOPPER_16 = DotAdd(k=16, fraction_bits=25, output_bits=23, zero_exponent=-133)
_HOPPER_TF32 = replace(_HOPPER_16, k=8)
_AMPERE_16 = DotAdd(k=8, fraction_bits=24, output_bits=23, zero_exponent=-132)
_AMPERE_TF32 = replace(_AMPERE_16, k=4)
_ADA_8 = DotAdd(k=16, fraction_bits=13, output_bits=13, zero_exponent=-132)
_VOLTA_16 = DotAdd(k=4, fraction_bits=23, output_bits=23, zero_exponent=-131)
_BLACKWELL_8 = replace(_HOPPER_16, k=32)
_CDNA3_16 = FloorDotAdd(k=8, fraction_bits=24, sum_bits=31)
_CHECKED = {
    "mlx-cpu": "on an x86-64 CPU: mx.quantized_matmul of MLX 0.32.4",
    "ggml-avx2": "on an x86-64 CPU: vec_dot and ggml_mul_mat of llama.cpp (xllamacpp 2026.10.11549)",
    "ggml-avx2-repacked": "on an x86-64 CPU: ggml_mul_mat of llama.cpp (xllamacpp 2026.10.11549) with repacked weights",
}


def _half(step: DotAdd, zero_exponent: int) -> DotAdd:
    """Return a step with float16 sums. Its zero_exponent is MMA-Sim's: no recorded sum depends on it."""
    return replace(step, output_bits=10, zero_exponent=zero_exponent, output="float16")


UNITS.update(
    (unit.id, unit)
    for unit in (
        Unit(
            "sm100",
            float16=_HOPPER_16,
            bfloat16=_HOPPER_16,
            tf32=_HOPPER_TF32,
            fp8=_BLACKWELL_8,
            fp6_fp4=_BLACKWELL_8,
            mx=_BLACKWELL_8,
            fp4=DotAdd(k=64, fraction_bits=35, output_bits=23, zero_exponent=-139, group=16),
            int8=IntegerAdd(),
            checked=f"on a B200: 7,500 {_PUBLISHED} of float16, bfloat16 and TF32, and 72 published words of"
            " tcgen05.mma, of all formats; more of FP8, MX and FP4 only with MMA-Sim",
        ),
        Unit(
            "sm90",
            float16=_HOPPER_16,
            bfloat16=_HOPPER_16,
            tf32=_HOPPER_TF32,
            fp8=DotAdd(k=32, fraction_bits=13, output_bits=13, zero_exponent=-133),
            int8=IntegerAdd(),
            checked="on an H100: cuBLASLt's products of E4M3 with E4M3 and with E5M2 (fast accumulation, and slow"
            " accumulation as promote=128), of float16, bfloat16 and int8, and of TF32 as promote=32 or promote=64;"
            f" on an H200: {_DRAWN} of float16, bfloat16, TF32 and integers; on both 25,000 published sums of all but"
            " integers",
        ),
        *(
            Unit(
                f"{id}-mma",
                float16=_HOPPER_16,
                bfloat16=_HOPPER_16,
                tf32=_HOPPER_TF32,
                fp8_as="float16",
                int8=IntegerAdd(),
                checked=f"{checked} of E4M3 and E5M2",
            )
            for id, checked in (
                ("sm90", f"on an H200: {_DRAWN}"),
                ("sm100", f"on a B200: 5,000 {_PUBLISHED}"),
            )
        ),
        Unit(
            "sm89",
            float16=_AMPERE_16,
            bfloat16=_AMPERE_16,
            tf32=_AMPERE_TF32,
            fp8=_ADA_8,
            int8=IntegerAdd(),
            checked=f"on an L40S and an RTX Ada: 25,000 {_PUBLISHED} of float16, bfloat16, TF32, E4M3 and E5M2",
        ),
        Unit(
            "sm80",
            float16=_AMPERE_16,
            bfloat16=_AMPERE_16,
            tf32=_AMPERE_TF32,
            int8=IntegerAdd(),
            checked=f"on an A100 and an A2: 15,000 {_PUBLISHED} of float16, bfloat16 and TF32",
        ),
        Unit("sm75", float16=_AMPERE_16, checked=_NO),
        Unit("sm70", float16=_VOLTA_16, checked=f"on a V100: 2,500 {_PUBLISHED}"),
        # Sums in float16.
        Unit(
            "sm100-f16",
            float16=_half(_HOPPER_16, -21),
            fp8=_half(_BLACKWELL_8, -21),
            fp6_fp4=_half(_BLACKWELL_8, -21),
            checked="no; only NaN: two published words of tcgen05.mma on a B200",
        ),
        *(
            Unit(f"{id}-f16", float16=_half(_HOPPER_16, -21), fp8_as="float16", checked=checked)
            for id, checked in (
                ("sm90-mma", f"on an H200: {_DRAWN}; on it and an H100: 15,000 {_PUBLISHED}"),
                ("sm100-mma", f"on a B200: 7,500 {_PUBLISHED}"),
            )
        ),
        Unit(
            "sm89-f16",
            float16=_half(_AMPERE_16, -20),
            fp8=_half(_ADA_8, -20),
            checked=f"on an RTX Ada, and for float16 on an L40S: 10,000 {_PUBLISHED}",
        ),
        Unit("sm80-f16", float16=_half(_AMPERE_16, -20), checked=f"on an A100 and an A2: 5,000 {_PUBLISHED}"),
        Unit("sm70-f16", float16=_half(_VOLTA_16, -19), checked=f"on a V100: 2,500 {_PUBLISHED}"),
        Unit(
            "cdna3",
            float16=_CDNA3_16,
            bfloat16=_CDNA3_16,
            fp8_fnuz=FloorDotAdd(k=16, fraction_bits=24, sum_bits=31, sums=2, c_vanishes=True),
            checked=_NO,
        ),
        *(
            Unit(order, order=order, checked=_CHECKED.get(order, "no hardware adds in this order"))
            for order in get_args(Order)
        ),
    )
)


@explains_calls
def unit(id: str) -> Unit:
    """Return the Unit with the given id.

    Args:
        id: an id that fp4kit.units() lists, such as "sm100".

    Returns:
        The Unit.

    Raises:
        TypeError: id is not a str.
        ValueError: there is no such unit; the message names the nearest ones.

    Examples:
        >>> import fp4kit
        >>> fp4kit.unit("sm90").fp8
        DotAdd(k=32, fraction_bits=13, output_bits=13, zero_exponent=-133, group=1, output='float32')
    """
    return unit_of("unit", id)


# {how users may call a card or an architecture: the unit that models it}
_CARDS = {
    **dict.fromkeys(("v100", "volta"), "sm70"),
    **dict.fromkeys(("t4", "turing"), "sm75"),
    **dict.fromkeys(("a100", "a30", "ampere"), "sm80"),
    **dict.fromkeys(("l4", "l40", "l40s", "rtx4090", "ada"), "sm89"),
    **dict.fromkeys(("h100", "h200", "h800", "h20", "gh200", "hopper"), "sm90"),
    **dict.fromkeys(("b100", "b200", "gb200", "blackwell"), "sm100"),
    **dict.fromkeys(("mi300", "mi300a", "mi300x", "mi325x", "gfx942"), "cdna3"),
}
_SIGNS = str.maketrans("", "", "_- ")
_UNMODELED = ("sm103", "b300", "gb300", "sm120", "rtx5090", "rtxpro6000", "sm121", "gb10", "mi350", "mi355x", "gfx950")


def _unit_hint(given: str) -> str:
    """Return the end of the error for an id that no unit has: the unit of a card, or the nearest ids; "" for none."""
    plain = given.lower().translate(_SIGNS)
    if plain in _UNMODELED:
        return f"; no unit models {given}"
    known = {id.translate(_SIGNS): id for id in UNITS}
    if found := _CARDS.get(plain) or known.get(plain) or known.get(plain.removesuffix("a")):
        return f"; {found} models {given}" if plain in _CARDS else f"; did you mean {found}?"
    return suggestion(given, UNITS, 3)


def unit_of(op: str, given: Any) -> Unit:
    """Return the argument unit of a public function as a Unit. A Unit is returned unchanged, and an id is looked up.

    op: the public function that error messages name. given: the argument. Raise TypeError if it is neither a Unit nor a
    str, and ValueError if no unit has this id.
    """
    if type(given) is Unit:
        return given
    if type(given) is not str:
        raise TypeError(f"{op}: unit is {given!r:.60}; needs a Unit or an id, such as 'sm100'")
    if given not in UNITS:
        raise ValueError(f"{op}: unit is {given!r:.60}; needs one of {', '.join(UNITS)}{_unit_hint(given)}")
    return UNITS[given]


@lru_cache(256)
def to_spec(u: Unit) -> str:
    """Return a string from which from_spec makes an equal Unit.

    The string is the id if fp4kit.units() lists an equal unit under this id, otherwise one line of JSON with all
    fields. JAX's traced calls and contract files hold units as such strings.

    >>> from dataclasses import replace
    >>> slow = replace(UNITS["sm90"], promote=128)
    >>> to_spec(UNITS["sm90"]), from_spec(to_spec(slow)) == slow
    ('sm90', True)
    """
    return u.id if UNITS.get(u.id) == u else json.dumps(asdict(u), separators=(",", ":"))


@lru_cache(256)
def from_spec(spec: str) -> Unit:
    """Return the Unit that a string describes: a string made by to_spec, or the id of a unit that units() lists.

    Raise KeyError if no unit has the id. JSON must have been made by to_spec; a field that it lacks
    has its default.
    """
    if not spec.startswith("{"):
        return UNITS[spec]
    fields = json.loads(spec)
    for kind in KINDS:
        if step := fields.get(kind):
            fields[kind] = (FloorDotAdd if "sum_bits" in step else IntegerAdd if "saturate" in step else DotAdd)(**step)
    return Unit(**fields)


def units() -> tuple[Unit, ...]:
    """Return all Units that fp4kit.matmul accepts by id: first matrix units, then orders without hardware, then the
    orders of engines on a CPU.

    The field `checked` of a Unit says what was compared with hardware.

    Examples:
        >>> import fp4kit
        >>> [u.id for u in fp4kit.units()][:3]
        ['sm100', 'sm90', 'sm90-mma']
        >>> [u.id for u in fp4kit.units() if u.checked.startswith("on a B200")]
        ['sm100', 'sm100-mma', 'sm100-mma-f16']
        >>> fp4kit.unit("sm75").checked
        'no; compared only with MMA-Sim, whose authors tested their model on this hardware'
    """
    return tuple(UNITS.values())
