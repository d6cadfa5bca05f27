"""Test searches of the scale bytes of GGUF blocks: against exhaustive searches, in files, and by verify."""

from __future__ import annotations

from pathlib import Path

import gguf_files
import numpy as np
import pytest
from synthetic import refused

import fp4kit
from fp4kit.checkpoint import ScaleSearch, make_plan
from fp4kit.checkpoint.convert.rows import search_blocks
from fp4kit.checkpoint.verify.verify import verify
from fp4kit.cli import main
from fp4kit.formats import E2M1, E4M3
from fp4kit.layouts import pack_gguf
from fp4kit.recipes import recipe
from fp4kit.reference.search import SearchTerms, losses
from fp4kit.storage.gguf_file import read_gguf

RECIPES = ("nvfp4-gguf", "mxfp4-gguf")
GAIN = {"nvfp4-gguf": 0.97, "mxfp4-gguf": 1}  # the largest share of llama.cpp's error that a search leaves
OBJECTIVES = {"mse": 2.0, "mae": 1.0, "max": np.inf, "p3": 3.0}


def inputs(scale: float) -> np.ndarray:
    """Return a float32 matrix of ordinary blocks, which also has blocks of zeros, an outlier and blocks of tiny values.

    scale: the standard deviation of the ordinary values.
    """
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((24, 192)) * scale).astype(np.float32)
    x[0, :64] = 0
    x[1, 3] = 40 * scale
    x[2, :64] *= np.float32(2.0**-9)
    return x


def exhaustive_errors(x: np.ndarray, kind: str, power: float, weights: np.ndarray | None) -> np.ndarray:
    """Return the error of each block under every scale byte that llama.cpp reads, as float64 (bytes, rows, blocks).

    Each element is rounded to the nearest value. The error is the sum of |difference|^power, weighted per element, or
    the largest weighted |difference| if `power` is infinite.

    kind: "nvfp4" or "mxfp4".
    weights: one per column, or None for weights of 1.
    """
    size = 16 if kind == "nvfp4" else 32
    blocks = x.astype(np.float64).reshape(len(x), -1, size)
    w = 1.0 if weights is None else weights.astype(np.float64).reshape(-1, size)
    found = []
    for byte in range(127 if kind == "nvfp4" else 255):
        scale = float(E4M3.values[byte]) if kind == "nvfp4" else 2.0 ** (byte - 127)
        d = np.full(blocks.shape, np.inf)
        for value in E2M1.values.astype(np.float64):
            d = np.minimum(d, np.abs(blocks - value * scale))
        found.append((w * d).max(axis=-1) if power == np.inf else (w * d**power).sum(axis=-1))
    return np.stack(found)


