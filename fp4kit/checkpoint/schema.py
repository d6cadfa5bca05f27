"""The output formats as data: tensors and the two config files, as Model-Optimizer's unified export writes them.

Of a linear layer ``P`` of shape [N, K]:

| quant_algo  | P.weight        | P.weight_scale     | P.weight_scale_2 | P.input_scale |
|-------------|-----------------|--------------------|------------------|---------------|
| NVFP4       | U8 [N, K/2]     | F8_E4M3 [N, K/16]  | F32 []           | F32 []        |
| W4A16_NVFP4 | U8 [N, K/2]     | F8_E4M3 [N, K/16]  | F32 []           |               |
| mxfp4       | U8 [N, K/2]     | U8 [N, K/32]       |                  |               |
| MXFP8       | F8_E4M3 [N, K]  | U8 [N, K/32]       |                  |               |

Element 2j of a row is in the low nibble; scales are row-major and multiply on decode. Loaders of NVFP4 read
``input_scale`` whether or not it is there, so a conversion without calibration is W4A16_NVFP4. That ``mxfp4`` is
lower-case and declares no group size is Model-Optimizer's doing. Source: Model-Optimizer 0.47 modelopt/torch/export
quant_utils.py, convert_hf_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp4kit import __version__
from fp4kit.formats import E2M1, E4M3, E8M0, FLT_MAX, FLT_MIN, ElementFormat
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.storage.errors import CheckpointError
from fp4kit.storage.safetensors_file import nbytes_of

WEIGHT, SCALE, TENSOR_SCALE, INPUT_SCALE = "weight", "weight_scale", "weight_scale_2", "input_scale"
PARTS = (WEIGHT, SCALE, TENSOR_SCALE, INPUT_SCALE)


@dataclass(frozen=True)
class OutputFormat:
    """One way in which a linear layer is stored. dtypes are safetensors names."""

    quant_algo: str
    element: ElementFormat
    scale: ElementFormat
    group_size: int
    weight_dtype: str
    scale_dtype: str
    has_tensor_scale: bool = False
    has_input_scale: bool = False
    declares_group_size: bool = True
    config_group: tuple[str, ...] = ()  # what config_groups describes; empty: there is no config_groups

    def __repr__(self) -> str:
        return self.quant_algo

    def tensors(self, shape: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return suffix -> (dtype, shape) for a layer of ``shape`` [N, K]."""
        rows, columns = shape
        parts: dict[str, tuple[str, tuple[int, ...]]] = {
            WEIGHT: (self.weight_dtype, (rows, columns * self.element.bits // 8)),
            SCALE: (self.scale_dtype, (rows, columns // self.group_size)),
        }
        if self.has_tensor_scale:
            parts[TENSOR_SCALE] = ("F32", ())
        if self.has_input_scale:
            parts[INPUT_SCALE] = ("F32", ())
        return parts


W4A16_NVFP4 = OutputFormat("W4A16_NVFP4", E2M1, E4M3, 16, "U8", "F8_E4M3", True, config_group=("weights",))
NVFP4 = OutputFormat("NVFP4", E2M1, E4M3, 16, "U8", "F8_E4M3", True, True, config_group=("input_activations", "weights"))
MXFP4 = OutputFormat("mxfp4", E2M1, E8M0, 32, "U8", "U8", declares_group_size=False)
MXFP8 = OutputFormat("MXFP8", E4M3, E8M0, 32, "F8_E4M3", "U8")

OUTPUT_FORMATS = (NVFP4, W4A16_NVFP4, MXFP4, MXFP8)


@dataclass(frozen=True)
class OutputTensor:
    """One tensor to be written: name, safetensors dtype, shape, and which part of its module it is (None: copied)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: str | None = None

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)


def module_tensors(module: str, fmt: OutputFormat, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
    """Return the tensors that a linear layer ``module`` of ``shape`` [N, K] becomes."""
    return tuple(OutputTensor(f"{module}.{part}", *spec, part) for part, spec in fmt.tensors(shape).items())


def _stored_by(fmt: OutputFormat, recipe: Recipe) -> bool:
    """Return whether the codes and scales of ``recipe`` fit ``fmt``."""
    scaling = "tensor" if fmt.has_tensor_scale else "none"
    return (
        not recipe.fake_only
        and (recipe.element, recipe.scale, recipe.tensor_scaling) == (fmt.element, fmt.scale, scaling)
        and recipe.block_size == fmt.group_size
    )


def output_format(recipe: Recipe, input_scale: float | None = None) -> OutputFormat:
    """Return the format in which ``recipe`` is stored; ``input_scale`` asks for NVFP4 with 4-bit activations.

    Raises CheckpointError when no format fits, or when input_scale is not a positive normal float32 or the recipe is
    not NVFP4.
    """
    candidates = [NVFP4] if input_scale is not None else [fmt for fmt in OUTPUT_FORMATS if fmt is not NVFP4]
    found = next((fmt for fmt in candidates if _stored_by(fmt, recipe)), None)
    if found is None and input_scale is not None and _storable(recipe):
        raise CheckpointError(f"input scale: {recipe.id} stores none; leave it out, or use an NVFP4 recipe")
    if found is None:
        usable = ", ".join(id for id, known in RECIPES.items() if _storable(known))
        raise CheckpointError(f"recipe {recipe.id}: has no place in a Model-Optimizer checkpoint; use one of {usable}")
    if input_scale is not None and not float(FLT_MIN) <= input_scale <= float(FLT_MAX):
        raise CheckpointError(f"input scale: got {input_scale}; a positive normal float32 is needed, such as 1.0")
    return found


def _storable(recipe: Recipe) -> bool:
    """Return whether any format stores ``recipe``."""
    return any(_stored_by(fmt, recipe) for fmt in OUTPUT_FORMATS)


def _producer() -> dict[str, str]:
    """Return the producer entry: loaders test the name, the version says who wrote it."""
    return {"name": "modelopt", "version": f"fp4kit-{__version__}"}


def hf_quant_config(fmt: OutputFormat, ignore: Sequence[str]) -> dict[str, Any]:
    """Return the content of hf_quant_config.json. The KV cache is not quantized: no scales for it exist."""
    quantization: dict[str, Any] = {"quant_algo": fmt.quant_algo, "kv_cache_quant_algo": None}
    if fmt.declares_group_size:
        quantization["group_size"] = fmt.group_size
    return {"producer": _producer(), "quantization": {**quantization, "exclude_modules": list(ignore)}}


def _config_group(kind: str, fmt: OutputFormat) -> tuple[str, dict[str, Any]]:
    return kind, {"dynamic": False, "num_bits": fmt.element.bits, "type": "float", "group_size": fmt.group_size}


def quantization_config(fmt: OutputFormat, ignore: Sequence[str], recipe_id: str) -> dict[str, Any]:
    """Return ``quantization_config`` of config.json: Model-Optimizer's keys, and ``fp4kit`` with the recipe."""
    config: dict[str, Any] = {}
    if fmt.config_group:
        group: dict[str, Any] = dict(_config_group(kind, fmt) for kind in fmt.config_group)
        config["config_groups"] = {"group_0": {**group, "targets": ["Linear"]}}
    return {
        **config,
        "ignore": list(ignore),
        "quant_algo": fmt.quant_algo,
        "producer": _producer(),
        "quant_method": "modelopt",
        "fp4kit": {"version": __version__, "recipe": recipe_id},
    }


def recognise(parts: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[OutputFormat, tuple[int, int]] | None:
    """Return the format and the [N, K] of a module whose tensors are ``parts`` (suffix -> dtype, shape), or None."""
    shape = parts.get(WEIGHT, ("", ()))[1]
    if len(shape) != 2:
        return None
    for fmt in OUTPUT_FORMATS:
        logical = (shape[0], shape[1] * 8 // fmt.element.bits)
        expected = fmt.tensors(logical)
        if set(expected) == set(parts) & set(PARTS):
            if all(parts[part] == spec for part, spec in expected.items()) and logical[1] % fmt.group_size == 0:
                return fmt, logical
    return None


def usable_tensor_scale(scale: np.ndarray | np.float32) -> bool:
    """Return whether the scale is positive, finite and normal: loaders that flush take a subnormal for 0."""
    return bool(FLT_MIN <= np.float32(scale) <= FLT_MAX)
