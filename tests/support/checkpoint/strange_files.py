"""Make strange checkpoints: sound ones in which one tensor, config entry or excluded layer was changed.

A change is drawn from CHANGES. Each takes a ChangeDraw and returns what it did, or raises Unfit.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import synthetic

from fp4kit.checkpoint import convert

FOREIGN = Path(__file__).resolve().parents[2] / "data" / "foreign"
DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "U8": np.uint8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
_ALIKE = {
    1: ("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL"),
    2: ("BF16", "F16", "I16"),
    4: ("F32", "I32", "U32"),
    8: ("I64", "F64"),
}
_BYTES = {name: size for size, names in _ALIKE.items() for name in names}


def _wide(root: Path) -> None:
    """Write a llama of two layers whose matrices are 128 x 128, which all formats can store."""
    tensors = {f"model.{name}.weight": synthetic.random(name, (128, 128)) for name in ("embed_tokens", "lm_head")}
    tensors["lm_head.weight"] = tensors.pop("model.lm_head.weight")
    tensors["model.norm.weight"] = np.ones(128, synthetic.BF16)
    for i in range(2):
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"):
            module = f"model.layers.{i}.{name}_proj"
            tensors[f"{module}.weight"] = synthetic.random(module, (128, 128))
        tensors[f"model.layers.{i}.input_layernorm.weight"] = np.ones(128, synthetic.BF16)
    config: dict[str, object] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2}
    synthetic.write_model(root, config, tensors)


# name of a sound checkpoint -> (source, recipe, format, options of convert)
CONVERTED: dict[str, tuple[Callable[[Path], object], str, str, dict[str, Any]]] = {
    "modelopt NVFP4": (synthetic.moe, "nvfp4-modelopt", "modelopt", {"input_scale": 0.01}),
    "modelopt W4A16_NVFP4": (synthetic.dense, "nvfp4-modelopt", "modelopt", {}),
    "modelopt MXFP8": (synthetic.moe, "mxfp8-te", "modelopt", {}),
    "compressed-tensors NVFP4": (synthetic.dense, "nvfp4-compressed-tensors", "compressed-tensors", {}),
    "compressed-tensors MXFP4": (synthetic.moe, "mxfp4-compressed-tensors", "compressed-tensors", {}),
    "compressed-tensors FP8": (_wide, "fp8-modelopt-channel", "compressed-tensors", {}),
    "fp8": (_wide, "fp8-transformers-block", "fp8", {}),
    "gpt-oss": (synthetic.gpt_oss, "mxfp4-ocp", "gpt-oss", {}),
    "mlx NVFP4": (_wide, "nvfp4-mlx-cpu", "mlx", {}),
}
# Foreign checkpoints; those of torchao depend on the header's metadata, and one cannot be decoded.
_LEFT_OUT = ("torchao--", "modelopt--gpt_oss-MXFP4")
SOUND = (*CONVERTED, *(p.name for p in sorted(FOREIGN.iterdir()) if p.is_dir() and not p.name.startswith(_LEFT_OUT)))


@dataclass
class Files:
    """The content of a checkpoint: its tensors, and its JSON files by name."""

    tensors: dict[str, synthetic.Stored]
    configs: dict[str, dict[str, Any]]
    exponents: bool = True  # scales in U8 are exponents, as in all formats but MLX's NVFP4

    def write(self, root: Path) -> None:
        """Write the checkpoint as a directory with one safetensors file."""
        root.mkdir(parents=True)
        for name, content in self.configs.items():
            (root / name).write_text(json.dumps(content))
        synthetic.write_bytes(root / "model.safetensors", self.tensors, {"format": "pt"})


def source_of(name: str, folder: Path) -> Path:
    """Return the directory of the model that a sound checkpoint of CONVERTED was made from."""
    return folder / f"{name} source"


@cache
def sound(name: str, folder: Path) -> Files:
    """Return a sound checkpoint, one of SOUND, without fp4kit's own record. Sources are written into `folder`."""
    root = FOREIGN / name
    if name in CONVERTED:
        make, recipe, form, options = CONVERTED[name]
        root = folder / f"{name} converted"
        make(source_of(name, folder))
        convert(source_of(name, folder), root, recipe, format=form, **options)
    configs = {
        path.name: json.loads(path.read_text())
        for path in root.glob("*.json")
        if not path.name.endswith(("index.json", "tokenizer_config.json", "fp4kit-manifest.json"))
        and not path.name.startswith("fp4kit")
    }
    for content in configs.values():
        for key in ("quantization_config", "quantization"):
            if isinstance(content.get(key), dict):
                content[key].pop("fp4kit", None)
    tensors = dict(sorted(oracle.load(root).items()))
    if not any("embed" in tensor for tensor in tensors):  # so that magnitudes can be compared
        embedding = synthetic.random("embed_tokens", (64, 128))
        tensors["model.embed_tokens.weight"] = ("BF16", embedding.shape, embedding.tobytes())
    if name in CONVERTED:
        shutil.rmtree(root)
    return Files(tensors, configs, name != "mlx NVFP4")


