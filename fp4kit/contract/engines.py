"""Return what an engine computes in a quantized linear layer, a row of engine_table.py, as a record or a Contract.

A scheme, such as "nvfp4-w4a4", is the formats of weights and of activations. One engine may compute a scheme in several
ways: from checkpoints of several formats, by several kernels, or by several ways of loading. Each is a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal

from fp4kit.arguments import as_word, explains_calls, explains_class
from fp4kit.contract.engine_table import CONTAINERS, ENGINES, TORCH
from fp4kit.contract.schema import Contract, ServedDtype
from fp4kit.recipes import Recipe, recipe
from fp4kit.storage.files import listed
from fp4kit.units import ENGINE_ORDERS, UNITS, Unit

Evidence = Literal["live", "recorded", "derived"]
# The layers that engines fuse, so that `fp4kit convert` gives them one tensor amax.
FUSED = (("gate_proj", "up_proj"), ("k_proj", "q_proj", "v_proj"))
# Settings that no engine determines, because they belong to a checkpoint or a request.
OF_CHECKPOINTS = ("patterns", "excluded", "kv_cache", "kv_layout", "scale_search")


@explains_class
@dataclass(frozen=True)
class Serving:
    """The computation of a quantized linear layer y = x w^T in one engine.

    Attributes:
        engine, version: the name of the engine, and the version that was examined.
        scheme: the formats of weights and activations, such as "nvfp4-w4a4" or "nvfp4-w4a16".
        route: how the engine loads or computes; "" for its default.
        device: "cpu" or "cuda".
        container: the container of the checkpoints that it loads; "" if it quantizes unquantized weights itself.
        weights: the recipe of the weights. A checkpoint that another recipe made is decoded alike if it has the same
            container.
        decode_rule: how the weights of linear layers are decoded, if not as the loaders of the container usually do;
            otherwise "". Stacks of experts are decoded as usual.
        served_dtype: the dtype to which weights are decoded; None for that of the model.
        activations: the recipe of the inputs; None if they stay unquantized.
        input_scales: "static" if the tensor scale of inputs is stored in the checkpoint, "dynamic" if each call
            computes it, None if inputs are unquantized or have no tensor scale.
        product: "torch" for torch.nn.functional.linear of the decoded operands in the dtype of the model; otherwise the
            id of a fp4kit.Unit.
        evidence: how the bits of both operands are known: "live" if tests run the engine, "recorded" if they reproduce
            its recorded outputs, "derived" if the row was read from its source.
        product_evidence: the same for the product.
        needs: what else must be equal for equal outputs of a model.
    """

    engine: str
    version: str
    scheme: str
    route: str
    device: str
    container: str
    weights: Recipe
    decode_rule: str
    served_dtype: ServedDtype | None
    activations: Recipe | None
    input_scales: Literal["dynamic", "static"] | None
    product: str
    evidence: Evidence
    product_evidence: Evidence
    needs: str

    @property
    def format(self) -> str | None:
        """The --format of `fp4kit convert` that writes the container; None if the engine quantizes the weights itself,
        or loads GGUF files, which convert makes of GGUF files.
        """
        first = self.container.partition(" ")[0]
        return first if first not in ("", "gguf") else None

    @property
    def quantizes_within(self) -> bool:
        """True if the product quantizes inputs, as in llama.cpp, so that no recipe of inputs stands for it."""
        return self.activations is None and self.product in ENGINE_ORDERS and not self.scheme.endswith("a16")

    @property
    def loaded(self) -> Recipe:
        """The recipe of the weights, with the rule by which the engine decodes them."""
        rule = self.decode_rule
        return replace(self.weights, id=f"{self.weights.id}-{rule}", decode_rule=rule) if rule else self.weights

    @property
    def patterns(self) -> tuple[tuple[str, Recipe], ...]:
        """The recipe of experts, if they are decoded by another rule than linear layers, as patterns of a Contract."""
        return (("*.experts.*", self.weights),) if self.decode_rule else ()

    @property
    def shares_amax(self) -> bool:
        """True if fused layers share one tensor amax, as in checkpoints of `fp4kit convert`."""
        return bool(self.container) and self.weights.tensor_scaling == "tensor"

    @property
    def contract(self) -> Contract:
        """The row as a Contract, in which the settings that belong to a checkpoint are unknown."""
        return Contract(
            weights=self.loaded,
            patterns=self.patterns,
            shared_amax=FUSED if self.shares_amax else (),
            activations=self.activations,
            input_scales=self.input_scales,
            served_dtype=self.served_dtype,
            unit=None if self.product == TORCH else UNITS[self.product],
            container=self.container or None,
            unknown=tuple(name for name in OF_CHECKPOINTS if name != "patterns" or not self.patterns),
        )

    def __str__(self) -> str:
        """Return the engine, scheme, route and format in one line."""
        more = ", ".join(filter(None, (self.route, self.format and f"format {self.format}")))
        return f"{self.engine} {self.scheme}" + (f" ({more})" if more else "")


def _servings() -> Iterator[Serving]:
    for engine, way in ((one, way) for one in ENGINES for way in one.computes):
        for line in way.rows.strip().split("\n"):
            scheme, container, made, dtype, inputs = (cell.strip() for cell in line.split("|"))
            weights, _, rule = (part.strip() for part in made.partition(","))
            activations, _, scales = (part.strip() for part in inputs.partition(","))
            name = weights if activations == "same" else activations
            operands, of_product = way.evidence.split()
            facts: dict[str, Any] = {"served_dtype": dtype or None, "input_scales": scales or None}
            facts |= {"evidence": operands, "product_evidence": of_product}
            yield Serving(
                engine.name,
                f"{engine.version} {engine.further}".strip(),
                scheme,
                way.route,
                way.device,
                CONTAINERS.get(container, container),
                recipe(weights),
                rule,
                activations=recipe(name) if name else None,
                product=way.product,
                needs=way.needs,
                **facts,
            )


@cache
def servings() -> tuple[Serving, ...]:
    """Return what fp4kit knows of engines: one Serving per engine, scheme, route and format.

    Returns:
        The records, grouped by engine. The first of an engine and scheme is what `serving` returns by default.

    Examples:
        >>> import fp4kit
        >>> [row.scheme for row in fp4kit.servings() if row.engine == "transformers"][:2]
        ['nvfp4-w4a16', 'nvfp4-w4a4']
    """
    return tuple(_servings())


@explains_calls
def serving(engine: str, scheme: str, *, route: str | None = None, format: str | None = None) -> Contract:
    """Return what an engine computes in a quantized linear layer, as a Contract.

    Args:
        engine: the name of an engine, such as "transformers" or "vLLM"; case does not matter.
        scheme: the formats of weights and activations, such as "nvfp4-w4a4".
        route: how the engine loads or computes, as `servings` lists it; None for the first.
        format: the format of the checkpoint, as `fp4kit convert --format` names it; None for the first.

    Returns:
        The Contract. Settings that belong to a checkpoint or a request, such as `excluded`, are listed in `unknown`.

    Raises:
        TypeError: an argument is not a str.
        ValueError: fp4kit knows no such row; the message names the near ones.

    Source: the engines' outputs, recorded or compared in tests, or their source; see Serving.evidence.

    Examples:
        >>> import fp4kit
        >>> contract = fp4kit.serving("transformers", "nvfp4-w4a4")
        >>> contract.activations.id, contract.served_dtype
        ('nvfp4-compressed-tensors-static', 'bfloat16')
    """
    return serving_of("serving", engine, scheme, route, format).contract


def serving_of(op: str, engine: Any, scheme: Any, route: Any = None, format: Any = None) -> Serving:
    """Return the first record for the arguments engine, scheme, route and format of a public function."""
    if engine is None:
        raise TypeError(f"{op}: scheme {scheme!r:.60} is given without an engine; give an engine too, such as 'vLLM'")
    engine = as_word(op, "engine", engine)
    rows = [row for row in servings() if row.engine.lower() == engine.lower()]
    if not rows:
        only_loads = any(one.name.lower() == engine.lower() for one in ENGINES)
        why = "how it multiplies is not known to fp4kit; " * only_loads
        needed = _one_of((row.engine for row in servings()), "" if only_loads else engine)
        raise ValueError(f"{op}: engine is {engine!r:.60}; {why}{needed}")
    schemes = [row.scheme for row in rows]
    if scheme is None:
        raise ValueError(
            f"{op}: engine {rows[0].engine} needs a scheme too; {_one_of(schemes)}, as scheme= or --scheme"
        )
    scheme = as_word(op, "scheme", scheme)
    found = [row for row in rows if row.scheme == scheme.lower()]
    if not found:
        raise ValueError(f"{op}: scheme is {scheme!r:.60}; {_unknown_scheme(op, rows[0].engine, schemes, scheme)}")
    for name, given in (("route", route), ("format", format)):
        if given is not None:
            known = [getattr(row, name) or "" for row in found]
            found = [row for row in found if (getattr(row, name) or "") == as_word(op, name, given)]
            if not found:
                raise ValueError(f"{op}: {name} is {given!r:.60}; {rows[0].engine} {scheme} {_one_of(known)}")
    return found[0]


_WITHOUT_RECIPE = ("contract", "serving")  # operations that take no recipe in place of an engine


def _unknown_scheme(op: str, engine: str, schemes: Iterable[str], scheme: str) -> str:
    others = [row for row in servings() if row.scheme == scheme.lower()]
    way_out = "; or name the recipe and the format of the checkpoint instead" * (op not in _WITHOUT_RECIPE)
    loaded = _loaded(engine) & {row.container for row in others}
    if loaded:
        rows = [row for row in others if row.container in loaded]
        known = dict.fromkeys(f"{row.engine} {row.scheme}" for row in rows)
        pairs = (f"{row.weights.id} and {row.format}" for row in rows if row.weights is not None)
        such = f", such as {next(pairs, 'nvfp4-te and compressed-tensors')}" if way_out else ""
        return (
            f"{engine} loads such checkpoints ({', '.join(sorted(loaded))}), but how it multiplies {scheme} is not"
            f" known to fp4kit; it can describe {listed([*known])} for them{way_out}{such}"
        )
    elsewhere = dict.fromkeys(row.engine for row in others)
    have = f"; {', '.join(elsewhere)} {'has' if len(elsewhere) == 1 else 'have'} it" if elsewhere else ""
    return f"{engine} {_one_of(schemes, '' if others else scheme)}{have}{way_out}"


@cache
def _loaded(engine: str) -> frozenset[str]:
    rows = next(one for one in ENGINES if one.name == engine).load_rows
    return frozenset(name for names, _, status, _, _ in rows if status == "loads" for name in names)


def decoding_of(stored: Contract, row: Serving) -> str:
    """Return a sentence that says whether an engine decodes the codes of a checkpoint as their contract says."""
    rule = row.loaded.decode_rule
    recipes = [one for one in (stored.weights, *(one for _, one in stored.patterns)) if one is not None]
    if not recipes:
        return f"the engine decodes these codes by the rule {rule}; the contract does not say how"
    others = dict.fromkeys(one.decode_rule for one in recipes if one.decode_rule != rule)
    if not others:
        return "the engine decodes these codes as the contract says"
    text = f"the engine decodes these codes by the rule {rule}, where the contract has {', '.join(others)}"
    return f"{text}: values may differ in their last bits"


def serving_differences(stored: Contract, row: Serving) -> tuple[str, ...]:
    """Return in which settings of serving an engine differs from the contract of stored codes, as texts.

    Settings by which the codes were made are left out, because the engine only decodes them; see ``decoding_of``.
    """
    made = {name: getattr(stored, name) for name in ("weights", "patterns", "shared_amax")}
    unknown = tuple(name for name in row.contract.unknown if name not in made)
    return stored.diff(replace(row.contract, **made, unknown=unknown)).differences


def linear_recipes(op: str, engine: Any, scheme: Any, *given: Any) -> tuple[Recipe, Recipe, Unit]:
    """Return the recipes of x and w and the unit by which an engine computes a layer, for the function linear.

    given: its arguments recipe_x and recipe_w, which must be None.
    """
    if engine is None:
        raise TypeError(f"{op}: scheme is given without an engine; pass engine='vLLM' too, or recipes")
    if any(one is not None for one in given):
        raise TypeError(f"{op}: recipes cannot be given with an engine, which determines them; leave them out")
    row = serving_of(op, engine, scheme)
    if row.product in ENGINE_ORDERS:
        call = f"fp4kit.matmul(x, fp4kit.quantize(w, {row.weights.id!r}), unit={row.product!r})"
        raise ValueError(f"{op}: {row} multiplies unquantized inputs, which linear does not; use {call}")
    if row.activations is None or row.product == TORCH:
        why = "leaves inputs unquantized" if row.activations is None else "multiplies decoded operands in PyTorch"
        raise ValueError(f"{op}: {row} {why}; use fp4kit.torch.fake_quantize_model(model, engine=..., scheme=...)")
    if row.input_scales == "static":
        raise ValueError(
            f"{op}: {row} reads a stored input scale, which linear does not take; use fake_quantize_model with inputs=,"
            " or fp4kit.quantize_static and fp4kit.matmul"
        )
    return row.activations, row.weights, UNITS[row.product]


def _one_of(known: Iterable[str], given: str = "") -> str:
    """Return text for an error message: the known names without duplicates, and those that are like the given one."""
    names = {name.lower(): name for name in known}
    near = [names[name] for name in get_close_matches(given.lower(), names, 2)] if given else []
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"needs one of {', '.join(map(repr, names.values()))}{hint}"
