"""Configure the search of block scales: which error to minimize, and with which column weights. Without a search, a
block scale is computed from the block's amax. A search tries several scales per block and stores the one with the
smallest error. Column weights are factors, one per column of a layer, by which the errors in the columns count.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from fp4kit import calibration
from fp4kit.arguments import explains_class, written
from fp4kit.call.search_scales import check_e4m3_search, power_of
from fp4kit.checkpoint.containers.table import Container
from fp4kit.checkpoint.convert.job import SEARCHED, ChannelWeights
from fp4kit.checkpoint.model.model_files import file_digest
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.model.weights import Located, Piece, Weight
from fp4kit.checkpoint.selection.names import same_input_names
from fp4kit.formats import FLT_MAX, FLT_MIN
from fp4kit.lazy import lazy_property
from fp4kit.recipes import Recipe
from fp4kit.storage.files import CheckpointError, SafetensorsFile, listed, read_header, shown
from fp4kit.storage.gguf_file import MAGIC, read_gguf

_WAY_OUT = "run the model in fp4kit.torch.collect, or leave the layers unquantized with --keep"


@explains_class
@dataclass(frozen=True)
class Activations:
    """The amaxes of measured activations, from which a conversion computes input scales.

    Args:
        amaxes: layer -> amax of the layer's inputs; 0 for a layer or an expert whose inputs were all zero.
        columns: layer -> K, the number of input values per token.
        unseen: what to do with an expert without measured inputs other than zero. "error" raises CheckpointError,
            "layer" gives it the largest amax of the experts of its layer, and "none" gives it no input scale.
        facts: what the manifest of the output records about the activations, such as the names and SHA-256 of files.
        paths: the files from which they were read.

    Raises:
        CheckpointError: if there is no layer, or ``unseen`` is unknown.
    """

    amaxes: Mapping[str, np.float32] = field(repr=False)
    columns: Mapping[str, int] = field(repr=False)
    unseen: calibration.Unseen = "error"
    facts: Mapping[str, Any] = field(default_factory=dict)
    paths: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if self.unseen not in calibration.UNSEEN:
            raise CheckpointError(
                f"unseen experts: {self.unseen} is unknown; use one of {', '.join(calibration.UNSEEN)}"
            )
        if not self.amaxes:
            raise CheckpointError("activations: no layer was measured; run the model in fp4kit.torch.collect")

    @classmethod
    def of(
        cls,
        source: ActivationsLike,
        rule: calibration.AmaxRule | calibration.Headroom = "max",
        unseen: calibration.Unseen = "error",
    ) -> Activations:
        """Return the activations that a Collector measured, or the combined activations of saved files.

        Args:
            source: Activations, which are returned unchanged; a Collector; or the path of a file that Collector.save
                wrote, or several paths, such as one per process of a distributed run.
            rule: how the amax is computed from the inputs, as for Collector.amaxes: "max", "headroom" or a Headroom.
            unseen: what to do with an expert that saw no input other than zero: "error", "layer" or "none" (see
                Activations).

        Returns:
            The Activations.

        Raises:
            CheckpointError: if a file cannot be used, no layer was measured, ``rule`` or ``unseen`` is unknown, or the
                rule needs histograms that were not collected.
            TypeError: if ``source`` is something else.

        Examples:
            >>> import numpy as np
            >>> from fp4kit.calibration import Collector
            >>> from fp4kit.checkpoint import Activations
            >>> collector = Collector()
            >>> collector.collect("mlp.up_proj", np.full((1, 16), 3, np.float32))
            >>> Activations.of(collector).of_layers({"mlp.gate_proj": 16})
            {'mlp.gate_proj': np.float32(3.0)}
        """
        if isinstance(source, Activations):
            return source
        try:
            given = [source] if isinstance(source, (str, os.PathLike)) else source
            paths = [] if isinstance(given, calibration.Collector) else [Path(path) for path in given]
        except TypeError:
            needed = "needs a Collector, or the paths of files that Collector.save wrote"
            raise TypeError(f"Activations.of: source is {written(source)}; {needed}") from None
        absent = next((path for path in paths if not path.is_file()), None)
        if absent is not None:
            raise CheckpointError(
                f"activations: {shown(str(absent))}: is not a file; needs a file that"
                " fp4kit.calibration.Collector.save wrote"
            )
        try:
            collector = source if isinstance(source, calibration.Collector) else calibration.Collector.load(*paths)
            files = [{"name": path.name, "sha256": file_digest(path)} for path in paths]
            amaxes = collector.found(rule)
        except (ValueError, OSError) as error:
            raise CheckpointError(f"activations: {error}") from None
        digest = hashlib.sha256(repr([(name, float(amax)) for name, amax in amaxes.items()]).encode()).hexdigest()
        facts = {"files": files, "rule": str(rule), "unseen": unseen, "amaxes_sha256": digest}
        return cls(amaxes, collector.columns(), unseen, facts, tuple(paths))

    def of_layers(self, layers: Mapping[str, int]) -> dict[str, np.float32]:
        """Return the amax of the inputs of each layer to convert.

        Args:
            layers: layer -> K, its number of columns.

        Returns:
            Layer -> amax. If ``unseen`` is "none", experts that saw no input other than zero are left out.

        Raises:
            CheckpointError: in one of these cases. The message names the layers.

                - A layer was not measured, or saw no input other than zero. For an expert, ``unseen`` decides.
                - A layer was measured with another number of columns.
                - The input scale of a layer is not a normal float32.
        """
        amaxes = {layer: self._amax_of(layer) for layer in layers}
        stacks = {
            layer: expert.stack
            for layer, expert in zip(layers, map(calibration.expert_of, layers), strict=True)
            if expert
        }
        experts = {stack: self._experts_of(stack) for stack in {*stacks.values()}}
        missing = [layer for layer, amax in amaxes.items() if amax is None and not experts.get(stacks.get(layer, ""))]
        if missing:
            raise CheckpointError(
                f"activations: {len(missing)} of {len(layers)} layers were not measured: {listed(missing)}; {_WAY_OUT}"
            )
        for layer, columns in layers.items():
            for name in same_input_names(layer):
                if self.columns.get(name, columns) != columns:
                    raise CheckpointError(
                        f"activations: {shown(name)}: was measured with {self.columns[name]} columns, and"
                        f" {shown(layer)} has {columns}; measure the model that is converted"
                    )
        others = {name: amax for group in experts.values() for name, amax in group.items() if self.unseen == "layer"}
        own = {name: amax or np.float32(0) for name, amax in amaxes.items()}
        try:
            found = calibration.filled("activations", {**others, **own}, self.unseen)
        except ValueError as error:
            raise CheckpointError(str(error).replace("unseen='layer'", "--unseen-experts layer")) from None
        found = {layer: found[layer] for layer in layers if layer in found}
        unusable = [
            layer
            for layer, amax in found.items()
            if not all(
                FLT_MIN <= scale <= FLT_MAX
                for scale in (calibration.input_scale(amax), calibration.input_global_scale(amax))
            )
        ]
        if unusable:
            raise CheckpointError(
                f"activations: {len(unusable)} layers have an amax whose input scale is not a normal float32:"
                f" {listed(unusable)}; {_WAY_OUT}"
            )
        return found

    def _amax_of(self, layer: str) -> np.float32 | None:
        """Return the largest amax that was measured for the inputs of a layer; None if there is none."""
        # The inputs may have been measured under the name of the layer, of a layer that is fused with it, or of the
        # fused layer.
        names = same_input_names(layer)
        return max((self.amaxes[name] for name in names if name in self.amaxes), default=None)

    def _experts_of(self, stack: str) -> dict[str, np.float32]:
        """Return a dict from layer name to amax, for the measured experts of a layer; 0 if an expert saw only zeros."""
        # An expert also counts as measured if its inputs were measured under the name of a layer that is fused with
        # this one.
        measured = {name for same in same_input_names(stack) for name in self._numbered.get(same, ())}
        names = {calibration.expert_name("activations", stack, number) for number in measured}
        return {name: self._amax_of(name) or np.float32(0) for name in sorted(names)}

    @lazy_property
    def _numbered(self) -> Mapping[str, set[int]]:
        """A map from the name of an experts' layer, without the expert's number, to the numbers of measured experts."""
        found: dict[str, set[int]] = defaultdict(set)
        for name in self.amaxes:
            expert = calibration.expert_of(name)
            if expert is not None:
                found[expert.stack].add(expert.number)
        return found


# what a user gives as activations
ActivationsLike = Activations | calibration.Collector | str | Path | Iterable[str | Path]


_SUMS, _COUNTS = ".in_sum2", ".counts"
_LONGEST_NAME = 65535
_EXPERT_OF_STACK = re.compile(r"(.*\.experts)\.(\d+)\.([^.]+)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Layers of a Mixtral expert: Hugging Face name -> names in the gguf package's map.
_PARTS = {"w1": ("w1", "gate_proj"), "w2": ("w2", "down_proj"), "w3": ("w3", "up_proj")}


class ImatrixEntry(NamedTuple):
    """Describe where an imatrix file stores the values of one weight (a matrix or a stack of experts).

    Attributes:
        position: the offset in bytes of the weight's first float32 value in the file.
        nvalues: the number of values: K for a matrix, K per expert for a stack.
        divisors: the numbers to divide the values by, one per expert. A legacy file has one for all experts.
    """

    position: int
    nvalues: int
    divisors: tuple[float, ...]


@dataclass(frozen=True)
class Imatrix:
    """An imatrix file: where it stores the column weights of every layer. Values are read from the file when needed.

    Attributes:
        path: the file.
        sha256: the SHA-256 of the file, in hexadecimal.
        entries: weight -> ImatrixEntry. The key is the weight's name in a GGUF file, without ".weight".
    """

    path: Path
    sha256: str
    entries: Mapping[str, ImatrixEntry] = field(repr=False)

    @property
    def label(self) -> str:
        """The start of messages about the file."""
        return f"imatrix {shown(self.path.name)}"

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that the manifest of a conversion records about the imatrix: name and SHA-256 of the file."""
        return {"imatrix": self.path.name, "sha256": self.sha256}

    def of(self, module: str, weight: Weight, expert: int) -> ChannelWeights | None:
        """Return the place of the column weights of one matrix, or None if the file has none for it."""
        for name in (module, weight.name, weight.tensor.removesuffix(".weight")):
            found = self._entry(name)
            if found is not None:
                entry, index = found
                if index is None and (single := _EXPERT_OF_STACK.fullmatch(weight.tensor.removesuffix(".weight"))):
                    index = int(single[2])  # a separate expert that becomes a part of a stack
                columns, counts = weight.shape[-1], len(entry.divisors)
                experts = weight.experts if index is None else max(entry.nvalues // columns, 1)
                index = expert if index is None else index
                if entry.nvalues != columns * experts or index >= experts or counts not in (1, experts):
                    raise CheckpointError(
                        f"{self.label}: has {entry.nvalues} values and {counts} counts for {shown(weight.tensor)};"
                        f" needs {columns} values for each of {experts} matrices; use the imatrix of this model"
                    )
                divisor = entry.divisors[index if counts > 1 else 0]
                return ChannelWeights(self.path, entry.position + 4 * columns * index, columns, divisor)
        return None

    def _entry(self, name: str) -> tuple[ImatrixEntry, int | None] | None:
        """Return (entry, index of the expert) for a name of GGUF or Hugging Face; an index of None is the caller's."""
        if name in self.entries:
            return self.entries[name], None
        match = _EXPERT_OF_STACK.fullmatch(name)
        stems = [name] if match is None else [f"{match[1]}.{leaf}" for leaf in _PARTS.get(match[3], (match[3],))]
        found = next((one for stem in stems for one in gguf_names(stem) if one in self.entries), None)
        return None if found is None else (self.entries[found], None if match is None else int(match[2]))

    def check(self, layers: Iterable[tuple[str, Weight, int]]) -> tuple[str, ...]:
        """Check the column weights of all layers that a scale search will use, and return warnings."""
        missing, never, found = [], [], 0
        for module, weight, expert in {(module, one.tensor, e): (module, one, e) for module, one, e in layers}.values():
            place = self.of(module, weight, expert)
            if place is None:
                missing.append(module)
                continue
            found += 1
            values = place.read()
            bad = _count_of_bad(values)
            if bad:
                raise CheckpointError(
                    f"{self.label}: {bad} of {values.size} weights of {shown(module)} are negative, NaN or infinite;"
                    " make the imatrix again"
                )
            # The file has weights of 1 for a matrix that saw no token.
            if place.divisor == 0 or (values.size > 1 and (values == 1).all()):
                never.append(f"{module} expert {expert}" if weight.experts > 1 else module)
        missing = list(dict.fromkeys(missing))
        if not found:
            raise CheckpointError(
                f"{self.label}: has weights for {listed(list(self.entries))}, but for none of the layers to convert:"
                f" {listed(missing)}; use the imatrix of this model"
            )
        warnings = []
        if missing:
            text = f"has no weights for {len(missing)} layers, whose columns count equally: {listed(missing)}"
            warnings.append(f"{self.label}: {text}")
        if never:
            text = f"{len(never)} matrices saw no token and get weights of 1: {listed(never)}"
            warnings.append(f"{self.label}: {text}")
        return tuple(warnings)


def _count_of_bad(values: np.ndarray) -> int:
    """Return the number of column weights that are negative, NaN or infinite."""
    return int(np.count_nonzero(~(np.isfinite(values) & (values >= 0))))


@cache
def _name_map() -> dict[str, tuple[str, ...]]:
    """Return the gguf package's map from Hugging Face names to possible names in GGUF files, for all architectures."""
    try:
        import gguf
    except ImportError:
        raise CheckpointError(
            'imatrix: needs the gguf package to match layer names; run pip install "fp4kit[gguf]"'
        ) from None
    tables = [gguf.TensorNameMap.block_mappings_cfg, gguf.TensorNameMap.mappings_cfg]
    tables += list(getattr(gguf.TensorNameMap, "arch_block_mappings_cfg", {}).values())
    found: dict[str, tuple[str, ...]] = {}
    for table in tables:
        for tensor, keys in table.items():
            for key in keys:
                found[key] = (*found.get(key, ()), gguf.TENSOR_NAMES[tensor])
    return found


def gguf_names(module: str) -> tuple[str, ...]:
    """Return the names that a layer with a Hugging Face name may have in GGUF files; () if the name is unknown."""
    module = module.replace("language_model.", "")
    number = _NUMBER.search(module)
    if number is None:
        return _name_map().get(module, ())
    names = _name_map().get(f"{module[: number.start()]}{{bid}}{module[number.end() :]}", ())
    return tuple(name.replace("{bid}", number[0]) for name in names)


def read_imatrix(path: str | Path) -> Imatrix:
    """Read the structure of an imatrix file, legacy or GGUF, and return where its column weights are."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"imatrix {shown(str(path))}: is not a file; a file that llama-imatrix wrote is needed")
    with path.open("rb") as stream:
        is_gguf = stream.read(len(MAGIC)) == MAGIC
    entries = _gguf_entries(path) if is_gguf else _legacy_entries(path)
    if not entries:
        raise CheckpointError(f"imatrix {shown(str(path))}: has no entries; make the imatrix again")
    return Imatrix(path, file_digest(path), {name.removesuffix(".weight"): entry for name, entry in entries.items()})


def _gguf_entries(path: Path) -> dict[str, ImatrixEntry]:
    """Return the entries of an imatrix file in GGUF form, by weight name; {} if it has no entries."""
    file, name = read_gguf(path, str(path)), shown(str(path))
    if file.metadata.get("general.type") != "imatrix":
        raise CheckpointError(f"imatrix {name}: is a GGUF file of another type; one of llama-imatrix is needed")
    tensors, found = {entry.name: entry for entry in file.entries}, {}
    for sums in file.entries:
        if not sums.name.endswith(_SUMS):
            continue
        weight = sums.name.removesuffix(_SUMS)
        counts = tensors.get(weight + _COUNTS)
        if counts is None or (sums.dtype, counts.dtype) != ("F32", "F32"):
            raise CheckpointError(f"imatrix {name}: {shown(weight)} needs in_sum2 and counts in F32; make it again")
        divisors = np.fromfile(path, "<f4", counts.nbytes // 4, offset=counts.start)
        if not divisors.size or not (np.isfinite(divisors) & (divisors >= 0)).all():
            raise CheckpointError(f"imatrix {name}: counts of {shown(weight)} are invalid; make the imatrix again")
        found[weight] = ImatrixEntry(sums.start, sums.nbytes // 4, tuple(map(float, divisors)))
    return found


def _legacy_entries(path: Path) -> dict[str, ImatrixEntry]:
    """Return the entries of a legacy imatrix file (not GGUF), by weight name."""
    size, found = path.stat().st_size, {}
    with path.open("rb") as stream:
        count = _number(stream, path, "its number of entries")
        if not 1 <= count <= size // 13:
            raise _damaged(path, f"it announces {count} entries")
        for _ in range(count):
            length = _number(stream, path, "the length of a name")
            if not 1 <= length <= min(_LONGEST_NAME, size):
                raise _damaged(path, f"a name has {length} bytes")
            try:
                name = stream.read(length).decode()
            except UnicodeDecodeError:
                raise _damaged(path, "a name is not UTF-8") from None
            calls, nvalues = (_number(stream, path, f"the counts of {shown(name)}") for _ in range(2))
            position = stream.tell()
            if nvalues < 1 or position + 4 * nvalues > size:
                raise _damaged(path, f"{shown(name)} announces {nvalues} values")
            if name in found:
                raise _damaged(path, f"{shown(name)} occurs twice")
            stream.seek(4 * nvalues, 1)
            found[name] = ImatrixEntry(position, nvalues, (float(max(calls, 1)),))
    return found


def _number(stream: BinaryIO, path: Path, what: str) -> int:
    """Read and return the next number of a legacy imatrix file, a little-endian signed int32."""
    data = stream.read(4)
    if len(data) < 4:
        raise _damaged(path, f"it ends inside {what}")
    return int.from_bytes(data, "little", signed=True)


def _damaged(path: Path, why: str) -> CheckpointError:
    """Return the error for a file that is not a usable legacy imatrix file."""
    return CheckpointError(f"imatrix {shown(str(path))}: is no usable imatrix file: {why}; make it with llama-imatrix")


# The recipe to suggest for searched scales, because it accepts any block scale. If the scales are computed from block
# amaxes, they equal those of nvfp4-modelopt.
SEARCH_RECIPE = "nvfp4-modelopt-static"
RECORDED = "as recorded"  # ScaleSearch.objective for verify: use the objective that the checkpoint records
# Recipes of llama.cpp, without tensor scale. Their block scales can be searched too (see checkpoint/convert/rows.py).
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

    def of(self, module: str, weight: Weight, expert: int) -> Located | None:
        """Return where the file stores the column weights of a layer, or None if the file has none for that layer."""
        names = (f"{module}.weight", module, weight.tensor, weight.name, weight.tensor.removesuffix(".weight"))
        return next((self.places[name] for name in names if name in self.places), None)

    def check(self, layers: Iterable[tuple[str, Weight, int]]) -> tuple[()]:
        """Check the column weights of all layers that a scale search will use."""
        found = {module: (self.of(module, weight, e), weight) for module, weight, e in layers}
        missing = [module for module, (place, _) in found.items() if place is None]
        if missing:
            raise CheckpointError(
                f"{self.file.label}: {len(missing)} layers have no column weights: {listed(missing)}; add a float32"
                " vector for each, named after its weight or module, or keep these layers unquantized with --keep"
            )
        with Readers() as readers:
            for place, weight in found.values():
                assert place is not None
                entry, columns = place.entry, weight.shape[-1]
                name = f"{self.file.label}: {shown(entry.name)}"
                if (entry.dtype, entry.shape) != ("F32", (columns,)):
                    raise CheckpointError(
                        f"{name}: is {entry.dtype} {list(entry.shape)}; needs F32 [{columns}], one weight per column"
                    )
                bad = _count_of_bad(readers.array(place))
                if bad:
                    raise CheckpointError(
                        f"{name}: {bad} of {columns} weights are negative, NaN or infinite; needs finite weights >= 0"
                    )
        return ()


@explains_class
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
        if imatrix is not None and columns is not None:
            raise CheckpointError("imatrix: gives the column weights; leave the file of column weights out")
        for given, words in ((imatrix, "imatrix: is"), (columns, "column weights: are")):
            if given is not None and objective is None:
                raise CheckpointError(f"{words} used only by a scale search; add --scale-search mse")
        if objective is None:
            return None
        if imatrix is not None:
            return cls(objective, read_imatrix(imatrix))
        if columns is None:
            return cls(objective)
        path = Path(columns)
        if not path.is_file():
            raise CheckpointError(f"column weights {shown(str(path))}: is not a file; a safetensors file is needed")
        return cls(objective, ColumnWeights(read_header(path), file_digest(path)))

    @property
    def label(self) -> str:
        """The error, such as "mse", or "weighted mse" if there are column weights."""
        return f"{'weighted ' * (self.columns is not None)}{self.objective}"

    @property
    def words(self) -> str:
        """A description for users: "searched by mse", or "searched by weighted mse" if there are column weights."""
        return f"searched by {self.label}"

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
                f"scale search: {recipe.id} already searches its scales; leave the scale search out, or use"
                f" {SEARCH_RECIPE}"
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
        return None if self.columns is None else self.columns.of(*layer, expert)

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
        return self.check_columns(pieces)

    def check_columns(self, pieces: Iterable[Piece]) -> tuple[str, ...]:
        """Raise CheckpointError if column weights are missing or invalid for the pieces; return warnings."""
        if self.columns is None:
            return ()
        return self.columns.check((piece.module, piece.weight, piece.expert) for piece in pieces)

    def words_for(self, action: str, recipe: Recipe) -> str:
        """Return the text to append to the plan's reason for a layer, such as ", scales searched by mse".

        Return "" if the layer's scales are not searched: the action computes no new codes, or the recipe does not allow
        it.

        Args:
            action: what happens to the layer, one of the actions in job.py.
            recipe: the recipe of the layer.
        """
        return f", scales {self.words}" if action in SEARCHED and self.supports(recipe) else ""
