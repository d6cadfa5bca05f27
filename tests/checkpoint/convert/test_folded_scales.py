"""Test tensor scales that are multiplied into block scales, and layers that must share a tensor scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_files
import ml_dtypes
import numpy as np
import oracle
import pytest
import synthetic
from borrowed_codes import stored
from changed_bytes import change
from oracle import load
from synthetic import refused

import fp4kit
from fp4kit.checkpoint import convert, make_plan
from fp4kit.checkpoint.containers.table import CT_NVFP4, GGUF_NVFP4, GGUF_SCALED, MLX_NVFP4, MODELOPT_NVFP4
from fp4kit.checkpoint.convert.rows import Folding, folded, is_cast_exactly
from fp4kit.checkpoint.model.slabs import Slab
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.checkpoint.verify.compare import compare_checkpoints
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.cli import main
from fp4kit.formats import E4M3, FLT_MAX, FLT_MIN

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
LAYERS = ("model.layers.0.mlp.down_proj", "model.layers.0.self_attn.o_proj")
SCALE = {"modelopt": "weight_scale_2", "compressed-tensors": "weight_global_scale"}


def directory(root: Path, recipe: str = "nvfp4-torchao-single", format: str = "mlx") -> Path:
    """Write a directory with two layers, and its quantized form, which is returned."""
    if not (root / "m").exists():
        tensors = {f"{name}.weight": synthetic.random(name, (64, 64)) for name in LAYERS}
        synthetic.write_model(root / "m", dict(CONFIG), tensors)
    convert(root / "m", root / format, recipe, format=format)
    return root / format


@pytest.mark.parametrize("format", SCALE)
def test_mlx_directories_become_two_level_checkpoints_and_return(format: str, tmp_path: Path) -> None:
    """A directory of MLX gets tensor scales of 1, and a checkpoint with such scales becomes the directory again."""
    mlx = directory(tmp_path)
    report = convert(mlx, tmp_path / "two", format=format)
    assert report.actions["rename"] == 2 and not report.inexact
    a, b = stored(mlx), stored(tmp_path / "two")
    codes = "weight" if format == "modelopt" else "weight_packed"
    for name in LAYERS:
        assert b[f"{name}.{codes}"].tobytes() == a[f"{name}.weight"].tobytes()
        assert b[f"{name}.weight_scale"].tobytes() == a[f"{name}.scales"].tobytes()
        assert b[f"{name}.{SCALE[format]}"].tobytes() == np.float32(1).tobytes()
    back = convert(tmp_path / "two", tmp_path / "back", format="mlx")
    assert back.actions["fold"] == 2 and not back.inexact and not back.changes
    assert {name: x.tobytes() for name, x in stored(tmp_path / "back").items()} == {
        n: x.tobytes() for n, x in a.items()
    }
    for one, source in (("two", mlx), ("back", tmp_path / "two")):
        found = verify(tmp_path / one, source)
        assert found.clean and not any(layer.differing for layer in found.layers)


@pytest.mark.parametrize("format", SCALE)
def test_powers_of_two_fold_exactly(format: str, tmp_path: Path) -> None:
    """Tensor scales that are powers of two go into the block scales, and MLX decodes the same values."""
    convert(directory(tmp_path), tmp_path / "two", format=format)
    for name, factor in zip(LAYERS, (4.0, 0.25), strict=True):
        by = factor if format == "modelopt" else 1 / factor
        change(tmp_path / "two", f"{name}.{SCALE[format]}", lambda x, by=by: x * np.float32(by))
    change(tmp_path / "two", f"{LAYERS[1]}.weight_scale", lambda x: np.full_like(x, E4M3.encode(0.5)), np.uint8)
    report = convert(tmp_path / "two", tmp_path / "back", format="mlx")
    assert report.actions["fold"] == 2 and not report.inexact and not report.changes
    assert all(one.values == 0 for one in compare_checkpoints(tmp_path / "two", tmp_path / "back").layers)
    mx = pytest.importorskip("mlx.core")
    parts = stored(tmp_path / "back")
    convert(tmp_path / "two", tmp_path / "d", format="bf16")
    for name in LAYERS:
        w, scales = (mx.array(parts[f"{name}.{part}"]) for part in ("weight", "scales"))
        values = mx.dequantize(w, scales, group_size=16, bits=4, mode="nvfp4", dtype=mx.bfloat16)
        wanted = stored(tmp_path / "d")[f"{name}.weight"]
        assert np.array(values.astype(mx.float32)).tobytes() == wanted.astype(np.float32).tobytes()


def test_other_tensor_scales_are_refused_with_the_exact_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = directory(tmp_path, "nvfp4-te", "modelopt")
    parts = stored(root)
    name = LAYERS[0]
    old, scale = E4M3.values[parts[f"{name}.weight_scale"].view(np.uint8)], parts[f"{name}.weight_scale_2"]
    new = E4M3.values[E4M3.encode(old * scale)]
    changed = int(np.count_nonzero(new != old * scale))
    error = 100 * np.abs(new.astype(np.float64) / (old * scale) - 1).max()
    text = f"{name}.weight: has a tensor scale, for which the output has no place; multiplied into the block scales:"
    text += f" {changed} of {old.size} products of block and tensor scale change, by up to {error:.3g}%"
    text += " (and 1 more layers); use --requantize"
    with refused(text):
        make_plan(root, format="mlx")
    report = convert(root, tmp_path / "out", format="mlx", requantize=True)
    assert report.actions["fold"] == 2 and {*report.inexact} == {*LAYERS}
    found = stored(tmp_path / "out")
    assert found[f"{name}.scales"].tobytes() == E4M3.encode(old * scale).tobytes()
    assert found[f"{name}.weight"].tobytes() == parts[f"{name}.weight"].tobytes()
    layer = next(one for one in compare_checkpoints(root, tmp_path / "out").layers if one.name == name)
    change_of = report.changes[name]
    assert change_of.blocks == changed and change_of.values == layer.values
    assert verify(tmp_path / "out", root).clean
    assert main(["convert", str(root), str(tmp_path / "o"), "--format", "mlx"]) == 2
    assert "use --requantize to accept that" in " ".join(capsys.readouterr().err.split())


def test_gguf_files_without_tensor_scales(tmp_path: Path) -> None:
    """A GGUF file with tensor scales becomes one without them, for architectures that ignore them."""
    gguf_files.write_model(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "q.gguf", "nvfp4-te")
    with refused("has a tensor scale, for which the output has no place"):
        convert(tmp_path / "q.gguf", tmp_path / "o.gguf", "nvfp4-gguf")
    report = convert(tmp_path / "q.gguf", tmp_path / "o.gguf", "nvfp4-gguf", requantize=True, allow_loss=True)
    assert report.plan.form is GGUF_NVFP4 and {*report.actions} == {"copy", "fold"}


def test_layers_that_lose_their_values_are_refused(tmp_path: Path) -> None:
    """With --requantize, block scales may become 0; a layer of which most is lost needs --allow-loss."""
    root = directory(tmp_path, "nvfp4-te", "modelopt")
    change(root, f"{LAYERS[0]}.weight_scale_2", lambda x: x * np.float32(1e-4))
    with refused(f"{LAYERS[0]}: "):
        convert(root, tmp_path / "out", format="mlx", requantize=True)


# Block scales -> what a factor makes of them ------------------------------------------------------------------------


def slab_of(codes: np.ndarray, scales: np.ndarray, scale: float, divisor: float | None = None) -> Slab:
    stored_divisor = None if divisor is None else np.float32(divisor)
    return Slab(0, None, codes, scales, np.float32(scale), divisor=stored_divisor)


ONES = np.full((1, 8), 0x22, np.uint8)  # one block whose codes are all 1
EVERY = np.flatnonzero(np.isfinite(E4M3.values) & (E4M3.values > 0)).astype(np.uint8)


@pytest.mark.parametrize("form", [MODELOPT_NVFP4, CT_NVFP4, GGUF_SCALED], ids=str)
@pytest.mark.parametrize("exponent", range(-20, 18))
def test_every_block_scale_times_every_power_of_two(
    form: fp4kit.checkpoint.containers.table.Container, exponent: int
) -> None:
    """A power of two is exact unless the product overflows, or has bits below the smallest subnormal, 2^-9."""
    factor = 2.0**exponent
    codes = np.repeat(ONES, EVERY.size, 0)
    slab = slab_of(codes, EVERY[:, None], factor, 1 / factor if form.divides else None)
    found, loss = folded(Weight("a", "a", (EVERY.size, 16), form, {}), slab)
    wanted = E4M3.values[EVERY].astype(np.float64) * factor
    exact = (wanted <= 448) & (wanted * 2**9 == np.floor(wanted * 2**9))
    fits = np.isin(wanted, E4M3.values[EVERY])
    assert (fits == exact).all() or exponent > 0  # 448 bounds products, but not all multiples of 2^-9 are E4M3 numbers
    values = E4M3.values[found[:, 0]].astype(np.float64)
    assert (values[fits] == wanted[fits]).all() and (values[~fits] != wanted[~fits]).all()
    small, large = np.count_nonzero(values == 0), np.count_nonzero(wanted > 448)
    error = np.abs(values / wanted - 1).max()
    assert loss == Folding(EVERY.size, int(np.count_nonzero(~fits)), int(small), int(large), error)
    assert (loss.text == "exact") == bool(fits.all())


def test_classes_of_products() -> None:
    """Each class of product: exact, rounded, saturated, subnormal, lost, and of a block without a nonzero code."""
    cases = [
        (256.0, 0.5, (0, 0, 0), 0.0),
        (1.0, 3.0, (0, 0, 0), 0.0),  # not a power of two, but exact
        (1.125, 3.0, (1, 0, 0), 1 / 27),
        (448.0, 1.5, (1, 0, 1), 1 / 3),
        (440.0, 1.05, (1, 0, 1), None),  # 462 rounds to 448, the largest value
        (2.0**-6, 2.0**-3, (0, 0, 0), 0.0),  # the smallest subnormal
        (1.125 * 2.0**-6, 0.5, (1, 0, 0), None),  # subnormal with too few bits
        (2.0**-9, 0.5, (1, 1, 0), 1.0),
        (2.0**-9, 0.75, (1, 0, 0), 1 / 3),
    ]
    weight = Weight("a", "a", (1, 16), MODELOPT_NVFP4, {})
    for value, factor, (changed, lost, clipped), error in cases:
        scales = np.array([[E4M3.encode(value)]], np.uint8)
        stored_value = float(E4M3.values[scales[0, 0]])
        _, loss = folded(weight, slab_of(ONES, scales, factor))
        assert (loss.scales, loss.changed, loss.underflow, loss.saturated) == (1, changed, lost, clipped), (
            value,
            factor,
        )
        if error is not None and stored_value == value:
            assert loss.largest_error == pytest.approx(error, rel=1e-6)
        zeros = np.where(ONES == 0x22, np.uint8(0x80), ONES)  # codes of +0 and -0
        assert folded(weight, slab_of(zeros, scales, factor))[1] == Folding()
    assert (
        Folding(9, 3, 1, 1, 0.5).text
        == "3 of 9 products of block and tensor scale change (1 become 0, 1 saturate), by up to 50%"
    )
    assert Folding(2, 1, 0, 0, 0.25).plus(Folding(3, 1, 1, 0, 0.5)) == Folding(5, 2, 1, 0, 0.5)


def test_only_containers_without_a_tensor_scale_take_folded_layers() -> None:
    assert (
        MODELOPT_NVFP4.folds_into(MLX_NVFP4) and GGUF_SCALED.folds_into(GGUF_NVFP4) and CT_NVFP4.folds_into(MLX_NVFP4)
    )
    assert not MLX_NVFP4.folds_into(MODELOPT_NVFP4) and not MODELOPT_NVFP4.folds_into(CT_NVFP4)


CT = {"quant_method": "compressed-tensors"}


def mxfp4(module: str, low: int, high: int) -> synthetic.Tensors:
    """Return a layer in compressed-tensors' MXFP4 whose block scales have exponents low <= e < high."""
    codes, scales = synthetic.any_bytes(module, (8, 32)), synthetic.any_bytes(f"{module}s", (8, 2), low, high)
    scales[0] = low, high - 1
    return {f"{module}.weight_packed": codes, f"{module}.weight_scale": scales}


