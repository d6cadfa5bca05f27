"""Verify a checkpoint: its files, what it stores, what loaders would make of it, and its bytes against the source."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from os.path import lexists
from pathlib import Path
from typing import Any

from fp4kit.checkpoint.containers.container import CODES, INPUT_SCALE, SCALES, TENSOR_SCALE, VALUES
from fp4kit.checkpoint.convert.convert import Options
from fp4kit.checkpoint.convert.journal import source_facts
from fp4kit.checkpoint.model.inspect import Checkpoint
from fp4kit.checkpoint.model.manifest import MANIFEST, differences, load_manifest
from fp4kit.checkpoint.model.model_files import HF_QUANT_CONFIG, Source, existing_file, open_source
from fp4kit.checkpoint.model.slabs import Readers, tensor_scale_of
from fp4kit.checkpoint.model.statistics import StoredCounts, total
from fp4kit.checkpoint.model.weights import Located, Weight, located
from fp4kit.checkpoint.plan.job import DEQUANTIZE, RENAME
from fp4kit.checkpoint.plan.scale_search import ScaleSearch, recorded_search
from fp4kit.checkpoint.run.executors import executor_of, run_all, start_devices
from fp4kit.checkpoint.run.leftovers import leftovers_of
from fp4kit.checkpoint.verify import reencode
from fp4kit.checkpoint.verify.integrity import Issue, loader_issues, stored_issues, strange_tensors
from fp4kit.checkpoint.verify.reencode import Check, ReencodedLayer, Settings
from fp4kit.lazy import lazy_property
from fp4kit.recipes import Recipe, recipe
from fp4kit.recipes.to_dict import from_data
from fp4kit.storage.errors import shown
from fp4kit.storage.json_object import load_object


@dataclass(frozen=True)
class LayerReport:
    """One quantized layer or stack, or one that was decoded from such. format: of what is stored.

    action: how it was made anew, "" if it was not. codes, scales, others: bytes that differ from that, of bytes
    compared; others
        are tensor and input scales, and numbers. tensor_scale: multiplies; of a stack, that of its first expert.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    action: str
    codes: tuple[int, int]
    scales: tuple[int, int]
    others: tuple[int, int]
    tensor_scale: float | None
    tally: StoredCounts

    @property
    def differing(self) -> int:
        """Bytes that differ."""
        return self.codes[0] + self.scales[0] + self.others[0]

    @property
    def compared(self) -> int:
        """Bytes that were made anew."""
        return self.codes[1] + self.scales[1] + self.others[1]

    def as_data(self) -> dict[str, Any]:
        """The layer in the types of JSON."""
        parts = {"codes": self.codes, "scales": self.scales, "others": self.others}
        counts = {name: {"differing": differing, "compared": compared} for name, (differing, compared) in parts.items()}
        return {**asdict(self), **counts, "differing": self.differing, "sqnr_db": self.tally.sqnr_db}


@dataclass(frozen=True)
class VerifyReport:
    """What was found. manifest: "equal", "differs" or "none". recipe: with which layers were made anew, None without.

    scales: "searched by mse", or as their search is called; "" for those of the recipe.
    copied: tensors that are compared with the source as they are; changed: those that differ, with the count of bytes.
    """

    path: Path
    source: Path | None
    recipe: str | None
    scales: str
    formats: tuple[str, ...]
    manifest: str
    layers: tuple[LayerReport, ...]
    copied: int
    changed: tuple[tuple[str, int], ...]
    issues: tuple[Issue, ...]

    @lazy_property
    def total(self) -> StoredCounts:
        """Of all layers."""
        return total(layer.tally for layer in self.layers)

    @property
    def errors(self) -> int:
        """Issues that are errors."""
        return sum(issue.severity == "error" for issue in self.issues)

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong: no error, no byte that differs; warnings may be there."""
        return not self.errors

    def as_data(self) -> dict[str, Any]:
        """The report in the types of JSON, but for infinities and paths."""
        layers = [layer.as_data() for layer in self.layers]
        whole = {**asdict(self.total), "sqnr_db": self.total.sqnr_db}
        changed = [{"name": name, "bytes": count} for name, count in self.changed]
        more = {"clean": self.clean, "errors": self.errors, "total": whole, "layers": layers, "changed": changed}
        return {**asdict(self), **more}


@dataclass(frozen=True)
class Verification:
    """A verification that has read headers and configs alone. issues: what these tell."""

    root: Path
    source: Path | None
    settings: Settings
    checks: tuple[Check, ...]
    copies: tuple[tuple[Located, Located], ...]
    issues: tuple[Issue, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to read, of source tensors, or of those of the checkpoint without a source: options.progress adds up to
        it.
        """
        return sum(check.nbytes_read for check in self.checks) + sum(stored.entry.nbytes for stored, _ in self.copies)


