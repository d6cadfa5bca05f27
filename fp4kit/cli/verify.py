"""Define the command verify, which reports what is wrong with a checkpoint as a table, as JSON or as an HTML page."""

from __future__ import annotations

import argparse
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from fp4kit.arguments import flag
from fp4kit.checkpoint.containers.table import INPUT_SCALE
from fp4kit.checkpoint.executors import Options, cluster
from fp4kit.checkpoint.findings import lines_of, recorded_activations
from fp4kit.checkpoint.loaders import requirements, support
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.plan.request import OPTIONS
from fp4kit.checkpoint.plan.scale_search import RECORDED, ScaleSearch
from fp4kit.checkpoint.reconcile import reconcile
from fp4kit.checkpoint.verify.compare import (
    CheckpointComparison,
    LayerDifference,
    TensorDifference,
    compare_checkpoints,
)
from fp4kit.checkpoint.verify.reencode import NO_RECIPE, Difference
from fp4kit.checkpoint.verify.report import summary_of, unchecked, write_report
from fp4kit.checkpoint.verify.verify import LayerReport, VerifyReport, execute, prepare
from fp4kit.cli.command import DIFFERENT, DONE, Command, path_flag
from fp4kit.cli.conversion_summary import verified_serve_line
from fp4kit.cli.convert import WHERE, activations_of, devices_of, flags_of, recipes_of
from fp4kit.cli.output import Output, shape_text
from fp4kit.contract.compare_layer import COLUMNS, MOST_ROWS, Parity
from fp4kit.contract.engines import Serving, decoding_of, serving_differences, serving_of, servings
from fp4kit.contract.parity import parity
from fp4kit.contract.schema import Contract
from fp4kit.recipes import name_for_inputs
from fp4kit.storage.files import CheckpointError, counted, shown


def _verify(args: argparse.Namespace, out: Output) -> int:
    """Run the command verify."""
    for name in ("recipe", "scale_search", "column_weights", "imatrix"):
        if getattr(args, name) is not None and args.source is None:
            option = f"--{name.replace('_', '-')}"
            raise CheckpointError(f"{option}: says how layers were made from a source; add --source SRC")
    has_weights = args.column_weights is not None or args.imatrix is not None
    objective = RECORDED if args.scale_search is None and has_weights else args.scale_search
    search = ScaleSearch.of(objective, args.column_weights, args.imatrix)
    gives = args.activations or args.activation_rule or args.unseen_experts
    activations = activations_of(args, *recorded_activations(Path(args.path))) if gives else None
    if args.html is not None:
        _check_page("--html", args.html, args.path, args.source)
    ranks = {"tp": args.tp, "ep": args.ep}
    with cluster(args.dask) as executor:
        options = Options(args.workers, executor, devices_of(args), processes=True)
        default, recipes = recipes_of(args.recipe or ())
        prepared = prepare(
            args.path, args.source, default, options, search, args.ignore, activations, recipes, args.adapter, **ranks
        )
        with out.progress("verifying", prepared.nbytes) as tick:
            report = execute(prepared, replace(options, progress=tick))
    if args.html is not None:
        write_report(report, args.html)
    out.document("verify/1", report.as_data())
    if out.text:
        _print_report(out, report, args.all)
    return DONE if report.clean else DIFFERENT


def _check_page(option: str, page: Path, *models: str | None) -> None:
    """Raise CheckpointError if a file cannot be written, or if its path is a checkpoint or inside one."""
    start = f"{option} {shown(str(page))}"
    if page.is_dir() or not page.parent.is_dir():
        raise CheckpointError(f"{start}: cannot be written; a file name in a directory that exists is needed")
    if any(page.resolve().is_relative_to(Path(model).resolve()) for model in models if model):
        raise CheckpointError(f"{start}: lies inside the checkpoint, which it would change; choose another directory")


_MOST_PLACES = 4
_NUMBERS = re.compile(r"\d[\d.e+-]*")
_MOST_ROWS, _FIRST = 24, 3  # of more layers, those with a finding are printed; of more, the first of each finding


