"""Convert named tensors in memory, such as those of a trainer, to the tensors that the checkpoint converter would
write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
from fp4kit.checkpoint.convert.quantize_rows import divisor_of, of_zeros
from fp4kit.checkpoint.model.closed_world import adapter_trouble
from fp4kit.checkpoint.model.layers import Piece, pieces
from fp4kit.checkpoint.model.megatron_names import hugging_face_names
from fp4kit.checkpoint.model.weights import Weight, has_transposed_stacks, looks_quantized, stack_shape
from fp4kit.checkpoint.model.wrapper_names import unwrapped
from fp4kit.checkpoint.plan.activations import Activations
from fp4kit.checkpoint.plan.request import UNQUANTIZED, Request, check_input_scale, experts_only
from fp4kit.checkpoint.selection import fused_layers
from fp4kit.checkpoint.selection.name_rules import Candidate, candidate, model_facts
from fp4kit.checkpoint.selection.selection import Decision, Wishes, decide
from fp4kit.layouts import pack_mlx
from fp4kit.lazy import lazy_property
from fp4kit.ops.amax import amax as amax_of
from fp4kit.ops.quantize import quantize
from fp4kit.recipes import Recipe, recipe
from fp4kit.storage.errors import CheckpointError, shown
from fp4kit.storage.safetensors_file import TensorEntry

Named = tuple[str, Any]
_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Rules:
    """Say how convert_tensors converts: by which recipe, into which container, and which tensors.

    config: the model's config.json; its numbers of layers and heads and its model type are needed.
    format: the container's name; None for the container that most engines load.
    recipe, wishes, input_scale, activations: as for make_plan.
    """

    recipe: Recipe
    config: Mapping[str, Any] = field(default_factory=dict)
    format: str | None = None
    wishes: Wishes = field(default_factory=Wishes)
    input_scale: float | None = None
    activations: Activations | None = None

    @classmethod
    def of(cls, recipe_id: str | Recipe = "nvfp4-te", **fields: Any) -> Rules:
        """Return Rules for a recipe or its id. ``fields`` are the other fields of Rules."""
        return cls(recipe(recipe_id), **fields)

    def __post_init__(self) -> None:
        if self.format == UNQUANTIZED:
            raise CheckpointError(
                "format bf16: the tensors are unquantized already; do not call convert_tensors for it"
            )
        if self.format == comfy.FORMAT:
            raise CheckpointError("format comfy: convert_tensors does not write files of ComfyUI; use convert")
        # reject a model that the container cannot store now, not at its first tensor
        mlx.check(self.form, self.config, ())
        check_input_scale(self.form, self._request.gives_input_scales)

    @lazy_property
    def form(self) -> Container:
        """The container that convert_tensors writes."""
        found = self._request.form_for(self.config)
        assert found is not None
        return found

    @lazy_property
    def _request(self) -> Request:
        """The request of a conversion with these rules."""
        return Request(self.recipe, self.format, self.wishes, self.input_scale, activations=self.activations)

    @lazy_property
    def _facts(self) -> Any:
        """The facts about the model, from its config, that the selection of layers needs."""
        return model_facts(self.config)

    @lazy_property
    def _wishes(self) -> Wishes:
        """The user's selection of layers, reduced to experts if the container can hold nothing else."""
        return replace(self.wishes, preset="experts") if experts_only(self.form) else self.wishes

    def names(self, name: str) -> tuple[str, ...]:
        """Return the Hugging Face names of the tensors that a Megatron-Core parameter holds.

        They are several for a fused parameter, and none for ``_extra_state``. A Hugging Face name is returned
        unchanged, except for parts that wrappers add, such as ``_orig_mod.`` and ``module.``, which are removed.
        """
        return hugging_face_names(unwrapped(name), layers=self._facts.layers)

    def decisions(self, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, Decision]:
        """Return name -> the converter's decision to quantize the tensor or not. Each tensor is (name, safetensors
        dtype, shape).
        """
        return decide((self._candidate(*one) for one in tensors), self._wishes, self.form.row_multiple)

    def _candidate(self, name: str, dtype: str, shape: tuple[int, ...]) -> Candidate:
        """Return the description of a tensor by which the selection decides whether to quantize it."""
        if len(shape) != 3:
            return candidate(name, dtype, shape, self._facts)
        return Candidate(name, name.removesuffix(".weight"), dtype, stack_shape(shape, self.config), self._facts)


INCOMPLETE = ("error", "quantize")


