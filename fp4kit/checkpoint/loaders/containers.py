"""List the containers that engines load, with the format that writes them and the syntax of their exclusion lists. A
container is a way to store quantized layers as tensors. An exclusion list names the layers that stay unquantized.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp4kit.checkpoint.containers.configs import FORMATS, MIXED, container_id
from fp4kit.checkpoint.containers.table import CONTAINERS as STORED
from fp4kit.checkpoint.containers.table import MODELOPT_NVFP4

KINDS = ("nvfp4", "mxfp4", "mxfp8", "fp8 tensor", "fp8 rows", "fp8")
_SYNTAX = {
    "modelopt": "modelopt",
    "compressed-tensors": "compressed-tensors",
    "fp8": "names",
    "sglang-mxfp8": "dotted",
    "gpt-oss": "mxfp4",
}


@dataclass(frozen=True)
class LoaderContainer:
    """Describe one container that engines load.

    id: the unique name, such as "modelopt NVFP4".
    format: the value of ``--format`` that writes it.
    kind: the kind of the recipes that it stores, such as "nvfp4"; None for unquantized weights.
    group_size: the number of elements that share a block scale; None for unquantized weights, and for
        FP8 with one scale per layer or per row.
    syntax: the syntax of its exclusion list, such as "modelopt"; see ``exclusions.exclusion_list``. None if it has no
        list.
    """

    id: str
    format: str
    kind: str | None
    group_size: int | None = None
    syntax: str | None = None


def _declared() -> dict[str, LoaderContainer]:
    """Return a dict from id to container, for the containers that FORMATS write."""
    ids = [(container_id(MODELOPT_NVFP4, False), MODELOPT_NVFP4)]
    ids += [(container_id(form, True), form) for form in STORED if form.format in FORMATS]
    found = {
        id: LoaderContainer(id, form.format, form.kind, form.group_size or None, _SYNTAX.get(form.format))
        for id, form in ids
    }
    return found | {"bf16": LoaderContainer("bf16", "bf16", None)}


CONTAINERS = _declared()
# Mixtures: checkpoints whose layers have several of CONTAINERS, as their configs call them.
MIXTURES = {name: LoaderContainer(name, format, "mixed", None, _SYNTAX[format]) for format, name in MIXED.items()}


def container(format: str, kind: str, *, input_scale: bool = False) -> LoaderContainer | None:
    """Return the container in which ``format`` stores recipes of ``kind``, or None if it cannot store them."""
    for name, value, allowed in (("format", format, FORMATS), ("recipe kind", kind, KINDS)):
        if value not in allowed:
            raise ValueError(f"container: {name} {value!r}; one of {', '.join(allowed)} is needed")
    if input_scale and (format, kind) == ("modelopt", "nvfp4"):
        return CONTAINERS["modelopt NVFP4"]
    return next((each for each in CONTAINERS.values() if each.format == format and each.kind in (kind, None)), None)
