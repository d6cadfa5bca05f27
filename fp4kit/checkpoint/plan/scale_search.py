"""Configure the search of block scales: which error to minimize, and with which column weights. Without a search, a
block scale is computed from the block's amax. A search tries several scales per block and stores the one with the
smallest error. Column weights are factors, one per column of a layer, by which the errors in the columns count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp4kit.call.search_scales import check_e4m3_search, power_of
from fp4kit.checkpoint.containers.table import Container
from fp4kit.checkpoint.model.model_files import file_digest
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.model.weights import Located, Weight
from fp4kit.checkpoint.plan.imatrix import Imatrix, read_imatrix
from fp4kit.checkpoint.plan.job import SEARCHED, ChannelWeights
from fp4kit.lazy import lazy_property
from fp4kit.recipes import Recipe
from fp4kit.storage.files import CheckpointError, listed, shown
from fp4kit.storage.safetensors_file import SafetensorsFile, read_header

# The recipe to suggest for searched scales, because it accepts any block scale. If the scales are computed from block
# amaxes, they equal those of nvfp4-modelopt.
SEARCH_RECIPE = "nvfp4-modelopt-static"
RECORDED = "as recorded"  # ScaleSearch.objective for verify: use the objective that the checkpoint records
# Recipes of llama.cpp, without tensor scale. Their block scales can be searched too (see convert/searched_blocks.py).
BLOCK_RECIPES = ("nvfp4-gguf", "mxfp4-gguf")
_FORMATS = ("modelopt", "compressed-tensors")
Layer = tuple[str, Weight]  # (module to write, weight that it is made from)


@dataclass(frozen=True)
class ColumnWeights:
    """A safetensors file with column weights: one float32 vector (K,) per layer. Vectors are read when needed.

    A vector is named after the layer's weight or its module. The experts of a stack may share one vector, named after
    the stack.

    Attributes:
        file: the header of the file.
        sha256: the SHA-256 of the file, in hexadecimal.
    """

    file: SafetensorsFile = field(repr=False)
    sha256: str

    @lazy_property
    def places(self) -> Mapping[str, Located]:
        """A map from the name of a vector to its Located: the file, and the place of the vector's bytes in it."""
        # A Located does not contain the file's header, so that jobs that are sent to worker processes stay small.
        alone = SafetensorsFile(self.file.path, self.file.name, self.file.size, (), {})
        return {entry.name: Located(alone, entry) for entry in self.file.entries}

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that the manifest of a conversion records about the vectors: name and SHA-256 of the file."""
        return {"column_weights": self.file.name, "sha256": self.sha256}

    def of(self, layer: Layer) -> Located | None:
        """Return where the file stores the column weights of a layer, or None if the file has none for that layer."""
        module, weight = layer
        names = (f"{module}.weight", module, weight.tensor, weight.name)
        return next((self.places[name] for name in names if name in self.places), None)

    def check(self, layers: Iterable[Layer]) -> None:
        """Check the column weights of all layers that a scale search will use."""
        layers = list(dict(layers).items())
        missing = [layer[0] for layer in layers if self.of(layer) is None]
        if missing:
            raise CheckpointError(
                f"{self.file.label}: {len(missing)} layers have no column weights: {listed(missing)}; add a float32"
                " vector for each, named after its weight or module, or keep these layers unquantized with --keep"
            )
        with Readers() as readers:
            for module, weight in layers:
                place = self.of((module, weight))
                assert place is not None
                _check_vector(f"{self.file.label}: {shown(place.entry.name)}", place, weight.shape[-1], readers)


def _check_vector(name: str, place: Located, columns: int, readers: Readers) -> None:
    """Raise CheckpointError unless the tensor at ``place`` is a float32 vector of ``columns`` finite weights >= 0."""
    entry = place.entry
    if (entry.dtype, entry.shape) != ("F32", (columns,)):
        raise CheckpointError(
            f"{name}: is {entry.dtype} {list(entry.shape)}; needs F32 [{columns}], one weight per column"
        )
    values = readers.array(place)
    bad = int(np.count_nonzero(~(np.isfinite(values) & (values >= 0))))
    if bad:
        raise CheckpointError(
            f"{name}: {bad} of {columns} weights are negative, NaN or infinite; needs finite weights >= 0"
        )


@dataclass(frozen=True)
class ScaleSearch:
    """A search of block scales: the error to minimize per block, and the weights of the columns in this error.

    Args:
        objective: the error to minimize, as for fp4kit.search_scales, such as "mse". For ``verify``, it may also be
            "as recorded": the objective that the checkpoint records.
        columns: the column weights of that error; None weights all columns equally.

    Raises:
        CheckpointError: if the objective is unknown.
    """

    objective: str = "mse"
    columns: ColumnWeights | Imatrix | None = None

    def __post_init__(self) -> None:
        if self.objective != RECORDED:
            self._check_objective()

    def _check_objective(self) -> None:
        """Raise CheckpointError if the objective is unknown."""
        # ``verify`` replaces "as recorded" with the recorded objective; a conversion must name an objective.
        try:
            power_of("scale search", self.objective)
        except ValueError as error:
            raise CheckpointError(str(error)) from None

    @classmethod
    def of(
        cls, objective: str | None, columns: str | Path | None = None, imatrix: str | Path | None = None
    ) -> ScaleSearch | None:
        """Return the search for an objective and an optional file of column weights; None if all arguments are None.

        Args:
            objective: the error to minimize, or None for no search.
            columns: the path of a safetensors file with column weights (see ColumnWeights), or None.
            imatrix: the path of an importance matrix of llama.cpp (legacy or GGUF), or None. Its mean squares of the
                input channels become the column weights.

        Raises:
            CheckpointError: if ``columns`` and ``imatrix`` are both given, one of them is given without an objective,
                the objective is unknown, or a file is missing or damaged.
        """
        if imatrix is not None:
            if columns is not None:
                raise CheckpointError("imatrix: gives the column weights; leave the file of column weights out")
            if objective is None:
                raise CheckpointError("imatrix: is used only by a scale search; add --scale-search mse")
            return cls(objective, read_imatrix(imatrix))
        if columns is None:
            return None if objective is None else cls(objective)
        if objective is None:
            raise CheckpointError("column weights: are used only by a scale search; add --scale-search mse")
        path = Path(columns)
        if not path.is_file():
            raise CheckpointError(f"column weights {shown(str(path))}: is not a file; a safetensors file is needed")
        return cls(objective, ColumnWeights(read_header(path), file_digest(path)))

    @property
    def words(self) -> str:
        """A description for users: "searched by mse", or "searched by weighted mse" if there are column weights."""
        return f"searched by {'weighted ' * (self.columns is not None)}{self.objective}"

    def facts(self) -> dict[str, Any]:
        """Return what the manifest of a conversion records about the search, as JSON-serializable values.

        The values are the objective and, if there are column weights, the name and SHA-256 of their file.
        """
        return {"objective": self.objective, **({} if self.columns is None else self.columns.facts)}

    def check(self, recipe: Recipe, form: Container | None, nonfinite: str) -> None:
        """Raise CheckpointError if a conversion cannot search block scales; otherwise do nothing.

        Args:
            recipe: the recipe for newly quantized tensors.
            form: the container to write; None for unquantized output, which has no scales to search.
            nonfinite: what to do with NaN and infinity: "error", "keep" or "saturate".

        Raises:
            CheckpointError: if the recipe or the container does not support a search, or if the objective is unknown.
                Also if ``nonfinite`` is "keep", because a block with NaN or infinity has no smallest error.
        """
        self._check_objective()
        self.check_recipe(recipe)
        if form is None or not (form.in_blocks or form.format in _FORMATS):
            raise CheckpointError(
                f"scale search: not supported for {form or 'bf16'}; use --format {' or '.join(_FORMATS)}, or a GGUF"
                " file"
            )
        if nonfinite == "keep":
            raise CheckpointError(
                "scale search: a block with NaN or infinity has no smallest error; use --nonfinite saturate"
            )

    @staticmethod
    def check_recipe(recipe: Recipe) -> None:
        """Raise CheckpointError if the recipe's block scales cannot be searched; otherwise do nothing.

        They cannot if the recipe does not accept given scales, or if it already searches its scales itself.

        Args:
            recipe: the recipe for newly quantized tensors.
        """
        if recipe.id in BLOCK_RECIPES:
            return
        try:
            check_e4m3_search("scale search", recipe)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        if recipe.search:
            raise CheckpointError(
                f"scale search: {recipe.id} already searches its scales; leave the scale search out, or use {SEARCH_RECIPE}"
            )

    @staticmethod
    def supports(recipe: Recipe) -> bool:
        """Return whether the recipe's block scales can be searched (see ``check_recipe``)."""
        try:
            ScaleSearch.check_recipe(recipe)
        except CheckpointError:
            return False
        return True

    def columns_of(self, layer: Layer, expert: int = 0) -> Located | ChannelWeights | None:
        """Return where a layer's column weights are stored: ChannelWeights for an imatrix, otherwise a Located.

        Return None if there are no column weights for the layer; its columns then have equal weights.

        Args:
            layer: (module to write, weight that it is made from).
            expert: the index of the expert's matrix in a stack; 0 for a single matrix. It matters only for an imatrix,
                because the experts of a stack share the vector of a safetensors file.
        """
        if isinstance(self.columns, Imatrix):
            return self.columns.of(*layer, expert)
        return None if self.columns is None else self.columns.of(layer)

    def lacks(self, layer: Layer) -> bool:
        """Return whether column weights for a layer are missing, so that verify cannot repeat a search that used them.

        - If ``columns`` is None, True for every layer.
        - If ``columns`` is an imatrix, False for every layer, because layers that it does not name are searched with
          equal weights.
        - If ``columns`` is a file of column weights, True if it has no vector for the layer.

        Args:
            layer: (module to write, weight that it is made from).
        """
        return not isinstance(self.columns, Imatrix) and self.columns_of(layer) is None

    def check_layers(self, tensors: Iterable[Any]) -> tuple[str, ...]:
        """Check that the search fits the layers of a plan, and return warnings; () if there are none.

        Args:
            tensors: the plans of all tensors (plan.TensorPlan).

        Raises:
            CheckpointError: if no layer gets new codes by a recipe whose scales can be searched, or if column weights
                are missing or invalid. An imatrix may lack layers; a warning names them.
        """
        searched = (t for t in tensors if t.action in SEARCHED and t.recipe is not None and self.supports(t.recipe))
        pieces = [piece for tensor in searched for piece in tensor.pieces]
        if not pieces:
            raise CheckpointError(
                "scale search: no layer gets new codes, so there are no scales to search; leave it out"
            )
        if isinstance(self.columns, Imatrix):
            return self.columns.check((piece.module, piece.weight, piece.expert) for piece in pieces)
        if self.columns is not None:
            self.columns.check((piece.module, piece.weight) for piece in pieces)
        return ()

    def words_for(self, action: str, recipe: Recipe) -> str:
        """Return the text to append to the plan's reason for a layer, such as ", scales searched by mse".

        Return "" if the layer's scales are not searched: the action computes no new codes, or the recipe does not allow
        it.

        Args:
            action: what happens to the layer, one of the actions in job.py.
            recipe: the recipe of the layer.
        """
        return f", scales {self.words}" if action in SEARCHED and self.supports(recipe) else ""


