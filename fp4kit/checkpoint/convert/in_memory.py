"""Convert named tensors in memory, such as those of a trainer. The results are the tensors that the checkpoint
converter would write. Layers that share a tensor scale, such as q, k and v, form a group. A group is quantized when its
last layer arrives; until then its layers wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.arguments import a_type, as_mapping, checks_kinds, explains_calls, explains_class, name_arguments, warn
from fp4kit.arithmetic import ieee
from fp4kit.arrays.imports import cupy, to_device
from fp4kit.arrays.returns import dtype_named, library_of
from fp4kit.checkpoint.containers.engines import comfy, mlx
from fp4kit.checkpoint.containers.table import CODES, INPUT_SCALE, SCALES, TENSOR_SCALE, Container
from fp4kit.checkpoint.convert.job import input_scale_of, usable_tensor_scale
from fp4kit.checkpoint.convert.rows import divisor_of, stored_scales
from fp4kit.checkpoint.model.closed_world import is_known_beside
from fp4kit.checkpoint.model.doubts import named_twice
from fp4kit.checkpoint.model.weights import Weight, has_transposed_stacks, looks_quantized, pieces, stack_shape
from fp4kit.checkpoint.plan.layer_recipes import LayerQuantization, Mixture, check_input_scale, experts_only
from fp4kit.checkpoint.plan.request import GGUF, UNQUANTIZED, Request
from fp4kit.checkpoint.plan.scale_search import Activations
from fp4kit.checkpoint.plan.source_layers import stacks_trouble
from fp4kit.checkpoint.selection import selection
from fp4kit.checkpoint.selection.names import (
    adapter_trouble,
    group_of,
    hugging_face_names,
    missing_gated_halves,
    unwrapped,
)
from fp4kit.layouts import pack_mlx
from fp4kit.lazy import lazy_property
from fp4kit.ops.amax import amax as amax_of
from fp4kit.ops.quantize import quantize
from fp4kit.quantized.slicing import of_zeros
from fp4kit.recipes import Recipe
from fp4kit.recipes import recipe as recipe_called
from fp4kit.storage.files import CheckpointError, TensorEntry, listed, shown


@explains_class
@dataclass(frozen=True)
class Rules:
    """The rules of convert_tensors: the recipe, the container, and which tensors to quantize.

    Attributes:
        recipe: the recipe for newly quantized tensors, or its id.
        config: the content of the model's config.json. Its model type, its numbers of layers and heads, its ranks and
            the sizes of its MLPs are used.
        format: the output format, such as "modelopt"; None for the format that most engines load.
        wishes: which layers to quantize.
        input_scale: a positive float32 activation scale to write for every layer; None for none.
        activations: measured activations, from which every layer gets its own input scale; None for none.
        recipes: (pattern, recipe) pairs for layers with recipes other than ``recipe``, as for make_plan. A recipe may
            be given by its id. Patterns match whole module names without ``.weight``; the first that matches decides.

    Raises CheckpointError in these cases:

    - The format is unknown, or cannot be written from memory ("bf16", "comfy").
    - The format cannot store the model or a recipe.
    - Input scales are given, and the format has none.
    """

    recipe: Recipe
    config: Mapping[str, Any] = field(default_factory=dict)
    format: str | None = None
    wishes: selection.Wishes = field(default_factory=selection.Wishes)
    input_scale: float | None = None
    activations: Activations | None = None
    recipes: Sequence[tuple[str, str | Recipe]] = ()

    @classmethod
    def of(cls, recipe: str | Recipe = "nvfp4-te", **fields: Any) -> Rules:
        """Create Rules from a recipe or its id.

        recipe: a Recipe, or the id of one.
        fields: the other fields of Rules, such as format="modelopt".

        Raises ValueError if no recipe has this id, and TypeError for anything that is not a recipe. Also raises the
        errors of Rules.
        """
        return cls(recipe_called(recipe), **fields)

    @explains_calls
    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", recipe_called(self.recipe))
        if self.format == UNQUANTIZED:
            raise CheckpointError(
                "format bf16: the tensors are unquantized already; do not call convert_tensors for it"
            )
        if self.format in (comfy.FORMAT, GGUF):
            raise CheckpointError(f"format {self.format}: convert_tensors does not write such files; use convert")
        if self.form.format == mlx.FORMAT:  # reject an unsuitable model before the first tensor is converted
            mlx.check(self.config, ())
        if self.recipes:
            for choice in (self.mixture.default, *(choice for _, choice in self.mixture.choices)):
                self._of_choice(choice)
        else:
            check_input_scale(self.form, self._request.gives_input_scales)

    @lazy_property
    def form(self) -> Container:
        """The container (names, dtypes and layout of the tensors) of layers that no pattern of ``recipes`` matches."""
        found = self.mixture.default.form
        assert found is not None
        return found

    @lazy_property
    def mixture(self) -> Mixture:
        """The recipe and the container of every layer."""
        return self._request.mixture_for(self.config)

    def of_layer(self, module: str) -> Rules:
        """Return the rules for one layer: a copy with only the recipe and the container of this layer.

        If all layers have one recipe, return this object itself.

        Args:
            module: the name that the model gives the layer or the stack of experts.
        """
        return self._of_choice(self.mixture.of(module)) if self.recipes else self

    def _of_choice(self, choice: LayerQuantization) -> Rules:
        """Return a copy of these rules that has only the recipe and the container that were chosen for a layer."""
        key = choice.recipe.id, str(choice.form)
        if key not in self._by_choice:
            choices = (self.mixture.default, *(one for _, one in self.mixture.choices))
            some = any(one.recipe.tensor_scaling == "tensor" for one in choices)
            drop = some and choice.recipe.tensor_scaling != "tensor"
            inputs: dict[str, Any] = {"input_scale": None, "activations": None} if drop else {}
            form = None if choice.form is None else choice.form.format
            self._by_choice[key] = replace(self, recipe=choice.recipe, format=form, recipes=(), **inputs)
        return self._by_choice[key]

    @lazy_property
    def _by_choice(self) -> dict[tuple[str, str], Rules]:
        """(id of the recipe, container) -> the Rules that _of_choice has made for them."""
        return {}

    @lazy_property
    def _request(self) -> Request:
        """The Request that the checkpoint converter would get for these rules."""
        pairs = tuple((pattern, recipe_called(one)) for pattern, one in self.recipes)
        inputs = self.input_scale, self.activations
        return Request(self.recipe, self.format, self.wishes, inputs[0], activations=inputs[1], recipes=pairs)

    @lazy_property
    def _facts(self) -> Any:
        """The ModelFacts from the model's config, which the selection of layers needs."""
        return selection.model_facts(self.config)

    @lazy_property
    def _wishes(self) -> selection.Wishes:
        """The user's selection of layers, limited to experts if the container can hold only quantized experts."""
        return replace(self.wishes, preset="experts") if experts_only(self.form) else self.wishes

    def names(self, name: str) -> tuple[str, ...]:
        """Return the Hugging Face names of the tensors that a Megatron-Core parameter holds.

        - A fused parameter has several names.
        - ``_extra_state`` has none; the result is ().
        - If ``name`` is a Hugging Face name already, it is the only one that is returned.

        Prefixes that wrappers add, such as ``_orig_mod.`` and ``module.``, are removed. Raise CheckpointError for an
        unknown Megatron-Core name.
        """
        return hugging_face_names(unwrapped(name), layers=self._facts.layers)

    def decisions(self, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, selection.Decision]:
        """Decide for each tensor whether to quantize it, as the checkpoint converter would. Return a dict by name.

        Args:
            tensors: (Hugging Face name, safetensors dtype such as "BF16", shape) per tensor.
        """
        candidates = [self._candidate(*one) for one in tensors]
        decisions = selection.decide(candidates, self._wishes, self.form.row_multiple)
        for one in candidates:
            selection.check_transposed(one, self._wishes, decisions[one.name])
        return decisions

    def why_not_in_blocks(self, name: str, dtype: str, shape: tuple[int, ...]) -> str:
        """Return a text that says so if a tensor stays unquantized only because its rows are not whole blocks, else "".

        Args:
            name: the Hugging Face name of the tensor.
            dtype: its safetensors dtype, such as "BF16".
            shape: its shape.
        """
        block = self.form.row_multiple
        tensor = self._candidate(name, dtype, shape)
        if not shape or self.decisions([(name, dtype, shape)])[name].reason != selection.no_multiple(
            tensor.shape, block
        ):
            return ""
        whole = replace(tensor, shape=(*tensor.shape[:-1], block))
        return (
            selection.no_multiple(tensor.shape, block)
            if selection.decide([whole], self._wishes, block)[name].converted
            else ""
        )

    def _candidate(self, name: str, dtype: str, shape: tuple[int, ...]) -> selection.Candidate:
        """Return the description of a tensor that the function ``decide`` needs to tell whether to quantize it."""
        if len(shape) != 3:
            return selection.candidate(name, dtype, shape, self._facts)
        return selection.Candidate(
            name, name.removesuffix(".weight"), dtype, stack_shape(shape, self.config), self._facts
        )


