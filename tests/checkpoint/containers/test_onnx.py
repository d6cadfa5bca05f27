"""Test ONNX: models that Model-Optimizer's exporters wrote (tests/data/imports), and models made here, against onnx's
reference evaluator.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy_formats as numpy
import oracle
import pytest
from file_values import decoded, same
from synthetic import BF16, refused, write_file

import fp4kit
from fp4kit.checkpoint import convert, make_plan
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify

DATA = Path(__file__).parents[2] / "data" / "imports"
N, K = 16, 64
rng = np.random.default_rng(5)
C4, C8 = (rng.integers(0, size, (N, K)).astype(np.uint8) for size in (16, 256))
Array = np.ndarray


@pytest.fixture
def onnx() -> Any:
    pytest.importorskip("onnx.reference")
    return pytest.importorskip("onnx")


def low(onnx: Any, name: str, kind: str, codes: Array) -> Any:
    """Return a tensor of 4-bit or 8-bit floats, from one code per byte."""
    flat = codes.astype(np.uint8).reshape(-1)
    data = flat[0::2] | flat[1::2] << 4 if kind == "FLOAT4E2M1" else flat
    return onnx.helper.make_tensor(name, getattr(onnx.TensorProto, kind), codes.shape, data.tobytes(), raw=True)


def node(onnx: Any, inputs: str, output: str, **attributes: Any) -> Any:
    return onnx.helper.make_node("DequantizeLinear", inputs.split(), [output], **attributes)


def model(onnx: Any, tensors: Iterable[Any], nodes: Iterable[Any], opset: int = 25) -> Any:
    """Return a model without inputs whose output is y."""
    out = onnx.helper.make_empty_tensor_value_info("y")
    made = onnx.helper.make_graph([*nodes], "g", [], [out], initializer=[*tensors])
    return onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=11)


def evaluated(onnx: Any, path: Path, name: str = "y") -> Array:
    """Return a value of a model without inputs as onnx's reference evaluator computes it, as float32."""
    graph = onnx.load(path)
    del graph.graph.output[:], graph.graph.input[:]
    graph.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    needed, kept = {name}, []
    for one in reversed(graph.graph.node):
        if {*one.output} & needed:
            needed |= {*one.input}
            one.domain = ""  # Model-Optimizer leaves "trt" there
            kept.insert(0, one)
    del graph.graph.node[:]
    graph.graph.node.extend(kept)
    with np.errstate(all="ignore"):
        return np.asarray(onnx.reference.ReferenceEvaluator(graph).run(None, {})[0]).astype(np.float32)


