"""Test models that train for an engine: their logits equal those of the real engine that loads the converted
checkpoint, or quantizes the trained weights itself, in every bit. Of MLX, decoded weights and products are equal.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exhaustive import exhaustive
from inputs import BF16

import fp4kit
from fp4kit.checkpoint import Activations, convert
from fp4kit.evidence.testing import assert_same_bits

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
ft = pytest.importorskip("fp4kit.torch")

TOKENS = torch.arange(48).reshape(2, 24) % 64
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 32}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MOE = {"num_experts": 4, "moe_intermediate_size": 128, "num_experts_per_tok": 2}


def model_of(kind: str, folder: Path, dtype: Any = torch.bfloat16, **sizes: Any) -> Any:
    """Return a small model as a user loads it.

    Model.to(bfloat16) would also round the frequencies of the rotary embedding, which a loader keeps in float32.
    """
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | sizes | (MOE if kind == "Qwen3Moe" else {}))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.rand(()))
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def trained(model: Any, **options: Any) -> Any:
    """Fake-quantize the model for an engine, and train it for one step."""
    ft.fake_quantize_model(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model(TOKENS).logits.float().square().mean().backward()
    optimizer.step()
    return model


def logits_of(model: Any) -> list[np.ndarray]:
    """Return the logits of all tokens in one pass, and of the last tokens when they are decoded with a cache."""
    with torch.no_grad():
        whole = model(TOKENS).logits
        begun = model(TOKENS[:, :-4], use_cache=True)
        decoded, cache = [begun.logits], begun.past_key_values
        for i in range(TOKENS.shape[1] - 4, TOKENS.shape[1]):
            step = model(TOKENS[:, i : i + 1], past_key_values=cache, use_cache=True)
            decoded, cache = [*decoded, step.logits], step.past_key_values
    return [one.view(torch.int16 if one.element_size() == 2 else torch.int32).numpy() for one in (whole, *decoded)]


def assert_equal_logits(a: Any, b: Any) -> None:
    for x, y in zip(logits_of(a), logits_of(b), strict=True):
        assert x.shape == y.shape and np.count_nonzero(x != y) == 0


OF_TRANSFORMERS = [row.scheme for row in fp4kit.servings() if row.engine == "transformers" and not row.route]
USUAL = [("Llama", "nvfp4-w4a4"), ("Qwen3Moe", "mxfp4-w4a16")]
# transformers multiplies the experts of Qwen3-MoE without NVFP4's global scale, and rejects those of MXFP8
# (fp4kit/contract/engine_table.py).
REST = [(kind, scheme) for kind in ("Llama", "Qwen3") for scheme in OF_TRANSFORMERS if (kind, scheme) not in USUAL]
REST += [("Qwen3Moe", scheme) for scheme in OF_TRANSFORMERS if scheme.startswith("fp8") or scheme == "mxfp4-w4a4"]


def served_by_transformers(model: Any, folder: Path, scheme: str, **options: Any) -> Any:
    """Convert a trained model for a scheme of transformers, and return the model that transformers loads."""
    model.save_pretrained(folder / "trained")
    convert(folder / "trained", folder / "served", engine="transformers", scheme=scheme, **options)
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "served", dtype=torch.bfloat16)


@pytest.mark.parametrize("case", [*USUAL, *exhaustive(REST)], ids=str)
def test_logits_of_transformers(tmp_path: Path, case: tuple[str, str]) -> None:
    pytest.importorskip("compressed_tensors")
    kind, scheme = case
    model, inputs, options = model_of(kind, tmp_path / "base"), None, {}
    if fp4kit.serving("transformers", scheme).input_scales == "static":
        with ft.collect(model) as inputs:
            model(TOKENS)
        options["activations"] = Activations.of(inputs)
    trained(model, engine="transformers", scheme=scheme, inputs=inputs)
    served = served_by_transformers(model, tmp_path, scheme, **options)
    assert_equal_logits(model, served)
    written = fp4kit.Contract.of(tmp_path / "served")
    stated = fp4kit.serving("transformers", scheme)
    for name in ("activations", "input_scales", "served_dtype", "unit", "container"):
        assert getattr(written, name) == getattr(stated, name) and name not in written.unknown
    assert written.weights == stated.weights
    found = fp4kit.parity(model, tmp_path / "served")
    assert found.equal, str(found)


DEQUANTIZED = [row.scheme for row in fp4kit.servings() if row.route == "dequantize=True"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, *exhaustive([torch.float32])], ids=str)
@pytest.mark.parametrize("scheme", [DEQUANTIZED[0], *exhaustive(DEQUANTIZED[1:])])
def test_logits_of_transformers_that_decodes_when_it_loads(tmp_path: Path, scheme: str, dtype: Any) -> None:
    """With dequantize=True, inputs stay unquantized, and NVFP4 is decoded by way of bfloat16."""
    pytest.importorskip("compressed_tensors")
    served_by = {"engine": "transformers", "scheme": scheme, "route": "dequantize=True"}
    model = trained(model_of("Llama", tmp_path / "base", dtype), **served_by)
    model.save_pretrained(tmp_path / "trained")
    row = next(one for one in fp4kit.servings() if (one.scheme, one.route) == (scheme, "dequantize=True"))
    convert(tmp_path / "trained", tmp_path / "served", row.weights, format=row.format)
    config = transformers.CompressedTensorsConfig(dequantize=True)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with pytest.warns(UserWarning, match="loading attributes"):
        loaded = load(tmp_path / "served", dtype=dtype, quantization_config=config)
    assert_equal_logits(model, loaded)


def test_training_goes_on_with_the_input_scales_of_a_checkpoint(tmp_path: Path) -> None:
    """A new process needs no Collector: it reads the scales that convert stored, as divisors or as multipliers."""
    model = model_of("Llama", tmp_path / "base")
    with ft.collect(model) as inputs:
        model(TOKENS)
    known = {"engine": "transformers", "scheme": "nvfp4-w4a4"}
    convert(tmp_path / "base", tmp_path / "served", **known, activations=Activations.of(inputs))
    assert_equal_logits(
        trained(model, **known, inputs=inputs),
        trained(model_of("Llama", tmp_path / "base"), **known, inputs=tmp_path / "served"),
    )
    convert(
        tmp_path / "base",
        tmp_path / "modelopt",
        "nvfp4-modelopt",
        format="modelopt",
        activations=Activations.of(inputs),
    )
    again = {"engine": "SGLang", "scheme": "nvfp4-w4a4"}
    assert_equal_logits(
        trained(model_of("Llama", tmp_path / "base"), **again, inputs=inputs),
        trained(model_of("Llama", tmp_path / "base"), **again, inputs=tmp_path / "modelopt"),
    )
    for format in ("modelopt", "compressed-tensors"):  # vLLM loads both, with other recipes
        by_vllm = {"engine": "vLLM", "scheme": "nvfp4-w4a4", "format": format}
        model = trained(model_of("Llama", tmp_path / "base"), **by_vllm, inputs=inputs)
        model.save_pretrained(tmp_path / f"trained-{format}")
        convert(
            tmp_path / f"trained-{format}", tmp_path / f"vllm-{format}", **by_vllm, activations=Activations.of(inputs)
        )
        found = fp4kit.parity(model, tmp_path / f"vllm-{format}")
        assert found.equal, str(found)
    with pytest.raises(ValueError, match="stores no input scales; give a Collector or a dict"):
        ft.fake_quantize_model(model_of("Llama", tmp_path / "base"), **known, inputs=tmp_path / "base")


def test_another_scheme_gives_other_logits(tmp_path: Path) -> None:
    """Without the activations of the engine, logits differ: the comparison above can fail."""
    model = trained(model_of("Llama", tmp_path / "base"), engine="transformers", scheme="mxfp4-w4a16")
    served = served_by_transformers(model, tmp_path, "mxfp4-w4a4")
    with pytest.raises(AssertionError):
        assert_equal_logits(model, served)


OF_TORCHAO = [row.scheme for row in fp4kit.servings() if row.engine == "torchao"]


def quantized_by_torchao(model: Any, scheme: str) -> None:
    """Quantize the linear layers of a model, except the head, as torchao does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        formats = pytest.importorskip("torchao.prototype.mx_formats")
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.quantization import quantize_
        from torchao.quantization.quantize_.common import KernelPreference
    if scheme.startswith("nvfp4"):
        config = formats.NVFP4WeightOnlyConfig()
    else:
        dtype = torch.float4_e2m1fn_x2 if scheme.startswith("mxfp4") else torch.float8_e4m3fn
        config = formats.MXDynamicActivationMXWeightConfig(
            activation_dtype=dtype,
            weight_dtype=dtype,
            kernel_preference=KernelPreference.EMULATED,
            scaling_mode=ScaleCalculationMode[scheme.rpartition("-")[2].upper()],
        )
    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and name != "lm_head")


