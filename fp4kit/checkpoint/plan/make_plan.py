"""Make the plan of a conversion: decide what happens to each tensor of a model, and check the user's request. Nothing
is converted or written here.
"""

from __future__ import annotations

import glob
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import translate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fp4kit.checkpoint.containers.config_entries import DOUBTFUL, check_declared, lost_column_scales
from fp4kit.checkpoint.containers.configs import ALL_FORMATS, LOADED, MIXED, container_id, with_declaration
from fp4kit.checkpoint.containers.table import INPUT_SCALE, Container
from fp4kit.checkpoint.convert.run_jobs import identity
from fp4kit.checkpoint.findings import asked, findings_of_plan, lines_of
from fp4kit.checkpoint.loaders import exclusions
from fp4kit.checkpoint.loaders.requirements import consequence
from fp4kit.checkpoint.model import closed_world, transforms
from fp4kit.checkpoint.model.model_files import is_gguf_config, open_source, other_weights
from fp4kit.checkpoint.model.statistics import doubts_of, reference_of, sampled_magnitudes
from fp4kit.checkpoint.model.weights import Weight, any_quantized, layer_names, weights_of
from fp4kit.checkpoint.plan import gguf_model
from fp4kit.checkpoint.plan.layer_recipes import kind_of, recorded_recipe
from fp4kit.checkpoint.plan.other_models import borrow_codes, check_values_agree
from fp4kit.checkpoint.plan.plan import Plan
from fp4kit.checkpoint.plan.plan_facts import declaration_warnings
from fp4kit.checkpoint.plan.request import DEFAULTS, GGUF_ONLY, UNQUANTIZED, Request, RequestOptions, takes_options
from fp4kit.checkpoint.plan.scale_search import SEARCH_RECIPE
from fp4kit.checkpoint.plan.source_layers import all_doubts, cache_troubles, missing_experts, wide_floats
from fp4kit.checkpoint.selection import presets
from fp4kit.checkpoint.selection.names import check_wrappers, partly_converted
from fp4kit.checkpoint.selection.selection import UNSUPPORTED_STACK, no_multiple
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.recipes import recipe as recipe_called
from fp4kit.recipes.table import from_record
from fp4kit.storage.files import CheckpointError, listed, shown

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")


def with_defaults(
    request: Request, config: Mapping[str, Any], weights: Iterable[Weight], recorded: str, given: bool
) -> Request:
    """Return a request with the recipe and the format that follow from the source, and the reason for them."""
    # An unsuitable request is returned as it is, so that making the plan raises the error.
    if request.format == UNQUANTIZED:
        return request
    sizes: Counter[Container] = Counter()
    layers: dict[str, Container] = {}
    for weight in weights:
        if weight.container is not None:
            sizes[weight.container] += prod(weight.shape)
            layers[weight.name] = weight.container
    forms = [form for form, _ in sizes.most_common()]
    formats: list[str | None] = [request.format]
    if request.format is None and not is_gguf_config(config):
        liked = presets.preset_of(request.wishes.like) if request.wishes.like else None
        own = [presets.FORMATS[liked.tool]] if liked else []
        own += [form.format or form.method for form in forms]
        formats = [*dict.fromkeys(one for one in own if one in ALL_FORMATS), None]
    if given:
        possible = ((one, _possible(replace(request, format=one).mixture_for, config)) for one in formats)
        suitable = (one for one, mixture in possible if mixture is not None)
        return replace(request, format=next(suitable, request.format))
    for kept in ("codes", "kind"):
        for format in formats:
            for have in forms:
                found = _followed(replace(request, format=format), config, have, (recorded, *DEFAULTS), kept)
                if found is not None:
                    stored = ", ".join(dict.fromkeys(map(str, forms)))
                    found = replace(found, chosen=f"as the source, which is stored as {stored}")
                    return _with_others(found, config, layers)
    return _by_default(request, config, forms)


