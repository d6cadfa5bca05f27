"""Make the contract that a conversion writes beside its manifest. A contract describes how a model is quantized: its
settings are the recipe of the weights, patterns of layers with other recipes, and settings of the server, such as the
recipe of activations.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.checkpoint.containers.config_entries import REFUSED, unfulfilled
from fp4kit.checkpoint.containers.configs import MIXED, container_id, keeps_inputs, with_declaration
from fp4kit.checkpoint.containers.table import INPUT_SCALE, MODELOPT_AWQ, MODELOPT_NVFP4, MODELOPT_STACKS
from fp4kit.checkpoint.convert.job import COPY, DEQUANTIZE
from fp4kit.checkpoint.findings import unquantized_by_engine
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.identify.verdicts import CheckpointVerdict
from fp4kit.checkpoint.model import transforms
from fp4kit.checkpoint.model.inspect import Checkpoint, QuantizedLayers, inspect_checkpoint, recorded
from fp4kit.checkpoint.model.model_files import CONFIG, existing_file, resolved
from fp4kit.checkpoint.model.slabs import Readers, scalar_of, tensor_scale_of
from fp4kit.checkpoint.model.weights import Weight, WeightRotation
from fp4kit.checkpoint.plan.layer_recipes import record, recorded_patterns
from fp4kit.checkpoint.plan.plan import Plan, configs
from fp4kit.checkpoint.selection.names import KEPT_CODES, PARTLY_CARRIED, fused_groups, split_module
from fp4kit.contract.schema import FILE, SETTINGS, Contract
from fp4kit.contract.sides import InputScale, by_layer, matrix_of
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe, recipe
from fp4kit.recipes.table import from_record, to_spec
from fp4kit.reference.stochastic import HADAMARD_BLOCK
from fp4kit.storage.files import NUMPY_DTYPES, CheckpointError, shown
from fp4kit.storage.quantized_file import load, recipes_of

SERVER = (
    "activations",
    "input_scales",
    "served_dtype",
    "kv_cache",
    "kv_layout",
    "unit",
)  # settings of the server, not of a checkpoint
_KEPT_INPUTS = tuple((name, "the config declares unquantized inputs") for name in ("activations", "input_scales"))
OF_ENGINES = ("activations", "input_scales", "served_dtype", "unit")  # those that an engine and a scheme determine


def contract_of_plan(plan: Plan) -> Contract:
    """Return the contract of the checkpoint that a plan writes."""
    recipe, patterns = None, plan.recorded_patterns
    if plan.form is not None and not plan.carries_some_codes:
        recipe = from_record(plan.recorded)
    has_static = plan.has_input_scale and all(form.name in plan.input_scaled for form in plan.layers_of_forms)
    row = plan.request.serving
    unknown = [name for name in SERVER if name != "input_scales" or not has_static]
    if row is not None and recipe == row.weights:
        recipe, patterns = row.loaded, [*patterns, *([pattern, to_spec(one)] for pattern, one in row.patterns)]
    served: dict[str, Any] = {} if row is None else {name: getattr(row.contract, name) for name in OF_ENGINES}
    if row is None and not plan.is_file and keeps_inputs(configs(plan)[CONFIG]):
        served["inferred"] = _KEPT_INPUTS
    unknown = [name for name in unknown if name not in {**served, **dict(served.get("inferred", ()))}]
    if plan.form is not None and (recipe is None or any(from_record(one) is None for _, one in patterns)):
        unknown += ["weights", "patterns"] if patterns else ["weights"]
        recipe, patterns = None, []
    rotation = plan.request.rotation
    if rotation is not None and plan.request.hadamard_only:  # a contract states one transform for all layers
        rotation = None
        unknown += ["hadamard", "hadamard_signs"]
    pieces = (piece for tensor in plan.converted for piece in tensor.pieces if piece.form is not None)
    converted = dict.fromkeys(piece.module for piece in pieces)
    shares, search = any(tensor.group for tensor in plan.converted), plan.request.search
    return Contract(
        weights=recipe,
        patterns=tuple((pattern, from_record(one)) for pattern, one in patterns),
        excluded=tuple(_unquantized(plan)),
        shared_amax=tuple(_shared_leaves(converted)) if shares else (),
        **{"input_scales": "static" if has_static else None, **served},
        hadamard=None if rotation is None else rotation.size,
        hadamard_signs=signs_of(rotation),
        scale_search=None if search is None else search.label,
        container=plan.format_name,
        unknown=tuple(unknown),
    )


def signs_of(rotation: WeightRotation | None) -> str | None:
    """Return the signs of a rotation (Hadamard transform) as text of "+" and "-", for a contract; None if it has
    none.
    """
    if rotation is not None and not rotation.signs and rotation.size == HADAMARD_BLOCK:
        return "+" * rotation.size
    return None if rotation is None else rotation.signs or None


def _unquantized(plan: Plan) -> Iterator[str]:
    """Yield the names of the unquantized layers that a plan copies, and of those that it decodes beside quantized
    ones.
    """
    for tensor in plan.tensors:
        is_matrix = tensor.name.endswith(".weight") and len(tensor.shape) > 1
        if tensor.action == COPY and (is_matrix or tensor.name in plan.weights):
            yield tensor.name.removesuffix(".weight")
        elif tensor.action == DEQUANTIZE and plan.form is not None:
            yield from (piece.module for piece in tensor.pieces)


def _shared_leaves(modules: Iterable[str]) -> dict[tuple[str, ...], list[list[str]]]:
    """Return the layers that loaders fuse, by the leaf names that occur, such as (gate_proj, up_proj)."""
    leaves: dict[tuple[str, ...], set[str]] = defaultdict(set)
    groups: dict[tuple[str, ...], list[list[str]]] = defaultdict(list)
    for (_, fusion), members in fused_groups(modules).items():
        if len(members) > 1:
            leaves[fusion.members].update(split_module(member)[1] for member in members)
            groups[fusion.members].append([*members])
    return {tuple(leaf for leaf in order if leaf in leaves[order]): found for order, found in groups.items()}


def contract_of(path: str | Path, source: str | Path | None = None) -> Contract:
    """Return the contract of a checkpoint, as fp4kit.Contract.of documents it."""
    place = Path(path)
    if place.suffix == ".json":
        return _loaded(place)
    if resolved(place).is_dir() and os.path.lexists(place / FILE):
        return _loaded(existing_file(place, FILE))
    saved = recipes_of(place) if place.suffix == ".safetensors" and resolved(place).is_file() else None
    if saved:
        return _of_saved(saved)
    return infer(inspect_checkpoint(place, or_contract=True), None if source is None else Path(source))


def _loaded(path: Path) -> Contract:
    """Return the contract in a file. Raise CheckpointError, which names the file, for any error."""
    try:
        return Contract.load(path)
    except (ValueError, TypeError) as error:
        text = str(error)
        raise CheckpointError(text if path.name in text else f"{path.name}: {text}") from None


def _of_saved(recipes: Mapping[str, Recipe]) -> Contract:
    """Return the contract of a file that fp4kit.save wrote."""
    layers = {name.removesuffix(".weight"): r for name, r in recipes.items()}
    (usual, _), *_ = Counter(layers.values()).most_common()
    others = tuple((name, r) for name, r in layers.items() if r != usual)
    found = _Inferred()
    for name, value in (("weights", usual), ("patterns", others)):
        found.add(name, value, "recorded by fp4kit.save")
    return found.contract()


def infer(checkpoint: Checkpoint, source: Path | None) -> Contract:
    """Infer the contract of a checkpoint from what it stores and declares."""
    # ``weights``, ``container`` and the settings of the server are listed as unknown if they cannot be inferred.
    layers = checkpoint.layers
    found = _Inferred()
    if not layers:
        _check_unquantized(checkpoint)
        return Contract(unknown=SERVER, inferred=(("weights", "no layer is quantized"),))
    own, pairs = recorded(checkpoint), recorded_patterns(checkpoint)
    patterns = tuple((pattern, r) for pattern, one in pairs if (r := from_record(one)) is not None)
    if own is not None and len(patterns) == len(pairs) and _agrees(checkpoint, own, patterns):
        for name, value in (("weights", own), ("patterns", patterns)):
            found.add(name, value, "recorded by fp4kit convert")
    elif source is not None:
        found.identified(identify_checkpoint(checkpoint.root, source))
    if pairs and "weights" not in found.values:
        found.unknown.append("patterns")
    undone = transforms.resolved(checkpoint, checkpoint.weights)
    plain = [
        weight.name
        for tensor, weight in checkpoint.weights.items()
        if weight.container is None and tensor not in undone.matrices
    ]
    found.add("excluded", tuple(plain), "these weights are not quantized")
    found.add("shared_amax", _shared(layers), "these layers have equal tensor scales")
    rotations = undone.rotations
    if rotations.keys() == layers.keys() and len({*rotations.values()}) == 1:
        rotation = next(iter(rotations.values()))
        found.add("hadamard", rotation.size, "declared in transform_config")
        found.add("hadamard_signs", signs_of(rotation), "declared in transform_config")
    with_input = [name for name, weight in layers.items() if INPUT_SCALE in weight.parts]
    found.add("input_scales", "static" if len(with_input) == len(layers) else None, "every layer has an input scale")
    if keeps_inputs(with_declaration(checkpoint.config or {}, checkpoint.hf_quant_config)) and not with_input:
        found.values |= {name: None for name, _ in _KEPT_INPUTS}
        found.how |= dict(_KEPT_INPUTS)
    form = _container(layers, bool(with_input))
    found.add("container", form, "the names and dtypes of tensors")
    found.unknown += ["container"] if form is None else []
    return found.contract()


def _check_unquantized(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a checkpoint without quantized layers has signs of quantization that fp4kit cannot
    read.
    """
    refused = next((item for item in checkpoint.items if item.place == "tensor" and item.group == REFUSED), None)
    if refused is not None:
        raise CheckpointError(
            f"{checkpoint.root}: fp4kit cannot tell how it is quantized; {shown(refused.name)}: {refused.why}"
        )
    why = unfulfilled(checkpoint.config or {}, checkpoint.hf_quant_config)
    if why:
        raise CheckpointError(why)


