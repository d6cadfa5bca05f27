"""Keep a module's state dict unchanged (names, order and values) when one of its parameters is fake-quantized.

A parametrization moves the parameter "weight" to "parametrizations.weight.original". Hooks of the module rename it back
when a state dict is made. When one is loaded, they accept the plain name, and report it if the parameter is missing.
"""

from __future__ import annotations

from typing import Any

import torch

_MARK = "_fp4kit_state_hooks"


def _held(leaf: str) -> str:
    """Return the name under which PyTorch stores the parametrized parameter `leaf` in a module's state dict."""
    return f"parametrizations.{leaf}.original"


def keep_names(module: torch.nn.Module, leaf: str, order: tuple[str, ...]) -> None:
    """Add hooks to a module, so that its state dict does not change when its parameter `leaf` is parametrized."""
    save = module._register_state_dict_hook(_Save(leaf, order))
    load = _Load(leaf)
    before = module.register_load_state_dict_pre_hook(load)
    after = module.register_load_state_dict_post_hook(load.rename_missing)
    module.__dict__.setdefault(_MARK, {})[leaf] = order, save, before, after


def release_names(module: torch.nn.Module, leaf: str) -> None:
    """Remove the hooks of keep_names for the parameter `leaf`, and restore the order of the module's parameters."""
    order, *hooks = module.__dict__.get(_MARK, {}).pop(leaf, ((),))
    for hook in hooks:
        hook.remove()
    for name in order:
        if name in module._parameters:
            module._parameters[name] = module._parameters.pop(name)


class _Save:
    """A hook that runs when a state dict is made: it gives the parametrized parameter its plain name, such as "weight".

    The module's own entries keep their usual order.
    """

    def __init__(self, leaf: str, order: tuple[str, ...]) -> None:
        self._leaf, self._order = leaf, order

    def __call__(self, module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Rename the parameter in ``state`` in place, as a hook of Module.state_dict."""
        held = prefix + _held(self._leaf)
        if held not in state:
            return
        state[prefix + self._leaf] = state.pop(held)
        own = {prefix + name for name in self._order}
        moved = [name for name in state if name in own]
        later = [name for name in state if name.startswith(prefix) and name not in own]
        for name in (*sorted(moved, key=[prefix + one for one in self._order].index), *later):
            state[name] = state.pop(name)


class _Load:
    """A hook that runs before a state dict is loaded, to accept the plain name of the parametrized parameter.

    If the state dict has the plain name, such as "weight", the hook renames it to the name under which the module now
    holds the parameter.
    """

    def __init__(self, leaf: str) -> None:
        self._leaf, self._prefix = leaf, ""

    def __call__(self, module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Rename the parameter in ``state`` in place, as a hook of Module.load_state_dict."""
        self._prefix = prefix
        if prefix + self._leaf in state:
            state[prefix + _held(self._leaf)] = state.pop(prefix + self._leaf)

    def rename_missing(self, module: Any, incompatible: Any) -> None:
        """Give the parameter its plain name in incompatible.missing_keys, as a hook that runs after the loading."""
        held = self._prefix + _held(self._leaf)
        missing = incompatible.missing_keys
        missing[:] = [self._prefix + self._leaf if name == held else name for name in missing]