def _print_report(out: Output, report: VerifyReport, whole: bool) -> None:
    """Print a report: the table of layers, the issues, a summary, what was not checked, the next step and the
    verdict.
    """
    columns = ("layer", "format", "#SQNR dB", "#clipped", "#zero blocks", "#flushed", "#differing bytes")
    named: dict[str, set[str]] = defaultdict(set)
    for issue in report.issues:
        named[issue.subject].add(_NUMBERS.sub("", issue.text))
    listed = [x for x in report.layers if x.tally.compared or x.compared or x.tally.zero_blocks or x.name in named]
    others = alike = 0
    if len(listed) > _MOST_ROWS and not whole:
        chosen = {x.name for x in listed if x.differing or x.name in named}
        others, listed = len(listed), [x for x in listed if x.name in chosen]
        others -= len(listed)
        if (alike := len(listed)) > _MOST_ROWS:  # of layers with the same findings, the first ones
            groups: dict[frozenset[str], list[str]] = defaultdict(list)
            for x in listed:
                groups[frozenset(named.get(x.name, ()))].append(x.name)
            first = set[str]().union(*(names[:_FIRST] for names in groups.values()))
            listed = [x for x in listed if x.name in first]
        alike -= len(listed)
    out.table(columns, [_cells(layer) for layer in listed])
    out.lines([f"not listed: {counted(others, 'layer')} without a finding; --all lists them"] if others else [])
    out.lines([f"not listed: {counted(alike, 'layer')} with the findings of others; --all lists them"] if alike else [])
    places = [f"first difference: {shown(x.name)}{_place(d)}" for x in report.layers for d in x.first]
    if (rest := len(places) - _MOST_PLACES) > 0 and not whole:
        places[_MOST_PLACES:] = [f"not listed: {rest} first differences; --all lists them"]
    out.lines(places)
    out.lines(f"{severity}: {text}" for severity, text in lines_of(report.issues))
    out.lines(summary_of(report))
    missing = unchecked(report)
    out.lines([f"not checked: {'; '.join(missing)}"] if missing else [])
    step = _next_step(report)
    if step:
        out.line(f"next: {step}")
    elif report.clean and (line := verified_serve_line(report)):
        out.line(line)
    out.line(report.verdict)


def _place(found: Difference) -> str:
    """Return the place and the values of a difference as text, such as ": codes, row 3, column 17: 5, expected 13"."""
    expert = "" if found.expert is None else f"[{found.expert}]"
    place = "" if found.row is None else f", row {found.row}, column {found.column}"
    part = "block scales" if found.part == "scales" else found.part.replace("_", " ")
    return f"{expert}: {part}{place}: {found.stored:.9g} in the file, {found.expected:.9g} expected"


def _next_step(report: VerifyReport) -> str:
    """Return the command to run next, for the line that begins with "next:"; "" if there is none."""
    path = shlex.quote(str(report.path))
    if not report.layers:
        return ""
    if report.source is None:
        return f"fp4kit verify {path} --source SRC"
    names, source = {layer.name for layer in report.layers}, shlex.quote(str(report.source))
    errors = [one for one in report.issues if one.severity == "error" and one.subject in names]
    if not errors and any(NO_RECIPE in issue.text for issue in report.issues):
        return f"fp4kit identify {path} --source {source}, which finds the recipe to compare by"
    of_inputs = {layer.name for layer in report.layers if {one.part for one in layer.first} == {INPUT_SCALE}}
    if any(one.subject not in of_inputs and not one.text.startswith("input_") for one in errors):
        return f"fp4kit identify {path} --source {source}, which says what made the layers"
    return f"fp4kit convert {source} NEW --activations FILE, which writes new input scales" if errors else ""


def _cells(layer: LayerReport) -> tuple[str, ...]:
    """Return the cells of one layer's row in the table of layers; "-" stands for counts that need a source."""
    found = layer.tally
    sqnr = "-" if found.sqnr_db is None else f"{found.sqnr_db:.2f}"
    clipped, flushed = (str(n) if found.compared else "-" for n in (found.saturated, found.flushed_blocks))
    name = f"{shown(layer.name)} {shape_text(layer.shape)}"
    differing = str(layer.differing) if layer.compared else "-"
    return name, layer.format, sqnr, clipped, str(found.zero_blocks), flushed, differing


