"""Verify a checkpoint: check its files, its stored values and the requirements of engines. If the source (the model
that the checkpoint was made from) is given, every layer that can be made again from it is re-encoded and compared byte
by byte. SQNR is the signal-to-noise ratio of the quantized values in decibels.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

from fp4kit.arguments import as_index, checks_kinds, in_python
from fp4kit.checkpoint import findings
from fp4kit.checkpoint.containers.engines import Issue
from fp4kit.checkpoint.containers.table import CODES, INPUT_SCALE, SCALES, TENSOR_SCALE, VALUES, container
from fp4kit.checkpoint.convert.job import DEQUANTIZE, RENAME
from fp4kit.checkpoint.convert.run_jobs import leftovers_of, source_facts
from fp4kit.checkpoint.executors import Options, executor_of, run_all, start_devices
from fp4kit.checkpoint.loaders.requirements import REPAIRABLE, Sharding, obstacles, sharding_of
from fp4kit.checkpoint.model.closed_world import ATTENTION, LEFT_OUT, REFUSED, check_model, is_attention_scale, split
from fp4kit.checkpoint.model.doubts import CERTAIN, OTHER_ORDER, SWAPPED_NIBBLES, swapped_layers
from fp4kit.checkpoint.model.inspect import Checkpoint
from fp4kit.checkpoint.model.model_files import (
    MANIFEST,
    FileDifference,
    Source,
    differences,
    load_manifest,
    open_original,
)
from fp4kit.checkpoint.model.slabs import Readers, tensor_scale_of
from fp4kit.checkpoint.model.statistics import StoredCounts, doubts_of, magnitude_of, reference_of, total
from fp4kit.checkpoint.model.transforms import decodable, undo
from fp4kit.checkpoint.model.weights import Located, WeightRotation, any_quantized, located, weights_of
from fp4kit.checkpoint.plan.gguf_model import GgufView, as_gguf
from fp4kit.checkpoint.plan.layer_recipes import patterns_in, recorded_include
from fp4kit.checkpoint.plan.other_models import ADAPTER_SCALES, LoraAdapter
from fp4kit.checkpoint.plan.scale_search import RECORDED, Activations, ActivationsLike, ScaleSearch
from fp4kit.checkpoint.plan.source_layers import expert_stacks, is_split, split_layers
from fp4kit.checkpoint.reconcile import repaired_parts
from fp4kit.checkpoint.selection.names import PATTERNS, RECIPE, first_match
from fp4kit.checkpoint.verify import reencode
from fp4kit.checkpoint.verify.beside_weights import unlike_source
from fp4kit.checkpoint.verify.reencode import Check, Difference, ReencodedLayer, Settings, Smoothing
from fp4kit.cpu.library import num_threads
from fp4kit.lazy import lazy_property
from fp4kit.recipes import Recipe
from fp4kit.recipes import recipe as find_recipe
from fp4kit.recipes.table import from_data
from fp4kit.storage.files import (
    FLOAT_DTYPES,
    NUMPY_DTYPES,
    CheckpointError,
    counted,
    listed,
    parse_object,
    shown,
    similar_glob,
)
from fp4kit.storage.gguf_file import GgufFile, is_gguf, whole_path


@dataclass(frozen=True)
class LayerReport:
    """A report on one layer or stack of experts that is quantized or was decoded from a quantized source.

    name: the name of the layer.
    format: the name of the container in which the layer is stored, or its dtype if it is unquantized.
    shape: the shape of the layer in elements.
    action: the actions by which it was re-encoded from the source, such as "quantize"; "" if it was not.
    codes, scales, others: (bytes that differ, bytes compared) between the re-encoded layer and the file. ``others``
        counts tensor scales, input scales and unquantized values.
    tensor_scale: the tensor scale as a multiplier on decode; for a stack, that of the first expert; None if there is
        none.
    tally: counts of the stored values, such as NaN or saturated values.
    usual_db: the SQNR in decibels that the format usually gives on the layer's source; None if the layer was
        re-encoded and its SQNR is not low, or if it has no source for which this can be computed.
    first: the first difference of each part that differs; for a stack, those of the first expert that differs.
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
    usual_db: float | None = None
    first: tuple[Difference, ...] = ()

    @property
    def differing(self) -> int:
        """The number of bytes that differ between the re-encoded layer and the file."""
        return self.codes[0] + self.scales[0] + self.others[0]

    @property
    def compared(self) -> int:
        """The number of bytes of the layer that were compared with the re-encoded layer."""
        return self.codes[1] + self.scales[1] + self.others[1]

    def as_data(self) -> dict[str, Any]:
        """Return this report as a dict for JSON: the fields of the class, ``differing``, and the SQNR as
        ``sqnr_db``.
        """
        parts = {"codes": self.codes, "scales": self.scales, "others": self.others}
        counts = {name: {"differing": differing, "compared": compared} for name, (differing, compared) in parts.items()}
        return {**asdict(self), **counts, "differing": self.differing, "sqnr_db": self.tally.sqnr_db}


_SEVERITIES = ("error", "warning", "note")
_MANIFEST_IS = {"equal": "files match the manifest", "differs": "files differ from the manifest", "none": "no manifest"}