def nvfp4(module: str, scale: float) -> synthetic.Tensors:
    """Return a layer in Model-Optimizer's NVFP4 with the tensor scale `scale`."""
    scales = synthetic.any_bytes(module, (8, 4), 1, 0x7F).view(synthetic.E4M3)
    codes = synthetic.any_bytes(module, (8, 32))
    found: synthetic.Tensors = {f"{module}.weight": codes, f"{module}.weight_scale": scales}
    return {**found, f"{module}.weight_scale_2": np.array(scale, np.float32)}


def numbers(module: str, dtype: Any = ml_dtypes.bfloat16) -> synthetic.Tensors:
    return {f"{module}.weight": synthetic.random(module, (8, 64), 0.3, np.dtype(dtype))}


def written(
    tmp_path: Path, tensors: synthetic.Tensors, recipe: str = "nvfp4-te", **options: Any
) -> tuple[oracle.Loaded, Any]:
    synthetic.write_model(tmp_path / "m", {"quantization_config": CT}, tensors, lambda name: int("up_proj" in name))
    report = convert(tmp_path / "m", tmp_path / "out", recipe, **{"format": "modelopt", **options})
    return load(tmp_path / "out"), report


MIXED = {
    "MXFP4 beside numbers": {**numbers("mlp.gate_proj"), **mxfp4("mlp.up_proj", 120, 124)},
    "NVFP4 beside numbers": {**numbers("mlp.gate_proj"), **nvfp4("mlp.up_proj", 0.01)},
    "NVFP4 beside MXFP4": {**mxfp4("mlp.gate_proj", 120, 124), **nvfp4("mlp.up_proj", 0.01)},
}