def verify(
    destination: str | Path,
    source: str | Path | None = None,
    recipe: str | Recipe | None = None,
    options: Options | None = None,
    search: ScaleSearch | None = None,
) -> VerifyReport:
    """Return what is wrong with the checkpoint in the directory ``destination``, or with a GGUF file.

    Files that a killed run left in a finished directory, or beside a finished file, are errors, too.

    source: the model that it was made of. Every layer is then made anew from it, under the tensor amax of the group
    that shares a
        tensor scale, as it is measured there; each byte is compared, and the errors of the values are counted.
    recipe: of quantized layers; by default the one that the checkpoint records.
    search: of block scales; by default the one that the checkpoint records. Its column weights must be given.
    options: as of convert; resume means nothing here. Memory does not grow with the model.
    Raises CheckpointError for directories that cannot be opened, and for a search that the recipe has not.
    """
    return execute(prepare(destination, source, recipe, options, search), options)


def prepare(
    destination: str | Path,
    source: str | Path | None = None,
    recipe: str | Recipe | None = None,
    options: Options | None = None,
    search: ScaleSearch | None = None,
) -> Verification:
    """Read headers and configs of both, match their layers, and see what loaders would say; see verify."""
    model = _opened(Path(destination))
    scales = _scalars(model.layers.values())
    issues = [*strange_tensors(model), *loader_issues(model, scales)]
    settings, said = _settings(model, recipe, options or Options(), search)
    if source is None:
        checks = tuple(reencode.checks_of(model.layers.values(), {}, settings))
        return Verification(model.path, None, settings, checks, (), (*issues, *said))
    original = open_source(Path(source))
    beside = _Beside(model, original, settings)
    found = (*issues, *said, *_other_source(model, original), *beside.issues())
    return Verification(model.path, original.root, settings, beside.checks, beside.copies, found)


def _opened(root: Path) -> Checkpoint:
    """A model directory; unlike inspect's, it must have a config."""
    found = open_source(root)
    beside = (
        load_object(existing_file(root, HF_QUANT_CONFIG), HF_QUANT_CONFIG) if lexists(root / HF_QUANT_CONFIG) else None
    )
    return Checkpoint(root, found.files, found.config, beside)


def _scalars(weights: Iterable[Weight]) -> dict[str, float]:
    """Name -> number of the tensor scales and input scales of single layers, as they are stored."""
    single = [weight.parts for weight in weights if len(weight.shape) == 2]
    places = [parts[part] for parts in single for part in (TENSOR_SCALE, INPUT_SCALE) if part in parts]
    with Readers() as readers:
        return {place.entry.name: float(readers.array(place).reshape(-1)[0]) for place in places}


