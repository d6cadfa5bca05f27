"""Describe a fault that an engine, a program that loads quantized checkpoints, would meet (Issue). ``comfy`` and
``mlx`` write files for ComfyUI and mlx-lm: they choose the container, declare it, and check that the engine can load
the layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fp4kit.checkpoint.containers import table
from fp4kit.contract.engine_table import VERSIONS
from fp4kit.recipes import RECIPES, Recipe, several
from fp4kit.storage.files import CheckpointError, shown


def named(engines: Iterable[str]) -> str:
    """Return the names of engines with their versions as one text, such as ``vLLM 0.33.0, SGLang 0.5.23``."""
    return ", ".join(f"{engine} {VERSIONS[engine]}" for engine in engines)


@dataclass(frozen=True)
class Issue:
    """A fault of a checkpoint, or a fact that its user should know.

    severity: "error" for a fault, "warning" for a fact that the user should know, "note" for an engine that does not
        load such checkpoints at all.
    subject: the name of the tensor, layer or file, or "model".
    text: what is wrong. If ``count`` is not 0, it names the kind of items that are counted.
    loader: the engine, with its version, that would fail or misread the checkpoint; "" if the issue is not about an
        engine.
    count: the number of items that ``text`` names, such as NaN block scales; 0 if nothing is counted.
    """

    severity: str
    subject: str
    text: str
    loader: str = ""
    count: int = 0

    @property
    def sentence(self) -> str:
        """The text, followed by ": " and the count if the count is not 0."""
        return f"{self.text}: {self.count}" if self.count else self.text


def finding(engine: str, severity: str, subject: str, text: str) -> Issue:
    """Return an issue about an engine: "error" if it rejects the checkpoint or decodes wrong values, or "warning"."""
    return Issue(severity, subject, text, f"{engine} {VERSIONS[engine]}")


class _Writer:
    """Write files for one engine. FORMS are the containers that the engine loads."""

    FORMAT: str
    ENGINE: str
    FORMS: tuple[table.Container, ...]

    def form_for(self, recipe: Recipe) -> table.Container:
        """Return the container in FORMS that stores a recipe's codes and scales."""
        for form in self.FORMS:
            if form.stores(recipe):
                return form
        usable = [id for id, r in RECIPES.items() if any(form.stores(r) for form in self.FORMS)]
        text = several(usable, recipe, self.FORMS[0].format)
        raise CheckpointError(f"recipe {recipe.id}: {self.why_not(recipe)}; use one of {text}")

    def why_not(self, recipe: Recipe) -> str:
        """Return the reason why FORMS cannot store a recipe."""
        return f"cannot be stored for {self.ENGINE}"


_ROWS = {"nvfp4": 16, "mxfp8": 32, "fp8 tensor": 1}  # kind -> ComfyUI pads a layer's rows to a multiple of this


