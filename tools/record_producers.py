"""Record outputs of installed producers, for recipes that `fp4kit recipes --live` can run.

    python tools/record_producers.py FILE RECIPE...

FILE, such as build/producers_cpu.npz, gets the arrays of each recipe under `<input>/<recipe>/<part>`, for all recorded
inputs that the producer accepts. tools/pack_golden.py adds them to fp4kit/evidence/recorded. The versions of the
producers are printed; write them into the README there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fp4kit.evidence.golden.golden_set import GoldenSet
from fp4kit.evidence.live.adapter import Adapter, ProducerCall
from fp4kit.evidence.live.run import adapters, find, quiet
from fp4kit.layouts import pack
from fp4kit.recipes import recipe

# {part of a live result: part of a recording}
PARTS = {"codes": "codes", "block_scale": "scales", "tensor_scale": "tensor_scale", "fake": "output"}


def call_of(id: str) -> tuple[Adapter, ProducerCall]:
    """Return the adapter that runs the recipe, and its call. Raise ValueError if there is none."""
    for adapter in adapters():
        if id in adapter.calls:
            return adapter, adapter.calls[id]
    raise ValueError(f"record_producers: no adapter runs {id!r}; fp4kit recipes --live says why")


def arrays_of(id: str, call: ProducerCall, golden: GoldenSet) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (key, array) for each recorded input that the call accepts."""
    rows = min(recipe(id).block_rows, 16)  # the call for blocks of 128 rows pads x
    for name in golden.inputs():
        x = golden.input(name)
        if x.dtype.name not in call.dtypes or x.shape[1] % call.columns or len(x) % rows:
            continue
        if "static" in id and not np.isfinite(x.astype(np.float32)).all():  # the amax is an input of the producer
            continue
        with quiet():
            found = call.function(x)
        for part, array in found.items():
            if part in PARTS:
                packs = part == "codes" and recipe(id).element.packing.codes > 1
                bits = pack(array) if packs else array.view(np.uint16) if array.dtype.name == "bfloat16" else array
                yield f"{name}/{id}/{PARTS[part]}", bits


if __name__ == "__main__":
    file, *ids = sys.argv[1:]
    arrays: dict[str, np.ndarray] = {}
    for id in ids:
        adapter, call = call_of(id)
        version, others = find(adapter)
        found = dict(arrays_of(id, call, GoldenSet.find()))
        print(f"{id}: {len(found)} arrays of {adapter.name} {version} ({others})")
        arrays |= found
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(file, **arrays)
