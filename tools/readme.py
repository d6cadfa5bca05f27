"""Rewrite the generated parts of README.md and docs/ from code and benchmark records.

    python tools/readme.py

A *part* is the text between `<!-- generated: NAME -->` and `<!-- end -->`. The function NAME of this file returns it.
tests/project/test_readme.py checks that all parts are current.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import fp4kit
from fp4kit.checkpoint.containers.configs import LOADED, MIXTURES
from fp4kit.checkpoint.loaders import support
from fp4kit.checkpoint.selection.presets import EXCLUSIONS, PRESET_COLUMNS, preset_rows
from fp4kit.cli.convert import flags
from fp4kit.cli.output import RECIPE_COLUMNS, grouped_recipe_rows, markdown
from fp4kit.contract.engine_table import VERSIONS
from fp4kit.cpu.engine import COVERAGE_COLUMNS, uncovered_rows
from fp4kit.evidence.golden.check import COLUMNS, agreement_rows
from fp4kit.evidence.live.run import adapters, exceptions, found_equal
from fp4kit.recipes import ALL_RECIPES, RECIPES, name_for_inputs, recipe
from fp4kit.recipes.schema import PRODUCERS, producer_of

ROOT = Path(__file__).resolve().parent.parent
DOCS = (
    "benchmarks",
    "checkpoint-engines",
    "checkpoint-layers",
    "checks",
    "command-line",
    "index",
    "live-producers",
    "processors",
    "recipes",
    "scale-search",
    "guides/matmul",
    "guides/train-and-serve",
)
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in DOCS))
HIDDEN = r"_|check(_|$)"  # names of a module that the reference leaves out, as the filter in mkdocs.yml does
REFERENCE = tuple(sorted((ROOT / "docs" / "reference").glob("*.md")))
RESULTS = ROOT / "benchmarks" / "results"
MEASURED = (  # rows of the table of times: (operation, recipe)
    ("quantize", "mxfp4-ocp"),
    ("quantize", "mxfp8-torchao-rceil"),
    ("quantize, amax given", "nvfp4-torchao"),
    ("quantize with amax", "nvfp4-torchao"),
    ("quantize along columns", "mxfp8-te"),
    ("quantize_both", "nvfp4-te-2d"),
    ("dequantize", "mxfp4-ocp"),
    ("fake_quantize 128 equal", "fp8-modelopt"),
)


def evidence() -> str:
    """Return the table that counts the recipes by how their equality with the producer is known."""
    known = Counter(next(iter(recipe(id).evidence), "derived") for id in ALL_RECIPES)
    kinds = {
        "GPU": "compared with recorded outputs of an H100 or H200 (none of a Blackwell GPU)",
        "CPU": "compared with recorded outputs of the producer's code on a CPU",
        "emulated": "compared with recorded outputs of its kernels, executed on a CPU",
        "reference": "compared with recorded outputs of its reference implementation",
        "derived": "derived from its source code alone",
    }
    assert set(known) <= set(kinds)
    rows = [(text, str(known[kind])) for kind, text in kinds.items()]
    columns = ("how the equality with the producer is known", f"of {len(ALL_RECIPES)} recipes")
    return f"{markdown(columns, rows)}\n\n`print(fp4kit.recipe('nvfp4-te'))` says which holds.\n"


SECTIONS = {  # {heading on the page of recipes: the first parts of the ids in that section}
    "NVFP4": ("nvfp4",),
    "IF4, and integers with E4M3 scales": ("nvint4", "if4"),
    "MXFP4": ("mxfp4",),
    "MXFP6 and MXFP8": ("mxfp6", "mxfp8"),
    "FP8": ("fp8",),
    "FP4 with float32 scales": ("fp4",),
    "INT8 and INT4": ("int8", "int4"),
    "HiF4": ("hif4", "hifx3", "hifx5"),
}


def recipes() -> str:
    """Return an index and a section per group of formats, for the part "recipes": a table of each producer's recipes.

    A cell of the table holds the first sentence of what a recipe equals, and the notes below it hold the rest.
    """
    parts, index = [], []
    for heading, formats in SECTIONS.items():
        found = defaultdict(list)
        for row in grouped_recipe_rows():
            if row[0].split("-")[0] in formats:
                found[producer_of(re.split(" [=~] |, ", row[0])[0])].append(row)
        parts += [f"## {heading}", *(_producer_part(name, rows) for name, rows in found.items())]
        count = sum(id.split("-")[0] in formats for id in ALL_RECIPES)
        names = ", ".join(PRODUCERS[name].name for name in found)
        index.append(
            (f"[{heading}](#{re.sub('[^a-z0-9 ]', '', heading.lower()).replace(' ', '-')})", str(count), names)
        )
    return "\n\n".join([markdown(("format", "recipes", "producers"), index), *parts])


def _producer_part(name: str, rows: list[tuple[str, ...]]) -> str:
    """Return the table of a producer's recipes of one section, with its notes."""
    cells, notes = [], defaultdict(list)
    for names, block, _, exact, evidence, versions, source in rows:
        first, end, rest = exact.replace(f" ({versions})", "").partition(". ")
        if rest:
            notes[rest].append(re.split(" [=~] ", names)[0])
        cells.append((names, block, f"{first}{end.strip()}", evidence, versions, source))
    listed = [f"- {', '.join(f'`{name}`' for name in names)}: {rest}." for rest, names in notes.items()]
    table = markdown([title for title in RECIPE_COLUMNS if title != "scale rule"], cells)
    return "\n".join([f"### {PRODUCERS[name].name}", "", table, *(["", *listed] if listed else [])])