class TensorConverter:
    """Convert tensors that arrive in several buckets, such as those that a trainer sends to its rollout engine.

    Layers that share a tensor scale (q, k and v; gate and up) are held back until the last of them arrives, in whatever
    bucket that is. Call ``flush`` after the last bucket: it proves that nothing is left.

    Args:
        rules: recipe, container and selection.
        incomplete: what flush does with a group of which some layers never arrived: "error" raises, "quantize" gives
            those that arrived one tensor scale, for models that do not have the others.
        since: the tensors that an earlier conversion yielded, name -> array. Tensors that are equal to theirs in dtype,
            shape and every byte are not yielded again. None yields all.

    Raises:
        CheckpointError: ``incomplete`` is another text.

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
        self._waiting: dict[str, list[Named]] = {}
        self._converted: list[str] = []
        self._seen: set[str] = set()
        self._since = since or {}

    def convert(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """Yield the tensors of the quantized checkpoint that a bucket of a model's tensors completes.

        Args:
            tensors: (name, array) pairs, as for convert_tensors. A name may come only once over all buckets.

        Yields:
            (name, array) pairs, as convert_tensors does.

        Raises:
            CheckpointError: a name that came before; a tensor that is quantized already; and as for convert_tensors.
        """
        yield from self._new(self._converted_of(tensors))

    def _new(self, pairs: Iterable[Named]) -> Iterator[Named]:
        """Yield the pairs whose arrays differ from those in ``since``."""
        return (
            (name, part) for name, part in pairs if name not in self._since or not _is_same(part, self._since[name])
        )

    def _converted_of(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """Yield the tensors that a bucket completes, whether they changed or not."""
        rules = self.rules
        for original, array in tensors:
            for name, part in _taken_apart(original, array, rules):
                self._check_new(name, part)
                kind = _SAFETENSORS.get(_dtype_name(part), "U8")
                decision = rules.decisions([(name, kind, tuple(part.shape))])[name]
                if not decision.converted:
                    yield name, part
                    continue
                mlx.check(rules.form, rules.config, [name.removesuffix(".weight")])
                for module, matrix in _layers(name, part, rules):
                    self._converted.append(module)
                    yield from _gathered(module, matrix, rules, self._waiting)

    def _check_new(self, name: str, array: Any) -> None:
        """Raise CheckpointError if a name came before, or if its tensor is quantized or belongs to an adapter."""
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
        """End the conversion: yield the layers that still wait for others of their group, if these may stay missing.

        Raises:
            CheckpointError: a group of layers that share a tensor scale is incomplete; a gate has no up projection.
        """
        alone = fused_layers.missing_gated_halves(self._converted)
        if alone:
            raise CheckpointError("; ".join(alone[:3]))
        for group, members in self._waiting.items() if self._incomplete == "error" else ():
            came = ", ".join(shown(name) for name, _ in members)
            raise CheckpointError(
                f"{shown(group)}: these layers share one tensor scale, but only {came} came; send the others too,"
                ' or use incomplete="quantize" if the model does not have them'
            )
        waiting, self._waiting = self._waiting, {}
        return self._new(pair for members in waiting.values() for pair in _quantized(members, self.rules))


# The dtypes of 8-bit and packed arrays, as safetensors names them.
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

    Arrays on a GPU are compared there; only the answer is read.
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
    """Yield the tensors of a quantized checkpoint, given those of a model; the result is what convert would write.

    A quantized layer is yielded as several tensors (codes, scales), under the names and dtypes of rules.form. A tensor
    that is not converted is yielded unchanged. Layers that share a tensor scale (gate and up; q, k and v) are held back
    until the last of them arrives. For tensors that arrive in several buckets, use a TensorConverter.

    Args:
        tensors: (name, array) pairs of a whole model. The arrays are of any library, on the host or a GPU. The names
            are Hugging Face's or Megatron-Core's. Fused parameters of Megatron-Core are split: linear_fc1 into gate and
            up, linear_qkv into q, k and v by the heads in rules.config.
        rules: recipe, container and selection.
        incomplete: "error" to raise if some layers that share a tensor scale never arrive; "quantize" to quantize those
            that arrived, for models that do not have the others.
        since: the tensors that an earlier call yielded, name -> array; those that did not change are not yielded again,
            so that a rollout engine gets only what changed. None yields all.

    Yields:
        (name, array) pairs in the library of the input. 8-bit floats have the dtypes of PyTorch or ml_dtypes; in CuPy
        they are uint8 bit patterns.

    Raises:
        CheckpointError: an unknown Megatron name; a name that comes twice; a tensor that is quantized already, or of a
            LoRA adapter; a layer that mlx-lm would not find again; layers that share a tensor scale with one that never
            arrives; NaN or infinity in a tensor that is quantized (the amax is read from the device); a scale that no
            loader can use.

    Exact: the bytes are those that convert writes for these tensors.

    Example:
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


