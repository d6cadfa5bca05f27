"""Test contracts: checks, JSON data, differences and flags of training stacks; and the table of engines."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
from exhaustive import exhaustive
from together import together

import fp4kit
from fp4kit import Contract
from fp4kit.checkpoint import convert
from fp4kit.checkpoint.containers.configs import LOADED
from fp4kit.checkpoint.containers.table import CONTAINERS
from fp4kit.checkpoint.loaders import support
from fp4kit.checkpoint.plan.request import Request
from fp4kit.cli import main
from fp4kit.contract.engine_table import VERSIONS
from fp4kit.contract.engines import FUSED, OF_CHECKPOINTS
from fp4kit.qat import rule_of_inputs
from fp4kit.recipes import RECIPES
from fp4kit.storage.files import CheckpointError

FULL = Contract(
    "nvfp4-te",
    patterns=[("*.experts.*", "mxfp4"), ("*.router", None)],
    excluded=["lm_head", "*.embed_tokens"],
    shared_amax=[["up_proj", "gate_proj"], ["q_proj", "k_proj", "v_proj"]],
    activations=replace(fp4kit.recipe("nvfp4-flashinfer"), id="mine", scale_max=256),
    input_scales="static",
    served_dtype="bfloat16",
    kv_cache="nvfp4-vllm-kv",
    kv_layout="vllm-hnd-swizzled",
    unit=replace(fp4kit.unit("sm90"), id="slow", promote=128),
    hadamard=16,
    hadamard_signs="+-" * 8,
    scale_search="mse",
    container="modelopt NVFP4",
    inferred=[("container", "the names of tensors")],
)


def test_a_contract_comes_back_from_json(tmp_path):
    assert Contract().as_data() == {"fp4kit_contract": 1}
    for contract in (FULL, Contract(), Contract("int4-qat", unit="exact", unknown=("kv_cache", "activations"))):
        again = Contract.from_data(json.loads(json.dumps(contract.as_data())))
        assert again == contract and again.inferred == contract.inferred and again.unknown == contract.unknown
        contract.save(tmp_path / "c.json")
        assert Contract.load(tmp_path / "c.json") == contract == Contract.of(tmp_path / "c.json")


def test_every_recipe_comes_back_with_its_facts():
    for id in RECIPES:
        data = json.loads(json.dumps(Contract(id).as_data()))
        assert Contract.from_data(data).weights == fp4kit.recipe(id)
        data["weights"]["facts"]["block"] = [3, 3]
        with pytest.raises(CheckpointError, match=rf"weights: {id} has block .* in this version of fp4kit, and \[3"):
            Contract.from_data(data)
        assert Contract.from_data({"fp4kit_contract": 1, "weights": id}).weights.id == id


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"fp4kit_contract": 2}, "fp4kit_contract is 2; this version of fp4kit reads version 1"),
        ([], r"fp4kit_contract is \[\]"),
        ({"wieghts": "nvfp4"}, "unknown key 'wieghts'; a later version"),
        ({"weights": {"id": "nvfp4-te", "rounds": 1}}, "weights: unknown key 'rounds'"),
        ({"weights": "nvfp5"}, "weights: recipe: no recipe is called 'nvfp5'"),
        ({"weights": {"element": 5}}, "weights: Recipe: the field 'id' is missing"),
        ({"weights": {"id": ["x"]}}, r"weights: id is \['x'\]; needs a string"),
        (
            {"fp4kit_contract": 1, "weights": {"id": "nvfp4-te", "facts": ["x"]}},
            "weights: facts is .*; needs an object",
        ),
        ({"weights": {"id": "nvfp4-te", "versions": "1"}}, "weights: versions is '1'; needs a"),
        ({"unit": "sm1"}, "unit is 'sm1'; needs one of sm100"),
        ({"unit": True}, "unit is True; needs an object"),
        ({"unit": {"id": "x"}}, "unit: Unit x: it has no step and no order"),
        ({"unit": {"fp8": 7}}, "unit: fp8 is 7; needs an object"),
        ({"patterns": 5}, "patterns is 5; needs a list"),
        ({"patterns": [1]}, "patterns has 1; needs pairs of a layer pattern and a recipe"),
        ({"patterns": [{"*": 1, "nvfp4-te": 2}]}, "patterns has .*; needs pairs"),
        ({"inferred": []}, r"inferred is \[\]; needs an object"),
        ({"fp4kit_contract": True}, "fp4kit_contract is True"),
    ],
)
def test_malformed_data_is_refused(data, message):
    with pytest.raises(CheckpointError, match=message):
        Contract.from_data(data if data == [] else {"fp4kit_contract": 1} | data)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"weights": "nvfp5"}, ValueError, "Contract: no recipe is called 'nvfp5'"),
        ({"patterns": ["x"]}, TypeError, "Contract: patterns has 'x'; needs pairs"),
        ({"patterns": "x"}, TypeError, "Contract: patterns is 'x'; needs a tuple"),
        ({"excluded": [1]}, TypeError, "Contract: an entry of excluded is 1; needs a string"),
        ({"shared_amax": [["a"]]}, ValueError, r"the group \('a',\); needs two or more leaf names"),
        ({"shared_amax": [["a", "b"], ["b", "c"]]}, ValueError, "shared_amax has 'b' twice"),
        ({"input_scales": "fixed"}, ValueError, "needs 'dynamic', 'static' or None"),
        ({"served_dtype": "bf16"}, ValueError, "served_dtype is 'bf16'; needs float32, float16, bfloat16 or None"),
        ({"kv_layout": "nhd"}, ValueError, "layout is 'nhd'; needs one of vllm-nhd"),
        ({"unit": "sm1"}, ValueError, "Contract: unit is 'sm1'"),
        ({"hadamard": 24}, ValueError, "hadamard is 24; needs 16, 32, 64, 128, 256, 512 or None"),
        ({"hadamard": 16, "hadamard_signs": "+-"}, ValueError, r"needs 16 of the characters \+ and -"),
        ({"hadamard_signs": "+-"}, ValueError, "needs None, because hadamard is None"),
        ({"container": 1}, TypeError, "container is 1; needs a string"),
        ({"unknown": ["wieghts"]}, ValueError, "'wieghts' is not a setting; needs one of weights"),
        ({"unit": "sm100", "unknown": ["unit"]}, ValueError, "unit has a value, but is listed as unknown"),
        ({"inferred": [("unit",)]}, ValueError, "needs pairs of a setting and how it was found"),
    ],
)
def test_fields_are_checked(fields, error, message):
    with pytest.raises(error, match=message):
        Contract(**fields)


def test_the_difference_of_every_setting_is_said_in_words():
    empty = Contract()
    assert FULL.diff(FULL).equal and str(FULL.diff(FULL)) == "the contracts are equal"
    found = FULL.diff(empty)
    names = [text.partition(":")[0] for text in found.differences]
    assert names == [
        *("weights", "patterns", "excluded", "shared_amax", "activations", "input_scales", "served_dtype"),
        *("kv_cache", "kv_layout", "unit", "hadamard", "hadamard_signs", "scale_search", "container"),
    ]
    assert not found.uncertain and not found.equal
    assert "weights: nvfp4-te and none" in str(found)
    assert "patterns: only the first has *.experts.*=mxfp4-ocp, *.router=unquantized\n" in str(found)
    assert "shared_amax: only the first has (gate_proj up_proj), (k_proj q_proj v_proj)" in str(found)
    unsure = empty.diff(Contract(unknown=("unit", "activations")))
    assert unsure.differences == () and not unsure.equal
    said = "unknown in the second contract; the other says none"
    assert unsure.uncertain == (f"activations: {said}", f"unit: {said}")
    with pytest.raises(TypeError, match="other is a str; needs a Contract"):
        empty.diff("nvfp4")


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ("nvfp4-te", "nvfp4-te-2d", "block (1, 16) and (16, 16)"),
        ("nvfp4-te-4over6-mae-448", "nvfp4-te-4over6-mse-256", "4over6 mode mae and mse, largest block scale 448 and"),
        ("mxfp4-microxcaling-nearest", "mxfp4-microxcaling-even", "rule of fake_quantize microxcaling_nearest and"),
        ("nvfp4-modelopt", "nvfp4-quark", "decoding"),
        ("nvfp4-te-4over6-mse-256", "nvfp4-te-4over6-mse-256-fasterr", "fast 4over6 errors False and True"),
        ("mxfp8-torchao-rceil", "mxfp8-torchao-rceil-018", "versions"),
        ("nvfp4-te", "mxfp4-ocp", "scale format E4M3 and E8M0"),
    ],
)
def test_recipes_differ_by_fields(a, b, text):
    (line,) = Contract(a).diff(Contract(b)).differences
    assert line.startswith(f"weights: {a} and {b}: ") and text in line


def test_recipes_that_decode_differently_are_told_apart():
    r = fp4kit.recipe("nvfp4-te")
    (line,) = Contract(r).diff(Contract(replace(r, id="b", decode_rule="product"))).differences
    assert "so codes and scales are equal, and values may differ" in line
    (line,) = Contract(r).diff(Contract(replace(r, id="b"))).differences
    assert line.endswith("equal arithmetic under two names")
    (line,) = Contract(unit="sm90").diff(Contract(unit=replace(fp4kit.unit("sm90"), promote=128))).differences
    assert line == "unit: sm90 with other values of promote"
    one, other = (Contract(patterns=[(name, None) for name in names]) for names in ("ab", "ba"))
    assert one.diff(other).differences == ("patterns: other order",)


def test_layers_get_recipes_and_groups():
    pair, alone = ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj", "mlp.experts.0.up_proj", "x.up_proj")
    layers = [*pair, *alone, "lm_head", "q_proj"]
    ids = {layer: FULL.recipe_of(layer) and FULL.recipe_of(layer).id for layer in (*layers, "mlp.router")}
    others = {"mlp.experts.0.up_proj": "mxfp4-ocp", "lm_head": None, "mlp.router": None}
    assert ids == dict.fromkeys(layers, "nvfp4-te") | others
    assert [FULL.group_of(layer, layers) for layer in pair] == [pair, pair]
    assert [FULL.group_of(layer, layers) for layer in alone] == [(layer,) for layer in alone]
    assert FULL.group_of("q_proj", ["q_proj", "v_proj", "a.k_proj"]) == ("q_proj", "v_proj")
    mixtral = Contract("nvfp4-te", shared_amax=(("w1", "w3"),))
    experts = [f"a.experts.0.{leaf}" for leaf in ("gate_proj", "down_proj", "up_proj")]
    assert mixtral.group_of(experts[0], experts) == (experts[0], experts[2])
    assert mixtral.group_of("a.mlp.gate_proj", ["a.mlp.gate_proj", "a.mlp.up_proj"]) == ("a.mlp.gate_proj",)


def test_stating_makes_a_setting_known():
    partly = Contract("nvfp4-te", unknown=("activations", "unit"), inferred=[("weights", "recorded")])
    known = partly.stating(activations=None, weights="mxfp4")
    assert known.unknown == ("unit",) and known.inferred == () and known.weights.id == "mxfp4-ocp"
    with pytest.raises(TypeError, match="there is no setting 'wieghts'"):
        partly.stating(wieghts="x")
    assert str(partly) == "weights: nvfp4-te (inferred: recorded)\nunknown: activations, unit"


def test_flags_become_a_contract_and_come_back():
    for flag, size, id, n in (
        ("OPEN_TRAINING_MXFP4_FAKE_QAT_FLAG", "OPEN_TRAINING_MXFP4_BLOCK_SIZE", "mxfp4-flashinfer", "16"),
        ("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "OPEN_TRAINING_INT4_GROUP_SIZE", "int4-qat", "64"),
    ):
        contract = Contract.from_environment({flag: "1", size: n})
        for layer in ("m.layers.0.mlp.experts.1.up_proj", "decoder.mlp.experts.linear_fc1"):
            assert contract.recipe_of(layer) == replace(fp4kit.recipe(id), block=(1, int(n)))
        assert contract.recipe_of("m.layers.0.self_attn.q_proj") is None
        flags = contract.environment()
        assert flags[flag] == "1" and flags[size] == n and sorted(flags.values()) == sorted(["0", "1", n])
        assert Contract.from_environment(flags) == contract
        assert contract.activations is None and "activations" not in contract.unknown
    both = {"OPEN_TRAINING_MXFP4_FAKE_QAT_FLAG": "1", "OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1"}
    with pytest.raises(ValueError, match="are both '1'; weights have one format"):
        Contract.from_environment(both)
    assert Contract.from_environment({}).patterns == ()
    square = replace(fp4kit.recipe("mxfp4-flashinfer"), block=(32, 32))
    wrong = [Contract(patterns=[p]) for p in (("*", "int4-qat"), ("*.q_proj", "int4-qat"), ("*.experts.*", square))]
    for other in (Contract("int4-qat"), Contract(patterns=[("*", "nvfp4-te")]), Contract(), *wrong):
        with pytest.raises(ValueError, match="no flag selects this contract"):
            other.environment()


def test_a_pattern_with_two_variants_of_a_recipe_names_the_field():
    """The variants have one id, so that their ids alone would not say what differs."""
    flags = {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1"}
    a, b = (Contract.from_environment(flags | {"OPEN_TRAINING_INT4_GROUP_SIZE": n}) for n in ("64", "128"))
    assert a.diff(b).differences == ("patterns: *.experts.*: int4-qat and int4-qat: block (1, 64) and (1, 128)",)
    assert a.diff(a).differences == ()


ROWS = fp4kit.servings()


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_row_names_what_exists(row: fp4kit.Serving) -> None:
    contract = row.contract
    assert contract == fp4kit.Contract.from_data(json.loads(json.dumps(contract.as_data())))
    unknown = [name for name in OF_CHECKPOINTS if name != "patterns" or not row.decode_rule]
    assert contract.unknown == tuple(unknown) and row.version and row.needs
    assert row.container in ("", *LOADED, *(form.name for form in CONTAINERS))
    if row.format is not None:
        form = next(one for one in CONTAINERS if one.name == row.container.replace("W4A16_", ""))
        assert form.stores(row.weights) and form.format == row.format
        assert Request(row.weights, row.format).form_for({"model_type": "llama"}) is not None
    assert row.product == "torch" or contract.unit == fp4kit.unit(row.product)
    scales = row.activations is not None and row.activations.tensor_scaling == "tensor"
    assert (row.input_scales is not None) == scales
    assert contract.shared_amax == (FUSED if row.shares_amax else ())


def test_an_engine_loads_the_containers_from_which_it_computes() -> None:
    examined = [row for row in ROWS if row.engine in VERSIONS and row.container]
    for row in examined:
        found = support.cells_of(row.container, row.engine)
        assert any(cell.status == "loads" and "dense" in families for cell, families in found.items())
    assert {row.engine for row in examined} == {"transformers", "vLLM", "SGLang"}
    assert not support.cells_of("mlx nvfp4", "vLLM") and not support.cells_of("modelopt NVFP4", "TensorRT-LLM")


def test_the_first_row_of_an_engine_and_a_scheme_is_the_default() -> None:
    for row in ROWS:
        first = next(one for one in ROWS if (one.engine, one.scheme) == (row.engine, row.scheme))
        assert fp4kit.serving(row.engine.upper(), row.scheme) == first.contract
        found = fp4kit.serving(row.engine, row.scheme, route=row.route, format=row.format)
        assert (
            found
            == next(
                one
                for one in ROWS
                if (one.engine, one.scheme, one.route) == (row.engine, row.scheme, row.route)
                and row.format in (None, one.format)
            ).contract
        )
    keys = [(row.engine, row.scheme, row.route, row.format) for row in ROWS]
    assert len({*keys}) == len(keys)


WRONG: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (
        ("tranformers", "nvfp4-w4a4"),
        {},
        ValueError,
        r"engine is 'tranformers'; needs one of .*; did you mean transformers",
    ),
    (
        ("vllm", "nvfp4-w4a16"),
        {},
        ValueError,
        r"vLLM loads such checkpoints .*, but how it multiplies nvfp4-w4a16 is not known .* transformers nvfp4-w4a16",
    ),
    (("vllm", "mxfp4-w4a4-even"), {}, ValueError, "vLLM needs one of .*; torchao has it$"),
    (("vllm", "nvfp4-w4a"), {}, ValueError, "did you mean nvfp4-w4a4 or nvfp4-w4a4-token.$"),
    (("compressed-tensors", "nvfp4-w4a4"), {}, ValueError, "how it multiplies is not known to fp4kit; needs one of"),
    (("vllm", "fp4"), {}, ValueError, "scheme is 'fp4'; vLLM needs one of 'nvfp4-w4a4'"),
    (
        ("vllm", "nvfp4-w4a4"),
        {"route": "fast"},
        ValueError,
        "route is 'fast'; vLLM nvfp4-w4a4 needs one of '', 'emulation'",
    ),
    (("vllm", "nvfp4-w4a4"), {"format": "gguf"}, ValueError, "format is 'gguf'; .* 'compressed-tensors', 'modelopt'"),
    ((1, "nvfp4-w4a4"), {}, TypeError, "engine is 1"),
    (("vllm", 1), {}, TypeError, "scheme is 1"),
]


@pytest.mark.parametrize(("arguments", "options", "error", "text"), WRONG, ids=str)
def test_what_is_unknown_is_refused_with_the_near_ones(arguments: Any, options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        fp4kit.serving(*arguments, **options)


def known_to_load() -> list[tuple[str, str]]:
    """Return the (engine, scheme) pairs for which an engine loads a container of the scheme without a known product."""
    known, found = {(row.engine, row.scheme) for row in ROWS}, dict[tuple[str, str], None]()
    for (container, _, engine), cell in support.CELLS.items():
        for row in ROWS if cell.status == "loads" and any(one.engine == engine for one in ROWS) else ():
            if row.container == container and (engine, row.scheme) not in known:
                found[engine, row.scheme] = None
    return [*found]


def test_engines_that_load_what_they_are_not_known_to_multiply(capsys: pytest.CaptureFixture[str]) -> None:
    """The error says so for every such pair, and names only engines and schemes that can be described."""
    pairs = known_to_load()
    assert {("vLLM", "nvfp4-w4a16"), ("SGLang", "nvfp4-w4a16"), ("vLLM", "mxfp4-w4a16")} <= {*pairs}
    for engine, scheme in pairs:
        assert main(["contract", "--engine", engine, "--scheme", scheme]) == 2
        text = capsys.readouterr().err
        assert f"{engine} loads such checkpoints" in text and f"how it multiplies {scheme} is not known" in text
        assert "did you mean" not in text and "recipe" not in text
        other, its_scheme = re.findall(r"it can describe (.*?) (\S+?)(?:,| and | for them)", text)[0]
        assert its_scheme == scheme and main(["contract", "--engine", other, "--scheme", its_scheme]) == 0
        capsys.readouterr()


DECODED = [  # recipe, what is said of decoding
    ("nvfp4-compressed-tensors", "the engine decodes these codes as the contract says"),
    (
        "nvfp4-te",
        "the engine decodes these codes by the rule compressed_tensors, where the contract has te: values may differ in"
        " their last bits",
    ),
]


@pytest.mark.parametrize(("made", "text"), DECODED)
def test_rules_of_encoding_are_no_difference_of_stored_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], made: str, text: str
) -> None:
    """An engine only decodes stored codes, so what made them is not compared with its own recipe."""
    synthetic.dense(tmp_path / "in")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "q"), "--quiet", "--recipe", made]) == 0
    assert main(["contract", str(tmp_path / "q"), "--engine", "transformers", "--scheme", "nvfp4-w4a16"]) == 0
    said = capsys.readouterr().out
    assert f"weights: the stored codes of {made}\n" in said and said.splitlines()[-1] == text
    assert "rule of the" not in said and "differ:" not in said
    assert main(["contract", str(tmp_path / "q"), "--engine", "transformers", "--scheme", "nvfp4-w4a4"]) == 1
    said = capsys.readouterr().out
    assert "differ:\nactivations: none and nvfp4-compressed-tensors-static\ninput_scales: " in said
    assert "weights: nvfp4" not in said and text not in said


def test_parity_with_an_engine() -> None:
    """The engine's contract is a side of its own, or states how tensors of the rollout are computed."""
    served = fp4kit.serving("transformers", "mxfp4-w4a4")
    assert fp4kit.parity(served, engine="transformers", scheme="mxfp4-w4a4").equal
    w = {"up_proj": np.random.default_rng(0).standard_normal((64, 64), np.float32)}
    stored = {"up_proj": fp4kit.quantize(w["up_proj"], "nvfp4-compressed-tensors")}
    known = {"engine": "transformers", "scheme": "nvfp4-w4a16"}
    assert fp4kit.parity(fp4kit.serving(**known), stored, weights=w, **known).equal
    trained = replace(fp4kit.serving(**known), served_dtype=None)
    found = fp4kit.parity(trained, stored, weights=w, **known)
    assert not found.equal and "served_dtype is none in train and bfloat16 in rollout" in found.layers[0].setting
    other = fp4kit.parity(served, engine="transformers", scheme="mxfp4-w4a16")
    assert any("activations" in text for text in other.contracts.differences)
    with pytest.raises(TypeError, match="rollout is missing; needs a contract, a model or tensors, or an"):
        fp4kit.parity(served)


