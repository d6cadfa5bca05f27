"""Define Contract: the settings that determine the bits with which a trainer or a server computes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from fp4kit.arguments import a_type, as_index, as_word, explains_class, is_one_of
from fp4kit.layouts.kv import KVLayoutName, as_layout
from fp4kit.lazy import FUNCTIONS
from fp4kit.recipes import Recipe, name_for_inputs, recipe_of
from fp4kit.recipes.table import as_data, from_data, is_listed, recipe
from fp4kit.reference.stochastic import HADAMARD_BLOCK
from fp4kit.storage.files import CheckpointError, dump_object, load_object, shown, whole_file, write_file
from fp4kit.training.settings import FLAGS, FakeQuantSettings
from fp4kit.units import KINDS, UNITS, Unit, unit_of
from fp4kit.units import from_spec as unit_from_spec
from fp4kit.units import to_spec as unit_spec

# field of a recipe -> its name in texts
_NAMES = {
    "scale": "scale format",
    "element": "element format",
    "block_rule": "rule of the block scale",
    "tensor_scaling": "tensor scale per",
    "tensor_rule": "rule of the tensor scale",
    "decode_rule": "rule of decoding",
    "fake_rule": "rule of fake_quantize",
    "apply": "factor applied by",
    "amax_nan": "NaN in an amax",
    "four_over_six": "4over6 mode",
    "scale_max": "largest block scale",
    "fast_error": "fast 4over6 errors",
    "flush": "subnormals flushed",
    "round_scaled": "quotients rounded to the dtype of x",
    "search": "scale search",
    "static": "calibrated block amaxes",
    "narrow": "integers without -max - 1",
    "fake_only": "fake quantizer only",
}
_ONLY_DECODING = {"decode_rule", "fake_rule"}
_MANY = 4  # at most this many entries of a list are shown


def setting_text(value: Any) -> str:
    """Return a setting of a contract as text."""
    if isinstance(value, Recipe | Unit):
        return value.title
    if isinstance(value, tuple):
        parts = [_entry(one) for one in value[:_MANY]]
        more = f" and {len(value) - _MANY} more" if len(value) > _MANY else ""
        return (", ".join(parts) or "none") + more
    return "none" if value is None else str(value)


def difference(a: Any, b: Any) -> str:
    """Return text that says how two unequal settings differ."""
    if isinstance(a, Recipe) and isinstance(b, Recipe):
        return f"{a.id} and {b.id}: {', '.join(recipe_difference(a, b))}"
    if isinstance(a, tuple) and isinstance(b, tuple):
        only_a, only_b = (tuple(x for x in one if x not in other) for one, other in ((a, b), (b, a)))
        variants = [f"{x[0]}: {difference(x[1], y[1])}" for x in only_a for y in only_b if _are_variants(x, y)]
        if variants and len(variants) == len(only_a) == len(only_b):
            return "; ".join(variants)
        ends = (("first", only_a), ("second", only_b))
        return "; ".join(f"only the {end} has {setting_text(one)}" for end, one in ends if one) or "other order"
    if isinstance(a, Unit) and isinstance(b, Unit) and a.id == b.id:
        return f"{a.id} with other values of {', '.join(_differing(a, b))}"
    return f"{setting_text(a)} and {setting_text(b)}"


def _are_variants(a: Any, b: Any) -> bool:
    """Return whether a and b are (pattern, recipe) pairs with equal patterns and recipes of one id."""
    if isinstance(a, str) or isinstance(b, str) or a[0] != b[0]:
        return False
    return isinstance(a[1], Recipe) and isinstance(b[1], Recipe) and a[1].id == b[1].id


def _differing(a: Any, b: Any) -> list[str]:
    """Return the names of the fields in which two recipes or two units differ."""
    return [one.name for one in fields(a) if getattr(a, one.name) != getattr(b, one.name)]


def only_decoding(a: Recipe, b: Recipe) -> bool:
    """Return whether all fields that determine bits are equal in two recipes, except those about decoding."""
    return {*_differing(a, b)} <= {*_PROSE, *_ONLY_DECODING}


def recipe_difference(a: Recipe, b: Recipe) -> list[str]:
    """Return texts that say how two recipes differ, for a message."""
    found = [
        f"{_NAMES.get(name, name.replace('_', ' '))} {_value(a, name)} and {_value(b, name)}"
        for name in _differing(a, b)
        if name not in _PROSE
    ]
    if not found:
        found = ["equal arithmetic under two names"]
    elif only_decoding(a, b) and not a.fake_only:
        found.append("so codes and scales are equal, and values may differ")
    if a.producer == b.producer and a.versions != b.versions and a.versions and b.versions:
        found.append(f"versions {a.versions} and {b.versions}")
    return found


def _value(r: Recipe, name: str) -> str:
    """Return the value of the field ``name`` of a recipe as text; "none" for None and ""."""
    value = getattr(r, name)
    return "none" if value in (None, "") else str(value.name if name in ("element", "scale") else value)


def _entry(value: Any) -> str:
    """Return an entry of a list as text: a word, "PATTERN=RECIPE", or a group of names in parentheses."""
    if isinstance(value, str):
        return value
    if len(value) == 2 and (value[1] is None or isinstance(value[1], Recipe)):
        return f"{value[0]}={'unquantized' if value[1] is None else value[1].title}"
    return "(" + " ".join(value) + ")"


_T = TypeVar("_T", dict[str, Any], list[Any], str)
FILE = "fp4kit_contract.json"
VERSION = 1
_KEY = "fp4kit_contract"
_PROSE = ("id", "source", "exact", "versions")  # fields of a recipe on which no bit depends
_RECIPES = ("weights", "activations", "kv_cache")


def _recipe_data(r: Recipe) -> dict[str, Any]:
    """Return a recipe as JSON data, from which _recipe_from makes the recipe again."""
    if not is_listed(r):
        data = as_data(r)
        assert isinstance(data, dict)
        return data
    versions = {} if r.versions is None else {"versions": list(r.versions)}
    # With the facts, _recipe_from notices if a later version of fp4kit changed the recipe.
    return {"id": r.id, **versions, "facts": _facts(r)}


def _facts(r: Recipe) -> dict[str, Any]:
    """Return the fields of a recipe that determine bits and differ from their defaults, as JSON data."""
    found = {}
    for one in fields(r):
        value = getattr(r, one.name)
        if one.name in _PROSE or value is None or (one.default is not MISSING and value == one.default):
            continue
        found[one.name] = value.name if one.name in ("element", "scale") else value
    facts: dict[str, Any] = json.loads(json.dumps(found))
    return facts


def _recipe_from(name: str, data: Any) -> Recipe:
    """Return the recipe that JSON data describes."""
    if not isinstance(data, Mapping) or "element" in data:
        try:
            return from_data(data)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from None
    strange = [key for key in data if key not in ("id", "versions", "facts")]
    if strange:
        raise ValueError(f"{name}: unknown key {strange[0]!r}; a later version of fp4kit may support it")
    r = recipe(_checked(f"{name}: id", data.get("id"), str))
    _checked(f"{name}: versions", data.get("versions", []), list)
    stated, own = _checked(f"{name}: facts", data.get("facts", {}), dict), _facts(r)
    for key in dict.fromkeys((*stated, *own) if stated else ()):
        if stated.get(key) != own.get(key):
            raise ValueError(
                f"{name}: {r.id} has {key} {own.get(key)!r:.60} in this version of fp4kit, and {stated.get(key)!r:.60}"
                " in the contract; install the version that wrote it, or write the contract again"
            )
    return r


def _patterns_from(name: str, data: Any) -> list[tuple[Any, Recipe | None]]:
    """Return the (pattern, recipe) pairs that JSON data describes."""
    found = []
    for pair in _checked(name, data, list):
        if not isinstance(pair, list) or len(pair) != 2:
            raise TypeError(f"patterns has {pair!r:.60}; needs pairs of a layer pattern and a recipe")
        found.append((pair[0], None if pair[1] is None else _recipe_from(f"pattern {pair[0]}", pair[1])))
    return found


def _unit_from(name: str, data: Any) -> Unit | str:
    """Return the id of a known unit unchanged, or the Unit that an object of fields describes."""
    if isinstance(data, str):
        if data not in UNITS:
            raise ValueError(f"unit is {data!r:.60}; needs one of {', '.join(UNITS)}, or an object of fields")
        return data
    for name in KINDS:
        if _checked("unit", data, dict).get(name) is not None:
            _checked(f"unit: {name}", data[name], dict)
    try:
        return unit_from_spec(json.dumps(data))
    except (ValueError, TypeError) as error:
        raise ValueError(f"unit: {error}") from None


def _checked(name: str, value: Any, kind: type[_T]) -> _T:
    """Return a value of JSON data unchanged."""
    if not isinstance(value, kind):
        need = {dict: "an object", list: "a list", str: "a string"}[kind]
        raise TypeError(f"{name} is {value!r:.60}; needs {need}")
    return value


# field -> functions that convert its value to JSON data, and (name, data) back; other fields are text, numbers or lists
_JSON: dict[str, tuple[Callable[[Any], Any], Callable[[str, Any], Any]]] = {
    **dict.fromkeys(_RECIPES, (_recipe_data, _recipe_from)),
    "patterns": (lambda pairs: [[one, None if r is None else _recipe_data(r)] for one, r in pairs], _patterns_from),
    "unit": (lambda unit: json.loads(spec) if (spec := unit_spec(unit)).startswith("{") else spec, _unit_from),
    "inferred": (dict, lambda name, data: list(_checked(name, data, dict).items())),
}

OP = "Contract"
INPUT_SCALES = ("dynamic", "static")
ServedDtype: TypeAlias = Literal["float32", "float16", "bfloat16"]
SERVED_DTYPES: tuple[str, ...] = get_args(ServedDtype)
_ABOUT = ("unknown", "inferred")  # the fields about other fields
_WEIGHT = ".weight"


@dataclass(frozen=True)
class ContractDiff:
    """How two contracts differ, in words. It prints as one line per difference or unknown setting.

    Attributes:
        differences: one text per setting that differs, which begins with the name of the setting.
        uncertain: one text per setting that is unknown in one or both of the contracts.

    Examples:
        >>> import fp4kit
        >>> a = fp4kit.Contract("nvfp4-te", unit="sm100")
        >>> print(a.diff(fp4kit.Contract("nvfp4-te", unit="exact")))
        unit: sm100 and exact
    """

    differences: tuple[str, ...] = ()
    uncertain: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """True if no setting differs and none is unknown."""
        return not self.differences and not self.uncertain

    def __str__(self) -> str:
        """Return one line per difference, then one line per unknown setting."""
        return "\n".join((*self.differences, *self.uncertain)) or "the contracts are equal"

    def __repr__(self) -> str:
        """Return how many settings differ and how many are unknown, in one line."""
        return f"ContractDiff(settings that differ: {len(self.differences)}, unknown: {len(self.uncertain)})"


@explains_class
@dataclass(frozen=True)
class Contract:
    """The settings that determine the bits with which a trainer or a server computes.

    A trainer and a server that follow equal contracts compute with equal weights, activations and products. A contract
    is a small JSON file. `fp4kit convert` writes it beside the manifest.

    A setting of None means that the part is not quantized, or that the setting is not used. A setting that nobody
    stated is listed in `unknown` instead. Layers have the names of modules, such as "model.layers.0.mlp.up_proj".
    Patterns are wildcards (fnmatch; case matters).

    Attributes:
        weights: the recipe of the weights, with its version, block, rounding, 4over6 mode and largest block scale; an
            id or a Recipe. It applies to the layers that neither `patterns` nor `excluded` matches.
        patterns: (layer pattern, recipe or None) pairs. The first pattern that matches a layer decides.
        excluded: patterns of layers that stay unquantized, whatever `patterns` says.
        shared_amax: groups of leaf names, such as (("gate_proj", "up_proj"),). Layers of one parent module whose leaf
            names are in one group share their largest tensor amax. Other layers have an amax of their own.
        activations: the recipe of the inputs of quantized layers.
        input_scales: "dynamic" if the tensor amax of activations is measured in each call, "static" if it is stored.
        served_dtype: the dtype to which loaders decode the weights, "float32", "float16" or "bfloat16"; None for that
            of the model.
        kv_cache: the recipe of the KV cache.
        kv_layout: the layout of its pages, a name in fp4kit.layouts.kv.KV_LAYOUTS.
        unit: the matrix unit that multiplies; a Unit or its id.
        hadamard: the size of a Hadamard transform of weights and activations along K: 16, 32, ... 512. If it is
            16, without signs or with Transformer Engine's signs, `quantize(hadamard=...)` defines the transform.
            Otherwise `fp4kit.hadamard` does.
        hadamard_signs: the signs of the transform's inputs, such as "+--+"; as many as its size. None for no signs.
        scale_search: how block scales were searched, such as "mse". None if the recipe alone determines the scales.
        container: the container of the weights, such as "modelopt NVFP4". If it is stated, a layer of zeros has the
            scales that convert stores: block scales 0 and tensor scale 1.
        unknown: the names of settings that nobody stated. They have their default values.
        inferred: (setting, how it was found) pairs, for settings that were not stated but inferred.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a name is unknown, or fields do not fit together.

    Examples:
        >>> import fp4kit
        >>> trainer = fp4kit.Contract("nvfp4-te", activations="nvfp4-te", unit="sm100")
        >>> print(trainer.diff(fp4kit.Contract("nvfp4-te", unit="sm90")))
        activations: nvfp4-te and none
        unit: sm100 and sm90
    """

    weights: Recipe | None = None
    patterns: tuple[tuple[str, Recipe | None], ...] = ()
    excluded: tuple[str, ...] = ()
    shared_amax: tuple[tuple[str, ...], ...] = ()
    activations: Recipe | None = None
    input_scales: Literal["dynamic", "static"] | None = None
    served_dtype: ServedDtype | None = None
    kv_cache: Recipe | None = None
    kv_layout: KVLayoutName | None = None
    unit: Unit | None = None
    hadamard: int | None = None
    hadamard_signs: str | None = None
    scale_search: str | None = None
    container: str | None = None
    unknown: tuple[str, ...] = ()
    inferred: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        recipes: dict[str, Any] = {name: getattr(self, name) for name in _RECIPES}
        values: dict[str, Any] = {name: None if r is None else recipe_of(OP, r) for name, r in recipes.items()}
        pairs = _entries("patterns", self.patterns)
        for pair in pairs:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise TypeError(f"{OP}: patterns has {pair!r:.60}; needs pairs of a layer pattern and a recipe")
        values["patterns"] = tuple(
            (as_word(OP, "a pattern", one), None if r is None else recipe_of(OP, r)) for one, r in pairs
        )
        values["excluded"] = tuple(sorted({*_words("excluded", self.excluded)}))
        groups = (_words("a group of shared_amax", group) for group in _entries("shared_amax", self.shared_amax))
        values["shared_amax"] = tuple(sorted(tuple(sorted(group)) for group in groups))
        values["unit"] = None if self.unit is None else unit_of(OP, self.unit)
        values["hadamard"] = None if self.hadamard is None else as_index(OP, "hadamard", self.hadamard)
        if self.kv_layout is not None:
            as_layout(OP, self.kv_layout)
        for name in ("scale_search", "container", "hadamard_signs"):
            if getattr(self, name) is not None:
                as_word(OP, name, getattr(self, name))
        values["unknown"] = _words("unknown", self.unknown)
        values["inferred"] = tuple(_words("a pair of inferred", one) for one in _entries("inferred", self.inferred))
        for name, value in values.items():
            object.__setattr__(self, name, value)
        for fault in self._faults():
            if fault:
                raise ValueError(f"{OP}: {fault}")
        object.__setattr__(self, "unknown", tuple(name for name in SETTINGS if name in self.unknown))

    def _faults(self) -> Iterator[str | bool]:
        """Yield a text per rule that the values break, and False for the other rules."""
        is_known = self.input_scales is None or is_one_of(self.input_scales, INPUT_SCALES)
        yield not is_known and f"input_scales is {self.input_scales!r:.60}; needs 'dynamic', 'static' or None"
        is_known = self.served_dtype is None or is_one_of(self.served_dtype, SERVED_DTYPES)
        yield not is_known and f"served_dtype is {self.served_dtype!r:.60}; needs {', '.join(SERVED_DTYPES)} or None"
        names = [name for group in self.shared_amax for name in group]
        for group in self.shared_amax:
            twice = [name for name in group if names.count(name) > 1]
            yield bool(twice) and f"shared_amax has {twice[0]!r} twice; needs each leaf name once"
            yield len(group) < 2 and f"shared_amax has the group {group!r}; needs two or more leaf names per group"
        size, signs = self.hadamard, self.hadamard_signs
        fits = size is None or (HADAMARD_BLOCK <= size <= 512 and not size & (size - 1))
        yield not fits and f"hadamard is {size}; needs 16, 32, 64, 128, 256, 512 or None"
        needed = f"{size} of the characters + and -" if size else "None, because hadamard is None"
        fits = signs is None or (not signs.strip("+-") and len(signs) == (size or 0))
        yield not fits and f"hadamard_signs is {signs!r:.60}; needs {needed}"
        is_pair = all(len(pair) == 2 for pair in self.inferred)
        yield not is_pair and f"inferred is {self.inferred!r:.60}; needs pairs of a setting and how it was found"
        for name in (*self.unknown, *(name for name, _ in self.inferred)):
            yield name not in SETTINGS and f"{name!r:.60} is not a setting; needs one of {', '.join(SETTINGS)}"
        for name in self.unknown:
            is_stated = getattr(self, name) not in (None, ())
            yield is_stated and f"{name} has a value, but is listed as unknown; remove it from unknown"

    @classmethod
    def of(cls, path: str | Path, *, source: str | Path | None = None) -> Contract:
        """Return the contract that is stored in a checkpoint, or infer a contract from its config and tensors.

        Without a contract file, settings are inferred from fp4kit's record in the config, from the names of tensors
        and from tensor scales. If fp4kit recorded no recipe and `source` is given, the recipe is identified from the
        bytes. Settings that cannot be inferred are listed in `unknown`, for example those of the server that will load
        the checkpoint. `weights` is unknown too if a conversion kept the codes of some layers and computed new codes
        for others, unless one recipe made both.

        Args:
            path: a contract file (.json), a model directory, a .safetensors file or a GGUF file.
            source: the unquantized model that the checkpoint was made from. If None, no recipe is identified.

        Returns:
            The Contract.

        Raises:
            CheckpointError: there is no checkpoint at this path, the checkpoint or its contract file is malformed, or
                fp4kit cannot read the format in which the layers are quantized.

        Examples:
            >>> import numpy as np, tempfile, fp4kit, fp4kit.checkpoint
            >>> from safetensors.numpy import save_file
            >>> folder = tempfile.mkdtemp()
            >>> save_file({"up_proj.weight": np.ones((32, 64), np.float32)}, f"{folder}/w.safetensors")
            >>> made = fp4kit.checkpoint.convert(f"{folder}/w.safetensors", f"{folder}/served", "nvfp4-te")
            >>> contract = fp4kit.Contract.of(made.destination)
            >>> contract.weights.id, contract.unknown
            ('nvfp4-te', ('served_dtype', 'kv_cache', 'kv_layout', 'unit'))
        """
        found: Contract = FUNCTIONS["Contract.of"](path, source)
        return found

    @classmethod
    def from_settings(cls, settings: FakeQuantSettings) -> Contract:
        """Return the contract of a trainer that fake-quantizes weights by FakeQuantSettings.

        Patterns of parameters become patterns of layers, without ".weight". If the settings fake-quantize nothing,
        there are no patterns. Activations are unquantized. The settings of a server are listed in `unknown`: kv_cache,
        kv_layout and unit.

        Args:
            settings: what is fake-quantized in training.

        Returns:
            The Contract.
        """
        recipe = settings.resolved
        patterns = tuple((_layer_pattern(one), recipe) for one in settings.parameters if recipe is not None)
        return cls(
            patterns=tuple(dict.fromkeys(patterns)),
            excluded=tuple(dict.fromkeys(map(_layer_pattern, settings.exclude))),
            unknown=("kv_cache", "kv_layout", "unit"),
        )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Contract:
        """Return the contract that the environment variables `OPEN_TRAINING_...` of some trainers select.

        OPEN_TRAINING_MXFP4_FAKE_QAT_FLAG enables MXFP4 in blocks of OPEN_TRAINING_MXFP4_BLOCK_SIZE elements.
        OPEN_TRAINING_INT4_FAKE_QAT_FLAG enables INT4 in blocks of OPEN_TRAINING_INT4_GROUP_SIZE. Only one of the two
        may be on. They apply to the weights of routed experts. If both are off, no layer is quantized.

        Args:
            environ: the variables; None for the variables of this process.

        Returns:
            The Contract, with `patterns` for routed experts; without patterns if both flags are off.

        Raises:
            TypeError: environ is not a mapping.
            ValueError: both flags are on, a flag is not 0, 1 or empty, or a size is not a positive even number (also if
                its flag is off).

        Examples:
            >>> import fp4kit
            >>> contract = fp4kit.Contract.from_environment({"OPEN_TRAINING_MXFP4_FAKE_QAT_FLAG": "1"})
            >>> contract.recipe_of("model.layers.3.mlp.experts.7.up_proj").id
            'mxfp4-flashinfer'
        """
        return cls.from_settings(FakeQuantSettings.from_environment(environ))

    def environment(self) -> dict[str, str]:
        """Return the environment variables `OPEN_TRAINING_...` that select this contract's recipe of routed experts.

        The flags apply only to the weights of routed experts, so this contract must also quantize only these. This is
        judged by its recipes for the names of a few experts and other layers. All settings except weights, patterns and
        excluded are ignored.

        Returns:
            {name of a variable: its value}: a flag and a block size, and "0" for the flag of the other format.

        Raises:
            ValueError: `weights` is not None, the patterns have several recipes or none, no flag selects the recipe,
                routed experts are not quantized, or other layers are quantized.

        Examples:
            >>> import fp4kit
            >>> fp4kit.Contract(patterns=[("*.experts.*", "int4-qat")]).environment()["OPEN_TRAINING_INT4_GROUP_SIZE"]
            '128'
        """
        recipes = {recipe for _, recipe in self.patterns}
        others = any(map(self.recipe_of, _NO_EXPERTS))
        own = recipes.pop() if self.weights is None and len(recipes) == 1 and not others else None
        for flag, (id, size, _) in FLAGS.items():
            if own and own.block and own.block_rows == 1 and own == replace(recipe(id), block=own.block):
                found = dict.fromkeys(FLAGS, "0") | {flag: "1", size: str(own.block_size)}
                chosen = self.from_environment(found).patterns[0][1]
                if any(self.recipe_of(name) == chosen for name in _EXPERTS):
                    return found
        raise ValueError(
            f"{OP}: no flag selects this contract; needs weights=None and patterns that quantize routed experts alone,"
            " by mxfp4-flashinfer or int4-qat"
        )

    @classmethod
    def load(cls, path: str | Path) -> Contract:
        """Return the contract in a JSON file that `save` wrote.

        Args:
            path: the file.

        Returns:
            The Contract.

        Raises:
            CheckpointError: the file cannot be read, has another version or an unknown key, or states a fact about a
                recipe that this version of fp4kit does not share.
            TypeError, ValueError: a setting is invalid, as for Contract.
        """
        path = Path(path)
        if not path.is_file():
            raise CheckpointError(
                f"{path}: is not a file; needs a contract of fp4kit convert, fp4kit contract --out or Contract.save"
            )
        return cls._from_data(str(path), load_object(path, str(path)))

    def save(self, path: str | Path) -> None:
        """Write the contract to a JSON file, which appears only when it is complete.

        Args:
            path: the file. An existing file is replaced.

        Raises:
            OSError: the file cannot be written.
        """
        with whole_file(Path(path)) as temporary:
            write_file(temporary, dump_object(self.as_data()))

    def as_data(self) -> dict[str, Any]:
        """Return the contract as a new dict of JSON data, from which from_data returns an equal contract.

        Settings that are None or () are left out. The dict also has the version of the format.
        """
        data: dict[str, Any] = {_KEY: VERSION}
        for name in (*SETTINGS, *_ABOUT):
            value = getattr(self, name)
            if value not in (None, ()):  # otherwise tuples become lists
                data[name] = _JSON[name][0](value) if name in _JSON else json.loads(json.dumps(value))
        return data

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Contract:
        """Return the contract that JSON data describes. This is the inverse of as_data.

        Args:
            data: a JSON object, as as_data returns it.

        Returns:
            The Contract.

        Raises:
            CheckpointError: the data has another version or an unknown key, or states a fact about a recipe that this
                version of fp4kit does not share.
            TypeError, ValueError: a setting is invalid, as for Contract.
        """
        return cls._from_data(OP, data)

    @classmethod
    def _from_data(cls, label: str, data: Any) -> Contract:
        if not isinstance(data, Mapping) or type(data.get(_KEY)) is not int or data[_KEY] != VERSION:
            got = data.get(_KEY) if isinstance(data, Mapping) else data
            raise CheckpointError(f"{label}: {_KEY} is {got!r:.60}; this version of fp4kit reads version {VERSION}")
        found = {name: value for name, value in data.items() if name != _KEY}
        strange = [name for name in found if name not in (*SETTINGS, *_ABOUT)]
        if strange:
            raise CheckpointError(
                f"{label}: unknown key {shown(str(strange[0]))!r}; a later version of fp4kit may support it"
            )
        try:
            for name in (one for one in _JSON if one in found):
                if found[name] is not None or name in ("patterns", "inferred"):
                    found[name] = _JSON[name][1](name, found[name])
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{label}: {shown(str(error))}") from None
        return cls(**found)

    def diff(self, other: Contract) -> ContractDiff:
        """Describe in words in which settings two contracts differ.

        Args:
            other: the contract to compare with. Texts name the setting of this contract first.

        Returns:
            A ContractDiff. A setting that one or both contracts do not know is in its `uncertain`, not in its
            `differences`. The fields `inferred` are not compared.

        Raises:
            TypeError: other is not a Contract.
        """
        if not isinstance(other, Contract):
            raise TypeError(f"{OP}.diff: other is {a_type(other)}; needs a Contract")
        differences, uncertain = [], []
        for name in SETTINGS:
            a, b = getattr(self, name), getattr(other, name)
            hidden = [who for who, one in (("first", self), ("second", other)) if name in one.unknown]
            if hidden:
                where = "both contracts" if len(hidden) == 2 else f"the {hidden[0]} contract"
                known = "" if len(hidden) == 2 else f"; the other says {setting_text(b if hidden == ['first'] else a)}"
                uncertain.append(f"{name}: unknown in {where}{known}")
            elif a != b:
                differences.append(f"{name}: {difference(a, b)}")
        return ContractDiff(tuple(differences), tuple(uncertain))

    def stating(self, **settings: Any) -> Contract:
        """Return a copy of the contract with new values for some settings, which then count as stated.

        The copy lists them neither in `unknown` nor in `inferred`.

        Args:
            settings: new values by name, such as activations=None.

        Returns:
            The Contract.

        Raises:
            TypeError: a name is not a setting, or a value has the wrong type.
            ValueError: a value is invalid, as for Contract.

        Examples:
            >>> import fp4kit
            >>> partly = fp4kit.Contract("nvfp4-te", unknown=("unit", "activations"))
            >>> partly.stating(unit="sm100").unknown
            ('activations',)
        """
        for name in settings:
            if name not in SETTINGS:
                raise TypeError(f"{OP}.stating: there is no setting {name!r}; the settings are {', '.join(SETTINGS)}")
        unknown = tuple(name for name in self.unknown if name not in settings)
        inferred = tuple(pair for pair in self.inferred if pair[0] not in settings)
        return replace(self, unknown=unknown, inferred=inferred, **settings)

    def recipe_of(self, layer: str) -> Recipe | None:
        """Return the recipe of a layer's weight, or None if the layer stays unquantized.

        Args:
            layer: the name of the module, without ".weight".

        Returns:
            The Recipe or None.

        Raises:
            TypeError: layer is not a string.
        """
        as_word(f"{OP}.recipe_of", "layer", layer)
        if any(fnmatchcase(layer, pattern) for pattern in self.excluded):
            return None
        return next((one for pattern, one in self.patterns if fnmatchcase(layer, pattern)), self.weights)

    def group_of(self, layer: str, layers: Iterable[str]) -> tuple[str, ...]:
        """Return the names of the layers that share one tensor amax with a layer, including the layer itself.

        Layers share an amax if they have the same parent module and their leaf names are in one group of `shared_amax`.
        In an expert, a group of Mixtral's leaf names, such as w1 and w3, also stands for gate_proj and up_proj.

        Args:
            layer: the name of the module.
            layers: the names of all layers of the model, `layer` among them.

        Returns:
            The names, in the order of `layers`; only `layer` if it shares its amax with no layer in `layers`.
        """
        parent, _, leaf = layer.rpartition(".")
        groups = self.shared_amax
        if "experts" in parent.split("."):
            groups += tuple(tuple(EXPERT_LEAVES.get(one, one) for one in group) for group in groups)
        group = next((group for group in groups if leaf in group), ())
        wanted = {f"{parent}.{one}" if parent else one for one in group} | {layer}
        return tuple(name for name in layers if name in wanted) or (layer,)

    def __str__(self) -> str:
        """Return one line per setting that was inferred or has a value other than None and (), then the unknown
        ones.
        """
        how, values = dict(self.inferred), {name: getattr(self, name) for name in SETTINGS}
        if self.activations is not None:
            values["activations"] = name_for_inputs(self.activations, self.input_scales, self.weights)
        lines = [
            f"{name}: {setting_text(value)}" + (f" (inferred: {how[name]})" if name in how else "")
            for name, value in values.items()
            if value not in (None, ()) or name in how
        ]
        return "\n".join([*lines, *([f"unknown: {', '.join(self.unknown)}"] if self.unknown else [])])


# {leaf name of an expert's layer in Mixtral: usual leaf name}
EXPERT_LEAVES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
SETTINGS = tuple(one.name for one in fields(Contract) if one.name not in _ABOUT)
# names of routed experts, and of other layers, by which `environment` checks what a contract quantizes
_EXPERTS = ("model.layers.3.mlp.experts.0.up_proj", "decoder.layers.3.mlp.experts.linear_fc1")
_NO_EXPERTS = ("model.layers.3.mlp.up_proj", "model.layers.3.self_attn.q_proj", "lm_head")


def _layer_pattern(parameter: str) -> str:
    """Return the pattern of layers for a pattern of parameters: "*.experts.*" for "*.experts.*.weight"."""
    head, _, tail = parameter.rpartition(_WEIGHT)
    return head if head and (not tail or tail == "[0-9]*") else parameter


def _entries(name: str, values: Any) -> tuple[Any, ...]:
    """Return a list or tuple as a tuple. Raise TypeError for anything else, naming the field `name`."""
    if not isinstance(values, (tuple, list)):
        raise TypeError(f"{OP}: {name} is {values!r:.60}; needs a tuple")
    return tuple(values)


def _words(name: str, values: Any) -> tuple[str, ...]:
    """Return a list or tuple of strings as a tuple. Raise TypeError for anything else, naming the field `name`."""
    return tuple(as_word(OP, f"an entry of {name}", one) for one in _entries(name, values))
