"""Plan quantization-aware training (QAT) whose trained values are the values that a converted checkpoint serves.

The plan chooses the weights and the groups that share an amax, by the rules of the converter. fp4kit.torch and
fp4kit.jax apply it.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from fp4kit.arguments import in_python, warn
from fp4kit.checkpoint.containers.table import Container
from fp4kit.checkpoint.loaders.requirements import fault_of
from fp4kit.checkpoint.model.weights import Weight, layer_names
from fp4kit.checkpoint.plan.layer_recipes import experts_only
from fp4kit.checkpoint.plan.request import Request
from fp4kit.checkpoint.selection import selection
from fp4kit.checkpoint.selection.names import adapter_tensor, partly_converted, shared_amax_groups, unwrapped
from fp4kit.contract.engine_table import TORCH
from fp4kit.contract.engines import FUSED, Serving, serving_of
from fp4kit.contract.schema import SETTINGS, Contract
from fp4kit.contract.sides import NO_CONTRACT
from fp4kit.recipes import Recipe, name_for_inputs, recipe_of, rules
from fp4kit.recipes.schema import as_stored, decoding
from fp4kit.storage.files import CheckpointError, listed, similar_glob
from fp4kit.training.settings import are_words

ParameterKind = Literal["matrix", "stack", "convolution", "embedding", "conv1d"]
_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_UNNAMED = "not in parameters="
_PRESET = " (preset linear)"
_BARE = "its layer is the whole model and has no name"
_TRANSPOSED = f"is stored transposed; {selection.CONV1D}"


@dataclass(frozen=True)
class TrainedWeight:
    """A parameter of a model in training and, in a plan, the decision on it.

    Attributes:
        name: the name of the parameter in the model.
        saved: the name of its tensor in a checkpoint.
        shape: (N, K) for a matrix, or (E, N, K) for a stack of experts, whatever the order of axes in the model. For a
            convolution, (filters, elements per filter). All other parameters, such as biases, keep their shape.
        dtype: the name of the dtype, such as "float32".
        kind: "stack" for a stack of experts, "convolution" for the weight of a convolution, "embedding" for the weight
            of an embedding, "conv1d" for the weight of Conv1D of transformers, and "matrix" for every other parameter,
            also for a bias.
        axis: the axis in the model along which blocks run, from the end: -1, or -2 for (K, N) and (E, K, N).
        module, leaf: the module that holds the parameter, and its name there; None and "" for JAX.
        quantized: True if the parameter is fake-quantized.
        reason: why the parameter is quantized or not, in words for the user.
        group: the name of the fused layers with which it shares a tensor amax; "" if it shares none.
    """

    name: str
    saved: str
    shape: tuple[int, ...]
    dtype: str
    kind: ParameterKind = "matrix"
    axis: int = -1
    module: Any = field(default=None, repr=False)
    leaf: str = ""
    quantized: bool = False
    reason: str = ""
    group: str = ""

    @property
    def layer(self) -> str:
        """The name of the layer that the parameter belongs to, as the converter names it."""
        return unwrapped(self.saved).removesuffix(".weight")


@dataclass(frozen=True)
class QatChoice:
    """The user's choices for a plan: the recipe, and which parameters to quantize.

    Attributes:
        op: the function that the user called, with which messages begin.
        recipe: the recipe by which codes and scales are computed.
        format: the output format of `fp4kit convert` in which the model will be served; None for the format that
            convert would choose.
        config: the content of the model's config.json; None if the model has no config.
        served_dtype: the dtype to which loaders decode the weights; None for that of each parameter.
        parameters: wildcards of parameter names. Other parameters stay unquantized.
        exclude: wildcards of parameters that stay unquantized.
        include: wildcards of parameters that are quantized although the converter leaves them unquantized.
        serving: the record of the engine that will serve the model; None if the user names no engine.
    """

    op: str
    recipe: Recipe
    format: str | None
    config: Mapping[str, Any] | None
    served_dtype: str | None
    parameters: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    serving: Serving | None = None

    @property
    def names_format(self) -> bool:
        """True if the user names the engine or the format in which the model will be served."""
        return self.format is not None or self.serving is not None

    @classmethod
    def of_engine(cls, op: str, row: Serving, config: Any, **patterns: Any) -> QatChoice:
        """Check the arguments of fp4kit.torch.fake_quantize_model with an engine, and return them as a QatChoice."""
        return replace(cls.of(op, row.loaded, row.format, config, row.served_dtype, **patterns), serving=row)

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
        wildcards: dict[str, Any] = {name: tuple(given) for name, given in patterns.items()}
        return cls(op, found, format, config, dtype, **wildcards)


def engine_of(op: str, engine: Any, scheme: Any, route: Any, inputs: Any, given: Mapping[str, Any]) -> Serving:
    """Return the record for the arguments engine, scheme and route of fake_quantize_model.

    inputs: the argument of this name. given: the arguments that the record replaces, of which only format may be given.
    """
    if engine is None:
        raise TypeError(f"{op}: scheme, route or inputs is given without an engine; pass engine='transformers' too")
    wrong = [name for name, value in given.items() if value is not None and name != "format"]
    if wrong:
        raise TypeError(f"{op}: {', '.join(wrong)} cannot be given with an engine, which determines it; leave it out")
    row = serving_of(op, engine, scheme, route, given["format"])
    if (inputs is None) == (row.input_scales == "static"):
        passed = "{layer: its largest input}, in PyTorch also a Collector of fp4kit.torch.collect"
        why = f"{row} reads stored input scales; pass inputs={passed}"
        why = why if inputs is None else f"{row} stores no input scales; leave inputs out"
        raise ValueError(f"{op}: {why}")
    return row


@dataclass(frozen=True)
class QatPlan:
    """A plan: which parameters of a model are fake-quantized, and for which served format.

    Attributes:
        recipe: the recipe to pass to fake_quantize, which then returns the values that are served.
        format: the format of `fp4kit convert` for which the values hold; "" if no format stores the recipe.
        rows: the parameters of the model, with their decisions.
        shares: True if every parameter of a group needs the largest amax of the group.
        note: why there is no format; "" if there is one.
        served_dtype: the dtype to which the values are rounded; None for that of each parameter.
        warns_of_float32: True if values of float32 parameters are trained, which loaders round to 16 bits.
        of_stacks: the recipe of stacks of experts, if an engine decodes them by another rule; otherwise None.
        serving: the record of the engine that will serve the model; None if the user names no engine.
        contract: the settings of the weights, for fp4kit.parity.
    """

    recipe: Recipe
    format: str
    rows: tuple[TrainedWeight, ...]
    shares: bool
    note: str = field(default="", repr=False)
    served_dtype: str | None = None
    warns_of_float32: bool = False
    of_stacks: Recipe | None = None
    serving: Serving | None = field(default=None, repr=False)
    contract: Contract = field(default=NO_CONTRACT, repr=False)

    @property
    def selected(self) -> list[TrainedWeight]:
        """The parameters to fake-quantize."""
        return [row for row in self.rows if row.quantized]

    @property
    def names(self) -> list[str]:
        """The names of the parameters to fake-quantize."""
        return [row.name for row in self.selected]

    def recipe_of(self, row: TrainedWeight) -> Recipe:
        """Return the recipe that gives the served values of a parameter."""
        return self.recipe if self.of_stacks is None or row.kind != "stack" else self.of_stacks

    def members(self, row: TrainedWeight) -> list[TrainedWeight]:
        """Return the parameters that share a tensor amax with a fake-quantized one, itself included."""
        return [one for one in self.rows if row.group and one.group == row.group] or [row]


def make_plan(choice: QatChoice, weights: Sequence[TrainedWeight]) -> QatPlan:
    """Return the plan for the parameters of a model, in the order of ``weights``."""
    _check_patterns(choice, [weight.name for weight in weights])
    form, note = _form_for(choice)
    rows = list(_decided(choice, weights, form))
    selected = [row for row in rows if row.quantized]
    for row in (row for row in rows if row.reason == _TRANSPOSED):
        leaf = selection.conv1d_wildcard(row.layer.rpartition(".")[2]).removesuffix("*")
        way_out = f"to leave it unquantized, pass exclude=('*.{leaf}*',)" if selected else selection.NO_OTHER_LAYER
        raise ValueError(f"{choice.op}: {row.name} {_TRANSPOSED}; {way_out}")
    if not selected:
        way_out = "pass include=, or correct the wildcards"
        if bare := [row for row in rows if row.reason == _BARE]:  # fp4kit convert quantizes only layers with names
            within = "{'layer': params}" if bare[0].module is None else "torch.nn.Sequential(layer)"
            way_out = f"pass a model with the layer in it, such as {within}, or include=({bare[0].name!r},)"
        elif any(row.reason.startswith("dtype ") for row in rows):
            way_out = "convert the weights, and inputs that activations quantizes, to float32, float16 or bfloat16"
        elif any("is not a multiple of" in row.reason for row in rows):
            way_out = "pad the weights, or use a recipe whose blocks fit"
        # Parameters that `parameters` does not match come last, because that reason is the least informative.
        ordered = sorted(rows, key=lambda row: row.reason.startswith(_UNNAMED))
        reasons = "; ".join(f"{row.name} ({row.reason})" for row in ordered[:3])
        raise ValueError(f"{choice.op}: no parameter is left to quantize: {reasons}; {way_out}")
    for fault in (fault for row in selected for fault in _faults(choice, row, form)):
        if fault:
            raise ValueError(f"{choice.op}: {fault}")
    layers = [row.layer for row in selected]
    if choice.serving and choice.config and (fault := fault_of(choice.serving, choice.config, layers)):
        raise ValueError(f"{choice.op}: {fault}, exclude= these layers, or recipe= and format= in place of engine=")
    shares = form.has_tensor_scale if form is not None else choice.recipe.tensor_scaling == "tensor"
    shares = shares if choice.serving is None else choice.serving.shares_amax
    groups = shared_amax_groups(row.layer for row in selected) if shares else {}
    _warn_of_halves(choice.op, rows)
    if choice.names_format and (wrong := [row.name for row in selected if row.kind == "convolution"]):
        text = "fp4kit convert leaves convolutions unquantized, so the served values differ from the trained ones"
        warn(f"{choice.op}: {listed(wrong)}: {text}; leave them out of parameters= and include=")
    rows = [
        replace(row, reason=row.reason.removesuffix(_PRESET), group=groups.get(row.layer, "") if row.quantized else "")
        for row in rows
    ]
    rounded = form is not None and choice.served_dtype is None and any(row.dtype == "float32" for row in selected)
    stored, format = (choice.recipe, "") if form is None else (as_stored(choice.recipe, form.divides), form.format)
    if rules.DECODE_RULES[stored.decode_rule].loader and choice.served_dtype is not None:
        stored = decoding(stored, choice.served_dtype)
    of_stacks = None  # transformers decodes experts with the stored scales, whatever it does with linear layers
    if choice.serving is not None and choice.serving.decode_rule and form is not None:
        of_stacks = as_stored(choice.serving.weights, form.divides)
    if choice.serving is not None and choice.serving.quantizes_within:
        warn(f"{choice.op}: {_not_emulated(choice.serving)}")
    contract = _contract(choice, form, shares)
    return QatPlan(
        stored, format, tuple(rows), shares, note, choice.served_dtype, rounded, of_stacks, choice.serving, contract
    )


def _contract(choice: QatChoice, form: Container | None, shares: bool) -> Contract:
    """Return the settings of a model with fake-quantized weights. Its trainer multiplies by no unit of an engine."""
    if choice.serving is not None:
        found = choice.serving.contract
        return found if found.unit is None else replace(found, unit=None, unknown=(*found.unknown, "unit"))
    named = {"served_dtype": choice.served_dtype, "container": str(form) if choice.format and form else None}
    stated: dict[str, Any] = {name: value for name, value in named.items() if value}
    of_weights = ("weights", "patterns", "shared_amax", "hadamard", "hadamard_signs", "scale_search", *stated)
    unknown = tuple(name for name in SETTINGS if name not in of_weights)
    return Contract(choice.recipe, shared_amax=FUSED if shares else (), unknown=unknown, **stated)


def _form_for(choice: QatChoice) -> tuple[Container | None, str]:
    """Return (container, ""), with the container in which `fp4kit convert` would store the trained model."""
    if choice.serving is not None and not choice.serving.container:
        return None, f"{choice.serving.engine} quantizes the weights itself"
    try:
        return Request(choice.recipe, choice.format).form_for(choice.config or {}), ""
    except CheckpointError as error:
        if choice.format is not None:
            raise CheckpointError(f"{choice.op}: {error}") from None
        return None, in_python(str(error), ("format", "exclude"))


def _decided(choice: QatChoice, weights: Sequence[TrainedWeight], form: Container | None) -> Iterator[TrainedWeight]:
    """Yield each parameter with the decision whether it is quantized: the user's, otherwise the converter's."""
    multiple = choice.recipe.length_multiple if form is None else form.row_multiple
    facts = selection.model_facts(choice.config or {})
    selector = selection.Selector(selection.Wishes(preset="experts" if experts_only(form) else "linear"), multiple)
    is_served = choice.config is not None or choice.names_format
    for weight in weights:
        name, dtype = unwrapped(weight.saved), _SAFETENSORS.get(weight.dtype, weight.dtype)
        decision = selector.decide(selection.Candidate(name, weight.layer, dtype, weight.shape, facts))
        is_conv1d = selection.is_transposed(decision.reason) or weight.kind == "conv1d"
        if any(fnmatchcase(weight.name, pattern) for pattern in choice.include):
            for fault in _include_faults(weight, multiple, is_conv1d):
                if fault:
                    raise ValueError(f"{choice.op}: include= names {weight.name}, {fault}")
            yield replace(weight, quantized=True, reason="include")
            continue
        pattern = next((p for p in choice.exclude if fnmatchcase(weight.name, p)), None)
        quantized, reason = False, _of_module(weight, decision.reason)
        if pattern is not None:
            reason = f"exclude {pattern!r}"
        elif not any(fnmatchcase(weight.name, p) for p in choice.parameters):
            reason = f"{_UNNAMED}{choice.parameters!r}"
        elif weight.kind == "convolution" and is_served and weight.name not in choice.parameters:
            reason = "convolution, which fp4kit convert leaves unquantized"
        elif is_conv1d:
            reason = _TRANSPOSED
        elif decision.converted and weight.dtype not in _SAFETENSORS:
            reason = f"dtype {weight.dtype}"
        elif decision.converted and weight.kind == "embedding":
            reason = f"embedding; fp4kit convert needs --keep {weight.layer!r}"
        elif decision.converted:
            quantized = True
            if weight.kind == "convolution":
                reason = "convolution; fp4kit convert leaves it unquantized"
        yield replace(weight, quantized=quantized, reason=reason)


def _of_module(weight: TrainedWeight, reason: str) -> str:
    """Return the reason for a parameter. A matrix that is no layer's .weight gets one that names its PyTorch module."""
    if reason == selection.NOT_A_WEIGHT and weight.layer in ("", "weight") and len(weight.shape) > 1:
        return _BARE
    is_matrix = len(weight.shape) > 1 and "float" in weight.dtype and weight.leaf not in ("weight", "bias")
    if reason != selection.NOT_A_WEIGHT or not is_matrix or weight.module is None:
        return reason
    kind = next(one for one in type(weight.module).mro() if not one.__name__.startswith("Parametrized"))
    name = f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else kind.__name__
    what = "packed q/k/v" if weight.leaf == "in_proj_weight" else "weight" if "weight" in weight.leaf else "parameter"
    return f"{what} of {name}: not supported"


