"""Provide assert_same_bits, which tests call to check that a trainer and a server compute with equal bits.

The pytest plugin of fp4kit, with the option --fp4kit-engine, is in _fp4kit_pytest.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fp4kit.arguments import a_type, explains_calls, warn
from fp4kit.contract.compare_layer import LayerParity, Parity
from fp4kit.contract.parity import parity

__all__ = ["assert_same_bits"]
_ALL = 1 << 62  # more elements than any layer has


@explains_calls
def assert_same_bits(
    train: Any,
    rollout: Any = None,
    *,
    weights: Any = None,
    inputs: str | Path | Mapping[str, Any] | None = None,
    kv: str | Path | Mapping[str, Any] | None = None,
    elements: int | None = None,
    layers: int | None = None,
    seconds: float | None = None,
    engine: str | None = None,
    scheme: str | None = None,
) -> None:
    """Raise AssertionError unless a trainer and a rollout engine compute with equal bits.

    This is `fp4kit.parity` as an assertion. The message names the first layer and the first step of its arithmetic that
    differ, one element with its bit patterns on both sides, worked step by step, and the setting that would make the
    sides equal. pytest shows the line of the caller.

    Args:
        train: the side of the trainer: everything that `parity` accepts, or a single array, tensor, number, list or
            Quantized.
        rollout: the side of the rollout engine. If one side is a single array or Quantized, so is the other. None for
            the contract of `engine` and `scheme` alone.
        weights: the unquantized weights, as for `parity`. If the sides are single arrays or Quantized, a single array.
        elements: the number of elements per layer that are compared. None compares all, unlike `parity`.
        inputs, kv, layers, seconds, engine, scheme: see `parity`.

    Raises:
        AssertionError: a bit differs, the shapes differ, or a layer is on one side only.
        TypeError, ValueError, CheckpointError: the sides cannot be compared; see `parity`.

    Warns:
        UserWarning: all that was compared is equal, but only one side states its activations or input scales.

    Numerics:
        NaN equals NaN, and 0 differs from -0. Dtypes may differ: values are compared in the wider one, which is exact.

    Examples:
        >>> import numpy as np, fp4kit
        >>> from fp4kit.testing import assert_same_bits
        >>> x = np.float32([[1, 2.5, np.nan, 0] * 4])
        >>> assert_same_bits(x, x.copy())
        >>> assert_same_bits(fp4kit.quantize(x, "nvfp4-te"), fp4kit.quantize(x, "nvfp4-te"))
        >>> assert_same_bits({"logits": x}, {"logits": x + np.float32(1e-6)})
        Traceback (most recent call last):
        AssertionError: train and rollout differ: 1 of 1 layer differs; compared 16 of 16 elements in 1 layer
        tensor logits: first step that differs: value, 12 of 12 examined differing elements
          element [0, 0]: train 1.0 (0x3f800000) and rollout 1.000001 (0x3f800008)
    """
    __tracebackhide__ = True
    alone = [_is_alone(side) for side in (train, rollout)]
    if alone[0] != alone[1]:
        kinds = f"train is {a_type(train)} and rollout {a_type(rollout)}"
        raise TypeError(f"assert_same_bits: {kinds}; needs two single arrays, or two sides of parity")
    if all(alone):
        train, rollout = ({"array": np.asarray(side) if _is_plain(side) else side} for side in (train, rollout))
        weights = {"array": weights} if _is_alone(weights) else weights
    train, rollout = _detached(train), _detached(rollout)
    if text := _other_shapes(train, rollout):
        raise AssertionError(f"train and rollout differ: {text}")
    if all(alone) and 0 in train["array"].shape:
        return
    most = _ALL if elements is None else elements
    limits: dict[str, Any] = {"elements": most, "layers": layers, "seconds": seconds}
    found = parity(train, rollout, weights=weights, inputs=inputs, kv=kv, **limits, engine=engine, scheme=scheme)
    if not found:
        raise AssertionError(_message(found))
    if found.uncompared:
        advice = "give both sides a contract, or what states it, such as fp4kit.serving(engine, scheme)"
        warn(f"assert_same_bits: {found.verdict}; {advice}")


def _detached(side: Any) -> Any:
    """Return a dict of tensors without gradients, which parity refuses to lose; other sides as they are."""
    if not isinstance(side, dict):
        return side
    return {name: one.detach() if hasattr(one, "detach") else one for name, one in side.items()}


def _is_plain(side: Any) -> bool:
    return isinstance(side, (int, float, list))


def _is_alone(side: Any) -> bool:
    """Return whether a side is one array, tensor, number, list or Quantized."""
    return _is_plain(side) or (hasattr(side, "shape") and not isinstance(side, Mapping))


def _other_shapes(train: Any, rollout: Any) -> str:
    """Return a text about the first tensor whose shapes differ; "" if there is none. parity names transposes itself."""
    if not (isinstance(train, Mapping) and isinstance(rollout, Mapping)):
        return ""
    for name in (name for name in train if name in rollout):
        a, b = (tuple(getattr(side[name], "shape", ())) for side in (train, rollout))
        if a != b and not (len(a) > 1 and a[:-2] == b[:-2] and a[-2:] == b[:-3:-1]):
            return f"{name} has the shape {a} in train and {b} in rollout"
    return ""


def _message(found: Parity) -> str:
    lines = [f"train and rollout differ: {found.verdict}"]
    if found.differing:
        lines.append(str(_first(found.differing)))
    lines += [f"on one side only: {text}" for text in found.missing[:3]]
    lines += [f"exclusions: {text}" for text in found.exclusions]
    return "\n".join(lines)


def _first(differing: tuple[LayerParity, ...]) -> LayerParity:
    """Return the earliest difference. Products differ last, because weights or inputs that differ are their cause."""
    return next((layer for layer in differing if layer.step != "product"), differing[0])
