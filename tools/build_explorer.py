"""Build the explorer, one static page that shows a block of numbers through several recipes.

    python tools/build_explorer.py [OUT]     write the page to OUT (default: build/explorer.html)
    python tools/build_explorer.py --compile compile tools/explorer/engine.wasm.gz anew, then write the page

The page needs no server and no other file. Its parts are in tools/explorer: the markup, the style, two scripts, and the
CPU engine as a WebAssembly module. Compiling the module needs the package ziglang. It is needed after changes of
fp4kit/cpu/source or fp4kit/cuda/kernels/rules, which a test notices by the digest in tools/explorer/engine.digest.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import fp4kit
from fp4kit.cpu.codec import SEGMENT, decode_key, element_key, kept_factors, not_encoded, rule_key, tensor_key
from fp4kit.cpu.source_digest import digest
from fp4kit.formats import BLOCK_FORMATS, ELEMENT_FORMATS, Codebook, IntegerOrFloat
from fp4kit.recipes import ALIASES, ALL_RECIPES, RECIPES, Recipe
from fp4kit.recipes.schema import PRODUCERS, decoding, producer_of
from fp4kit.reference.arith import reciprocal_table

FOLDER = Path(__file__).parent / "explorer"
SITE = "https://fp4kit.github.io/fp4kit/"  # the documentation, for a page that is not a part of it
MODULE, DIGEST = FOLDER / "engine.wasm.gz", FOLDER / "engine.digest"
SOURCE = Path(fp4kit.__file__).parent / "cpu" / "source"
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# Floating-point flags as in setup.py: no fused multiply-add, because the rules say where a product is rounded.
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-exceptions", "-fno-rtti", "-w"]
FLAGS += ["-fvisibility=hidden", "-ffunction-sections", "-target", "wasm32-wasi"]


def why_not(r: Recipe) -> str | None:
    """Return the reason why the explorer does not offer a recipe, such as "a search over scales".

    Return None if the explorer offers the recipe.
    """
    if r.fake_only or r.fake_rule is not None:
        return "a formula of its own for values"
    if r.search:
        return "a search over scales"
    if r.stochastic_only:
        return "stochastic rounding only"
    if r.tensor_scaling == "block":
        return "float32 scales per block"
    if isinstance(r.element, IntegerOrFloat):
        return "an element format per block"
    return not_encoded(r)


def entry(r: Recipe) -> dict[str, Any]:
    """Return a dict for JSON with what the page needs to know about a recipe (see Engine.explore in engine.js).

    The recipe must be one that the explorer offers. An infinite bound of the factors becomes None, because JSON has no
    infinity.
    """
    producer = producer_of(r.id)
    return {
        "id": r.id,
        "group": f"{r.id.split('-')[0].upper()}, {PRODUCERS[producer].name}",
        "page": f"producers/{producer}/#{r.id}",
        "element": r.element.name,
        "elementBits": r.element.bits,
        "codeBits": r.element.packing.stored_bits,
        "scale": None if r.scale is None else r.scale.name,
        "block": r.block_size if r.block else SEGMENT,
        "blockRows": r.block_rows,
        "blockRule": rule_key(r),
        "tensorRule": tensor_key(r),
        "arithmetic": element_key(r),
        "decoders": {name: decode_key(decoding(r, np.dtype(dtype))) for name, dtype in DTYPES.items()},
        "factors": {
            name: [None if math.isinf(bound) else bound for bound in kept_factors(r, np.dtype(dtype))]
            for name, dtype in DTYPES.items()
        },
    }


def offered() -> list[dict[str, Any]]:
    """Return the entries of all recipes that the explorer offers, in the order of the table."""
    return [entry(r) for r in RECIPES.values() if why_not(r) is None]


def left_out() -> str:
    """Return a sentence for the page that names all recipes that the explorer does not offer, grouped by reason."""
    reasons: dict[str, list[str]] = {}
    for r in RECIPES.values():
        if (why := why_not(r)) is not None:
            reasons.setdefault(why, []).append(r.id)
    return "Not offered: " + "; ".join(f"{', '.join(ids)} ({why})" for why, ids in reasons.items()) + "."


def formats() -> dict[str, list[float | str | None]]:
    """Return {name: values of all codes} for every element and scale format that an offered recipe uses.

    NaN becomes None, and infinities become "Infinity" and "-Infinity", because JSON has neither.
    """
    found = {f.name: f for r in RECIPES.values() if why_not(r) is None for f in (r.element, r.scale) if f is not None}

    def plain(value: float) -> float | str | None:
        if math.isnan(value):
            return None
        return ("-Infinity" if value < 0 else "Infinity") if math.isinf(value) else value

    return {name: [plain(float(value)) for value in f.values] for name, f in found.items()}


def named_formats() -> dict[str, list[Any]]:
    """Return {name: the arguments of Format in own.js} for the formats that a recipe of custom_recipe may name."""
    fields = ("exponent_bits", "mantissa_bits", "bias", "specials", "signed", "has_zero")
    tables = [f for f in vars(fp4kit.formats).values() if isinstance(f, Codebook)]
    return {
        f.name: [*(getattr(f, name) for name in fields), getattr(f, "table", None)] for f in (*ELEMENT_FORMATS, *tables)
    }


def compile_module() -> None:
    """Compile engine.cpp and the CPU engine to WebAssembly, and store the module and the digest of its sources.

    Needs the package ziglang. Raises CalledProcessError if the compiler fails; the stored files then stay unchanged.
    """
    with tempfile.TemporaryDirectory() as folder:
        module = Path(folder) / "engine.wasm"
        sources = [FOLDER / "engine.cpp", *(SOURCE / f"{name}.cpp" for name in ("rules", "elements", "decoders"))]
        link = ["-mexec-model=reactor", "-s", "-Wl,--gc-sections"]
        command = [sys.executable, "-m", "ziglang", "c++", *FLAGS, *link, *map(str, sources), "-o", str(module)]
        subprocess.run(command, check=True)
        MODULE.write_bytes(gzip.compress(module.read_bytes(), 9, mtime=0))
    DIGEST.write_text(f"{sources_digest()}\n")


def sources_digest() -> str:
    """Return the digests of the CPU engine's sources and of engine.cpp as one text, separated by a space.

    The module must be compiled again if this differs from tools/explorer/engine.digest, without its final newline.
    """
    import hashlib

    own = hashlib.sha256((FOLDER / "engine.cpp").read_bytes()).hexdigest()[:16]
    return f"{digest()} {own}"


def page(site: str = SITE) -> str:
    """Return the HTML of the explorer: page.html with style, scripts, recipes, formats and the module filled in.

    site: the address of the documentation, to which links lead.
    """
    reciprocals = gzip.compress(reciprocal_table().astype(np.int8).tobytes(), 9, mtime=0)
    parts = {
        "STYLE": (FOLDER / "style.css").read_text(),
        "ENGINE": (FOLDER / "engine.js").read_text(),
        "OWN": (FOLDER / "own.js").read_text(),
        "PAGE": (FOLDER / "page.js").read_text(),
        "RECIPES": json.dumps(offered()),
        "LEFT_OUT": json.dumps(left_out()),
        "FORMATS": json.dumps(formats()),
        "NAMED_FORMATS": json.dumps(named_formats()),
        "RESERVED": json.dumps([f.name for f in BLOCK_FORMATS]),
        "TAKEN": json.dumps([id for id in (*ALL_RECIPES, *ALIASES) if id not in RECIPES or why_not(RECIPES[id])]),
        "WASM": base64.b64encode(MODULE.read_bytes()).decode(),
        "RECIPROCALS": base64.b64encode(reciprocals).decode(),
        "SITE": site,
        "VERSION": fp4kit.__version__,
    }
    text = (FOLDER / "page.html").read_text()
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    return text


def main() -> None:
    """Run the command: compile the module if --compile is given, then write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=Path("build/explorer.html"), metavar="OUT")
    parser.add_argument("--compile", action="store_true", help="compile the WebAssembly module first (needs ziglang)")
    arguments = parser.parse_args()
    if arguments.compile:
        compile_module()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(page())
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