def _followed(
    request: Request, config: Mapping[str, Any], have: Container, names: Iterable[str], kept: str = "codes"
) -> Request | None:
    """Return the request with the first recipe that stores layers of the container ``have`` alike; None if none
    does.
    """
    for name in names:
        if (r := from_record(name)) is not None:
            one = replace(request, recipe=r)
            form = _possible(one.form_for, config)
            if form is not None and (have.same_codes(form) if kept == "codes" else have.kind == form.kind):
                return one
    return None


def _possible(make: Callable[[Mapping[str, Any]], T], config: Mapping[str, Any]) -> T | None:
    """Return what ``make`` returns for a config, or None if it refuses it."""
    try:
        return make(config)
    except CheckpointError:
        return None


def _with_others(request: Request, config: Mapping[str, Any], layers: Mapping[str, Container]) -> Request:
    """Return the request with recipes for the layers whose codes the default recipe's container does not keep."""
    if request.recipes or is_gguf_config(config) or request.codes or request.format not in (None, *MIXED):
        return request
    default = _possible(request.form_for, config)
    lost = [have for have in dict.fromkeys(layers.values()) if default is None or not have.same_codes(default)]
    followed = {have: _followed(request, config, have, DEFAULTS) for have in lost}
    others: dict[str, list[str]] = defaultdict(list)
    for name, have in layers.items():
        found = followed.get(have)
        if found is not None:
            others[found.recipe.id].append(name)
    pairs = tuple((pattern, RECIPES[id]) for id, names in others.items() for pattern in _patterns(names, layers))
    mixed = replace(request, recipes=pairs, follows_layers=True)
    return request if not pairs or _possible(mixed.mixture_for, config) is None else mixed


def _patterns(names: Iterable[str], layers: Iterable[str]) -> list[str]:
    """Return globs that match the given names and no other layer: with "*" for numbers where that is possible."""
    wanted, found = set(names), []
    by_glob: dict[str, list[str]] = defaultdict(list)
    for name in wanted:
        by_glob[re.sub(r"(?<=\.)\d+(?=\.)", "*", glob.escape(name))].append(name)
    for pattern, members in sorted(by_glob.items()):
        matches = re.compile(translate(pattern)).match
        is_exact = all(name in wanted for name in layers if matches(name))
        found += [pattern] if is_exact else sorted(map(glob.escape, members))
    return found


def _by_default(request: Request, config: Mapping[str, Any], forms: list[Container]) -> Request:
    """Return the request with the first of DEFAULTS that its format can store; unchanged if there is none."""
    named = f" of --format {request.format}" if request.format else ""
    why = f"the default{named}"
    if forms and named:
        why = f"{why}, which cannot keep the codes of layers in {shown(str(forms[0]))}"
    found = (replace(request, recipe=RECIPES[name], chosen=why) for name in DEFAULTS)
    kinds = {kind_of(RECIPES[name]): RECIPES[name] for name in DEFAULTS if name != GGUF_ONLY}
    usual = next((kinds[form.kind] for form in forms if form.kind in kinds), None)
    refused = replace(request, recipe=usual or request.recipe, chosen=why)  # making the plan raises the error
    return next((one for one in found if _possible(one.form_for, config) is not None), refused)


def _layers(plan: Plan) -> tuple[list[str], list[str]]:
    """Return the names of the layers that are quantized in the output, and of those that exclusion lists name."""
    quantized = [
        w for name, w in plan.weights.items() if name in plan.selected or (w.container and plan.stays_quantized(w))
    ]
    stay = {weight.tensor for weight in quantized}
    kept = [name for name, found in plan.decisions.items() if found.listed and name not in stay]
    modules = [plan.weights[name].name if name in plan.weights else name.removesuffix(".weight") for name in kept]
    modules += [layer.name for layer in plan.split.values()]
    return [name for weight in quantized for name in layer_names(weight, plan.form, plan.config)], modules