def _compare(args: argparse.Namespace, out: Output) -> int:
    """Run the command compare. Return 0 if the checkpoints are equal, otherwise 1."""
    total = sum(nbytes for _, nbytes in inspect_checkpoint(args.a).totals.values())
    with out.progress("comparing", total) as tick:
        comparison = compare_checkpoints(args.a, args.b, tick, args.ignore)
    body = {**asdict(comparison), "refused": [item._asdict() for item in comparison.refused]}
    del body["quantized"]
    out.document("compare/1", {"a": args.a, "b": args.b, "equal": comparison.equal, **body})
    if out.text:
        _print_comparison(out, comparison)
    return DONE if comparison.equal else DIFFERENT


def _print_comparison(out: Output, comparison: CheckpointComparison) -> None:
    """Print a comparison: the verdict, then tables of config entries, tensors and layers that differ."""
    out.line(comparison.verdict)
    rows = [(shown(f"{d.place}: {d.key}" if d.key else d.place), d.kind, shown(d.detail)) for d in comparison.configs]
    out.table(("config", "difference", "detail"), rows)
    # If a layer is quantized in only one checkpoint, all of its tensors differ. List the layer instead of its tensors.
    quantized_in_one = [layer for layer in comparison.layers if layer.codes is None]
    parts = {name for layer in quantized_in_one for name in layer.tensors}
    known = [one for one in comparison.layers if one.codes is not None]
    both = [one for one in known if one.differs or (one.values and not comparison.paired)]
    # The table of layers counts their codes and scales. Input scales and factors per column are in none of its columns.
    stored = {name for one in both if not one.factors for name in one.tensors if ".input_" not in name}
    below = {d.name for d in comparison.tensors if d.kind == "bytes" and d.name in stored}
    listed = [d for d in comparison.tensors if d.name not in parts | below]
    # Tensors that only one checkpoint has share a row, if their last names and dtypes are equal.
    by_name: dict[tuple[str, ...], list[TensorDifference]] = defaultdict(list)
    for d in listed:
        is_alone = d.kind in ("missing", "extra")
        by_name[("*." + d.name.rpartition(".")[2], d.kind, d.detail.split(" ")[0]) if is_alone else (d.name,)].append(d)
    shared = [
        (f"{shown(key[0])} ({len(ds)} tensors)", *key[1:])
        if len(ds) > 1
        else (shown(ds[0].name), ds[0].kind, ds[0].detail)
        for key, ds in by_name.items()
    ]
    out.table(("tensor", "difference", "detail"), shared)
    if any(len(ds) > 1 for ds in by_name.values()):
        out.line("missing: only A has it; extra: only B has it; --json lists every name")
    columns = {"#codes": "{codes} of {elements}", "#scales": "{scales}", "#values": "{values}", "tensor scales": "{of}"}
    if below:
        out.line(f"not listed: {counted(len(below), 'tensor')} of the layers below")
    layers = [{**vars(layer), "of": _tensor_scales(layer)} for layer in both]
    out.records(layers, {"quantized layer": "{name}", **columns, "#SQNR dB": "{sqnr_db:.2f}"})
    if both:
        out.line("values: as the engines of each format decode them; fp4kit.compare decodes as the recipes do")
    if equal := [x for x in known if not x.differs and not x.values]:
        out.line(f"not listed: {counted(len(equal), 'layer')} with equal codes, scales and values")
    alike = [x for x in known if x.values and not x.differs]
    where = "in {} with equal codes and scales".format
    if zeros := [x for x in alike if x.zeros]:
        text = f"{counted(sum(x.zeros for x in zeros), 'zero')} of other sign, {where(counted(len(zeros), 'layer'))}"
        out.line(f"{text}: A or B decodes the code of -0 as +0, as llama.cpp does")
    if rounded := [x for x in alike if x.values > x.zeros]:
        values, least = sum(x.values - x.zeros for x in rounded), min(x.sqnr_db for x in rounded)
        text = f"{counted(values, 'other value')}, {where(counted(len(rounded), 'layer'))}"
        out.line(f"{text} (SQNR at least {least:.0f} dB): A and B decode by other arithmetic")
    if comparison.paired:
        out.line("not compared: config.json and the metadata of the GGUF file, except the numbers of layers and heads")
    columns = {"layer quantized in one": "{name}", "#values": "{elements}", "#SQNR dB": "{sqnr_db:.2f}"}
    out.records(map(vars, quantized_in_one), columns)
    if alone := len(comparison.tensors) - len(listed) - len(below):
        count = counted(len(quantized_in_one), "layer")
        out.line(f"not listed: {alone} tensors of the {count} that only one checkpoint has quantized")
    out.lines(f"not decoded, because of {shown(item.name)}: {shown(item.why)}" for item in comparison.refused)


