"""Codes of a quantized model directory in place of the numbers of a GGUF file of the same model: nothing is rounded again.

Which layer is which, the gguf package's map of names says. That they are the same numbers, some rows of both tell: llama.cpp's
converter permutes the rows of q and k of some models, and a directory may be of another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fp4kit.checkpoint.files import Source
from fp4kit.checkpoint.formats.container import CT_NVFP4
from fp4kit.checkpoint.ggml_names import ARCHITECTURE
from fp4kit.checkpoint.pairs import Origin, origins
from fp4kit.checkpoint.reading import Readers, values_of
from fp4kit.checkpoint.statistics import sqnr_db
from fp4kit.checkpoint.weights import Rows, Weight
from fp4kit.storage.errors import CheckpointError, listed, shown

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")
_ROWS, _LEAST = 16, 6.0  # of each end of a matrix; decibels, of which 4 bits give 15 to 25 and other rows none
_KINDS = ("mxfp4", "nvfp4")


def with_codes(weights: Mapping[str, Weight], model: Source, directory: Source) -> dict[str, Weight]:
    """The weights of a GGUF file; those whose codes a directory has, made of them, a stack of its experts one by one.

    Raises CheckpointError without the gguf package, for an architecture that it does not know, and where no layer is found.
    """
    if ARCHITECTURE not in model.config:
        raise CheckpointError("--codes: a GGUF file takes codes; for a model directory, convert the quantized one itself")
    found = _by_name(directory, model)
    taken = dict(weights)
    for name, weight in weights.items():
        members = [found.get((weight.name, e)) for e in range(weight.experts)]
        known = [member for member in members if member is not None and member.shape == weight.shape[-2:]]
        if len(known) == weight.experts and len({member.weight.container for member in known}) == 1:
            first = known[0].weight
            rows = tuple(Rows(member.weight, member.expert, member.span) for member in known)
            taken[name] = replace(weight, container=first.container, parts=first.parts, members=rows, transposed=False)
    if taken == weights:
        layers = listed([module for module, _ in _origins(directory)]) or "none in MXFP4 or NVFP4"
        raise CheckpointError(f"--codes {directory.root}: none of its quantized layers ({layers}) is in {model.root}")
    return taken


def _origins(directory: Source) -> dict[tuple[str, int], Origin]:
    """Layers of a directory by their names as single layers, also those of stacks."""
    found = origins(directory, CT_NVFP4)
    return {key: one for key, one in found.items() if one.weight.container is not None and one.weight.container.kind in _KINDS}


def _by_name(directory: Source, model: Source) -> dict[tuple[str, int], Origin]:
    """(Module of the GGUF file, expert) -> the layer of a directory."""
    translated = _translation(model)
    found = {}
    for (module, _), origin in _origins(directory).items():
        match = _EXPERT.fullmatch(module)
        name = translated(f"{match[1]}.{match[3]}" if match else module)
        if name is not None:
            found[name, int(match[2]) if match else 0] = origin
    return found


def _translation(model: Source) -> Callable[[str], str | None]:
    """Module of Hugging Face -> module of llama.cpp, None where there is none."""
    try:
        import gguf
    except ImportError:
        raise CheckpointError('--codes: names of layers need the gguf package; pip install "fp4kit[gguf]"') from None
    architecture = model.config[ARCHITECTURE]
    number: Any = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}.get(architecture)
    if number is None:
        raise CheckpointError(f"--codes: the gguf package does not know the architecture {shown(repr(architecture))}; update it")
    names = gguf.get_tensor_name_map(number, int(model.config.get("num_hidden_layers", 0)))
    return lambda module: names.get_name(module)


def check_alike(converted: Iterable[str], numbers: Mapping[str, Weight], taken: Mapping[str, Weight]) -> None:
    """Raise CheckpointError for a tensor whose codes do not decode to about the numbers that the GGUF file has."""
    with Readers() as readers:
        for name in converted:
            for expert, rows in enumerate(taken[name].members):
                found = _likeness(numbers[name], expert, Origin(*rows), readers)
                if found < _LEAST:
                    raise CheckpointError(
                        f"{shown(name)}: is not what {shown(rows.weight.name)} decodes to (SQNR {found:.1f} dB): another model, "
                        "or rows that llama.cpp's converter permutes, as of q and k of Llama; leave it out with --keep"
                    )


def _likeness(weight: Weight, expert: int, origin: Origin, readers: Readers) -> float:
    """The SQNR of some rows at both ends."""
    height = origin.shape[0]
    plain = Origin(weight, expert, (0, height))
    signal = noise = 0.0
    for rows in (slice(0, min(_ROWS, height)), slice(max(height - _ROWS, 0), height)):
        x, y = (values_of(one.weight, one.slab(readers, rows)).astype(np.float64) for one in (plain, origin))
        signal, noise = signal + float(np.sum(x**2)), noise + float(np.sum((x - y) ** 2))
    return sqnr_db(signal, noise)