def _exclusion_list(plan: Plan, quantized: list[str], kept: list[str]) -> tuple[str, ...]:
    """Return the list that tells loaders which layers are unquantized, where they would expect quantized ones."""
    declared = None if plan.form is None else LOADED.get(container_id(plan.form, plan.has_input_scale))
    # MIXED_PRECISION of Model-Optimizer lists the quantized layers, so it has no exclusion list.
    if declared is None or declared.syntax is None or (len(plan.forms) > 1 and plan.format == "modelopt"):
        return ()
    subtrees = sorted({found.subtree for found in plan.decisions.values() if found.subtree is not None})
    return exclusions.exclusion_list(declared.syntax, kept, subtrees, quantized)


def _warnings(plan: Plan) -> Iterator[str]:
    """Yield the warnings about a plan, except those of the scale search and of findings."""
    source, weights = plan.source, [*plan.weights.values()]
    declared = with_declaration(plan.config, source.hf_quant_config)
    own = [file.name for file in source.files]
    others = other_weights(source.root, own, plan.config) if source.ignored else ()
    yield from (f"{shown(name)}: {why}; it is not converted" for name, why in others)
    yield from _unmeasured(plan)
    yield from all_doubts(weights, declared, source.tensors)
    yield from missing_experts(weight.name for weight in weights)
    yield from wide_floats(plan.others()) if plan.form is not None else ()
    yield from closed_world.lost_tensor_scales(weights)
    told = (item for item in plan.items if item.group == DOUBTFUL or item.why == closed_world.INTEGERS)
    yield from closed_world.reasons(told)
    if any_quantized(weights):
        yield from _doubtful_magnitudes(plan, weights)
        lost = lost_column_scales(plan.config, source.hf_quant_config, plan.weights)
        yield from (lost,) if lost else ()
    if plan.kv_cache.is_carried(plan.format):
        yield from (f"{shown(name)}: {why}" for _, name, why in cache_troubles(source.tensors))
    yield from declaration_warnings(plan.declarations, len(plan.kv_cache.tensors))
    if plan.request.adapter is not None:
        yield from plan.request.adapter.other_base(source.root, plan.config)


def _warnings_on_layers(plan: Plan, quantized: list[str], kept: list[str]) -> Iterator[str]:
    """Yield warnings about layers that stay unquantized, and that loaders may treat wrongly."""
    yield from map(shown, partly_converted(kept, {*quantized}))
    stacks = [name for name, found in plan.decisions.items() if found.reason.startswith(UNSUPPORTED_STACK)]
    if stacks:
        yield f"{_several(stacks)}: kept unquantized, because expert stacks of such names are not supported"
    if plan.split:
        why = "put together from mlx-lm's embed_q and unembed_out, whose blocks run along another axis"
        yield f"{_several([layer.name for layer in plan.split.values()])}: {why}; unquantized in the output"
    # Rows that do not consist of whole blocks.
    rows: dict[str, list[str]] = defaultdict(list)
    for name, weight in plan.weights.items():
        found, length = plan.decisions.get(name), no_multiple(weight.shape, plan.form_of(weight.name).row_multiple)
        if found is not None and found.reason == length:
            dtype = "BF16" if weight.container is not None else plan.source.tensors[name][1].dtype
            rows[f"{length}; {{}} {dtype}"].append(weight.name)
    for why, names in rows.items():
        yield f"{_several(names)}: {why.format('it stays' if len(names) == 1 else 'they stay')}"


def _decoded_layers(plan: Plan) -> Iterator[str]:
    """Yield a note per reason why quantized layers are decoded, except the user's choice and the length of rows."""
    names: dict[str, list[str]] = defaultdict(list)
    for tensor, weight in plan.weights.items():
        found = plan.decisions.get(tensor)
        stays = weight.container is None or plan.has_codes(tensor) or plan.stays_quantized(weight)
        if stays or found is None or found.converted:
            continue
        if not ("--" in found.reason or "preset" in found.reason or found.reason.startswith("K = ")):
            names[found.reason].append(weight.name)
    for why, layers in names.items():
        dtype = "16 bits" if plan.gguf is None else plan.request.fp8_as.upper()
        yield f"{_several(layers)}: quantized in the source, written in {dtype}: {shown(why)}"


