"""Recognize the parts that wrappers of PyTorch add to the names of a state dict.

torch.compile adds ``_orig_mod.``, DistributedDataParallel ``module.`` at the beginning, and the wrappers of FSDP and of
activation checkpointing parts of their own. No engine finds tensors under such names.
"""

from __future__ import annotations

from collections.abc import Iterable

from fp4kit.storage.errors import CheckpointError, shown

# Part of a name -> what adds it. ``module`` counts only at the beginning.
_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
_LEADING = {"module": "DistributedDataParallel"}


def unwrapped(name: str) -> str:
    """Return the name of a tensor without the parts that wrappers add."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] in _LEADING:
        del parts[0]
    return ".".join(parts)


def check(names: Iterable[str]) -> None:
    """Raise CheckpointError if a wrapper has added parts to the name of a tensor."""
    for name in names:
        plain = unwrapped(name)
        if plain != name:
            wrapper = next(text for part, text in {**_WRAPPERS, **_LEADING}.items() if part in name.split("."))
            raise CheckpointError(
                f"{shown(name)}: {wrapper} has added to this name, so no engine finds the tensor; save the state dict"
                f" of the model inside the wrapper, which calls it {shown(plain)}, or rename the tensors"
            )
