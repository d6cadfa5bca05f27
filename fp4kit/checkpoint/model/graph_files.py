"""Read the constants of models that are graphs: OpenVINO IR (.xml with .bin) and ONNX. A quantized weight is a constant
that the graph decodes by a known formula, such as (f16(f4e2m1) * f16(f8e8m0)); _IR_KINDS and _ONNX_KINDS list them.
Low-precision constants that are decoded in any other way are an error. The packages openvino and onnx parse the
graphs. Large constants are read later, from the files that hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np

from fp4kit.checkpoint.containers.table import CODES, SCALES, TENSOR_SCALE, container
from fp4kit.checkpoint.model.weights import Located, Weight
from fp4kit.storage import files
from fp4kit.storage.files import Bytes, CheckpointError, SafetensorsFile, TensorEntry, shown

_LOW = ("F4", "F8_E4M3", "F8_E5M2", "F8_E8M0")
_INTEGERS = ("8", "16", "32", "64")


@dataclass(frozen=True)
class GraphFile(SafetensorsFile):
    """The constants of a graph.

    Attributes:
        layers: the quantized weights of the graph.
    """

    layers: tuple[Weight, ...] = ()

    @property
    def output_name(self) -> str:
        """The name of a model's only safetensors file."""
        return "model.safetensors"

    def header(self) -> bytes:
        """Return a text that says which tensors the file has, and where they are."""
        return repr((self.entries, self.layers)).encode()

    def read_again(self) -> GraphFile:
        """Return the file itself, because the graph is not read again."""
        return self

    @property
    def bare(self) -> GraphFile:
        """A copy without what the graph says, so that little data is sent to worker processes."""
        return replace(self, entries=(), metadata={}, layers=())


@dataclass(frozen=True)
class InlineEntry(TensorEntry):
    """A constant that is stored in the graph itself."""

    data: bytes = field(default=b"", repr=False, compare=False)

    def computed(self, read: Callable[..., Bytes], start: int, count: int) -> Bytes:
        """Return ``count`` bytes of the constant."""
        return np.frombuffer(self.data, np.uint8, count, start)


@dataclass(frozen=True)
class ExternalEntry(TensorEntry):
    """A constant in a file beside the graph; ``start`` is its position there."""

    path: Path

    def computed(self, read: Callable[..., Bytes], start: int, count: int) -> Bytes:
        """Return ``count`` bytes of the constant."""
        with self.path.open("rb") as stream:
            stream.seek(self.start + start)
            found = np.frombuffer(stream.read(count), np.uint8)
        if found.size != count:
            raise CheckpointError(
                f"{shown(self.name)}: {shown(self.path.name)} was truncated while it was read; run again"
            )
        return found


@dataclass(frozen=True)
class IntegerEntry(TensorEntry):
    """A matrix of 8-bit integers with a scale and a zero point per row, decoded: (code - zero_point) * scale."""

    note = "8-bit integers, decoded as the graph decodes them"
    codes: TensorEntry
    zero_point: TensorEntry | None
    scale: TensorEntry

    def computed(self, read: Callable[..., Bytes], start: int, count: int) -> Bytes:
        """Return ``count`` bytes of the decoded values, whose dtype is that of the entry."""
        columns, integers = self.shape[-1], np.dtype(np.int8 if self.codes.dtype == "I8" else np.uint8)
        width = self.nbytes // prod(self.shape[:-1])
        first, end = start // width, -(-(start + count) // width)
        values = read(self.codes, first * columns, (end - first) * columns).view(integers).astype(np.float32)
        values = values.reshape(-1, columns)
        if self.zero_point is not None:
            values -= read(self.zero_point).view(integers)[first:end, None]
        scale = read(self.scale).view(files.NUMPY_DTYPES[self.scale.dtype])[first:end, None]
        with np.errstate(over="ignore", invalid="ignore"):
            raw = (values * scale.astype(np.float32)).astype(files.NUMPY_DTYPES[self.dtype])
        return raw.reshape(-1).view(np.uint8)[start - first * width :][:count]


class Formula(NamedTuple):
    """How a graph computes a value: as text, and the names of the constants in it, in the order of the text."""

    text: str
    constants: tuple[str, ...] = ()


