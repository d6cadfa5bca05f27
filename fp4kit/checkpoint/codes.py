"""Codes of a quantized model in place of the numbers of the same model in another kind of file: nothing is rounded again.

A GGUF file takes those of a model directory, and a model directory those of a GGUF file. Which layer is which, the gguf package's
map of names says. That they are the same numbers, some rows of both tell: llama.cpp's converter permutes the rows of q and k of
some models, and the other may be of another model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fp4kit.checkpoint.files import Source
from fp4kit.checkpoint.formats.container import CT_NVFP4, GGUF_NVFP4
from fp4kit.checkpoint.ggml_names import ARCHITECTURE
from fp4kit.checkpoint.pairs import Origin, origins
from fp4kit.checkpoint.reading import Readers, values_of
from fp4kit.checkpoint.statistics import sqnr_db
from fp4kit.checkpoint.weights import Rows, Weight
from fp4kit.storage.errors import CheckpointError, listed, shown

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")
_ROWS, _LEAST = 16, 6.0  # of each end of a matrix; decibels, of which 4 bits give 15 to 25 and other rows none
_KINDS = ("mxfp4", "nvfp4")


def with_codes(weights: Mapping[str, Weight], model: Source, beside: Source) -> dict[str, Weight]:
    """The weights of a model; those whose codes another has, made of them, a stack of experts one by one.

    One of the two is a GGUF file. Raises CheckpointError where that is not so, without the gguf package, for an architecture that
    it does not know, and where no layer is found.
    """
    if (ARCHITECTURE in model.config) == (ARCHITECTURE in beside.config):
        needed = "a GGUF file takes those of a model directory, or the other way round"
        raise CheckpointError(f"--codes: {needed}; these are of one kind")
    found = _of_directory(beside, model) if ARCHITECTURE in model.config else _of_file(weights, beside)
    taken = dict(weights)
    for name, weight in weights.items():
        members = [found.get((weight.name, e)) for e in range(weight.experts)]
        known = [member for member in members if member is not None and member.shape == weight.shape[-2:]]
        if len(known) == weight.experts and len({member.weight.container for member in known}) == 1:
            first = known[0].weight
            rows = tuple(Rows(member.weight, member.expert, member.span) for member in known)
            taken[name] = replace(weight, container=first.container, parts=first.parts, members=rows, transposed=False)
    if taken == weights:
        layers = listed([module for module, _ in _origins(beside)]) or "none in MXFP4 or NVFP4"
        raise CheckpointError(f"--codes {beside.root}: none of its quantized layers ({layers}) is in {model.root}")
    return taken


def _origins(source: Source) -> dict[tuple[str, int], Origin]:
    """Layers with codes of 4 bits: of a directory as single layers, also those of stacks; of a GGUF file by expert."""
    found = origins(source, GGUF_NVFP4 if ARCHITECTURE in source.config else CT_NVFP4)
    return {key: one for key, one in found.items() if one.weight.container is not None and one.weight.container.kind in _KINDS}


def _of_directory(directory: Source, file: Source) -> dict[tuple[str, int], Origin]:
    """(Module of a GGUF file, expert) -> the layer of a directory."""
    translated = _translation(file)
    found = {}
    for (module, _), origin in _origins(directory).items():
        place = translated(module)
        if place is not None:
            found[place] = origin
    return found


def _of_file(weights: Mapping[str, Weight], file: Source) -> dict[tuple[str, int], Origin]:
    """(Module of a directory, 0) -> the layer of a GGUF file; stacks of a directory take none."""
    translated, there = _translation(file), _origins(file)
    places = {weight.name: translated(weight.name) for weight in weights.values() if len(weight.shape) == 2}
    return {(name, 0): there[place] for name, place in places.items() if place in there}


def _translation(model: Source) -> Callable[[str], tuple[str, int] | None]:
    """Module of Hugging Face -> module of a GGUF file and expert, None where there is none."""
    try:
        import gguf
    except ImportError:
        raise CheckpointError('--codes: names of layers need the gguf package; pip install "fp4kit[gguf]"') from None
    architecture = model.config[ARCHITECTURE]
    number: Any = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}.get(architecture)
    if number is None:
        raise CheckpointError(f"--codes: the gguf package does not know the architecture {shown(repr(architecture))}; update it")
    names = gguf.get_tensor_name_map(number, int(model.config.get("num_hidden_layers", 0)))

    def translated(module: str) -> tuple[str, int] | None:
        match = _EXPERT.fullmatch(module)
        name = names.get_name(f"{match[1]}.{match[3]}" if match else module)
        return None if name is None else (name, int(match[2]) if match else 0)

    return translated


def recorded_recipe(source: Source) -> str:
    """The id of the recipe that a model says it was made with, "" where it says none."""
    declared = source.config.get("quantization_config")
    own = declared.get("fp4kit") if isinstance(declared, Mapping) else None
    found = own.get("recipe") if isinstance(own, Mapping) else None
    return found if isinstance(found, str) else ""


def check_alike(converted: Iterable[str], numbers: Mapping[str, Weight], taken: Mapping[str, Weight]) -> None:
    """Raise CheckpointError for a tensor whose codes do not decode to about its own numbers."""
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