def _unmeasured(plan: Plan) -> Iterator[str]:
    """Yield one warning, which names the experts without an input scale; nothing if no expert lacks one."""
    pairs = [
        (piece.module, piece.form)
        for tensor in plan.tensors
        if tensor.name in plan.selected
        for piece in tensor.pieces
        if piece.form is not None and plan.without_input_scale(plan.selected[tensor.name], piece)
    ]
    if pairs:
        names, form = [name for name, _ in pairs], pairs[0][1]
        found = (
            f"{engine}: {consequence(engine, container_id(form, True), names[0], form.suffixes[INPUT_SCALE])}"
            for engine in ("vLLM", "SGLang")
        )
        yield (
            f"{len(names)} experts saw no token and get no input scale ({listed(names)}); {'; '.join(found)};"
            " --unseen-experts layer gives them one"
        )


def _doubtful_magnitudes(plan: Plan, weights: list[Weight]) -> Iterator[str]:
    """Yield warnings about scales of the source whose magnitudes are wrong."""
    for doubt in doubts_of(sampled_magnitudes(weights), reference_of(weights)):
        if doubt.severity == "error" and not plan.request.allow_loss:
            raise CheckpointError(f"{doubt.line}; --allow-loss converts the model as it is")
        yield doubt.line


def _several(layers: list[str]) -> str:
    """Return the text that names layers in a warning: one name, or the number of layers and the first few names."""
    return shown(layers[0]) if len(layers) == 1 else f"{len(layers)} layers ({listed(layers)})"