def agreement() -> str:
    """Return the Markdown table of recipes that give equal bytes on ordinary data, for the part "agreement"."""
    return markdown(COLUMNS, agreement_rows())


def performance() -> str:
    """Return the machine and the table of times on a GPU, from the committed record."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import report

    record = json.loads((RESULTS / "h200.json").read_text())
    return f"{report.heading(record)}.\n\n{markdown(report.SUMMARY_COLUMNS, report.summary(record, MEASURED))}"


def cpu() -> str:
    """Return the machine and the table of rates on a CPU, from the committed record."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import cpu_report

    return cpu_report.summary(json.loads((RESULTS / "cpu.json").read_text()))


SPEED = (("quantize", "mxfp4-ocp"), ("quantize, amax given", "nvfp4-torchao"), ("dequantize", "mxfp4-ocp"))


def speed() -> str:
    """Return the README's table of speeds: on a GPU against a copy, on a CPU in GB/s."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import cpu_report
    import report

    gpu, host = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("h200", "cpu"))
    rows = []
    measured = {(row["operation"], row["recipe"]): row for row in gpu["rows"] if row["dtype"] == "bfloat16"}
    for operation, made, _, time, _, other in report.summary(gpu, SPEED):
        row = measured[operation, made]
        copy = f"{row['us'] / row['copy_us']:.2f} times the time of a copy"
        rows.append((f"{operation}, `{made}`", "H200, 16384 x 16384", f"{time}, {copy}", other))
    found = {(row.operation, row.recipe): row for row in cpu_report.rows_of(host) if row.group == "recipes"}
    for operation, made in (("quantize", "nvfp4-te"), ("quantize", "mxfp4-ocp"), ("dequantize", "nvfp4-te")):
        row = found[operation, made]
        rate, (name, ratio) = row.rate("all"), row.fastest_peer
        fails = " (compiled fails)" * any(name.rpartition(" ")[0] in one for one in row.failed)
        other = f"{name}{fails}: {ratio:.0f} times as long"
        rows.append((f"{operation}, `{made}`", "two cores of a Xeon, 4096 x 4096", f"{rate:.3g} GB/s", other))
    return markdown(
        ("operation, from or to bfloat16", "machine, matrix", "fp4kit", "fastest other library measured"), rows
    )


def scale_search() -> str:
    """Return the table of the demo model's errors with and without a search of block scales.

    They come from the committed record.
    """
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import scale_search_report

    return scale_search_report.summary(json.loads((RESULTS / "scale-search.json").read_text()))


LIVE_COLUMNS = (
    "producer",
    "equal at",
    "together with",
    "found on",
    "recipes",
    "arrays",
    "elements",
    "exceptions used (arrays)",
)


def live() -> str:
    """Return the table of producer releases whose results were equal to fp4kit's on random inputs."""
    record = found_equal()
    names = sorted(adapter.title or adapter.name for adapter in adapters())
    return markdown(LIVE_COLUMNS, [_live_row(name, record.get(name)) for name in names])