def _settings(
    model: Checkpoint, wanted: str | Recipe | None, options: Options, search: ScaleSearch | None
) -> tuple[Settings, list[Issue]]:
    """How the checkpoint was made, as its manifest and its config say."""
    request = (load_manifest(model.path) or {}).get("request")
    request = request if isinstance(request, dict) else {}
    declared = (model.config or {}).get("quantization_config")
    own = declared.get("fp4kit") if isinstance(declared, dict) else None
    said = request.get("recipe") or (own.get("recipe") if isinstance(own, dict) else None)
    issues = []
    found = None if wanted is None else recipe(wanted)
    if found is None and said is not None:
        try:
            found = from_data(said)
        except (ValueError, TypeError) as error:
            issues.append(Issue("warning", "config.json", f"its recipe is not known here: {error}"))
    if search is not None and found is not None:
        search.check_recipe(found)
    scale = request.get("input_scale")
    nonfinite = ("saturate" if request["nonfinite"] == "saturate" else "keep") if "nonfinite" in request else None
    known, weighted, told = recorded_search(request, own if isinstance(own, dict) else {}, search)
    issues += [Issue("warning", MANIFEST, text) for text in told]
    devices = tuple(options.devices) or (None,)
    return Settings(found, scale if isinstance(scale, float) else None, nonfinite, devices, known, weighted), issues


def _other_source(model: Checkpoint, original: Source) -> list[Issue]:
    """Files of the source that are not those that the manifest names."""
    facts, now = (load_manifest(model.path) or {}).get("source"), source_facts(original)
    if not isinstance(facts, dict):
        return []
    names = sorted(name for name in {*facts, *now} if facts.get(name) != now.get(name))
    return [
        Issue("warning", name, "is not the file of the source that was converted: size or header differ")
        for name in names
    ]


class _Beside:
    """A checkpoint beside its source. checks: of quantized and decoded layers; copies: all other tensors that both
    have.
    """

    def __init__(self, model: Checkpoint, original: Source, settings: Settings) -> None:
        self._model, self._original = model, original
        weights = model.weights.values()
        self.checks = tuple(reencode.checks_of(weights, reencode.origins_of(weights, original), settings))
        self._made = {part.entry.name for check in self.checks for part in check.stored.parts.values()}
        self._used = {name for check in self.checks if check.origin is not None for name in check.origin.names}
        self._alike, self._unlike = self._copied()
        self.copies = tuple(self._alike.values())

    def _copied(self) -> tuple[dict[str, tuple[Located, Located]], dict[str, str]]:
        """Tensors that both have under one name, and what is wrong with those that cannot be compared."""
        alike, unlike = {}, {}
        for name, (file, entry) in self._model.tensors.items():
            if name in self._made or name not in self._original.tensors:
                continue
            other_file, other = self._original.tensors[name]
            if (entry.dtype, entry.shape) == (other.dtype, other.shape):
                alike[name] = located(file, entry), located(other_file, other)
            else:
                unlike[name] = f"is {entry.dtype} {list(entry.shape)}; the source has {other.dtype} {list(other.shape)}"
        return alike, unlike

    def issues(self) -> list[Issue]:
        """Layers and tensors that only one of them has, and layers that cannot be made anew."""
        strange = [check.stored.name for check in self.checks if check.origin is None]
        extra = [name for name in self._model.tensors if name not in self._made and name not in self._original.tensors]
        known = {*self._used, *self._alike, *self._unlike}
        missing = [name for name in self._original.tensors if name not in known]
        found = [Issue("error", name, "is not in the source") for name in dict.fromkeys([*strange, *extra])]
        found += [Issue("error", name, "is in the source, and not here") for name in missing]
        found += [Issue("error", name, text) for name, text in self._unlike.items()]
        whys = Counter(check.why for check in self.checks if check.why)
        found += [Issue("warning", "model", f"{n} layers are not made anew: {why}") for why, n in whys.items()]
        return found


def execute(prepared: Verification, options: Options | None = None) -> VerifyReport:
    """Do what was prepared; see verify."""
    options = options or Options()
    start_devices(options.devices, options.executor)
    tick = options.progress or (lambda count: None)
    with executor_of(options.executor, options.workers or 1, bool(options.devices)) as executor:
        found = list(reencode.run(prepared.checks, executor, tick))
        changed = []
        for stored, count in run_all(executor, deque((_copy_differs, pair) for pair in prepared.copies)):
            tick(stored.entry.nbytes)
            changed += [(stored.entry.name, count)] if count else []
        told = differences(prepared.root, executor)
    return _report(prepared, found, sorted(changed), told)


