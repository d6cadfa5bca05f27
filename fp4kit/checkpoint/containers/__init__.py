"""Containers: how linear layers are stored, and the configs that say so. One module per family of files."""

from fp4kit.checkpoint.containers.container import (
    CODES,
    CONTAINERS,
    INPUT_SCALE,
    SCALES,
    TENSOR_SCALE,
    VALUES,
    Container,
    OutputTensor,
)

__all__ = ["CODES", "CONTAINERS", "INPUT_SCALE", "SCALES", "TENSOR_SCALE", "VALUES", "Container", "OutputTensor"]
