"""Convert named tensors in memory, such as those of a trainer. The results are the tensors that the checkpoint
converter would write. Layers that share a tensor scale, such as q, k and v, form a group. A group is quantized when its
last layer arrives; until then its layers wait.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from fp4kit.arguments import as_mapping
from fp4kit.arrays import imports, returns
from fp4kit.arrays.returns import library_of
from fp4kit.checkpoint.containers.engines import mlx
from fp4kit.checkpoint.convert.memory_rules import Rules
from fp4kit.checkpoint.convert.quantize_tensors import quantized
from fp4kit.checkpoint.convert.split_tensors import Named, layers_of, split_parameter
from fp4kit.checkpoint.model.closed_world import is_known_beside
from fp4kit.checkpoint.model.unlike_layers import named_twice
from fp4kit.checkpoint.model.weights import looks_quantized, stack_shape
from fp4kit.checkpoint.plan.layer_checks import stacks_trouble
from fp4kit.checkpoint.selection import names as fused_layers
from fp4kit.checkpoint.selection.names import adapter_trouble
from fp4kit.storage.files import CheckpointError, listed, shown
from fp4kit.storage.safetensors_file import TensorEntry

_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


_Member = tuple[str, Any, Rules]  # layer name, matrix, and the rules of the layer
INCOMPLETE = ("error", "quantize")


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
        self._converted: list[str] = []  # the names of the converted layers
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
        yield from self._new(self._converted_of(tensors))

    def _new(self, pairs: Iterable[Named]) -> Iterator[Named]:
        """Yield the given (name, array) pairs, except pairs that ``since`` holds with an equal array (see _is_same)."""
        return (
            (name, part) for name, part in pairs if name not in self._since or not _is_same(part, self._since[name])
        )

    def _converted_of(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """Convert a bucket, and yield the (name, array) pairs that are ready, even those that ``since`` holds
        already.
        """
        rules = self.rules
        if isinstance(tensors, Mapping):
            raise TypeError(
                f"convert_tensors: tensors is a {type(tensors).__name__}; needs (name, array) pairs; pass"
                " tensors.items()"
            )
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
                    self._converted.append(module)
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
            warnings.warn(
                f"convert_tensors: {listed(names)}: unquantized, because {why}; use a recipe with shorter blocks, or"
                " name these layers in Wishes(keep=...)",
                stacklevel=3,
            )
        alone = fused_layers.missing_gated_halves(self._converted, self._unconverted)
        if alone:
            raise CheckpointError("; ".join(alone[:3]))
        for group, members in self._waiting.items() if self._incomplete == "error" else ():
            raise CheckpointError(f"{shown(group)}: these layers share one tensor scale, {self._why_waiting(members)}")
        waiting, self._waiting = self._waiting, {}
        return self._new(pair for members in waiting.values() for pair in self._quantized(members))

    def _why_waiting(self, members: list[_Member]) -> str:
        """Return a clause for an error message: why the layers of a group still wait, and what to do."""
        group = fused_layers.group_of(members[0][0])
        kept = [(name, why) for name, why in self._unconverted.items() if fused_layers.group_of(name) == group]
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
        group = fused_layers.group_of(module) if own.form.has_tensor_scale else None
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
        x, y = (one.contiguous().reshape(-1).view(returns.dtype_named("uint8")) for one in (a, b))
        return bool((x == y).all())
    if library is not None:
        return np.asarray(a).tobytes() == np.asarray(b).tobytes()
    if (np if isinstance(a, np.ndarray) else imports.cupy()).may_share_memory(a, b):
        return False
    x, y = (one.reshape(-1).view(np.uint8) for one in (a, b))
    return bool((x == y).all())


def convert_tensors(
    tensors: Iterable[Named], rules: Rules, incomplete: str = "error", since: Mapping[str, Any] | None = None
) -> Iterator[Named]:
    """Quantize the tensors of a model in memory, and yield the tensors that convert would write for it.

    A quantized layer is yielded as several tensors (codes, scales), under the names and dtypes of rules.form. A tensor
    that is not converted is yielded unchanged. Layers that share a tensor scale (gate and up; q, k and v) are held back
    until the last of them arrives. The work is done, and errors are raised, while the result is iterated. For tensors
    that arrive in several buckets, use a TensorConverter.

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
    yield from converter.convert(tensors)
    yield from converter.flush()


def _lies_beside(name: str, module: str) -> CheckpointError:
    """Return the error to raise for a tensor LAYER.SUFFIX that may change the weight of the converted layer LAYER."""
    return CheckpointError(
        f"{shown(name)}: lies beside the layer {shown(module)}, which is converted, and is not known; leave the tensor"
        " out, or keep the layer unquantized with Wishes(keep=...)"
    )


def _dtype_name(array: Any) -> str:
    """Return the name of an array's dtype without its library, such as "bfloat16" for torch.bfloat16."""
    return str(array.dtype).removeprefix("torch.")
