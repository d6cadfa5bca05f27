"""Convert named tensors in memory, such as those of a trainer.

The results are the tensors that the checkpoint converter would write.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.arrays import torch_arrays
from fp4kit.arrays.imports import to_device
from fp4kit.arrays.returns import library_of
from fp4kit.checkpoint.containers import comfy, mlx
from fp4kit.checkpoint.containers.container import CODES, INPUT_SCALE, SCALES, TENSOR_SCALE, Container
from fp4kit.checkpoint.convert.put_scalars import input_scale_of, usable_tensor_scale
from fp4kit.checkpoint.convert.quantize_rows import divisor_of, of_zeros, stored_scales
from fp4kit.checkpoint.model.closed_world import adapter_trouble, is_known_beside
from fp4kit.checkpoint.model.layer_sizes import named_twice
from fp4kit.checkpoint.model.layers import Piece, pieces
from fp4kit.checkpoint.model.megatron_names import hugging_face_names
from fp4kit.checkpoint.model.weights import Weight, has_transposed_stacks, looks_quantized, stack_shape
from fp4kit.checkpoint.model.wrapper_names import unwrapped
from fp4kit.checkpoint.plan.activations import Activations
from fp4kit.checkpoint.plan.layer_checks import stacks_trouble
from fp4kit.checkpoint.plan.mixture import Choice, Mixture
from fp4kit.checkpoint.plan.request import UNQUANTIZED, Request, check_input_scale, experts_only
from fp4kit.checkpoint.selection import fused_layers
from fp4kit.checkpoint.selection.name_rules import Candidate, candidate, model_facts
from fp4kit.checkpoint.selection.selection import Decision, Wishes, decide, no_multiple
from fp4kit.layouts import pack_mlx
from fp4kit.lazy import lazy_property
from fp4kit.ops.amax import amax as amax_of
from fp4kit.ops.quantize import quantize
from fp4kit.recipes import Recipe, recipe
from fp4kit.storage.errors import CheckpointError, listed, shown
from fp4kit.storage.safetensors_file import TensorEntry

Named = tuple[str, Any]
_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Rules:
    """Say how convert_tensors converts: by which recipe, into which container, and which tensors.

    Attributes:
        recipe: the recipe for newly quantized tensors.
        config: the content of the model's config.json; its numbers of layers and heads and its model type are used.
        format: the container's name; None for the container that most engines load.
        wishes: which layers to quantize.
        input_scale: a positive float32 activation scale to write for every layer; None for none.
        activations: measured activations, from which every layer gets its own input scale; None for none.
        recipes: (pattern, recipe) pairs for layers of other recipes than ``recipe``, as for make_plan. A recipe may be
            given by its id. Patterns match whole module names without ``.weight``; the first that matches decides.

    Raises CheckpointError in these cases:

    - The format is not a quantized container, or cannot be written from memory ("bf16", "comfy").
    - The container cannot store the model.
    - Input scales are given, and the container has none.
    """

    recipe: Recipe
    config: Mapping[str, Any] = field(default_factory=dict)
    format: str | None = None
    wishes: Wishes = field(default_factory=Wishes)
    input_scale: float | None = None
    activations: Activations | None = None
    recipes: Sequence[tuple[str, str | Recipe]] = ()

    @classmethod
    def of(cls, recipe_id: str | Recipe = "nvfp4-te", **fields: Any) -> Rules:
        """Return Rules for a recipe or its id. ``fields`` are the other fields of Rules, such as format="modelopt".

        Raises ValueError if no recipe has this id, TypeError for anything that is not a recipe, and otherwise as Rules
        does.
        """
        return cls(recipe(recipe_id), **fields)

    def __post_init__(self) -> None:
        if self.format == UNQUANTIZED:
            raise CheckpointError(
                "format bf16: the tensors are unquantized already; do not call convert_tensors for it"
            )
        if self.format == comfy.FORMAT:
            raise CheckpointError("format comfy: convert_tensors does not write files of ComfyUI; use convert")
        # Reject an unsuitable model here, before the first tensor is converted.
        mlx.check(self.form, self.config, ())
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
        """Return rules with one recipe, that of a layer.

        Args:
            module: the name of the layer, or of a stack of experts, as the model names it.
        """
        return self._of_choice(self.mixture.of(module)) if self.recipes else self

    def _of_choice(self, choice: Choice) -> Rules:
        """Return rules for the recipe and the container of a choice, without input scales if they have no place."""
        assert choice.form is not None
        key = choice.recipe.id, choice.form.name
        if key not in self._by_choice:
            scaled = [one for _, one in self.mixture.choices if one.recipe.tensor_scaling == "tensor"]
            some = bool(scaled) or self.mixture.default.recipe.tensor_scaling == "tensor"
            drop = some and choice.recipe.tensor_scaling != "tensor"
            inputs: dict[str, Any] = {"input_scale": None, "activations": None} if drop else {}
            form = choice.form.format
            self._by_choice[key] = replace(self, recipe=choice.recipe, format=form, recipes=(), **inputs)
        return self._by_choice[key]

    @lazy_property
    def _by_choice(self) -> dict[tuple[str, str], Rules]:
        """The rules that _of_choice has made: (id of the recipe, name of the container) -> rules."""
        return {}

    @lazy_property
    def _request(self) -> Request:
        """The Request that the checkpoint converter would get for these rules."""
        pairs = tuple((pattern, recipe(one)) for pattern, one in self.recipes)
        inputs = self.input_scale, self.activations
        return Request(self.recipe, self.format, self.wishes, inputs[0], activations=inputs[1], recipes=pairs)

    @lazy_property
    def _facts(self) -> Any:
        """The facts about the model, from its config, that the selection of layers needs."""
        return model_facts(self.config)

    @lazy_property
    def _wishes(self) -> Wishes:
        """The user's selection of layers, limited to experts if the container can hold only quantized experts."""
        return replace(self.wishes, preset="experts") if experts_only(self.form) else self.wishes

    def names(self, name: str) -> tuple[str, ...]:
        """Return the Hugging Face names of the tensors that a Megatron-Core parameter holds.

        A fused parameter has several names; ``_extra_state`` has none. If ``name`` is a Hugging Face name already, it
        is the only one that is returned. Prefixes that wrappers add, such as ``_orig_mod.`` and ``module.``, are
        removed.
        """
        return hugging_face_names(unwrapped(name), layers=self._facts.layers)

    def decisions(self, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, Decision]:
        """Return name -> the decision to quantize the tensor or not, which the checkpoint converter would make.

        Args:
            tensors: (Hugging Face name, safetensors dtype such as "BF16", shape) per tensor.
        """
        return decide((self._candidate(*one) for one in tensors), self._wishes, self.form.row_multiple)

    def why_not_in_blocks(self, name: str, dtype: str, shape: tuple[int, ...]) -> str:
        """Return why a tensor stays unquantized, if the only reason is that its rows are not whole blocks; else "".

        Args:
            name: the Hugging Face name of the tensor.
            dtype: its safetensors dtype, such as "BF16".
            shape: its shape.
        """
        block = self.form.row_multiple
        tensor = self._candidate(name, dtype, shape)
        if not shape or self.decisions([(name, dtype, shape)])[name].reason != no_multiple(tensor.shape, block):
            return ""
        whole = replace(tensor, shape=(*tensor.shape[:-1], block))
        return no_multiple(tensor.shape, block) if decide([whole], self._wishes, block)[name].converted else ""

    def _candidate(self, name: str, dtype: str, shape: tuple[int, ...]) -> Candidate:
        """Return the description of a tensor that the function ``decide`` needs to tell whether to quantize it.

        name: the Hugging Face name of the tensor.
        dtype: its safetensors dtype, such as "BF16".
        shape: its shape. For a stack of experts, the rows and columns are put into the order [E, N, K].
        """
        if len(shape) != 3:
            return candidate(name, dtype, shape, self._facts)
        return Candidate(name, name.removesuffix(".weight"), dtype, stack_shape(shape, self.config), self._facts)


