"""Find what the user must know about a plan: layers that stay unquantized, and layers that loaders may misread. The
exclusion list in the output's config names the layers that loaders must treat as unquantized.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from fp4kit.checkpoint.containers.configs import LOADED, container_id
from fp4kit.checkpoint.containers.table import INPUT_SCALE
from fp4kit.checkpoint.loaders import exclusions
from fp4kit.checkpoint.loaders.requirements import consequence
from fp4kit.checkpoint.model.weights import layer_names
from fp4kit.checkpoint.plan.plan import ShardPlan
from fp4kit.checkpoint.plan.plan_facts import PlanFacts
from fp4kit.checkpoint.selection import names as fused_layers
from fp4kit.checkpoint.selection.selection import UNSUPPORTED_STACK, Decision, no_multiple
from fp4kit.storage.files import listed, shown


def exclusions_of(facts: PlanFacts) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (exclusion list, warnings about layers that loaders may treat wrongly)."""
    # The exclusion list tells loaders which layers are unquantized, where they would expect quantized ones.
    if facts.form is None:
        return (), ()
    quantized = [
        w for name, w in facts.weights.items() if name in facts.selected or (w.container and facts.stays_quantized(w))
    ]
    converted = [name for weight in quantized for name in layer_names(weight, facts.form, facts.config)]
    stay = {weight.tensor for weight in quantized}
    kept = [name for name, found in facts.decisions.items() if found.listed and name not in stay]
    modules = [facts.weights[name].name if name in facts.weights else name.removesuffix(".weight") for name in kept]
    declared = LOADED.get(container_id(facts.form, facts.has_input_scale))
    modules += [layer.name for layer in facts.split.values()]
    warnings = [shown(line) for line in fused_layers.partly_converted(modules, set(converted))]
    warnings += _kept_stacks(facts.decisions) + _restored_layers(facts)
    warnings += _rows_of_other_length(facts)
    # MIXED_PRECISION of Model-Optimizer lists the quantized layers, so it has no exclusion list.
    listless = len(facts.forms) > 1 and facts.form.format == "modelopt"
    if declared is None or declared.syntax is None or listless:
        return (), tuple(warnings)
    subtrees = sorted({found.subtree for found in facts.decisions.values() if found.subtree is not None})
    ignore = exclusions.exclusion_list(declared.syntax, modules, subtrees, converted)
    return ignore, tuple(warnings)


def _rows_of_other_length(facts: PlanFacts) -> list[str]:
    """Return warnings about layers that stay unquantized because their rows do not consist of whole blocks."""
    assert facts.form is not None
    rows: dict[str, list[str]] = defaultdict(list)
    for name, weight in facts.weights.items():
        found, form = facts.decisions.get(name), facts.form_of(weight.name)
        assert form is not None
        length = no_multiple(weight.shape, form.row_multiple)
        if found is not None and found.reason == length:
            dtype = "BF16" if weight.container is not None else facts.source.tensors[name][1].dtype
            rows[f"{length}; {{}} {dtype}"].append(weight.name)
    return [
        f"{_several(names)}: {why.format('it stays' if len(names) == 1 else 'they stay')}"
        for why, names in rows.items()
    ]


def decoded_layers(facts: PlanFacts) -> tuple[str, ...]:
    """Return a note per reason, other than the user's choice and the length of rows, why quantized layers are
    decoded.
    """
    if facts.form is None:
        return ()
    names: dict[str, list[str]] = defaultdict(list)
    for tensor, weight in facts.weights.items():
        found = facts.decisions.get(tensor)
        stays = weight.container is None or facts.has_codes(tensor) or facts.stays_quantized(weight)
        if stays or found is None or found.converted:
            continue
        if not ("--" in found.reason or "preset" in found.reason or found.reason.startswith("K = ")):
            names[found.reason].append(weight.name)
    return tuple(
        f"{_several(layers)}: quantized in the source, written in 16 bits: {shown(why)}"
        for why, layers in names.items()
    )


def _restored_layers(facts: PlanFacts) -> list[str]:
    """Return a list with one warning, which names the kv_b_proj layers that stay unquantized; [] if there are none."""
    names = [layer.name for layer in facts.split.values()]
    why = "put together from mlx-lm's embed_q and unembed_out, whose blocks run along another axis"
    return [f"{_several(names)}: {why}; unquantized in the output"] if names else []


def unmeasured(facts: PlanFacts, shards: Iterable[ShardPlan]) -> tuple[str, ...]:
    """Return a tuple with one warning, which names the experts without an input scale; () if no expert lacks one."""
    converted = (tensor for shard in shards for tensor in shard.tensors if tensor.name in facts.selected)
    pairs = [
        (piece.module, piece.form)
        for tensor in converted
        for piece in tensor.pieces
        if piece.form is not None and facts.without_input_scale(facts.selected[tensor.name], piece)
    ]
    if not pairs:
        return ()
    names, form = [name for name, _ in pairs], pairs[0][1]
    found = (
        f"{engine}: {consequence(engine, container_id(form, True), names[0], form.suffixes[INPUT_SCALE])}"
        for engine in ("vLLM", "SGLang")
    )
    return (
        f"{len(names)} experts saw no token and get no input scale ({listed(names)}); {'; '.join(found)};"
        " --unseen-experts layer gives them one",
    )


def _several(layers: list[str]) -> str:
    """Return the text that names layers in a warning: one name, or the number of layers and the first few names."""
    # ``layers`` must not be empty.
    return shown(layers[0]) if len(layers) == 1 else f"{len(layers)} layers ({listed(layers)})"


def _kept_stacks(decisions: Mapping[str, Decision]) -> list[str]:
    """Return a list with one warning about the stacks of experts that stay unquantized because of their names."""
    kept = [name for name, found in decisions.items() if found.reason.startswith(UNSUPPORTED_STACK)]
    return (
        [f"{_several(kept)}: kept unquantized, because expert stacks of such names are not supported"] if kept else []
    )