def _tensor_scales(layer: LayerDifference) -> str:
    a, b = layer.tensor_scales
    return "same" if a == b else " and ".join("none" if one is None else f"{one:.9g}" for one in (a, b))


def _parity(args: argparse.Namespace, out: Output) -> int:
    """Run the command parity."""
    names = ("weights", "inputs", "kv", "elements", "layers", "seconds")
    try:
        options = {name: getattr(args, name) for name in (*names, "engine", "scheme")}
        found = parity(args.train, args.rollout, **options)
    except TypeError as error:
        raise CheckpointError(str(error)) from None
    out.document("parity/1", {"train": args.train, "rollout": args.rollout or args.engine, **_parity_body(found)})
    out.line(found.verdict)
    out.table(tuple(COLUMNS), [tuple(map(shown, row)) for row in found.rows(MOST_ROWS)])
    for layer in found.examples:
        out.lines(map(shown, layer.lines))
        if layer.worked is not None:
            out.verbatim(str(layer.worked))
    out.lines(f"{title}: {shown(text)}" for title, texts in found.remarks for text in texts)
    return DONE if found.equal else DIFFERENT


def _parity_body(found: Parity) -> dict[str, Any]:
    """Return a result of fp4kit.parity as a dict for the command's JSON document."""
    layers = [
        {**asdict(layer), "worked": None if layer.worked is None else str(layer.worked).splitlines()}
        for layer in found.layers
    ]
    contracts = None if found.contracts is None else asdict(found.contracts)
    facts = {name: getattr(found, name) for name in ("equal", "verdict", "sampled", "missing", "exclusions", "notes")}
    facts["uncompared"] = found.uncompared
    return {**facts, "contracts": contracts, "layers": layers}


def _contract(args: argparse.Namespace, out: Output) -> int:
    """Run the command contract."""
    if (args.path or args.engine) if args.list else not (args.path or args.engine):
        raise CheckpointError("give PATH, --engine with --scheme, both, or --list alone")
    if args.long and not args.list:
        raise CheckpointError("--long was given without --list; add --list")
    if args.list:
        rows = [_serving_row(row) for row in servings()]
        shown_columns = [name for name in _SHOWN_OF_ENGINES if args.long or name not in ("weights", "activations")]
        names = [x.activations and name_for_inputs(x.activations, x.input_scales, x.weights) for x in servings()]
        named = [{**row, "activations": name or ""} for row, name in zip(rows, names, strict=True)]
        out.records(named, {name: f"{{{name}}}" for name in shown_columns})
        out.document("engines/1", {"engines": rows})
        return DONE
    stored = None if args.path is None else Contract.of(args.path)
    row = _serving(args, "" if stored is None else str(stored.container).partition(" ")[0]) if args.engine else None
    found = stored if row is None else row.contract
    assert found is not None
    if args.out is not None:
        _check_page("--out", args.out, args.path)
        found.save(args.out)
    facts = {} if row is None else {**_serving_row(row), "loads": dict(_loads(row))}
    has_codes = stored is not None and Path(args.path).suffix != ".json"
    lines = str(found).splitlines()
    if row is not None and stored is not None and has_codes and stored.weights is not None:
        lines[0] = f"weights: the stored codes of {stored.weights.title}"
    out.lines(map(shown, lines))
    if row is None and "served_dtype" in found.unknown:
        out.line("served_dtype and unit depend on the engine: name it by --engine and --scheme (--list shows all)")
    out.lines(f"{name}: {facts[name]}" for name in ("version", "device", "product", "evidence", "needs") if facts)
    out.lines(f"{families}: {status}" for families, status in facts.get("loads", {}).items())
    misfit = ""
    if row is not None and stored is not None and Path(args.path).is_dir():
        model, is_static = inspect_checkpoint(args.path), stored.input_scales == "static"
        misfit = requirements.misfit_of(row, stored.container, is_static, model.config or {}, model.layers)
    differences, decoding = None, ""
    if row is not None and stored is not None:
        differences = serving_differences(stored, row) if has_codes else stored.diff(found).differences
        decoding = decoding_of(stored, row) if has_codes and not misfit else ""
        out.line()
        out.lines([decoding] if decoding else [])
        same = [] if has_codes else ["nothing stated differs"]
        out.lines(["where the stored contract and the engine differ:"] if differences else same)
        out.lines(map(shown, differences))
    out.lines([f"error: this checkpoint cannot be served so: {shown(misfit)}"] if misfit else [])
    body = {"contract": found.as_data(), "serving": facts or None}
    out.document(
        "contract/1", {**body, "differences": differences, "decoding": decoding or None, "error": misfit or None}
    )
    return DIFFERENT if misfit else DONE