def test_recorded_models_of_modelopt(onnx: Any, tmp_path: Path) -> None:
    """Two levels of scales, bytes of E8M0 of TensorRT's operation, and FP8 with one scale, which is stored [K, N]."""
    source, name = DATA / "modelopt_source.safetensors", "layers.0.up_proj"
    wanted = {"NVFP4": evaluated(onnx, DATA / "modelopt_nvfp4.onnx", "wq")}
    wanted["FP8"] = evaluated(onnx, DATA / "modelopt_fp8.onnx", "wd")
    parts = {one.name: one for one in onnx.load(DATA / "modelopt_mxfp8.onnx").graph.initializer}
    codes = np.frombuffer(parts[f"{name}.weight"].raw_data, ml_dtypes.float8_e4m3fn).reshape(48, 64)
    scales = np.exp2(onnx.numpy_helper.to_array(parts[f"{name}.scale"]).astype(np.float32) - 127)
    wanted["MXFP8"] = (codes.astype(np.float32) * scales.repeat(32, 1)).astype(np.float16).astype(np.float32)
    for kind, values in wanted.items():
        path = DATA / f"modelopt_{kind.lower()}.onnx"
        read = inspect_checkpoint(path)
        assert [(one, weight.dtype) for one, weight in read.layers.items()] == [(name, f"onnx {kind}")]
        assert not [item for item in read.items if item.group == "refused"]
        (found,) = decoded(path).values()
        assert same(found, values)
        convert(path, tmp_path / f"{kind}.safetensors", format="bf16")
        made = oracle.load_file(tmp_path / f"{kind}.safetensors")
        assert made[f"{name}.weight"] == ("BF16", values.shape, values.astype(BF16).tobytes())
        assert {*made} == {f"{name}.weight"} | {one for one in read.tensors if one.endswith("bias")}
    assert "nvfp4-" in identify_checkpoint(DATA / "modelopt_nvfp4.onnx", source).sentence
    assert identify_checkpoint(DATA / "modelopt_mxfp8.onnx", source).is_clean


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=["F32", "F16", "BF16"])
def test_forms(onnx: Any, dtype: Any, tmp_path: Path) -> None:
    """One scale, one per row or column, per group of a row or column; one level or two; the dtype of scales."""
    scales = {
        "axis=1": np.linspace(0.01, 3, 1).reshape(()),
        "axis=0": np.linspace(-0.01, 3e4, N),
        "axis=1 ": np.linspace(0.01, 3e4, K),
        "axis=-1,block_size=32": np.linspace(1e-6, 3e4, N * 2).reshape(N, 2),
        "axis=-2,block_size=4": np.linspace(1e-6, 3e4, N * K // 4).reshape(N // 4, K),
    }
    for kind, codes in (("FLOAT8E4M3FN", C8), ("FLOAT4E2M1", C4)):
        for form, values in scales.items():
            if not values.shape and kind == "FLOAT4E2M1":
                continue
            facts = {key: int(value) for key, value in (one.split("=") for one in form.strip().split(","))}
            tensors = [low(onnx, "a.weight", kind, codes), onnx.numpy_helper.from_array(values.astype(dtype), "s")]
            onnx.save(model(onnx, tensors, [node(onnx, "a.weight s", "y", **facts)]), tmp_path / "m.onnx")
            (found,) = decoded(tmp_path / "m.onnx").values()
            assert same(found, evaluated(onnx, tmp_path / "m.onnx")), (kind, form)
    for axis, block in ((-1, rng.integers(0, 127, (N, K // 16))), (0, rng.integers(0, 127, (1, K)))):
        tensors = [low(onnx, "w", "FLOAT4E2M1", C4), low(onnx, "b", "FLOAT8E4M3FN", block)]
        tensors.append(onnx.numpy_helper.from_array(np.array([0.0123], dtype), "t"))
        nodes = [node(onnx, "b t", "s"), node(onnx, "w s", "y", axis=axis, block_size=16)]
        onnx.save(model(onnx, tensors, nodes), tmp_path / "m.onnx")
        (found,) = decoded(tmp_path / "m.onnx").values()
        assert same(found, evaluated(onnx, tmp_path / "m.onnx")), axis


def test_blocks_along_k_of_a_turned_weight(onnx: Any, tmp_path: Path) -> None:
    """A weight [K, N] keeps its codes and scales in another container, and identify names its recipe."""
    q = fp4kit.quantize(numpy.gaussian(3, 96, 64), "nvfp4-modelopt")
    codes, scales = fp4kit.unpack(np.asarray(q.packed)), np.asarray(q.block_scale)
    tensors = [low(onnx, "a.weight_f4", "FLOAT4E2M1", codes.T), low(onnx, "s", "FLOAT8E4M3FN", scales.T)]
    tensors.append(onnx.numpy_helper.from_array(np.asarray(q.tensor_scale), "t"))
    nodes = [node(onnx, "s t", "b"), node(onnx, "a.weight_f4 b", "y", axis=0, block_size=16)]
    path = tmp_path / "m.onnx"
    onnx.save(model(onnx, tensors, nodes), path)
    write_file(tmp_path / "x.safetensors", {"a.weight": numpy.gaussian(3, 96, 64)})
    assert "nvfp4-modelopt" in identify_checkpoint(path, tmp_path / "x.safetensors").sentence
    assert not [issue for issue in verify(path, tmp_path / "x.safetensors").issues if issue.severity == "error"]
    assert fp4kit.open_checkpoint(path)["a"].recipe.id == "nvfp4-modelopt"
    convert(path, tmp_path / "out", format="modelopt")
    made = oracle.load(tmp_path / "out")
    assert made["a.weight"] == ("U8", (96, 32), np.asarray(q.packed).tobytes())
    assert made["a.weight_scale"] == ("F8_E4M3", (96, 4), scales.tobytes())


def test_every_code_under_every_power(onnx: Any, tmp_path: Path) -> None:
    """MXFP4 and MXFP8 with scales in FLOAT8E8M0 and all results that output_dtype can ask for."""
    scales = low(onnx, "s", "FLOAT8E8M0", np.arange(256).repeat(8).reshape(256, 8))
    for kind, size in (("FLOAT8E4M3FN", 256), ("FLOAT4E2M1", 16)):
        codes = low(onnx, "w", kind, np.tile(np.arange(256) % size, (256, 1)))
        for result in ("FLOAT", "FLOAT16", "BFLOAT16"):
            facts = {"axis": 1, "block_size": 32, "output_dtype": getattr(onnx.TensorProto, result)}
            onnx.save(model(onnx, [codes, scales], [node(onnx, "w s", "y", **facts)]), tmp_path / "m.onnx")
            (found,) = decoded(tmp_path / "m.onnx").values()
            assert same(found, evaluated(onnx, tmp_path / "m.onnx")), (kind, result)


def test_places_of_constants(onnx: Any, tmp_path: Path) -> None:
    """Constants may be in a file beside the model, in fields of numbers, in nodes and in nested graphs."""
    stack = rng.integers(0, 16, (3, N, K)).astype(np.uint8)
    block = rng.integers(0, 127, (3, N, K // 16)).astype(np.uint8)
    parts = [low(onnx, "e.weight", "FLOAT4E2M1", stack), low(onnx, "b", "FLOAT8E4M3FN", block)]
    parts.append(onnx.numpy_helper.from_array(np.float32(0.3), "t"))
    others = [onnx.numpy_helper.from_array(np.arange(6), "ids"), onnx.numpy_helper.from_array(C8, "bytes")]
    nodes = [node(onnx, "b t", "s"), node(onnx, "e.weight s", "y", axis=2, block_size=16)]
    inside = model(onnx, [*parts, *others], nodes)
    onnx.save(inside, tmp_path / "inside.onnx")
    onnx.save(inside, tmp_path / "beside.onnx", save_as_external_data=True, location="beside.data", size_threshold=99)
    values = evaluated(onnx, tmp_path / "inside.onnx")
    for name in ("inside", "beside"):
        (found,) = decoded(tmp_path / f"{name}.onnx").values()
        assert same(found, values)
        convert(tmp_path / f"{name}.onnx", tmp_path / f"{name}.safetensors", format="bf16", ignore=["bytes"])
    made = oracle.load_file(tmp_path / "beside.safetensors")
    assert made == oracle.load_file(tmp_path / "inside.safetensors")
    assert made["ids"] == ("I64", (6,), np.arange(6).tobytes())

    h, types = onnx.helper, onnx.TensorProto
    typed = [h.make_tensor("w", types.FLOAT4E2M1, [2, 32], np.arange(64) % 13 - 6.0)]
    typed += [
        h.make_tensor("b", types.FLOAT8E4M3FN, [2, 2], [1, 2, 0.5, 448]),
        h.make_tensor("t", types.FLOAT, [], [2]),
    ]
    typed += [h.make_tensor("zero", types.FLOAT8E4M3FN, [], [0]), h.make_tensor("h", types.FLOAT16, [2], [1.5, 2.5])]
    nodes = [node(onnx, "b t zero", "s"), node(onnx, "w s", "y", axis=1, block_size=16)]
    constants = [h.make_node("Constant", [], [one.name], value=one) for one in typed]
    numbers = {"value_float": 0.5, "value_floats": [1.0, 2.0], "value_int": 7, "value_ints": [3, 4]}
    constants += [h.make_node("Constant", [], [key], **{key: value}) for key, value in numbers.items()]
    branch = h.make_graph([*constants, *nodes], "branch", [], [h.make_tensor_value_info("y", types.FLOAT, [2, 32])])
    nested = [h.make_node("If", ["c"], ["z"], then_branch=branch, else_branch=h.make_graph([], "none", [], []))]
    onnx.save(model(onnx, typed, nodes), tmp_path / "typed.onnx")
    values = evaluated(onnx, tmp_path / "typed.onnx")
    for tensors, made_by in ((typed, nodes), ([], [*constants, *nodes]), ([], nested)):
        onnx.save(model(onnx, tensors, made_by), tmp_path / "typed.onnx")
        (found,) = decoded(tmp_path / "typed.onnx").values()
        assert same(found, values)
        read = inspect_checkpoint(tmp_path / "typed.onnx")
        entry = read.tensors["h"][1]
        assert entry.computed(read_nothing, 0, 4).tobytes() == np.array([1.5, 2.5], np.float16).tobytes()
        for key in numbers if made_by is not nodes else ():
            place, dtype = read.tensors[key][1], np.float32 if "float" in key else np.int64
            assert place.computed(read_nothing, 0, place.nbytes).tobytes() == np.array(numbers[key], dtype).tobytes()


def read_nothing(*place: Any) -> Array:
    raise AssertionError(place)


def _faults(onnx: Any) -> dict[str, tuple[Any, str]]:
    """Return {what: (model, what the message says)}."""
    scales = onnx.numpy_helper.from_array(np.ones((N, 2), np.float32), "s")
    w4, w8 = low(onnx, "w", "FLOAT4E2M1", C4), low(onnx, "w", "FLOAT8E4M3FN", C8)

    def ones_of(name: str) -> Any:
        return onnx.numpy_helper.from_array(np.float32(1), name)

    powers, ones = low(onnx, "s", "FLOAT8E8M0", np.zeros((N, 2))), ones_of("s")
    plain = node(onnx, "w s", "y", axis=1, block_size=32)
    short = low(onnx, "w", "FLOAT4E2M1", C4)
    short.raw_data = short.raw_data[:-3]
    far = low(onnx, "w", "FLOAT4E2M1", C4)
    far.data_location = onnx.TensorProto.EXTERNAL
    far.ClearField("raw_data")
    far.external_data.add(key="location", value="../secret.bin")
    fnuz = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT8E4M3FNUZ, [N, K], C8.tobytes(), raw=True)
    int4 = onnx.helper.make_tensor("w", onnx.TensorProto.INT4, [N, K], bytes(N * K // 2), raw=True)
    cast = onnx.helper.make_node("Cast", ["w"], ["y"], to=1)
    no_scale = onnx.helper.make_node("DequantizeLinear", ["w", "missing"], ["y"], axis=1, block_size=32)
    zeros = low(onnx, "z", "FLOAT8E4M3FN", np.ones((N, 2)))
    two = [plain, node(onnx, "w t", "z", axis=1, block_size=32)]
    other = onnx.numpy_helper.from_array(np.full((N, 2), 2, np.float32), "t")
    text = onnx.helper.make_node("Constant", [], ["y"], value_string="a")
    one_by_one = np.ones((1, 1), np.float32)
    newer, empty, back = (low(onnx, "w", "FLOAT8E4M3FN", C8) for _ in range(3))
    newer.data_type, empty.raw_data = 99, b""
    empty.dims[0] = 0
    back.data_location = onnx.TensorProto.EXTERNAL
    back.external_data.add(key="location", value="m.onnx")
    back.external_data.add(key="offset", value="-8")
    inner = onnx.helper.make_node("Constant", [], ["c"], value=scales)
    function = onnx.helper.make_function("d", "f", [], ["c"], [inner], [onnx.helper.make_opsetid("", 25)])
    called = model(onnx, [w8, scales], [plain])
    called.functions.append(function)
    half, whole = node(onnx, "w s", "y", axis=1, block_size=16), node(onnx, "w s", "y", axis=1)
    return {
        "truncated constant": (
            model(onnx, [short, scales], [plain]),
            "w: F4 [16, 64] needs 512 bytes, but m.onnx has 509",
        ),
        "data elsewhere": (
            model(onnx, [far, scales], [plain]),
            "w: its data is in '../secret.bin', which is no file in",
        ),
        "FNUZ": (
            model(onnx, [fnuz, scales], [plain]),
            "w: is a constant of type FLOAT8E4M3FNUZ, which fp4kit does not",
        ),
        "INT4": (model(onnx, [int4, scales], [plain]), "w: is a constant of type INT4, which fp4kit does not read"),
        "a cast": (model(onnx, [w4], [cast]), "w: is F4, decoded as Cast of Cast, which fp4kit does not read"),
        "no use": (model(onnx, [w8], []), "w: is F8_E4M3, decoded as nothing, which fp4kit does not read"),
        "missing scales": (model(onnx, [w4], [no_scale]), "decoded as DequantizeLinear of FLOAT4E2M1 * an input"),
        "scales of scales of powers": (
            model(onnx, [w4, powers, scales], [node(onnx, "s s", "t"), node(onnx, "w t", "y")]),
            "two constants have this name",
        ),
        "blocks of 64": (
            model(
                onnx,
                [w4, low(onnx, "s", "FLOAT8E8M0", np.zeros((N, 1)))],
                [node(onnx, "w s", "y", axis=1, block_size=64, output_dtype=1)],
            ),
            "w: MXFP4 [16, 64], decoded to [16, 64], has scales F8_E8M0 [16, 1]; a matrix or a stack of matrices with",
        ),
        "scales of a wrong shape": (
            model(onnx, [w8, scales], [half]),
            "w: FP8 [16, 64], decoded to [16, 64], has scales",
        ),
        "scales without blocks": (model(onnx, [w8, scales], [whole]), "has scales F32 [16, 2]; a matrix or a stack of"),
        "powers as a result": (model(onnx, [w4, powers], [plain]), "w: is decoded to FLOAT8E8M0; FLOAT, FLOAT16 or"),
        "zero points": (
            model(onnx, [w8, scales, zeros], [node(onnx, "w s z", "y", axis=1, block_size=32)]),
            "w: has zero points, which are not 0",
        ),
        "4 bits under one scale": (
            model(onnx, [w4, ones], [whole]),
            "w: FP4 [16, 64], decoded to [16, 64], has scales",
        ),
        "four axes": (
            model(onnx, [low(onnx, "w", "FLOAT8E4M3FN", C8.reshape(4, 4, 8, 8)), ones], [whole]),
            "w: FP8 [4, 4, 8, 8], decoded to [4, 4, 8, 8]",
        ),
        "two ways": (model(onnx, [w8, scales, other], two), "w: is decoded in two ways, which fp4kit does not read"),
        "text": (model(onnx, [w8], [text]), "y: is a value_string of a node, which fp4kit does not read"),
        "an unknown type": (model(onnx, [newer], []), "w: is a constant of type number 99, which fp4kit does not read"),
        "one scale for four blocks": (
            model(
                onnx, [low(onnx, "w", "FLOAT8E4M3FN", C8[:1]), onnx.numpy_helper.from_array(one_by_one, "s")], [half]
            ),
            "w: FP8 [1, 64], decoded to [1, 64], has scales F32 [1, 1]",
        ),
        "no elements": (model(onnx, [empty, ones], [whole]), "w: FP8 [0, 64], decoded to [0, 64], has scales F32 []"),
        "a place before the file": (model(onnx, [back, scales], [plain]), "w: F8_E4M3 [16, 64] needs 1024 bytes, but"),
        "functions": (called, "m.onnx: has 1 constants in functions, which fp4kit does not read"),
        "an axis beyond the last": (
            model(onnx, [w8, scales], [node(onnx, "w s", "y", axis=7, block_size=32)]),
            "w: FP8 [16, 64], decoded to [16, 64], has scales F32 [16, 2]",
        ),
        "one name in two graphs": (
            model(
                onnx,
                [w8, scales, ones_of("t")],
                [node(onnx, "s t", "u"), node(onnx, "s t", "u"), node(onnx, "w u", "y")],
            ),
            "w: is F8_E4M3, decoded as DequantizeLinear of FLOAT8E4M3FN * an input, which fp4kit does not read",
        ),
        "no constants": (model(onnx, [], []), "m.onnx: has no constants; the weights are missing"),
    }


def test_faults_are_refused_by_name(onnx: Any, tmp_path: Path) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(512))
    tmp_path /= "model"
    tmp_path.mkdir()
    for what, (made, text) in _faults(onnx).items():
        (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
        for read in (inspect_checkpoint, make_plan):
            with refused(text):
                read(tmp_path / "m.onnx")
        assert what
    for content in (b"PK\3\4" + b"0" * 64, (DATA / "modelopt_nvfp4.onnx").read_bytes()[:-50]):
        (tmp_path / "m.onnx").write_bytes(content)
        with refused("m.onnx: not a usable model"):
            inspect_checkpoint(tmp_path / "m.onnx")


def test_data_beside_a_model_that_is_cut(onnx: Any, tmp_path: Path) -> None:
    tensors = [low(onnx, "w", "FLOAT8E4M3FN", C8), onnx.numpy_helper.from_array(np.float32(0.01), "s")]
    made = model(onnx, tensors, [node(onnx, "w s", "y")])
    onnx.save(made, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    plan = make_plan(tmp_path / "m.onnx", format="bf16")
    data = (tmp_path / "m.data").read_bytes()
    (tmp_path / "m.data").write_bytes(data[:-8])
    with refused("w: F8_E4M3 [16, 64] needs 1024 bytes" if len(data) < 1032 else "s: F32 [] needs 4 bytes"):
        make_plan(tmp_path / "m.onnx", format="bf16")
    place = plan.weights["w"].located
    (tmp_path / "m.data").write_bytes(b"")
    with refused("w: m.data was truncated while it was read"):
        place.entry.computed(read_nothing, 0, 16)
    (tmp_path / "m.data").unlink()
    with refused("which is no file in the folder of the model; copy all files of the model"):
        make_plan(tmp_path / "m.onnx", format="bf16")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with refused("modelopt_fp8.onnx: reading it needs the package onnx") as error:
        inspect_checkpoint(DATA / "modelopt_fp8.onnx")
    assert "pip install 'fp4kit[onnx]'" in str(error.value)
