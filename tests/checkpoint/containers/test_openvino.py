"""Test OpenVINO IR: files that NNCF wrote (tests/data/imports), and models made here. OpenVINO computes the values."""

from __future__ import annotations

import pickle
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from file_values import decoded, same
from synthetic import BF16, refused

import fp4kit
from fp4kit.checkpoint import convert, make_plan
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify

DATA = Path(__file__).parents[2] / "data" / "imports"
SOURCE = DATA / "nncf_source.safetensors"
DOWN, UP = "layers.0.down_proj", "layers.0.up_proj"
# file -> {layer: container}; the layers of nncf_nvfp4 that are not here are 8-bit integers
RECORDED = {
    "nncf_nvfp4": dict.fromkeys((DOWN, UP), "openvino NVFP4"),
    "nncf_mxfp4": dict.fromkeys((DOWN, UP), "openvino MXFP4") | {"head": "openvino MXFP8"},
    "nncf_fp4": dict.fromkeys(("embed", "head", DOWN, UP), "openvino FP4 per group"),
    "nncf_fp8": dict.fromkeys(("embed", "head", DOWN, UP), "openvino FP8 per row"),
}
Array = np.ndarray


@pytest.fixture
def ov(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CI", "true")  # OpenVINO then sends no telemetry, for which it would fork: JAX warns of that
    return pytest.importorskip("openvino")


def computed(ov: Any, path: Path) -> dict[str, Array]:
    """Return the same as OpenVINO's CPU plug-in computes it: the last operation of type f16 or f32 that decodes it."""
    core, found = ov.Core(), {}
    for constant in core.read_model(path).get_ordered_ops():
        kind = constant.get_type_name() == "Constant" and constant.get_element_type().get_type_name()
        if kind not in ("f4e2m1", "f8e4m3", "u8"):
            continue
        node = last = constant
        while (after := [one.get_node() for one in node.output(0).get_target_inputs()]) and after[
            0
        ].get_type_name() in ("Convert", "Multiply", "Subtract", "Reshape"):
            node = after[0]
            last = node if node.get_element_type().get_type_name() in ("f16", "f32") else last
        compiled = core.compile_model(ov.Model([last.output(0)], [], "m"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        request = compiled.create_infer_request()
        request.infer({})
        name = constant.get_friendly_name().removeprefix("self.").removesuffix("_compressed")
        found[name] = np.array(request.get_output_tensor(0).data).astype(np.float32)
    return found


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_models_of_nncf(ov: Any, name: str, tmp_path: Path) -> None:
    """Values are those of OpenVINO in every bit; conversions round them to BF16, and keep all other constants."""
    path = DATA / f"{name}.xml"
    model = inspect_checkpoint(path)
    assert {one: weight.dtype for one, weight in model.layers.items()} == RECORDED[name]
    assert not [item for item in model.items if item.group == "refused"]
    have, wanted = decoded(path), computed(ov, path)
    assert {*have} <= {*wanted} and all(same(values, wanted[one]) for one, values in have.items())

    convert(path, tmp_path / "out.safetensors", format="bf16")
    convert(path, tmp_path / "out", format="bf16")
    written = oracle.load_file(tmp_path / "out.safetensors")
    assert oracle.load_file(tmp_path / "out" / "model.safetensors") == written
    for layer in RECORDED[name]:
        dtype, shape, data = written.pop(f"{layer}.weight")
        values = wanted[f"{layer}.weight"]
        assert (dtype, shape, data) == ("BF16", values.shape, values.astype(BF16).tobytes())
    parts = {place.entry.name for weight in model.layers.values() for place in weight.parts.values()}
    assert {*written} == {*model.tensors} - parts
    for one in {*have} & {*written}:  # integers
        assert written[one][2] == wanted[one].astype({"F16": np.float16, "F32": np.float32}[written[one][0]]).tobytes()
    issues = verify(tmp_path / "out.safetensors", path).issues + verify(path, SOURCE).issues
    assert not [issue for issue in issues if issue.severity == "error" and "is not in the source" not in issue.text]


def test_recorded_models_are_identified(ov: Any) -> None:
    found = {name: identify_checkpoint(DATA / f"{name}.xml", SOURCE) for name in RECORDED}
    assert "nvfp4-nncf" in found["nncf_nvfp4"].sentence and found["nncf_nvfp4"].is_clean
    assert all(recipe in found["nncf_mxfp4"].sentence for recipe in ("mxfp4-nncf", "mxfp8-nncf"))
    assert "fp4-nncf or fp4-nncf-small made 4 layers" in found["nncf_fp4"].sentence
    assert "FP8 per row" in str(found["nncf_fp8"])
    recipes = {name: fp4kit.open_checkpoint(DATA / f"{name}.xml")[DOWN].recipe.id for name in RECORDED}
    assert [recipes[name] for name in ("nncf_nvfp4", "nncf_mxfp4", "nncf_fp4")] == [
        "nvfp4-nncf",
        "mxfp4-nncf",
        "fp4-nncf",
    ]


def test_other_formats_keep_codes_only_if_values_stay_equal(ov: Any, tmp_path: Path) -> None:
    """Powers of two as scales stay exact in float16; products with other scales do not."""
    convert(DATA / "nncf_mxfp4.xml", tmp_path / "out", format="compressed-tensors")
    convert(tmp_path / "out", tmp_path / "back", format="bf16")
    found, made = decoded(DATA / "nncf_mxfp4.xml"), oracle.load(tmp_path / "back")
    assert all(made[name][2] == found[name].astype(BF16).tobytes() for name in (f"{DOWN}.weight", f"{UP}.weight"))
    codes = inspect_checkpoint(DATA / "nncf_mxfp4.xml").layers[UP].located
    with Readers() as readers:
        assert oracle.load(tmp_path / "out")[f"{UP}.weight_packed"][2] == readers.bytes(codes).tobytes()
    for name in ("nncf_nvfp4", "nncf_fp8"):
        with refused("would change its values; use --requantize to allow that"):
            make_plan(DATA / f"{name}.xml", format="compressed-tensors")


# Models made here -----------------------------------------------------------------------------------------------------


def constant(ov: Any, kind: str, data: Array, shape: tuple[int, ...], name: str = "") -> Any:
    """Return a constant of a type that NumPy lacks, from its bytes."""
    tensor = ov.Tensor(getattr(ov.Type, kind), ov.Shape([*shape]))
    np.asarray(tensor.data).reshape(-1).view(np.uint8)[:] = data.reshape(-1).view(np.uint8)
    made = ov.op.Constant(tensor)
    made.set_friendly_name(name or made.get_friendly_name())
    return made


def saved(ov: Any, path: Path, value: Any) -> Path:
    ov.save_model(ov.Model([ov.opset13.result(value)], [], "m"), path, compress_to_fp16=False)
    return path


def folded(ov: Any, path: Path) -> Array:
    """Return the value of a model without inputs, as OpenVINO folds constants, which does not flush subnormals."""
    passes = pytest.importorskip("openvino.passes")
    model, manager = ov.Core().read_model(path), passes.Manager()
    manager.register_pass(passes.ConstantFolding())
    manager.run_passes(model)
    (made,) = (one for one in model.get_ordered_ops() if one.get_type_name() == "Constant")
    return np.array(made.data).astype(np.float32)


KINDS = {"NVFP4": ("f4e2m1", 16), "MXFP4": ("f4e2m1", 32), "MXFP8": ("f8e4m3", 32), "FP8": ("f8e4m3", 64)}


def graph(
    ov: Any,
    kind: str,
    codes: Array,
    scales: Array,
    shape: tuple[int, ...],
    tensor_scale: float = 1.0,
    t: str = "f16",
    last: str = "f32",
) -> Any:
    """Return a value that is decoded as NNCF decodes it. shape: that of the decoded value."""
    op, types, name = ov.opset13, ov.Type, KINDS[kind][0]
    wide, t = codes.shape, getattr(types, t)
    data = codes if name == "f8e4m3" else codes.reshape(-1)[0::2] | codes.reshape(-1)[1::2] << 4
    value = op.convert(constant(ov, name, data, wide, "self.a.weight_compressed"), t)
    if kind == "NVFP4":
        one = op.constant(np.full([1] * len(wide), tensor_scale, np.float32))
        scale = op.multiply(op.convert(constant(ov, "f8e4m3", scales, scales.shape), types.f32), one)
        scale = op.convert(scale, t) if t != types.f32 else scale
    else:
        scale = op.convert(constant(ov, "f8e8m0", scales, scales.shape), t)
    if kind == "FP8":
        scale = op.constant(scales.view(np.float16))
    value = op.reshape(op.multiply(value, scale), op.constant(np.array(shape)), False)
    return op.convert(value, getattr(types, last)) if last else value


@pytest.mark.parametrize("t", ["f16", "f32"])
@pytest.mark.parametrize("kind", ["NVFP4", "MXFP4", "MXFP8"])
def test_every_code_under_every_scale(ov: Any, kind: str, t: str, tmp_path: Path) -> None:
    """Values are those that OpenVINO computes in float16 or float32, NaN and overflowing scales included."""
    size, block = (256, 32) if kind == "MXFP8" else (16, KINDS[kind][1])
    codes = np.tile((np.arange(max(size, block)) % size).astype(np.uint8), (256, 1)).reshape(256, -1, block)
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], codes.shape[1], 1)[..., None]
    shape = 256, codes.shape[1] * block
    for tensor_scale in (1.0, 3.3e-4, 1e-9, 7e5, 1e38)[: 5 if kind == "NVFP4" else 1]:
        for last in ("f32", "f16") if t == "f16" else ("",):  # f16: the product is rounded, as in marked conversions
            value = graph(ov, kind, codes, scales, shape, tensor_scale, t, "f32" if last == "f32" else "")
            path = saved(ov, tmp_path / "m.xml", value)
            (found,) = decoded(path).values()
            assert same(found, folded(ov, path)), (tensor_scale, last)


@pytest.mark.parametrize("kind", ["NVFP4", "MXFP4", "MXFP8", "FP8"])
def test_blocks_along_columns_and_stacks(ov: Any, kind: str, tmp_path: Path) -> None:
    """A weight [K, N], and a stack of experts [E, N, K], decode in their own shape, large ones too."""
    rng, block = np.random.default_rng(3), KINDS[kind][1]
    for wide, axis, shape in (
        ((3, block, 10), 1, (3 * block, 10)),
        ((2, 6, 3, block), 3, (2, 6, 3 * block)),
        ((2, 3, block, 10), 2, (2, 3 * block, 10)),
    ):
        codes = rng.integers(0, 127 if KINDS[kind][0] == "f8e4m3" else 16, wide).astype(np.uint8)
        few = tuple(1 if i == axis else n for i, n in enumerate(wide))
        scales = rng.integers(110, 126, few).astype(np.uint8)
        scales = rng.random(few).astype(np.float16).view(np.uint8) if kind == "FP8" else scales
        scales = scales.reshape(*few[:-1], -1)
        path = saved(ov, tmp_path / "m.xml", graph(ov, kind, codes, scales, shape, 0.01))
        weight = inspect_checkpoint(path).layers["a"]
        assert weight.shape == ((*shape[:-2], shape[-1], shape[-2]) if weight.transposed else shape)
        assert weight.transposed == (axis != len(wide) - 1) and pickle.loads(pickle.dumps(weight)) == weight
        (found,) = decoded(path).values()
        assert same(found, folded(ov, path))
        convert(path, tmp_path / f"{axis}{len(wide)}.safetensors", format="bf16")
        ((_, written, data),) = oracle.load_file(tmp_path / f"{axis}{len(wide)}.safetensors").values()
        values = found.swapaxes(-1, -2) if weight.transposed and len(shape) == 2 else found
        assert (written, data) == (values.shape, np.ascontiguousarray(values.astype(BF16)).tobytes())


def test_integers(ov: Any, tmp_path: Path) -> None:
    """Every code under every zero point, and signed integers without zero points; any range of bytes can be read."""
    op, types = ov.opset13, ov.Type
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    zeros, scales = np.arange(256, dtype=np.uint8)[:, None], np.linspace(-2, 300, 256, dtype=np.float16)[:, None]
    value = op.convert(op.constant(codes), types.f16)
    value = op.subtract(value, op.convert(op.constant(zeros), types.f16))
    for made in (value, op.convert(op.constant(codes.view(np.int8)), types.f16)):
        product = op.multiply(made, op.constant(scales))
        path = saved(ov, tmp_path / "m.xml", op.convert(product, types.f32))
        (found,) = decoded(path).values()
        assert same(found, folded(ov, path))
        (place,) = inspect_checkpoint(path).tensors.values()
        with Readers() as readers:
            raw = readers.of(place[0]).read_bytes(place[1], 1001, 4003)
        assert raw.tobytes() == found.tobytes()[1001:5004]


# Faults ---------------------------------------------------------------------------------------------------------------


def _text(pattern: str, new: str, count: int = 1) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        text, found = re.subn(pattern, new, path.read_text(), count=count)
        assert found
        path.write_text(text)

    return change


def _cut(path: Path) -> None:
    data = path.with_suffix(".bin")
    data.write_bytes(data.read_bytes()[:-2000])


LAYERS = r'(name="self.layers.0.up_proj.weight_compressed" type="Const" version="opset1">\s*<data )'
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated weights": (_cut, "of m.bin, which has 1532 bytes; copy the file again"),
    "no weights": (lambda path: path.with_suffix(".bin").unlink(), "m.bin: is missing beside m.xml; copy both files"),
    "truncated graph": (lambda path: path.write_text(path.read_text()[:-3000]), "m.xml: not a usable model"),
    "no graph": (lambda path: path.write_text("<net/>"), "m.xml: not a usable model"),
    "a size": (_text(LAYERS + r'(.*?)size="\d+"', r'\1\2size="77"'), "m.xml: not a usable model"),
    "a place": (
        _text(LAYERS + r'(.*?)offset="\d+"', r'\1\2offset="99999999"'),
        "self.layers.0.up_proj.weight_compressed: ends at",
    ),
    "a place that is no number": (_text(LAYERS + r'(.*?)offset="\d+"', r'\1\2offset="x"'), "m.xml: not a usable model"),
    "a type": (
        _text('element_type="i32"', 'element_type="nf4"'),
        "is a constant of type nf4, which fp4kit does not read",
    ),
    "two constants of one name": (
        _text('name="self.head.weight_compressed/scale"', 'name="self.embed.weight_compressed/scale"'),
        "two constants have one name",
    ),
    "constants in a body": (
        _text("</layers>", '<layer><body><layer type="Const"/></body></layer></layers>'),
        "1 constants are in the bodies",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_damaged_files_are_refused_by_name(ov: Any, name: str, tmp_path: Path) -> None:
    change, text = FAULTS[name]
    for end in (".xml", ".bin"):
        shutil.copy(DATA / f"nncf_nvfp4{end}", tmp_path / f"m{end}")
    change(tmp_path / "m.xml")
    with refused(text):
        make_plan(tmp_path / "m.xml", format="bf16")
    with refused(text):
        inspect_checkpoint(tmp_path / "m.xml")


def _unknown(ov: Any) -> dict[str, tuple[Any, str]]:
    """Return {what: (value of a model, what the message says)}: constants that no known formula decodes."""
    op, types = ov.opset13, ov.Type
    low, high = (constant(ov, "f4e2m1", np.zeros(n // 2, np.uint8), (4, n // 4), "w") for n in (128, 512))
    exponents = constant(ov, "f8e8m0", np.full(4, 127, np.uint8), (4, 1))
    ones = op.constant(np.ones((4, 1), np.float16))
    half = op.convert(low, types.f16)
    cube = constant(ov, "f8e4m3", np.zeros(64, np.uint8), (2, 2, 2, 8), "w")
    nf4 = constant(ov, "nf4", np.zeros(64, np.uint8), (4, 32), "w")
    return {
        "a cast": (op.convert(low, types.f32), "w: is F4, decoded as f32(f4e2m1), which fp4kit does not read"),
        "a sum": (op.add(half, ones), "w: is F4, decoded as f16(f4e2m1)"),
        "offsets": (op.multiply(op.subtract(half, ones), ones), "w: is F4, decoded as ((f16(f4e2m1) - f16) * f16)"),
        "bfloat16": (
            op.multiply(op.convert(low, types.bf16), op.convert(exponents, types.bf16)),
            "decoded as (bf16(f4e2m1) * bf16(f8e8m0))",
        ),
        "wide blocks": (
            op.multiply(op.convert(high, types.f16), op.convert(exponents, types.f16)),
            "w: MXFP4 [4, 128], decoded to [4, 128], has scales F8_E8M0 [4, 1]; a matrix or a stack of matrices with"
            " blocks of 32 is needed",
        ),
        "four axes": (
            op.multiply(op.convert(cube, types.f16), op.constant(np.ones((1, 1, 1, 1), np.float16))),
            "w: FP8 [2, 2, 2, 8], decoded to [2, 2, 2, 8], has scales F16 [1, 1, 1, 1]",
        ),
        "scales per column": (
            op.multiply(half, op.constant(np.ones((2, 1, 32), np.float16))),
            "w: FP4 [4, 32], decoded to [2, 4, 32], has scales F16 [2, 1, 32]",
        ),
        "two ways": (
            op.add(op.multiply(half, ones), op.multiply(half, op.constant(np.zeros((4, 1), np.float16)))),
            "w: is decoded in two ways, which fp4kit does not read",
        ),
        "NF4": (op.multiply(op.convert(nf4, types.f16), ones), "w: is a constant of type nf4, which fp4kit does not"),
    }


def test_unknown_formulas_and_shapes_are_refused_by_name(ov: Any, tmp_path: Path) -> None:
    for what, (value, text) in _unknown(ov).items():
        path = saved(ov, tmp_path / f"{what}.xml", value)
        with refused(text):
            make_plan(path, format="bf16")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with refused("nncf_fp4.xml: reading it needs the package openvino") as error:
        inspect_checkpoint(DATA / "nncf_fp4.xml")
    assert "pip install 'fp4kit[openvino]'" in str(error.value)


def test_paths_that_users_give() -> None:
    """The weights, and a directory with them, are refused with the name of the graph."""
    with refused("pass nncf_fp4.xml, the graph with these weights"):
        inspect_checkpoint(DATA / "nncf_fp4.bin")
    with refused("pass nncf_fp4.xml, the graph with these weights"):
        make_plan(DATA / "nncf_fp4.bin", format="bf16")


def test_hostile_entities(ov: Any, tmp_path: Path) -> None:
    """An XML bomb is refused by the parser."""
    entities = "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 10))
    (tmp_path / "m.xml").write_text(f'<!DOCTYPE net [<!ENTITY a0 "aaaaaaaaaa">{entities}]><net>&a9;</net>')
    (tmp_path / "m.bin").write_bytes(b"")
    with refused("m.xml: not a usable model"):
        inspect_checkpoint(tmp_path / "m.xml")
