"""Recognize the components that wrappers of PyTorch add to the names of a state dict.

torch.compile adds ``_orig_mod``, and DistributedDataParallel adds ``module`` at the beginning. The wrappers of FSDP and
of activation checkpointing add components of their own. Engines do not find tensors under such names.
"""

from __future__ import annotations

from collections.abc import Iterable

from fp4kit.storage.errors import CheckpointError, shown

# Component of a name -> the wrapper that adds it.
_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
_LEADING = {"module": "DistributedDataParallel"}  # only at the beginning of a name


def unwrapped(name: str) -> str:
    """Return the name of a tensor without the components that wrappers add: "module.fc.weight" gives "fc.weight"."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] in _LEADING:
        del parts[0]
    return ".".join(parts)


def check(names: Iterable[str]) -> None:
    """Raise CheckpointError if a tensor's name contains components that a wrapper has added."""
    for name in names:
        plain = unwrapped(name)
        if plain != name:
            wrapper = next(text for part, text in {**_WRAPPERS, **_LEADING}.items() if part in name.split("."))
            raise CheckpointError(
                f"{shown(name)}: {wrapper} has added to this name, so no engine finds the tensor; save the state dict"
                f" of the model inside the wrapper, which calls it {shown(plain)}, or rename the tensors"
            )