def _container(layers: Mapping[str, Weight], has_input_scale: bool) -> str | None:
    """Return the name of the container of a checkpoint's layers, as a conversion writes it in a contract."""
    forms = {weight.container.name: weight.container for weight in layers.values() if weight.container is not None}
    if MODELOPT_NVFP4.name in forms:
        forms = {name: form for name, form in forms.items() if form not in (MODELOPT_AWQ, MODELOPT_STACKS)}
    first, *others = forms.values()
    if not others:
        return container_id(first, has_input_scale)
    return MIXED.get(first.format) if all(form.format == first.format for form in others) else None


class _Inferred:
    """The settings of a contract that were inferred from a checkpoint, and how each was found."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.how: dict[str, str] = {}
        self.unknown: list[str] = []

    def add(self, name: str, value: object, how: str) -> None:
        """Store the value of the setting `name`, and how it was found."""
        if value not in (None, ()):
            self.values[name], self.how[name] = value, how

    def identified(self, verdict: CheckpointVerdict) -> None:
        """Store what an identification found as the settings ``weights`` and ``patterns``."""
        if verdict.recipe is None:
            return
        self.add("weights", recipe(verdict.recipe), f"identified: {verdict.short_sentence}")
        others = {
            layer.name: layer.explanation.recipe
            for layer in verdict.layers
            if layer.explanation.recipes and not {*layer.explanation.recipes} & {*verdict.recipes}
        }
        pairs = tuple((name, recipe(id)) for name, id in others.items() if id)
        self.add("patterns", pairs, "identified")

    def contract(self) -> Contract:
        """Return the contract with the stored settings."""
        missing = (name for name in SETTINGS if name in ("weights", *SERVER) and name not in self.values)
        unknown = (*self.unknown, *missing)
        return Contract(**self.values, unknown=unknown, inferred=tuple(self.how.items()))  # type: ignore[arg-type]


def _agrees(checkpoint: Checkpoint, usual: Recipe, patterns: tuple[tuple[str, Recipe], ...]) -> bool:
    """Return whether the recorded recipes can be those of all quantized layers."""
    kept = (record(checkpoint) or {}).get("codes") or checkpoint.files[0].metadata.get(KEPT_CODES)
    if kept == PARTLY_CARRIED:
        return False
    contract = Contract(usual, patterns)
    recipes = ((weight.container, contract.recipe_of(name)) for name, weight in checkpoint.layers.items())
    return all(form is not None and one is not None and form.stores(one) for form, one in recipes)


def _shared(layers: dict[str, Weight]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of leaf names, such as (q_proj, k_proj, v_proj), whose layers share a tensor scale."""
    scaled = [name for name, one in layers.items() if one.container is not None and one.container.has_tensor_scale]
    with Readers() as readers:

        def is_shared(members: list[str]) -> bool:
            experts = range(min(layers[member].experts for member in members))
            return all(len({str(tensor_scale_of(readers, layers[m], e)) for m in members}) == 1 for e in experts)

        return tuple(leaves for leaves, groups in _shared_leaves(scaled).items() if all(map(is_shared, groups)))


