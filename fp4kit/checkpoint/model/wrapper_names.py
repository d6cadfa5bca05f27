"""Recognize the components that wrappers of PyTorch add to the names of a state dict. For example, torch.compile adds
``_orig_mod``, and DistributedDataParallel adds ``module`` at the beginning.

PEFT adds ``base_model.model``, ``base_layer`` and ``original_module``. The wrappers of FSDP, Lightning and activation
checkpointing add components of their own. Engines do not find tensors under such names.
"""

from __future__ import annotations

from collections.abc import Iterable

from fp4kit.storage.errors import CheckpointError, shown

# Component of a name -> the wrapper that adds it.
_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_forward_module": "Lightning",
    "base_layer": "PEFT",
    "original_module": "PEFT",
}
_LEADING = {"module": "DistributedDataParallel"}  # only at the beginning of a name
_PEFT = ["base_model", "model"]  # the beginning of all names of a model that PEFT wraps
_SAVE = "save the state dict of the model inside the wrapper"
_MERGE = "merge the adapter with merge_and_unload() and save the result"


def unwrapped(name: str) -> str:
    """Return the name of a tensor without the components that wrappers add: "module.fc.weight" gives "fc.weight"."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] in _LEADING:
        del parts[0]
    return ".".join(parts[2:] if parts[:2] == _PEFT and len(parts) > 2 else parts)


def trouble(names: Iterable[str]) -> tuple[str, str]:
    """Return (name, reason) for the first tensor whose name a wrapper has changed; ("", "") if there is none."""
    for name in names:
        plain = unwrapped(name)
        if plain != name:
            known = (text for part, text in {**_WRAPPERS, **_LEADING}.items() if part in name.split("."))
            wrapper = next(known, "PEFT")
            way = _MERGE if wrapper == "PEFT" else _SAVE
            return name, (
                f"{wrapper} has added to this name, so no engine finds the tensor; {way}, which calls it"
                f" {shown(plain)}, or rename the tensors"
            )
    return "", ""


def check(names: Iterable[str]) -> None:
    """Raise CheckpointError if a tensor's name contains components that a wrapper has added."""
    name, why = trouble(names)
    if why:
        raise CheckpointError(f"{shown(name)}: {why}")
