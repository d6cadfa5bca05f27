"""Configure fake-quantized training: which parameters, with which recipe, and how gradients pass."""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from fp4kit.arguments import as_flag, as_mapping, as_word, explains_class
from fp4kit.ops.quantize import fake_quantize, fake_quantize_backward
from fp4kit.recipes import Recipe, recipe_of

# Weights of routed experts, as Megatron (linear_fc1.weight3) and Hugging Face (3.gate_proj.weight) name them.
EXPERT_WEIGHTS = ("*.experts.*.weight", "*.experts.*.weight[0-9]*")
# flag in the environment -> (recipe, the variable with its block size, the default of that)
FLAGS = {
    "OPEN_TRAINING_MXFP4_FAKE_QAT_FLAG": ("mxfp4-flashinfer", "OPEN_TRAINING_MXFP4_BLOCK_SIZE", 32),
    "OPEN_TRAINING_INT4_FAKE_QAT_FLAG": ("int4-qat", "OPEN_TRAINING_INT4_GROUP_SIZE", 128),
}


def are_words(given: Any) -> bool:
    """Return whether an argument is a collection of strings, and not one string."""
    return not isinstance(given, str) and isinstance(given, Collection) and all(isinstance(one, str) for one in given)


@explains_class
@dataclass(frozen=True)
class FakeQuantSettings:
    """The settings of fake-quantized training: the parameters to quantize, selected by their names, and the recipe.

    Attributes:
        recipe: an id or a Recipe. If None, nothing is quantized.
        block_size: the number of elements that share a scale. If None, the block size of the recipe is used.
        parameters, exclude: wildcards (fnmatch; case matters) of parameter names. A parameter is quantized if it
            matches one of ``parameters`` and none of ``exclude``.
        pass_through: if True, the gradient passes unchanged everywhere. If False, it is 0 except where |w| <= the
            tensor_amax that was passed to fake_quantize. Without a tensor_amax, the limit is the weight's own amax, so
            only a weight with NaN gets zeros.

    Raises:
        ValueError: for an unknown recipe, and for a block size that does not fit the recipe.
        ValueError: for wildcards that are one string, or that contain something other than strings.
        TypeError: if the recipe is not None, a str or a Recipe, or if pass_through is not a bool.
    """

    recipe: str | Recipe | None = None
    block_size: int | None = None
    parameters: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    pass_through: bool = True

    def __post_init__(self) -> None:
        for field in ("parameters", "exclude"):
            patterns = getattr(self, field)
            if not are_words(patterns):
                raise ValueError(
                    f"FakeQuantSettings: {field} is {patterns!r:.60}; needs a tuple of wildcards, such as "
                    f"({patterns!r:.60},)"
                )
            object.__setattr__(self, field, tuple(patterns))
        object.__setattr__(self, "pass_through", as_flag("FakeQuantSettings", "pass_through", self.pass_through))
        if self.recipe is not None:
            recipe_of("FakeQuantSettings", self.recipe)
        if self.block_size is None:
            return
        block = None if self.recipe is None else recipe_of("FakeQuantSettings", self.recipe).block
        if block is None or block[0] != 1:
            raise ValueError(
                f"FakeQuantSettings: block_size is {self.block_size!r}, but recipe {self.recipe!r} has no blocks of "
                "one row; leave block_size out"
            )
        try:
            size = operator.index(self.block_size)
        except TypeError:
            size = 0
        if size < 1 or size % 2:
            raise ValueError(f"FakeQuantSettings: block_size is {self.block_size!r}; needs a positive even number")

    @classmethod
    def from_environment(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        parameters: tuple[str, ...] = EXPERT_WEIGHTS,
        exclude: tuple[str, ...] = (),
        pass_through: bool = True,
    ) -> FakeQuantSettings:
        """Return the settings that the environment variables `OPEN_TRAINING_...` of some trainers select.

        Nothing is quantized unless one of the flags is 1.

            OPEN_TRAINING_MXFP4_FAKE_QAT_FLAG   1: mxfp4-flashinfer, which the serving engine applies to the weights
            OPEN_TRAINING_MXFP4_BLOCK_SIZE      block size, 32 by default
            OPEN_TRAINING_INT4_FAKE_QAT_FLAG    1: int4-qat, clamp(round(w / s), -7, 7) * s
            OPEN_TRAINING_INT4_GROUP_SIZE       block size, 128 by default

        Args:
            environ: the environment variables. None: the variables of the process. Nothing else in fp4kit reads them.
            parameters: wildcards of the parameters to quantize. By default the weights of routed experts match.
            exclude: wildcards of parameters to leave unquantized.
            pass_through: True to pass gradients unchanged; False to clip them, as FakeQuantSettings says.

        Returns:
            The FakeQuantSettings.

        Raises:
            ValueError: if both flags are on, if a flag is not 0, 1 or empty, or if a size is not a positive even number
                (also if its flag is off).
            TypeError: if ``environ`` is not a mapping, or a flag or a size is not a string.
            ValueError, TypeError: as FakeQuantSettings, for the other arguments.

        Source: for INT4, the patch of Megatron (TEGroupedLinear) that slime and miles apply; for MXFP4, a fork of
            Megatron.
        """
        env = os.environ if environ is None else as_mapping("from_environment", "environ", environ)
        flags = [_flag(env, flag) for flag in FLAGS]
        choices = [(recipe, _size(env, variable, size)) for recipe, variable, size in FLAGS.values()]
        chosen: list[tuple[str | None, int | None]] = [one for one, on in zip(choices, flags, strict=True) if on]
        if len(chosen) > 1:
            raise ValueError(
                f"from_environment: {' and '.join(FLAGS)} are both '1'; weights have one format: set one of them to 0"
            )
        recipe, size = chosen[0] if chosen else (None, None)
        return cls(recipe, size, parameters, exclude, pass_through)

    @property
    def resolved(self) -> Recipe | None:
        """The Recipe with ``block_size`` applied, or None if nothing is quantized because ``recipe`` is None."""
        if self.recipe is None:
            return None
        found = recipe_of("FakeQuantSettings", self.recipe)
        return found if self.block_size is None else replace(found, block=(1, operator.index(self.block_size)))

    def is_quantized(self, name: str) -> bool:
        """Return True if the parameter with this name is quantized. If the recipe is None, always return False.

        Raises TypeError if ``name`` is not a string.
        """
        as_word("FakeQuantSettings", "the name of a parameter", name)
        matching = any(fnmatchcase(name, pattern) for pattern in self.parameters)
        return self.recipe is not None and matching and not any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def fake_quantize(self, name: str, w: Any, *, tensor_amax: Any = None) -> Any:
        """Return fp4kit.fake_quantize(w, recipe, tensor_amax=...) for a quantized parameter, otherwise ``w`` itself.

        Raises what fp4kit.fake_quantize raises, with the parameter's name in front of the message.

        Args:
            name: the parameter's name.
            w: the parameter.
            tensor_amax: the amax of the tensor scale, as in fp4kit.fake_quantize; None takes it from w.
        """
        recipe = self.resolved
        if recipe is None or not self.is_quantized(name):
            return w
        with naming(name):
            return fake_quantize(w, recipe, tensor_amax=tensor_amax)

    def backward(self, name: str, grad: Any, w: Any, *, amax: Any = None) -> Any:
        """Return the gradient with respect to ``w``.

        This is fp4kit.fake_quantize_backward for a quantized parameter if ``pass_through`` is False, otherwise ``grad``
        itself. Raises what fake_quantize_backward raises, with the parameter's name in front of the message.

        Args:
            name: the parameter's name.
            grad: the gradient with respect to the result of fake_quantize.
            w: the parameter.
            amax: the tensor_amax that was passed to fake_quantize; None for the amax of w. It is used only for
                clipping.
        """
        recipe = self.resolved
        if recipe is None or self.pass_through or not self.is_quantized(name):
            return grad
        with naming(name):
            return fake_quantize_backward(grad, w, recipe, amax=amax, pass_through=False)