@pytest.mark.parametrize("name", MIXED)
def test_layers_that_are_not_stored_alike(tmp_path: Path, name: str) -> None:
    """If one layer of a group is already quantized, all are quantized again with the group's amax.

    That loses precision, so it needs requantize=True.
    """
    tensors = MIXED[name]
    synthetic.write_model(tmp_path / "refused", {"quantization_config": CT}, tensors)
    include = Wishes(include=("mlp.*",) if "numbers" in name else ())
    with refused("and it shares a tensor scale with layers that are stored differently: mlp.(gate_proj|up_proj); use"):
        convert(tmp_path / "refused", tmp_path / "out", format="modelopt", wishes=include)
    loaded, report = written(tmp_path, tensors, requantize=True, wishes=include)
    found = oracle.layers(tensors)
    xs = {module: layer.x for layers in found.values() for module, layer in layers.items()}
    shared = oracle.amax(xs.values())
    for module, x in xs.items():
        for tensor, value in oracle.outputs(
            module, "modelopt", "nvfp4", oracle.quantized(x, "nvfp4-te", shared)
        ).items():
            assert loaded.pop(tensor) == value
    assert not loaded and report.actions["requantize"] >= 1


@pytest.mark.parametrize(("low", "high", "exact"), [(110, 119, True), (105, 122, False), (120, 124, True)])
def test_layers_that_share_a_tensor_scale_are_cast_together(tmp_path: Path, low: int, high: int, exact: bool) -> None:
    """gate and up are cast from MXFP4 to NVFP4 under one tensor scale, which follows from the highest exponent of both.

    Blocks whose exponent is more than 17 below the highest get new codes. That happens to gate here, although a cast of
    gate alone would be exact.
    """
    tensors = {**mxfp4("mlp.gate_proj", low, low + 3), **mxfp4("mlp.up_proj", high, high + 3)}
    loaded, report = written(tmp_path, tensors, allow_loss=not exact)  # most blocks of gate underflow
    assert report.actions == {"cast": 2}
    assert report.inexact == (() if exact else ("mlp.gate_proj",)) and list(report.changes) == list(report.inexact)
    expected = oracle.expected(
        tensors, "nvfp4-te", "modelopt", ["mlp.gate_proj.weight_packed", "mlp.up_proj.weight_packed"]
    )
    assert loaded == expected
    if exact:
        for module in ("mlp.gate_proj", "mlp.up_proj"):
            ((_, before),) = oracle.layers(tensors)[f"{module}.weight_packed"].items()
            ((_, after),) = oracle.layers(oracle.arrays(loaded))[f"{module}.weight"].items()
            assert np.array_equal(before.x.view(np.uint32), after.x.view(np.uint32))