_Member = tuple[str, Any, Rules]  # layer name, matrix, and the rules of the layer
INCOMPLETE = ("error", "quantize")


class TensorConverter:
    """Convert tensors that arrive in several buckets, such as those that a trainer sends to its rollout engine.

    Layers that share a tensor scale (q, k and v; gate and up) are held back until the last of them arrives, in whatever
    bucket that is. Call ``flush`` after the last bucket, so that no layer is silently lost.

    Args:
        rules: recipe, container and selection of layers.
        incomplete: what flush does if some layers of a group with one tensor scale never arrived. "error" raises
            CheckpointError. "quantize" quantizes those that arrived, for models that do not have the other layers.
        since: name -> array, the tensors that an earlier conversion yielded. A tensor is not yielded again if it equals
            the earlier tensor of its name in dtype, shape and every byte. None yields all tensors.

    Raises:
        CheckpointError: ``incomplete`` is neither "error" nor "quantize".

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
        self.rules = rules
        self._incomplete = incomplete
        self._waiting: dict[str, list[_Member]] = {}
        self._sources: dict[str, str] = {}  # converted layer -> the layer or stack of the model that holds it
        self._unconverted: dict[str, str] = {}  # other layers -> why they are unquantized
        self._converted: list[str] = []
        self._seen: set[str] = set()
        self._modules: dict[str, tuple[int, ...]] = {}  # converted layer or stack -> its shape
        self._beside: dict[str, str] = {}  # possible layer -> a tensor under its name that is not known beside layers
        self._short_rows: dict[str, list[str]] = {}  # why rows are not whole blocks -> the names of the tensors
        self._since = since or {}

    def convert(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """Convert one bucket of a model's tensors, and yield every tensor of the quantized checkpoint that is ready.

        A layer is not ready while it waits for a layer with the same tensor scale from a later bucket.

        Args:
            tensors: (name, array) pairs, as for convert_tensors. Each name may come only once over all buckets.

        Yields:
            (name, array) pairs, as convert_tensors does.

        Raises:
            CheckpointError: a name came before, in this bucket or an earlier one; and as for convert_tensors, except
                for layers that still wait, which ``flush`` reports.
            TypeError: a name is not a str, or a value is not an array.
        """
        yield from self._new(self._converted_of(tensors))

    def _new(self, pairs: Iterable[Named]) -> Iterator[Named]:
        """Yield the (name, array) pairs whose names ``since`` lacks, or whose arrays differ from its arrays."""
        return (
            (name, part) for name, part in pairs if name not in self._since or not _is_same(part, self._since[name])
        )

    def _converted_of(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """Yield the tensors that are ready after a bucket, whether or not they equal their tensors in ``since``.

        Raise TypeError if a name is not a str, and CheckpointError if a tensor cannot be converted.
        """
        rules = self.rules
        for original, array in tensors:
            if not isinstance(original, str):
                raise TypeError(f"convert_tensors: the name {original!r} is {type(original).__name__}; a str is needed")
            for name, part in _taken_apart(original, array, rules):
                self._check_new(name, part)
                if not self._is_converted(name, part):
                    self._check_beside(name, part)
                    yield name, part
                    continue
                whole = name.removesuffix(".weight")
                own = rules.of_layer(whole)
                mlx.check(own.form, own.config, [whole])
                self._check_module(whole, part)
                for module, matrix in _layers(name, part, own):
                    self._converted.append(module)
                    self._sources[module] = whole
                    yield from self._gathered(module, matrix, own)

    def _is_converted(self, name: str, array: Any) -> bool:
        """Return whether the rules select a tensor. If not, record the reason, for the messages of flush.

        Raise CheckpointError if only its dtype keeps it from being selected.
        """
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
        """Raise CheckpointError if an unconverted tensor is named after a converted layer and may change its weight.

        Tensors that are known to leave the weight as it is, such as LAYER.bias, are accepted. If the layer has not
        arrived yet, the tensor is remembered for _check_module.
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
        """Record the shape of a converted layer, or of a converted stack of experts.

        Raise CheckpointError if two stacks of experts do not fit together. Raise it also if a tensor that came earlier
        is named after the layer and may change its weight (see _check_beside).
        """
        if module in self._beside:
            raise _lies_beside(self._beside[module], module)
        shape = tuple(array.shape)
        self._modules[module] = stack_shape(shape, self.rules.config) if len(shape) == 3 else shape
        trouble = stacks_trouble(module, self._modules)
        if trouble:
            raise CheckpointError(trouble)

    def _check_new(self, name: str, array: Any) -> None:
        """Raise CheckpointError if a name came before, or if its tensor is quantized or belongs to a LoRA adapter.

        Record the name, so that it is rejected when it comes again.
        """
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

    def flush(self) -> Iterator[Named]:
        """End the conversion after the last bucket.

        Yields:
            With incomplete="quantize", the (name, array) pairs of the layers that still wait for a layer with the same
            tensor scale. Otherwise nothing.

        Warns:
            UserWarning: tensors stayed unquantized because their rows are not whole blocks. Name them in
                Wishes(keep=...) if this is intended.

        Raises:
            CheckpointError: in one of these cases:

                - Layers still wait, and ``incomplete`` is "error".
                - A gate has no up projection, or a layer came under two names, such as w1 and gate_proj.
                - A pattern of the rules' ``recipes`` decided about no layer, or layers that loaders fuse got different
                  recipes or containers.
        """
        for name, why in named_twice(self._modules):
            raise CheckpointError(f"{shown(name)}: {why}")
        self.rules.mixture.check_patterns([*dict.fromkeys(self._sources.values())], self._unconverted)
        self.rules.mixture.check_fused(self._sources)
        for why, names in self._short_rows.items():
            warnings.warn(
                f"convert_tensors: {listed(names)}: unquantized, because {why}; use a recipe with shorter blocks, or"
                " name these layers in Wishes(keep=...)",
                stacklevel=3,
            )
        alone = fused_layers.missing_gated_halves(self._converted)
        if alone:
            raise CheckpointError("; ".join(alone[:3]))
        for group, members in self._waiting.items() if self._incomplete == "error" else ():
            came = ", ".join(shown(name) for name, _, _ in members)
            raise CheckpointError(
                f"{shown(group)}: these layers share one tensor scale, but only {came} came; send the others too,"
                ' or use incomplete="quantize" if the model does not have them'
            )
        waiting, self._waiting = self._waiting, {}
        return self._new(pair for members in waiting.values() for pair in self._quantized(members))

    def _gathered(self, module: str, matrix: Any, own: Rules) -> Iterator[Named]:
        """Quantize a layer and yield its (name, array) pairs as soon as all layers with its tensor scale have arrived.

        Until then, store the layer in ``_waiting`` and yield nothing. When the last layer of the group arrives, yield
        the pairs of all its layers. Raise CheckpointError if the layers of a group have different recipes.

        own: the rules of this layer.
        """
        group = fused_layers.group_of(module) if own.form.has_tensor_scale else None
        if group is None:
            yield from _quantized([(module, matrix)], own)
            return
        name, size = group
        members = self._waiting.setdefault(name, [])
        members.append((module, matrix, own))
        if len(members) == size:
            yield from self._quantized(self._waiting.pop(name))

    def _quantized(self, members: list[_Member]) -> Iterator[Named]:
        """Quantize layers that share a tensor scale, and yield their (name, array) pairs.

        Raise CheckpointError if they have different recipes.
        """
        if any(own is not members[0][2] for _, _, own in members):
            self.rules.mixture.check_fused({module: self._sources[module] for module, _, _ in members})
        yield from _quantized([(module, matrix) for module, matrix, _ in members], members[0][2])


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
    """Return whether two arrays are equal in library, dtype, shape and every byte.

    Bytes are compared, so that a NaN equals a NaN of the same bits, but 0 does not equal -0. Arrays of PyTorch and CuPy
    on a GPU are compared there. PyTorch tensors on different devices count as different.
    """
    if type(a) is not type(b) or a.dtype != b.dtype or tuple(a.shape) != tuple(b.shape):
        return False
    library = library_of(a)
    if library is not None and library.name == "torch":
        if a.device != b.device:
            return False
        x, y = (one.contiguous().reshape(-1).view(torch_arrays.dtype_named("uint8")) for one in (a, b))
        return bool((x == y).all())
    if library is not None:
        return np.asarray(a).tobytes() == np.asarray(b).tobytes()
    x, y = (one.reshape(-1).view(np.uint8) for one in (a, b))
    return bool((x == y).all())