def _dtype_name(array: Any) -> str:
    """Return the name of an array's dtype without its library: "bfloat16" for torch.bfloat16."""
    return str(array.dtype).removeprefix("torch.")


def _taken_apart(megatron_name: str, array: Any, rules: Rules) -> Iterator[Named]:
    """Yield the Hugging Face (name, array) pairs of one Megatron-Core parameter. A fused parameter gives several."""
    names = rules.names(megatron_name)
    if len(names) == 1 or not names:
        yield from ((name, array) for name in names)
    elif len(names) == 2:
        half = array.shape[0] // 2
        yield from zip(names, (array[:half], array[half:]), strict=True)
    else:
        yield from zip(names, _heads(megatron_name, array, rules.config), strict=True)


def _heads(megatron_name: str, array: Any, config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Split Megatron-Core's fused linear_qkv into q, k and v, and return them in this order.

    For each key-value head, the fused tensor has rows of [its query heads, one key head, one value head].
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

    A stack of experts is split into its experts, unless the container stores stacks whole.
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
    """Yield the layers that a stack of experts is split into, each with its name, expert number and rows."""
    return pieces(Weight(module, name, shape, None, {}), rules.form, rules.config, False)


def _gathered(module: str, matrix: Any, rules: Rules, waiting: dict[str, list[Named]]) -> Iterator[Named]:
    """Quantize a layer and yield its (name, array) pairs, unless it shares a tensor scale with layers that have not
    arrived.

    In that case, store the layer in ``waiting`` and yield nothing. When the last layer of the group arrives, yield the
    pairs of all.
    """
    group = fused_layers.group_of(module) if rules.form.has_tensor_scale else None
    if group is None:
        yield from _quantized([(module, matrix)], rules)
        return
    name, size = group
    members = waiting.setdefault(name, [])
    members.append((module, matrix))
    if len(members) == size:
        yield from _quantized(waiting.pop(name), rules)


def _quantized(members: list[Named], rules: Rules) -> Iterator[Named]:
    """Quantize layers that share a tensor scale by their largest amax, and yield the (name, array) pairs of all."""
    amaxes = [_finite_amax(module, matrix) for module, matrix in members]
    shared = max(amaxes) if rules.form.has_tensor_scale else None
    columns = {module: int(matrix.shape[-1]) for module, matrix in members}
    inputs = {} if rules.activations is None else rules.activations.of_layers(columns)
    for module, matrix in members:
        yield from _parts(module, matrix, shared, rules, inputs.get(module))


def _finite_amax(module: str, matrix: Any) -> np.float32:
    """Return the amax of a matrix; raise CheckpointError if it is NaN or infinite."""
    found = np.float32(float(amax_of(matrix)))
    if not np.isfinite(found):
        raise CheckpointError(
            f"{shown(module)}: holds NaN or infinity; repair it, or keep it unquantized with Wishes(keep=...)"
        )
    return found


def _parts(
    module: str, matrix: Any, shared: np.float32 | None, rules: Rules, input_amax: np.float32 | None
) -> Iterator[Named]:
    """Quantize one layer and yield its (name, array) pairs: codes, block scales, tensor scale and input scale, as far
    as the container has them.

    shared: the largest amax of the layers that share the tensor scale; None if the container has no tensor scale.
    input_amax: the amax of the layer's inputs; None if it was not measured.
    """
    form = rules.form
    q = quantize(matrix, rules.recipe, tensor_amax=shared)
    packed, scales_of_blocks = q.packed, q.block_scale
    if shared is not None and shared == 0:
        q = of_zeros(q.to("numpy"))
        packed, scales_of_blocks = _in_library(q.packed, packed), _in_library(q.block_scale, packed)
    specs = form.specs(tuple(matrix.shape))
    yield module + form.suffixes[CODES], _typed(packed, form.codes_dtype).reshape(specs[CODES][1])
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
    """Return the number that the container stores as tensor scale: the scale itself, or the divisor that is its
    reciprocal.

    Raise CheckpointError if it is not a positive normal float32, because no loader could use it.
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
    """Return an array of bytes viewed with the safetensors dtype ``dtype``, or unchanged if its library lacks this
    dtype.
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
    """Return a host array in the library and on the device of ``like``."""
    if isinstance(like, np.ndarray):
        return value
    library = library_of(like)
    if library is None:
        return to_device(value)
    with library.call_context(like) as give:
        return give(value)
