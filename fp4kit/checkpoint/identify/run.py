"""Identify what made a checkpoint: match its layers with a source, explain them in batches, and give the verdict."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from fp4kit.checkpoint.convert.convert import Options
from fp4kit.checkpoint.identify.identify import (
    CheckpointVerdict,
    Coverage,
    LayerVerdict,
    checkpoint_verdict,
    verdict_of,
)
from fp4kit.checkpoint.identify.layer_pairs import LayerSpec, LayerSpecs, PairReader
from fp4kit.checkpoint.identify.layer_series import LayerSeries
from fp4kit.checkpoint.identify.other_places import other_places
from fp4kit.checkpoint.model.closed_world import check_model
from fp4kit.checkpoint.model.model_files import open_source
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.model.transforms import undo
from fp4kit.checkpoint.model.weights import Weight, weights_of
from fp4kit.checkpoint.run.executors import executor_of, pending_limit, run_all
from fp4kit.storage.errors import CheckpointError

_BATCH_BYTES, _BATCH_LAYERS = 64 << 20, 256  # a batch of layers has about so many bytes to read, or so many layers
_MOST_ROLES = 64  # number of kinds of layers of which one is explained before all others


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
        rotations = undo(stored, known, ignore).rotations
        check_model(origin, weights_of(origin.tensors, origin.config))
        weights = [weight for weight in known.values() if weight.container is not None]
        if not weights:
            raise CheckpointError(
                f"{destination}: no quantized layer of a known format; a quantized checkpoint is needed; fp4kit inspect"
                " lists its tensors"
            )
        self._all = LayerSpecs(stored, weights, origin, rotations, all_rows)
        self._specs, self._unpaired = self._all.of(_chosen(weights, tuple(layers)))
        if not self._specs:
            raise CheckpointError(_nothing_matches(weights, destination, source))

    @property
    def nbytes(self) -> int:
        """The number of bytes that ``run`` reports to options.progress in total, unless rows are read again."""
        return sum(spec.nbytes for spec in self._specs)

    def run(self, options: Options) -> CheckpointVerdict:
        """Explain all layers, and return the verdict on the checkpoint. Only workers and progress are used."""
        tick = options.progress or (lambda count: None)
        series = LayerSeries()
        found: dict[int, LayerVerdict] = {}
        for number, layer in _explained(self._first_of_roles(), series):
            found[number] = layer
            tick(self._specs[number].nbytes)
        rest = [(number, spec) for number, spec in enumerate(self._specs) if number not in found]
        calls = deque((_explained_batch, (batch, series)) for batch in _batches(rest))
        workers = options.workers or 1
        with executor_of(options.executor, workers) as executor:
            for batch in run_all(executor, calls, pending_limit(options.executor, workers)):
                found |= dict(batch)
                tick(sum(self._specs[number].nbytes for number, _ in batch))
        verdicts = tuple(found[number] for number in range(len(self._specs)))
        verdict = checkpoint_verdict(verdicts, self._unpaired)
        rows = [(spec.rows_read, spec.rows) for spec in self._specs]
        sampled = [count for count, total in rows if count < total]
        read, total = (sum(counts) for counts in zip(*rows, strict=True))
        coverage = Coverage(read, total, min(sampled, default=0))
        return replace(verdict, coverage=coverage, moved=self._other_places(verdict))

    def _first_of_roles(self) -> list[tuple[int, LayerSpec]]:
        """Return (number, spec) for one layer of each role, such as the first q_proj."""
        found: dict[tuple[str, ...], tuple[int, LayerSpec]] = {}
        for number, spec in enumerate(self._specs):
            found.setdefault(spec.role, (number, spec))
        return list(found.values())[:_MOST_ROLES]

    def _other_places(self, verdict: CheckpointVerdict) -> tuple[tuple[str, str], ...]:
        """Return (layer, layer of the source) for layers that were made from a layer of another name."""
        unlike = {layer.name for layer in verdict.layers if layer.explanation.unlike and not layer.explanation.blank}
        if not unlike:
            return ()
        return other_places([spec for spec in self._specs if spec.name in unlike], self._specs)


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
        read = PairReader(readers)
        for number, spec in batch:
            some = read.some(spec)
            found = series.explain(some, lambda spec=spec: read.whole(spec), spec.spans is None)  # type: ignore[misc]
            yield number, verdict_of(some, found)


def _nothing_matches(weights: list[Weight], destination: str | Path, source: str | Path) -> str:
    """Return the error message for the case that no quantized layer of a checkpoint has a counterpart in the source."""
    in_gguf, from_gguf = any(w.container and w.container.in_blocks for w in weights), str(source).endswith(".gguf")
    start = f"{destination}: no quantized layer has the name of a weight of {source}; "
    if in_gguf and not from_gguf:
        way = "llama.cpp's convert_hf_to_gguf.py SRC --outtype bf16"
        return f"{start}a source in GGUF is needed, because its names and row order are equal; write one with {way}"
    return f"{start}give the model that it was made from"