class _Comfy(_Writer):
    # Sources: ComfyUI comfy/ops.py and comfy/quant_ops.py; comfy-kitchen 0.2.40 tensor/nvfp4.py.
    FORMAT, ENGINE = table.COMFY_NVFP4.format, "ComfyUI"
    FORMS = (table.COMFY_NVFP4, table.COMFY_MXFP8, table.COMFY_FP8, table.COMFY_E5M2)

    def check(self, form: table.Container, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError for the first layer that ComfyUI's loader would pad or reject if it were quantized."""
        for name, text in self.troubles({name: (form, shape) for name, shape in shapes.items()}):
            raise CheckpointError(f"{shown(name)}: {text}; leave it out with --keep")

    def wrong_dtypes(self, scales: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Yield (tensor name, fault as text) for each tensor scale or input scale that is not F32."""
        for name, dtype in scales.items():
            if dtype != "F32":
                yield name, f"is {dtype}; {self.ENGINE} needs F32; fp4kit convert --format {self.FORMAT} writes it"

    def troubles(self, layers: Mapping[str, tuple[table.Container, tuple[int, ...]]]) -> Iterator[tuple[str, str]]:
        """Yield (layer name, fault as text) for each layer that ComfyUI's loader would pad or reject."""
        for name, (form, shape) in layers.items():
            multiple = _ROWS[form.kind]
            if len(shape) != 2:
                yield name, f"has {len(shape)} axes; {self.ENGINE} has no stacks of experts"
            elif shape[0] % multiple:
                yield name, f"has {shape[0]} rows; {self.ENGINE} needs a multiple of {multiple} for {form.kind}"


class _Mlx(_Writer):
    # Tensors keep their Hugging Face names. When mlx-lm loads a model, the ``sanitize`` method of the model's class
    # renames and stacks them. After that, mlx-lm treats a layer as quantized if it finds ``.scales`` beside the weight.
    # A model type can therefore be written only if its ``sanitize`` leaves the tensors of linear layers alone, or moves
    # the scales of experts together with their weights.
    # Source: mlx-lm 0.32.2, utils.py (load_model, infer_quant_config) and models/*.py. Tested by loading qwen3 and
    # mixtral; for the other model types, the lists below are from reading the code.
    FORMAT, ENGINE = table.MLX_MXFP4.format, "mlx-lm 0.32.2"
    FORMS = (table.MLX_MXFP4, table.MLX_NVFP4, table.MLX_MXFP8)
    # Model types for which sanitize moves no tensor of a linear layer, stacks the scales of experts as it stacks their
    # weights, or stacks the weights of experts but drops their scales.
    _DENSE = frozenset(
        "apertus cohere cohere2 exaone4 gemma gemma2 gemma3_text glm glm4 granite helium hunyuan_v1_dense internlm3"
        " llama mimo minicpm ministral3 mistral nanbeige nemotron olmo olmo2 olmo3 phi phi3 qwen2 qwen3 seed_oss"
        " smollm3 stablelm starcoder2".split()
    )
    _STACKING = frozenset("deepseek deepseek_v2 dots1 exaone_moe glm4_moe mixtral olmoe phimoe qwen2_moe".split())
    _LOSING = frozenset({"ernie4_5_moe", "mellum", "qwen3_moe"})

    def why_not(self, recipe: Recipe) -> str:
        if table.MLX_GLOBAL.stores(recipe):
            return "has a tensor scale, which linear layers of mlx-lm do not support"
        return "cannot be stored by mlx-lm"

    def declaration(self, form: table.Container) -> dict[str, Any]:
        """Return the object that declares one of MLX's containers in config.json, under the key ``quantization``."""
        return {"group_size": form.group_size, "bits": form.element.bits, "mode": form.kind}

    def check(self, config: Mapping[str, Any], modules: Collection[str]) -> None:
        """Raise CheckpointError unless mlx-lm is known to load a model correctly once ``modules`` are quantized."""
        kind = str(config.get("model_type", ""))
        if kind in self._LOSING:
            lost = [name for name in modules if "experts" in name.split(".")]
            if lost:
                why = f"{self.ENGINE} would drop the scales of the experts of {kind} models"
                raise CheckpointError(f"{shown(lost[0])}: {why}; keep them unquantized with --keep '*.experts.*'")
        elif kind not in self._DENSE | self._STACKING:
            usable = ", ".join(sorted(self._DENSE | self._STACKING | self._LOSING))
            raise CheckpointError(
                f"model_type {shown(repr(kind))}: not supported by --format mlx, because fp4kit does not know how"
                f" {self.ENGINE} loads it; supported are {usable}"
            )

    def troubles(self, config: Mapping[str, Any], layers: Mapping[str, table.Container]) -> Iterator[tuple[str, str]]:
        """Yield (module or file, fault) for each reason why mlx-lm would reject a directory or load it wrongly."""
        declared = config.get("quantization")
        if not isinstance(declared, Mapping):
            why = "has no quantization entry, so mlx-lm loads no layer as quantized and rejects the weights"
            yield "config.json", why
            declared = {}
        for name, form in layers.items():
            own, needed = declared.get(name), self.declaration(form)
            is_other = isinstance(own, Mapping) and any(own.get(key) != one for key, one in needed.items())
            if own is False or is_other:
                yield name, f"config.json declares {own}, but its tensors are {needed}"
            elif form is table.MLX_GLOBAL and "switch_mlp" not in name.split("."):
                yield name, "has a global_scale, which mlx-lm reads only for experts (switch_mlp)"


comfy, mlx = _Comfy(), _Mlx()
