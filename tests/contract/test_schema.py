"""Test Contract: its checks, its JSON data, what differs between two contracts, and the flags of training stacks."""

import json
from dataclasses import replace

import pytest

import fp4kit
from fp4kit import Contract
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
    assert "patterns: only the first has *.experts.*=mxfp4-ocp, *.router=unquantized; only the second" in str(found)
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