Named = tuple[str, Any]
_RANKS = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")  # config keys with the rows of linear_qkv_down_proj


def check_array(name: str, array: Any) -> None:
    """Raise TypeError if a value is not an array, which is recognized by its attributes ``dtype`` and ``shape``."""
    if not (hasattr(array, "dtype") and hasattr(array, "shape")):
        kind = type(array).__name__
        raise TypeError(f"convert_tensors: {shown(name)} is {kind}; an array of NumPy, CuPy, PyTorch or JAX is needed")


def split_parameter(megatron_name: str, array: Any, rules: Rules) -> Iterator[Named]:
    """Split a Megatron-Core parameter, and yield its Hugging Face (name, array) pairs."""
    names = rules.names(megatron_name)
    if names:
        check_array(megatron_name, array)
    if len(names) < 2:
        yield from ((name, array) for name in names)
    elif len(names) == 2 and _has_no_gate(names[0], array.shape[0], rules.config):
        yield names[1], array
    elif len(names) == 2:
        first = _rows_of_first(megatron_name, names[0], array.shape[0], rules.config)
        yield from zip(names, (array[:first], array[first:]), strict=True)
    else:
        yield from zip(names, _heads(megatron_name, array, rules.config), strict=True)


def _has_no_gate(first: str, rows: int, config: Mapping[str, Any]) -> bool:
    """Return whether linear_fc1 holds up_proj alone, because the model's MLPs have no gate (Nemotron)."""
    text = config.get("text_config", config)
    if ".gate_proj." not in first:
        return False
    if ".shared_expert" not in first:
        return bool(rows == text.get("moe_intermediate_size" if ".experts." in first else "intermediate_size"))
    sizes = [text.get(f"{name}shared_expert_intermediate_size") for name in ("moe_", "")]
    count, size = text.get("n_shared_experts"), text.get("moe_intermediate_size")
    if type(count) is int and type(size) is int:
        sizes.append(count * size)
    return rows == next((size for size in sizes if type(size) is int), None)