# {dtype in safetensors: dtype in NumPy}, for tensors that are neither weights nor scales
_PLAIN = {
    name: np.dtype(dtype)
    for name, dtype in (
        ("F64", np.float64),
        ("F32", np.float32),
        ("F16", np.float16),
        ("BF16", ml_dtypes.bfloat16),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", ml_dtypes.float8_e5m2),
        ("F8_E8M0", ml_dtypes.float8_e8m0fnu),
        *((f"{kind}{bits}", f"{'int' if kind == 'I' else 'uint'}{bits}") for kind in "IU" for bits in (8, 16, 32, 64)),
        ("BOOL", np.bool_),
    )
}


class LazyTensors(Mapping[str, Any]):
    """A mapping from layer name to tensor, which reads the tensor from its file at every access.

    readers: layer -> function that reads it, and returns a Quantized or an array.
    input_scales: layer -> its static input scale; empty if the checkpoint stores none.
    others: the other tensors of the checkpoint, such as norms, biases and input scales. Their names have no ending
        ".weight". Empty if there are none.
    unquantized: engine -> layer -> whether the engine leaves it unquantized, as it reads the config of the checkpoint.
    activations: layer -> recipe of its inputs, None if they stay unquantized; without layers of which this is unknown.
    """

    def __init__(
        self,
        readers: Mapping[str, Callable[[], Any]],
        input_scales: Mapping[str, InputScale] | None = None,
        others: Mapping[str, Any] | None = None,
        unquantized: Mapping[str, Mapping[str, bool]] | None = None,
        activations: Mapping[str, Recipe | None] | None = None,
    ) -> None:
        self._readers, self.input_scales, self.others = readers, input_scales or {}, others or {}
        self.unquantized, self.activations = unquantized or {}, activations or {}

    def __getitem__(self, name: str) -> Any:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __contains__(self, name: object) -> bool:
        return name in self._readers


