"""Test input scales from measured activations: per layer and container, fused layers, experts, refusals and records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
from measured import layers_of, measured, whole
from oracle import load
from synthetic import refused

from fp4kit.calibration import Collector, Headroom, input_global_scale, input_scale
from fp4kit.checkpoint import Activations, Rules, TensorConverter, convert, convert_tensors, make_plan
from fp4kit.checkpoint.executors import Options
from fp4kit.checkpoint.model.model_files import load_manifest
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify

SUFFIX = {"modelopt": ".input_scale", "compressed-tensors": ".input_global_scale"}
RULE = {"modelopt": input_scale, "compressed-tensors": input_global_scale}
EXPERTS = "model.layers.1.mlp.experts"


def scales(root: Path, format: str) -> dict[str, np.ndarray]:
    """Return {layer: its stored input scale} of the converted model in the directory `root`.

    format: the container format, which determines the names of the input scales.
    """
    end, found = SUFFIX[format], load(root)
    return {
        name.removesuffix(end): np.frombuffer(data, np.float32)
        for name, (_, _, data) in found.items()
        if name.endswith(end)
    }


@pytest.mark.parametrize("format", SUFFIX)
@pytest.mark.parametrize("rule", ["max", "headroom", Headroom(rho=2.0)])
def test_every_layer_gets_its_own(format: str, rule: Any, tmp_path: Path) -> None:
    """Each layer gets the input scale of its own amax; fused layers get that of the largest amax among them.

    The scale multiplies or divides, as the container requires. verify finds no error, with and without the source.
    """
    synthetic.dense(tmp_path / "m")
    collector = whole(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", format=format, activations=Activations.of(collector, rule))
    found, amaxes = scales(tmp_path / "out", format), collector.amaxes(rule)
    assert set(found) == set(amaxes)
    for layer, stored in found.items():
        parent, _, leaf = layer.rpartition(".")
        groups = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
        group = next((names for names in groups if leaf in names), (leaf,))
        amax = max(amaxes[f"{parent}.{name}"] for name in group)
        assert stored.tobytes() == np.float32(RULE[format](amax)).tobytes(), layer
    for source in (None, tmp_path / "m"):
        assert verify(tmp_path / "out", source).clean


def test_shapes_are_those_of_an_input_scale_for_all(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    for format in SUFFIX:
        convert(
            tmp_path / "m", tmp_path / f"a-{format}", format=format, activations=Activations.of(whole(tmp_path / "m"))
        )
        convert(tmp_path / "m", tmp_path / f"b-{format}", format=format, input_scale=0.5)
        a, b = ({name: (t[0], t[1]) for name, t in load(tmp_path / f"{x}-{format}").items()} for x in "ab")
        assert a == b
        configs = ((tmp_path / f"{x}-{format}" / "config.json").read_text() for x in "ab")
        assert next(configs) == next(configs)


def test_names_of_fused_layers_count(tmp_path: Path) -> None:
    """Amaxes measured under the fused names qkv_proj and gate_up_proj give the input scales of q, k, v, gate and up."""
    synthetic.dense(tmp_path / "m")
    layer, amaxes = "model.layers.0", {}
    for i in range(2):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        amaxes |= {f"{attention}.qkv_proj": 3.0, f"{mlp}.gate_up_proj": 5.0, f"{attention}.o_proj": 7.0}
    collector = Collector.merge(
        [measured(amaxes), measured({f"model.layers.{i}.mlp.down_proj": 9.0 for i in (0, 1)}, 80)]
    )
    convert(tmp_path / "m", tmp_path / "out", format="modelopt", activations=Activations.of(collector))
    found = scales(tmp_path / "out", "modelopt")
    expected = {
        "self_attn.q_proj": 3,
        "self_attn.v_proj": 3,
        "mlp.up_proj": 5,
        "self_attn.o_proj": 7,
        "mlp.down_proj": 9,
    }
    assert {name: found[f"{layer}.{name}"][0] for name in expected} == {n: input_scale(x) for n, x in expected.items()}


# ---- experts


def expert_amaxes(unseen: tuple[int, ...]) -> dict[str, float]:
    """Return {layer: amax} for the experts of synthetic.moe: 0 for the experts in ``unseen``, e + 1 for expert e."""
    leaves = ("gate_proj", "up_proj", "down_proj")
    return {f"{EXPERTS}.{e}.{leaf}": 0 if e in unseen else e + 1.0 for e in range(4) for leaf in leaves}


@pytest.mark.parametrize("format", SUFFIX)
def test_experts_that_saw_no_token_get_the_largest_amax(format: str, tmp_path: Path) -> None:
    synthetic.moe(tmp_path / "m")
    activations = Activations.of(whole(tmp_path / "m", expert_amaxes((1, 3))), unseen="layer")
    convert(tmp_path / "m", tmp_path / "out", format=format, activations=activations)
    found = scales(tmp_path / "out", format)
    assert [found[f"{EXPERTS}.{e}.up_proj"][0] for e in range(4)] == [RULE[format](x) for x in (1, 3, 3, 3)]
    assert verify(tmp_path / "out", tmp_path / "m").clean


def test_experts_that_the_file_does_not_name_count_as_unseen(tmp_path: Path) -> None:
    """An expert without an entry in the activations counts as unseen, because a hook that never ran stores none."""
    synthetic.moe(tmp_path / "m")
    full, kept = whole(tmp_path / "m", expert_amaxes(())), Collector()
    for name, columns in full.columns().items():
        if f"{EXPERTS}.2." not in name:
            kept = Collector.merge([kept, measured({name: float(full.amaxes()[name])}, columns)])
    for collector in (kept, whole(tmp_path / "m", expert_amaxes((2,)))):
        for text in (
            f"activations: 3 layers have seen no input other than zero: {EXPERTS}.2.",
            "--unseen-experts layer takes the largest amax of the layer's experts",
        ):
            with refused(text):
                make_plan(tmp_path / "m", activations=Activations.of(collector))
    plan = make_plan(tmp_path / "m", activations=Activations.of(kept, unseen="layer"))
    assert plan.input_amaxes[f"{EXPERTS}.2.down_proj"] == 4


@pytest.mark.parametrize("format", SUFFIX)
def test_unseen_experts_without_an_input_scale(format: str, tmp_path: Path) -> None:
    """With unseen="none", unseen experts get no input scale: a warning counts them, and verify names each one."""
    synthetic.moe(tmp_path / "m")
    activations = Activations.of(whole(tmp_path / "m", expert_amaxes((2,))), unseen="none")
    plan = convert(tmp_path / "m", tmp_path / "out", format=format, activations=activations).plan
    (warning,) = (line for line in plan.warnings if line.startswith("3 experts saw no token and get no input scale"))
    memory = "the engine uses uninitialised memory in its place"
    assert f"; vLLM: {memory}" in warning and "--unseen-experts layer gives them one" in warning
    assert f"; SGLang: {'the engine uses 1.0 in its place' if format == 'modelopt' else memory}" in warning
    missing = {f"{EXPERTS}.2.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")}
    assert set(layers_of(tmp_path / "m")) - set(scales(tmp_path / "out", format)) == missing
    issues = verify(tmp_path / "out", tmp_path / "m").issues
    assert {issue.subject for issue in issues if f"{SUFFIX[format][1:]} is missing" in issue.text} == missing


def test_a_gate_without_tokens_takes_the_amax_of_its_up_projection(tmp_path: Path) -> None:
    synthetic.moe(tmp_path / "m")
    amaxes = {**expert_amaxes(()), f"{EXPERTS}.1.gate_proj": 0}
    plan = make_plan(tmp_path / "m", activations=Activations.of(whole(tmp_path / "m", amaxes)))
    assert plan.input_amaxes[f"{EXPERTS}.1.gate_proj"] == plan.input_amaxes[f"{EXPERTS}.1.up_proj"] == 2


def test_stacks_of_experts(tmp_path: Path) -> None:
    """If a stack gate_up_proj is measured per expert, gate and up of each expert get the input scale of the expert."""
    synthetic.fused(tmp_path / "m")
    layers = layers_of(tmp_path / "m")
    stack, collector = "model.layers.0.mlp.experts", Collector()
    for layer, columns in layers.items():
        if ".experts." not in layer:
            collector.collect(layer, np.full(columns, 2, np.float32))
    for leaf, columns in (
        ("gate_up_proj", layers[f"{stack}.0.up_proj"]),
        ("down_proj", layers[f"{stack}.0.down_proj"]),
    ):
        for e in range(4):
            collector.collect(f"{stack}.{leaf}", np.full(columns, e + 1, np.float32), expert=e, experts=4)
    convert(tmp_path / "m", tmp_path / "out", format="modelopt", activations=Activations.of(collector))
    found = scales(tmp_path / "out", "modelopt")
    for e in range(4):
        assert {found[f"{stack}.{e}.{leaf}"][0] for leaf in ("gate_proj", "up_proj", "down_proj")} == {
            input_scale(e + 1)
        }


# ---- quantized sources


def test_a_layer_that_has_an_input_scale_keeps_it(tmp_path: Path) -> None:
    """Only layers without an input scale get one from activations. If all layers have one, activations are rejected."""
    synthetic.dense(tmp_path / "m")
    collector = whole(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "w4a16", format="modelopt")
    convert(tmp_path / "m", tmp_path / "w4a4", format="modelopt", input_scale=0.5)
    with refused("activations: every layer keeps its codes and its own input scale; leave the activations out"):
        make_plan(tmp_path / "w4a4", activations=Activations.of(collector))
    convert(tmp_path / "w4a16", tmp_path / "out", format="compressed-tensors", activations=Activations.of(collector))
    expected = convert(
        tmp_path / "m", tmp_path / "direct", format="compressed-tensors", activations=Activations.of(collector)
    )
    assert load(tmp_path / "out") == load(tmp_path / "direct") and expected.plan.has_input_scale
    assert verify(tmp_path / "out", tmp_path / "w4a16").clean


def test_new_codes_get_input_scales(tmp_path: Path) -> None:
    """MXFP4 layers that are cast to NVFP4 get the input scales that layers quantized directly get."""
    synthetic.moe(tmp_path / "m")
    collector = whole(tmp_path / "m", expert_amaxes(()))
    convert(tmp_path / "m", tmp_path / "mx", "mxfp4-ocp", format="compressed-tensors")
    convert(tmp_path / "mx", tmp_path / "out", format="modelopt", activations=Activations.of(collector))
    convert(tmp_path / "m", tmp_path / "direct", format="modelopt", activations=Activations.of(collector))
    assert scales(tmp_path / "out", "modelopt") == scales(tmp_path / "direct", "modelopt")
    assert verify(tmp_path / "out", tmp_path / "mx").clean


# ---- tensors in memory


@pytest.mark.parametrize("format", SUFFIX)
def test_tensors_in_memory_get_what_convert_writes(format: str, tmp_path: Path) -> None:
    tensors = synthetic.moe(tmp_path / "m")
    activations = Activations.of(whole(tmp_path / "m", expert_amaxes((0, 2))), unseen="layer")
    convert(tmp_path / "m", tmp_path / "out", format=format, activations=activations)
    rules = Rules.of("nvfp4-te", config={"num_hidden_layers": 2}, format=format, activations=activations)
    found = {name: np.asarray(array) for name, array in convert_tensors(tensors.items(), rules)}
    end = SUFFIX[format]
    assert {n.removesuffix(end): x.tobytes() for n, x in found.items() if n.endswith(end)} == {
        name: scale.tobytes() for name, scale in scales(tmp_path / "out", format).items()
    }


def test_tensors_in_memory_are_refused_as_files_are() -> None:
    activations = Activations.of(measured({"a.o_proj": 1.0}))
    with refused("activations: 1 of 1 layers were not measured: b.o_proj; run the model in fp4kit.torch.collect"):
        list(
            TensorConverter(Rules.of("nvfp4-te", activations=activations)).convert(
                [("b.o_proj.weight", np.ones((16, 64), np.float32))]
            )
        )
    with refused("activations: mxfp4-ocp has no input scale; leave them out, or use an NVFP4 recipe"):
        Rules.of("mxfp4-ocp", activations=activations)


# ---- refusals and records


def test_layers_that_were_not_measured(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    collector = Collector.merge(
        [measured({name: 1.0}, k) for name, k in layers_of(tmp_path / "m").items() if "o_proj" not in name]
    )
    with refused("activations: 2 of 14 layers were not measured: model.layers.0.self_attn.o_proj, model.layers.1"):
        make_plan(tmp_path / "m", activations=Activations.of(collector))
    assert make_plan(tmp_path / "m", wishes=Wishes(keep=("*.o_proj",)), activations=Activations.of(collector)).converted


def test_another_number_of_columns(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    collector = Collector.merge([measured({name: 1.0}, 32) for name in layers_of(tmp_path / "m")])
    with refused("was measured with 32 columns, and model.layers.0.self_attn.q_proj has 64; measure the model that is"):
        make_plan(tmp_path / "m", activations=Activations.of(collector))
    fused = "model.layers.0.mlp.gate_up_proj"
    collector = Collector.merge([whole(tmp_path / "m"), measured({fused: 1.0}, 32)])
    with refused(f"{fused}: was measured with 32 columns, and model.layers.0.mlp.gate_proj has 64"):
        make_plan(tmp_path / "m", activations=Activations.of(collector))


@pytest.mark.parametrize("amax", [1e-38, 1e-41, 3e-36])
def test_amaxes_too_small_for_an_input_scale(amax: float, tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    with refused("activations: 1 layers have an amax whose input scale is not a normal float32"):
        make_plan(
            tmp_path / "m", activations=Activations.of(whole(tmp_path / "m", {"model.layers.1.mlp.down_proj": amax}))
        )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"recipe": "mxfp4-ocp"}, "activations: mxfp4-ocp has no input scale; leave them out, or use an NVFP4"),
        ({"recipe": "mxfp8-te", "format": "comfy"}, "activations: mxfp8-te has no input scale; leave them out"),
        ({"recipe": "mxfp4-ocp", "format": "mlx"}, "activations: mlx-lm reads no input scales; leave them out"),
        ({"format": "bf16"}, "activations: unquantized layers have no input scale; leave them out"),
        ({"format": "bf16", "input_scale": 1.0, "activations": None}, "input scale: unquantized layers have no input"),
        ({"input_scale": 1.0}, "activations: are given with an input scale for all layers; use only one of them"),
    ],
)
def test_requests_that_have_no_input_scale(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    with refused(text):
        make_plan(tmp_path / "m", **{"activations": Activations.of(measured({"a": 1.0})), **options})


def test_files(tmp_path: Path) -> None:
    """Several activation files are merged, and the manifest records their names and the options.

    The options are the rule and the policy for unseen experts.
    """
    synthetic.dense(tmp_path / "m")
    layers = layers_of(tmp_path / "m")
    for rank in range(2):
        Collector.merge([measured({n: 1.0 + (i + rank) % 2}, k) for i, (n, k) in enumerate(layers.items())]).save(
            tmp_path / f"r{rank}"
        )
    activations = Activations.of([tmp_path / "r0", tmp_path / "r1"], "max", "layer")
    convert(tmp_path / "m", tmp_path / "out", format="modelopt", activations=activations)
    assert {float(x[0]) for x in scales(tmp_path / "out", "modelopt").values()} == {float(input_scale(2))}
    request = (load_manifest(tmp_path / "out") or {})["request"]
    facts = request["activations"]
    assert [file["name"] for file in facts["files"]] == ["r0", "r1"] and (facts["rule"], facts["unseen"]) == (
        "max",
        "layer",
    )


@pytest.mark.parametrize(
    ("source", "keywords", "text"),
    [
        (["none"], {}, "activations: none: is not a file; needs a file that fp4kit.calibration.Collector.save wrote"),
        ("none", {}, "activations: none: is not a file"),
        ([], {}, "activations: load: got no path"),
        (Collector(), {}, "activations: no layer was measured; run the model in fp4kit.torch.collect"),
        (measured({"a": 1.0}), {"rule": "mean"}, "activations: amaxes: rule is 'mean'; needs 'max' or 'headroom'"),
        (measured({"a": 1.0}), {"unseen": "skip"}, "unseen experts: skip is unknown; use one of error, layer, none"),
    ],
)
def test_activations_that_cannot_be_used(source: Any, keywords: dict[str, Any], text: str) -> None:
    with refused(text):
        Activations.of(source, **keywords)
    with pytest.raises(
        TypeError, match=r"^Activations.of: source is \[?3\]?; needs a Collector, or the paths of files"
    ):
        Activations.of([3] if isinstance(source, list) else 3)  # type: ignore[arg-type]


def test_other_activations_are_not_gone_on_with(tmp_path: Path) -> None:
    """An interrupted run can be resumed only with the activations that it was started with."""
    synthetic.dense(tmp_path / "m")
    one, other = (Activations.of(whole(tmp_path / "m", {"model.layers.0.mlp.down_proj": x})) for x in (1.0, 2.0))

    def stop(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "m", tmp_path / "out", activations=one, options=Options(progress=stop))
    with refused("was started from another source, with other options"):
        convert(tmp_path / "m", tmp_path / "out", activations=other, options=Options(resume=True))
    convert(tmp_path / "m", tmp_path / "out", activations=one, options=Options(resume=True))