@takes_options
def make_plan(source: str | Path, recipe: str | Recipe | None = None, **options: Unpack[RequestOptions]) -> Plan:
    """Return the plan to convert a model. Nothing is written.

    In most cases, only headers and JSON files are read. Some arguments need more: column weights and importance
    matrices of ``search`` are checked, and a few rows of ``codes`` are compared with the source. Block scales are read
    if FP8 becomes MXFP8, because they must be powers of two.

    Args:
        source: a model directory, a safetensors file, or a GGUF file. A GGUF file is converted to a GGUF file.
        recipe: the recipe for newly quantized tensors, or its id. None follows the source: if it is quantized, the
            recipe of its own container, with which its layers keep their codes; otherwise, or if ``format`` cannot
            store them, the first recipe that ``format`` can store, beginning with nvfp4-te. With ``search``, None is
            the recipe for searched scales.
        format: the output format: "modelopt", "compressed-tensors", "fp8", "sglang-mxfp8", "gpt-oss", "deepseek-v4",
            "mlx", "comfy", or "bf16" to decode all layers. None chooses the format of a quantized source if it can
            store the recipe, otherwise the format that most engines can load for this recipe and model. A GGUF file is
            converted to a GGUF file, for which only None and "bf16" are allowed.
        wishes: which layers to quantize; None for the default, all linear layers.
        input_scale: a positive float32 activation scale to write for every layer; None to write none. With it, the
            checkpoint is NVFP4 (4-bit activations) instead of W4A16_NVFP4 (16-bit activations). Use 1.0 for loaders
            that need the scale but ignore its value. For measured scales, pass ``activations`` instead.
        requantize: True to allow changing the values of layers that are already quantized. If False, their values are
            kept, with one exception: some values of an MXFP4 layer may change if it becomes NVFP4 and its scale
            exponents are too far apart. The report of the conversion names such layers.
        nonfinite: what to do with NaN and infinity: "error" raises CheckpointError during the conversion, "keep"
            follows the recipe, and "saturate" replaces infinity with the largest finite magnitude and NaN with 0.
        codes: the path of a quantized version of the model, whose codes are copied instead of quantizing the source's
            own values. It must be a directory if the source is a GGUF file, and a GGUF file otherwise. ``recipe``
            still determines the container to write. Layers that are unquantized in ``codes`` stay unquantized.
        search: how to search the scale with the smallest error for every block, for example ScaleSearch.of("mse",
            column_weights). Needs nvfp4-modelopt-static, nvfp4-modelopt-static-4over6, nvfp4-gguf or mxfp4-gguf, and
            the format modelopt, compressed-tensors or GGUF. None leaves the block scales to the recipe.
        activations: Activations, a Collector, or paths of its files, from which every layer gets its own input scale. A
            layer that keeps its codes also keeps its own input scale, if it has one. None if there are no measured
            activations.
        ignore: globs of tensors, config keys and metadata entries. fp4kit refuses a model with entries that it does not
            know; those that match a glob are left out of the output instead. Every glob must match such an entry.
        split_max_size: write a GGUF model as several files, each with at most this many bytes of tensors, as
            llama-gguf-split does. None writes one file.
        recipes: (pattern, recipe) pairs for layers that get a recipe other than ``recipe``, for example
            [("*.down_proj", "nvfp4-te-2d")]. Patterns match whole module names of the source, as in Wishes.only. The
            first pattern that matches a layer decides. Every pattern must decide about a quantized layer.
        hadamard: the size of a Hadamard transform, 16 to 512, by which every layer W is rotated before it is quantized:
            fp4kit.hadamard(W, hadamard). The config declares that engines must rotate the inputs of these layers alike.
            Needs the format compressed-tensors. None rotates no layer.
        hadamard_seed: the seed of random signs for this transform, fp4kit.hadamard(W, hadamard, seed=hadamard_seed);
            None for no signs.
        hadamard_only: globs of the names of the layers to rotate. Other layers are quantized without a rotation. Every
            glob must match a layer. () rotates all layers that are quantized.
        adapter: the directory of a LoRA adapter, as PEFT saves it. Its updates are added to the weights before they are
            quantized. A quantized layer with an update is quantized again, even without ``requantize``; all other
            layers keep their codes. None adds nothing.
        adapter_scales: how such a quantized layer gets its block scales, if the output can hold its codes:

            - "nearest" keeps the tensor scale, and gives every block the scale of the source or the one that the recipe
              computes, whichever has the smaller squared error.
            - "base" keeps all scales.
            - "new" computes all scales by the recipe, also for layers that share the tensor scale with such a layer.

            If merged values exceed what the tensor scale can hold, "nearest" and "base" act like "new" for the layers
            that share it.
        allow_loss: True to convert even if the scales of quantized layers of the source are certainly wrong, and to
            write layers that lose their values: most blocks become zero though the source is not, or the error is far
            above that of the format. If False, each is an error.
        fp8_as: "bf16", "q8_0" or "f32": the dtype, in a GGUF file, of quantized layers that it cannot hold as they are,
            such as FP8. The report of the conversion says which of them are exact.

    Returns:
        The plan, for ``execute``.

    Raises:
        CheckpointError: if the source cannot be converted, no engine loads the format, a pattern matches nothing, a
            gate has no up projection, or nothing is left to convert.
        ValueError: if no recipe has an id that is given.
        TypeError: if a recipe is neither an id nor a Recipe.
    """
    if recipe is None and options.get("search") is not None:
        recipe = SEARCH_RECIPE
    request = Request.of(recipe_called(DEFAULTS[0] if recipe is None else recipe), options)
    like, row = request.wishes.like, request.serving
    if like and recipe is None and row is None and request.format != UNQUANTIZED:
        liked = presets.preset_of(like)
        if liked is not None:
            recipe, why = liked.recipe, f"--like {like}, whose activations are {liked.activations}"
            request = replace(request, recipe=recipe_called(recipe), chosen=why)
    if row is not None:
        why = request.chosen or f"the weights of {row.engine} {row.scheme}"
        if recipe is not None and request.recipe != row.weights:
            why = f"yours; {row.engine}'{'s' * (row.engine[-1] != 's')} own is {row.weights.id}"
        recipe = row.weights if recipe is None else recipe
        format = request.format if request.format == gguf_model.GGUF else row.format
        request = replace(request, recipe=recipe_called(recipe), format=format, chosen=why)
    codes = options.get("codes")
    if codes is not None:
        _check_takes_codes(request)
    model = open_source(Path(source))
    weights = weights_of(model.tensors, model.config)
    if like and is_gguf_config(model.config):
        raise CheckpointError(f"--like {like}: names modules of Hugging Face models, but SRC has llama.cpp's names")
    closed_world.check_no_adapter(model.tensors, request.ignore)
    check_wrappers(model.tensors)
    if request.adapter is not None:
        if is_gguf_config(model.config):
            raise CheckpointError(
                "--adapter: is not merged into a GGUF file; merge it into the model, then make the file"
            )
        weights = request.adapter.attach(weights, model.config)
    if codes is None and request.format == UNQUANTIZED:
        weights, items, matrices = transforms.undo(model, weights, request.ignore)
        if not any_quantized(weights.values()):
            closed_world.check_integers(items)
        check_declared(model, weights)
        return _completed(Plan(model, request, weights, items, matrices))
    is_new_gguf = request.format == gguf_model.GGUF and not is_gguf_config(model.config)
    more = gguf_model.items_of(model, weights) if is_new_gguf else ()
    items = closed_world.check_model(model, weights, request.ignore, more)
    check_declared(model, weights)
    given = recipe is not None
    if codes is None:
        request = with_defaults(request, model.config, weights.values(), recorded_recipe(model), given)
        return _completed(Plan(model, request, weights, items))
    donor = open_source(Path(codes))
    donors = weights_of(donor.tensors, donor.config)
    closed_world.check_model(donor, donors)
    request = with_defaults(request, model.config, donors.values(), recorded_recipe(donor), given)
    taken = borrow_codes(weights, model, donor)
    request = replace(request, codes=identity(donor), made_by=recorded_recipe(donor))
    plan = _completed(Plan(model, request, taken, items))
    check_values_agree([tensor.name for tensor in plan.converted], weights, taken)
    return plan


