"""The containers: ways to store quantized layers in a checkpoint, and the ``--format`` and recipe that lead to each."""

from __future__ import annotations

from dataclasses import dataclass

FORMATS = ("modelopt", "compressed-tensors", "sglang-mxfp8", "gpt-oss", "deepseek-v4", "bf16")
KINDS = ("nvfp4", "mxfp4", "mxfp8")


@dataclass(frozen=True)
class Container:
    """One container. ``kind``: of its recipes, None for unquantized weights; ``syntax``: of its exclusion list."""

    id: str
    format: str
    kind: str | None
    group_size: int | None = None
    syntax: str | None = None


CONTAINERS: dict[str, Container] = {
    container.id: container
    for container in (
        Container("modelopt W4A16_NVFP4", "modelopt", "nvfp4", 16, "modelopt"),
        Container("modelopt NVFP4", "modelopt", "nvfp4", 16, "modelopt"),
        Container("modelopt MXFP8", "modelopt", "mxfp8", 32, "modelopt"),
        Container("modelopt mxfp4", "modelopt", "mxfp4", 32, "modelopt"),
        Container("compressed-tensors nvfp4-pack-quantized", "compressed-tensors", "nvfp4", 16, "compressed-tensors"),
        Container("compressed-tensors mxfp4-pack-quantized", "compressed-tensors", "mxfp4", 32, "compressed-tensors"),
        Container("compressed-tensors mxfp8-quantized", "compressed-tensors", "mxfp8", 32, "compressed-tensors"),
        Container("sglang-mxfp8", "sglang-mxfp8", "mxfp8", 32, "dotted"),
        Container("gpt-oss", "gpt-oss", "mxfp4", 32, "mxfp4"),
        Container("deepseek-v4", "deepseek-v4", "mxfp4", 32),
        Container("bf16", "bf16", None),
    )
}


def container(format: str, kind: str, *, input_scale: bool = False) -> Container | None:
    """Return the container in which ``format`` stores recipes of ``kind``; None: it stores none of them.

    format: one of FORMATS; kind: one of KINDS; "bf16" takes any. input_scale: with scales of 4-bit activations,
        which makes "modelopt" NVFP4 instead of W4A16_NVFP4.
    Raises ValueError for another format or kind.
    """
    for name, value, known in (("format", format, FORMATS), ("recipe kind", kind, KINDS)):
        if value not in known:
            raise ValueError(f"container: {name} {value!r}; one of {', '.join(known)} is needed")
    if input_scale and (format, kind) == ("modelopt", "nvfp4"):
        return CONTAINERS["modelopt NVFP4"]
    return next((each for each in CONTAINERS.values() if each.format == format and each.kind in (kind, None)), None)
