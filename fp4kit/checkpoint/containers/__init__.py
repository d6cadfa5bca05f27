"""Describe containers: how a quantized linear layer is stored as tensors, and which config entries declare it.

``container.py`` defines what a container is, ``table.py`` lists all containers, and ``configs.py`` writes their
configs. ``comfy.py``, ``mlx.py`` and ``ggml_names.py`` know what ComfyUI, mlx-lm and llama.cpp accept.
"""

from fp4kit.checkpoint.containers.table import (
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