class Decoded(NamedTuple):
    """A value that a graph decodes by a known formula.

    Attributes:
        kind: the format, such as "NVFP4"; a key of _BLOCKS, "FP4", "FP8" or "INT8".
        parts: codes, then the zero point if there is one, the scales, and the tensor scale if there is one.
        shape: the shape of the value.
        axis: the axis along which blocks run, -1 or -2.
        block: the number of elements per scale along this axis; 0 if there is one scale.
        arithmetic: see Container.arithmetic.
        beside: the names of constants that do not change the value: shapes, and zero points that are 0.
    """

    kind: str
    parts: tuple[Located, ...]
    shape: tuple[int, ...]
    axis: int
    block: int
    arithmetic: tuple[str, str]
    beside: tuple[str, ...] = ()


def is_graph(path: Path) -> bool:
    """Return whether a path is an OpenVINO or ONNX model, judged by its name."""
    return path.suffix.lower() in _READERS and path.is_file()


def read_graph(path: Path) -> tuple[GraphFile]:
    """Return the constants of an OpenVINO or ONNX model, as the only file of a model."""
    constants, decoded, producer = _READERS[path.suffix.lower()](path)
    scales = {part.entry.name for one in decoded for part in one.parts[1:]}
    unique: dict[str, Decoded] = {}
    for one in decoded:
        name = one.parts[0].entry.name
        if name not in scales and unique.setdefault(name, one)[:-1] != one[:-1]:
            raise CheckpointError(f"{shown(name)}: is decoded in two ways, which fp4kit does not read")
    found = [*unique.values()]
    integers = {one.parts[0].entry.name: _integers(one) for one in found if one.kind == "INT8"}
    beside = {part.entry.name for one in found if one.kind == "INT8" for part in one.parts} - set(integers)
    beside |= {name for one in found for name in one.beside}
    layers = tuple(_layer(one, producer) for one in found if one.kind != "INT8")
    entries = (integers.get(name, place.entry) for name, place in constants.items() if name not in beside)
    file = next((place.file for place in constants.values()), None)
    if file is None:
        raise CheckpointError(f"{shown(path.name)}: has no constants; the weights are missing")
    ordered = tuple(sorted(entries, key=lambda one: (one.start, one.name)))
    return (GraphFile(file.path, file.name, file.size, ordered, {}, layers),)


def _missing(path: Path, name: str, error: ImportError) -> CheckpointError:
    why = f"reading it needs the package {name} ({error}); pip install 'fp4kit[{name}]'"
    return CheckpointError(f"{shown(path.name)}: {why}")


def _unusable(path: Path, error: object) -> CheckpointError:
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    why = shown(lines[-1]) if lines else type(error).__name__
    return CheckpointError(f"{shown(path.name)}: not a usable model: {why}; export or copy it again")


def _located(file: SafetensorsFile, entry: TensorEntry, available: int, name: str) -> Located:
    """Return the place of a constant, after checking that its bytes are there and fit its dtype and shape."""
    needed = files.nbytes_of(entry.dtype, entry.shape)
    if entry.nbytes != needed or needed > available:
        have, what = max(min(entry.nbytes, available), 0), f"{entry.dtype} {list(entry.shape)}"
        why = f"{what} needs {needed} bytes, but {shown(name)} has {have}; copy the file again"
        raise CheckpointError(f"{shown(entry.name)}: {why}")
    return Located(file, entry)


def _check_all_read(constants: Mapping[str, Located], found: Iterable[Decoded], use: Callable[[str], str]) -> None:
    """Raise CheckpointError if a low-precision constant is decoded by no known formula."""
    read = {name for one in found for name in (*(part.entry.name for part in one.parts), *one.beside)}
    texts: dict[str, list[str]] = {}
    for name, (_, entry) in constants.items():
        if entry.dtype in _LOW and name not in read:
            texts.setdefault(f"{entry.dtype}, decoded as {use(name)}, which fp4kit does not read", []).append(name)
    if texts:
        raise CheckpointError("; ".join(f"{files.listed(names)}: is {shown(why)}" for why, names in texts.items()))