@contextmanager
def naming(parameter: str, amaxes: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Put the parameter's name in front of the message of every ValueError and TypeError raised inside ``with``.

    amaxes: name -> amax of each parameter from which the tensor_amax was computed; an unknown amax is NaN. The message
    then names those that hold NaN, because the user passed no tensor_amax.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        text = str(error)
        op, holds, _ = text.partition(": tensor_amax holds ")
        if holds and amaxes:
            found = [name for name, amax in amaxes.items() if bool((amax != amax).any())]
            text = f"{op}: {' or '.join(found)} holds NaN, so no tensor scale can be computed"
        raise type(error)(f"{parameter}: {text}") from None


def _word(env: Mapping[str, str], name: str) -> str:
    """Return the environment variable ``name`` of ``env`` without surrounding spaces, or "" if it is missing."""
    return as_word("from_environment", name, env.get(name, "")).strip()


def _flag(env: Mapping[str, str], name: str) -> bool:
    """Return True if the environment variable ``name`` of ``env`` is "1", and False if it is "0", empty or missing."""
    value = _word(env, name)
    if value not in ("", "0", "1"):
        raise ValueError(f"from_environment: {name} is {env[name]!r}; needs 0 or 1")
    return value == "1"


def _size(env: Mapping[str, str], name: str, default: int) -> int:
    """Return the block size in the variable ``name`` of ``env``, or ``default`` if it is missing or empty."""
    value = _word(env, name)
    if not value:
        return default
    if not (value.isascii() and value.isdigit() and int(value) > 0 and int(value) % 2 == 0):
        raise ValueError(f"from_environment: {name} is {env[name]!r}; needs a positive even number, such as {default}")
    return int(value)