class Unfit(Exception):
    """Raised by a change that does not apply to a checkpoint."""


def need(fits: object) -> None:
    if not fits:
        raise Unfit


class ChangeDraw:
    """A sound checkpoint to change, and random choices from it."""

    def __init__(self, files: Files, seed: int) -> None:
        self.files = Files(dict(files.tensors), copy.deepcopy(files.configs), files.exponents)
        self.random = np.random.default_rng(seed)

    def one(self, choices: Any) -> Any:
        found = list(choices)
        need(found)
        return found[self.random.integers(len(found))]

    def tensor(self) -> str:
        """Return the name of a tensor. Parts of quantized layers are drawn more often than other tensors."""
        parts = [name for name, (dtype, shape, _) in self.files.tensors.items() if dtype != "BF16" or not shape]
        return str(self.one(parts if parts and self.random.random() < 0.8 else self.files.tensors))

    def values(self, name: str) -> np.ndarray:
        dtype, shape, data = self.files.tensors[name]
        need(dtype in DTYPES)
        return np.frombuffer(data, DTYPES[dtype]).reshape(shape)

    def section(self) -> Any:
        """Return (object, key) for an entry anywhere in what the configs declare about quantization."""
        roots = [
            content.get(key)
            for content in self.files.configs.values()
            for key in ("quantization_config", "quantization", "compression_config")
        ]
        found: list[tuple[dict[str, Any], str]] = []
        pending = [root for root in roots if isinstance(root, dict)]
        while pending:
            section = pending.pop()
            found += [(section, key) for key in section]
            values = [v for value in section.values() for v in (value if isinstance(value, list) else [value])]
            pending += [value for value in values if isinstance(value, dict)]
        return self.one(found)

    def exclusions(self) -> Any:
        """Return a list of unquantized layers that a config declares."""
        return self.one(_lists(self.files.configs))


def _lists(configs: Mapping[str, Any]) -> list[list[Any]]:
    found: list[list[Any]] = []
    pending: list[Any] = [*configs.values()]
    while pending:
        section = pending.pop()
        for key, value in section.items():
            if isinstance(value, dict):
                pending.append(value)
            elif isinstance(value, list) and key in ("ignore", "exclude", "exclude_modules", "modules_to_not_convert"):
                found.append(value)
    return found


def _add_tensor(draw: ChangeDraw) -> str:
    module = draw.tensor().rpartition(".")[0]
    ending = draw.one(("weight_foo", "g_idx", "zero_point", "weight_scale_3", "bias_scale", "pre_quant_scale"))
    name = f"{module}.{ending}"
    draw.files.tensors[name] = ("F32", (1,), np.float32([2]).tobytes())
    return f"added {name}"


def _drop_tensor(draw: ChangeDraw) -> str:
    name = draw.tensor()
    del draw.files.tensors[name]
    return f"dropped {name}"


def _rename_tensor(draw: ChangeDraw) -> str:
    name = draw.tensor()
    module, _, ending = name.rpartition(".")
    new = draw.one(
        (
            f"{module}.{ending}_inv",
            f"{module}.{ending}s",
            f"{module}.my_{ending}",
            f"{module}_{ending}",
            f"{module}.{ending.upper()}",
            name.replace("layers.0", "layers.7").replace("layer.0", "layer.7"),
            f"{module}.{ending.replace('scale', 'scales')}",
            f"{module}.{ending.removesuffix('_2').removesuffix('_scale')}_extra",
        )
    )
    draw.files.tensors = {new if key == name else key: stored for key, stored in draw.files.tensors.items()}
    return f"renamed {name} to {new}"


def _reinterpret(draw: ChangeDraw) -> str:
    name = draw.tensor()
    dtype, shape, data = draw.files.tensors[name]
    need(dtype not in ("BF16", "F16") and dtype in _BYTES)  # others are plain values, as the file declares them
    new = draw.one(other for other in _ALIKE[_BYTES[dtype]] if other != dtype)
    draw.files.tensors[name] = (new, shape, data)
    return f"retyped {name}: {dtype} as {new}"


def _cast(draw: ChangeDraw) -> str:
    name = draw.tensor()
    x, dtype = draw.values(name), draw.files.tensors[name][0]
    need(dtype in ("F32", "F8_E4M3", "F8_E8M0"))
    new = draw.one(other for other in ("F32", "BF16", "F16") if other != dtype)
    with np.errstate(over="ignore"):
        draw.files.tensors[name] = (new, x.shape, x.astype(DTYPES[new]).tobytes())
    return f"cast {name} from {dtype} to {new}"