def _live_row(name: str, entry: dict[str, Any] | None) -> tuple[str, ...]:
    """Return the cells of one producer's row, in the order of LIVE_COLUMNS.

    name: the name of the producer.
    entry: its entry in fp4kit/evidence/live/equal.json. If it is None, the row says "none recorded".
    """
    if entry is None:
        return (name, "none recorded", *[""] * 6)
    beside = ", ".join(
        f"{other} {version}" for other, version in entry["versions"].items() if version != entry["version"]
    )
    counts = (f"{len(entry['recipes'])}", f"{entry['arrays']:,}", f"{entry['elements']:,}")
    return (name, entry["version"], beside, entry["date"], *counts, exceptions(entry["exceptions"]))


def versions() -> str:
    """Return the table of the recorded and the newest versions of all producers, from docs/producer-versions.json."""
    seen = json.loads((ROOT / "docs" / "producer-versions.json").read_text())
    record = found_equal()
    equal: dict[str, str] = {}
    packages = {one.package for one in PRODUCERS.values()}
    for adapter in adapters():
        version = record.get(adapter.title or adapter.name, {}).get("version")
        for name in {fp4kit.recipe(id).producer for id in adapter.calls} if version else ():
            if PRODUCERS[name].package == adapter.name:
                equal[name] = version
            elif not PRODUCERS[name].package and (adapter.title or adapter.name == name):
                equal[name] = f"{adapter.name} {version}" if adapter.name in packages else version
    columns = ("producer", "package", "recorded at", "found equal at", f"newest on {seen['date']}")
    rows = []
    for name, one in PRODUCERS.items():
        newest = seen["newest"].get(name, "") or "none"
        rows.append((one.name, one.package or "none", str(one.versions), equal.get(name, ""), newest))
    return markdown(columns, sorted(rows, key=lambda row: row[0].lower()))


def presets() -> str:
    """Return the table of the presets that `fp4kit convert --like` follows."""
    followed = [(f"`{row[0]}`", *row[1:-1]) for row in preset_rows() if not row[1].startswith("none: ")]
    return markdown(PRESET_COLUMNS[:-1], [[cell.replace("*", "\\*") for cell in row] for row in followed])


def exclusions() -> str:
    """Return the table of the modules that tools leave unquantized by default."""
    rows = []
    for one in EXCLUSIONS:
        globs = " ".join(f"`{glob}`" for glob in one.keep.split())
        rows.append((one.tool, one.models.replace(" ", ", ") or "all", globs, one.source))
    return markdown(("tool", "model_type", "modules left unquantized", "source"), rows)


def loaders() -> str:
    """Return the table of containers that each inference engine loads."""
    notes: dict[str, int] = {}
    head = f"| container | models | {' | '.join(f'{engine} {version}' for engine, version in VERSIONS.items())} |"
    ids = (*LOADED, *MIXTURES)
    rows = [_loader_row(name, families, notes) for name in ids for families in _families_alike(name)]
    below = [f"{number}. {note}" for note, number in notes.items()]
    return "\n".join([head, f"|{' --- |' * (len(VERSIONS) + 2)}", *rows, "", *below]) + "\n"