FAMILIES = {"dense": "qwen3", "llama": "llama", "moe": "qwen3_moe", "deepseek_v3": "deepseek_v3", "gpt_oss": "gpt_oss"}
FAMILIES |= {"stacked_moe": "qwen3_vl_moe_text", "llama4": "llama4_text"}  # family -> model_type


@pytest.mark.parametrize("family", ["moe", *exhaustive([one for one in FAMILIES if one != "moe"])])
def test_all_functions_ask_the_table_of_engines(tmp_path: Path, family: str) -> None:
    """Training in PyTorch and JAX, convert and the command refuse what an engine is known to reject or misread."""
    torch, ft, fj = (pytest.importorskip(name) for name in ("torch", "fp4kit.torch", "fp4kit.jax"))
    experts = 2 * (family not in ("dense", "llama"))
    config, parent = {"model_type": FAMILIES[family], "num_experts": experts}, "mlp" + ".experts.0" * bool(experts)
    w = {f"{parent}.{x}_proj": synthetic.random(x, (128, 128)) for x in ("gate", "up", "down")}
    synthetic.write_model(tmp_path / "m", config, {f"{name}.weight": x for name, x in w.items()})
    model = torch.nn.ModuleDict({f"{x}_proj": torch.nn.Linear(128, 128, False) for x in ("gate", "up", "down")})
    for part in reversed(parent.split(".")):
        model = torch.nn.ModuleDict({part: model})
    model.bfloat16().config = config
    params = {name: {"kernel": x.T} for name, x in w.items()}
    for i, row in enumerate(row for row in ROWS if row.container in LOADED and row.engine in VERSIONS):
        known, scale = {"engine": row.engine, "scheme": row.scheme}, 1.0 if row.input_scales == "static" else None
        trains = {**known, "route": row.route, "inputs": scale and dict.fromkeys(w, scale)}
        stores, paths = (
            {**known, "format": row.format, "input_scale": scale},
            [str(tmp_path / x) for x in ("m", f"{i}")],
        )
        status = support.cell(row.container, family, row.engine).status
        refused = {is_refused(ft.fake_quantize_model, copy.deepcopy(model), **trains)}
        refused |= {is_refused(fj.fake_quantize_model, params, config=config, **trains)}
        refused |= {is_refused(convert, *paths, **stores)}
        options = [f"--{name.replace('_', '-')}={value}" for name, value in stores.items() if value is not None]
        refused |= {main(["convert", *paths[:1], f"{paths[1]}b", *options, "--quiet"]) == 2}
        assert status == "unknown" or refused == {status in ("fails", "wrong values")}, (row, status)
        assert refused != {True} or not {*tmp_path.glob(f"{i}*")}


