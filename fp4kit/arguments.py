"""Check plain arguments: numbers, shapes, flags, names and paths. Describe options of commands.

Each check returns the argument in its standard form or raises an error. `op` is the public function that the error
message begins with, and `name` is its parameter.
"""

from __future__ import annotations

import math
import operator
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import fields
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Parameter, signature
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import (
    Any,
    NamedTuple,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

P = ParamSpec("P")
T = TypeVar("T")


def written(value: Any) -> str:
    """Return an argument as text for a message, cut to 60 characters. Slices are written as between brackets: 0:16."""
    if isinstance(value, slice):
        ends = ["" if end is None else f"{end!s:.20}" for end in (value.start, value.stop, value.step)]
        return ":".join(ends if ends[2] else ends[:2])
    if value is Ellipsis:
        return "..."
    if isinstance(value, tuple) and any(isinstance(one, slice) or one is Ellipsis for one in value):
        return ", ".join(map(written, value))
    return f"{value!r:.60}"


def with_article(name: str) -> str:
    """Return the name of a type after "a" or "an", as it is spoken: "an int", "a Unit"."""
    return f"{'an' if name.lower().startswith((*'aeio', 'nd')) else 'a'} {name}"


def a_type(value: Any, module: bool = False) -> str:
    """Return the type of a value as text, such as "an int". If ``module``, its module comes first: "a torch.Tensor"."""
    kind = type(value)
    return with_article(f"{kind.__module__}.{kind.__qualname__}" if module else kind.__name__)


def title_of(record: Any, listed: Any, texts: Collection[str]) -> str:
    """Return the id of a dataclass and, if ``listed`` has this id but other values, the fields that differ."""
    names = [] if listed in (None, record) else [one.name for one in fields(record) if one.name not in texts]
    changed = [f"{k}={getattr(record, k)}" for k in names if getattr(record, k) != getattr(listed, k)]
    return f"{record.id} with {', '.join(changed)}" if changed else str(record.id)


def index_of(value: Any) -> int:
    """Return an integer of any library as an int. Like operator.index, but bools are rejected.

    Raise TypeError for anything that is not an integer.
    """
    if isinstance(value, (bool, np.bool_)) or str(getattr(value, "dtype", "")) == "torch.bool":
        raise TypeError("a bool")
    return operator.index(value)


def as_index(op: str, name: str, value: Any) -> int:
    """Return an argument that is an integer of any library, such as np.int64(3), as an int.

    Raise TypeError for a bool, and for anything that is not an integer.
    """
    if type(value) is int:
        return value
    try:
        return index_of(value)
    except TypeError:
        raise TypeError(f"{op}: {name} is {written(value)}; needs an int") from None


def as_float32(op: str, name: str, value: Any, need: str) -> np.float32:
    """Return a real number of any library, or an array of one element, as float32. Too large numbers become infinite.

    Raise TypeError for anything else, such as a string or a complex number, also in an array.

    need: the end of the message, such as "needs a number".
    """
    dtype = getattr(value, "dtype", None)
    is_real = "complex" not in str(dtype) and getattr(dtype, "kind", "f") not in "OSUmM"
    if not is_real or not hasattr(value, "__float__") or math.prod(getattr(value, "shape", ())) != 1:
        raise TypeError(f"{op}: {name} is {written(value)}; {need}")
    with np.errstate(over="ignore"):
        try:
            return np.float32(float(value.reshape(()) if getattr(value, "shape", ()) else value))
        except OverflowError:  # an int that no float64 holds
            return np.float32(np.inf if value > 0 else -np.inf)


def as_shape(op: str, shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple of ints.

    Raise TypeError unless it is an iterable of ints (bools are not ints here), and ValueError if a length is negative.
    """
    try:
        found = tuple(map(index_of, shape))
    except TypeError:
        raise TypeError(f"{op}: shape is {written(shape)}; needs a tuple of ints, the shape of x") from None
    if found and min(found) < 0:
        raise ValueError(f"{op}: shape is {shape!r}; needs lengths >= 0")
    return found


# {argument name that other libraries use: (fp4kit's parameter, the advice in the error message)}
_OTHER_NAMES = {
    "block_size": ("recipe", "the recipe sets it; pass dataclasses.replace(fp4kit.recipe(...), block=(1, 32))"),
    "block": ("recipe", "the recipe sets it; pass dataclasses.replace(fp4kit.recipe(...), block=(1, 32))"),
    "group_size": ("recipe", "the recipe sets it; pass dataclasses.replace(fp4kit.recipe(...), block=(1, 32))"),
    "dim": ("axis", "use axis"),
    "amax": ("tensor_amax", "use tensor_amax"),
    "scale": ("block_scale", "use block_scale and tensor_scale"),
    "scales": ("block_scale", "use block_scale and tensor_scale"),
    "global_scale": ("tensor_scale", "use tensor_scale, which multiplies on decode"),
    "stochastic": ("rounding", "use rounding='stochastic' with a seed"),
    **{
        name: ("wishes", f"use wishes=Wishes({name}=...)")
        for name in ("keep", "only", "include", "preset", "like", "keep_first", "keep_last")
    },
    "exclude": ("wishes", "use wishes=Wishes(keep=...)"),
    **{
        name: ("options", f"use options=Options({name}=...)")
        for name in ("workers", "executor", "devices", "resume", "progress", "processes")
    },
    "device": ("options", "use options=Options(devices=[0])"),
    "dry_run": ("codes", "print(make_plan(...)) shows what would be done"),
    "bits": ("codes", "assign_recipes(source, bits) gives the recipe and recipes to pass"),
}


def check_call(function: Callable[..., Any], args: Sequence[Any], names: Collection[str]) -> None:
    """Raise TypeError with a helpful message if a call that raised TypeError contains a frequent mistake.

    These mistakes are looked for, in this order: too many positional arguments, a keyword that the function does not
    have, a missing recipe, and any other missing argument. If the call has none of them, return None; the caller then
    raises the original error again.

    function: the function that was called. args: the positional arguments. names: the names of the keyword arguments.
    """
    parameters = signature(function).parameters
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(positional):
        named = next((f"; name the others, such as {name}=..." for name in parameters if name not in positional), "")
        raise TypeError(
            f"{function.__name__}: got {len(args)} arguments without a name; needs {', '.join(positional)}{named}"
        )
    for name in names:
        if name not in parameters:
            raise no_argument(function.__name__, name, parameters)
    required = [name for name in positional[len(args) :] if parameters[name].default is Parameter.empty]
    if "recipe" in required and "recipe" not in names:
        raise TypeError(
            f"{function.__name__}: recipe is missing; needs an id such as 'nvfp4-te'; fp4kit.recipes() lists the ids"
        )
    missing = [name for name in required if name not in names]
    if missing:
        raise TypeError(f"{function.__name__}: {missing[0]} is missing; needs {', '.join(positional)}")


def explains_calls(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that its errors speak of its arguments.

    A call with wrong arguments raises the TypeError of ``check_call``. Other errors name arguments, as ``in_python``
    writes them, in place of options of the command line.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True  # pytest leaves this frame out of tracebacks
        try:
            return function(*args, **kwargs)
        except TypeError:
            check_call(function, args, kwargs)
            raise
        except ValueError as error:
            name_arguments(error, signature(function).parameters)
            raise

    return call


def explains_class(cls: type[T]) -> type[T]:
    """Decorate a class so that wrong arguments, also of dataclasses.replace, raise the TypeError of ``check_call``."""
    make = cls.__init__

    @wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            make(self, *args, **kwargs)
        except TypeError:
            check_call(cls, args, kwargs)
            raise

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


# {type of an argument, or the name of its class: what a message calls it}
_KINDS: dict[Any, str] = {
    str: "a string",
    Path: "a path",
    bool: "True or False",
    float: "a number",
    Callable: "a function",
    Mapping: "a mapping (such as a dict)",
    Iterable[str]: "a glob, or several",
    Sequence[str]: "a string, or several",
    Iterable[str | Path]: "several paths",
    type(None): "None",
    "Options": "Options(...)",
    "Plan": "the result of make_plan",
    "Recipe": "a recipe (its id or a Recipe)",
    "Rules": "a Rules, such as Rules.of('nvfp4-te')",
    "ScaleSearch": "a ScaleSearch (such as ScaleSearch.of('mse'))",
    "Wishes": "Wishes(...)",
}
_PAIRS = "(pattern, recipe) pairs, such as [('*.down_proj', 'mxfp4-ocp')]"


def _of_kind(value: Any, hint: Any) -> Any:
    """Return a value of the type ``hint`` in its standard form. Raise TypeError or ValueError for any other value."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        for one in inner:
            with suppress(TypeError, ValueError):
                return _of_kind(value, one)
    elif kind in (bool, int):
        return (as_flag if kind is bool else as_index)("", "", value)
    elif kind is float:
        as_float32("", "", value, "")
        return value
    elif kind in (Iterable, Sequence) and Any not in get_args(inner[0]):  # tensors are not read ahead
        is_one = isinstance(value, str) and hint in _KINDS
        return (value,) if is_one else tuple(_of_kind(one, inner[0]) for one in value)
    elif kind is tuple:
        first, second = value if isinstance(value, (tuple, list)) else ()
        return _of_kind(first, inner[0]), _of_kind(second, inner[1])
    elif callable(value) if kind is Callable else isinstance(value, os.PathLike if kind is Path else kind):
        return value
    raise TypeError


def _in_words(hint: Any) -> str:
    """Return what an argument of the type ``hint`` must be."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    names = [getattr(get_origin(kind) or kind, "__name__", "") for kind in kinds]
    texts = []
    for kind, name in zip(kinds, names, strict=True):
        if kind is str and {"Path", "Recipe"} & {*names}:
            continue  # the path or the recipe that follows is named
        known = next((_KINDS[key] for key in (kind, get_origin(kind), name) if key in _KINDS), "")
        entry = get_args(kind)[0] if get_origin(kind) in (Iterable, Sequence) else None
        if get_origin(entry) is tuple:
            known = "(name, array) pairs" if Any in get_args(entry) else _PAIRS
        texts.append(known or with_article(name))
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def checks_kinds(function: Callable[P, T], types: Mapping[str, Any] | None = None) -> Callable[P, T]:
    """Decorate a function so that it gets arguments of the types of its annotations, in their standard form.

    Any other argument raises TypeError before any work. If several strings may be given, one string counts as one, not
    as its letters. Errors are as ``explains_calls`` writes them.

    types: {parameter: type}, of parameters that the function itself does not annotate.
    """
    known = signature(function)

    @cache  # at the first call, because annotations may name what a module defines later
    def hints() -> Mapping[str, Any]:
        own = {one.name: one.annotation for one in known.parameters.values() if one.name not in (types or {})}
        return {**get_type_hints(SimpleNamespace(__annotations__=own), function.__globals__), **(types or {})}

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            bound = known.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{function.__name__}: {error}") from None
        for name, value in bound.arguments.items():
            try:
                bound.arguments[name] = _of_kind(value, hints()[name])
            except (TypeError, ValueError):
                needed = _in_words(hints()[name])
                raise TypeError(f"{function.__name__}: {name} is {written(value)}; needs {needed}") from None
        return function(*bound.args, **bound.kwargs)

    return explains_calls(call)


IN_COMMAND: ContextVar[bool] = ContextVar("in_command", default=False)  # True while a command of fp4kit runs
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)(?: ('[^']*'|[\w*?.\[\]:+/-]*[\w*\]](?:=\.\.\.)?))?")
_COMMAND = re.compile(r"fp4kit [a-z]+[^;:`]*")  # a command to run, whose options stay
_SWITCHES = ("requantize", "allow-loss", "all-rows", "resume")
_IN_WISHES = ("keep", "only", "include", "keep-first", "keep-last", "preset", "like")
_LISTS = ("keep", "only", "include", "ignore", "hadamard-only")
# {option: values that are words}. Any other word that follows an option is text, unless it is upper case.
_WORDS = {
    "format": ("modelopt", "gguf", "mlx", "comfy"),
    "nonfinite": ("keep", "saturate", "error"),
    "unseen-experts": ("layer", "none"),
    "engine": ("transformers",),
}
# {option: (parameter, how Python gives the value {})}, of options whose parameter has another name
_SPELLED = {
    **{name: ("wishes", f"wishes=Wishes({name.replace('-', '_')}={{}})") for name in _IN_WISHES},
    "scale-search": ("search", "search=ScaleSearch.of({})"),
    "column-weights": ("search", "search=ScaleSearch.of(..., columns={})"),
    "imatrix": ("search", "search=ScaleSearch.of(..., imatrix={})"),
    "activation-rule": ("activations", "activations=Activations.of(..., rule={})"),
    "unseen-experts": ("activations", "activations=Activations.of(..., unseen={})"),
    **{name: ("options", f"options=Options({name}={{}})") for name in ("resume", "workers")},
    "device": ("options", "options=Options(devices={})"),
}


def in_python(text: str, parameters: Collection[str]) -> str:
    """Return a message with the arguments of a function in place of options of the command line.

    ``--nonfinite keep`` becomes ``nonfinite='keep'``, and ``--keep`` becomes ``wishes=Wishes(keep=...)``, or
    ``exclude=...`` if the function has it. Options that fit no parameter stay.

    parameters: the names of the function's parameters. For a method, or with a plan or rules, all options count.
    """

    commands = [found.span() for found in _COMMAND.finditer(text)]

    def argument(found: re.Match[str]) -> str:
        option, value = found.group(1), found.group(2) or ""
        own = option.replace("-", "_")
        name, how = _SPELLED.get(option, (own, f"{own}={{}}"))
        if option == "keep" and "exclude" in parameters:
            name, how = "exclude", "exclude={}"
        if option == "recipe" and value.endswith("=..."):
            return f"recipes=[({value.removesuffix('=...')!r}, ...)]"
        is_of_command = any(start <= found.start() < end for start, end in commands)
        if is_of_command or (name not in parameters and not {"plan", "rules", "self"} & {*parameters}):
            return found[0]
        is_value = value in _WORDS.get(option, ()) or value.isupper() or not value.isalpha()
        is_value |= found.start() == 0 and text[found.end() :].startswith(":")
        if not value or option in _SWITCHES or not is_value:
            return how.format("True" if option in _SWITCHES else "...") + (value and f" {value}")
        is_plain = value.startswith("'") or value.isupper() or value.replace(".", "").lstrip("-").isdigit()
        given = value if is_plain else repr(value)
        return how.format(f"[{given}]" if option in _LISTS else given)

    return _OPTION.sub(argument, text)


def name_arguments(error: ValueError, parameters: Collection[str]) -> None:
    """Write the message of an error with arguments in place of options, unless the command line will print it."""
    if not IN_COMMAND.get() and error.args and "--" in str(error.args[0]) and str(error) == error.args[0]:
        error.args = (in_python(error.args[0], parameters), *error.args[1:])


def spelled(name: str) -> str:
    """Return how a user writes the argument ``name``: as an option while a command runs."""
    return "--" + name.replace("_", "-") if IN_COMMAND.get() else name


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the line of the caller's program that called fp4kit."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "fp4kit":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def suggestion(name: str, known: Iterable[str], most: int = 1) -> str:
    """Return ``; did you mean X?`` with the names in ``known`` that are closest to ``name``, or "" if none is close."""
    closest = get_close_matches(name, list(known), n=most)
    return f"; did you mean {' or '.join(closest)}?" if closest else ""


def only_public(module: dict[str, Any]) -> None:
    """Let dir() of a module, given by its globals(), show only __all__, and errors suggest these names."""

    def missing(name: str) -> Any:
        near = suggestion(name, module["__all__"])
        raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}{near}", name=name)

    module["__dir__"] = lambda: list(module["__all__"])
    module["__getattr__"] = missing  # set here, because type checkers accept any attribute beside a def __getattr__


def no_argument(op: str, name: str, known: Collection[str]) -> TypeError:
    """Return the error for a keyword that a function does not have. known: the keywords that it has."""
    change = f"use dataclasses.replace(fp4kit.recipe(...), {name}=...)"
    parameter, way_out = ("id", change) if op == "recipe" else _OTHER_NAMES.get(name, ("", ""))
    if parameter not in known:
        similar = get_close_matches(name, known, n=1)
        way_out = f"did you mean {similar[0]}?" if similar else f"the arguments are {', '.join(known)}"
    return TypeError(f"{op}: there is no argument {name}; {way_out}")


def is_one_of(value: Any, names: Collection[str]) -> bool:
    """Return True if `value` is a string among `names`, otherwise False.

    Unlike ``value in names``, this works for every object, also for an array or a list.
    """
    return isinstance(value, str) and value in names


def as_flag(op: str, name: str, value: Any) -> bool:
    """Return a flag, an argument that is True or False, as a bool.

    Bools of Python and NumPy and the ints 0 and 1 are accepted. Raise TypeError for anything else.
    """
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise TypeError(f"{op}: {name} is {written(value)}; needs True or False")


def as_word(op: str, name: str, value: Any) -> str:
    """Return an argument that is a string, unchanged. Raise TypeError for anything else."""
    if isinstance(value, str):
        return value
    raise TypeError(f"{op}: {name} is {written(value)}; needs a string")


def as_indices(op: str, name: str, values: Any) -> list[int]:
    """Return an argument that consists of integers of any library, such as a tuple or an array, as a list of ints.

    Raise TypeError if it is not iterable, or if an entry is a bool or not an integer.
    """
    try:
        return [index_of(value) for value in values]
    except TypeError:
        raise TypeError(f"{op}: {name} is {written(values)}; needs a sequence of ints") from None


def as_mapping(op: str, name: str, value: Any) -> Mapping[Any, Any]:
    """Return an argument that is a mapping, such as a dict, unchanged. Raise TypeError for anything else."""
    if isinstance(value, Mapping):
        return value
    raise TypeError(f"{op}: {name} is {a_type(value)}; needs a mapping, such as a dict")


def as_entries(op: str, name: str, value: Any, of: str = "arrays") -> Any:
    """Return a list or tuple unchanged. Convert any other iterable to a list. ``of`` are its entries in the message.

    Raise TypeError if `value`, the argument `name` of the function op, is not iterable.
    """
    if isinstance(value, (list, tuple)):
        return value
    try:
        return list(value)
    except TypeError:
        raise TypeError(f"{op}: {name} is {a_type(value)}; needs a sequence of {of}") from None


def as_path(op: str, path: Any) -> Path:
    """Return the argument path as a Path. It need not exist.

    Raise TypeError unless it is a str or another path. Raise ValueError for "", "." and "/", whose last part cannot be
    the name of a file.
    """
    try:
        found = Path(path)
    except TypeError:
        raise TypeError(f"{op}: path is {path!r:.60}; needs a str or another path") from None
    if not found.name:
        raise ValueError(f"{op}: path is {path!r:.60}; needs a path that ends with the name of a file")
    return found


# Other programs open files with these names as their own formats.
_OTHER_SUFFIXES = tuple(".npz .npy .pt .pth .bin .ckpt .pkl .gguf .onnx .h5 .hdf5 .msgpack .json .zip .xml".split())


def as_safetensors_path(op: str, path: Any) -> Path:
    """Return the argument path, to which a safetensors file is written, as a Path.

    Raise an error like as_path, and ValueError for the suffix of another format.
    """
    found = as_path(op, path)
    if found.suffix.lower() in _OTHER_SUFFIXES:
        raise ValueError(
            f"{op}: path is {str(path)!r}, but a safetensors file is written; needs a name that ends in .safetensors"
        )
    return found


class Flag(NamedTuple):
    """An option of a command. ``how`` are further arguments of argparse's add_argument."""

    name: str
    help: str
    how: dict[str, Any]
    section: str = ""


def flag(name: str, help: str, section: str = "", **how: Any) -> Flag:
    """Return a Flag."""
    return Flag(name, help, how, section)
