"""Plan quantization-aware training (QAT) whose trained values are the values that a converted checkpoint serves.

The plan chooses the weights and the groups that share an amax, by the rules of the converter. fp4kit.torch and
fp4kit.jax apply it.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from fp4kit.checkpoint.containers.table import Container
from fp4kit.checkpoint.model.weights import Weight, layer_names
from fp4kit.checkpoint.plan.request import Request, experts_only
from fp4kit.checkpoint.selection.names import adapter_tensor, partly_converted, shared_amax_groups, unwrapped
from fp4kit.checkpoint.selection.selection import (
    CONV1D,
    Candidate,
    Decision,
    Selector,
    Wishes,
    conv1d_wildcard,
    is_transposed,
    model_facts,
    no_multiple,
)
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.recipes.schema import as_stored
from fp4kit.storage.files import CheckpointError
from fp4kit.training.settings import are_words

ParameterKind = Literal["matrix", "stack", "convolution", "embedding", "conv1d"]
ServedDtype = Literal["float32", "float16", "bfloat16"]
_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_UNNAMED = "not in parameters="
_PRESET = " (preset linear)"


@dataclass(frozen=True)
class TrainedWeight:
    """A parameter of a model in training.

    Attributes:
        name: the name of the parameter in the model.
        saved: the name of its tensor in a checkpoint.
        shape: (N, K) for a matrix, or (E, N, K) for a stack of experts, whatever the order of axes in the model. For a
            convolution, (filters, elements per filter). All other parameters, such as biases, keep their shape.
        dtype: the name of the dtype, such as "float32".
        kind: "stack" for a stack of experts, "convolution" for the weight of a convolution, "embedding" for the weight
            of an embedding, "conv1d" for the weight of Conv1D of transformers, and "matrix" for every other parameter,
            also for a bias.
    """

    name: str
    saved: str
    shape: tuple[int, ...]
    dtype: str
    kind: ParameterKind = "matrix"


@dataclass(frozen=True)
class QatChoice:
    """The user's choices for a plan: the recipe, and which parameters to quantize.

    Attributes:
        recipe: the recipe by which codes and scales are computed.
        format: the output format of `fp4kit convert` in which the model will be served; None for the format that
            convert would choose.
        parameters: wildcards of parameter names. Other parameters stay unquantized.
        exclude: wildcards of parameters that stay unquantized.
        include: wildcards of parameters that are quantized although the converter leaves them unquantized.
        config: the content of the model's config.json; None if the model has no config.
        served_dtype: the dtype to which loaders decode the weights; None for that of each parameter.
    """

    recipe: Recipe
    format: str | None = None
    parameters: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    served_dtype: str | None = None

    @classmethod
    def of(
        cls, op: str, recipe: str | Recipe, format: str | None, config: Any, served_dtype: Any, **patterns: Any
    ) -> QatChoice:
        """Check the arguments of fp4kit.torch.fake_quantize_model, and return them as a QatChoice."""
        found = recipe_of(op, recipe)
        for name, given in patterns.items():
            if not are_words(given):
                raise TypeError(f"{op}: {name} is {given!r:.60}; needs a tuple of wildcards, such as ('*.mlp.*',)")
        if config is not None and not isinstance(config, Mapping):
            raise TypeError(f"{op}: config is {type(config).__name__}; needs a dict, the content of config.json")
        dtype = None if served_dtype is None else str(getattr(served_dtype, "__name__", served_dtype))
        if dtype is not None and (dtype := dtype.removeprefix("torch.")) not in _SAFETENSORS:
            raise ValueError(f"{op}: served_dtype is {served_dtype!r:.60}; needs one of {', '.join(_SAFETENSORS)}")
        given = {name: tuple(given) for name, given in patterns.items()}
        return cls(found, format, config=config, served_dtype=dtype, **given)


@dataclass(frozen=True)
class ParameterPlan:
    """The decision on one parameter: whether it is fake-quantized, and why.

    Attributes:
        name: the name of the parameter.
        shape: its shape, as in TrainedWeight.
        quantized: True if the parameter is fake-quantized.
        reason: why the parameter is quantized or not, in words for the user.
        group: the name of the fused layers with which it shares a tensor amax; "" if it shares none.
    """

    name: str
    shape: tuple[int, ...]
    quantized: bool
    reason: str
    group: str = ""


@dataclass(frozen=True)
class QatPlan:
    """A plan: which parameters of a model are fake-quantized, and for which served format.

    Attributes:
        recipe: the recipe to pass to fake_quantize, which then returns the values that are served.
        format: the format of `fp4kit convert` for which the values hold; "" if no format stores the recipe.
        rows: one ParameterPlan per parameter of the model.
        shares: True if every parameter of a group needs the largest amax of the group.
        note: why there is no format; "" if there is one.
        served_dtype: the dtype to which the values are rounded; None for that of each parameter.
        warns_of_float32: True if values of float32 parameters are trained, which loaders round to 16 bits.
    """

    recipe: Recipe
    format: str
    rows: tuple[ParameterPlan, ...]
    shares: bool
    note: str = field(default="", repr=False)
    served_dtype: str | None = None
    warns_of_float32: bool = False

    @property
    def names(self) -> list[str]:
        """The names of the parameters to fake-quantize."""
        return [row.name for row in self.rows if row.quantized]

    def members(self, name: str) -> list[str]:
        """Return the names of the parameters that share a tensor amax with the fake-quantized parameter `name`."""
        # The plan must have a parameter of this name.
        group = next(row.group for row in self.rows if row.name == name)
        return [row.name for row in self.rows if group and row.group == group] or [name]


def make_plan(op: str, weights: Sequence[TrainedWeight], choice: QatChoice) -> QatPlan:
    """Return the plan for the parameters of a model, with one row per parameter in the order of ``weights``."""
    _check_patterns(op, [weight.name for weight in weights], choice)
    form, note = _form_for(choice)
    stored = choice.recipe if form is None else as_stored(choice.recipe, form.divides)
    decisions = {weight.name: decision for weight, decision in _decisions(op, weights, choice, form)}
    selected = [weight for weight in weights if decisions[weight.name].converted]
    if not selected:
        way_out = "pass include=, or correct the wildcards"
        if "weight" in decisions:  # only weights of named layers are selected by default
            way_out = "'weight' belongs to no named layer; pass include=('weight',)"
        # Parameters that `parameters` does not match come last, because that reason is the least informative.
        ordered = sorted(decisions.items(), key=lambda item: item[1].reason.startswith(_UNNAMED))
        reasons = "; ".join(f"{name} ({decision.reason})" for name, decision in ordered[:3])
        raise ValueError(f"{op}: no parameter is left to quantize: {reasons}; {way_out}")
    for weight in selected:
        _check_stack(op, weight, choice, form)
        _check_served_dtype(op, weight, choice)
    shares = form.has_tensor_scale if form is not None else choice.recipe.tensor_scaling == "tensor"
    groups = shared_amax_groups(map(layer_of, selected)) if shares else {}
    _warn_of_halves(op, weights, selected)
    rows = []
    for w in weights:
        d = decisions[w.name]
        group = groups.get(layer_of(w), "") if d.converted else ""
        rows.append(ParameterPlan(w.name, w.shape, d.converted, d.reason.removesuffix(_PRESET), group))
    rounded = form is not None and choice.served_dtype is None and any(w.dtype == "float32" for w in selected)
    return QatPlan(stored, "" if form is None else form.format, tuple(rows), shares, note, choice.served_dtype, rounded)


def layer_of(weight: TrainedWeight) -> str:
    """Return the name of the layer that a parameter belongs to, as the converter names it."""
    return unwrapped(weight.saved).removesuffix(".weight")


def _form_for(choice: QatChoice) -> tuple[Container | None, str]:
    """Return (container, ""), with the container in which `fp4kit convert` would store the trained model."""
    try:
        return Request(choice.recipe, choice.format).form_for(choice.config or {}), ""
    except CheckpointError as error:
        if choice.format is not None:
            raise
        return None, str(error)


def _decisions(
    op: str, weights: Sequence[TrainedWeight], choice: QatChoice, form: Container | None
) -> Iterable[tuple[TrainedWeight, Decision]]:
    """Yield each parameter with the decision whether it is quantized: the user's, otherwise the converter's."""
    multiple = choice.recipe.length_multiple if form is None else form.row_multiple
    facts = model_facts(choice.config or {})
    selector = Selector(Wishes(preset="experts" if experts_only(form) else "linear"), multiple)
    for weight in weights:
        name, dtype = unwrapped(weight.saved), _SAFETENSORS.get(weight.dtype, weight.dtype)
        decision = selector.decide(Candidate(name, layer_of(weight), dtype, weight.shape, facts))
        is_conv1d = is_transposed(decision.reason) or weight.kind == "conv1d"
        if any(fnmatchcase(weight.name, pattern) for pattern in choice.include):
            if is_conv1d:
                raise ValueError(f"{op}: include= names {weight.name}, which {_no_conv1d(weight)}")
            _check_included(op, weight, multiple)
            yield weight, Decision(True, "include")
            continue
        pattern = next((p for p in choice.exclude if fnmatchcase(weight.name, p)), None)
        if pattern is not None:
            yield weight, Decision(False, f"exclude {pattern!r}")
        elif not any(fnmatchcase(weight.name, p) for p in choice.parameters):
            yield weight, Decision(False, f"{_UNNAMED}{choice.parameters!r}")
        elif weight.kind == "convolution" and choice.config is not None:
            yield weight, Decision(False, "convolution, which fp4kit convert leaves unquantized")
        else:
            if is_conv1d:
                raise ValueError(f"{op}: {weight.name} {_no_conv1d(weight)}")
            if decision.converted and weight.dtype not in _SAFETENSORS:
                decision = replace(decision, converted=False, reason=f"dtype {weight.dtype}")
            if decision.converted and weight.kind == "embedding":
                why = f"embedding; fp4kit convert needs --keep {layer_of(weight)!r}"
                decision = replace(decision, converted=False, reason=why)
            if decision.converted and weight.kind == "convolution":
                decision = replace(decision, reason="convolution; fp4kit convert leaves it unquantized")
            yield weight, decision


def _no_conv1d(weight: TrainedWeight) -> str:
    """Return text for an error message about the weight of Conv1D of transformers, as in GPT-2."""
    leaf = conv1d_wildcard(layer_of(weight).rpartition(".")[2]).removesuffix("*") + "*"
    return f"is stored transposed; {CONV1D}; to leave it unquantized, pass exclude=('*.{leaf}',)"


def _check_included(op: str, weight: TrainedWeight, multiple: int) -> None:
    """Raise ValueError if a parameter that the user includes cannot be quantized."""
    adapter = adapter_tensor(weight.saved)
    if adapter is not None:
        raise ValueError(
            f"{op}: include= names {weight.name}, a tensor of an adapter ({adapter.kind}), which is never quantized;"
            " correct the wildcard"
        )
    if len(weight.shape) < 2:
        raise ValueError(f"{op}: include= names {weight.name}, which has shape {weight.shape}; needs two dimensions")
    if weight.shape[-1] % multiple:
        raise ValueError(f"{op}: include= names {weight.name}, whose {no_multiple(weight.shape, multiple)}")


def _check_stack(op: str, weight: TrainedWeight, choice: QatChoice, form: Container | None) -> None:
    """Raise an error if fake quantization of a stack of experts cannot give the values that the converter stores."""
    if weight.kind != "stack" or form is None:
        return
    matrix = Weight(layer_of(weight), weight.saved, weight.shape, None, {})
    parts = len(layer_names(matrix, form, choice.config or {})) // weight.shape[0]
    if parts > 1 and weight.shape[1] // parts % choice.recipe.block_rows:
        raise ValueError(
            f"{op}: {weight.name} holds gate and up of {weight.shape[1] // parts} rows each, and blocks of"
            f" {choice.recipe.id} have {choice.recipe.block_rows} rows; use a recipe with blocks of one row"
        )


def _check_served_dtype(op: str, weight: TrainedWeight, choice: QatChoice) -> None:
    """Raise ValueError if the dtype of a parameter cannot hold all values of the dtype to which loaders decode."""
    if choice.served_dtype not in (None, weight.dtype) and weight.dtype != "float32":
        raise ValueError(
            f"{op}: {weight.name} is {weight.dtype}, which cannot hold values of served_dtype={choice.served_dtype!r};"
            f" train it in float32 or {choice.served_dtype}, or pass served_dtype={weight.dtype!r}"
        )


def _check_patterns(op: str, names: Sequence[str], choice: QatChoice) -> None:
    """Raise ValueError if a wildcard of the user's choice matches no parameter."""
    for argument in ("parameters", "exclude", "include"):
        for pattern in getattr(choice, argument):
            if not any(fnmatchcase(name, pattern) for name in names):
                near = similar(names, [pattern])
                raise ValueError(f"{op}: {argument}={pattern!r} matches no parameter; {near}; correct the wildcard")