def errors(x: np.ndarray, q: fp4kit.Quantized, power: float, weights: np.ndarray | None) -> np.ndarray:
    """Return the error of each block of x after quantization to q, as float64 (rows, blocks).

    power and weights: as in exhaustive_errors.
    """
    size = q.recipe.block_size
    d = np.abs(fp4kit.dequantize(q, np.float32).astype(np.float64) - x).reshape(len(x), -1, size)
    w = 1.0 if weights is None else weights.astype(np.float64).reshape(-1, size)
    return (w * d).max(axis=-1) if power == np.inf else (w * d**power).sum(axis=-1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("id", RECIPES)
def test_no_scale_byte_has_a_smaller_error(id: str, objective: str, weighted: bool) -> None:
    """The chosen bytes reach the minimum over every byte, up to the rounding of float32 errors.

    Errors are compared in float64. llama.cpp's own rule does not reach the minimum.
    """
    x, kind, power = inputs(0.5), id.partition("-")[0], OBJECTIVES[objective]
    weights = np.random.default_rng(1).random(192).astype(np.float32) + np.float32(0.1) if weighted else None
    best = exhaustive_errors(x, kind, power, weights).min(axis=0)
    found = errors(x, search_blocks(x, recipe(id), objective, weights), power, weights)
    assert (found <= best * (1 + 1e-5)).all()
    assert found.sum() < GAIN[id] * errors(x, fp4kit.quantize(x, id), power, weights).sum()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_nvfp4_bytes_are_those_of_an_exhaustive_search(objective: str, weighted: bool) -> None:
    """The search chooses the byte that a loop over all 127 bytes finds; if errors are equal, the first byte wins.

    The loop computes its errors in float32, as the search does.
    """
    x, r = inputs(3.0), recipe("nvfp4-gguf")
    weights = np.random.default_rng(1).random(192).astype(np.float32) if weighted else None
    terms = SearchTerms(weights=weights, power=OBJECTIVES[objective])
    with np.errstate(all="ignore"):
        tried = np.stack([losses(x, np.float32(max(E4M3.values[b], 1e-9)), r, terms) for b in range(1, 127)])
    best = (1 + tried.argmin(axis=0)).astype(np.uint8)
    wanted = fp4kit.quantize(x, "nvfp4-gguf", block_scale=best)
    empty = (np.asarray(wanted.packed).reshape(24, -1, 8) == 0).all(axis=-1)
    found = search_blocks(x, r, objective, weights)
    np.testing.assert_array_equal(found.block_scale, np.where(empty, 0, best))
    np.testing.assert_array_equal(found.packed, wanted.packed)
    assert empty[0, :4].all() and len(np.unique(best)) > 15


def test_mxfp4_bytes_are_those_of_an_exhaustive_search() -> None:
    """The search takes the block scale of the least error among all scales, and the smallest one on a tie.

    Elements are multiples of 1/16, whose errors are exact in floating point, so that ties occur.
    """
    x = (np.random.default_rng(3).integers(-120, 121, (64, 128)) / 16).astype(np.float32)
    x[0, :32] = np.tile([4, 2, 1, 0.5], 8)
    found = search_blocks(x, recipe("mxfp4-gguf"), "mse", None)
    tried = exhaustive_errors(x, "mxfp4", 2.0, None)
    np.testing.assert_array_equal(found.block_scale, tried.argmin(axis=0))
    assert (np.sort(tried, axis=0)[0] == np.sort(tried, axis=0)[1]).any()


def test_large_scales_that_llama_cpp_rounds_to_448() -> None:
    """The search for NVFP4 scales also uses the bytes 0x78 to 0x7D, which llama.cpp's own rule never stores."""
    x = inputs(3.0) * np.float32(200)
    own, found = fp4kit.quantize(x, "nvfp4-gguf"), search_blocks(x, recipe("nvfp4-gguf"), "mse", None)
    rare = lambda q: np.isin(q.block_scale, np.arange(0x78, 0x7E)).any()  # noqa: E731
    assert rare(found) and not rare(own)


@pytest.mark.parametrize("id", RECIPES)
def test_blocks_whose_weights_are_zero_are_searched_with_equal_weights(id: str) -> None:
    x, weights = inputs(0.5), np.ones(192, np.float32)
    weights[64:128] = 0
    found, equal = (search_blocks(x, recipe(id), "mse", w) for w in (weights, np.ones(192, np.float32)))
    np.testing.assert_array_equal(found.block_scale, equal.block_scale)
    np.testing.assert_array_equal(found.packed, equal.packed)


@pytest.mark.parametrize("id", RECIPES)
def test_files_hold_the_searched_blocks(id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A GGUF file gets the bytes that the search gives and records its name.

    verify repeats the search and so finds a changed byte.
    """
    tensors, kind = gguf_files.write_model(tmp_path / "m.gguf"), id.partition("-")[0]
    out = tmp_path / "o.gguf"
    assert main(["convert", str(tmp_path / "m.gguf"), str(out), "--recipe", id, "--scale-search", "mse"]) == 0
    assert "searched" in capsys.readouterr().out
    file, whole = read_gguf(out), out.read_bytes()
    assert file.metadata["fp4kit.scale_search"] == "mse"
    converted = [entry for entry in file.entries if entry.dtype == kind.upper()]
    assert len(converted) > 8
    for entry in converted:
        x = tensors[entry.name]
        made = [search_blocks(part, recipe(id), "mse", None) for part in (x if x.ndim == 3 else x[None])]
        raw = b"".join(pack_gguf(q.packed, q.block_scale, kind).tobytes() for q in made)
        assert whole[entry.start : entry.start + entry.nbytes] == raw
    assert verify(out, tmp_path / "m.gguf").clean
    place = next(entry.start for entry in file.entries if entry.name == "blk.0.attn_q.weight")
    out.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    assert not verify(out, tmp_path / "m.gguf").clean
    with refused("mxfp4-ocp cannot be searched"):
        make_plan(tmp_path / "m.gguf", "mxfp4-ocp", search=ScaleSearch.of("mse"))


@pytest.mark.parametrize("id", RECIPES)
def test_an_outlier_without_weight_does_not_set_the_scale(id: str) -> None:
    """An outlier with weight 0 does not affect the scale: the block gets the scale of its other elements.

    That scale is 2^-4 times the scale that the outlier would need.
    """
    x, weights = np.random.default_rng(2).uniform(-6, 6, (1, 64)).astype(np.float32), np.ones(64, np.float32)
    x[0, 3], weights[3] = 96, 0
    found = search_blocks(x, recipe(id), "mse", weights)
    best = exhaustive_errors(x, id.partition("-")[0], 2.0, weights).min(axis=0)
    assert (errors(x, found, 2.0, weights) <= best * (1 + 1e-5)).all()
    assert errors(x, fp4kit.quantize(x, id), 2.0, weights)[0, 0] > 4 * best[0, 0]
