"""Block scales that are searched, instead of taken from the amax of their block: by which error, under which column
weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp4kit.call.search_scales import check_searched, power_of
from fp4kit.checkpoint.containers.container import Container
from fp4kit.checkpoint.model.manifest import file_digest
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.model.weights import Located, Weight
from fp4kit.checkpoint.plan.job import SEARCHED
from fp4kit.lazy import lazy_property
from fp4kit.recipes import Recipe
from fp4kit.storage.errors import CheckpointError, listed, shown
from fp4kit.storage.safetensors_file import SafetensorsFile, read_header

RECIPE = "nvfp4-modelopt-static"  # whose scales may be any, and that by the amax of a block are those of nvfp4-modelopt
RECORDED = "as recorded"  # in place of an error: the one that a checkpoint was made by
_FORMATS = ("modelopt", "compressed-tensors")
Layer = tuple[str, Weight]  # the module that is written, and what it is made of


@dataclass(frozen=True)
class ColumnWeights:
    """A safetensors file with a float32 vector (K,) for each layer, named as its weight or as its module.

    A stack of experts may have one vector for all, by its own name. sha256: of the file.
    """

    file: SafetensorsFile = field(repr=False)
    sha256: str

    @lazy_property
    def places(self) -> Mapping[str, Located]:
        """Name -> tensor; the rest of the header is not carried along."""
        alone = SafetensorsFile(self.file.path, self.file.name, self.file.size, (), {})
        return {entry.name: Located(alone, entry) for entry in self.file.entries}

    def of(self, layer: Layer) -> Located | None:
        """The vector of a layer, by the first of its names that the file has."""
        module, weight = layer
        names = (f"{module}.weight", module, weight.tensor, weight.name)
        return next((self.places[name] for name in names if name in self.places), None)

    def check(self, layers: Iterable[Layer]) -> None:
        """Raise CheckpointError for layers without a vector, or with one that does not fit or holds what is no
        weight.
        """
        layers = list(dict(layers).items())
        missing = [layer[0] for layer in layers if self.of(layer) is None]
        if missing:
            raise CheckpointError(
                f"{self.file.label}: {len(missing)} layers have no column weights there: {listed(missing)}; needs a"
                " float32 vector for each, by the name of its weight or of its module; leave others out with --keep"
            )
        with Readers() as readers:
            for module, weight in layers:
                place = self.of((module, weight))
                assert place is not None
                _check_vector(f"{self.file.label}: {shown(place.entry.name)}", place, weight.shape[-1], readers)


def _check_vector(name: str, place: Located, columns: int, readers: Readers) -> None:
    entry = place.entry
    if (entry.dtype, entry.shape) != ("F32", (columns,)):
        raise CheckpointError(
            f"{name}: is {entry.dtype} {list(entry.shape)}; needs F32 [{columns}], a weight for each column"
        )
    values = readers.array(place)
    bad = int(np.count_nonzero(~(np.isfinite(values) & (values >= 0))))
    if bad:
        raise CheckpointError(
            f"{name}: {bad} of {columns} weights are negative, NaN or infinite; needs finite ones >= 0"
        )


@dataclass(frozen=True)
class ScaleSearch:
    """How scales are searched. objective: the error, as of search_scales; RECORDED for verify. columns: its weights, or
    None.
    """

    objective: str = "mse"
    columns: ColumnWeights | None = None

    def __post_init__(self) -> None:
        if self.objective != RECORDED:
            self._check_objective()

    def _check_objective(self) -> None:
        try:
            power_of("scale search", self.objective)
        except ValueError as error:
            raise CheckpointError(str(error)) from None

    @classmethod
    def of(cls, objective: str | None, columns: str | Path | None = None) -> ScaleSearch | None:
        """What is asked for; None for no search. Raises CheckpointError for column weights without one, and without a
        file.
        """
        if columns is None:
            return None if objective is None else cls(objective)
        if objective is None:
            raise CheckpointError("column weights: are of a search of scales; say --scale-search mse too")
        path = Path(columns)
        if not path.is_file():
            raise CheckpointError(f"column weights {shown(str(path))}: is no file; a safetensors file is needed")
        return cls(objective, ColumnWeights(read_header(path), file_digest(path)))

    @property
    def words(self) -> str:
        """For people: "searched by mse"."""
        return f"searched by {'weighted ' * (self.columns is not None)}{self.objective}"

    def facts(self) -> dict[str, Any]:
        """As JSON has it."""
        weights = (
            {} if self.columns is None else {"column_weights": self.columns.file.name, "sha256": self.columns.sha256}
        )
        return {"objective": self.objective, **weights}

    def check(self, recipe: Recipe, form: Container | None, nonfinite: str) -> None:
        """Raise CheckpointError for a recipe, a form or a choice that goes without searched scales."""
        self._check_objective()
        self.check_recipe(recipe)
        if form is None or form.format not in _FORMATS:
            raise CheckpointError(
                f"scale search: {form or 'bf16'} is not written with it; use --format {' or '.join(_FORMATS)}"
            )
        if nonfinite == "keep":
            raise CheckpointError(
                "scale search: a block with NaN or infinity has no least error; say --nonfinite saturate"
            )

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise CheckpointError for a recipe whose scales are not searched so."""
        try:
            check_searched("scale search", recipe)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        if recipe.search:
            raise CheckpointError(f"scale search: {recipe.id} searches by itself; leave it out, or use {RECIPE}")

    def columns_of(self, layer: Layer) -> Located | None:
        """The column weights of a layer."""
        return None if self.columns is None else self.columns.of(layer)