def recorded_search(
    request: Mapping[str, Any], config: Mapping[str, Any], requested: ScaleSearch | None
) -> tuple[ScaleSearch | None, bool, list[str]]:
    """Find the scale search to repeat when a converted checkpoint is verified."""
    facts = request.get("scale_search")
    if not isinstance(facts, Mapping):
        said = str(config.get("scale_search", ""))
        facts = {
            "objective": said.removeprefix("weighted "),
            **({"sha256": None} if said.startswith("weighted ") else {}),
        }
    weighted = "sha256" in facts
    if requested is not None:
        if requested.objective == RECORDED:
            requested = replace(requested, objective=facts.get("objective") or "mse")
        differs = requested.columns is not None and facts.get("sha256") not in (None, requested.columns.sha256)
        return requested, False, ["the column weights differ from those that the checkpoint was made with"] * differs
    objective = facts.get("objective")
    if not objective:
        return None, False, []
    try:
        return ScaleSearch(objective), weighted, []
    except CheckpointError:
        return None, weighted, [f"the checkpoint records an unknown scale search: {shown(str(objective))}"]


class Losses(NamedTuple):
    """The squared errors of a layer before and after a scale search, summed in float64.

    If there are column weights, every term of the three sums is multiplied by its column's weight.

    Attributes:
        signal: the sum of x^2 over the unquantized values x.
        before: the sum of squared errors with scales computed from the block amax.
        after: the sum of squared errors with the searched scales.
    """

    signal: float = 0.0
    before: float = 0.0
    after: float = 0.0

    def plus(self, other: Losses) -> Losses:
        """Return the sum of these Losses and ``other``, field by field, for example over the parts of a layer."""
        return Losses(*(a + b for a, b in zip(self, other, strict=True)))
