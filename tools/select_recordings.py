"""Write fp4kit/evidence/selection: the recorded outputs that the wheel contains, 1 MB of evidence/recorded.

    python tools/select_recordings.py [--into DIRECTORY]

The selection has every variant of every producer, but only for the inputs in INPUTS_KEPT. If a part of a variant
was recorded for none of them, the smallest input with this part is kept. Run it after tools/pack_golden.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fp4kit.evidence.golden.golden_set import INPUTS, RECORDED, SELECTION, GoldenSet

INPUTS_KEPT = ("ties__f32", "ties__bf16", "nonfinite__f32", "nonfinite__bf16")


def selected(golden: GoldenSet) -> dict[str, list[str]]:
    """Return {file: keys to keep}, the inputs last."""
    found: dict[str, list[str]] = {}
    used: set[str] = set()
    for file in golden.files():
        heads: set[str] = set()
        for variant, recorded in golden.variants(file).items():
            for part in {key.rpartition("/")[2] for key in golden.keys(file) if f"/{variant}/" in key}:
                with_part = [name for name in recorded if f"{name}/{variant}/{part}" in golden.keys(file)]
                names = [name for name in with_part if name in INPUTS_KEPT]
                names = names or sorted(with_part, key=lambda name: golden.input(name, file).nbytes)[:1]
                heads |= {f"{name}/{member}" for name in names for member in (variant, "input")}
                heads |= {f"hessian_{golden.input(name, file).shape[1]}" for name in names}
                used |= {*names}
        if keys := [key for key in golden.keys(file) if {key, key.rpartition("/")[0]} & heads]:
            found[file] = keys
    return {**found, INPUTS: [name for name in golden.inputs() if name in used]}


def main() -> None:
    """Write the files of the selection and print their size."""
    from pack_golden import arrays_of, rank, write_file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=SELECTION, metavar="DIRECTORY")
    folder = parser.parse_args().into
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.npz"):
        path.unlink()
    golden = GoldenSet.open(RECORDED)
    chosen = selected(golden)
    for name in sorted(chosen, key=rank):
        arrays = arrays_of(golden, name)
        write_file(folder, name, {key: arrays[key] for key in chosen[name]})
    size = sum(path.stat().st_size for path in folder.glob("*.npz"))
    print(f"{folder}: {sum(map(len, chosen.values()))} arrays, {size} bytes")


if __name__ == "__main__":
    main()