def similar(names: Sequence[str], patterns: Iterable[str]) -> str:
    """Return text for an error message: up to three parameter names, those most similar to the wildcards first."""
    near = [name for pattern in patterns for name in difflib.get_close_matches(pattern, names, n=3, cutoff=0)]
    shown = list(dict.fromkeys([*near, *names]))[:3]
    return f"its parameters are {', '.join(map(repr, shown))}" + (", ..." if len(names) > len(shown) else "")


def _warn_of_halves(op: str, weights: Sequence[TrainedWeight], selected: Sequence[TrainedWeight]) -> None:
    """Warn about every fused layer of which some parameters are quantized and others are not."""
    matrices = [
        weight
        for weight in weights
        if weight.kind in ("matrix", "stack") and len(weight.shape) > 1 and adapter_tensor(weight.saved) is None
    ]
    kept = [layer_of(weight) for weight in matrices if weight not in selected]
    for line in partly_converted(kept, {layer_of(weight) for weight in selected}):
        warnings.warn(f"{op}: {line}", stacklevel=4)


_FLOAT32 = 'note: in float32; loaders usually decode to bfloat16; served_dtype="bfloat16" trains with these values'
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class QuantizedNames(list[str]):
    """The names of the parameters that are fake-quantized. print() shows a table of all parameters.

    Attributes:
        plan: the plan, with one row per parameter.
        inputs: the names of the layers whose inputs are fake-quantized.
    """

    def __init__(self, plan: QatPlan, inputs: tuple[str, ...] = ()) -> None:
        super().__init__(plan.names)
        self.plan, self.inputs = plan, inputs

    def __str__(self) -> str:
        """Return the table as text."""
        return table_of(self.plan)