@dataclass(frozen=True)
class VerifyReport:
    """The result of a verification.

    path, source: the checkpoint, and the source that it was compared with, or None.
    recipe: the title of the recipe with which layers were re-encoded; None if it is unknown, or if no layer is
        quantized. PATTERN=TITLE follows for every pattern whose layers have another recipe.
    scales: how block scales were searched, such as "searched by mse"; "" if they were not.
    formats: the formats of the layers, each once.
    manifest: "equal" if the files are those that the manifest records, "differs" if not, "none" without a manifest.
    layers: one report per layer, in the order of the files.
    copied: the number of unconverted tensors that were compared with the source.
    changed: (name, number of differing bytes) of the unconverted tensors that differ from the source.
    issues: errors, then warnings.
    parallel: the sizes of tensor parallelism that the checkpoint allows; None for one that vLLM and SGLang do not load.
    unmeasured: the number of layers whose input scales were compared neither with activations nor with the source.
    unread: the names of the layers that are not in ``layers``, because fp4kit refuses to read their tensors.
    uncompared: what beside the weights could not be compared with the source, in words, or "".
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
    parallel: Sharding | None = None
    unmeasured: int = 0
    unread: tuple[str, ...] = ()
    uncompared: str = ""

    def __bool__(self) -> bool:
        """Return ``clean``: True if no issue is an error."""
        return self.clean

    def __repr__(self) -> str:
        """Return the checkpoint and the numbers of its layers, errors and warnings, in one line."""
        counts = f"{len(self.layers)} layers, errors: {self.errors}, warnings: {self.warnings}"
        return f"VerifyReport({str(self.path)!r}: {counts})"

    def __str__(self) -> str:
        """Return the errors, the warnings, the notes and the verdict, a line each."""
        found = [f"{severity}: {text}" for severity, text in findings.lines_of(self.issues)]
        return in_python("\n".join([*found, self.verdict]), signature(verify_checkpoint).parameters)

    @property
    def verdict(self) -> str:
        """The result in one line, such as "37 layers, files match the manifest; errors: 0, warnings: 0"."""
        unread = f", {len(self.unread)} not read" * bool(self.unread)
        text = f"{counted(len(self.layers), 'layer')}{unread}, {_MANIFEST_IS[self.manifest]}"
        if self.source is not None:
            differing = sum(layer.differing for layer in self.layers)
            if compared := sum(layer.compared for layer in self.layers):
                text += f"; {differing} of {compared} bytes differ from {self.expected}"
            text += f"; {len(self.changed)} of {self.copied} other tensors differ"
        return f"{text}; errors: {self.errors}, warnings: {self.warnings}"

    @lazy_property
    def total(self) -> StoredCounts:
        """The counts of stored values, summed over all layers."""
        return total(layer.tally for layer in self.layers)

    @property
    def expected(self) -> str:
        """The other side of the comparison of bytes, such as "the source encoded with nvfp4-te"."""
        compared = [layer for layer in self.layers if layer.compared]
        made = []
        if any(layer.action not in _WITHOUT_RECIPE for layer in compared):
            scales = f" with scales {self.scales}" if self.scales else ""
            made.append(f" encoded with {self.recipe or 'its format'}{scales}")
        dtypes = dict.fromkeys(layer.format for layer in compared if layer.action == DEQUANTIZE)
        names = [NUMPY_DTYPES[one].name if one in FLOAT_DTYPES else one for one in dtypes]
        made += [f" decoded to {', '.join(names)}"] if names else []
        return f"the source{' or'.join(made)}"

    @property
    def errors(self) -> int:
        """The number of issues that are errors."""
        return sum(issue.severity == "error" for issue in self.issues)

    @property
    def warnings(self) -> int:
        """The number of issues that are warnings."""
        return sum(issue.severity == "warning" for issue in self.issues)

    @property
    def clean(self) -> bool:
        """True if no issue is an error; warnings are allowed."""
        return not self.errors

    def as_data(self) -> dict[str, Any]:
        """Return the report as a dict for JSON: the fields of the class, ``clean``, ``errors`` and ``total``."""
        # The caller must convert infinities and Path objects.
        layers = [layer.as_data() for layer in self.layers]
        whole = {**asdict(self.total), "sqnr_db": self.total.sqnr_db}
        changed = [{"name": name, "bytes": count} for name, count in self.changed]
        more = {"clean": self.clean, "errors": self.errors, "total": whole, "layers": layers, "changed": changed}
        more["parallel"] = None if self.parallel is None else self.parallel.as_data()
        return {**asdict(self), **more}


@dataclass(frozen=True)
class Verification:
    """A verification that ``prepare`` has prepared and that is not yet executed.

    root, source: the checkpoint and its source; ``source`` is None if the checkpoint is verified alone.
    settings: how the checkpoint was made.
    checks: the matrices to check.
    copies: (stored, source) pairs of unconverted tensors to compare.
    issues: the issues found in headers, configs and scalars.
    parallel: the sizes of tensor parallelism that the checkpoint allows; None for one that vLLM and SGLang do not load.
    reference: the amax of unquantized matrices, if the checkpoint is verified alone; None if there are none.
    input_scales: the layers whose input scales no activations were given for.
    unread: the layers whose tensors fp4kit refuses to read.
    uncompared: what beside the weights could not be compared with the source, in words, or "".
    """

    root: Path
    source: Path | None
    settings: Settings
    checks: tuple[Check, ...]
    copies: tuple[tuple[Located, Located], ...]
    issues: tuple[Issue, ...]
    parallel: Sharding | None = None
    reference: float | None = None
    input_scales: frozenset[str] = frozenset()
    unread: tuple[str, ...] = ()
    uncompared: str = ""

    @property
    def nbytes(self) -> int:
        """The number of bytes that ``execute`` reports to options.progress in total."""
        # Rows whose amax is needed are read twice.
        read = sum(check.nbytes * (1 + check.needs_amax) for check in self.checks)
        return read + sum(stored.entry.nbytes for stored, _ in self.copies)


@checks_kinds
def verify_checkpoint(
    destination: str | Path,
    source: str | Path | None = None,
    recipe: str | Recipe | None = None,
    options: Options | None = None,
    ignore: Iterable[str] = (),
    *,
    search: ScaleSearch | None = None,
    activations: ActivationsLike | None = None,
    recipes: Iterable[tuple[str, str | Recipe]] = (),
    adapter: str | Path | None = None,
    tp: int | None = None,
    ep: int | None = None,
) -> VerifyReport:
    """Check the files, scales and configs of a checkpoint, as ``fp4kit verify`` does.

    With a source, every quantized layer is quantized again from it and compared byte by byte, and so is every other
    tensor. What the engines vLLM, SGLang, transformers, llama.cpp and mlx-lm require is checked in either case.

    Args:
        destination: the checkpoint: a model directory, GGUF file or safetensors file.
        source: the model from which the checkpoint was made; None to check the checkpoint alone.
        recipe: the recipe of the quantized layers; None for the one that the checkpoint records. Without either, the
            layers are compared with the values of the source, but not byte by byte.
        options: workers, executor, devices and progress, as for ``convert``. The result does not depend on them.
        ignore: globs of tensors, config keys and metadata entries of the checkpoint to leave out although fp4kit does
            not know them.
        search: how block scales were searched; None for what the checkpoint records.
        activations: Activations, a Collector, or paths of its files, from which the stored input scales should follow;
            None to leave these scales unchecked.
        recipes: (glob, recipe) pairs for the layers of the source whose names match. The first match decides.
        adapter: the directory of the LoRA adapter that was merged into the source.
        tp, ep: the numbers of ranks over which vLLM and SGLang are to split every layer, and over which they are to
            share the experts. A layer that they cannot split so is an error of the report.

    Returns:
        A VerifyReport. ``clean`` is True if it holds no error; ``print`` shows what was found.

    Raises:
        CheckpointError: a model cannot be opened, ``recipe`` does not fit the stored format, a glob of ``recipes``
            matches no layer, or the checkpoint records an adapter that is not given.
        ChildProcessError: a worker process died.

    Example:
        >>> report = verify_checkpoint("Llama-NVFP4", "Llama")  # doctest: +SKIP
        >>> report.clean, report.verdict  # doctest: +SKIP
    """
    measured = None if activations is None else Activations.of(activations)
    prepared = prepare(destination, source, recipe, options, search, ignore, measured, recipes, adapter, tp=tp, ep=ep)
    return execute(prepared, options)


def prepare(
    destination: str | Path,
    source: str | Path | None = None,
    recipe: str | Recipe | None = None,
    options: Options | None = None,
    search: ScaleSearch | None = None,
    ignore: Iterable[str] = (),
    activations: Activations | None = None,
    recipes: Iterable[tuple[str, str | Recipe]] = (),
    adapter: str | Path | None = None,
    *,
    tp: int | None = None,
    ep: int | None = None,
) -> Verification:
    """Prepare a verification for ``execute``: make all checks that do not compare values."""
    model = findings.opened(Path(destination))
    issues, model, turned, scales = findings.findings_of_files(model, tuple(ignore))
    parallel = None if model.root.is_file() else sharding_of(model.weights.values(), model.config or {})
    refused = [split(one.name)[0] for one in turned.items if (one.group, one.place) == (REFUSED, "tensor")]
    unread = tuple(dict.fromkeys(refused))
    issues += _cut_layers(model, tp, ep)
    swapped = swapped_layers(model.weights.values(), model.tensors)
    issues += [Issue("warning", one.name, SWAPPED_NIBBLES) for one in swapped]
    issues += [] if activations is None else findings.unlike_activations(model.layers.values(), scales, activations)
    with_scale = (name for name, weight in model.layers.items() if INPUT_SCALE in weight.parts)
    inputs = frozenset(with_scale if activations is None else ())
    given = tuple((pattern, find_recipe(one)) for pattern, one in recipes)
    manifest = load_manifest(model.root) or {}
    settings, texts = _settings(model, manifest, recipe, options or Options(), search, given)
    settings, others = _with_adapter(model, _object(manifest.get("request")), settings, adapter, source is not None)
    issues += [*texts, *others]
    if source is None:
        checks, reference = (
            tuple(reencode.checks_of(model.layers.values(), {}, settings)),
            reference_of(model.weights.values()),
        )
        return Verification(model.root, None, settings, checks, (), tuple(issues), parallel, reference, inputs, unread)
    original = open_original(Path(source), Path(destination))
    plain = original
    if is_gguf(model.root) != is_gguf(original.root):
        original = as_gguf(original, model.root, settings.adapter)
    more, uncompared = unlike_source(model, plain)
    issues += more
    facts, now = manifest.get("source"), source_facts(original)
    if "reconciled" in manifest:
        settings = replace(settings, repairs=repaired_parts(model, manifest))
        facts = manifest.get("repaired") and facts  # earlier manifests give the repaired model as the source
    if isinstance(facts, dict) and now != manifest.get("repaired"):
        changed = sorted(name for name in {*facts, *now} if facts.get(name) != now.get(name))
        issues += [Issue("warning", name, _OTHER_SOURCE) for name in changed]
    checks, copies, others = _compared_with_source(model, original, settings, turned.rotations)
    _check_patterns(checks, [pattern for pattern, _ in given])
    forms = dict.fromkeys(check.stored.container for check in checks if check.stored.container is not None)
    if recipe is not None and forms and not any(form.stores(find_recipe(recipe)) for form in forms):
        wrong = f"{listed([str(form) for form in forms])} cannot store {find_recipe(recipe).id}"
        raise CheckpointError(f"--recipe: {wrong}, so no byte could be compared; give the right recipe, or none")
    found = (*issues, *others)
    return Verification(
        model.root, original.root, settings, checks, copies, found, parallel, None, inputs, unread, uncompared
    )


_OTHER_SOURCE = "is not the source file that was converted: its size or header differs"


def _object(value: Any) -> dict[str, Any]:
    """Return a value of a JSON file that should be an object, or {} if it is something else."""
    return value if isinstance(value, dict) else {}


def _cut_layers(model: Checkpoint, tp: int | None, ep: int | None) -> list[Issue]:
    """Return an error per layer that cannot be split over `tp` ranks, of which `ep` share the experts; [] for None."""
    if tp is None and ep is None:
        return []
    for name, ranks in (("tp", tp), ("ep", ep)):
        if ranks is not None and as_index("verify", name, ranks) < 1:
            raise CheckpointError(f"--{name} {ranks}: a number of ranks of at least 1 is needed")
    found = obstacles(model.weights.values(), model.config or {}, tp, ep)
    size = f"tensor parallelism over {tp or ep} ranks" + (f", {ep} sharing the experts" if ep else "")
    return [Issue("error", one.layer, f"{size}: {one.text}") for one in found]


def _settings(
    model: Checkpoint,
    manifest: Mapping[str, Any],
    wanted: str | Recipe | None,
    options: Options,
    search: ScaleSearch | None,
    given: tuple[tuple[str, Recipe], ...],
) -> tuple[Settings, list[Issue]]:
    """Return (how the checkpoint was made, warnings about records that are unknown or contradict each other)."""
    request = _object(manifest.get("request"))
    own = _object((model.config or {}).get("quantization_config")).get("fp4kit")
    is_safetensors = model.root.is_file() and not isinstance(model.files[0], GgufFile)
    header = model.files[0].metadata if is_safetensors else {}
    made_new = request.get("recipe") if manifest.get("codes") != "carried" else None
    recorded = made_new or _object(own).get("recipe") or header.get(RECIPE)
    issues = []
    found = None if wanted is None else find_recipe(wanted)
    patterns: tuple[tuple[str, Recipe], ...] = ()
    if found is None:
        try:
            found = None if recorded is None else from_data(recorded)
            text = header.get(PATTERNS)
            named = own if isinstance(own, dict) else parse_object(text.encode(), PATTERNS) if text else {}
            pairs = request.get("recipes") if made_new else patterns_in(named.get("recipes"))
            patterns = tuple((pattern, from_data(one)) for pattern, one in pairs or ())
        except (ValueError, TypeError) as error:
            issues.append(
                Issue("warning", "config.json", f"the recorded recipe is unknown: {error}; give one with --recipe")
            )
    if search is not None and found is not None:
        search.check_recipe(found)
    scale = request.get("input_scale")
    nonfinite = ("saturate" if request["nonfinite"] == "saturate" else "keep") if "nonfinite" in request else None
    search_used, weighted, texts = recorded_search(request, _object(own), search)
    issues += [Issue("warning", MANIFEST, text) for text in texts]
    devices = tuple(options.devices) or (None,)
    scale = scale if isinstance(scale, float) else None
    return Settings(found, scale, nonfinite, devices, search_used, weighted, given or patterns), issues


def recorded_search(
    request: Mapping[str, Any], config: Mapping[str, Any], requested: ScaleSearch | None
) -> tuple[ScaleSearch | None, bool, list[str]]:
    """Find the scale search to repeat when a converted checkpoint is verified."""
    facts = request.get("scale_search")
    if not isinstance(facts, Mapping):
        said = str(config.get("scale_search", ""))
        plain = said.removeprefix("weighted ")
        facts = {"objective": plain} if plain == said else {"objective": plain, "sha256": None}
    objective, weighted = facts.get("objective"), "sha256" in facts
    if requested is not None:
        if requested.objective == RECORDED:
            requested = replace(requested, objective=objective or "mse")
        differs = requested.columns is not None and facts.get("sha256") not in (None, requested.columns.sha256)
        return requested, False, ["the column weights differ from those that the checkpoint was made with"] * differs
    if not objective:
        return None, False, []
    try:
        return ScaleSearch(objective), weighted, []
    except CheckpointError:
        return None, weighted, [f"the checkpoint records an unknown scale search: {shown(str(objective))}"]


def _with_adapter(
    model: Checkpoint, request: Mapping[str, Any], settings: Settings, adapter: str | Path | None, has_source: bool
) -> tuple[Settings, list[Issue]]:
    """Return the settings with the adapter, and a warning if it is not the one that the checkpoint records."""
    recorded = _object(request.get("adapter"))
    if adapter is None and not (recorded and has_source):
        return settings, []
    if adapter is None:
        raise CheckpointError(
            f"{shown(str(model.root))}: the adapter {shown(str(recorded.get('directory')))} was merged into the source;"
            " add --adapter DIR, which gives the values to compare with"
        )
    if not has_source:
        raise CheckpointError("--adapter: was merged into a source; add --source SRC")
    found, scales = LoraAdapter.of(adapter), str(recorded.get("scales"))
    scales = scales if scales in ADAPTER_SCALES else settings.adapter_scales
    settings = replace(settings, adapter=found, adapter_scales=scales)
    if recorded.get("sha256") in (None, found.facts["sha256"]):
        return settings, []
    text = "is not the adapter that was merged: its files differ from those that the checkpoint records"
    return settings, [Issue("warning", str(adapter), text)]


def _check_patterns(checks: Iterable[Check], patterns: Sequence[str]) -> None:
    """Raise CheckpointError for the first pattern that sets the recipe of no layer with a counterpart in the source."""
    names = dict.fromkeys(check.origin.weight.name for check in checks if check.origin is not None)
    used = {first_match(patterns, name) for name in names} if patterns else set()
    for i, pattern in enumerate(patterns):
        if i not in used:
            near = f"names are such as {listed([*names][:2])}" if names else "no layer is compared"
            near = similar_glob(pattern, [*names]) + near
            raise CheckpointError(
                f"--recipe {shown(pattern)}=...: decides about no layer that is compared with the source; {near};"
                " a pattern must match a whole name, and the first match decides"
            )


_CASTS = ("F8_E4M3", "F8_E5M2")  # dtypes to which a model may have been cast


def _compared_with_source(
    model: Checkpoint, original: Source, settings: Settings, rotations: Mapping[str, WeightRotation]
) -> tuple[tuple[Check, ...], tuple[tuple[Located, Located], ...], list[Issue]]:
    """Match the tensors of a checkpoint with the tensors of its source. Return (checks, copies, issues).

    checks: the matrices that are quantized in the checkpoint or were decoded from a quantized source.
    copies: (stored, source) pairs of all other tensors that both have under one name, with equal shapes, and with equal
        dtypes or two float dtypes, because tools cast some tensors, such as the router's.
    issues: what the matching shows, before any values are compared.
    """
    known, weights = weights_of(original.tensors, original.config), model.weights.values()
    view = original if isinstance(original, GgufView) else None
    adapter = settings.adapter if view is None else None  # a view has merged it
    if model.layers:
        items, matrices = check_model(original, known), frozenset[str]()
    else:
        _, items, matrices = undo(original, known)
    made_from = reencode.origins_of(weights, original, rotations, adapter)
    # GGUF files are written with scales of their own, and with those of a directory, in which fused layers share them.
    groups = reencode.equal_scale_groups(weights, made_from) if view else None
    checks = (*reencode.checks_of(weights, made_from, settings, groups),)
    if view is None:
        kept = {name for name, (_, entry) in model.tensors.items() if entry.dtype in FLOAT_DTYPES}
        checks = (*reencode.with_lost_members(checks, known.values(), kept),)
    checks += (*_restored(model, original, settings, {check.stored.name for check in checks}),)
    transposed = reencode.transposed_from(weights, original)
    made = {part.entry.name for check in checks for part in check.stored.parts.values()}
    used = {name for check in checks if check.origin is not None for name in check.origin.names}
    used |= matrices | {item.name for item in items if item.why in LEFT_OUT}
    used |= {name for names in transposed.values() for name in names}
    without = [check.stored.name for check in checks if check.origin is None and check.stored.name not in transposed]
    left = {item.name for item in model.items if item.why in (*LEFT_OUT, ATTENTION)}  # only some tools write
    copies, unlike, cast = [], [], []
    for name, (file, entry) in model.tensors.items():
        if name in made or (view and name in view.generated):
            continue
        own = view.made_of(name) if view else {name}
        if not own <= original.tensors.keys():
            without += [] if is_attention_scale(name) or name in left else [name]
            continue
        used |= own
        if entry.note:
            cast.append(Issue("warning", name, f"is not compared: {entry.note}"))
            continue
        other_file, other = original.tensors[min(own)]
        floats = {entry.dtype, other.dtype} <= {*FLOAT_DTYPES, *_CASTS}
        if entry.shape != other.shape or not (entry.dtype == other.dtype or floats):
            have, want = (f"{one.dtype} {list(one.shape)}" for one in (entry, other))
            unlike.append(Issue("error", name, f"is {have}; the source has {want}"))
            continue
        copies.append((located(file, entry), located(other_file, other)))
        is_exact = entry.dtype == "F32" or other.dtype in _CASTS
        if entry.dtype != other.dtype and not is_exact:
            text = f"is {entry.dtype}; the source has {other.dtype}, which was rounded for the comparison"
            cast.append(Issue("warning", name, text))
    missing = [name for name in original.tensors if name not in used and not is_attention_scale(name)]
    issues = [Issue("error", name, "is not in the source") for name in dict.fromkeys(without)]
    issues += [Issue("error", name, "is missing; the source has it") for name in missing]
    issues += [*unlike, *cast, *(_generated_issues(model, view) if view else ())]
    for name, names in transposed.items():
        issues.append(Issue("warning", name, f"is a transposed part of {', '.join(names)} and is not compared"))
    if any_quantized(known.values()):
        issues += _quantized_although_kept(model, checks)
    alone = dict.fromkeys((check.stored.name, check.why) for check in checks if check.why)  # a stack counts once
    for why, n in Counter(why for _, why in alone).items():
        issues.append(Issue("warning", "model", f"{n} layer{' is' if n == 1 else 's are'} not re-encoded: {why}"))
    return checks, tuple(copies), issues


def _generated_issues(model: Checkpoint, view: GgufView) -> Iterator[Issue]:
    with Readers() as readers:
        for name, values in view.generated.items():
            place = model.tensors.get(name)
            if place is None or readers.of(place[0]).read(place[1]).tobytes() != values.tobytes():
                what = "is missing" if place is None else "has other values"
                yield Issue("error", name, f"{what}; config.json of the source gives them (rope_scaling)")


def _restored(model: Checkpoint, original: Source, settings: Settings, checked: Collection[str]) -> Iterator[Check]:
    """Yield checks of layers that a conversion to unquantized values may have put together from several weights."""
    rest = [weight for weight in model.weights.values() if weight.name not in checked]
    if isinstance(original, GgufView):
        return reencode.checks_of_restored([*rest, *original.biases(model.tensors)], original.restored, settings)
    sources = decodable(original.tensors, original.config)
    sources = sources if settings.adapter is None else settings.adapter.attach(sources, original.config)
    layers = [*expert_stacks(sources, original.config).values()]
    if not any(is_split(name) for name in model.tensors):
        layers += split_layers(original.tensors, sources).values()
    return reencode.checks_of_restored(rest, layers, settings)


def _quantized_although_kept(model: Checkpoint, checks: Iterable[Check]) -> Iterator[Issue]:
    """Yield an error for each quantized layer that the source, which has quantized layers, keeps unquantized."""
    include, seen = recorded_include(model.files), set()
    for check in checks:
        name, origin = check.stored.name, check.origin
        if origin is None or check.stored.container is None or origin.weight.container is not None or name in seen:
            continue
        if origin.weight.dtype in FLOAT_DTYPES and first_match(include, origin.weight.name) is None:
            seen.add(name)
            yield Issue("error", name, _QUANTIZED_ALONE)


_NO_LAYERS = (
    "there is neither a quantized layer of a known format nor a manifest, so nothing was verified; give a quantized"
    " checkpoint, such as one that fp4kit convert writes"
)


FROM_BYTES, MOST_PROCESSES = 1 << 28, 8  # so many bytes are verified by more than one process


def execute(prepared: Verification, options: Options | None = None) -> VerifyReport:
    """Execute a verification from ``prepare``: compare all values and files, and return the report."""
    options = options or Options()
    start_devices(options.devices, options.executor)
    tick = options.progress or (lambda count: None)
    workers = min(num_threads(), MOST_PROCESSES) if options.processes and prepared.nbytes >= FROM_BYTES else 1
    with executor_of(options.executor, options.workers or workers, bool(options.devices)) as executor:
        found = list(reencode.run(prepared.checks, executor, tick))
        changed, copies_with_nan = [], []
        for stored, count, nan in run_all(executor, deque((_copy_differs, pair) for pair in prepared.copies)):
            tick(stored.entry.nbytes)
            changed += [(stored.entry.name, count)] if count else []
            copies_with_nan += [Issue("error", stored.entry.name, findings.NAN_IN_COPY, count=nan)] if nan else []
        file_differences = differences(prepared.root, executor)
    differing = {name for name, _ in changed}
    pairs = [pair for pair in prepared.copies if pair[0].entry.name in differing]
    smoothing = reencode.smoothing_of(pairs, prepared.checks) if prepared.settings.recipe is None else Smoothing((), {})
    with Readers() as readers:
        layers = _layers(prepared.checks, found, readers)
        issues = [
            *(Issue(one.severity, one.name, one.text) for one in file_differences or ()),
            *_leftovers(prepared.root),
            *prepared.issues,
            *copies_with_nan,
            *_quantized_source(prepared.checks, layers),
            *_other_model(layers),
            *_issues_of_layers(prepared, found, layers, smoothing, readers),
            *[Issue("error", "model", _NO_LAYERS)] * (not layers and file_differences is None),
        ]
    for name, count in sorted(changed):
        if name not in smoothing.norms:
            issues.append(Issue("error", name, "bytes of a copied tensor that differ from the source", count=count))
    if any(issue.severity == "error" and not issue.loader for issue in issues):  # reconcile may refuse or spread it
        issues = [replace(issue, text=issue.text.removesuffix(REPAIRABLE)) for issue in issues]
    settings, recipes = prepared.settings, None
    if settings.recipe is not None and any(check.stored.container is not None for check in prepared.checks):
        recipes = ", ".join([settings.recipe.title, *(f"{pattern}={one.title}" for pattern, one in settings.patterns)])
    return VerifyReport(
        prepared.root,
        prepared.source,
        recipes,
        settings.search.words if settings.search else "",
        tuple(dict.fromkeys(layer.format for layer in layers)),
        "none" if file_differences is None else "differs" if any(map(_is_error, file_differences)) else "equal",
        layers,
        len(prepared.copies),
        tuple(sorted(changed)),
        tuple(sorted(dict.fromkeys(issues), key=lambda issue: _SEVERITIES.index(issue.severity))),
        prepared.parallel,
        len(prepared.input_scales - {one.check.stored.name for one in found if one.compared.get(INPUT_SCALE)}),
        prepared.unread,
        prepared.uncompared,
    )


def _copy_differs(stored: Located, source: Located) -> tuple[Located, int, int]:
    """Compare an unconverted tensor with its source tensor. Return (``stored``, bytes that differ, NaN)."""
    return stored, *reencode.differing_bytes(stored, source)


def _is_error(one: FileDifference | Issue) -> bool:
    return one.severity == "error"


def _leftovers(root: Path) -> Iterator[Issue]:
    """Yield an error for each file that a killed run left."""
    for place in dict.fromkeys((root, whole_path(root))):
        yield from (Issue("error", path.name, _LEFTOVER_TEXT) for path in leftovers_of(place))


def _quantized_source(checks: Iterable[Check], layers: Sequence[LayerReport]) -> Iterator[Issue]:
    """Yield a warning if most layers differ from a source that is quantized itself."""
    forms = [one.origin.weight.container for one in checks if one.origin is not None]
    form = next((form for form in forms if form is not None), None)
    if form is not None and 2 * sum(layer.differing > 0 for layer in layers) > len(layers):
        why = f"the source is quantized itself ({form}), and most layers differ from it"
        yield Issue("warning", "model", f"{why}; give the model from which this checkpoint was made")


_UNRELATED_DB = 3.0  # below it, the error is larger than 70% of the values; 4 bits give about 20 dB


def _other_model(layers: Sequence[LayerReport]) -> Iterator[Issue]:
    """Yield an error if the values of more than half of the layers do not resemble those of the source."""
    known = [layer.tally.sqnr_db for layer in layers if layer.tally.sqnr_db is not None]
    count = sum(db < _UNRELATED_DB for db in known)
    if 2 * count > len(known):
        why = f"the values of {count} of {counted(len(known), 'layer')} do not resemble those of the source"
        yield Issue("error", "model", f"{why}, which is probably another model; give the one that this was made from")


def _issues_of_layers(
    prepared: Verification,
    found: Sequence[ReencodedLayer],
    layers: Sequence[LayerReport],
    smoothing: Smoothing,
    readers: Readers,
) -> Iterator[Issue]:
    """Yield what the values of the layers show."""
    zeros, settings = [*_zeros(found)], prepared.settings
    yield from zeros
    yield from _doubtful_magnitudes(found, layers, prepared.reference, readers)
    for layer in layers:
        yield from findings.stored_issues(layer.name, layer.tally)
    lost = {issue.subject.partition("[")[0] for issue in zeros if issue.severity == "error"}
    doubts = Counter(one.doubt for one in found if one.check.stored.container is not None)
    most = (doubt for doubt, count in doubts.items() if count >= _FEWEST and 2 * count > doubts.total())
    certain = {*CERTAIN, *(doubt for doubt in most if OTHER_ORDER in doubt)}
    for one in found:
        name = one.check.stored.name
        if one.doubt and not (one.doubt in CERTAIN and name in lost):
            yield Issue("error" if one.doubt in certain else "warning", name, one.doubt)
    failed = [one for one in found if one.error]
    yield from (Issue("error", x.check.stored.name, f"cannot be re-encoded: {shown(x.error)}") for x in failed)
    kept = [layer for layer in layers if layer.name not in lost]  # of the others, the zeros are the cause
    far = [*chain.from_iterable(_too_far(layer, smoothing.layers.get(layer.name), settings.weighted) for layer in kept)]
    yield from far
    # More than 1% of the bytes of the codes or of the block scales differ, or the tensor scale does.
    scaled = {one.check.stored.name for one in found if one.differing.get(TENSOR_SCALE)}
    different = [x.name for x in kept if x.name in scaled or any(100 * count > of for count, of in (x.codes, x.scales))]
    faults = reencode.faults_of(prepared.checks, dict.fromkeys([*(issue.subject for issue in far), *different]))
    yield from (Issue("error", name, f"{fault}{_REPAIR}") for name, fault in faults.items())
    yield from (Issue("warning", name, _SMOOTHED) for name in smoothing.norms)
    used = {one.check.stored.name: one.check.job.recipe for one in found if one.check.job is not None}
    for layer in layers:
        yield from _differing(layer, used.get(layer.name), settings.search)


_FEWEST = 4  # an order that fewer layers need, or less than half of them, is a warning
_QUANTIZED_ALONE = (
    "is quantized, but the source, which has quantized layers, keeps it unquantized; convert the source again, with"
    " --include if this layer is to be quantized too"
)
_LEFTOVER_TEXT = "was left by a run that was killed after it had completed; fp4kit convert --remove-stale removes it"


def _layers(checks: Iterable[Check], found: Iterable[ReencodedLayer], readers: Readers) -> tuple[LayerReport, ...]:
    """Return one report per layer or stack of experts, in the order of the files."""
    members: dict[str, list[ReencodedLayer]] = {check.stored.name: [] for check in checks}
    for one in found:
        members[one.check.stored.name].append(one)
    return tuple(_layer(of_layer, readers) for of_layer in members.values())


def _layer(members: Sequence[ReencodedLayer], readers: Readers) -> LayerReport:
    """Return the report on one layer or one stack of experts."""
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
        min((one.usual_db for one in members if one.usual_db is not None), default=None),
        next((one.first for one in sorted(members, key=lambda one: one.check.expert) if one.first), ()),
    )


_SMOOTHED = "was divided by a factor per column that layers after it were multiplied by (SmoothQuant, AWQ)"


def _zeros(found: Sequence[ReencodedLayer]) -> Iterator[Issue]:
    """Yield an issue for each matrix whose values are zero where those of the source are not, or all zero."""
    quantized = [one for one in found if one.check.stored.container is not None]
    share = sum(findings.is_all_zero(one.tally) for one in quantized) / max(len(quantized), 1)
    for one in quantized:
        stored, form = one.check.stored, one.check.stored.container
        scale = None if form is None else form.scale
        name = stored.name if stored.experts == 1 else f"{stored.name}[{one.check.expert}]"
        yield from (
            findings.zeros_of(name, one.tally)
            if one.tally.compared
            else findings.emptiness_of(name, one.tally, scale, share)
        )


def _doubtful_magnitudes(
    found: Sequence[ReencodedLayer], layers: Sequence[LayerReport], reference: float | None, readers: Readers
) -> Iterator[Issue]:
    """Yield issues about scales whose magnitudes are wrong. Layers that are compared with a source are left out."""
    scales = {layer.name: layer.tensor_scale for layer in layers}
    magnitudes = []
    for one in found:
        stored, expert = one.check.stored, one.check.expert
        if stored.container is not None and not one.tally.compared:
            scale = scales[stored.name] if stored.experts == 1 else tensor_scale_of(readers, stored, expert)
            magnitudes.append(magnitude_of(stored, expert, scale, one.tally))
    for doubt in doubts_of(magnitudes, reference):
        yield from (Issue(doubt.severity, name, doubt.text) for name in doubt.names or ("model",))


def _too_far(layer: LayerReport, smoothed_db: float | None, is_weighted: bool) -> Iterator[Issue]:
    """Yield an error if a layer is much farther from its source than its format requires (see MARGIN_DB)."""
    is_of_recipe = bool(layer.compared) and not layer.differing
    if layer.tally.nan_codes or layer.tally.nan_scales:  # which is an error of its own
        return
    if layer.usual_db is not None and not (is_of_recipe and is_weighted):
        sqnr = layer.tally.sqnr_db if smoothed_db is None else smoothed_db
        yield from findings.noise_of(
            layer.name, sqnr, layer.usual_db, container(layer.format).element.bits, is_of_recipe
        )


_REPAIR = ", as the source shows; undo this in the file, or convert the source again"


def _differing(layer: LayerReport, used: Recipe | None, search: ScaleSearch | None) -> Iterator[Issue]:
    """Yield an error for each kind of part (codes, block scales, others) that differs from the re-encoded layer."""
    scales = f" with scales {search.words}" if search is not None else ""
    expected = "the source"
    if used is not None and layer.action not in _WITHOUT_RECIPE:
        expected = f"the source encoded with {used.title}{scales}"
    parts = {"codes": layer.codes, "block scales": layer.scales, "tensor scales, input scales or values": layer.others}
    for name, (different, _) in parts.items():
        if different:
            yield Issue("error", layer.name, f"bytes of {name} that differ from {expected}", count=different)


_WITHOUT_RECIPE = (RENAME, DEQUANTIZE)