def _include_faults(weight: TrainedWeight, multiple: int, is_conv1d: bool) -> Iterator[str | bool]:
    """Yield a text per reason why a parameter that the user includes cannot be quantized, and False otherwise."""
    yield is_conv1d and f"which {_TRANSPOSED}; correct the wildcard"
    adapter = adapter_tensor(weight.saved)
    if adapter is not None:
        yield f"a tensor of an adapter ({adapter.kind}), which is never quantized; correct the wildcard"
    yield len(weight.shape) < 2 and f"which has shape {weight.shape}; needs two dimensions"
    yield weight.shape[-1] % multiple > 0 and f"whose {selection.no_multiple(weight.shape, multiple)}"


def _faults(choice: QatChoice, weight: TrainedWeight, form: Container | None) -> Iterator[str | bool]:
    """Yield a text per reason why fake quantization cannot give the values that are served, and False otherwise."""
    if weight.kind == "stack" and form is not None:
        matrix = Weight(weight.layer, weight.saved, weight.shape, None, {})
        parts = len(layer_names(matrix, form, choice.config or {})) // weight.shape[0]
        yield (
            parts > 1
            and weight.shape[1] // parts % choice.recipe.block_rows > 0
            and (
                f"{weight.name} holds gate and up of {weight.shape[1] // parts} rows each, and blocks of"
                f" {choice.recipe.id} have {choice.recipe.block_rows} rows; use a recipe with blocks of one row"
            )
        )
    yield (
        choice.served_dtype not in (None, weight.dtype)
        and weight.dtype != "float32"
        and (
            f"{weight.name} is {weight.dtype}, which cannot hold values of served_dtype={choice.served_dtype!r};"
            f" train it in float32 or {choice.served_dtype}, or pass served_dtype={weight.dtype!r}"
        )
    )