def _check_takes_codes(request: Request) -> None:
    if request.adapter is not None:
        raise CheckpointError("--adapter: codes of another model have no update; leave --codes out")
    if request.format == gguf_model.GGUF:
        raise CheckpointError(
            "--codes: --format gguf keeps the codes of a directory; pass the quantized directory as SRC, or a GGUF file"
            " as SRC without --format"
        )
    if request.hadamard is not None:
        raise CheckpointError(
            f"--hadamard {request.hadamard}: the codes of another model cannot be rotated; leave --codes out"
        )


def _completed(plan: Plan) -> Plan:
    """Check a plan, and return it with its exclusion list, notes, warnings and findings."""
    if not plan.selected and not plan.restored:
        raise CheckpointError(
            "0 tensors to convert: nothing in the source is quantized, so there is nothing to decode; use another"
            " format than bf16"
        )
    seen: set[str] = set()
    for output in (output for file in plan.files for output in file.outputs):  # raises if split_max_size is too small
        if output.name in seen:
            raise CheckpointError(
                f"{shown(output.name)}: two tensors would be written under this name; rename one in the source"
            )
        seen.add(output.name)
    # List the files beside the model now: one that a link replaces before the run must be refused, not left out.
    _ = plan.auxiliary
    search = plan.request.search
    searched = () if search is None else search.check_layers(plan.tensors)
    if plan.form is not None:
        layers = _layers(plan)
        plan.ignore, plan.decoded = _exclusion_list(plan, *layers), tuple(_decoded_layers(plan))
        plan.warnings = tuple(_warnings_on_layers(plan, *layers))
        row = plan.request.serving
        if row is not None and plan.format_name not in (row.container, f"{row.container} scaled"):
            raise CheckpointError(
                f"--engine {row}: loads {row.container}, and DST would be {plan.format_name}; leave other recipes and"
                " formats out"
            )
    plan.warnings += (*searched, *_warnings(plan))
    plan.findings = tuple(issue for issue in findings_of_plan(plan) if issue.text not in plan.warnings)
    plan.warnings += tuple(text for severity, text in lines_of(asked(plan, plan.findings)) if severity != "note")
    return plan