@pytest.mark.parametrize("recipe", ["nvfp4-te", "nvfp4-modelopt", "nvfp4-te-4over6-mse-448"])
@pytest.mark.parametrize("slabs", [False, True], ids=["whole", "slabs"])
def test_only_blocks_out_of_range_change(tmp_path: Path, monkeypatch: Any, recipe: str, slabs: bool) -> None:
    """The codes of all blocks in range are those of the source, and the report counts what changed in the others."""
    tensors = mxfp4("a", 120, 128)
    codes, scales = tensors["a.weight_packed"], tensors["a.weight_scale"]
    scales[2, 1], scales[5, 0], scales[6, 0] = 109, 80, 3
    codes[6, :16] = 0x80  # a block of zeros, which may have any scale
    if slabs:
        monkeypatch.setattr("fp4kit.checkpoint.model.slabs.SLAB_BYTES", 64)
    loaded, report = written(tmp_path, tensors, recipe)
    new = oracle.arrays(loaded)
    q = fp4kit.Quantized.from_parts(codes, scales, None, recipe="mxfp4-ocp")
    found = fp4kit.requantize(q, recipe)
    assert np.array_equal(new["a.weight"], found.quantized.packed)
    assert np.array_equal(new["a.weight_scale"].view(np.uint8), found.quantized.block_scale)
    assert new["a.weight_scale_2"] == found.quantized.tensor_scale == 2.0**-8
    same = np.ones((8, 32), bool)
    same[2, 16:] = same[5, :16] = False
    assert np.array_equal(new["a.weight"][same], codes[same])
    before, after = (fp4kit.dequantize(one, np.float32) for one in (q, found.quantized))
    differ = np.repeat(~same, 2, axis=1) & (before.view(np.uint32) != after.view(np.uint32))
    error = float(np.abs(after - before)[differ].max())
    assert report.changes == {"a": (2, np.count_nonzero(differ), error)} and error > 0
    assert report.inexact == ("a",) and report.actions == {"cast": 1}