def recorded_search(
    request: Mapping[str, Any], config: Mapping[str, Any], given: ScaleSearch | None
) -> tuple[ScaleSearch | None, bool, list[str]]:
    """The search that made a checkpoint, whether it had column weights, and what is doubtful about that.

    request: of its manifest; config: what its config says of fp4kit, where there is no manifest. given: goes before
    both.
    """
    facts = request.get("scale_search")
    if not isinstance(facts, Mapping):
        said = str(config.get("scale_search", ""))
        facts = {
            "objective": said.removeprefix("weighted "),
            **({"sha256": None} if said.startswith("weighted ") else {}),
        }
    weighted = "sha256" in facts
    if given is not None:
        if given.objective == RECORDED:
            given = replace(given, objective=facts.get("objective") or "mse")
        known = given.columns is not None and facts.get("sha256") not in (None, given.columns.sha256)
        return given, False, ["the column weights are not those that it was made with"] * known
    objective = facts.get("objective")
    if not objective:
        return None, False, []
    try:
        return ScaleSearch(objective), weighted, []
    except CheckpointError:
        return None, weighted, [f"its search of scales is not known here: {shown(str(objective))}"]


def check_layers(search: ScaleSearch | None, tensors: Iterable[Any]) -> None:
    """Raise CheckpointError where a search finds no layer of a plan to search, or one without column weights."""
    if search is None:
        return
    layers = [
        (piece.module, piece.weight) for tensor in tensors if tensor.action in SEARCHED for piece in tensor.pieces
    ]
    if not layers:
        raise CheckpointError("scale search: no layer gets new codes, whose scales it would find; leave it out")
    if search.columns is not None:
        search.columns.check(layers)


def words_of(search: ScaleSearch | None, action: str) -> str:
    """What a plan says of the scales of a layer."""
    return f", scales {search.words}" if search is not None and action in SEARCHED else ""


class Losses(NamedTuple):
    """Sums over a layer in float64, each weighted by column where there are weights: of x^2, and of the squared errors.

    before: with scales by the amax of each block; after: with those that were found.
    """

    signal: float = 0.0
    before: float = 0.0
    after: float = 0.0

    def plus(self, other: Losses) -> Losses:
        """Their sums."""
        return Losses(*(a + b for a, b in zip(self, other, strict=True)))