def opened(path: str | Path, or_contract: bool = False) -> tuple[Contract | None, Mapping[str, Any] | None]:
    """Return (contract, tensors by layer) of a path, as fp4kit.parity takes them."""
    place = Path(path)
    if place.suffix == ".json":
        return contract_of(place), None
    if place.suffix == ".safetensors" and place.is_file() and recipes_of(place) is not None:
        return None, by_layer(load(place))
    checkpoint = inspect_checkpoint(place, or_contract)
    if not checkpoint.layers and not place.is_dir():
        names = checkpoint.tensors
        return None, LazyTensors({n.removesuffix(".weight"): partial(_tensor, checkpoint, n) for n in names})
    read = unquantized_by_engine(checkpoint)
    unquantized = {
        engine: {transforms.canonical(name): left for name, left in found.items()} for engine, found in read.items()
    }
    return (contract_of(place) if checkpoint.layers else None), LazyTensors(*_readers(checkpoint), unquantized)


def _tensor(checkpoint: Checkpoint, name: str, decodes: bool = False) -> np.ndarray:
    """Read one tensor of a checkpoint, and return it as a new array."""
    with Readers() as readers:
        file, entry = checkpoint.tensors[name]
        if not decodes and entry.dtype in NUMPY_DTYPES:
            return np.array(readers.of(file).read(entry))
        stored = np.array(readers.of(file).read_bytes(entry))
    if entry.dtype not in _PLAIN:
        return stored
    found = stored.view(_PLAIN[entry.dtype]).reshape(entry.shape)
    return found.astype(np.float32) if entry.dtype.startswith("F8") else found


def _readers(checkpoint: Checkpoint) -> tuple[dict[str, Callable[[], Any]], dict[str, InputScale], LazyTensors]:
    """Return the arguments of LazyTensors: the functions that read layers, the input scales, and the other tensors."""
    quantized, config = QuantizedLayers(checkpoint), checkpoint.config or {}
    read = lru_cache(1)(quantized.__getitem__)  # the matrices of a stack are read one after another
    found: dict[str, Callable[[], Any]] = {}
    scales: dict[str, InputScale] = {}
    with Readers() as readers:
        for weight in checkpoint.weights.values():
            form = weight.container
            for e in range(weight.experts):
                for key, one, span in transforms.keys_of(weight, e, config):
                    if form is None:
                        found[key] = partial(_values, transforms.Origin(one, e, span))
                    elif span == (0, weight.shape[-2]):
                        found[key] = partial(_matrix, read, weight, e)
                    if form is not None and INPUT_SCALE in weight.parts:
                        scales[key] = InputScale(scalar_of(readers, weight, INPUT_SCALE, e), form.divides)
    parts = {
        located.entry.name
        for weight in checkpoint.weights.values()
        for kind, located in weight.parts.items()
        if kind != INPUT_SCALE
    }
    others: dict[str, str] = {}
    for name in checkpoint.tensors:
        key = _other_name(name)
        if name not in parts:
            others[name if key in others or key in found else key] = name
    return found, scales, LazyTensors({key: partial(_tensor, checkpoint, n, True) for key, n in others.items()})


def _other_name(name: str) -> str:
    """Return the name under which a tensor that is no layer is compared: canonical, and without an ending ".weight"."""
    module, _, leaf = name.rpartition(".")
    return (
        transforms.canonical(module)
        if leaf == "weight"
        else ".".join(filter(None, (transforms.canonical(module), leaf)))
    )


def _values(rows: transforms.Origin) -> np.ndarray:
    """Read and return some rows of an unquantized weight, in the dtype of the file."""
    with Readers() as readers:
        return rows.values(readers)


def _matrix(read: Callable[[str], Quantized], weight: Weight, expert: int) -> Quantized:
    """Return one matrix of a quantized weight as a Quantized with two axes."""
    q = read(weight.name)
    return q if len(q.shape) == 2 else matrix_of(q, expert)
