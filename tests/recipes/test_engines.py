"""Test recipes of activations and of loaded weights against what inference engines computed (tests/data/engines)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from engine_cases import agree, as_large_ones
from inputs import BF16, extreme, nonfinite

import fp4kit
from fp4kit.evidence.testing import adversarial_blocks, assert_same_bits
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import recipe
from fp4kit.recipes.schema import as_stored

FOLDER = Path(__file__).resolve().parents[1] / "data" / "engines"
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BF16]
TYPES = {"bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn}


@pytest.fixture(autouse=True)
def compiled_engine(monkeypatch):
    """Let the compiled engine compute small arrays too."""
    as_large_ones(monkeypatch)


@cache
def arrays(file):
    """Return {key: array} of a file of recordings, where bit patterns have the dtype that their key names."""
    with np.load(FOLDER / f"{file}.npz") as stored:
        found = {key.partition(":"): stored[key] for key in stored.files}
    return {key: array.view(TYPES[type]) if type else array for (key, _, type), array in found.items()}


def cases(scheme, file="transformers", part="x_fake"):
    """Yield (name of the input, activations, what the engine made of them) of a scheme."""
    found = arrays(file)
    for key, expected in found.items():
        which, name, what = key.split("/")
        if which == scheme and what == part:
            yield name, found[f"{'input' if file == 'transformers' else scheme}/{name}/x"], expected


def test_nvfp4_activations_of_transformers():
    scale = arrays("transformers")["nvfp4-w4a4/weight/input_global_scale"]
    dtypes = set()
    for name, x, expected in cases("nvfp4-w4a4"):
        q = fp4kit.quantize_static(x, "nvfp4-compressed-tensors-static", input_global_scale=scale)
        assert_same_bits(fp4kit.dequantize(q), expected, name)
        assert_same_bits(fp4kit.fake_quantize(x, q.recipe, tensor_amax=q.tensor_amax), expected, name)
        dtypes.add(str(x.dtype))
    assert dtypes == {"float32", "float16", "bfloat16"}


def test_a_scale_in_the_dtype_of_x_gives_other_activations():
    """nvfp4-compressed-tensors rounds the tensor scale to the dtype of x, as for weights, so it is not the recipe."""
    scale = arrays("transformers")["nvfp4-w4a4/weight/input_global_scale"]
    own, static = recipe("nvfp4-compressed-tensors"), recipe("nvfp4-compressed-tensors-static")
    x = next(x for name, x, _ in cases("nvfp4-w4a4") if name == "heavy_bf16")
    amax = fp4kit.quantize_static(x, static, input_global_scale=scale).tensor_amax
    assert not (
        fp4kit.fake_quantize(x, own, tensor_amax=amax) == fp4kit.fake_quantize(x, static, tensor_amax=amax)
    ).all()


# Both schemes of layers have activations per token; a 2-d input then has one scale.
FP8 = [
    ("fp8-dynamic", "x_fake", "fp8-compressed-tensors-token"),
    ("fp8-tensor", "x_fake", "fp8-compressed-tensors-token"),
    ("fp8-dynamic", "x_fake_2d", "fp8-compressed-tensors"),
    ("fp8-tensor", "x_fake_2d", "fp8-compressed-tensors"),
    ("fp8-block", "x_fake", "fp8-compressed-tensors-group"),
    ("mxfp4-w4a8", "x_fake", "fp8-compressed-tensors-group"),
]


@pytest.mark.parametrize(("scheme", "part", "name"), FP8)
def test_fp8_activations_of_transformers(scheme, part, name):
    dtypes = set()
    for case, x, expected in cases(scheme, part=part):
        assert_same_bits(agree(fp4kit.fake_quantize, x, name), expected, case)
        dtypes.add(x.dtype)
    assert dtypes == set(DTYPES)


def stated(x, rows):
    """Return x (rows, n) fake-quantized to FP8 as compressed-tensors does, every step in the dtype of x."""
    T, groups = x.dtype.type, x.reshape(rows, -1)
    with np.errstate(all="ignore"):
        s = np.abs(groups).max(axis=-1, keepdims=True) / T(448)
        s = np.where(s == 0, ml_dtypes.finfo(x.dtype).eps, s).astype(x.dtype)
        q = np.clip(groups / s + T(0), T(-448), T(448)).astype(ml_dtypes.float8_e4m3fn)
        return (q.astype(x.dtype) * s).reshape(x.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("suffix", ["", "-token", "-group"])
def test_fp8_activations_are_computed_in_the_dtype_of_x(suffix, dtype):
    ties = np.float32([448, *(n / 2 for n in range(1, 60)), *(-n / 2 for n in range(1, 60)), 0, -0.0] + [1] * 7)
    zeros = np.where(np.arange(128) % 2, np.float32(0), np.float32(-0.0))
    special = np.float32([ties, zeros, zeros + np.float32(2.0**-24), ties * np.float32(2.0**-140)])
    for x in (extreme(), adversarial_blocks(np.float32, seed=5)[:, :128], special, special[1:2]):
        with np.errstate(over="ignore"):
            x = x.astype(dtype)
        x = x[np.isfinite(x.astype(np.float32)).all(axis=-1)]
        rows = {"": 1, "-token": len(x), "-group": x.size // 128}[suffix]
        assert_same_bits(agree(fp4kit.fake_quantize, x, f"fp8-compressed-tensors{suffix}"), stated(x, rows))
    x = nonfinite().astype(dtype)
    values = agree(fp4kit.fake_quantize, x, "fp8-compressed-tensors-token").astype(np.float32)
    is_lost = ~np.isfinite(x.astype(np.float32)).all(axis=-1)
    assert (np.isnan(values).all(axis=-1) == is_lost).all() and 0 < is_lost.sum() < 128


@pytest.mark.parametrize("part", ["x_fake", "fake"])
def test_fp8_per_token_and_per_channel_of_model_optimizer(part):
    scheme, found, count = "FP8_PER_CHANNEL_PER_TOKEN_CFG", arrays("modelopt"), 0
    if part == "x_fake":
        pairs = [(x, expected) for _, x, expected in cases(scheme, "modelopt")]
    else:
        pairs = [(found[f"{scheme}/weight/w_{dtype}"], found[f"{scheme}/weight/fake_{dtype}"]) for dtype in DTYPES]
    differing = 0
    for x, expected in pairs:
        assert_same_bits(agree(fp4kit.fake_quantize, x, "fp8-modelopt-channel-cpu"), expected)
        differing += (fp4kit.fake_quantize(x, "fp8-modelopt-channel") != expected).sum()
        count += x.size
    assert 0 < differing < count / 4  # on a GPU, 448 / amax is one division


LOADED = {"fp8-dynamic": "fp8-modelopt-channel", "fp8-tensor": "fp8-modelopt", "fp8-block": "fp8-deepgemm-block"}


def loaded(scheme, rule, dtype):
    """Return the stored FP8 weight of a scheme as a Quantized that decodes by a rule, and the weight of the engine."""
    found = {key.split("/")[-1]: array for key, array in arrays("transformers").items() if key.startswith(scheme)}
    codes, scale = found["weight"].view(np.uint8), found["weight_scale"]
    scale = np.repeat(scale, 24, 0) if scheme == "fp8-block" else scale.reshape(-1 if scheme == "fp8-dynamic" else ())
    r = replace(recipe(LOADED[scheme]), decode_rule=rule)
    facts = {"recipe": r, "shape": codes.shape, "dtype": np.dtype(dtype), "axis": -1}
    q = Quantized(packed=codes, block_scale=None, tensor_scale=scale, tensor_amax=None, **facts)
    return q, found[f"decoded_{dtype}"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", LOADED)
def test_fp8_weights_under_scales_in_the_dtype_of_the_model(scheme, dtype):
    q, expected = loaded(scheme, "fp8_compressed_tensors", dtype)
    assert_same_bits(agree(fp4kit.dequantize, q), expected)
    q, _ = loaded(scheme, "product", dtype)
    assert (fp4kit.dequantize(q) == expected).all() == (dtype == np.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", ["compressed_tensors_bfloat16", "stored_divisor_bfloat16"])
def test_nvfp4_weights_that_are_decoded_to_bfloat16_first(rule, dtype):
    found = {key.split("/")[-1]: a for key, a in arrays("transformers").items() if key.startswith("nvfp4-w4a16")}
    r = replace(recipe("nvfp4-compressed-tensors"), decode_rule=rule)
    scale, expected = np.float32(1) / found["weight_global_scale"].reshape(()), found["decoded_bfloat16"]
    parts = {"packed": found["weight_packed"], "block_scale": found["weight_scale"].view(np.uint8)}
    parts |= {"tensor_scale": scale, "tensor_amax": None, "recipe": r}
    q = Quantized(**parts, shape=expected.shape, dtype=np.dtype(dtype), axis=-1)
    assert_same_bits(agree(fp4kit.dequantize, q), expected.astype(dtype))
    once = fp4kit.dequantize(replace(q, recipe=recipe("nvfp4-compressed-tensors")))
    assert (once == expected.astype(dtype)).all() == (dtype == BF16)


def test_float32_parameters_train_with_the_scales_of_a_served_dtype():
    torch = pytest.importorskip("torch")
    from fp4kit.torch import fake_quantize_model

    r = replace(recipe("fp8-modelopt-channel"), id="loaded", decode_rule="fp8_compressed_tensors")
    model = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False))
    w = model[0].weight.detach().numpy().copy()
    fake_quantize_model(model, r, format="compressed-tensors", served_dtype="bfloat16")
    q = fp4kit.quantize(w, "fp8-modelopt-channel")
    expected = q.packed.view(ml_dtypes.float8_e4m3fn).astype(BF16) * q.tensor_scale.astype(BF16)[:, None]
    assert_same_bits(model[0].weight.detach().numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("fp8-modelopt-channel", "fp8_compressed_tensors"),
        ("nvfp4-compressed-tensors", "compressed_tensors_bfloat16"),
        ("nvfp4-te", "stored_divisor_bfloat16"),
    ],
)
def test_the_rule_of_a_loader_stays_for_training(name, rule, dtype):
    torch = pytest.importorskip("torch")
    from fp4kit.torch import fake_quantize_model

    r = replace(recipe(name), id=f"{name}-loaded", decode_rule=rule)
    assert as_stored(r, True) == as_stored(r, False) == r
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False)).to(getattr(torch, str(dtype)))
    w = model[0].weight.detach().float().numpy().astype(dtype)
    assert fake_quantize_model(model, r, format="compressed-tensors") == ["0.weight"]
    found = model[0].weight.detach().float().numpy().astype(dtype)
    q = fp4kit.quantize(w, r)
    if rule == "fp8_compressed_tensors":
        codes = q.packed.view(ml_dtypes.float8_e4m3fn).astype(dtype)
        expected = codes * q.tensor_scale.astype(dtype)[:, None]
    else:
        expected = fp4kit.dequantize(replace(q, recipe=as_stored(recipe(name), True)), "bfloat16").astype(dtype)
    assert_same_bits(found, expected)