def _loader_row(container: str, families: list[str], notes: dict[str, int]) -> str:
    """Return one row of the table of loaders, for families that all engines treat alike."""
    cells = []
    for engine in VERSIONS:
        found = support.cell(container, families[0], engine)
        mark = f" [{notes.setdefault(found.note, len(notes) + 1)}]" if found.note else ""
        status = "?" if found.status == "unknown" else found.status
        cells.append(f"{status}{' (read)' * (found.how == 'read')}{mark}")
    return f"| {container} | {', '.join(families)} | {' | '.join(cells)} |"


def _families_alike(container: str) -> list[list[str]]:
    """Return groups of families that every engine treats alike, without families about which nothing is known."""
    groups: dict[tuple[support.Cell, ...], list[str]] = defaultdict(list)
    for family in support.FAMILIES:
        groups[tuple(support.cell(container, family, engine) for engine in VERSIONS)].append(family)
    return [families for cells, families in groups.items() if any(each.how or each.note for each in cells)]


ENGINE_COLUMNS = "engine scheme weights decoded activations product evidence".split()


def engines() -> str:
    """Return the table of what engines compute, and below it what each promise needs."""
    rows, needs = [], defaultdict(list)
    for row in fp4kit.servings():
        name = f"{row.engine}{f', {row.route}' if row.route else ''}"
        weights = f"`{row.weights.id}`" + (f" in {row.container}" if row.container else ", quantized by the engine")
        rule = f", by `{row.decode_rule}`" if row.decode_rule else ""
        decoded = f"to {row.served_dtype or 'the dtype of the model'}{rule}"
        scales = f", {row.input_scales}" if row.input_scales else ""
        inputs = f"`{name_for_inputs(row.activations, row.input_scales)}`{scales}" if row.activations else "-"
        product = "in PyTorch" if row.product == "torch" else f"`{row.product}`"
        of_product = "" if row.evidence == row.product_evidence else f"; product {row.product_evidence}"
        rows.append((name, row.scheme, weights, decoded, inputs, product, row.evidence + of_product))
        needs[row.needs].append(f"{name} {row.version} ({'CPU' if row.device == 'cpu' else 'GPU'})")
    below = [f"- {', '.join(dict.fromkeys(names))}: {text}." for text, names in needs.items()]
    return markdown(ENGINE_COLUMNS, rows) + "\n\n" + "\n".join(below) + "\n"


OPTION_COLUMNS = ("option", "what it does")


def convert_options() -> str:
    """Return the table of options of `fp4kit convert`, from the fields of Request."""
    rows = []
    for one in flags():
        choices = "{" + ", ".join(one.how["choices"]) + "}" if "choices" in one.how else ""
        text = one.help.replace("%(default)s", str(one.how.get("default"))).replace("*", r"\*")
        rows.append((f"`{' '.join(filter(None, (one.name, one.how.get('metavar', choices))))}`", text))
    return markdown(OPTION_COLUMNS, rows)


def uncovered() -> str:
    """Return the table of calls that the compiled CPU engine does not cover, so that they run in the specification."""
    return markdown(COVERAGE_COLUMNS, uncovered_rows(RECIPES.values()))


UNIT_COLUMNS = (
    "unit",
    "hardware",
    "operands",
    "products per step",
    "bits of a term",
    "bits of the sum",
    "from exact",
    "compared with hardware",
)
HARDWARE = {
    "sm100": "Blackwell (B200)",
    "sm90": "Hopper (H100, H200)",
    "sm90-mma": "Hopper, by `mma.sync`",
    "sm100-mma": "Blackwell, by `mma.sync`",
    "sm89": "Ada (L40S)",
    "sm80": "Ampere (A100)",
    "sm75": "Turing (T4)",
    "sm70": "Volta (V100)",
    "sm100-f16": "Blackwell, sums in float16",
    "sm90-mma-f16": "Hopper, by `mma.sync`, sums in float16",
    "sm100-mma-f16": "Blackwell, by `mma.sync`, sums in float16",
    "sm89-f16": "Ada, sums in float16",
    "sm80-f16": "Ampere, sums in float16",
    "sm70-f16": "Volta, sums in float16",
    "cdna3": "AMD CDNA3 (MI300)",
}
OPERANDS = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "tf32": "float32 as TF32",
    "fp8": "FP8",
    "fp8_fnuz": "FP8 (fnuz)",
    "fp6_fp4": "FP6 and FP4 without block scales",
    "mx": "MXFP8, MXFP6, and pairs of these with MXFP4",
    "fp4": "NVFP4, MXFP4",
    "int8": "int8, uint8",
}