@pytest.mark.parametrize("scheme", [OF_TORCHAO[0], *exhaustive(OF_TORCHAO[1:])])
def test_logits_of_torchao(tmp_path: Path, scheme: str) -> None:
    """torchao shares no amax between q, k and v: fake_quantize_model does not either, for this engine."""
    pytest.importorskip("torchao")
    model = trained(model_of("Llama", tmp_path / "base"), engine="torchao", scheme=scheme)
    model.save_pretrained(tmp_path / "trained")
    engine = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.bfloat16)
    quantized_by_torchao(engine, scheme)
    assert_equal_logits(model, engine)


OF_MLX = [row.scheme for row in fp4kit.servings() if row.engine == "MLX"]


@pytest.mark.parametrize("scheme", [OF_MLX[0], *exhaustive(OF_MLX[1:])])
def test_logits_of_mlx(tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm loads the trained weights, and its logits are the same if fp4kit multiplies in its quantized layers.

    The logits of the model in PyTorch differ, because attention and norms of MLX add in other orders.
    """
    mx, nn, utils = (pytest.importorskip(name) for name in ("mlx.core", "mlx.nn", "mlx_lm.utils"))
    trainer = trained(model_of("Llama", tmp_path / "base"), engine="MLX", scheme=scheme)
    trainer.save_pretrained(tmp_path / "trained")
    convert(tmp_path / "trained", tmp_path / "served", engine="MLX", scheme=scheme)
    with mx.stream(mx.cpu):
        model, _ = utils.load_model(tmp_path / "served")
        names, contract = {id(layer): name for name, layer in model.named_modules()}, fp4kit.serving("MLX", scheme)
        expected, calls = np.array(model(mx.array(TOKENS.numpy())).astype(mx.float32)), []

        def by_fp4kit(layer: Any, x: Any) -> Any:
            trained_layer = trainer.get_submodule(names[id(layer)])
            settings = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
            loaded = np.array(mx.dequantize(layer.weight, layer.scales, **settings).astype(mx.float32))
            assert_same_bits(trained_layer.weight.detach().float().numpy(), loaded)
            original = trained_layer.parametrizations.weight.original.detach()
            q = fp4kit.quantize(original, contract.weights).to("numpy")
            inputs = np.array(x.astype(mx.float32))
            inputs = inputs.astype(BF16) if x.dtype == mx.bfloat16 else inputs
            y = fp4kit.matmul(inputs.reshape(-1, inputs.shape[-1]), q, unit=contract.unit, out_dtype=inputs.dtype)
            calls.append(names[id(layer)])
            return mx.array(y.astype(np.float32)).astype(x.dtype).reshape(*x.shape[:-1], -1)

        monkeypatch.setattr(nn.QuantizedLinear, "__call__", by_fp4kit)
        found = np.array(model(mx.array(TOKENS.numpy())).astype(mx.float32))
    assert len(calls) == 14
    assert_same_bits(found, expected)


WRONG = [
    ({"scheme": "nvfp4-w4a4"}, TypeError, "is given without an engine"),
    ({"engine": "transformers"}, ValueError, "needs a scheme too; needs one of 'nvfp4-w4a16'"),
    ({"engine": "transformer", "scheme": "nvfp4-w4a4"}, ValueError, "did you mean transformers"),
    ({"engine": "transformers", "scheme": "nvfp4-w4a8"}, ValueError, "; llama.cpp has it; "),
    ({"engine": "transformers", "scheme": "nvfp4-w4a4"}, ValueError, "reads stored input scales; pass inputs="),
    ({"engine": "torchao", "scheme": "nvfp4-w4a16", "inputs": {}}, ValueError, "stores no input scales"),
    ({"engine": "torchao", "scheme": "nvfp4-w4a16", "recipe": "nvfp4-te"}, TypeError, "recipe cannot be given with"),
    ({"engine": "torchao", "scheme": "nvfp4-w4a16", "served_dtype": "bfloat16"}, TypeError, "served_dtype cannot be"),
    ({"engine": "torchao", "scheme": "nvfp4-w4a16", "route": "fast"}, ValueError, "route is 'fast'"),
]


@pytest.mark.parametrize(("options", "error", "text"), WRONG, ids=str)
def test_engines_are_checked(options: dict[str, Any], error: type[Exception], text: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    with pytest.raises(error, match=text):
        ft.fake_quantize_model(model, **options)
    assert not hasattr(model[0], "parametrizations")


def test_linear_takes_an_engine() -> None:
    """It has the recipes and the unit of each row that multiplies by a unit, and refuses the others by name."""
    x, w, seen = torch.randn(4, 64), torch.randn(32, 64), set()
    for row in fp4kit.servings():
        if (row.engine, row.scheme) in seen:
            continue  # linear takes the first row
        seen.add((row.engine, row.scheme))
        known = {"engine": row.engine, "scheme": row.scheme}
        if row.product == "torch" or row.activations is None or row.input_scales == "static":
            with pytest.raises(ValueError, match=r"fake_quantize_model|use fp4kit\.matmul"):
                ft.linear(x, w, **known)
        else:
            expected = ft.linear(x, w, row.activations, row.weights, unit=row.product)
            assert torch.equal(ft.linear(x, w, **known), expected)
    with pytest.raises(TypeError, match="recipes cannot be given with an engine"):
        ft.linear(x, w, "nvfp4-te", engine="FlashInfer", scheme="nvfp4-w4a4")