def _serving(args: argparse.Namespace, stored_format: str) -> Serving:
    row = serving_of("contract", args.engine, args.scheme, args.route, args.format)
    named = (row.engine, row.scheme, args.route or row.route, args.format or stored_format)
    return next((one for one in servings() if (one.engine, one.scheme, one.route, one.format) == named), row)


_SHOWN_OF_ENGINES = ("engine", "scheme", "route", "format", "weights", "activations", "product", "evidence")


def _loads(row: Serving) -> Iterator[tuple[str, str]]:
    """Yield (families of models, what the engine does with such a checkpoint of them), as far as it is known."""
    for cell, names in support.cells_of(row.container, row.engine).items():
        how = "" if cell.how == "run" else " (read in its source)"
        yield f"models {', '.join(names)}", f"{cell.status}{how}{f'; {cell.note}' if cell.note else ''}"


def _serving_row(row: Serving) -> dict[str, Any]:
    """Return a record of an engine as an object of JSON, with the ids of its recipes."""
    found: dict[str, Any] = {one.name: getattr(row, one.name) for one in fields(row)}
    found |= {name: getattr(found[name], "id", "") for name in ("weights", "activations")}
    evidence = f"{row.evidence}, product {row.product_evidence}"
    return {**found, "format": row.format or "", "evidence": evidence, "input_scales": row.input_scales or ""}


def _reconcile(args: argparse.Namespace, out: Output) -> int:
    """Run the command reconcile."""
    if args.dry_run == (args.destination is not None):
        got = "--dry-run and DST" if args.dry_run else "neither DST nor --dry-run"
        raise CheckpointError(f"got {got}; give SRC and DST to write, or --dry-run and SRC to write nothing")
    total = sum(nbytes for _, nbytes in inspect_checkpoint(args.source).totals.values())
    with out.progress("writing", total) as tick:
        found = reconcile(args.source, args.destination, tick, args.ignore, args.experts, args.allow_loss)
    repairs = [{**vars(repair), "loss": repair.loss} for repair in found.repairs]
    out.document("reconcile/1", {**vars(found), "repairs": repairs})
    columns = {"layer": "{name}", "#tensor scale": "{before:.6g}", "#new one": "{after:.6g}"}
    counts = {"#block scales changed": "{changed}", "#underflow": "{underflow}", "#SQNR dB": "{sqnr_db:.2f}"}
    out.records(repairs, {**columns, **counts, "loss": "{loss}"})
    count = f"{len(repairs)} layers, parts of {found.groups} fused layers"
    if not repairs:
        out.line(f"{found.groups} fused layers; the parts of each have one tensor scale; nothing to write")
    else:
        out.line(
            f"would rescale {count}" if args.dry_run else f"wrote {shown(str(found.destination))}: rescaled {count}"
        )
        path = "" if args.dry_run else shlex.quote(str(found.destination))
        out.lines([f"next: fp4kit verify {path} --source SRC, because equal scales may still be wrong"] if path else [])
    return DIFFERENT if args.dry_run and repairs else DONE