def convert_tensors(
    tensors: Iterable[Named], rules: Rules, incomplete: str = "error", since: Mapping[str, Any] | None = None
) -> Iterator[Named]:
    """Quantize the tensors of a model in memory, and yield the tensors that convert would write for it.

    A quantized layer is yielded as several tensors (codes, scales), under the names and dtypes of rules.form. A tensor
    that is not converted is yielded unchanged. Layers that share a tensor scale (gate and up; q, k and v) are held back
    until the last of them arrives. For tensors that arrive in several buckets, use a TensorConverter.

    Args:
        tensors: (name, array) pairs of a whole model. The arrays are of any library, on the host or a GPU. The names
            are Hugging Face's or Megatron-Core's. Fused parameters of Megatron-Core are split: linear_fc1 into gate and
            up, linear_qkv into q, k and v by the heads in rules.config.
        rules: recipe, container and selection of layers.
        incomplete: what to do if some layers that share a tensor scale never arrive. "error" raises CheckpointError.
            "quantize" quantizes those that arrived, for models that do not have the other layers.
        since: name -> array, the tensors that an earlier call yielded. Tensors that are unchanged are not yielded
            again, so that a rollout engine gets only the changed ones. None yields all tensors.

    Yields:
        (name, array) pairs in the library of the input. 8-bit floats have the dtypes of PyTorch or ml_dtypes; in CuPy
        they are uint8 bit patterns.

    Raises:
        CheckpointError: one of these cases:

            - A name is an unknown Megatron-Core name, or comes twice.
            - A tensor is quantized already, belongs to a LoRA adapter, or is named after a converted layer and may
              change its weight.
            - A tensor that is to be quantized contains NaN or infinity, or is neither float32, float16 nor bfloat16.
            - mlx-lm would not find a layer again, or no loader can use a scale.
            - A layer that shares a tensor scale with others never arrives, and ``incomplete`` is "error".
            - A gate has no up projection, a layer comes under two names, or ``incomplete`` is not valid.
            - A pattern of ``rules.recipes`` decides about no layer, or fused layers get different recipes.
        TypeError: a name is not a str, or a value is not an array.

    Warns:
        UserWarning: tensors stay unquantized because their rows do not consist of whole blocks.

    Exact: the bytes are those that convert writes for these tensors.

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
    yield from converter.convert(tensors)
    yield from converter.flush()


def _check_array(name: str, array: Any) -> None:
    """Raise TypeError if the value that came under a tensor's name is not an array."""
    if not (hasattr(array, "dtype") and hasattr(array, "shape")):
        kind = type(array).__name__
        raise TypeError(f"convert_tensors: {shown(name)} is {kind}; an array of NumPy, CuPy, PyTorch or JAX is needed")