def _reshape(draw: ChangeDraw) -> str:
    name = draw.tensor()
    dtype, shape, data = draw.files.tensors[name]
    need(len(shape) > 1 and dtype != "BF16")
    new = draw.one(((int(np.prod(shape)),), shape[::-1], (*shape[:-2], shape[-2] * 2, shape[-1] // 2), (*shape, 1)))
    need(np.prod(new) == np.prod(shape) and new != shape)
    draw.files.tensors[name] = (dtype, tuple(new), data)
    return f"reshaped {name} from {shape} to {new}"


FACTORS = (448.0, 1 / 448, 2688.0, 1 / 2688, 1e6, 0.0, -1.0, np.nan, np.inf, 0.5, 2.0)


def _multiply_scale(draw: ChangeDraw) -> str:
    scales = [
        name
        for name, (dtype, shape, _) in draw.files.tensors.items()
        if "scale" in name.rpartition(".")[2] and dtype == "F32"
    ]
    name, factor = draw.one(scales), draw.one(FACTORS)
    ending = name.rpartition(".")[2]
    every = [other for other in scales if other.rpartition(".")[2] == ending] if draw.random.random() < 0.3 else [name]
    for other in every:
        y = draw.values(other)
        draw.files.tensors[other] = ("F32", y.shape, (y * np.float32(factor)).astype(np.float32).tobytes())
    return f"multiplied {len(every)} of {name} by {factor:g}"


def _shift_exponents(draw: ChangeDraw) -> str:
    names = [
        name
        for name, (dtype, shape, _) in draw.files.tensors.items()
        if "scale" in name.rpartition(".")[2] and dtype in ("U8", "F8_E8M0") and draw.files.exponents
    ]
    name, shift = draw.one(names), draw.one((-120, -20, 20, 120, 1))
    dtype, shape, data = draw.files.tensors[name]
    new = np.clip(np.frombuffer(data, np.uint8).astype(int) + shift, 0, 254).astype(np.uint8)
    draw.files.tensors[name] = (dtype, shape, new.tobytes())
    return f"multiplied {name} by 2^{shift}"


def _zero(draw: ChangeDraw) -> str:
    name = draw.tensor()
    dtype, shape, data = draw.files.tensors[name]
    need(dtype not in ("BF16", "F16"))  # zeros may be the values of an unquantized layer
    draw.files.tensors[name] = (dtype, shape, bytes(len(data)))
    return f"zeroed {name}"


def _drop_key(draw: ChangeDraw) -> str:
    section, key = draw.section()
    del section[key]
    return f"dropped config key {key}"


def _add_key(draw: ChangeDraw) -> str:
    section, key = draw.section()
    name = draw.one(("is_packed_differently", "zero_point", "scale_rule", "transform", "input_quant", "group_sizes"))
    section[name] = draw.one((True, 3, "x", {"a": 1}, [1]))
    return f"added config key {name} beside {key}"


def _rename_key(draw: ChangeDraw) -> str:
    section, key = draw.section()
    section[f"{key}_v2"] = section.pop(key)
    return f"renamed config key {key}"


def _change_value(draw: ChangeDraw) -> str:
    section, key = draw.section()
    old = section[key]
    if isinstance(old, bool):
        new: Any = draw.one((not old, "yes", 1))
    elif isinstance(old, int):
        new = draw.one((old * 2, old // 2, str(old), -1, 0))
    elif isinstance(old, str):
        new = draw.one((f"{old}x", "", 4, [old], old.upper() if old.islower() else old.lower()))
    elif isinstance(old, list):
        new = draw.one((old[0] if old else "x", {"a": old}, 3))
    else:
        new = draw.one(("x", 5, [old]))
    need(new != old)
    section[key] = new
    return f"changed config key {key} from {old!r:.60} to {new!r:.60}"


def _drop_exclusion(draw: ChangeDraw) -> str:
    ignored = draw.exclusions()
    need(ignored)
    return f"dropped exclusion {ignored.pop(int(draw.random.integers(len(ignored))))!r}"


def _add_exclusion(draw: ChangeDraw) -> str:
    ignored = draw.exclusions()
    module = draw.tensor().rpartition(".")[0]
    ignored.append(draw.one((module, f"{module}*", "re:.*mlp.*", "nothing.like.this", 3)))
    return f"added exclusion {ignored[-1]!r}"


def _rename_exclusion(draw: ChangeDraw) -> str:
    ignored = draw.exclusions()
    need(ignored)
    at = int(draw.random.integers(len(ignored)))
    old = ignored[at]
    ignored[at] = draw.one((f"{old}x", f"model.{old}", str(old).upper(), f"re:{old}", ""))
    return f"renamed exclusion {old!r} to {ignored[at]!r}"


CHANGES: tuple[Callable[[ChangeDraw], str], ...] = (
    *(_add_tensor, _drop_tensor, _rename_tensor, _reinterpret, _cast, _reshape, _multiply_scale, _shift_exponents),
    *(_zero, _drop_key, _add_key, _rename_key, _change_value, _drop_exclusion, _add_exclusion, _rename_exclusion),
)


def strange(files: Files, seed: int) -> tuple[Files, str]:
    """Return a changed copy of a sound checkpoint, and a text that says what was changed."""
    for attempt in range(100):
        draw = ChangeDraw(files, seed * 100 + attempt)
        with suppress(Unfit):
            return draw.files, CHANGES[(seed + attempt) % len(CHANGES)](draw)
    raise AssertionError("no change applies")