def _check_patterns(choice: QatChoice, names: Sequence[str]) -> None:
    """Raise ValueError if a wildcard of the user's choice matches no parameter."""
    for argument in ("parameters", "exclude", "include"):
        for pattern in getattr(choice, argument):
            if not any(fnmatchcase(name, pattern) for name in names):
                near = similar(names, [pattern])
                raise ValueError(f"{choice.op}: {argument}={pattern!r} matches no parameter; {near}")


def similar(names: Sequence[str], patterns: Sequence[str]) -> str:
    """Return text for an error message: a similar wildcard, and up to three parameter names, the most similar first."""
    if not names:
        return "the model has no parameters"
    near = [name for pattern in patterns for name in difflib.get_close_matches(pattern, names, n=3, cutoff=0)]
    shown = list(dict.fromkeys([*near, *names]))[:3]
    more = ", ..." * (len(names) > len(shown))
    glob = next(filter(None, (similar_glob(pattern, names) for pattern in patterns)), "")
    return f"{glob}its parameters are {', '.join(map(repr, shown))}{more}; correct the wildcard"


def _warn_of_halves(op: str, rows: Sequence[TrainedWeight]) -> None:
    """Warn about every fused layer of which some parameters are quantized and others are not."""
    kept = [
        row.layer
        for row in rows
        if row.kind in ("matrix", "stack") and len(row.shape) > 1 and adapter_tensor(row.saved) is None
        if not row.quantized
    ]
    for line in partly_converted(kept, {row.layer for row in rows if row.quantized}):
        warn(f"{op}: {line}")