def _lies_beside(name: str, module: str) -> CheckpointError:
    """Return the error to raise for a tensor that is named after a converted layer and may change its weight.

    name: the name of the tensor.
    module: the name of the layer.
    """
    return CheckpointError(
        f"{shown(name)}: lies beside the layer {shown(module)}, which is converted, and is not known; leave the tensor"
        " out, or keep the layer unquantized with Wishes(keep=...)"
    )


def _dtype_name(array: Any) -> str:
    """Return the name of an array's dtype without its library, such as "bfloat16" for torch.bfloat16."""
    return str(array.dtype).removeprefix("torch.")


def _taken_apart(megatron_name: str, array: Any, rules: Rules) -> Iterator[Named]:
    """Split a Megatron-Core parameter, and yield its Hugging Face (name, array) pairs.

    A fused parameter gives two or three pairs, ``_extra_state`` none, and any other parameter one.

    Raise CheckpointError for an unknown Megatron-Core name, and TypeError if ``array`` is not an array.
    """
    names = rules.names(megatron_name)
    if names:
        _check_array(megatron_name, array)
    if len(names) == 1 or not names:
        yield from ((name, array) for name in names)
    elif len(names) == 2:
        half = array.shape[0] // 2
        yield from zip(names, (array[:half], array[half:]), strict=True)
    else:
        yield from zip(names, _heads(megatron_name, array, rules.config), strict=True)