def test_a_recipe_with_larger_blocks_quantizes_the_whole_layer_again(tmp_path: Path) -> None:
    """A block of 16x16 holds blocks in range beside those out of range, so no code of the layer can stay."""
    tensors = mxfp4("a", 105, 124)
    tensors = {name: np.concatenate([array] * 2) for name, array in tensors.items()}
    _, report = written(tmp_path, tensors, "nvfp4-te-2d", allow_loss=True)
    assert report.actions == {"requantize": 1} and report.inexact == ("a",) and not report.changes


@pytest.mark.parametrize(
    ("low", "high", "exact"), [(-118, -115, True), (-119, -116, True), (121, 124, True), (122, 125, False)]
)
def test_a_cast_needs_a_tensor_scale_that_every_loader_can_use(
    tmp_path: Path, low: int, high: int, exact: bool
) -> None:
    """MXFP4 is cast to NVFP4 only if every loader can use the tensor scale; otherwise it is quantized again.

    The tensor scale is 2^(high - 8), where `high` is the largest exponent. It must be normal, and 2688 times the scale,
    which MLX stores, must be finite. For exponents from 125 on, that product overflows.
    """
    _, report = written(tmp_path, mxfp4("a", low + 127, high + 128))
    assert report.actions == ({"cast": 1} if exact else {"requantize": 1})


def test_no_cast_without_a_tensor_scale(tmp_path: Path) -> None:
    """Containers without tensor scale cannot hold MXFP4's exponents, so layers are quantized again only on request."""
    config = {"model_type": "llama", "quantization_config": CT}
    synthetic.write_model(tmp_path / "m", config, mxfp4("model.layers.0.mlp.down_proj", 120, 124))
    with synthetic.refused("is already quantized as compressed-tensors mxfp4-pack-quantized, and quantizing it as mlx"):
        convert(tmp_path / "m", tmp_path / "out", "nvfp4-mlx-cpu", format="mlx")
    report = convert(tmp_path / "m", tmp_path / "out", "nvfp4-mlx-cpu", format="mlx", requantize=True)
    assert report.actions == {"requantize": 1}