def is_refused(function: Any, *args: Any, **options: Any) -> bool:
    try:
        return not function(*args, **options)
    except ValueError as error:
        return "; use " in str(error)


MISFITS = [  # recipe and options of convert, engine, scheme, the container that is shown, the end of the error
    ("nvfp4-modelopt --format modelopt", "vLLM", "nvfp4-w4a4", "modelopt NVFP4", "with --activations"),
    ("mxfp4-ocp --format compressed-tensors", "vLLM", "mxfp8-w8a8", "compressed-tensors mxfp8-quantized", "its source"),
    (
        "nvfp4-modelopt --format modelopt",
        "transformers",
        "nvfp4-w4a16",
        "compressed-tensors nvfp4-pack-quantized",
        "wrong for it",
    ),
    (
        "nvfp4-te --format compressed-tensors",
        "transformers",
        "nvfp4-w4a16",
        "compressed-tensors nvfp4-pack-quantized",
        "(transformers#48371)",
    ),
    ("nvfp4-te --format modelopt --input-scale 1", "vLLM", "nvfp4-w4a4", "modelopt NVFP4", ""),
]


@together("case", MISFITS)
def test_a_scheme_must_fit_the_checkpoint(tmp_path: Path, capsys: Any, case: tuple[str, ...]) -> None:
    made, engine, scheme, container, text = case
    source = tmp_path / f"{made}-{engine}"
    synthetic.moe(source)
    assert main(["convert", str(source), f"{source}o", "--quiet", "--recipe", *made.split()]) == 0
    assert main(["contract", f"{source}o", "--engine", engine, "--scheme", scheme]) == bool(text)
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("error: this checkpoint cannot be served so: ") == bool(text)
    assert said[-1].endswith(text) and f"container: {container}" in said


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["contract", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(row.engine in listed and row.scheme in listed for row in ROWS)
    assert main(["contract", "--list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "fp4kit.engines/1" and len(found["engines"]) == len(ROWS)
    own = {row.activations.id for row in ROWS if row.activations}
    assert {one["activations"] for one in found["engines"]} == own | {""} and "nvfp4-vllm-kv" in own
    assert main(["contract", "--list", "--long"]) == 0
    listed = capsys.readouterr().out
    assert "nvfp4-vllm-static " in listed and "nvfp4-vllm-kv" not in listed
    served = fp4kit.serving("vLLM", "nvfp4-w4a4", format="modelopt")
    assert "activations: nvfp4-vllm-static\n" in str(served)
    assert "activations: nvfp4-vllm-kv\n" in str(served.stating(input_scales="dynamic"))
    assert "by nvfp4-vllm-static, with static amaxes" in rule_of_inputs(served.activations, "amaxes")
    known = ["contract", "--engine", "transformers", "--scheme", "nvfp4-w4a4"]
    assert main([*known, "--out", str(tmp_path / "c.json")]) == 0
    assert main(["contract", read := str(tmp_path / "c.json"), "--out", read]) == 2
    printed = capsys.readouterr().out
    assert "activations: nvfp4-compressed-tensors-static" in printed
    assert "models dense, llama, llama4, granite_moe, vlm: loads\n" in printed
    assert "models moe, deepseek_v3: wrong values; the engine decodes experts without their global scale" in printed
    assert fp4kit.Contract.load(tmp_path / "c.json") == fp4kit.serving("transformers", "nvfp4-w4a4")
    assert main(["contract", str(tmp_path / "c.json"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["contract"]["served_dtype"] == "bfloat16" and shown["serving"] is None
    assert main(["contract", str(tmp_path / "c.json"), "--engine", "vLLM", "--scheme", "nvfp4-w4a4"]) == 0
    printed = capsys.readouterr().out
    assert "activations: nvfp4-vllm-static-divisor" in printed and "served_dtype: bfloat16 and none" in printed
    assert main(["contract", str(tmp_path / "c.json"), *known[1:]]) == 0
    assert "nothing stated differs" in capsys.readouterr().out
    for wrong in (["contract"], ["contract", "--list", "--engine", "vllm"], [*known[:2], "vLLM", "--scheme", "x"]):
        assert main(wrong) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("engine", ["MLX", "llama.cpp"])
def test_parity_multiplies_as_an_engine_does(engine: str) -> None:
    """Products of parity are those of the engine's unit, which takes inputs as they are."""
    rng = np.random.default_rng(0)
    w = {"up_proj": rng.standard_normal((64, 64), np.float32)}
    inputs = {"up_proj": rng.standard_normal((8, 64), np.float32)}
    row = next(one for one in ROWS if one.engine == engine and one.scheme.startswith("mxfp4"))
    assert fp4kit.parity(row.contract, row.contract, weights=w, inputs=inputs).layers[0].products == (0, 512)
    other = row.contract.stating(unit="ggml-avx2" if engine == "MLX" else "mlx-cpu")
    found = fp4kit.parity(row.contract, other, weights=w, inputs=inputs)
    assert not found.equal and found.layers[0].step == "product" and found.layers[0].setting.startswith("unit ")


def test_a_row_is_named_for_python_and_for_the_command_line_alike(capsys):
    assert str(next(row for row in fp4kit.servings() if row.format == "modelopt")).endswith("format modelopt)")
    assert not any("--" in str(row) for row in fp4kit.servings())
    for engine, producer in (("vLLM", "vllm"), ("SGLang", "sglang"), ("FlashInfer", "flashinfer")):
        assert main(["contract", "--engine", engine, "--scheme", "nvfp4-w4a4-token"]) == 0
        assert f"activations: nvfp4-{producer}-token\n" in capsys.readouterr().out