_KINDS = "contract (.json), model directory, .safetensors or .gguf file"
_FILES, *_ON_ACTIVATIONS = OPTIONS["activations"]["flags"]
_OF_ACTIVATIONS = _FILES.help.replace(
    "write an input scale per layer", "compare the stored input scales with those of these activations"
)

COMMANDS = {
    "contract": Command(
        _contract,
        "Show what an engine computes in a quantized linear layer, or the contract of a checkpoint: the recipes of"
        " weights and activations, the dtype of decoded weights, and the product. Exit codes: 0; 1 the"
        " engine cannot serve the checkpoint by this scheme; 2 an error, such as an engine or a scheme that fp4kit does"
        " not know.",
        {
            "fp4kit contract --list": "list engines and schemes",
            "fp4kit contract --engine transformers --scheme nvfp4-w4a4": "show what transformers computes",
            "fp4kit contract Llama-NVFP4": "show the contract of a checkpoint",
            "fp4kit contract Llama-NVFP4 --engine vLLM --scheme nvfp4-w4a4": "show how another engine computes with it",
        },
        [
            path_flag("path", "PATH", f"checkpoint or contract to show: {_KINDS}", nargs="?"),
            flag("--list", "list what is known of engines", action="store_true"),
            flag("--long", "with --list: also the recipes of weights and activations", action="store_true"),
            flag("--engine", "the name of an engine, such as transformers", metavar="ENGINE"),
            flag("--scheme", "the formats of weights and activations, such as nvfp4-w4a4", metavar="SCHEME"),
            flag("--route", "how the engine loads or computes, as --list shows it (default: the first)"),
            flag("--format", "the format of the checkpoint, as --list shows it (default: that of PATH, or the first)"),
            flag("--out", "write the contract to this file, for `fp4kit parity`", type=Path, metavar="FILE"),
        ],
    ),
    "verify": Command(
        _verify,
        "Check the files of a checkpoint against its manifest, and its scales and configs against what"
        " engines require. With --source, quantize the source again by the recipe that DST records or --recipe gives,"
        " and compare every byte.",
        {
            "fp4kit verify Llama-NVFP4 --source Llama": "compare every byte with the original, quantized again",
            "fp4kit verify Llama-NVFP4": "check the files and what engines require",
            "fp4kit verify Llama-NVFP4 --source Llama --html report.html": "also write a report with charts",
        },
        [
            path_flag("path", "DST", "directory or GGUF file of the quantized model"),
            flag("--source", "compare with this original: the directory or GGUF file DST was made from", metavar="SRC"),
            flag(
                "--recipe",
                "recipe of the quantized layers (default: the one recorded in DST). PATTERN=RECIPE gives the recipe of"
                " the layers of SRC that match PATTERN, as in convert, and replaces the recorded patterns; repeatable",
                action="append",
                metavar="[PATTERN=]RECIPE",
            ),
            flag("--adapter", "the LoRA adapter that was merged into SRC", metavar="DIR"),
            *flags_of("search", "ignore"),
            flag("--all", "print the row of every layer, also of more than 24", action="store_true"),
            flag("--html", "write a report with charts: one HTML file, readable offline", type=Path, metavar="FILE"),
            flag(
                "--tp",
                "check that vLLM and SGLang can split every layer over N ranks without cutting a block",
                type=int,
                metavar="N",
            ),
            flag(
                "--ep",
                "N of these ranks share the experts, and each of them holds whole experts (--tp defaults to N)",
                type=int,
                metavar="N",
            ),
            _FILES._replace(help=_OF_ACTIVATIONS),
            *_ON_ACTIVATIONS,
            *(one._replace(section="") for one in WHERE),
        ],
        hints={"": "; did you mean --source {}?"},
        parser={
            "epilog": "The table lists the layers that were compared with a source, or of which something is to be"
            " said. clipped: weights of the source that are larger than the largest value that their block can store."
            " flushed: blocks of zeros in which the source has other values. Exit codes: 0 no errors, but there may be"
            " warnings; 1 errors, such as bytes that differ, or nothing to verify; 2 the checkpoint cannot be read."
        },
    ),
    "compare": Command(
        _compare,
        "Compare the configs, metadata, tensors and quantized layers of two checkpoints. Layers of a"
        " model directory and a GGUF file are paired by llama.cpp's names. Exit codes: 0 equal, 1 different, 2 error.",
        {
            "fp4kit compare Llama-NVFP4 Llama-other": "show where two quantized models differ",
            "fp4kit compare Llama Llama-NVFP4": "show what quantization changed",
        },
        [
            path_flag("a", "A", "model directory, .safetensors or .gguf file, such as the original of B"),
            path_flag("b", "B", "the model directory, .safetensors or .gguf file to compare with A"),
            *flags_of("ignore"),
        ],
    ),
    "parity": Command(
        _parity,
        "Compare codes, scales, values and products of two sides, layer by layer, and the values of other"
        " tensors, such as norms and biases, if both sides have them. If they differ, print"
        " the first step of the arithmetic that differs, the number of differences, one element step by step, and the"
        " setting that would make the sides equal. fp4kit convert writes a contract into every model directory. Exit"
        " codes: 0 everything that was compared is equal in every bit; 1 something differs, or a layer is on one"
        " side only; 2 an error.",
        {
            "fp4kit parity train.json Llama-NVFP4 --weights Llama": "compare a trainer's contract with a checkpoint",
            "fp4kit parity train.json rollout.json": "compare two contracts on random numbers",
            "fp4kit parity train.json --engine transformers --scheme nvfp4-w4a4": "compare a trainer with an engine",
            "fp4kit parity train-logits.safetensors rollout-logits.safetensors": "compare logits bit by bit",
        },
        [
            path_flag("train", "TRAIN", f"the side of the trainer: {_KINDS}"),
            path_flag("rollout", "ROLLOUT", f"the side of the rollout engine: {_KINDS}", nargs="?"),
            flag(
                "--engine",
                "the rollout engine, such as transformers, with --scheme. It states how ROLLOUT is computed; without"
                " ROLLOUT, its contract is the side of the rollout",
                metavar="ENGINE",
            ),
            flag("--scheme", "with --engine: what it computes, such as nvfp4-w4a4", metavar="SCHEME"),
            flag(
                "--weights",
                "the unquantized model. Contracts are applied to it, and it shows at which step of the arithmetic bytes"
                " begin to differ (default: random numbers if both sides are contracts, otherwise none)",
                metavar="SRC",
            ),
            flag(
                "--inputs",
                "file with the inputs of each layer, (tokens, K), for activations and products (default: random"
                " numbers)",
                metavar="FILE",
            ),
            flag(
                "--kv",
                "file with keys and values, (tokens, heads, head_dim), for KV cache recipes and layouts (default:"
                " random)",
                metavar="FILE",
            ),
            flag(
                "--elements",
                "elements per layer to compare, in evenly spaced rows (default: %(default)s)",
                type=int,
                default=1 << 18,
                metavar="N",
            ),
            flag("--layers", "compare only N evenly spaced layers (default: all)", type=int, metavar="N"),
            flag(
                "--seconds",
                "start no new layer or other tensor after S seconds, and say what was left out (default: no limit)",
                type=float,
                metavar="S",
            ),
        ],
    ),
    "reconcile": Command(
        _reconcile,
        "Repair an NVFP4 checkpoint in which the parts of a fused layer (q/k/v, gate/up, or all experts) have"
        " different tensor scales: give all parts the largest of these scales, and change their block scales"
        " accordingly. The loss of each layer is printed: exact if no value changes.",
        {
            "fp4kit reconcile --dry-run Llama-NVFP4": "print which layers would change",
            "fp4kit reconcile Llama-NVFP4 Llama-repaired": "write the repaired model",
        },
        [
            path_flag("source", "SRC", "directory of the quantized model"),
            path_flag("destination", "DST", "new directory; written only if something changes", nargs="?"),
            *flags_of("ignore", "allow_loss"),
            flag(
                "--experts",
                "also give all experts of a layer one tensor scale, gate and up together, for engines that keep one for"
                " them all",
                action="store_true",
            ),
            flag("--dry-run", "print what would change and the exact loss, and write nothing", action="store_true"),
        ],
        writes=lambda args: Path(args.destination) if args.destination else None,
        parser={"usage": "fp4kit reconcile SRC DST\n       fp4kit reconcile --dry-run SRC"},
    ),
}
