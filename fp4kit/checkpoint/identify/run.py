"""Identify what made a checkpoint: match its layers with a source, explain them in batches, and give the verdict."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fp4kit.checkpoint.containers.table import SCALES
from fp4kit.checkpoint.executors import Options, executor_of, pending_limit, run_all
from fp4kit.checkpoint.identify import layer_pairs, verdicts
from fp4kit.checkpoint.identify.layer_pairs import LayerSpec
from fp4kit.checkpoint.identify.verdicts import CheckpointVerdict, LayerSeries, LayerVerdict
from fp4kit.checkpoint.model.closed_world import check_model
from fp4kit.checkpoint.model.doubts import doubt_of, is_empty
from fp4kit.checkpoint.model.inspect import Checkpoint, quantization_summary
from fp4kit.checkpoint.model.model_files import open_source
from fp4kit.checkpoint.model.slabs import Readers, scales_of, slabs, values_of
from fp4kit.checkpoint.model.statistics import doubts_of, reference_of, sampled_magnitudes
from fp4kit.checkpoint.model.transforms import TurnedOrigin, undo
from fp4kit.checkpoint.model.weights import Weight, weights_of
from fp4kit.layouts import unpacked
from fp4kit.storage.files import CheckpointError

_BATCH_BYTES, _BATCH_LAYERS = 64 << 20, 256  # a batch of layers has about so many bytes to read, or so many layers
# One layer of each of so many roles is explained before all others, because what explains it is tried first on them.
_MOST_ROLES = 64


def identify_checkpoint(
    destination: str | Path,
    source: str | Path,
    options: Options | None = None,
    ignore: Iterable[str] = (),
    *,
    layers: Iterable[str] = (),
    all_rows: bool = False,
) -> CheckpointVerdict:
    """Say which recipe made each quantized layer of a checkpoint, given the model from which it was made.

    The names of a layer in the checkpoint and in the source may differ in the ways that tools rename layers (see
    pair_names.py). A layer without a counterpart in the source is named in the verdict.

    By default, 256 rows of each larger layer are compared with the source: groups of adjacent rows, one from each part
    of the layer. If these rows are explained, so is the layer; otherwise, all of its rows are read. A fault in few
    other rows may thus be missed (see ``coverage`` of the result). If a tensor scale depends on the amax of the source,
    all rows of the source are read for this amax. What explained earlier layers is tried first on the next layer, and
    ends the search if it gives all bytes. So other recipes that also do may not be named for a single layer.

    Args:
        destination: the quantized checkpoint: a model directory, GGUF file or safetensors file.
        source: the model with the original weights.
        options: workers, executor and progress, as for ``convert``. Devices and ``resume`` have no effect. The result
            does not depend on the options. Without ``workers``, this process does all work.
        ignore: globs of tensors, config keys and metadata entries of the checkpoint to leave out although fp4kit does
            not know them.
        layers: globs of the names of layers to identify; () for all layers.
        all_rows: True to compare all rows.

    Returns:
        A CheckpointVerdict with the recipes and mishaps that explain the layers.

    Raises:
        CheckpointError: in one of these cases:

            - A model cannot be opened.
            - The checkpoint has no quantized layer, or no quantized layer has a counterpart in the source.
            - A glob of ``layers`` matches no quantized layer.
            - A model has a tensor, config key or metadata entry that fp4kit does not know. ``ignore`` can exclude those
              of the checkpoint, but not those of the source.
        ChildProcessError: a worker process died.
    """
    return PreparedIdentification(destination, source, ignore, layers, all_rows).run(options or Options())


class PreparedIdentification:
    """An identification that is prepared and not yet run. The arguments are those of identify_checkpoint."""

    def __init__(
        self,
        destination: str | Path,
        source: str | Path,
        ignore: Iterable[str] = (),
        layers: Iterable[str] = (),
        all_rows: bool = False,
    ) -> None:
        stored, origin = open_source(Path(destination)), open_source(Path(source))
        known = weights_of(stored.tensors, stored.config, damaged=True)
        rotations = undo(stored, known, tuple(ignore)).rotations
        check_model(origin, origin.weights)
        weights = [weight for weight in known.values() if weight.container is not None]
        if not weights:
            raise CheckpointError(
                f"{destination}: no quantized layer of a known format; a quantized checkpoint is needed; fp4kit inspect"
                " lists its tensors"
            )
        chosen = _chosen(weights, tuple(layers))
        self._specs, self._unpaired = layer_pairs.layer_specs(stored, weights, chosen, origin, rotations, all_rows)
        if not self._specs:
            way = "give the model that it was made from"
            in_gguf = any(weight.container and weight.container.in_blocks for weight in weights)
            if in_gguf and not str(source).endswith(".gguf"):
                way = (
                    "a source in GGUF is needed, because its names and row order are equal; write one with llama.cpp's"
                    " convert_hf_to_gguf.py SRC --outtype bf16"
                )
            raise CheckpointError(f"{destination}: no quantized layer has the name of a weight of {source}; {way}")

    @property
    def nbytes(self) -> int:
        """The number of bytes that ``run`` reports to options.progress in total, unless rows are read again."""
        return sum(spec.nbytes for spec in self._specs)

    def run(self, options: Options) -> CheckpointVerdict:
        """Explain all layers, and return the verdict on the checkpoint. Only workers and progress are used."""
        tick = options.progress or (lambda count: None)
        series = LayerSeries()
        found: dict[int, LayerVerdict] = {}
        first: dict[tuple[str, ...], tuple[int, LayerSpec]] = {}  # one layer of each role, such as the first q_proj
        for number, spec in enumerate(self._specs):
            first.setdefault(spec.role, (number, spec))
        for number, layer in _explained(list(first.values())[:_MOST_ROLES], series):
            found[number] = layer
            tick(self._specs[number].nbytes)
        rest = [(number, spec) for number, spec in enumerate(self._specs) if number not in found]
        calls = deque((_explained_batch, (batch, series)) for batch in _batches(rest))
        workers = options.workers or 1
        with executor_of(options.executor, workers) as executor:
            for batch in run_all(executor, calls, pending_limit(options.executor, workers)):
                found |= dict(batch)
                tick(sum(self._specs[number].nbytes for number, _ in batch))
        layers = tuple(found[number] for number in range(len(self._specs)))
        verdict = verdicts.checkpoint_verdict(layers, self._unpaired)
        rows = [(spec.rows_read, spec.rows) for spec in self._specs]
        sampled = [count for count, total in rows if count < total]
        read, total = (sum(counts) for counts in zip(*rows, strict=True))
        coverage = verdicts.Coverage(read, total, min(sampled, default=0))
        unlike = {layer.name for layer in layers if layer.explanation.unlike and not layer.explanation.blank}
        moved = other_places([spec for spec in self._specs if spec.name in unlike], self._specs) if unlike else ()
        return replace(verdict, coverage=coverage, moved=moved)


def _chosen(weights: Sequence[Weight], patterns: Sequence[str]) -> list[Weight]:
    """Return the weights whose names match a pattern; all if there are none."""
    for pattern in patterns:
        if not any(fnmatchcase(weight.name, pattern) for weight in weights):
            raise CheckpointError(
                f"--layers {pattern}: matches no quantized layer; the first is {weights[0].name}; fp4kit inspect lists"
                " all names"
            )
    return [weight for weight in weights if not patterns or any(fnmatchcase(weight.name, one) for one in patterns)]


def _batches(specs: Iterable[tuple[int, LayerSpec]]) -> Iterator[list[tuple[int, LayerSpec]]]:
    """Yield (number, spec) pairs in batches of limited size, which do not depend on the number of workers."""
    batch: list[tuple[int, LayerSpec]] = []
    size = 0
    for number, spec in specs:
        batch.append((number, spec))
        size += spec.nbytes
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_LAYERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _explained_batch(batch: list[tuple[int, LayerSpec]], series: LayerSeries) -> list[tuple[int, LayerVerdict]]:
    """Explain a batch of layers in a worker."""
    return list(_explained(batch, deepcopy(series)))


def _explained(batch: list[tuple[int, LayerSpec]], series: LayerSeries) -> Iterator[tuple[int, LayerVerdict]]:
    """Read and explain some layers, and yield (number, verdict) for each. ``series`` learns from them."""
    with Readers() as readers:
        read = layer_pairs.PairReader(readers)
        for number, spec in batch:
            some = read.some(spec)
            found = series.explain(some, lambda spec=spec: read.whole(spec), spec.spans is None)  # type: ignore[misc]
            yield number, verdicts.verdict_of(some, found)


_MOST_UNLIKE = 64  # stored layers to look for
_MOST_ORIGINS = 4096  # layers of the source to compare with
_ROWS, _COLUMNS = 32, 64  # the first rows and columns that are compared; a multiple of the rows of a block
_AGREE = 0.97  # least share of nonzero codes that have the sign of the source


def other_places(unlike: Sequence[LayerSpec], every: Sequence[LayerSpec]) -> tuple[tuple[str, str], ...]:
    """Return (layer, layer of the source) for stored layers that were made from source layers of other names."""
    found: list[tuple[str, str]] = []
    with Readers() as readers:
        by_shape: dict[tuple[int, ...], list[tuple[str, npt.NDArray[np.float32]]]] = defaultdict(list)
        shapes = {spec.origin.shape for spec in unlike}
        for spec in [one for one in every if one.origin.shape in shapes][:_MOST_ORIGINS]:
            if not isinstance(spec.origin, TurnedOrigin):
                rows = spec.origin.slab(readers, slice(0, min(_ROWS, spec.origin.shape[0])))
                values = values_of(spec.origin.weight, rows)[:, :_COLUMNS].astype(np.float32)
                by_shape[spec.origin.shape].append((_origin_name(spec), np.where(np.signbit(values), -1, 1).ravel()))
        for spec in unlike[:_MOST_UNLIKE]:
            signs, names = _stored_signs(spec, readers), [name for name, _ in by_shape[spec.origin.shape]]
            if signs is None or not names:
                continue
            likeness = np.stack([values for _, values in by_shape[spec.origin.shape]]) @ signs
            best = int(likeness.argmax())
            if likeness[best] >= (2 * _AGREE - 1) * np.count_nonzero(signs) > 0 and names[best] != _origin_name(spec):
                found.append((spec.name, names[best]))
    return tuple(found)


def _origin_name(spec: LayerSpec) -> str:
    """Return the name of the source layer of a spec, with its rows if it is a part of it."""
    origin = spec.origin
    name = origin.weight.name if origin.weight.experts == 1 else f"{origin.weight.name}[{origin.expert}]"
    first, end = origin.span
    return name if end - first == origin.weight.shape[-2] else f"{name} rows {first} to {end - 1}"


def _stored_signs(spec: LayerSpec, readers: Readers) -> npt.NDArray[np.float32] | None:
    """Return the signs of the first codes of a layer: -1, 0 or 1; None for shapes that cannot be compared."""
    if spec.origin.shape != spec.weight.shape[-2:]:
        return None
    layer = layer_pairs.stored_layer(spec.weight, spec.expert, readers)
    codes, element = np.ascontiguousarray(layer.codes[:_ROWS]), layer.element
    codes = unpacked(codes, element.packing)[:, :_COLUMNS]
    signs = np.where(element.values[codes] == 0, 0, np.where(codes & element.sign_bit, -1, 1))
    return np.ascontiguousarray(signs.ravel(), np.float32)


_MOST_SAMPLED = 64  # evenly spaced layers whose scales are read
_OWN = "fp4kit"  # the entry of quantization_config in which fp4kit records the recipe


def problems_of(checkpoint: Checkpoint) -> Counter[str]:
    """Check whether codes seem to belong to their scales, and scales to the model."""
    with Readers() as readers:
        doubts = (doubt_of(readers, weight) for weight in _sample(checkpoint))
        found = Counter(doubt for doubt in doubts if doubt)
    magnitudes = sampled_magnitudes(checkpoint.layers.values(), _MOST_SAMPLED)
    for doubt in doubts_of(magnitudes, reference_of(checkpoint.weights.values())):
        found[doubt.text] += len(doubt.names) or len(magnitudes)
    return found


def facts_of(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield (what, text) pairs that tell about the producer of a checkpoint, such as ("recipe.yaml",
    "GPTQModifier").
    """
    layers = checkpoint.layers
    for dtype, count in Counter(weight.dtype for weight in layers.values()).most_common():
        yield "container", f"{dtype} in {count} of {len(layers)} quantized layers"
    for key, value in quantization_summary(checkpoint):
        yield ("recorded by fp4kit" if key == _OWN else f"config {key}"), value
    if names := layer_pairs.modifiers_of(checkpoint.root / layer_pairs.RECIPE_FILE):
        yield layer_pairs.RECIPE_FILE, ", ".join(names)
    entries = {(key, value) for file in checkpoint.files for key, value in file.metadata.items()}
    for key, text in sorted((key, str(value)) for key, value in entries):
        if len(text) <= _LONGEST and not key.startswith("tokenizer."):
            yield f"metadata {key}", text
    sample, scales = _sample(checkpoint), Counter[float]()
    with Readers() as readers:
        for weight in sample:
            form = weight.container
            if form is not None and form.has_tensor_scale and form.scale is not None and SCALES in form.suffixes:
                stored = (scales_of(form, np.asarray(slab.scales)) for slab in slabs(readers, weight))
                scales[max((float(np.nanmax(one, initial=0)) for one in stored), default=0.0)] += 1
        empty = sum(is_empty(readers, weight) for weight in sample)
    for scale, count in scales.most_common(_MOST_SCALES):
        meaning = _MEANINGS.get(scale, "")
        yield "largest block scale", f"{scale:g} in {count} of {scales.total()} sampled layers{meaning}"
    if empty:
        yield "codes", f"all codes are zero in {empty} of {len(sample)} sampled layers"


_LONGEST = 120  # longer metadata, such as a vocabulary, is left out


def _sample(checkpoint: Checkpoint) -> list[Weight]:
    """Return at most 64 evenly spaced quantized layers of a checkpoint; all of them if there are no more."""
    layers = list(checkpoint.layers.values())
    count = min(len(layers), _MOST_SAMPLED)
    return [layers[i * len(layers) // count] for i in range(count)]


_MOST_SCALES = 3
_MEANINGS = {
    448.0: ": the tensor scale is amax / 2688, as in most recipes of NVFP4",
    256.0: ": the tensor scale is amax / 1536, as in recipes with four over six and -256",
}