def test_exponents_of_exact_casts() -> None:
    """is_exact accepts blocks with exponents from high - 17 to high if the tensor scale 2^(high - 8) is usable.

    It is usable if it is at least FLT_MIN and 2688 times it is at most FLT_MAX.
    """
    for high in range(-127, 128):
        scale = 2.0 ** (high - 8)
        usable = float(FLT_MIN) <= scale and scale * 2688 <= float(FLT_MAX)
        assert [is_cast_exactly(high - span, high) for span in (0, 17, 18)] == [usable, usable, False]
    assert is_cast_exactly(1 << 20, -(1 << 20))


def test_dtypes_that_get_different_scales(tmp_path: Path) -> None:
    """Layers of two dtypes cannot share a tensor scale with nvfp4-compressed-tensors, but can with nvfp4-te.

    nvfp4-compressed-tensors rounds the divisor to the dtype of the weight.
    """
    tensors = {**numbers("mlp.gate_proj", np.float32), **numbers("mlp.up_proj")}
    synthetic.write_model(tmp_path / "m", {}, tensors)
    with refused("nvfp4-compressed-tensors rounds it to each layer's dtype (BF16, F32); use another recipe"):
        convert(tmp_path / "m", tmp_path / "out", "nvfp4-compressed-tensors", format="compressed-tensors")
    convert(tmp_path / "m", tmp_path / "out", "nvfp4-te", format="compressed-tensors")
    names = [f"{name}.weight" for name in ("mlp.gate_proj", "mlp.up_proj")]
    assert load(tmp_path / "out") == oracle.expected(tensors, "nvfp4-te", "compressed-tensors", names)


def _chain(tmp_path: Path, *steps: tuple[str, str]) -> list[oracle.Loaded]:
    """Convert a model of experts by the first (recipe, format) of `steps`, and each result by the next one.

    Return the tensors of each result.
    """
    tmp_path.mkdir(exist_ok=True)
    synthetic.moe(tmp_path / "0")
    found = []
    for i, (recipe, format) in enumerate(steps):
        convert(tmp_path / str(i), tmp_path / str(i + 1), recipe, format=format)
        found.append(load(tmp_path / str(i + 1)))
    return found


def test_round_trips_of_names(tmp_path: Path) -> None:
    """Converting between formats keeps codes and block scales, and changes tensor scales of NVFP4 by at most 1 ulp.

    compressed-tensors stores the reciprocal of a tensor scale, and two inversions may change the last bit. Between two
    files of compressed-tensors, nothing is inverted and all bytes stay.
    """
    formats = ("modelopt", "compressed-tensors", "compressed-tensors", "modelopt")
    first, divided, again, last = _chain(tmp_path, *(("nvfp4-te", format) for format in formats))
    assert divided == again and set(first) == set(last)
    for name, (dtype, shape, data) in last.items():
        if not name.endswith(".weight_scale_2"):
            assert (dtype, shape, data) == first[name]
        else:
            ulp = np.frombuffer(data, np.int32) - np.frombuffer(first[name][2], np.int32)
            assert abs(int(ulp[0])) <= 1
    first, other, last = _chain(
        tmp_path / "mxfp8", *(("mxfp8-te", format) for format in ("modelopt", "sglang-mxfp8", "modelopt"))
    )
    assert first == last != other


def test_round_trip_of_gpt_oss(tmp_path: Path) -> None:
    """MXFP4 of gpt-oss that is decoded and quantized again by its own recipe has the original bytes."""
    synthetic.gpt_oss(tmp_path / "m", 96)
    for name, before, format in (("a", "m", "gpt-oss"), ("b", "a", "bf16"), ("c", "b", "gpt-oss"), ("d", "c", "bf16")):
        convert(tmp_path / before, tmp_path / name, "mxfp4-ocp", format=format)
    assert load(tmp_path / "a") == load(tmp_path / "c")
    assert load(tmp_path / "b") == load(tmp_path / "d")
    numbers = {name: tensor[:2] for name, tensor in load(tmp_path / "b").items()}
    assert numbers == {name: tensor[:2] for name, tensor in load(tmp_path / "m").items()}