def _heads(megatron_name: str, array: Any, config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Split Megatron-Core's fused linear_qkv into q, k and v, and return them in this order.

    The rows of the fused tensor are grouped by key-value head. Each group holds the query heads that use this head, its
    key head and its value head. Raise CheckpointError if ``config`` lacks the numbers of heads or they do not fit.

    megatron_name: the name of the parameter, for the message.
    array: the fused weight or bias; its first axis is the rows.
    config: the content of config.json.
    """
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
            f" {heads_per_group + 2} heads"
        )
    blocks = array.reshape(groups, heads_per_group + 2, size, *array.shape[1:])
    parts = (
        blocks[:, :heads_per_group],
        blocks[:, heads_per_group : heads_per_group + 1],
        blocks[:, heads_per_group + 1 :],
    )
    q, k, v = (part.reshape(-1, *array.shape[1:]) for part in parts)
    return q, k, v


def _layers(name: str, array: Any, rules: Rules) -> Iterator[tuple[str, Any]]:
    """Yield (layer name, matrix) for every layer that a tensor holds.

    A 2-D tensor is one layer. A 3-D stack of experts is split into its experts, unless the container stores stacks
    whole; then the stack is yielded as one array. Stacks that the model stores transposed are transposed back.

    name: the name of the tensor, a layer's name with or without ".weight".
    rules: the container to write, and the config of the model.
    """
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
    for piece in _pieces(module, name, logical, rules):
        yield piece.module, stack[piece.expert, piece.span[0] : piece.span[1]]


def _pieces(module: str, name: str, shape: tuple[int, ...], rules: Rules) -> Iterator[Piece]:
    """Yield the layers that a stack of experts is split into: for each its name, expert number and range of rows.

    module: the name of the stack without ".weight".
    name: the full name of the stack's tensor.
    shape: the shape [E, N, K] of the stack, with N rows and K columns per expert, however the model stores them.
    """
    return pieces(Weight(module, name, shape, None, {}), rules.form, rules.config, False)


def _quantized(members: list[Named], rules: Rules) -> Iterator[Named]:
    """Quantize (layer name, matrix) pairs that share a tensor scale, and yield the (name, array) pairs of all.

    The tensor scale follows from the largest amax of the layers. Raise CheckpointError if a matrix contains NaN or
    infinity, or if a scale is not a positive normal float32.
    """
    amaxes = [_finite_amax(module, matrix) for module, matrix in members]
    shared = max(amaxes) if rules.form.has_tensor_scale else None
    columns = {module: int(matrix.shape[-1]) for module, matrix in members}
    inputs = {} if rules.activations is None else rules.activations.of_layers(columns)
    for module, matrix in members:
        yield from _parts(module, matrix, shared, rules, inputs.get(module))


def _finite_amax(module: str, matrix: Any) -> np.float32:
    """Return the amax of a matrix as a float32 on the host. Raise CheckpointError if it is NaN or infinite.

    module: the name of the layer, for the message.
    """
    found = np.float32(float(amax_of(matrix)))
    if not np.isfinite(found):
        raise CheckpointError(
            f"{shown(module)}: holds NaN or infinity; repair it, or keep it unquantized with Wishes(keep=...)"
        )
    return found


def _parts(
    module: str, matrix: Any, shared: np.float32 | None, rules: Rules, input_amax: np.float32 | None
) -> Iterator[Named]:
    """Quantize one layer and yield its (name, array) pairs: codes, block scales, tensor scale and input scale.

    The tensor scale is left out if ``shared`` is None. The input scale is left out if there is neither
    ``rules.input_scale`` nor ``input_amax``.

    module: the name of the layer, with which the yielded names begin.
    shared: the largest amax of the layers that share the tensor scale; None if the container has no tensor scale.
    input_amax: the amax of the layer's inputs; None if it was not measured.
    """
    form = rules.form
    q = quantize(matrix, rules.recipe, tensor_amax=shared)
    packed, scales_of_blocks = q.packed, q.block_scale
    if shared is not None and shared == 0:
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


def _stored_scale(module: str, q: Any, amax: np.float32, rules: Rules) -> np.float32:
    """Return the number that the container stores as tensor scale: the scale of ``q``, or a divisor.

    The divisor is the one that the recipe computes, otherwise the reciprocal of the scale. Raise CheckpointError if the
    scale or the divisor is not a positive normal float32, because no loader could use it.

    amax: the largest amax of the layers that share the tensor scale.
    """
    scale = np.float32(float(q.tensor_scale))
    divisor = divisor_of(rules.recipe, rules.form, amax, q.dtype)
    stored = scale if not rules.form.divides else np.float32(1) / scale if divisor is None else divisor
    if not usable_tensor_scale(scale) or not usable_tensor_scale(stored):
        raise CheckpointError(
            f"{shown(module)}: tensor scale is {scale}; a positive normal float32 is needed; use another recipe"
        )
    return stored


def _typed(array: Any, dtype: str) -> Any:
    """Return an array of bytes, viewed as the safetensors dtype ``dtype`` in its own library.

    Return the array unchanged if the dtype is stored as bytes, or if the library has no such dtype.
    """
    if dtype == "U32":
        return pack_mlx(array) if library_of(array) is None else array.view(torch_arrays.dtype_named("uint32"))
    names = {"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "I8": "int8"}
    if dtype not in names or type(array).__module__ == "cupy":
        return array
    library = library_of(array)
    if library is None:
        return array.view(getattr(ml_dtypes, names[dtype], np.int8))
    return array.view(torch_arrays.dtype_named(names[dtype])) if library.name == "torch" else array


def _in_library(value: np.ndarray, like: Any) -> Any:
    """Copy a host array to the library and device of the array ``like``. Return it unchanged if ``like`` is NumPy."""
    if isinstance(like, np.ndarray):
        return value
    library = library_of(like)
    if library is None:
        return to_device(value)
    with library.call_context(like) as give:
        return give(value)