# Layers ---------------------------------------------------------------------------------------------------------------

# What tools add to the name of a layer, the last part first: Model-Optimizer for ONNX, and PyTorch.
_SUFFIXES = ("_f4", "/fp8_weights", "/weight_quantizer", ".weight")
_BLOCKS = {"NVFP4": 16, "MXFP4": 32, "MXFP8": 32}  # elements per block


def _layer(found: Decoded, producer: str) -> Weight:
    codes, first, *rest = found.parts
    shape, axis, block = found.shape, found.axis, found.block
    end = "" if found.kind in _BLOCKS or not block else " per row" if block == shape[axis] else " per group"
    fits = len(shape) in (2, 3) and 0 not in shape and block == _BLOCKS.get(found.kind, block)
    if not fits or (found.kind == "FP4" and not block):
        raise _misfit(found)
    form = container(f"{producer} {found.kind}{' per group' if found.kind == 'FP4' else end}")
    dtype, bits = ("U8", 4) if form.element.bits == 4 else ("F8_E4M3", 8)
    stored = (*shape[:-1], shape[-1] * bits // 8)
    parts = {CODES: Located(codes.file, replace(codes.entry, dtype=dtype, shape=stored))}
    if block:
        blocks = [*shape]
        blocks[axis] //= block
        kind = {"F8_E8M0": "U8"}.get(first.entry.dtype, first.entry.dtype)
        parts[SCALES] = Located(first.file, replace(first.entry, dtype=kind, shape=tuple(blocks)))
    for one in rest if block else (first,):
        if prod(one.entry.shape) != 1 or one.entry.dtype not in files.FLOAT_DTYPES:
            raise _misfit(found)
        parts[TENSOR_SCALE] = Located(one.file, replace(one.entry, shape=()))
    is_turned = axis == -2  # stored as [K, N], with 4-bit codes of neighboring columns n in a byte
    rows, columns = shape[:-3:-1] if is_turned else shape[-2:]
    stack = "columns" if is_turned else form.stack
    form = replace(form, block=(1, block or columns), stack=stack, arithmetic=found.arithmetic)
    name = codes.entry.name
    module = name
    for end in _SUFFIXES:
        module = module.removesuffix(end)
    return Weight(module, name, (*shape[:-2], rows, columns), form, parts, is_turned)


def _misfit(found: Decoded) -> CheckpointError:
    codes, *others = (one.entry for one in found.parts)
    scales = " and ".join(f"{one.dtype} {list(one.shape)}" for one in others)
    what = f"{found.kind} {list(codes.shape)}, decoded to {list(found.shape)}, has scales {scales}"
    needed = f"blocks of {_BLOCKS[found.kind]}" if found.kind in _BLOCKS else "one scale per row, group or tensor"
    return CheckpointError(f"{shown(codes.name)}: {what}; a matrix or a stack of matrices with {needed} is needed")


def _integers(found: Decoded) -> IntegerEntry:
    codes, *zero_point, scale = (one.entry for one in found.parts)
    shape, dtype = codes.shape, found.arithmetic[1]
    if found.shape != shape or any(prod(one.shape) != prod(shape[:-1]) for one in (*zero_point, scale)):
        raise _misfit(found)
    nbytes = files.nbytes_of(dtype, shape)
    zero = zero_point[0] if zero_point else None
    return IntegerEntry(codes.name, dtype, shape, codes.start, nbytes, codes, zero, scale)


# OpenVINO -------------------------------------------------------------------------------------------------------------

_IR_TYPES = {
    **{"f64": "F64", "f32": "F32", "f16": "F16", "bf16": "BF16", "boolean": "BOOL"},
    **{f"{kind}{bits}": f"{kind.upper()}{bits}" for kind in "iu" for bits in _INTEGERS},
    **{"f8e4m3": "F8_E4M3", "f8e5m2": "F8_E5M2", "f8e8m0": "F8_E8M0", "f4e2m1": "F4"},
}
_LEVELS = "(f32(f8e4m3) * f32)"
_IR_KINDS = {  # formula -> kind, for weights that are multiplied by their scales in float16 or float32
    formula.replace("T", t): kind
    for t, levels in (("f16", f"f16({_LEVELS})"), ("f32", _LEVELS))
    for formula, kind in {
        f"(T(f4e2m1) * {levels})": "NVFP4",
        "(T(f4e2m1) * T(f8e8m0))": "MXFP4",
        "(T(f8e4m3) * T(f8e8m0))": "MXFP8",
        "(T(f4e2m1) * T)": "FP4",
        "(T(f8e4m3) * T)": "FP8",
        "((T(u8) - T(u8)) * T)": "INT8",
        "(T(i8) * T)": "INT8",
    }.items()
}
_STEPS = ("Convert", "Multiply", "Subtract", "Reshape")  # operations that decode


def _read_ir(path: Path) -> tuple[dict[str, Located], list[Decoded], str]:
    try:
        import openvino
    except ImportError as error:
        raise _missing(path, "openvino", error) from None
    data = path.with_suffix(".bin")
    if not data.is_file():
        raise CheckpointError(f"{shown(data.name)}: is missing beside {shown(path.name)}; copy both files")
    places, size = _places(path), data.stat().st_size
    file = SafetensorsFile(data, data.name, size, (), {})
    for name, (start, nbytes) in places.items():
        if min(start, nbytes) < 0 or start + nbytes > size:
            why = f"ends at byte {start + nbytes} of {shown(data.name)}, which has {size} bytes; copy the file again"
            raise CheckpointError(f"{shown(name)}: {why}")
    try:
        nodes = [*openvino.Core().read_model(str(path)).get_ordered_ops()]
    except RuntimeError as error:
        raise _unusable(path, error) from None
    owners = {_name_of(node): node for node in nodes if node.get_type_name() == "Constant"}
    constants = {}
    for name, node in owners.items():
        kind, place = node.get_element_type().get_type_name(), places.get(node.get_friendly_name())
        if kind not in _IR_TYPES or place is None:
            raise CheckpointError(f"{shown(name)}: is a constant of type {kind}, which fp4kit does not read")
        entry = TensorEntry(name, _IR_TYPES[kind], tuple(node.shape), *place)
        constants[name] = _located(file, entry, size - entry.start, data.name)
    found = [*_decoded_in_ir(nodes, constants)]
    _check_all_read(constants, found, lambda name: _formula_in_ir(_last_step(owners[name])).text)
    return constants, found, "openvino"


def _places(path: Path) -> dict[str, tuple[int, int]]:
    """Return {name: (first byte, number of bytes)} of the constants of an IR, which openvino does not say."""
    try:
        root = ElementTree.parse(path).getroot()
        layers = root.findall("./layers/layer[@type='Const']")
        fields = [(one.get("name", ""), one.find("data")) for one in layers]
        places = [
            (name, int(one.get("offset", "")), int(one.get("size", ""))) for name, one in fields if one is not None
        ]
    except (ElementTree.ParseError, ValueError) as error:
        raise _unusable(path, error) from None
    names = {name.removeprefix("self.").removesuffix("_compressed") for name, _, _ in places}
    inner = len(root.findall(".//layer[@type='Const']")) - len(layers)
    if inner or len(names) < len(layers):
        what = f"{inner} constants are in the bodies of operations" if inner else "two constants have one name"
        raise CheckpointError(f"{shown(path.name)}: {what}, which fp4kit does not read")
    return {name: (start, nbytes) for name, start, nbytes in places}


def _name_of(node: Any) -> str:
    """Return the name of an operation without what conversions from PyTorch and to float16 add."""
    return str(node.get_friendly_name()).removeprefix("self.").removesuffix("_compressed")


def _after(node: Any) -> list[Any]:
    return [one.get_node() for one in node.output(0).get_target_inputs()]


def _last_step(node: Any) -> Any:
    while (after := _after(node)) and after[0].get_type_name() in _STEPS:
        node = after[0]
    return node


def _formula_in_ir(node: Any, depth: int = 8) -> Formula:
    """Return how an operation computes its value. Reshapes, which change no values, are left out."""
    kind, dtype = node.get_type_name(), node.get_element_type().get_type_name()
    if kind == "Constant":
        return Formula(dtype, (_name_of(node),))
    if kind not in _STEPS or not depth:
        return Formula(kind)
    inputs = [one.get_source_output().get_node() for one in node.inputs()]
    a, b = (_formula_in_ir(one, depth - 1) for one in (inputs * 2)[:2])
    if kind in ("Convert", "Reshape"):
        return a if kind == "Reshape" else Formula(f"{dtype}({a.text})", a.constants)
    return Formula(f"({a.text} {'*' if kind == 'Multiply' else '-'} {b.text})", a.constants + b.constants)


def _decoded_in_ir(nodes: Iterable[Any], constants: Mapping[str, Located]) -> Iterator[Decoded]:
    for node in nodes:
        formula = _formula_in_ir(node, 5) if node.get_type_name() == "Multiply" else Formula("")
        kind = _IR_KINDS.get(formula.text)
        if kind is None:
            continue
        last = next((one for one in _after(node) if one.get_type_name() == "Reshape"), node)
        sizes = [one.get_source_output().get_node() for one in last.inputs()[1:]] if last is not node else []
        beside = tuple(_name_of(one) for one in sizes if len(_after(one)) == 1)
        # OpenVINO computes f32(f16 * f16) in float32, unless the conversion is marked as that of a compressed constant.
        wide = [one for one in _after(last) if one.get_element_type().get_type_name() == "f32"]
        marked = [one for one in _after(last) if one not in wide or "decompression_0" in one.get_rt_info()]
        scales = "F32" if node.get_element_type().get_type_name() == "f32" else "F16"
        arithmetic = scales, "F32" if wide and not marked else scales
        parts = tuple(constants[name] for name in formula.constants)
        shape = tuple(map(int, last.get_output_shape(0)))
        axis, block = _blocks_of(parts[0].entry.shape, parts[1].entry.shape, shape)
        found = Decoded(kind, parts, shape, axis, block, arithmetic, beside)
        if block < 0:
            raise _misfit(found)
        yield found


def _blocks_of(codes: tuple[int, ...], scales: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (axis of the blocks, elements per block) of a value in an IR, whose codes may have one more axis."""
    if prod(scales) == 1 and codes == shape:
        return -1, 0
    for axis in (-1, -2):
        one, merged = [*codes], [*codes]
        one[axis] = 1
        if len(codes) == len(shape) + 1:
            size = merged.pop(axis)
            merged[axis] *= size
        if scales == tuple(one) and tuple(merged) == shape:
            return axis, codes[axis]
    return -1, -1


# ONNX -----------------------------------------------------------------------------------------------------------------

_ONNX_TYPES = {
    **{"DOUBLE": "F64", "FLOAT": "F32", "FLOAT16": "F16", "BFLOAT16": "BF16", "BOOL": "BOOL"},
    **{f"{sign}INT{bits}": f"{sign or 'I'}{bits}" for sign in ("", "U") for bits in _INTEGERS},
    **{"FLOAT8E4M3FN": "F8_E4M3", "FLOAT8E5M2": "F8_E5M2", "FLOAT8E8M0": "F8_E8M0", "FLOAT4E2M1": "F4"},
}
_DEQUANTIZE = ("DequantizeLinear", "TRT_FP8DequantizeLinear", "TRT_MXFP8DequantizeLinear")
_ONNX_KINDS = {
    **{f"FLOAT4E2M1 * (FLOAT8E4M3FN * {scale})": "NVFP4" for scale in ("FLOAT", "FLOAT16", "BFLOAT16")},
    "FLOAT4E2M1 * FLOAT8E8M0": "MXFP4",
    "FLOAT8E4M3FN * FLOAT8E8M0": "MXFP8",
    "FLOAT8E4M3FN * UINT8": "MXFP8",  # TensorRT's form, whose scales are bytes of E8M0
    **{f"FLOAT4E2M1 * {scale}": "FP4" for scale in ("FLOAT", "FLOAT16", "BFLOAT16")},
    **{f"FLOAT8E4M3FN * {scale}": "FP8" for scale in ("FLOAT", "FLOAT16", "BFLOAT16")},
}


def _read_onnx(path: Path) -> tuple[dict[str, Located], list[Decoded], str]:
    try:
        import onnx
    except ImportError as error:
        raise _missing(path, "onnx", error) from None
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's DecodeError, or what a damaged file raises
        raise _unusable(path, error) from None
    graph = _Onnx(path, onnx)
    graph.add(model.graph)
    inner = [one.name for each in model.functions for node in each.node for one in node.attribute if one.HasField("t")]
    if inner:
        raise CheckpointError(
            f"{shown(path.name)}: has {len(inner)} constants in functions, which fp4kit does not read"
        )
    found = [*graph.decoded()]
    _check_all_read(graph.constants, found, lambda name: graph.use(name))
    return graph.constants, found, "onnx"


class _Onnx:
    """The constants and the operations of an ONNX model, those of nested graphs included."""

    def __init__(self, path: Path, onnx: Any) -> None:
        self._path, self._onnx = path, onnx
        self._file = SafetensorsFile(path, path.name, path.stat().st_size, (), {})
        self.constants: dict[str, Located] = {}
        self._types: dict[str, str] = {}
        self._made: dict[str, Any] = {}  # name of a value -> its node; None if nodes of several graphs use the name
        self._nodes: list[Any] = []

    def add(self, graph: Any) -> None:
        for tensor in graph.initializer:
            self._add_constant(tensor.name, tensor)
        if len(graph.sparse_initializer):
            raise CheckpointError(f"{shown(self._path.name)}: has sparse initializers, which fp4kit does not read")
        for node in graph.node:
            for attribute in node.attribute:
                for inner in (attribute.g, *attribute.graphs) if attribute.type in (5, 10) else ():
                    self.add(inner)
                if node.op_type == "Constant":
                    self._add_constant(node.output[0], self._tensor_of(attribute, node.output[0]))
            self._made |= {name: None if name in self._made else node for name in node.output}
            self._nodes.append(node)

    def _tensor_of(self, attribute: Any, name: str) -> Any:
        """Return the value of a Constant node, which may be a tensor, or one or several numbers."""
        kind = {1: np.float32, 6: np.float32, 2: np.int64, 7: np.int64}.get(attribute.type)
        if kind is None and attribute.type != 4:
            raise CheckpointError(f"{shown(name)}: is a {attribute.name} of a node, which fp4kit does not read")
        value = self._onnx.helper.get_attribute_value(attribute)
        return value if kind is None else self._onnx.numpy_helper.from_array(np.array(value, kind))

    def _kind(self, number: int) -> str:
        known = self._onnx.TensorProto.DataType
        return str(known.Name(number)) if number in known.values() else f"number {number}"

    def _add_constant(self, name: str, tensor: Any) -> None:
        kind = self._kind(tensor.data_type)
        if name in self.constants or kind not in _ONNX_TYPES:
            why = "two constants have this name" if name in self.constants else f"is a constant of type {kind}"
            raise CheckpointError(f"{shown(name)}: {why}, which fp4kit does not read")
        dtype, shape = _ONNX_TYPES[kind], tuple(tensor.dims)
        self._types[name] = kind
        if tensor.data_location == self._onnx.TensorProto.EXTERNAL:
            self.constants[name] = self._external(
                name, dtype, shape, {one.key: one.value for one in tensor.external_data}
            )
            return
        data = tensor.raw_data
        if not data and prod(shape):  # elements of at most 8 bits are bytes, one per int32
            low = np.array(tensor.int32_data, np.uint8) if files.nbytes_of(dtype, shape) <= prod(shape) else None
            data = (self._onnx.numpy_helper.to_array(tensor) if low is None else low).tobytes()
        entry = InlineEntry(name, dtype, shape, 0, len(data), data)
        self.constants[name] = _located(self._file, entry, len(data), self._path.name)

    def _external(self, name: str, dtype: str, shape: tuple[int, ...], facts: Mapping[str, str]) -> Located:
        """Return the place of a constant in a file of its own, which must be in the folder of the model."""
        location = PurePosixPath(facts.get("location", ""))
        path = self._path.parent / location
        if not location.name or location.is_absolute() or ".." in location.parts or not path.is_file():
            why = f"its data is in {shown(repr(str(location)))}, which is no file in the folder of the model"
            raise CheckpointError(f"{shown(name)}: {why}; copy all files of the model")
        try:
            start = int(facts.get("offset", 0))
            nbytes = int(facts.get("length", files.nbytes_of(dtype, shape)))
        except ValueError:
            raise CheckpointError(f"{shown(name)}: its offset or length is no number; export it again") from None
        entry = ExternalEntry(name, dtype, shape, start, nbytes, path)
        return _located(self._file, entry, path.stat().st_size - start if start >= 0 else 0, path.name)

    def _formula(self, name: str, depth: int = 3) -> Formula:
        if name in self.constants:
            return Formula(self._types[name], (name,))
        node = self._made.get(name)
        if node is None or node.op_type not in _DEQUANTIZE or not depth or len(node.input) < 2:
            return Formula("an input" if node is None else str(node.op_type))
        codes, scales = (self._formula(one, depth - 1) for one in node.input[:2])
        text = f"({scales.text})" if " * " in scales.text else scales.text
        return Formula(f"{codes.text} * {text}", codes.constants + scales.constants)

    def use(self, name: str) -> str:
        node = next((one for one in self._nodes if name in one.input), None)
        return "nothing" if node is None else f"{node.op_type} of {self._formula(node.output[0]).text}"

    def decoded(self) -> Iterator[Decoded]:
        for node in self._nodes:
            formula = self._formula(node.output[0]) if node.op_type in _DEQUANTIZE else Formula("")
            kind = _ONNX_KINDS.get(formula.text)
            if kind is None:
                continue
            parts = tuple(self.constants[name] for name in formula.constants)
            inner = [self._made[node.input[1]]] if node.input[1] in self._made and len(parts) > 2 else []
            arithmetic = self._result(inner[0]) if inner else "F32", self._result(node)
            zeros = tuple(self._zero_points([node, *inner]))
            shape, scales = (one.entry.shape for one in parts[:2])
            facts = self._attributes(node)
            axis, block = facts.get("axis", 1), facts.get("block_size", 0)
            axis = axis - len(shape) if axis >= 0 else axis
            found, fits = Decoded(kind, parts, shape, axis, block, arithmetic, zeros), False
            if not block and prod(scales) == 1:
                found, fits = found._replace(axis=-1), True
            elif axis in (-1, -2) and len(shape) > 1:
                blocks = [*shape]
                blocks[axis] //= block or 1
                fits = block > 0 and shape[axis] % block == 0 and scales == tuple(blocks)
                if not block and len(shape) == 2:  # one scale per element: blocks are whole lines of the other axis
                    fits = scales == (shape[axis],)
                    found = found._replace(axis=-3 - axis, block=shape[-3 - axis])
            if not fits:
                raise _misfit(found)
            yield found

    def _attributes(self, node: Any) -> dict[str, int]:
        return {one.name: one.i for one in node.attribute}

    def _result(self, node: Any) -> str:
        """Return the dtype of what a node computes: output_dtype, or the dtype of the scales."""
        number = self._attributes(node).get("output_dtype", 0)
        if not number and node.input[1] in self._made and node.input[1] not in self._types:
            return self._result(self._made[node.input[1]])  # scales that a node computes
        kind = self._kind(number) if number else self._types[node.input[1]]
        dtype = _ONNX_TYPES.get(kind, kind)
        if dtype not in files.FLOAT_DTYPES:
            raise CheckpointError(f"{shown(node.input[0])}: is decoded to {kind}; FLOAT, FLOAT16 or BFLOAT16 is needed")
        return dtype

    def _zero_points(self, nodes: Iterable[Any]) -> Iterator[str]:
        """Yield the names of zero points, after checking that all are 0."""
        for node in nodes:
            name = node.input[2] if len(node.input) > 2 else ""
            entry = self.constants[name].entry if name in self.constants else None
            if name and not (isinstance(entry, InlineEntry) and not any(entry.data)):
                raise CheckpointError(f"{shown(node.input[0])}: has zero points, which are not 0; zeros are needed")
            yield from [name] * bool(name)


# Suffix -> the function that reads (constants, decoded values, producer) of a file.
_READERS = {".xml": _read_ir, ".onnx": _read_onnx}
