"""Open a path for fp4kit.parity, which compares two of them: its contract, and its tensors, read one at a time. A
contract describes how a model is quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.checkpoint.containers.table import INPUT_SCALE
from fp4kit.checkpoint.contract.of_checkpoint import contract_of
from fp4kit.checkpoint.counterparts import canonical, keys_of
from fp4kit.checkpoint.model.inspect import Checkpoint, QuantizedLayers, inspect_checkpoint
from fp4kit.checkpoint.model.slabs import Readers, scalar_of, slabs, values_of
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.verify.integrity import unquantized_by_engine
from fp4kit.contract.schema import Contract
from fp4kit.contract.sides import InputScale, by_layer, matrix_of
from fp4kit.quantized.container import Quantized
from fp4kit.storage.quantized_file import load, recipes_of
from fp4kit.storage.safetensors_file import NUMPY_DTYPES

# {dtype in safetensors: dtype in NumPy}, for tensors that are neither weights nor scales
_PLAIN = {
    name: np.dtype(dtype)
    for name, dtype in (
        ("F64", np.float64),
        ("F32", np.float32),
        ("F16", np.float16),
        ("BF16", ml_dtypes.bfloat16),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", ml_dtypes.float8_e5m2),
        ("F8_E8M0", ml_dtypes.float8_e8m0fnu),
        *((f"{kind}{bits}", f"{'int' if kind == 'I' else 'uint'}{bits}") for kind in "IU" for bits in (8, 16, 32, 64)),
        ("BOOL", np.bool_),
    )
}


class LazyTensors(Mapping[str, Any]):
    """A mapping from layer name to tensor, which reads the tensor from its file at every access.

    readers: layer -> function that reads it, and returns a Quantized or an array.
    input_scales: layer -> its static input scale; empty if the checkpoint stores none.
    others: the other tensors of the checkpoint, such as norms, biases and input scales. Their names have no ending
        ".weight". Empty if there are none.
    unquantized: engine -> layer -> whether the engine leaves it unquantized, as it reads the config of the checkpoint.
    """

    def __init__(
        self,
        readers: Mapping[str, Callable[[], Any]],
        input_scales: Mapping[str, InputScale] | None = None,
        others: Mapping[str, Any] | None = None,
        unquantized: Mapping[str, Mapping[str, bool]] | None = None,
    ) -> None:
        self._readers, self.input_scales, self.others = readers, input_scales or {}, others or {}
        self.unquantized = unquantized or {}

    def __getitem__(self, name: str) -> Any:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __contains__(self, name: object) -> bool:
        return name in self._readers


def opened(path: str | Path) -> tuple[Contract | None, Mapping[str, Any] | None]:
    """Return (contract, tensors by layer) of a path, as fp4kit.parity takes them."""
    place = Path(path)
    if place.suffix == ".json":
        return contract_of(place), None
    if place.suffix == ".safetensors" and place.is_file():
        saved = _saved(place)
        if saved is not None:
            return None, by_layer(saved)
    checkpoint = inspect_checkpoint(place)
    if not checkpoint.layers and not place.is_dir():
        names = checkpoint.tensors
        return None, LazyTensors({n.removesuffix(".weight"): partial(_tensor, checkpoint, n) for n in names})
    read = unquantized_by_engine(checkpoint)
    unquantized = {engine: {canonical(name): left for name, left in found.items()} for engine, found in read.items()}
    return (contract_of(place) if checkpoint.layers else None), LazyTensors(*_readers(checkpoint), unquantized)


def _saved(path: Path) -> Mapping[str, Any] | None:
    """Return the Quantized in a file of fp4kit.save; None if the file is of another kind."""
    return None if recipes_of(path) is None else load(path)


def _tensor(checkpoint: Checkpoint, name: str, decodes: bool = False) -> np.ndarray:
    """Read one tensor of a checkpoint, and return it as a new array."""
    with Readers() as readers:
        file, entry = checkpoint.tensors[name]
        if not decodes and entry.dtype in NUMPY_DTYPES:
            return np.array(readers.of(file).read(entry))
        stored = np.array(readers.of(file).read_bytes(entry))
    if entry.dtype not in _PLAIN:
        return stored
    found = stored.view(_PLAIN[entry.dtype]).reshape(entry.shape)
    return found.astype(np.float32) if entry.dtype.startswith("F8") else found


def _readers(
    checkpoint: Checkpoint,
) -> tuple[dict[str, Callable[[], Any]], dict[str, InputScale], LazyTensors]:
    """Return the arguments of LazyTensors: the functions that read layers, the input scales, and the other tensors."""
    quantized, config = QuantizedLayers(checkpoint), checkpoint.config or {}
    read = lru_cache(1)(quantized.__getitem__)  # the matrices of a stack are read one after another
    found: dict[str, Callable[[], Any]] = {}
    scales: dict[str, InputScale] = {}
    with Readers() as readers:
        for weight in checkpoint.weights.values():
            form = weight.container
            for e in range(weight.experts):
                for key, one, span in keys_of(weight, e, config):
                    if form is None:
                        found[key] = partial(_values, one, e, span)
                    elif span == (0, weight.shape[-2]):
                        found[key] = partial(_matrix, read, weight, e)
                    if form is not None and INPUT_SCALE in weight.parts:
                        scales[key] = InputScale(scalar_of(readers, weight, INPUT_SCALE, e), form.divides)
    parts = {
        located.entry.name
        for weight in checkpoint.weights.values()
        for kind, located in weight.parts.items()
        if kind != INPUT_SCALE
    }
    others: dict[str, str] = {}
    for name in checkpoint.tensors:
        key = _other_name(name)
        if name not in parts:
            others[name if key in others or key in found else key] = name
    return found, scales, LazyTensors({key: partial(_tensor, checkpoint, n, True) for key, n in others.items()})


def _other_name(name: str) -> str:
    """Return the name under which a tensor that is no layer is compared: canonical, and without an ending ".weight"."""
    module, _, leaf = name.rpartition(".")
    return canonical(module) if leaf == "weight" else ".".join(filter(None, (canonical(module), leaf)))


def _values(weight: Weight, expert: int, span: tuple[int, int]) -> np.ndarray:
    """Read and return some rows of one matrix of an unquantized weight, in the dtype of the file."""
    with Readers() as readers:
        parts = [values_of(weight, slab) for slab in slabs(readers, weight, expert, span)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _matrix(read: Callable[[str], Quantized], weight: Weight, expert: int) -> Quantized:
    """Return one matrix of a quantized weight as a Quantized with two axes."""
    q = read(weight.name)
    return q if len(q.shape) == 2 else matrix_of(q, expert)
