"""Test that tensor scales are multiplied into block scales where a format has no place for them.

Codes stay. Values stay if E4M3 holds the products; otherwise, the exact loss is named.
"""

from __future__ import annotations

from pathlib import Path

import gguf_files
import numpy as np
import pytest
import synthetic
from borrowed_codes import stored
from changed_bytes import change
from synthetic import refused

import fp4kit
from fp4kit.checkpoint import convert, make_plan
from fp4kit.checkpoint.containers.table import CT_NVFP4, GGUF_NVFP4, GGUF_SCALED, MLX_NVFP4, MODELOPT_NVFP4
from fp4kit.checkpoint.convert.rows import Folding, folded
from fp4kit.checkpoint.model.slabs import Slab
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.verify.compare import compare_checkpoints
from fp4kit.checkpoint.verify.verify import verify
from fp4kit.cli import main
from fp4kit.formats import E4M3

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
    text += f" {changed} of {old.size} block scales change, by up to {error:.3g}% (and 1 more layers); use --requantize"
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
    assert Folding(9, 3, 1, 1, 0.5).text == "3 of 9 block scales change (1 become 0, 1 saturate), by up to 50%"
    assert Folding(2, 1, 0, 0, 0.25).plus(Folding(3, 1, 1, 0, 0.5)) == Folding(5, 2, 1, 0, 0.5)


def test_only_containers_without_a_tensor_scale_take_folded_layers() -> None:
    assert (
        MODELOPT_NVFP4.folds_into(MLX_NVFP4) and GGUF_SCALED.folds_into(GGUF_NVFP4) and CT_NVFP4.folds_into(MLX_NVFP4)
    )
    assert not MLX_NVFP4.folds_into(MODELOPT_NVFP4) and not MODELOPT_NVFP4.folds_into(CT_NVFP4)