def _copy_differs(stored: Located, source: Located) -> tuple[Located, int]:
    return stored, reencode.differing_bytes(stored, source)


def _report(
    prepared: Verification,
    found: Sequence[ReencodedLayer],
    changed: Sequence[tuple[str, int]],
    told: Sequence[str] | None,
) -> VerifyReport:
    """Everything together, in the order of the files."""
    of_layer: dict[str, list[ReencodedLayer]] = defaultdict(list)
    for one in found:
        of_layer[one.check.stored.name].append(one)
    order = dict.fromkeys(check.stored.name for check in prepared.checks)
    with Readers() as readers:
        layers = tuple(_layer(of_layer[name], readers) for name in order)
    parts = (line.rpartition(": ") for line in told or ())
    issues = [Issue("error", name, text) for name, _, text in parts]
    issues += [Issue("error", path.name, _LEFT) for path in leftovers_of(prepared.root)]
    issues += prepared.issues
    issues += [issue for layer in layers for issue in stored_issues(layer.name, layer.tally)]
    issues += [
        Issue("error", one.check.stored.name, f"cannot be made anew: {shown(one.error)}") for one in found if one.error
    ]
    settings = prepared.settings
    issues += [issue for layer in layers for issue in _differing(layer, settings.recipe, settings.search)]
    issues += [
        Issue("error", name, "bytes of a copied tensor that differ from the source", count=n) for name, n in changed
    ]
    return VerifyReport(
        prepared.root,
        prepared.source,
        settings.recipe.id if settings.recipe else None,
        settings.search.words if settings.search else "",
        tuple(dict.fromkeys(layer.format for layer in layers)),
        "none" if told is None else "differs" if told else "equal",
        layers,
        len(prepared.copies),
        tuple(changed),
        tuple(sorted(dict.fromkeys(issues), key=lambda issue: issue.severity)),
    )


_LEFT = "was left by a run that was killed when it had finished; fp4kit convert --remove-stale removes it"


def _layer(members: Sequence[ReencodedLayer], readers: Readers) -> LayerReport:
    """One layer, of all of its matrices."""
    weight = members[0].check.stored
    compared, differing = Counter[str](), Counter[str]()
    for one in members:
        compared.update(one.compared)
        differing.update(one.differing)
    pairs = {part: (differing[part], compared[part]) for part in (CODES, SCALES, TENSOR_SCALE, INPUT_SCALE, VALUES)}
    others = [pairs[part] for part in (TENSOR_SCALE, INPUT_SCALE, VALUES)]
    actions = ", ".join(dict.fromkeys(one.action for one in members if one.action))
    scale = tensor_scale_of(readers, weight)
    return LayerReport(
        weight.name,
        weight.dtype,
        weight.shape,
        actions,
        pairs[CODES],
        pairs[SCALES],
        (sum(a for a, _ in others), sum(b for _, b in others)),
        None if scale is None else float(scale),
        total(one.tally for one in members),
    )


def _differing(layer: LayerReport, used: Recipe | None, search: ScaleSearch | None) -> Iterator[Issue]:
    """Yield what differs from the layer as it is made anew."""
    scales = f" with scales {search.words}" if search is not None else ""
    made = f"what {used.id}{scales} makes of the source" if used and layer.action not in _AS_THEY_ARE else "the source"
    parts = {"codes": layer.codes, "block scales": layer.scales, "tensor scales, input scales or numbers": layer.others}
    for name, (different, _) in parts.items():
        if different:
            yield Issue("error", layer.name, f"bytes of {name} that differ from {made}", count=different)


_AS_THEY_ARE = (RENAME, DEQUANTIZE)
