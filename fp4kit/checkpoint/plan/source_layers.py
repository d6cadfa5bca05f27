"""Put separate experts together as stacks, for unquantized models whose experts engines read only as stacks. A stack is
one tensor [E, K, N] with one layer of all E experts: gate_up_proj (gate and up) or down_proj.

transformers loads the experts of Llama 4 and Qwen3-VL-MoE as two stacks per layer: gate_up_proj [E, H, 2 I], whose
first I columns are the gate, and down_proj [E, I, H]. If a model stores separate experts, transformers leaves these
stacks at random values. The released models, vLLM 0.33.0 and SGLang 0.5.23 use this axis order. transformers 5.23.0
transposes the stacks of Qwen3-VL-MoE when it loads them (conversion_mapping.py), but not if both axis orders have equal
shapes. Experts with such shapes stay separate.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fp4kit.checkpoint.containers.config_entries import ATTENTION_TYPES, brief
from fp4kit.checkpoint.containers.configs import declared, entries, with_declaration
from fp4kit.checkpoint.containers.table import VALUES, OutputTensor
from fp4kit.checkpoint.loaders.support import LLAMA4, STACKED_MOE, family_of
from fp4kit.checkpoint.model.closed_world import is_known_beside, layer_above
from fp4kit.checkpoint.model.doubts import misfits, tied_head, unfit_biases, unlike_layers
from fp4kit.checkpoint.model.model_files import Source
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.model.weights import Piece, Rows, Weight, any_quantized, located
from fp4kit.checkpoint.selection.selection import LAYER_LISTS, model_facts
from fp4kit.storage.files import FLOAT_DTYPES, CheckpointError, SafetensorsFile, TensorEntry, counted, listed, shown

_STACK_LEAVES = ("gate_proj", "up_proj", "down_proj")
_SEPARATE = re.compile(rf"(.+\.experts)\.(\d+)\.({'|'.join(_STACK_LEAVES)})")
_STACKED = re.compile(rf"(.+)\.(?:experts|switch_mlp)\.({'|'.join(_STACK_LEAVES)})")  # names of mlx-lm's stacks
_TRANSPOSED_ON_LOADING = "qwen3_vl_moe"
_COUNTS = ("num_local_experts", "num_experts")  # keys of config.json with the number of experts per layer
Matrices = dict[tuple[str, int], Rows]  # (last part of the name, number of the expert) -> its rows


@dataclass(frozen=True)
class Restored:
    """An unquantized layer or stack of experts that the output stores as one tensor, and the source as several weights.

    Attributes:
        name: the name of the layer or the stack.
        shape: its shape, (N, K) or (E, N, K). A stack is stored as [E, K, N].
        weights: the weights of the source, without duplicates. The plan lists the result under the first one.
        reason: the reason that the plan shows.
        pieces: the units of work that write the result.
    """

    name: str
    shape: tuple[int, ...]
    weights: tuple[Weight, ...]
    reason: str
    pieces: tuple[Piece, ...]

    @property
    def tensor(self) -> str:
        """The name of the source tensor with the values or codes of the first weight."""
        return self.weights[0].tensor

    @property
    def dtype(self) -> str:
        """The dtype in which the source stores the first weight: a safetensors dtype, or the name of its container."""
        return self.weights[0].dtype

    @property
    def nbytes(self) -> int:
        """The number of bytes of all weights."""
        return sum(weight.nbytes for weight in self.weights)


def expert_stacks(weights: Mapping[str, Weight], config: Mapping[str, Any]) -> dict[str, Restored]:
    """Return the stacks to put together from separate experts: tensor name -> stack; {} if there are none."""
    if family_of(config) not in (STACKED_MOE, LLAMA4):
        return {}
    modules: dict[str, Matrices] = defaultdict(dict)
    for weight in weights.values():
        for parent, leaf, expert, rows in _matrices(weight):
            modules[parent][leaf, expert] = rows
    stacks = (stack for parent, matrices in modules.items() for stack in _stacks(parent, matrices, config))
    return {stack.tensor: stack for stack in stacks}


def _matrices(weight: Weight) -> Iterator[tuple[str, str, int, Rows]]:
    """Yield (name of the experts' module, last part of the name, number, rows) for each expert's matrix in a weight."""
    rows = (0, weight.shape[-2])
    if len(weight.shape) == 2:
        match = _SEPARATE.fullmatch(weight.name)
        if match is not None:
            yield match[1], match[3], int(match[2]), Rows(weight, 0, rows)
        return
    match = _STACKED.fullmatch(weight.name)
    if match is not None:
        for expert in range(weight.experts):
            yield f"{match[1]}.experts", match[2], expert, Rows(weight, expert, rows)


def _stacks(parent: str, matrices: Matrices, config: Mapping[str, Any]) -> Iterator[Restored]:
    """Yield the stacks gate_up_proj and down_proj of a module, or nothing if they cannot be put together."""
    experts = 1 + max(expert for _, expert in matrices)
    text = config.get("text_config")
    counts = {**(text if isinstance(text, Mapping) else {}), **config}
    declared = next((counts[key] for key in _COUNTS if isinstance(counts.get(key), int)), experts)
    kinds = {(rows.weight.container, rows.weight.dtype) for rows in matrices.values()}
    if len(matrices) != len(_STACK_LEAVES) * experts or declared != experts or len(kinds) != 1:
        return
    sizes = [{matrices[leaf, e].weight.shape[-2:] for e in range(experts)} for leaf in _STACK_LEAVES]
    if sizes[0] != sizes[1] or len(sizes[0]) != 1 or sizes[2] != {shape[::-1] for shape in sizes[0]}:
        return
    ((inner, hidden),) = sizes[0]
    if hidden in (inner, 2 * inner) and str(config.get("model_type", "")).startswith(_TRANSPOSED_ON_LOADING):
        return
    for leaf, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        yield _stack(f"{parent}.{leaf}", [tuple(matrices[part, e] for part in parts) for e in range(experts)])


def _stack(name: str, experts: Sequence[tuple[Rows, ...]]) -> Restored:
    """Return a stack of experts: for each, its matrices (one, or gate and up), whose rows follow each other."""
    # The stack is written in BF16 if the first matrix is quantized, otherwise in the dtype of that matrix.
    first, columns = experts[0][0].weight, experts[0][0].weight.shape[-1]
    rows = sum(end - begin for _, _, (begin, end) in experts[0])
    dtype = "BF16" if first.container is not None else first.dtype
    output = OutputTensor(name, dtype, (len(experts), columns, rows), VALUES)
    pieces = []
    for number, matrices in enumerate(experts):
        one, at, span = matrices[0]
        if len(matrices) > 1:
            one = Weight(name, one.tensor, (rows, columns), one.container, one.parts, members=matrices)
            at, span = 0, (0, rows)
        place = (len(experts) * rows, number * rows)
        pieces.append(Piece(one, at, span, name, None, (output,), *place, transposed=True))
    weights = {part.weight.tensor: part.weight for matrices in experts for part in matrices}
    reason = f"experts: decoded and put together as {name.rpartition('.')[2]}"
    return Restored(name, (len(experts), rows, columns), tuple(weights.values()), reason, tuple(pieces))


_KEYS, _VALUES, _WHOLE = "embed_q", "unembed_out", "kv_b_proj"
_PARTNER = {_KEYS: _VALUES, _VALUES: _KEYS}
Tensors = Mapping[str, tuple[SafetensorsFile, TensorEntry]]


def split_layers(tensors: Tensors, weights: Mapping[str, Weight]) -> dict[str, Restored]:
    """Return a dict from tensor name to layer, for every kv_b_proj that is stored as two stacks; {} if there is
    none.
    """
    stacks = {weight.name: weight for weight in weights.values() if _leaf(weight.name) in _PARTNER}
    for name, (file, entry) in tensors.items():
        module = name.removesuffix(".weight")
        is_plain = entry.dtype in FLOAT_DTYPES and len(entry.shape) == 3 and 0 not in entry.shape
        if module != name and module not in stacks and _leaf(module) in _PARTNER and is_plain:
            stacks[module] = Weight(module, name, entry.shape, None, {VALUES: located(file, entry)})
    found = {}
    for name, weight in stacks.items():
        parent = name.removesuffix(_leaf(name))
        partner = stacks.get(parent + _PARTNER[_leaf(name)])
        if partner is None:
            raise CheckpointError(
                f"{shown(name)}: mlx-lm made it from {_WHOLE}, which other engines need, but"
                f" {_PARTNER[_leaf(name)]} is missing, so {_WHOLE} cannot be restored; download the model again"
            )
        if _leaf(name) == _KEYS:
            found[weight.tensor] = _kv_b_proj(f"{parent}{_WHOLE}", weight, partner)
    return found


def _kv_b_proj(name: str, keys: Weight, values: Weight) -> Restored:
    """Return the layer whose heads consist of rows for keys, embed_q [H, K, nope], and for values, [H, v, K]."""
    if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[:2] != (values.shape[0], values.shape[2]):
        raise CheckpointError(
            f"{shown(keys.name)}: has shape {list(keys.shape)} and {_VALUES} {list(values.shape)}; [H, K, nope] and"
            f" [H, v, K] are needed to restore {_WHOLE}; download the model again"
        )
    heads, columns, nope = keys.shape
    height = values.shape[1]
    total = heads * (nope + height)
    dtype = next((weight.dtype for weight in (keys, values) if weight.container is None), "BF16")
    outputs = (OutputTensor(f"{name}.weight", dtype, (total, columns), VALUES),)
    pieces = []
    for head in range(heads):
        first = head * (nope + height)
        of_keys = Piece(keys, head, (0, columns), name, None, outputs, total, first, transposed=True, height=nope)
        pieces += [of_keys, Piece(values, head, (0, height), name, None, outputs, total, first + nope, height=height)]
    reason = "embed_q and unembed_out of mlx-lm: decoded and put together as kv_b_proj"
    return Restored(name, (total, columns), (keys, values), reason, tuple(pieces))


def is_split(name: str) -> bool:
    """Return whether a tensor has the name of one of the two stacks that mlx-lm makes of kv_b_proj."""
    return name.endswith((f".{_KEYS}.weight", f".{_VALUES}.weight"))


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


_CACHE_LEAVES = {"k_scale": "k_proj", "v_scale": "v_proj"}
CACHE_FORMATS = ("modelopt", "compressed-tensors")
_FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}
_FP8_COMPRESSED = {**_FP8, "strategy": "tensor", "symmetric": True}


class KvCache(NamedTuple):
    """The quantized KV cache of a source, as its config files declare it and its tensors store it.

    Attributes:
        scheme: ``kv_cache_scheme`` in ``quantization_config`` of config.json; None if there is none.
        algorithm: ``kv_cache_quant_algo`` of hf_quant_config.json or config.json, in capitals; None if there is none.
        format: the format of the source, "modelopt" or "compressed-tensors"; "" for any other format.
        tensors: the names of the tensors that hold scales of the cache; () if there are none.
    """

    scheme: Mapping[str, Any] | None
    algorithm: str | None
    format: str
    tensors: tuple[str, ...]

    @property
    def is_fp8(self) -> bool:
        """True if the cache is FP8 (8-bit floats) with static scales, the only cache that both formats support."""
        # ``scheme`` decides if there is one, and otherwise ``algorithm``.
        if self.scheme is None:
            return self.algorithm == "FP8"
        kind = self.scheme.get("num_bits"), self.scheme.get("type")
        return kind == (8, "float") and not self.scheme.get("dynamic")

    def declaration(self, format: str) -> tuple[Mapping[str, Any] | None, str | None]:
        """Return (kv_cache_scheme, kv_cache_quant_algo), which configs of a format that keeps the cache declare."""
        if not self.is_fp8:
            return self.scheme, self.algorithm
        usual = _FP8 if format == "modelopt" else _FP8_COMPRESSED
        scheme = self.scheme if format == self.format and self.scheme is not None else usual
        return scheme, "FP8" if format == "modelopt" else None

    def is_carried(self, format: str) -> bool:
        """Return whether an output of the given format keeps the scales and the declaration of the KV cache."""
        undeclared = self.scheme is None and self.algorithm is None
        if format not in CACHE_FORMATS or (undeclared and not self.tensors):
            return False
        return format == self.format or self.is_fp8 or undeclared

    def reason(self, format: str, format_name: str) -> str:
        """Return the reason why an output of a format cannot keep the KV cache, for the user."""
        if format not in CACHE_FORMATS:
            return f"{format_name} has no place for it; {' and '.join(CACHE_FORMATS)} have"
        cache = self.algorithm or brief(self.scheme)
        return (
            f"the cache is {cache}, and {format_name} can declare only FP8 with static scales; {self.format} keeps it"
        )

    def name(self, tensor: str, format: str) -> str:
        """Return the output name of a tensor with a scale of the KV cache, such as "attn.k_scale"."""
        attention, _, leaf = tensor.rpartition(".")
        projection = _CACHE_LEAVES.get(leaf)
        if projection is None:
            return tensor
        attention = attention.removesuffix(f".{projection}")
        return f"{attention}.{projection}.{leaf}" if format == "modelopt" else f"{attention}.{leaf}"


_CACHE_ENTRIES = ("kv_cache_quant_algo", "kv_quant_type", "kv_cache_type")


def kv_cache_of(source: Source) -> KvCache:
    """Return the quantized KV cache of a source, as its config files declare it and its tensors store it."""
    found = declared(with_declaration(source.config, source.hf_quant_config))
    scheme = found.get("kv_cache_scheme")
    declares = entries(source.config, source.hf_quant_config)
    algorithm = next((value for key, value in declares if key in _CACHE_ENTRIES and value), None)
    method = str(found.get("quant_method", "")).lower()
    form = next((one for one in CACHE_FORMATS if method.startswith(one)), "")
    tensors = tuple(
        name
        for name in source.tensors
        if name.rpartition(".")[2] in _CACHE_LEAVES or found.get(name) in ATTENTION_TYPES
    )
    name = None if algorithm is None else str(algorithm).upper()
    return KvCache(scheme if isinstance(scheme, Mapping) and scheme else None, name, form, tensors)


def cache_troubles(tensors: Mapping[str, tuple[SafetensorsFile, TensorEntry]]) -> Iterator[tuple[str, str, str]]:
    """Yield (severity, name, reason) for each scale of the KV cache that is wrong or has no counterpart."""
    scales = {name: place for name, place in tensors.items() if name.rpartition(".")[2] in _CACHE_LEAVES}
    layers: dict[str, set[str]] = defaultdict(set)
    with Readers() as readers:
        for name, place in scales.items():
            attention, _, leaf = name.rpartition(".")
            layers[attention.removesuffix(f".{_CACHE_LEAVES[leaf]}")].add(leaf)
            values = np.asarray(readers.array(located(*place)).reshape(-1), np.float32)
            wrong = values[~((values > 0) & np.isfinite(values))]
            if wrong.size:
                yield "error", name, f"is {wrong[0]}; a positive finite number is needed as scale of the KV cache"
    for attention, found in layers.items():
        if len(found) == 1:
            (leaf,) = found
            other = next(one for one in _CACHE_LEAVES if one != leaf)
            yield "warning", attention, f"has a {leaf}, but no {other}; most engines need both for the KV cache"


# Leaf name of a stack that holds gate and up -> leaf name of the stack of down projections in the same module.
_PAIRS = {"gate_up_proj": "down_proj", "w13": "w2"}


def check_layers(selected: Mapping[str, Weight], others: Mapping[str, TensorEntry]) -> None:
    """Raise CheckpointError if a layer must not be quantized, because the result could not be read or would be
    wrong.
    """
    plain = {weight.name: weight for weight in selected.values() if weight.container is None}
    shapes = {name: weight.shape for name, weight in plain.items()}
    for trouble in filter(None, (stacks_trouble(name, shapes) for name in plain)):
        raise CheckpointError(trouble)
    for name, entry in others.items():
        above = layer_above(name, plain)
        if above is not None and not is_known_beside(above[1], entry):
            raise CheckpointError(
                f"{shown(name)} ({entry.dtype} {list(entry.shape)}): lies beside a layer to quantize, and is not known;"
                f" leave the layer as it is with --keep '{shown(above[0].name)}', or remove the tensor from the source"
            )


def stacks_trouble(name: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return an error message if the shapes of a stack of experts and of its counterpart do not fit; "" if they do."""
    parent, _, leaf = name.rpartition(".")
    pair = next(((a, b) for a, b in _PAIRS.items() if leaf in (a, b)), None)
    both = () if pair is None else tuple(shapes.get(f"{parent}.{one}", ()) for one in pair)
    if pair is None or any(len(shape) != 3 for shape in both):
        return ""
    (experts, rows, columns), down = both
    if down == (experts, columns, rows // 2):
        return ""
    words = ", ".join(f"{shown(parent)}.{one} {list(shape)}" for one, shape in zip(pair, both, strict=True))
    return (
        f"{words}: the shapes of these stacks of experts do not fit together, read as [E, N, K]; [E, 2I, H] and"
        " [E, H, I] are needed; one of them may be transposed; repair the source, or keep both unquantized"
    )


_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.")


def missing_experts(names: Iterable[str]) -> Iterator[str]:
    """Yield a warning for each module in which the number of an expert is missing: one below the largest number."""
    found: dict[str, set[int]] = defaultdict(set)
    for match in filter(None, map(_EXPERT.match, names)):
        found[match[1]].add(int(match[2]))
    for module, numbers in found.items():
        missing = sorted(set(range(max(numbers))) - numbers)
        if missing:
            yield (
                f"{shown(module)}: has expert {max(numbers)}, but not {listed([str(number) for number in missing])};"
                " engines leave missing experts at random values"
            )


# The modules of a decoder layer without which no model of the usual names computes anything useful
_NEEDED = "q_proj o_proj qkv_proj gate_proj up_proj gate_up_proj down_proj ffn_down attn_output".split()
_MAIN = re.compile(r"(.*\.)?(model|language_model|decoder|transformer|gpt_neox)\.(layers|h)|blk")  # run once per layer
_LAYER = re.compile(rf"(.*?(?:^|\.)(?:{'|'.join(LAYER_LISTS)}))\.(\d{{1,6}})\.(.+)")
_FEWEST_PARTS = 3  # a list whose members have fewer tensors may be a torch.nn.Sequential, whose numbers have gaps
INCOMPLETE, TRANSPOSED = "engines fail, or leave it at random values", "seems to be stored transposed"
NUMBERS = re.compile(r"(?<![^.])\d+(?![^.])")


def missing_layers(names: Iterable[str], config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (severity, subject, text) for layers that are missing, and for modules that only a few layers lack."""
    # Layers may differ by design: a dense first layer has modules of its own, and modules such as compressors may be
    # missing as a whole. So a layer is judged only if it has no module that is unusual. First layers may lack a norm.
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    rest, declared = [], None
    for name in names:
        match = _LAYER.fullmatch(name)
        if match is None:
            rest.append(name)
        else:
            stacks[match[1]][int(match[2])].add(NUMBERS.sub("#", match[3].rpartition(".")[0] or match[3]))
    stacks = {name: layers for name, layers in stacks.items() if max(map(len, layers.values())) >= _FEWEST_PARTS}
    longest = max(stacks, key=lambda name: len(stacks[name]), default="")
    with suppress(CheckpointError):
        declared = model_facts(config).layers
    if longest == "model.layers" and any("norm" in module for module in stacks[longest][max(stacks[longest])]):
        yield from (("warning", "model", f"{what} is missing; {INCOMPLETE}") for what in _missing_outside(rest, config))
    for stack, layers in stacks.items():
        # A file without a config may be a part, and so is a single layer.
        first, end = (min(layers) if declared is None or len(layers) == 1 else 0), max(layers) + 1
        if declared is not None and stack == longest and _MAIN.fullmatch(stack) and len(layers) > 1:
            end = max(end, declared)
            inside = set[str]().union(*(modules for number, modules in layers.items() if number < declared))
            # Modules of multi-token prediction have parts of their own, such as eh_proj.
            beyond = [str(number) for number in sorted(layers) if number >= declared and layers[number] <= inside]
            if beyond:
                text = f"{counted(len(beyond), 'layer')} beyond the {declared} that config.json declares"
                yield "error", stack, f"{text}: {listed(beyond)}; engines fail, or leave them out"
        absent = [str(number) for number in range(first, end) if number not in layers]
        if absent:
            yield "error", stack, f"{counted(len(absent), 'layer')} of {end} missing: {listed(absent)}; {INCOMPLETE}"
        counts = Counter(module for modules in layers.values() for module in modules)
        usual = {module for module, count in counts.items() if 0 < len(layers) - count <= max(1, len(layers) // 10)}
        always = {module for module, count in counts.items() if count == len(layers)}
        for number, modules in sorted(layers.items()) if len(layers) > 2 else ():
            if not modules <= usual | always:
                continue
            for module in sorted(usual - modules):
                parent, _, leaf = module.rpartition(".")
                is_needed = leaf in _NEEDED and any(one.rpartition(".")[0] == parent for one in modules)
                text = f"is missing, but {counts[module]} of {len(layers)} layers have it; {INCOMPLETE}"
                if is_needed or number:
                    yield "error" if is_needed else "warning", f"{stack}.{number}.{module}", text


def _missing_outside(names: Sequence[str], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what no name outside the layers of a decoder stands for: the last norm, the embedding, the output head."""
    parts: dict[str, tuple[str, ...]] = {"the norm after the layers": ("norm",), "the embedding": ("embed",)}
    if config.get("tie_word_embeddings") is False and "ForCausalLM" in str(config.get("architectures")):
        parts["the output head, which is not tied to the embedding,"] = ("head", "output", "embed_out")
    for what, words in parts.items():
        if not any(word in name for name in names for word in words):
            yield what


def wide_floats(others: Mapping[str, TensorEntry]) -> Iterator[str]:
    """Yield one warning that names all matrices in float64, which are not quantized."""
    names = [name for name, one in others.items() if one.dtype == "F64" and name.endswith(".weight") and one.shape[1:]]
    if names:
        yield f"{listed(names)}: stay F64, because only F32, F16 and BF16 are quantized; convert them first"


# Leaf names of layers that read the hidden state, and of layers that write it.
_READS, _WRITES = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def all_doubts(
    weights: Iterable[Weight], config: Mapping[str, Any], tensors: Mapping[str, tuple[object, TensorEntry]]
) -> Iterator[str]:
    """Yield all warnings about layers that seem wrong: damaged layers, transposed layers, and a tied output head."""
    weights = [*weights]
    yield from doubtful_layers(weights, config, tensors)
    yield from filter(None, [tied_head(weights, config)])


def doubtful_layers(
    weights: Iterable[Weight], config: Mapping[str, Any], tensors: Mapping[str, tuple[object, TensorEntry]]
) -> Iterator[str]:
    """Yield warnings about layers that seem to lack rows, columns or tensors, or to be stored transposed."""
    weights = [*weights]
    cut = misfits(weights, config)
    yield from (misfit.text for misfit in cut)
    entries = {name: entry for name, (_, entry) in tensors.items()}
    yield from unfit_biases(weights, entries)
    if any_quantized(weights):
        yield from unlike_layers(weights, entries, config)
    names = {misfit.weight.name for misfit in cut}
    whole = [weight for weight in weights if weight.name not in names]
    found = [*transposed_layers(whole, config)]
    yield from found or unfit_heads(whole, config)


# key of config.json -> (parent of the leaf, or "", {leaf name: the axis that has this length})
_SIZES: dict[str, tuple[str, dict[str, int]]] = {
    "hidden_size": ("", {**dict.fromkeys((*_READS, "embed_tokens"), 1), **dict.fromkeys(_WRITES, 0)}),
    "intermediate_size": ("mlp.", {"gate_proj": 0, "up_proj": 0, "down_proj": 1}),
}


def transposed_layers(weights: Iterable[Weight], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield one warning that names all layers that seem to be stored as [K, N], or one if a size fits no layer."""
    text, turned = config.get("text_config"), dict[str, bool]()
    config = text if isinstance(text, Mapping) else config
    shapes = {w.name: w.shape for w in weights if len(w.shape) == 2 and (".layers." in w.name or "embed" in w.name)}
    for key, (parent, axes) in _SIZES.items():
        sizes = {value for name, value in config.items() if key in name and isinstance(value, int)}
        leaves = {name: name.rpartition(".")[2] for name in shapes}
        known = [name for name, leaf in leaves.items() if leaf in axes and name.endswith(parent + leaf)]
        right = {name for name in known if shapes[name][axes[leaves[name]]] in sizes}
        unfit = [name for name in known if not sizes & {*shapes[name]}]
        if isinstance(config.get(key), int) and unfit and not right:
            what = f"{shown(unfit[0])} is {list(shapes[unfit[0]])}"
            yield f"{what}, which does not fit {key} {config[key]} in config.json; {INCOMPLETE}"
            return
        swapped = {name: name not in right and name not in unfit for name in known if sizes}
        turned = {name: turned[name] and swapped.get(name, True) for name in turned} or swapped
        if not turned:  # without hidden_size
            return
    if names := [name for name, is_turned in turned.items() if is_turned]:
        yield (
            f"{listed(names)}: {TRANSPOSED}, because only its other axis has hidden_size {config.get('hidden_size')};"
            " engines expect [outputs, inputs]"
        )


# key of config.json -> {leaf name: the axis that has this number of heads times head_dim}
_HEADS = {"num_attention_heads": {"q_proj": 0, "o_proj": 1}, "num_key_value_heads": {"k_proj": 0, "v_proj": 0}}
_SELF_ATTENTION = re.compile(r"(?:model\.|language_model\.){0,3}layers\.\d+\.self_attn\.(\w+)")
# Families whose head_dim, if a config has none, is hidden_size / num_attention_heads; in others it is a constant.
_DERIVED = ("granite", "llama", "mistral", "mixtral", "olmo", "olmo2", "qwen2", "qwen2_moe")


def unfit_heads(weights: Iterable[Weight], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each number of heads in config.json that no layer of a name fits; none for special attention."""
    text = config.get("text_config")
    config = {key: value for key, value in (text if isinstance(text, Mapping) else config).items() if value is not None}
    # Other keys of heads and ranks stand for latent attention, gates per head, or layers with heads of another size.
    special = {key for key in config if ("head" in key or "lora" in key) and not key.startswith("linear_")}
    heads, size, hidden = (config.get(key) for key in ("num_attention_heads", "head_dim", "hidden_size"))
    if size is None and config.get("model_type") in _DERIVED and type(heads) is type(hidden) is int and heads > 0:
        size = hidden // heads
    layers: dict[str, list[Weight]] = defaultdict(list)
    for weight in weights:
        if (match := _SELF_ATTENTION.fullmatch(weight.name)) and len(weight.shape) == 2:
            layers[match[1]].append(weight)
    if special - {*_HEADS, "head_dim"} or any("kv_" in leaf for leaf in layers) or type(size) is not int:
        return
    for key, axes in _HEADS.items():
        needed = config[key] * size if type(config.get(key)) is int else 0
        for leaf, axis in axes.items():
            fits = (needed, 2 * needed) if leaf == "q_proj" else (needed,)  # a gate of the output doubles the rows
            if needed and layers[leaf] and not any(one.shape[axis] in fits for one in layers[leaf]):
                yield (
                    f"{shown(layers[leaf][0].name)} is {list(layers[leaf][0].shape)}, which does not fit {key}"
                    f" {config[key]} in config.json: with head_dim {size}, it needs {needed}"
                    f" {('rows', 'columns')[axis]}; {INCOMPLETE}"
                )
                break
