"""Hold the user's request for a conversion, and find the container that fits the request and the model. A request has a
default recipe and may have further recipes, each for layers whose names match a pattern. Combinations that no loader
can read are rejected here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, SupportsFloat, TypedDict, TypeVar, get_type_hints

from fp4kit.arguments import Flag, checks_kinds, flag, suggestion
from fp4kit.calibration import RULES, UNSEEN
from fp4kit.call.parse import HADAMARD_SIZES
from fp4kit.checkpoint.containers import table
from fp4kit.checkpoint.containers.configs import ALL_FORMATS, FORMATS, MIXED, WRITTEN
from fp4kit.checkpoint.containers.engines import comfy, mlx
from fp4kit.checkpoint.convert.job import NONFINITE
from fp4kit.checkpoint.loaders import support
from fp4kit.checkpoint.model.model_files import is_gguf_config
from fp4kit.checkpoint.model.weights import WeightRotation
from fp4kit.checkpoint.plan.gguf_model import FP8_AS, GGUF
from fp4kit.checkpoint.plan.layer_recipes import LayerQuantization, Mixture, gguf_form_for, kind_of
from fp4kit.checkpoint.plan.other_models import ADAPTER_SCALES, LoraAdapter
from fp4kit.checkpoint.plan.scale_search import SEARCH_RECIPE, Activations, ActivationsLike, ScaleSearch
from fp4kit.checkpoint.selection.selection import PRESETS, Wishes, check_diffusers
from fp4kit.contract.engines import Serving, serving_of
from fp4kit.formats import FLT_MAX, FLT_MIN
from fp4kit.recipes import RECIPES, Recipe, recipe, several
from fp4kit.recipes.table import as_data, to_spec
from fp4kit.storage.files import CheckpointError, shown
from fp4kit.storage.gguf_file import bytes_of_text

ROTATED_FORMAT = "compressed-tensors"  # the only format whose config declares rotations of inputs
_UNROTATED = f"only the config of {ROTATED_FORMAT} declares rotated inputs; add --format {ROTATED_FORMAT}"


UNQUANTIZED = "bf16"
GGUF_ONLY = "nvfp4-gguf"
# The usual recipe per kind of container. The first that a format can store is the default recipe of that format.
DEFAULTS = (
    "nvfp4-te",
    "mxfp4-ocp",
    "mxfp8-te",
    "fp8-transformers-block",
    "fp8-modelopt-channel",
    "fp8-modelopt",
    GGUF_ONLY,
)


def option(
    default: Any,
    *flags: Flag,
    given: Any = MISSING,
    made: Callable[[Any], Any] = lambda value: value,
    parsed: Callable[[Any], Any] = lambda value: value,
    facts: Callable[[Request], Mapping[str, Any]] | bool = False,
) -> Any:
    """Return a field of Request that convert(), make_plan() and the command line set.

    default: the value of the field that is not given; MISSING if it must be given.
    flags: the options of ``fp4kit convert`` that set the field.
    given: the default of the keyword argument, if it differs from that of the field.
    made: the function from the keyword argument to the field.
    parsed: the function from the text on the command line to the keyword argument, if there is one flag.
    facts: what the journal's key and the manifest record: the value if it is not the default, or what a function
        makes of the request then; True to record the value always.
    """
    given = default if given is MISSING else given
    metadata = {"default": default, "flags": flags, "given": given, "made": made, "parsed": parsed, "facts": facts}
    return field(default=default, metadata=metadata)


_GLOBS: dict[str, Any] = {"action": "append", "default": [], "metavar": "GLOB"}
_SUCH_AS = ", such as 'model.layers.*.mlp.*'; repeatable"
_WHICH, _VALUES = "which layers", "values and scales"
_SEARCH, _INPUTS = "search of block scales", "input scales from activations"
Fault = tuple[str, str] | bool  # (option, what is wrong with it)


class RequestOptions(TypedDict, total=False):
    """The keyword arguments that convert() and make_plan() share: the fields of Request, as users give them."""

    format: str | None
    wishes: Wishes | None
    input_scale: float | None
    requantize: bool
    nonfinite: str
    codes: str | Path | None
    recipes: Iterable[tuple[str, str | Recipe]]
    search: ScaleSearch | None
    activations: ActivationsLike | None
    ignore: Iterable[str]
    split_max_size: int | None
    hadamard: int | None
    hadamard_seed: int | None
    hadamard_only: Iterable[str]
    adapter: str | Path | None
    adapter_scales: str
    allow_loss: bool
    fp8_as: str
    engine: str | None
    scheme: str | None


@dataclass(frozen=True)
class Request:
    """The options that the user gives for a conversion.

    This is the one home of an option: from the fields follow the parser and the page of ``fp4kit convert``, the
    signatures of convert() and make_plan() (with the types in RequestOptions), the key of the journal and the manifest.
    make_plan describes the options.

    Attributes:
        codes: the identity (see run_jobs.py) of the model from which codes are copied; "" if codes are not copied.
        made_by: the recipe that made the copied codes, as recorded; "" if codes are not copied, or if the model that
            they come from does not record it.
        chosen: why fp4kit chose this recipe, in words for the user; "" if the user named it (see make_plan.py).
        follows_layers: True if ``recipes`` follow the containers of the source's layers, and are not the user's.

    Raises:
        CheckpointError: if an option is unknown or out of range, if two options exclude each other, or if a recipe is
            for stochastic rounding alone.
    """

    recipe: Recipe = option(  # noqa: RUF009  # it returns a field
        MISSING,
        flag(
            "--recipe",
            "how layers are quantized; `fp4kit recipes` lists the recipes"
            f" (default: that of a quantized SRC, whose layers keep their codes if the format can store them; otherwise"
            f" {DEFAULTS[0]}, or, where the format cannot store it, a recipe that it can; with --scale-search"
            f" {SEARCH_RECIPE}). PATTERN=RECIPE sets the recipe of the"
            " modules that match PATTERN, a GLOB as in --only; repeatable; the first pattern that matches decides",
            action="append",
            default=[],
            metavar="[PATTERN=]RECIPE",
        ),
        facts=lambda request: {"recipe": as_data(request.recipe)},
    )
    format: str | None = option(
        None,
        flag(
            "--format",
            "container format of DST (default: that of a quantized SRC if it can store the recipe; otherwise the one"
            " that most engines load); bf16 decodes a quantized model",
            choices=ALL_FORMATS,
        ),
        facts=True,
    )
    wishes: Wishes = option(  # noqa: RUF009  # it returns a field
        Wishes(),
        flag(
            "--preset",
            "which kinds of layers to convert (default: %(default)s)",
            _WHICH,
            choices=PRESETS,
            default="linear",
        ),
        *(
            flag(
                f"--keep-{end}", f"do not convert the {end} N decoder layers", _WHICH, type=int, default=0, metavar="N"
            )
            for end in ("first", "last")
        ),
        *(
            flag(name, text + _SUCH_AS, _WHICH, **_GLOBS)
            for name, text in (
                ("--keep", "do not convert modules whose name matches"),
                ("--only", "convert only modules whose name matches"),
                (
                    "--include",
                    "convert also modules whose name matches. If SRC has quantized layers, its other layers stay"
                    " unquantized unless this option names them",
                ),
            )
        ),
        flag(
            "--like",
            "leave unquantized too what this tool leaves so by default in a model of SRC's family: modelopt or"
            " llm-compressor. A preset of the tool, such as modelopt:NVFP4_MLP_ONLY_CFG, also determines the recipe and"
            " the format unless they are given; `fp4kit recipes --presets` lists presets",
            _WHICH,
            default="",
            metavar="TOOL[:PRESET]",
        ),
        given=None,
        made=lambda wishes: wishes or Wishes(),
        facts=True,
    )
    input_scale: float | None = option(
        None,
        flag(
            "--input-scale",
            "write this uncalibrated input scale, such as 1.0, for every layer. Engines then quantize activations"
            " too (NVFP4 instead of W4A16_NVFP4)",
            _VALUES,
            type=float,
            metavar="X",
        ),
        facts=True,
    )
    requantize: bool = option(
        False,
        flag(
            "--requantize",
            "allow quantized layers to be quantized again, which loses accuracy",
            _VALUES,
            action="store_true",
        ),
        facts=True,
    )
    nonfinite: str = option(
        "error",
        flag(
            "--nonfinite",
            "what to do with NaN and infinities: error: stop; keep: quantize them as the recipe does; saturate:"
            " replace infinities by the largest finite magnitude and NaN by 0 (default: %(default)s)",
            _VALUES,
            choices=NONFINITE,
            default="error",
        ),
        facts=True,
    )
    codes: str = option(
        "",
        flag(
            "--codes",
            "take the codes from this quantized model: a directory if SRC is a GGUF file, a GGUF file if SRC is a"
            " directory",
            _VALUES,
            metavar="MODEL",
        ),
        given=None,
        facts=lambda one: {"codes": one.codes, "recipe": one.made_by, "recipe_of_form": as_data(one.recipe)},
    )
    recipes: tuple[tuple[str, Recipe], ...] = option(
        (),
        made=lambda pairs: tuple((pattern, recipe(one)) for pattern, one in pairs),
        facts=lambda request: {"recipes": [[pattern, as_data(one)] for pattern, one in request.recipes]},
    )
    search: ScaleSearch | None = option(  # noqa: RUF009  # it returns a field
        None,
        flag(
            "--scale-search",
            "search for the block scales with the smallest error, instead of computing them from the amax. ERROR is"
            " mse, mae, max, or p and a power, such as p2.4. For NVFP4, and for MXFP4 in GGUF files",
            _SEARCH,
            metavar="ERROR",
        ),
        flag(
            "--column-weights",
            "weight the error per column. FILE is a safetensors file with one float32 vector per layer, named after the"
            " layer's weight or module",
            _SEARCH,
            metavar="FILE",
        ),
        flag(
            "--imatrix",
            "weight the error per column by an importance matrix of llama.cpp: the mean square of each input channel,"
            " separately for each expert. FILE is a legacy (.dat) or GGUF file",
            _SEARCH,
            metavar="FILE",
        ),
        facts=lambda request: {"scale_search": request.search and request.search.facts()},
    )
    activations: Activations | None = option(  # noqa: RUF009  # it returns a field
        None,
        flag(
            "--activations",
            "write an input scale per layer. FILE holds the inputs that fp4kit.torch.collect or"
            " fp4kit.calibration.Collector measured; repeat the option for the files of several ranks, which are"
            " merged. NVFP4 only",
            _INPUTS,
            action="append",
            default=[],
            metavar="FILE",
        ),
        flag(
            "--activation-rule",
            "the amax from which an input scale is computed: max: the largest input; headroom: a number above the"
            " largest input, so that larger inputs do not saturate (default: max)",
            _INPUTS,
            choices=RULES,
        ),
        flag(
            "--unseen-experts",
            "what to do for experts that saw no token: error: stop and name the experts; layer: use the largest amax"
            " of the experts of their layer; none: write no input scale for them (default: error)",
            _INPUTS,
            choices=UNSEEN,
        ),
        made=lambda given: None if given is None else Activations.of(given),
        facts=lambda request: {"activations": request.activations and {**request.activations.facts}},
    )
    ignore: tuple[str, ...] = option(
        (),
        flag(
            "--ignore",
            "leave out tensors, config keys and metadata entries that match and that fp4kit does not know, instead of"
            " stopping. Decoded values may then be wrong; repeatable",
            _VALUES,
            **_GLOBS,
        ),
        made=tuple,
    )
    split_max_size: int | None = option(
        None,
        flag(
            "--split-max-size",
            "write a GGUF model as several files, DST-00001-of-00003.gguf for DST.gguf. Each has at most SIZE bytes of"
            " tensors, such as 500M or 5G, as with llama-gguf-split (default: one file)",
            metavar="SIZE",
        ),
        parsed=lambda text: None if text is None else bytes_of_text(text),
    )
    hadamard: int | None = option(
        None,
        flag(
            "--hadamard",
            "rotate every layer by a Hadamard transform of SIZE columns (16 to 512) before it is quantized, and"
            " declare in the config that engines must rotate its inputs. For --format compressed-tensors",
            _VALUES,
            type=int,
            metavar="SIZE",
        ),
    )
    hadamard_seed: int | None = option(
        None,
        flag(
            "--hadamard-seed",
            "before the Hadamard transform, multiply columns by random signs, drawn from this seed",
            _VALUES,
            type=int,
            metavar="SEED",
        ),
    )
    hadamard_only: tuple[str, ...] = option(
        (),
        flag(
            "--hadamard-only",
            "rotate only modules whose name matches, such as '*.down_proj'; repeatable (default: all that are"
            " quantized)",
            _VALUES,
            **_GLOBS,
        ),
        made=tuple,
    )
    adapter: LoraAdapter | None = option(  # noqa: RUF009  # it returns a field
        None,
        flag(
            "--adapter",
            "add the updates of this LoRA adapter, a directory that PEFT wrote, to the weights first",
            _VALUES,
            metavar="DIR",
        ),
        made=lambda path: None if path is None else LoraAdapter.of(path),
        facts=lambda one: {"adapter": one.adapter and {**one.adapter.facts, "scales": one.adapter_scales}},
    )
    adapter_scales: str = option(
        ADAPTER_SCALES[0],
        flag(
            "--adapter-scales",
            "block scales of quantized layers with an update: nearest: per block the scale of SRC or a new one,"
            " whichever has the smaller error; base: those of SRC; new: all new (default: %(default)s)",
            _VALUES,
            choices=ADAPTER_SCALES,
            default=ADAPTER_SCALES[0],
        ),
        facts=lambda request: {},
    )
    allow_loss: bool = option(
        False,
        flag(
            "--allow-loss",
            "write layers even if they lose their values, because most blocks become zero or the error is far above"
            " that of the format, and read quantized layers whose scales are certainly wrong",
            _VALUES,
            action="store_true",
        ),
    )
    fp8_as: str = option(
        FP8_AS[0],
        flag(
            "--fp8-as",
            "dtype, in a GGUF file, of quantized layers that it cannot hold as they are, such as FP8: bf16; q8_0: 8-bit"
            " integers in blocks of 32; f32: always exact (default: %(default)s)",
            _VALUES,
            choices=FP8_AS,
            default=FP8_AS[0],
        ),
    )
    engine: str | None = option(
        None,
        flag(
            "--engine",
            "the engine that will serve DST, such as transformers. With --scheme, it determines recipe and format"
            " unless they are given, and whether the config declares quantized inputs; `fp4kit contract --list` lists"
            " engines",
            metavar="ENGINE",
        ),
    )
    scheme: str | None = option(
        None,
        flag("--scheme", "with --engine: the formats of weights and activations, such as nvfp4-w4a4", metavar="SCHEME"),
    )
    made_by: str = ""
    chosen: str = ""
    follows_layers: bool = False

    @classmethod
    def of(cls, default: Recipe, options: RequestOptions) -> Request:
        """Return the request for the keyword arguments of make_plan, except ``codes``."""
        made = {name: OPTIONS[name]["made"](value) for name, value in options.items() if name != "codes"}
        return cls(default, **made)

    @property
    def facts(self) -> dict[str, Any]:
        """The request as an object for JSON, for the key of a run and for the manifest."""
        found: dict[str, Any] = {}
        for name, one in OPTIONS.items():
            value, facts = getattr(self, name), one["facts"]
            if facts is not True and value == one["default"]:
                continue
            if callable(facts):
                found |= facts(self)
            else:
                found[name] = (
                    asdict(value) if isinstance(value, Wishes) else [*value] if type(value) is tuple else value
                )
        return found

    def makes_gguf(self, config: Mapping[str, Any]) -> bool:
        """Return whether a model with this config becomes a GGUF file: every GGUF file, and others with the format."""
        return is_gguf_config(config) or self.format == GGUF

    @property
    def rotation(self) -> WeightRotation | None:
        """The Hadamard rotation to apply to layers before they are quantized; None for no rotation."""
        return None if self.hadamard is None else WeightRotation.drawn(self.hadamard, self.hadamard_seed)

    @property
    def serving(self) -> Serving | None:
        """The computation of the engine that will serve the model; None if the user names no engine."""
        if self.engine is None and self.scheme is None:
            return None
        if self.engine is None:
            raise CheckpointError(f"--scheme {shown(str(self.scheme))}: needs an engine; add --engine transformers")
        row = serving_of("convert", self.engine, self.scheme, None, None if self.format == GGUF else self.format)
        if not row.container:
            raise CheckpointError(f"--engine {row}: quantizes the weights itself, so there is no checkpoint to write")
        return row

    @property
    def gives_input_scales(self) -> bool:
        """True if the user gives an input scale for all layers, or activations from which input scales are computed."""
        return self.input_scale is not None or self.activations is not None

    @property
    def recorded(self) -> str:
        """The recipe to record in the output as the one that made the written codes (to_spec); "" if it is unknown."""
        # If codes are copied from another model, it is ``made_by``, otherwise ``recipe``.
        return self.made_by if self.codes else to_spec(self.recipe)

    def __post_init__(self) -> None:
        for fault in (
            *self._faults(),
            *self._faults_of_engine(),
            *self._faults_of_adapter(),
            *self._faults_of_rotation(),
        ):
            if isinstance(fault, tuple):
                raise CheckpointError(": ".join(fault))

    def _faults(self) -> Iterator[Fault]:
        """Yield (option, what is wrong) for each wrong option, and something false for each right one."""
        for one in (self.recipe, *(each for _, each in self.recipes)):
            name, plain = f"recipe {one.id}", one.id.partition("-stochastic")[0]
            is_namesake = RECIPES.get(one.id, one) != one  # the checkpoint names its recipe by id
            yield is_namesake and (name, "differs from fp4kit's recipe of this id; give it an id of its own")
            instead = plain if plain in RECIPES else "another recipe"
            text = f"is for stochastic rounding, but convert rounds to nearest; use {instead}"
            yield one.stochastic_only and not (one.fake_only or self.codes) and (name, text)
        patterns = [pattern for pattern, _ in self.recipes]
        named = [f"--recipe {shown(pattern)}=..." for pattern in patterns]
        for name, pattern in zip(named, patterns, strict=True):
            yield patterns.count(pattern) > 1 and (name, "is given twice; give every pattern one recipe")
        is_plain, text = self.format == UNQUANTIZED, "which quantizes nothing; leave it out"
        for include in self.wishes.include[:1]:
            yield is_plain and (f"--include {shown(include)}", f"has no effect with --format bf16, {text}")
        for name in named[:1]:
            yield bool(self.codes) and (name, f"has no effect with --codes, {text}")
            yield is_plain and (name, f"has no effect with --format bf16, {text}")
        for kind, value, known in (("format", self.format, ALL_FORMATS), ("nonfinite", self.nonfinite, NONFINITE)):
            hint = (kind == "format" and suggestion(str(value), known)) or f"; use one of {', '.join(known)}"
            yield value not in (None, *known) and (f"{kind} {value}", f"unknown{hint}")
        scale, size = self.input_scale, self.split_max_size
        is_normal = scale is None or (
            isinstance(scale, SupportsFloat) and float(FLT_MIN) <= float(scale) <= float(FLT_MAX)
        )
        yield not is_normal and ("input scale", f"got {scale!r}; a positive normal float32 is needed, such as 1.0")
        is_size = size is None or (type(size) is int and size > 0)
        yield not is_size and ("split_max_size", f"got {size!r}; a positive number of bytes is needed")
        yield self.fp8_as not in FP8_AS and (f"--fp8-as {self.fp8_as}", f"unknown; use one of {', '.join(FP8_AS)}")
        text = f"is the dtype of decoded layers in a GGUF file; add --format {GGUF}"
        yield self.fp8_as != FP8_AS[0] and self.format != GGUF and (f"--fp8-as {self.fp8_as}", text)
        text = "are given with an input scale for all layers; use only one of them"
        yield scale is not None and self.activations is not None and ("activations", text)

    def _faults_of_engine(self) -> Iterator[Fault]:
        row = self.serving
        if row is not None:
            is_static = row.input_scales == "static"
            text = "reads stored input scales; add --activations FILE, or --input-scale X"
            yield is_static and not self.gives_input_scales and (f"--engine {row}", text)
            text = "stores no input scales; leave --activations and --input-scale out"
            yield not is_static and self.gives_input_scales and (f"--engine {row}", text)

    def _faults_of_adapter(self) -> Iterator[Fault]:
        name, is_given = f"adapter scales {self.adapter_scales}", self.adapter is not None
        yield self.adapter_scales not in ADAPTER_SCALES and (name, f"unknown; use one of {', '.join(ADAPTER_SCALES)}")
        is_default = self.adapter_scales == ADAPTER_SCALES[0]
        yield not (is_given or is_default) and (name, "is about layers with an update; add --adapter DIR")
        text = f"is added to finite weights only; repair the source, and leave --nonfinite {self.nonfinite} out"
        yield is_given and self.nonfinite != "error" and ("--adapter", text)

    def _faults_of_rotation(self) -> Iterator[Fault]:
        seed, size = self.hadamard_seed, self.hadamard
        is_seed = seed is None or (type(seed) is int and 0 <= seed < 1 << 64)
        yield not is_seed and (f"--hadamard-seed {seed!r}", "needs an integer from 0 to 2^64 - 1")
        if size is None:
            yield seed is not None and (
                f"--hadamard-seed {seed}",
                "draws the signs of a transform; add --hadamard SIZE",
            )
            for pattern in self.hadamard_only[:1]:
                yield f"--hadamard-only {shown(pattern)}", "names layers to rotate; add --hadamard SIZE"
            return
        name, sizes = f"--hadamard {size!r}", ", ".join(map(str, HADAMARD_SIZES))
        yield not (type(size) is int and size in HADAMARD_SIZES) and (name, f"is no size; use one of {sizes}")
        yield self.format not in (None, ROTATED_FORMAT) and (name, _UNROTATED)
        text = "were measured before the rotation; leave them out"
        yield self.activations is not None and (name, f"activations {text}")
        text = "column weights belong to columns before the rotation; leave them out"
        yield self.search is not None and self.search.columns is not None and (name, text)
        text = f"NaN and infinity would spread over their blocks; leave --nonfinite {self.nonfinite} out"
        yield self.nonfinite != "error" and (name, text)

    def form_for(self, config: Mapping[str, Any]) -> table.Container | None:
        """Return the container to write for a model, or None to write unquantized tensors (format "bf16")."""
        form = self._form_for(config)
        if self.hadamard is not None and (form is None or form.format != ROTATED_FORMAT):
            raise CheckpointError(f"--hadamard {self.hadamard}: {_UNROTATED}")
        if self.search is not None:
            self.search.check(self.recipe, form, self.nonfinite)
        return form

    def mixture_for(self, config: Mapping[str, Any]) -> Mixture:
        """Return a Mixture, which tells the recipe and the container of every layer of a model."""
        if not self.recipes:
            return Mixture(LayerQuantization(self.recipe, self.form_for(config)), ())
        if self.makes_gguf(config):
            raise CheckpointError(
                f"--recipe {shown(self.recipes[0][0])}=...: a GGUF file records one recipe; give one --recipe without a"
                " pattern"
            )
        common = replace(self, format=self._common_format(config))
        if any(one.tensor_scaling == "tensor" for one in (self.recipe, *(one for _, one in self.recipes))):
            common = replace(common, input_scale=None, activations=None)  # layers without a tensor scale get none
        default = LayerQuantization(self.recipe, common.form_for(config))
        choices = []
        for pattern, one in self.recipes:
            search = self.search if self.search is not None and self.search.supports(one) else None
            form = replace(common, recipe=one, search=search).form_for(config)
            choices.append((pattern, LayerQuantization(one, form)))
        forms = {choice.form.name: choice for choice in (default, *(one for _, one in choices)) if choice.form}
        if len(forms) > 1 and common.format not in MIXED:
            a, b, *_ = forms.values()
            raise CheckpointError(
                f"recipes {a.recipe.id} and {b.recipe.id}: need two containers, {a.form} and {b.form}, but --format"
                f" {common.format} holds layers of one; use recipes of one format, or --format {' or '.join(MIXED)}"
            )
        return Mixture(default, choices)

    def _common_format(self, config: Mapping[str, Any]) -> str | None:
        """Return the output format for all recipes of the request."""
        if self.format is not None:
            return self.format
        kinds = [kind_of(one) for one in (self.recipe, *(each for _, each in self.recipes))]
        family = support.family_of(config)
        best = support.best_format(kinds[0], family, self.recipe.producer)
        ordered = [*MIXED] if len({*kinds}) > 1 else [*([best] if best else []), *FORMATS[:-1]]
        return next((f for f in ordered if not any(support.refusal(f, kind, family) for kind in kinds)), best)

    def _form_for(self, config: Mapping[str, Any]) -> table.Container | None:
        """Return the container to write for a model, or None to write unquantized tensors."""
        if self.makes_gguf(config):
            if self.format not in (None, UNQUANTIZED, GGUF):
                raise CheckpointError(
                    f"format {self.format}: a GGUF file can only become a GGUF file;"
                    f" leave --format out, or use {UNQUANTIZED}"
                )
            if self.input_scale is not None:
                raise CheckpointError("input scale: llama.cpp supports only calibrated input scales; leave it out")
            self._refuse_input_scales("fp4kit writes no input scales to GGUF files")
            return None if self.format == UNQUANTIZED else gguf_form_for(self.recipe)
        if self.split_max_size is not None:
            raise CheckpointError("split-max-size: only GGUF models are split; leave it out")
        if self.format == UNQUANTIZED:
            self._refuse_input_scales("unquantized layers have no input scale")
            return None
        check_diffusers(config, self.wishes.only)
        if self.format == mlx.FORMAT:
            self._refuse_input_scales("mlx-lm reads no input scales")
            return mlx.form_for(self.recipe)
        form = comfy.form_for(self.recipe) if self.format == comfy.FORMAT else self._loaded_form(config)
        if not form.has_tensor_scale:
            self._refuse_input_scales(f"{self.recipe.id} has no input scale", ", or use an NVFP4 recipe")
        return form

    def _loaded_form(self, config: Mapping[str, Any]) -> table.Container:
        """Return the container to write for a model in one of FORMATS, the best one if the user names none."""
        kind, family = kind_of(self.recipe), support.family_of(config)
        # If no format fits, use "modelopt": it is refused below, with a message that says what to do.
        wanted = self.format or support.best_format(kind, family, self.recipe.producer) or "modelopt"
        refused = support.refusal(wanted, kind, family)
        if refused:
            raise CheckpointError(refused)
        forms = [candidate for candidate in WRITTEN if candidate.format == wanted]
        form = next((candidate for candidate in forms if candidate.stores(self.recipe)), None)
        if form is None:
            usable = [id for id, r in RECIPES.items() if any(candidate.stores(r) for candidate in forms)]
            text = several(usable, self.recipe, wanted)
            raise CheckpointError(f"recipe {self.recipe.id}: cannot be stored in {wanted}; use one of {text}")
        return form

    def _refuse_input_scales(self, why: str, more: str = "") -> None:
        """Raise CheckpointError if the user gives an input scale or activations; otherwise do nothing."""
        if self.activations is not None:
            raise CheckpointError(f"activations: {why}; leave them out{more}")
        if self.input_scale is not None:
            raise CheckpointError(f"input scale: {why}; leave it out{more}")


OPTIONS: dict[str, Mapping[str, Any]] = {one.name: one.metadata for one in fields(Request) if one.metadata}
F = TypeVar("F", bound=Callable[..., Any])


def takes_options(function: F) -> F:
    """Give a function that takes ``**options: Unpack[RequestOptions]`` the signature that names each option, and an
    error for any other name.
    """
    own = [one for one in signature(function).parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
    types = get_type_hints(RequestOptions)
    shared = [Parameter(name, Parameter.KEYWORD_ONLY, default=OPTIONS[name]["given"]) for name in types]
    shared = [one.replace(annotation=RequestOptions.__annotations__[one.name].__forward_arg__) for one in shared]
    function.__signature__ = Signature(sorted([*own, *shared], key=lambda one: one.kind))  # type: ignore[attr-defined]
    return checks_kinds(function, types)  # type: ignore[return-value]
