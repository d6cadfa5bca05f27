"""Test stacks of experts with codes [E, K/2, N], as Model-Optimizer exports them.

Every command reads such stacks; convert renames and decodes them.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import oracle
import pytest
import synthetic

import fp4kit
from fp4kit.checkpoint import convert
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.loaders import support
from fp4kit.checkpoint.model import slabs
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.verify.compare import compare_checkpoints
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify

RECIPE, EXPERTS = "nvfp4-modelopt", "model.layers.0.feed_forward.experts"
# N and K of each stack. All differ, so that the test fails if axes are swapped.
SHAPES = {"gate_up_proj": (128, 64), "down_proj": (64, 96)}
Quantized = dict[str, list[fp4kit.Quantized]]


def made(root: Path, experts: int = 3, each: bool = False, inputs: bool = True, last: float = 0.25) -> Quantized:
    """Write a model with quantized stacks to root / "q", and its unquantized source to root / "x".

    The unquantized stacks are [E, K, N]. Return {name of a stack: one Quantized per expert}.

    experts: E, the number of experts
    each: True for one tensor scale per expert, False for one per stack
    inputs: whether to store input scales, too
    last: the input scale of the last expert; 0.25 is that of the others
    """
    config = {"model_type": "llama4_text", "num_hidden_layers": 1, "num_local_experts": experts}
    plain, stored, found = {}, {}, {}
    for leaf, (rows, columns) in SHAPES.items():
        name = f"{EXPERTS}.{leaf}"
        x = synthetic.random(name, (experts, rows, columns))
        amaxes = [np.float32(np.abs(e).max()) for e in x] if each else [np.float32(np.abs(x).max())] * experts
        q = [fp4kit.quantize(e, RECIPE, tensor_amax=amax) for e, amax in zip(x, amaxes, strict=True)]
        scales = np.array([one.tensor_scale for one in q], np.float32).reshape(experts)
        scale = scales if each else scales[0].reshape(())
        plain[name] = np.ascontiguousarray(np.swapaxes(x, 1, 2))
        stored[name] = np.stack([one.packed.T for one in q])
        stored[f"{name}_weight_scale"] = np.stack([one.block_scale.T for one in q]).view(ml_dtypes.float8_e4m3fn)
        stored[f"{name}_weight_scale_2"] = scale
        if inputs:
            stored[f"{name}_input_scale"] = np.full(scale.shape, 0.25, np.float32)
            stored[f"{name}_input_scale"][-1 if each else ()] = last
        found[leaf] = q
    declared = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    synthetic.write_model(root / "x", config, plain)
    synthetic.write_model(root / "q", config | declared, stored)
    return found


def layers(q: Quantized) -> dict[str, tuple[fp4kit.Quantized, slice]]:
    """Return {layer: (matrix, rows)}: the matrix of a stack that contains the layer, and the layer's rows in it.

    q is the result of `made`. In gate_up_proj, the rows of gate_proj come first.
    """
    found = {}
    for e, (both, down) in enumerate(zip(q["gate_up_proj"], q["down_proj"], strict=True)):
        half = both.packed.shape[0] // 2
        found[f"{EXPERTS}.{e}.gate_proj"] = both, slice(0, half)
        found[f"{EXPERTS}.{e}.up_proj"] = both, slice(half, None)
        found[f"{EXPERTS}.{e}.down_proj"] = down, slice(None)
    return found


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    ("experts", "each", "inputs"), [(3, False, True), (3, True, False), (1, False, False), (1, True, True)]
)
def test_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experts: int, each: bool, inputs: bool, large: bool
) -> None:
    """Converting a quantized stack to single experts keeps all bytes, also of matrices too large to transpose at once.

    experts: the number of experts in the stack
    each: whether every expert has its own tensor scale
    inputs: whether the stack has input scales
    large: whether the matrices count as too large to be transposed at once
    """
    if large:
        monkeypatch.setattr(slabs, "WHOLE_EXPERT", 100 * 4 * 64)
    q = made(tmp_path, experts, each, inputs)
    report = convert(tmp_path / "q", tmp_path / "out", RECIPE, format="modelopt")
    assert report.actions == {"rename": 3 * experts} and report.plan.has_input_scale is inputs
    found = oracle.arrays(oracle.load(tmp_path / "out"))
    expected = {}
    for name, (one, rows) in layers(q).items():
        expected[f"{name}.weight"] = one.packed[rows]
        expected[f"{name}.weight_scale"] = one.block_scale[rows]
        expected[f"{name}.weight_scale_2"] = np.float32(one.tensor_scale).reshape(())
        if inputs:
            expected[f"{name}.input_scale"] = np.float32(0.25).reshape(())
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].shape == array.shape and found[name].tobytes() == array.tobytes(), name
    assert verify(tmp_path / "out", tmp_path / "q").clean
    comparison = compare_checkpoints(tmp_path / "q", tmp_path / "out")
    assert [layer.values for layer in comparison.layers] == [0] * 3 * experts


@pytest.mark.parametrize("each", [False, True])
def test_decoded(tmp_path: Path, each: bool) -> None:
    """convert --format bf16 stores the decoded stacks as [E, K, N], the axis order of the unquantized model.

    each: whether every expert has its own tensor scale
    """
    q = made(tmp_path, each=each)
    convert(tmp_path / "q", tmp_path / "out", format="bf16")
    found = oracle.arrays(oracle.load(tmp_path / "out"))
    assert set(found) == {f"{EXPERTS}.{leaf}" for leaf in SHAPES}
    for leaf, matrices in q.items():
        values = np.stack([one.dequantize(np.float32).astype(ml_dtypes.bfloat16).T for one in matrices])
        assert found[f"{EXPERTS}.{leaf}"].shape == values.shape
        zeros_without_sign = found[f"{EXPERTS}.{leaf}"] + values.dtype.type(0)  # Model-Optimizer decodes zeros to +0
        assert zeros_without_sign.tobytes() == values.tobytes()
    assert verify(tmp_path / "out", tmp_path / "q").clean


@pytest.mark.parametrize("experts", [1, 3])
def test_read(tmp_path: Path, experts: int) -> None:
    q = made(tmp_path, experts)
    model = inspect_checkpoint(tmp_path / "q")
    assert not model.unrecognised
    assert {w.name: (w.dtype, w.shape) for w in model.layers.values()} == {
        f"{EXPERTS}.{leaf}": ("modelopt NVFP4 stacks", (experts, *shape)) for leaf, shape in SHAPES.items()
    }
    report = verify(tmp_path / "q", tmp_path / "x", RECIPE)
    assert report.clean and not any(layer.compared for layer in report.layers)
    assert "2 layers are not re-encoded: fp4kit reads modelopt NVFP4 stacks, but does not write it" in [
        i.text for i in report.issues
    ]
    values = [
        (one.dequantize(np.float32), x)
        for leaf in SHAPES
        for one, x in zip(q[leaf], _values(tmp_path, leaf), strict=True)
    ]
    noise = sum(float(np.sum((a.astype(np.float64) - b.astype(np.float64)) ** 2)) for a, b in values)
    signal = sum(float(np.sum(b.astype(np.float64) ** 2)) for _, b in values)
    assert report.total.sqnr_db == pytest.approx(10 * np.log10(signal / noise))
    verdict = identify_checkpoint(tmp_path / "q", tmp_path / "x")
    assert RECIPE in verdict.recipes and len(verdict.layers) == 2 * experts
    assert not any(layer.explanation.mishap for layer in verdict.layers)


def _values(root: Path, leaf: str) -> np.ndarray:
    return np.swapaxes(oracle.arrays(oracle.load(root / "x"))[f"{EXPERTS}.{leaf}"], 1, 2)


def test_interleaved_stacks_have_no_place_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "refusal", lambda *pair: None)
    made(tmp_path)
    path = tmp_path / "q" / "config.json"
    path.write_text(path.read_text().replace("llama4_text", "gpt_oss"))
    with synthetic.refused("the rows of gate and up are interleaved, which only --format gpt-oss can store"):
        convert(tmp_path / "q", tmp_path / "out", RECIPE, format="modelopt")


def test_shapes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """A stack is refused if its scales have another axis order than its codes.

    It is also refused if it has a wrong number of tensor scales.
    """
    changes = {"_weight_scale": lambda x: np.swapaxes(x, 1, 2), "_weight_scale_2": lambda x: np.ones(2, np.float32)}
    for part, change in changes.items():
        folder = tmp_path / part
        made(folder)
        tensors = oracle.arrays(oracle.load(folder / "q"))
        name = f"{EXPERTS}.down_proj{part}"
        file = next((folder / "q").glob("*.safetensors"))
        kept = {n: x.view(ml_dtypes.float8_e4m3fn) if n.endswith("_weight_scale") else x for n, x in tensors.items()}
        for other in (folder / "q").glob("*.safetensors*"):
            other.unlink()
        synthetic.write_file(file, kept | {name: np.ascontiguousarray(change(kept[name]))})
        with synthetic.refused("in a format that fp4kit does not read in models"):
            convert(folder / "q", folder / "out", RECIPE, format="modelopt")


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_unusable_input_scales_of_stacks_are_named(tmp_path: Path, value: float, each: bool) -> None:
    """verify and identify name the stacks if only the last expert's input scale is wrong, too."""
    made(tmp_path, each=each, last=value)
    text = f"input_scale is {value}; a positive finite number is needed"
    found = [one.subject for one in verify(tmp_path / "q", tmp_path / "x").issues if one.text == text]
    assert sorted(found) == [f"{EXPERTS}.{leaf}" for leaf in sorted(SHAPES)]
    (problem,) = identify_checkpoint(tmp_path / "q", tmp_path / "x").problems
    assert problem.endswith(text)


@pytest.mark.parametrize("part", ["weight_scale_2", "input_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_unusable_scales_of_stacks_of_weights_are_named(tmp_path: Path, part: str, value: float) -> None:
    """Stacks may also be stored as [E, N, K/2] with the names of single layers. A zero tensor scale is a warning."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    q = [fp4kit.quantize(x, RECIPE) for x in synthetic.random(name, (3, 64, 64))]
    stored = {
        f"{name}.weight": np.stack([one.packed for one in q]),
        f"{name}.weight_scale": np.stack([one.block_scale for one in q]).view(ml_dtypes.float8_e4m3fn),
        f"{name}.weight_scale_2": np.array([one.tensor_scale for one in q], np.float32),
        f"{name}.input_scale": np.full(3, 0.25, np.float32),
    }
    stored[f"{name}.{part}"][1] = value
    declared = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    synthetic.write_model(tmp_path / "q", {"model_type": "qwen3_moe", "num_hidden_layers": 1, **declared}, stored)
    text = f"{part} is {value}; a positive finite number is needed"
    (issue,) = (one for one in verify(tmp_path / "q").issues if one.text == text)
    assert issue.subject == name
    assert issue.severity == ("warning" if (part, value) == ("weight_scale_2", 0.0) else "error")