def units() -> str:
    """Return the table of matrix units, with one row per unit and step."""
    rows = []
    for unit in fp4kit.units():
        operands: dict[Any, list[str]] = {}
        for kind, step in unit.steps().items():
            operands.setdefault(step, []).append(kind)
        for step, keys in operands.items():
            kinds = [OPERANDS[key] for key in keys]
            is_first, sum_bits = step is next(iter(operands)), getattr(step, "output_bits", 23)
            names = (f"`{unit.id}`", HARDWARE[unit.id]) if is_first else ("", "")
            kinds += ["FP8, converted to float16"] * (unit.fp8_as is not None and step == unit.float16)
            bits = ("all", "32") if "int8" in keys else (f"{step.fraction_bits}", f"{sum_bits}")
            proof = re.sub(r"^no; compared only with MMA-Sim.*", "no", unit.checked) if is_first else ""
            rows.append((*names, ", ".join(kinds), f"{step.k}", *bits, _distance(unit, keys[0]), proof))
    return markdown(UNIT_COLUMNS, rows)


@np.errstate(all="ignore")
def _distance(unit: fp4kit.Unit, kind: str) -> str:
    """Return how far sums of 4,096 products of normal numbers are from exact ones: root mean square, relative."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((32, 4096), dtype=np.float32) for _ in "ab")
    if kind == "int8":
        return "0"
    recipe = {"mx": "mxfp8-te", "fp4": "nvfp4-te"}.get(kind)
    dtypes = {"tf32": "float32", "fp8": "float8_e4m3fn", "fp8_fnuz": "float8_e4m3fnuz", "fp6_fp4": "float6_e2m3fn"}
    name = dtypes.get(kind, kind)
    a, b = (fp4kit.quantize(x, recipe) if recipe else x.astype(getattr(ml_dtypes, name, name)) for x in (a, b))
    if kind == "tf32":
        a, b = ((x.view(np.uint32) & 0xFFFFE000).view(np.float32) for x in (a, b))
    d, exact = (fp4kit.matmul(a, b, unit=u, alpha=1.0).astype(np.float64) for u in (unit, "exact"))
    return f"{np.sqrt(np.square(d - exact).mean() / np.square(exact).mean()):.1e}"


def accumulation() -> str:
    """Return the table of mean errors of long sums of positive E4M3 products, relative to the exact sums."""
    sm90, rng = fp4kit.unit("sm90"), np.random.default_rng(0)
    columns = {"`sm90`, fast": sm90, "`sm90`, slow": replace(sm90, promote=128), "`sm100`": fp4kit.unit("sm100")}
    rows = []
    for K in (1024, 4096, 16384):
        a, b = (np.abs(rng.standard_normal((8, K))).astype(ml_dtypes.float8_e4m3fn) for _ in "ab")
        exact, *sums = (fp4kit.matmul(a, b, unit=unit).astype(np.float64) for unit in ("exact", *columns.values()))
        rows.append((f"{K:,}", *(f"{100 * (1 - d / exact).mean():.2g}%" for d in sums)))
    return markdown(("K", *columns), rows)


ALL = (
    evidence,
    recipes,
    agreement,
    performance,
    cpu,
    speed,
    scale_search,
    live,
    versions,
    presets,
    exclusions,
    loaders,
    convert_options,
    uncovered,
    units,
    accumulation,
    engines,
)
PARTS = {one.__name__: one for one in ALL}


def with_output(text: str) -> str:
    """Run the examples in a page, and return the page's text with the current output of each.

    An example is the code after `<!-- example -->`. Its output replaces the block after the next `<!-- output -->`. A
    text without an example is returned unchanged. Raises ValueError unless each example has one output block, before
    the next example.
    """
    if re.findall("<!-- (example|output) -->", text) != ["example", "output"] * text.count("<!-- example -->"):
        raise ValueError("examples and outputs do not alternate; needs one <!-- output --> after each <!-- example -->")

    def current(match: re.Match[str]) -> str:
        command = [sys.executable, "-c", match["code"]]
        run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        return match["head"] + run.stdout + "```"

    pattern = r"(?P<head><!-- example -->\n```python\n(?P<code>.*?)```.*?<!-- output -->\n```text\n).*?```"
    return re.sub(pattern, current, text, flags=re.DOTALL)


def with_names(text: str) -> str:
    """Return a page's text with a table above each `<!-- names` comment: names, first sentences and arguments.

    The comment holds mkdocstrings directives, which tools/mkdocs_hooks.py uncovers for the site.
    """

    def table(match: re.Match[str]) -> str:
        names = re.findall(r"^::: (\S+)", match[1], re.MULTILINE)
        rows = [(f"`{name}`", first_sentence(one) + call_of(one)) for found in names for name, one in described(found)]
        return markdown(("name", "what it does"), rows) + "\n\n" + match[1]

    return re.sub(r"(?:(?:^\|[^\n]*\n)+\n)?(<!-- names\n.*?-->)", table, text, flags=re.DOTALL | re.MULTILINE)


def described(name: str) -> list[tuple[str, Any]]:
    """Return (name, object) of a directive and, for a module, of the functions and classes that it defines."""
    parent, _, attribute = name.rpartition(".")
    module = importlib.import_module(parent)
    one = getattr(module, attribute) if hasattr(module, attribute) else importlib.import_module(name)
    members = vars(one).items() if inspect.ismodule(one) else ()
    own = [(key, each) for key, each in members if callable(each) and each.__module__ == name]
    return [(name, one), *((f"{name}.{key}", each) for key, each in own if not re.match(HIDDEN, key))]


def call_of(one: Any) -> str:
    """Return a line break and the arguments, without types, of a function or a class that is no dataclass.

    Return "" for other objects and for functions without arguments.
    """
    if is_dataclass(one) or not (inspect.isfunction(one) or "__init__" in getattr(one, "__dict__", ())):
        return ""
    own = inspect.signature(one)
    arguments = [p.replace(annotation=p.empty) for p in own.parameters.values()]
    text = str(own.replace(parameters=arguments, return_annotation=own.empty))
    shown = re.sub(r"<class '([\w.]+)'>", r"\1", text)
    return f"<br>`{one.__name__}{shown}`" if arguments else ""


def first_sentence(one: Any) -> str:
    """Return the first sentence of an object's docstring."""
    return re.split(r"(?<=\.)\s", " ".join((inspect.getdoc(one) or "").partition("\n\n")[0].split()))[0]


def rewritten(text: str) -> str:
    """Return the text of a page with its example's output and all generated parts up to date.

    Raises ValueError for a name that is not in PARTS, and for a part that occurs twice.
    """
    names = re.findall(r"<!-- generated: (.*?) -->", text)
    wrong = {name for name in names if name not in PARTS or names.count(name) > 1}
    if wrong:
        raise ValueError(f"generated parts {sorted(wrong)}; needs {', '.join(PARTS)}, each at most once")
    text = with_names(with_output(text))
    for name in names:
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        body = PARTS[name]()
        text = pattern.sub(lambda match, body=body: match.group(1) + body + "\n" + match.group(2), text)
    return text


if __name__ == "__main__":
    for page in PAGES + REFERENCE:
        try:
            page.write_text(rewritten(page.read_text()))
        except ModuleNotFoundError as error:  # the reference of PyTorch or JAX, if that is not installed
            print(f"{page.relative_to(ROOT)}: left as it is: {error}")