def _rows_of_first(megatron_name: str, first: str, rows: int, config: Mapping[str, Any]) -> int:
    """Return how many rows of a fused Megatron-Core parameter belong to the first of its two tensors."""
    if ".q_a_proj." not in first:
        if rows % 2:
            raise CheckpointError(
                f"{shown(megatron_name)}: {rows} rows cannot be split into gate and up; an even number is needed; pass"
                " gate_proj and up_proj under their Hugging Face names"
            )
        return rows // 2
    text = config.get("text_config", config)
    ranks = [text.get(key) for key in _RANKS]
    if not all(type(rank) is int for rank in ranks) or sum(ranks) != rows:
        raise CheckpointError(
            f"{shown(megatron_name)}: {rows} rows cannot be split into q_a_proj and kv_a_proj_with_mqa; rules.config"
            f" needs {', '.join(_RANKS)} that add up to them, and has {', '.join(map(str, ranks))}"
        )
    return int(ranks[0])


def _heads(megatron_name: str, array: Any, config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Split Megatron-Core's fused linear_qkv into q, k and v, and return them in this order."""
    text = config.get("text_config", config)
    heads, groups = text.get("num_attention_heads"), text.get("num_key_value_heads", text.get("num_attention_heads"))
    if not heads or not groups or heads % groups:
        needed = "num_attention_heads and num_key_value_heads"
        raise CheckpointError(
            f"{shown(megatron_name)}: cannot be split into q, k and v; rules.config needs {needed}, and has {heads} and"
            f" {groups}"
        )
    heads_per_group = heads // groups  # query heads per key-value head
    size, remainder = divmod(array.shape[0], groups * (heads_per_group + 2))
    if remainder:
        raise CheckpointError(
            f"{shown(megatron_name)}: {array.shape[0]} rows are not divisible into {groups} groups of"
            f" {heads_per_group + 2} heads; correct the numbers of heads in rules.config"
        )
    blocks = array.reshape(groups, heads_per_group + 2, size, *array.shape[1:])
    first, last = heads_per_group, heads_per_group + 1
    parts = (blocks[:, :first], blocks[:, first:last], blocks[:, last:])
    q, k, v = (part.reshape(-1, *array.shape[1:]) for part in parts)
    return q, k, v


def layers_of(name: str, array: Any, rules: Rules) -> Iterator[tuple[str, Any]]:
    """Yield (layer name, matrix) for every layer that a tensor holds."""
    shape = tuple(array.shape)
    module = name.removesuffix(".weight")
    if len(shape) == 2:
        yield module, array
        return
    logical = stack_shape(shape, rules.config)
    stack = array.swapaxes(1, 2) if has_transposed_stacks(rules.config) else array
    if rules.form.keeps_stacks:
        yield module, stack
        return
    for piece in pieces(Weight(module, name, logical, None, {}), rules.form, rules.config, False):
        yield piece.module, stack[piece.expert, piece.span[0] : piece.span[1]]


def quantized(members: list[Named], rules: Rules) -> Iterator[Named]:
    """Quantize layers that share a tensor scale, and yield all resulting (name, array) pairs: codes and scales."""
    largest = _largest_amax(members)
    shared = largest if rules.form.has_tensor_scale else None
    columns = {module: int(matrix.shape[-1]) for module, matrix in members}
    inputs = {} if rules.activations is None else rules.activations.of_layers(columns)
    for module, matrix in members:
        yield from _parts(module, matrix, shared, rules, inputs.get(module))


@ieee("convert_tensors")
def _largest_amax(members: list[Named]) -> np.float32:
    """Return the largest amax of (layer name, matrix) pairs. Raise CheckpointError if one is NaN or infinite."""
    return max(_finite_amax(module, matrix) for module, matrix in members)


def _finite_amax(module: str, matrix: Any) -> np.float32:
    """Return the amax of a matrix as a float32 on the host."""
    found = np.float32(float(amax_of(matrix)))
    if not np.isfinite(found):
        raise CheckpointError(
            f"{shown(module)}: holds NaN or infinity; repair it, or keep it unquantized with Wishes(keep=...)"
        )
    return found


def _parts(
    module: str, matrix: Any, shared: np.float32 | None, rules: Rules, input_amax: np.float32 | None
) -> Iterator[Named]:
    """Quantize one layer and yield its (name, array) pairs: codes, block scales, tensor scale and input scale."""
    form = rules.form
    q = quantize(matrix, rules.recipe, tensor_amax=shared)
    packed, scales_of_blocks = q.packed, q.block_scale
    if shared is not None and not shared.view(np.uint32):  # a subnormal may compare equal to 0
        q = of_zeros(q.to("numpy"))
        zeros = None if q.block_scale is None else _in_library(q.block_scale, packed)
        packed, scales_of_blocks = _in_library(q.packed, packed), zeros
    specs = form.specs(tuple(matrix.shape))
    yield module + form.suffixes[CODES], _typed(packed, form.codes_dtype).reshape(specs[CODES][1])
    if rules.recipe.scale is None and SCALES in form.suffixes:
        yield module + form.suffixes[SCALES], stored_scales(q).reshape(specs[SCALES][1])
    elif SCALES in form.suffixes:
        yield module + form.suffixes[SCALES], _typed(scales_of_blocks, form.scales_dtype)
    scales = [] if shared is None else [(TENSOR_SCALE, _stored_scale(module, q, shared, rules))]
    if rules.input_scale is not None:
        input_scale = np.float32(rules.input_scale)
        scales.append((INPUT_SCALE, np.float32(1) / input_scale if form.divides else input_scale))
    if input_amax is not None:
        scales.append((INPUT_SCALE, input_scale_of(form, input_amax)))
    for part, value in scales:
        array = np.full(form.tensor_scale_shape, value, np.float32)
        yield module + form.suffixes[part], _in_library(array, packed)


@ieee("convert_tensors")
def _stored_scale(module: str, q: Any, amax: np.float32, rules: Rules) -> np.float32:
    """Return the number that the container stores as tensor scale."""
    # The recipe computes the divisor if it can; otherwise, the divisor is the reciprocal of the scale.
    scale = np.float32(float(q.tensor_scale))
    divisor = divisor_of(rules.recipe, rules.form, amax, q.dtype)
    with np.errstate(divide="ignore", over="ignore"):
        stored = scale if not rules.form.divides else np.float32(1) / scale if divisor is None else divisor
    if not usable_tensor_scale(scale) or not usable_tensor_scale(stored):
        raise CheckpointError(
            f"{shown(module)}: tensor scale is {scale}; a positive normal float32 is needed; use another recipe"
        )
    return stored


def _typed(array: Any, dtype: str) -> Any:
    """Return a view of an array of bytes with the dtype that corresponds to the safetensors dtype ``dtype``."""
    if dtype == "U32":
        library = library_of(array)
        if library is None:
            return pack_mlx(array)
        return array.view(dtype_named("uint32") if library.name == "torch" else np.uint32)
    names = {"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "I8": "int8"}
    if dtype not in names or type(array).__module__ == "cupy":
        return array
    library = library_of(array)
    if library is None:
        return array.view(getattr(ml_dtypes, names[dtype], np.int8))
    return array.view(dtype_named(names[dtype])) if library.name == "torch" else array


def _in_library(value: np.ndarray, like: Any) -> Any:
    """Return the host array ``value`` in the library and on the device of the array ``like``."""
    # If ``like`` is a NumPy array, ``value`` is returned unchanged, otherwise as a copy.
    if isinstance(like, np.ndarray):
        return value
    library = library_of(like)
    if library is None:
        return to_device(value)
    with library.call_context(like) as give:
        return give(value)


_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


_Member = tuple[str, Any, Rules]  # layer name, matrix, and the rules of the layer
INCOMPLETE = ("error", "quantize")


@explains_class
class TensorConverter:
    """Convert tensors that arrive in several buckets, such as those that a trainer sends to its rollout engine.

    Layers that share a tensor scale, such as q, k and v, are held back until the last of them arrives. They may arrive
    in different buckets. Call ``flush`` after the last bucket, so that no layer is silently lost.

    Args:
        rules: recipe, container and selection of layers.
        incomplete: what flush does if some layers of a group with one tensor scale never arrived, or stay unquantized.
            "error" raises CheckpointError. "quantize" quantizes the selected layers that arrived, for models that do
            not have the others.
        since: name -> array, the tensors that an earlier conversion yielded. A tensor is not yielded again if it equals
            the earlier tensor of its name in dtype, shape and every byte. A tensor that shares memory with the earlier
            one is always yielded, because it may have been updated in place. None yields all tensors.

    Raises:
        CheckpointError: ``incomplete`` is neither "error" nor "quantize".
        TypeError: ``rules`` is not a Rules, or ``since`` is neither a mapping nor None.

    Examples:
        >>> import numpy as np
        >>> from fp4kit.checkpoint import Rules, TensorConverter
        >>> converter = TensorConverter(Rules.of("nvfp4-te"))
        >>> w = np.ones((32, 64), np.float32)
        >>> len(list(converter.convert([("model.layers.0.mlp.gate_proj.weight", w)])))
        0
        >>> len(list(converter.convert([("model.layers.0.mlp.up_proj.weight", w)])))
        6
        >>> list(converter.flush())
        []
    """

    def __init__(self, rules: Rules, incomplete: str = "error", since: Mapping[str, Any] | None = None) -> None:
        if incomplete not in INCOMPLETE:
            raise CheckpointError(f"incomplete {incomplete!r}: unknown; use one of {', '.join(INCOMPLETE)}")
        if not isinstance(rules, Rules):
            raise TypeError(f"convert_tensors: rules is {rules!r:.60}; needs a Rules, such as Rules.of('nvfp4-te')")
        self.rules = rules
        self._incomplete = incomplete
        self._waiting: dict[str, list[_Member]] = {}  # group with one tensor scale -> its layers that have arrived
        self._sources: dict[str, str] = {}  # converted layer -> the layer or stack of the model that holds it
        self._unconverted: dict[str, str] = {}  # unconverted layer -> why it is unquantized
        self._seen: set[str] = set()  # the names of all tensors that have arrived
        self._modules: dict[str, tuple[int, ...]] = {}  # converted layer or stack -> its shape
        self._beside: dict[str, str] = {}  # possible layer -> a tensor named after it that may change its weight
        self._short_rows: dict[str, list[str]] = {}  # why rows are not whole blocks -> the names of the tensors
        self._since = {} if since is None else as_mapping("convert_tensors", "since", since)

    def convert(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """Convert one bucket of a model's tensors, and yield every tensor of the quantized checkpoint that is ready.

        A layer is not ready while it waits for a layer with the same tensor scale from a later bucket. The work is
        done, and errors are raised, while the result is iterated.

        Args:
            tensors: (name, array) pairs, as for convert_tensors. Each name may come only once over all buckets.

        Yields:
            (name, array) pairs, as convert_tensors does.

        Raises:
            CheckpointError: a name came before, in this bucket or an earlier one; and as for convert_tensors, except
                for the cases that only ``flush`` can detect, such as layers that still wait.
            TypeError: ``tensors`` is a mapping, or an entry is not a pair.
            TypeError: a name is not a str, or a value is not an array.
        """
        if isinstance(tensors, Mapping):
            raise TypeError(
                f"convert_tensors: tensors is {a_type(tensors)}; needs (name, array) pairs; pass tensors.items()"
            )
        return self._new(self._converted_of(tensors))

    def _new(self, pairs: Iterable[Named]) -> Iterator[Named]:
        """Yield the given (name, array) pairs, except pairs that ``since`` holds with an equal array (see _is_same)."""
        try:
            for name, part in pairs:
                if name not in self._since or not _is_same(part, self._since[name]):
                    yield name, part
        except CheckpointError as error:
            name_arguments(error, ("rules",))
            raise

    def _converted_of(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """Convert a bucket, and yield the (name, array) pairs that are ready, even those that ``since`` holds
        already.
        """
        rules = self.rules
        for pair in tensors:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise TypeError(f"convert_tensors: tensors has the entry {pair!r:.60}; needs (name, array) pairs")
            original, array = pair
            if not isinstance(original, str):
                raise TypeError(f"convert_tensors: the name {original!r} is {type(original).__name__}; a str is needed")
            for name, part in split_parameter(original, array, rules):
                self._check_new(name, part)
                if not self._is_converted(name, part):
                    self._check_beside(name, part)
                    yield name, part
                    continue
                whole = name.removesuffix(".weight")
                own = rules.of_layer(whole)
                if own.form.format == mlx.FORMAT:
                    mlx.check(own.config, [whole])
                self._check_module(whole, part)
                for module, matrix in layers_of(name, part, own):
                    self._sources[module] = whole
                    yield from self._gathered(module, matrix, own)

    def _is_converted(self, name: str, array: Any) -> bool:
        """Return whether the rules select a tensor for quantization."""
        shape, dtype = tuple(array.shape), _dtype_name(array)
        kind = _SAFETENSORS.get(dtype, "F32")
        own = self.rules.of_layer(name.removesuffix(".weight"))
        decision = own.decisions([(name, kind, shape)])[name]
        selected = decision.converted
        if not selected and (why := own.why_not_in_blocks(name, kind, shape)):
            self._short_rows.setdefault(why, []).append(name)
        if not selected and name.endswith(".weight"):
            self._unconverted[name.removesuffix(".weight")] = decision.reason
        if selected and dtype not in _SAFETENSORS:
            raise CheckpointError(
                f"{shown(name)}: is {dtype} {list(shape)}; float32, float16 or bfloat16 in native byte order is needed;"
                " cast it, or keep it unquantized with Wishes(keep=...)"
            )
        return selected

    def _check_beside(self, name: str, array: Any) -> None:
        """Raise CheckpointError if an unconverted tensor LAYER.SUFFIX may change the weight of a converted layer
        LAYER.
        """
        entry = TensorEntry(name, "F32", tuple(array.shape), 0, 0)
        at = name.rfind(".")
        while at > 0:
            if not is_known_beside(name[at + 1 :], entry):
                if name[:at] in self._modules:
                    raise _lies_beside(name, name[:at])
                self._beside.setdefault(name[:at], name)
            at = name.rfind(".", 0, at)

    def _check_module(self, module: str, array: Any) -> None:
        """Record the shape of a converted layer or stack of experts, for the checks of later tensors."""
        if module in self._beside:
            raise _lies_beside(self._beside[module], module)
        shape = tuple(array.shape)
        self._modules[module] = stack_shape(shape, self.rules.config) if len(shape) == 3 else shape
        trouble = stacks_trouble(module, self._modules)
        if trouble:
            raise CheckpointError(trouble)

    def _check_new(self, name: str, array: Any) -> None:
        """Raise CheckpointError if a name came before, or if its tensor is quantized or belongs to a LoRA adapter."""
        # Record the name, so that it is rejected when it comes again.
        if name in self._seen:
            raise CheckpointError(f"{shown(name)}: came twice; send every tensor once, or begin a new TensorConverter")
        self._seen.add(name)
        dtype = _EIGHT_BITS.get(_dtype_name(array), "")
        if looks_quantized(TensorEntry(name, dtype or "F32", tuple(array.shape), 0, 0)):
            raise CheckpointError(
                f"{shown(name)}: is {_dtype_name(array)} {list(array.shape)}, a part of a layer that is quantized"
                " already; send the unquantized tensors"
            )
        adapter = adapter_trouble(name)
        if adapter:
            raise CheckpointError(f"{shown(name)}: {adapter}")

    @explains_calls
    def flush(self) -> Iterator[Named]:
        """End the conversion after the last bucket.

        The errors below and the warning come at the call itself. Waiting layers are quantized when the result is
        iterated, which can raise the errors of ``convert``.

        Yields:
            With incomplete="quantize", the (name, array) pairs of the layers that still wait for a layer with the same
            tensor scale, except pairs that ``since`` holds already. Otherwise nothing.

        Warns:
            UserWarning: tensors stayed unquantized because their rows are not whole blocks. Name them in
                Wishes(keep=...) if this is intended.

        Raises:
            CheckpointError: in one of these cases:

                - Layers still wait, and ``incomplete`` is "error".
                - A gate has no up projection, or a layer came under two names, such as w1 and gate_proj.
                - A pattern of the rules' ``recipes`` set the recipe of no layer, or layers that loaders fuse got
                  different recipes or containers.
        """
        for name, why in named_twice(self._modules):
            raise CheckpointError(f"{shown(name)}: {why}")
        self.rules.mixture.check_patterns([*dict.fromkeys(self._sources.values())], self._unconverted)
        self.rules.mixture.check_fused(self._sources)
        for why, names in self._short_rows.items():
            warn(
                f"convert_tensors: {listed(names)}: unquantized, because {why}; use a recipe with shorter blocks, or"
                " name these layers in Wishes(keep=...)",
            )
        alone = missing_gated_halves([*self._sources], self._unconverted)
        if alone:
            raise CheckpointError("; ".join(alone[:3]))
        for group, members in self._waiting.items() if self._incomplete == "error" else ():
            raise CheckpointError(f"{shown(group)}: these layers share one tensor scale, {self._why_waiting(members)}")
        waiting, self._waiting = self._waiting, {}
        return self._new(pair for members in waiting.values() for pair in self._quantized(members))

    def _why_waiting(self, members: list[_Member]) -> str:
        """Return a clause for an error message: why the layers of a group still wait, and what to do."""
        group = group_of(members[0][0])
        kept = [(name, why) for name, why in self._unconverted.items() if group_of(name) == group]
        if kept:
            name, why = kept[0]
            return (
                f"but {shown(name)} stays unquantized ({why}); quantize all of them, or none, or use"
                ' incomplete="quantize" to quantize the others without it'
            )
        came = ", ".join(shown(name) for name, _, _ in members)
        return (
            f'but only {came} came; send the others too, or use incomplete="quantize" if the model does not have them'
        )

    def _gathered(self, module: str, matrix: Any, own: Rules) -> Iterator[Named]:
        """Quantize a layer and yield its (name, array) pairs, once all layers that share its tensor scale have
        arrived.
        """
        group = group_of(module) if own.form.has_tensor_scale else None
        if group is None:
            yield from quantized([(module, matrix)], own)
            return
        name, size = group
        members = self._waiting.setdefault(name, [])
        members.append((module, matrix, own))
        if len(members) == size:
            yield from self._quantized(self._waiting.pop(name))

    def _quantized(self, members: list[_Member]) -> Iterator[Named]:
        """Quantize layers that share a tensor scale, and yield their (name, array) pairs."""
        if any(own is not members[0][2] for _, _, own in members):
            self.rules.mixture.check_fused({module: self._sources[module] for module, _, _ in members})
        yield from quantized([(module, matrix) for module, matrix, _ in members], members[0][2])


# dtype name of an array -> safetensors dtype, for the dtypes that only quantized checkpoints have
_EIGHT_BITS = {
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
    "float4_e2m1fn": "F4",
    "uint32": "U32",
    "int32": "U32",
}


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two arrays are equal in library, dtype, shape and every byte."""
    # Bytes are compared, so that a NaN equals a NaN of the same bits, but 0 does not equal -0.
    # Arrays that share memory count as different too, because a comparison cannot tell whether they were updated in
    # place.
    if type(a) is not type(b) or a.dtype != b.dtype or tuple(a.shape) != tuple(b.shape):
        return False
    library = library_of(a)
    if library is not None and library.name == "torch":
        if a.device != b.device or (a.numel() and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()):
            return False
        x, y = (one.contiguous().reshape(-1).view(dtype_named("uint8")) for one in (a, b))
        return bool((x == y).all())
    if library is not None:
        return np.asarray(a).tobytes() == np.asarray(b).tobytes()
    if (np if isinstance(a, np.ndarray) else cupy()).may_share_memory(a, b):
        return False
    x, y = (one.reshape(-1).view(np.uint8) for one in (a, b))
    return bool((x == y).all())


@checks_kinds
def convert_tensors(
    tensors: Iterable[Named], rules: Rules, incomplete: str = "error", since: Mapping[str, Any] | None = None
) -> Iterator[Named]:
    """Quantize the tensors of a model in memory, and yield the tensors that convert would write for it.

    A quantized layer is yielded as several tensors (codes, scales), under the names and dtypes of rules.form. A tensor
    that is not converted is yielded unchanged. Layers that share a tensor scale (gate and up; q, k and v) are held back
    until the last of them arrives. The work is done while the result is iterated, and errors of tensors are raised
    then. For tensors that arrive in several buckets, use a TensorConverter.

    Args:
        tensors: (name, array) pairs of a whole model. The arrays are of any library, on the host or a GPU. The names
            are Hugging Face's or Megatron-Core's. Fused parameters of Megatron-Core are split by the numbers in
            rules.config: linear_fc1 into gate and up (up alone if the MLP has no gate), linear_qkv into q, k and v, and
            linear_qkv_down_proj into q_a_proj and kv_a_proj_with_mqa.
        rules: recipe, container and selection of layers.
        incomplete: what to do if some layers that share a tensor scale never arrive, or stay unquantized. "error"
            raises CheckpointError. "quantize" quantizes the selected layers that arrived, for models that do not have
            the others.
        since: name -> array, the tensors that an earlier call yielded. Tensors that are unchanged are not yielded
            again, so that a rollout engine gets only the changed ones. An unconverted tensor that shares memory with
            the earlier one is always yielded, because it may have been updated in place; pass a copy of the earlier one
            to compare them. None yields all tensors.

    Yields:
        (name, array) pairs in the library of the input. 8-bit floats have the dtypes of PyTorch or ml_dtypes; in CuPy
        and JAX they are uint8 bit patterns.

    Raises:
        CheckpointError: one of these cases:

            - A name is an unknown Megatron-Core name, or comes twice.
            - A tensor is quantized already, belongs to a LoRA adapter, or is named after a converted layer and may
              change its weight.
            - A tensor that is to be quantized contains NaN or infinity, or is neither float32, float16 nor bfloat16.
            - mlx-lm would not find a layer again, or no loader can use a scale.
            - A fused parameter cannot be split by the numbers in rules.config.
            - Two stacks of experts do not fit together.
            - ``rules.activations`` does not fit a layer (see Activations.of_layers).
            - A layer that shares a tensor scale with others never arrives or stays unquantized, and ``incomplete`` is
              "error".
            - A gate has no up projection, or a layer comes under two names.
            - ``incomplete`` is neither "error" nor "quantize".
            - A pattern of ``rules.recipes`` sets the recipe of no layer, or fused layers get different recipes.
        TypeError: ``rules`` is not a Rules, ``since`` is neither a mapping nor None, or ``tensors`` is a mapping or has
            an entry that is not a pair.
        TypeError: a name is not a str, or a value is not an array.

    Warns:
        UserWarning: tensors stay unquantized because their rows do not consist of whole blocks.

    Exact: the bytes equal the bytes that convert writes for these tensors.

    Examples:
        >>> import numpy as np
        >>> from fp4kit.checkpoint import Rules, convert_tensors
        >>> w = np.ones((32, 64), np.float32)
        >>> for name, part in convert_tensors([("model.layers.0.self_attn.o_proj.weight", w)], Rules.of("mxfp4")):
        ...     print(name, part.dtype, part.shape)
        model.layers.0.self_attn.o_proj.weight_packed uint8 (32, 32)
        model.layers.0.self_attn.o_proj.weight_scale uint8 (32, 2)
    """
    converter = TensorConverter(rules, incomplete, since)
    converted = converter.convert(tensors)
    return chain.from_iterable(part() for part in (lambda: converted, converter.flush))


def _lies_beside(name: str, module: str) -> CheckpointError:
    """Return the error to raise for a tensor LAYER.SUFFIX that may change the weight of the converted layer LAYER."""
    return CheckpointError(
        f"{shown(name)}: lies beside the layer {shown(module)}, which is converted, and is not known; leave the tensor"
        " out, or keep the layer unquantized with Wishes(keep=...)"
    )


def _dtype_name(array: Any) -> str:
    """Return the name of an array's dtype without its library, such as "bfloat16" for torch.bfloat16."""
    return str(array.dtype).removeprefix("torch.")