def table_of(plan: QatPlan) -> str:
    """Return a table of all parameters as text: what is fake-quantized, what is not, and why."""
    served = f"values as served from --format {plan.format}" if plan.format else f"no checkpoint: {plan.note}"
    if plan.served_dtype is not None:
        served += f", decoded to {plan.served_dtype}"
    head = f"{len(plan.names)} of {len(plan.rows)} parameters fake-quantized by {plan.recipe.id}; {served}"
    lines = Counter[tuple[str, ...]]()  # parameters that differ in their numbers only share a line
    for row in sorted(plan.rows, key=lambda row: not row.quantized):
        shared = f"; shares the amax of {_NUMBER.sub('*', row.group)}" if row.group else ""
        shape = " x ".join(map(str, row.shape)) or "1"
        lines["yes" if row.quantized else "no", _NUMBER.sub("*", row.name), shape, f"{row.reason}{shared}"] += 1
    cells: list[tuple[str, ...]] = [("", "count", "parameter", "shape", "reason")]
    cells += [(line[0], str(count), *line[1:]) for line, count in lines.items()]
    widths = [*(max(len(line[i]) for line in cells) for i in range(4)), 0]
    text = [" ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
    return "\n".join([head, *text, *[_FLOAT32] * plan.warns_of_float32])