_FLOAT32 = "note: in float32; loaders usually decode to bfloat16; "
_OWN_DTYPE = 'served_dtype="bfloat16" trains with these values'
_MODEL_DTYPE = "a model in bfloat16 trains with these values"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class QuantizedNames(list[str]):
    """The names of the parameters that are fake-quantized. print() shows a table of all parameters.

    Attributes:
        plan: the plan, with one row per parameter.
        inputs: the names of the layers whose inputs are fake-quantized.
    """

    def __init__(self, plan: QatPlan, inputs: tuple[str, ...] = (), of_inputs: str = "") -> None:
        super().__init__(plan.names)
        self.plan, self.inputs, self._of_inputs = plan, inputs, of_inputs

    def __str__(self) -> str:
        """Return the table as text."""
        return table_of(self.plan, self._of_inputs)


def _not_emulated(row: Serving) -> str:
    """Return a sentence about the part of an engine's computation that a model with fake-quantized operands lacks."""
    inputs = " and quantizes inputs itself" if row.quantizes_within else ""
    return f"{row.engine} multiplies as the unit {row.product!r} does{inputs}; the model multiplies in its own dtype"


def rule_of_inputs(recipe: Recipe, static: str) -> str:
    """Return text about the recipe of inputs of layers. static: what is stored of inputs, such as "amaxes", or ""."""
    name = name_for_inputs(recipe, static and "static")
    return f"by {name}, with {f'static {static}' if static else 'scales computed in each call'}"


def table_of(plan: QatPlan, of_inputs: str) -> str:
    """Return a table of all parameters as text: what is fake-quantized, what is not, and why."""
    # of_inputs: a line about the inputs of layers; "" if they stay unquantized.
    engine = plan.serving
    unwritten = f"no checkpoint: {plan.note}" if plan.note else "values of no quantized checkpoint"
    served = f"values as served from --format {plan.format}" if plan.format else unwritten
    if engine is not None and engine.container and engine.format is None:
        served = f"values as {engine.engine} serves them from {engine.container}"
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
    decodes = engine is None or not engine.quantizes_within
    notes = [_FLOAT32 + (_OWN_DTYPE if engine is None else _MODEL_DTYPE)] * (plan.warns_of_float32 and decodes)
    notes += [f"note: {_not_emulated(engine)}"] if engine is not None and engine.product != TORCH else []
    return "\n".join([head, of_inputs or "inputs of layers stay unquantized", *text, *notes])
