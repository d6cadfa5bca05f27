"""Test convert_tensors: it gives the converter's bytes for NumPy and PyTorch tensors, in any order of tensors.

Names may be those of Hugging Face or of Megatron.
"""

import re
from contextlib import nullcontext

import numpy as np
import pytest
import synthetic
from exhaustive import half
from float_modes import BITS, NEEDS_ENVIRONMENT, mode
from seconds import TEN, cpu_seconds
from together import together

from fp4kit.checkpoint import CheckpointError, Rules, TensorConverter, Wishes, convert, convert_tensors
from fp4kit.checkpoint.model.model_files import open_source
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.model.weights import located
from fp4kit.storage.files import NUMPY_DTYPES

MODELS = {f.__name__: f for f in (synthetic.dense, synthetic.moe, synthetic.fused, synthetic.deepseek, synthetic.vlm)}
PAIRS = [
    ("nvfp4-te", "modelopt"),
    ("nvfp4-compressed-tensors", "compressed-tensors"),
    ("mxfp4-ocp", "compressed-tensors"),
    ("mxfp8-te", "modelopt"),
]


def stored(root):
    """Return (opened source, {name: bytes}, {name: array}) of all tensors of the checkpoint in the directory `root`."""
    model = open_source(root)
    raw, arrays = {}, {}
    with Readers() as readers:
        for name, (file, entry) in model.tensors.items():
            raw[name] = readers.bytes(located(file, entry))
            arrays[name] = raw[name].view(NUMPY_DTYPES.get(entry.dtype, np.dtype("i8"))).reshape(entry.shape)
    return model, raw, arrays


def as_bytes(array):
    if not isinstance(array, np.ndarray):
        import torch

        array = array.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def in_torch(array):
    torch = pytest.importorskip("torch")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("i2").copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def check(got, wanted):
    assert sorted(got) == sorted(wanted)
    different = [name for name in wanted if not np.array_equal(as_bytes(got[name]), wanted[name])]
    assert different == []


@pytest.mark.parametrize("library", half(["numpy", "torch"]))
@pytest.mark.parametrize(("recipe", "form"), PAIRS)
@pytest.mark.parametrize("name", half(MODELS))
def test_the_bytes_of_the_converter(tmp_path, name, recipe, form, library):
    MODELS[name](tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", recipe, format=form)
    model, _, arrays = stored(tmp_path / "in")
    wanted = stored(tmp_path / "out")[1]
    give = in_torch if library == "torch" else lambda a: a
    order = list(arrays)
    np.random.default_rng(7).shuffle(order)  # a trainer sends tensors in any order
    found = convert_tensors(
        ((key, give(arrays[key])) for key in order), Rules.of(recipe, config=model.config, format=form)
    )
    got = {}
    short = name == "dense" and not recipe.startswith("nvfp4")
    with pytest.warns(UserWarning, match="K = 80 is not a multiple of 32") if short else nullcontext():
        for key, array in found:
            assert key not in got
            got[key] = array
    check(got, wanted)


def test_rows_that_are_no_whole_blocks_are_named():
    """Layers that stay unquantized because of their row length cause one warning at the end, unless they are kept."""
    layers = [(f"model.layers.{i}.self_attn.o_proj.weight", np.ones((32, 72), np.float32)) for i in range(2)]
    text = "model.layers.0.self_attn.o_proj.weight, model.layers.1.self_attn.o_proj.weight: unquantized, because K = 72"
    with pytest.warns(UserWarning, match=re.escape(text)):
        got = dict(convert_tensors(layers, Rules.of("mxfp4-ocp")))
    assert list(got) == [name for name, _ in layers]
    dict(convert_tensors(layers, Rules.of("mxfp4-ocp", wishes=Wishes(keep=("*.o_proj",)))))


OUT, ROWS = ("*.o_proj", "mxfp8-te"), ("*.0.mlp.down_proj", "fp8-modelopt-channel")
MIXES = {
    "compressed-tensors": (ROWS, OUT, ("*.experts.*.*_proj", "nvfp4-te-2d")),
    "modelopt": (("*.mlp.*", "mxfp8-te"),),
}


@pytest.mark.parametrize("form", MIXES)
def test_several_recipes_give_the_bytes_of_the_converter(tmp_path, form):
    """Patterns give layers their own recipes and containers, as --recipe PATTERN=RECIPE does."""
    synthetic.moe(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", "nvfp4-te", format=form, recipes=MIXES[form], input_scale=0.5)
    model, _, arrays = stored(tmp_path / "in")
    rules = Rules.of("nvfp4-te", config=model.config, format=form, recipes=MIXES[form], input_scale=0.5)
    check(dict(convert_tensors(arrays.items(), rules)), stored(tmp_path / "out")[1])


@pytest.mark.parametrize(
    ("recipes", "text"),
    [
        ((("*.k_proj", "nvfp4-te-2d"),), "would get the recipe nvfp4-te, and model.layers.0"),
        ((("*.k_proj", "mxfp4-ocp"),), "would get the recipe"),
        ((("*.z_proj", "nvfp4-te-2d"),), "--recipe *.z_proj=...: matches no module"),
        ((("*_proj", "nvfp4-te-2d"), ("*.q_proj", "nvfp4-te")), "an earlier pattern, *_proj, matches all its layers"),
    ],
)
def test_patterns_that_are_refused(recipes, text):
    layers = [(f"model.layers.0.self_attn.{name}_proj.weight", np.ones((32, 64), np.float32)) for name in "qkvo"]
    with synthetic.refused(text):
        list(convert_tensors(layers, Rules.of("nvfp4-te", format="compressed-tensors", recipes=recipes)))


def test_groups_come_as_soon_as_they_are_whole():
    """convert_tensors yields layers that share a scale as soon as all of them have arrived.

    So few are in memory at a time.
    """
    rules, seen = Rules.of("nvfp4-te"), []

    def tensors():
        for layer in range(3):
            for leaf in ("gate_proj", "up_proj", "down_proj"):
                seen.append((layer, leaf))
                yield f"model.layers.{layer}.mlp.{leaf}.weight", np.ones((32, 32), np.float32)

    for name, _ in convert_tensors(tensors(), rules):
        layer, leaf = int(name.split(".")[2]), name.split(".")[4]
        assert seen[-1] == (layer, "up_proj" if leaf == "gate_proj" else leaf)


def test_shared_scales_and_what_waits_to_the_end():
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((16, 32), dtype=np.float32) * s for s in (1, 2, 3))
    named = [(f"model.layers.0.self_attn.{n}_proj.weight", w) for n, w in (("q", q), ("k", k))]
    rules = Rules.of("nvfp4-modelopt", format="modelopt")  # its tensor scale is amax / 2688, rounded once
    two = dict(convert_tensors(named, rules, incomplete="quantize"))
    three = dict(convert_tensors([*named, ("model.layers.0.self_attn.v_proj.weight", v)], rules))
    scale = "model.layers.0.self_attn.q_proj.weight_scale_2"
    assert two[scale] == np.float32(np.abs(k).max() / 2688) and three[scale] == np.float32(np.abs(v).max() / 2688)
    assert two[scale].shape == () and three[scale.replace("q_proj", "v_proj")] == three[scale]


def test_buckets_share_scales_and_flush_proves_that_nothing_is_left():
    """Layers of one group may come in several buckets: the result is that of one call with all of them."""
    rng = np.random.default_rng(4)
    names = ("q", "k", "v", "o")
    named = [
        (f"model.layers.0.self_attn.{n}_proj.weight", rng.standard_normal((16, 32), dtype=np.float32) * (i + 1))
        for i, n in enumerate(names)
    ]
    rules = Rules.of("nvfp4-te", format="modelopt")
    wanted = {name: as_bytes(array) for name, array in convert_tensors(named, rules)}
    for cuts in ([1], [2], [3], [1, 2, 3]):
        converter, got = TensorConverter(rules), {}
        for begin, end in zip([0, *cuts], [*cuts, 4], strict=True):
            got |= dict(converter.convert(named[begin:end]))
        assert list(converter.flush()) == []
        check(got, wanted)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_since_yields_only_what_changed(library):
    """With since=, convert_tensors yields only the tensors whose bytes differ from those of an earlier call.

    Together with the earlier tensors, they are the whole new version.
    """
    module = None if library == "numpy" else pytest.importorskip(library)
    give = {"numpy": np.copy, "torch": lambda x: module.tensor(x), "jax": lambda x: module.device_put(x)}
    rng = np.random.default_rng(7)
    first = {
        f"model.layers.{i}.{name}.weight": rng.standard_normal((32, 32), dtype=np.float32)
        for i in range(3)
        for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm")
    }
    second = {name: x.copy() for name, x in first.items()}
    second["model.layers.1.mlp.up_proj.weight"][3, 4] = 9  # the tensor scale of gate and up grows
    second["model.layers.2.mlp.down_proj.weight"][5, :16] *= -1
    rules = Rules.of("nvfp4-te", format="modelopt", wishes=Wishes(keep=("*.input_layernorm",)))
    go = give[library]
    old = dict(convert_tensors([(n, go(x)) for n, x in first.items()], rules))
    new = dict(convert_tensors([(n, go(x)) for n, x in second.items()], rules))
    some = dict(convert_tensors([(n, go(x)) for n, x in second.items()], rules, since=old))
    raw_of = (lambda x: as_bytes(x).tobytes()) if library == "torch" else (lambda x: np.asarray(x).tobytes())
    raw = {side: {n: raw_of(x) for n, x in have.items()} for side, have in (("old", old), ("new", new))}
    changed = {name for name in new if raw["new"][name] != raw["old"][name]}
    assert set(some) == changed and 2 < len(changed) < len(new) / 2
    assert list(convert_tensors([(n, go(x)) for n, x in first.items()], rules, since=old)) == []
    assert raw["new"] == {**raw["old"], **{name: raw_of(x) for name, x in some.items()}}


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_since_yields_what_may_have_changed_in_place(library):
    """An unconverted tensor is yielded without a copy. An update in place changes the earlier tensor too."""
    norm, w = np.ones(32, np.float32), np.ones((32, 32), np.float32)
    if library == "torch":
        norm, w = map(pytest.importorskip("torch").from_numpy, (norm, w))
    pairs, rules = [("model.norm.weight", norm), ("model.layers.0.mlp.down_proj.weight", w)], Rules.of("mxfp4")
    old = dict(convert_tensors(pairs, rules))
    norm[3] = 2
    for again in (norm, norm[:]):
        assert [name for name, _ in convert_tensors([(pairs[0][0], again), pairs[1]], rules, since=old)] == [
            pairs[0][0]
        ]
    copies = [(name, x.clone() if library == "torch" else x.copy()) for name, x in pairs]
    assert not list(convert_tensors(copies, rules, since=old))


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_mlx_codes_are_words_in_every_library(library):
    """MLX stores codes in 32-bit words; arrays of PyTorch and JAX give the words that NumPy arrays give."""
    module = pytest.importorskip(library)
    x = np.random.default_rng(11).standard_normal((32, 64), dtype=np.float32)
    rules = Rules.of("mxfp4-ocp", format="mlx", config={"model_type": "llama"})
    name = "model.layers.0.self_attn.o_proj.weight"
    wanted = dict(convert_tensors([(name, x)], rules))
    given = module.from_numpy(x) if library == "torch" else module.device_put(x)
    got = {n: np.asarray(one) for n, one in convert_tensors([(name, given)], rules)}
    assert wanted[name].dtype == np.uint32
    assert {n: (a.dtype, a.tobytes()) for n, a in got.items()} == {n: (a.dtype, a.tobytes()) for n, a in wanted.items()}


def test_an_incomplete_group_is_refused_or_quantized():
    w = np.ones((16, 32), np.float32)
    named = [(f"model.layers.0.self_attn.{n}_proj.weight", w) for n in "qv"]
    rules = Rules.of("nvfp4-te", format="modelopt")
    text = (
        "model.layers.0.self_attn.(q_proj|k_proj|v_proj): these layers share one tensor scale, but only"
        " model.layers.0.self_attn.q_proj, model.layers.0.self_attn.v_proj came"
    )
    with synthetic.refused(text):
        list(convert_tensors(named, rules))
    converter = TensorConverter(rules, "quantize")
    assert list(converter.convert(named)) == []
    assert len(list(converter.flush())) == 6 and list(converter.flush()) == []
    with synthetic.refused("incomplete 'keep': unknown; use one of error, quantize"):
        TensorConverter(rules, "keep")


@together(
    "name, array, text",
    [
        ("model.layers.0.mlp.down_proj.weight", np.ones((32, 32), synthetic.E4M3), "is float8_e4m3fn [32, 32], a part"),
        ("model.layers.0.mlp.down_proj.weight_scale_inv", np.ones((1, 1), np.float32), "is float32 [1, 1], a part"),
        ("model.layers.0.mlp.down_proj.weight", np.ones((32, 16), np.uint8), "is uint8 [32, 16], a part"),
        ("model.layers.0.mlp.down_proj.lora_A.weight", np.ones((8, 32), np.float32), "a tensor of an adapter (LoRA)"),
        ("model.layers.0.self_attn.o_proj.weight", np.ones((32, 32), np.float32), "came twice"),
        ("model.layers.0.self_attn.o_proj.weight_quantizer._amax", np.ones((), np.float32), "lies beside the layer"),
        ("model.layers.0.mlp.down_proj.weight", np.ones((32, 32)), "is float64 [32, 32]; float32, float16 or bfloat16"),
        ("model.layers.0.mlp.down_proj.weight", np.ones((32, 32), ">f4"), "is >f4 [32, 32]; float32, float16"),
    ],
)
def test_what_convert_refuses_is_refused_in_memory_too(name, array, text):
    converter = TensorConverter(Rules.of("nvfp4-te", format="modelopt"))
    list(converter.convert([("model.layers.0.self_attn.o_proj.weight", np.ones((32, 32), np.float32))]))
    with synthetic.refused(f"{name}: {text}"):
        list(converter.convert([(name, array)]))


@pytest.mark.parametrize(
    ("leaves", "kept"),
    [
        (("mlp.gate_proj", "mlp.up_proj"), "up_proj"),
        (("mlp.gate_proj", "mlp.up_proj"), "gate_proj"),
        (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "k_proj"),
    ],
)
def test_groups_with_unquantized_layers(leaves, kept):
    """A layer that stays unquantized is named, and with incomplete="quantize" the others are quantized without it."""
    w = np.random.default_rng(8).standard_normal((32, 32), dtype=np.float32)
    tensors = {f"model.layers.0.{leaf}.weight": w for leaf in leaves}
    rules = Rules.of("nvfp4-te", format="modelopt", wishes=Wishes(keep=(f"*.{kept}",)))
    with synthetic.refused(f"{kept} stays unquantized (--keep *.{kept}); quantize all of them, or none"):
        list(convert_tensors(tensors.items(), rules))
    got = dict(convert_tensors(tensors.items(), rules, "quantize"))
    assert len(got) == 1 + 3 * (len(leaves) - 1)
    assert sum(array is w for array in got.values()) == 1


@pytest.mark.parametrize("second", ["wkv", "wkv_a_with_mqa"])
def test_a_layer_with_several_names_completes_its_group(second):
    """DeepSeek-V4 and Mistral have different names for the layer that is fused with wq_a."""
    converter = TensorConverter(Rules.of("nvfp4-te", format="modelopt"))
    w = np.ones((32, 32), np.float32)
    assert not list(converter.convert([("layers.0.attn.wq_a.weight", w)]))
    assert len(list(converter.convert([(f"layers.0.attn.{second}.weight", w)]))) == 6
    assert not list(converter.flush())


CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MLA = {"q_lora_rank": 48, "kv_lora_rank": 16, "qk_rope_head_dim": 8}


def test_names_of_megatron():
    """Fused parameters of Megatron are split into the tensors of Hugging Face.

    linear_qkv_down_proj holds q_a_proj with q_lora_rank rows, then kv_a_proj_with_mqa with all other rows.
    """
    rng = np.random.default_rng(5)
    size, groups, each = 8, 2, 2
    q, k, v = (rng.standard_normal((heads * size, 32), dtype=np.float32) for heads in (groups * each, groups, groups))
    gate, up, down = (rng.standard_normal(shape, dtype=np.float32) for shape in ((48, 32), (48, 32), (32, 48)))
    q_a, kv_a = (rng.standard_normal((rows, 32), dtype=np.float32) for rows in (48, 24))
    parameters = {
        "self_attention.linear_qkv.weight": np.concatenate([x.reshape(groups, -1, 32) for x in (q, k, v)], 1),
        "self_attention.linear_qkv.layer_norm_weight": q[0],
        "self_attention.linear_qkv_down_proj.weight": np.concatenate([q_a, kv_a]),
        "mlp.linear_fc1.weight": np.concatenate([gate, up]),
        "mlp.linear_fc1._extra_state": None,
        "mlp.linear_fc2.weight": down,
    }
    parameters["self_attention.linear_qkv.weight"] = parameters["self_attention.linear_qkv.weight"].reshape(-1, 32)
    megatron = [(f"module.module.decoder.layers.1.{name}", array) for name, array in parameters.items()]
    megatron.append(("module.module.output_layer.weight", gate))
    attention = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "input_layernorm": q[0]}
    latent = {"self_attn.q_a_proj": q_a, "self_attn.kv_a_proj_with_mqa": kv_a}
    layer = attention | latent | {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": down}
    plain = [(f"model.layers.1.{name}.weight", array) for name, array in layer.items()]
    for config in (CONFIG | MLA, {"num_hidden_layers": 2, "text_config": CONFIG | MLA}):
        rules = Rules.of("nvfp4-te", config=config, format="modelopt")
        wanted = dict(convert_tensors([*plain, ("lm_head.weight", gate)], rules))
        got = dict(convert_tensors(megatron, rules))
        check(got, {name: as_bytes(array) for name, array in wanted.items()})
        assert got["lm_head.weight"] is gate


@pytest.mark.parametrize(
    ("mlp", "config"),
    [
        ("mlp", {"intermediate_size": 64}),
        ("mlp.experts.local_experts.0", {"text_config": {"moe_intermediate_size": 64}}),
        ("mlp.shared_experts", {"moe_shared_expert_intermediate_size": 64, "intermediate_size": 128}),
        ("mlp.shared_experts", {"shared_expert_intermediate_size": 64}),
        ("mlp.shared_experts", {"n_shared_experts": 2, "moe_intermediate_size": 32, "intermediate_size": 128}),
    ],
)
def test_mlps_of_megatron_without_gates(mlp, config):
    """If linear_fc1 has the rows of up_proj alone, it is up_proj; with twice as many rows, it is gate and up."""
    rng = np.random.default_rng(7)
    gate, up = (rng.standard_normal((64, 32), dtype=np.float32) for _ in range(2))
    rules = Rules.of("nvfp4-te", config=config, format="modelopt")
    module = f"model.layers.0.{mlp.replace('local_experts.', '')}"
    for parts, leaves in (([up], ["up_proj"]), ([gate, up], ["gate_proj", "up_proj"])):
        pairs = [(f"{module}.{leaf}.weight", x) for leaf, x in zip(leaves, parts, strict=True)]
        wanted = dict(convert_tensors(pairs, rules, "quantize"))
        fused = [(f"decoder.layers.0.{mlp}.linear_fc1.weight", np.concatenate(parts))]
        got = dict(convert_tensors(fused, rules, "quantize"))
        check(got, {name: as_bytes(array) for name, array in wanted.items()})


MEGATRON = "decoder.layers.0.self_attention."
EXPERT = "model.layers.0.mlp.experts.1."
O_PROJ = "model.layers.0.self_attn.o_proj"
STATE = f"{O_PROJ}.input_quantizer._pre_quant_scale"


@pytest.mark.parametrize(
    ("names", "rows", "config", "text"),
    [
        ([f"{MEGATRON}linear_qkv_down_proj"], 72, {}, "needs q_lora_rank, kv_lora_rank, qk_rope_head_dim that add up"),
        ([f"{MEGATRON}linear_qkv_down_proj"], 64, MLA, "64 rows cannot be split into q_a_proj and kv_a_proj_with_mqa"),
        (["decoder.layers.0.mlp.linear_fc1"], 65, {}, "65 rows cannot be split into gate and up"),
        ([f"{MEGATRON}linear_qkv"], 64, {}, "rules.config needs num_attention_heads"),
        ([f"{MEGATRON}linear_qkv"], 66, CONFIG, "66 rows are not divisible into 2 groups of 4 heads"),
        ([f"{MEGATRON}linear_strange"], 64, CONFIG, "linear_strange"),
        (["model.layers.0.mlp.gate_proj"], 64, CONFIG, "has no up_proj beside it"),
        ([f"{EXPERT}{name}" for name in ("w1", "w2", "w3", "gate_proj", "up_proj")], 32, {}, f"{EXPERT}w1: is stored"),
    ],
)
def test_errors(names, rows, config, text):
    tensors = [(f"{name}.weight", np.ones((rows, 32), np.float32)) for name in names]
    with synthetic.refused(text):
        list(convert_tensors(tensors, Rules.of("nvfp4-te", config=config)))


def test_values_and_rules_that_are_refused():
    """State of a quantizer that arrives before its layer is refused when the layer arrives; a bias is not."""
    ones = np.ones((32, 32), np.float32)
    list(convert_tensors([(f"{O_PROJ}.bias", ones[0]), (f"{O_PROJ}.weight", ones)], Rules.of("nvfp4-te")))
    for tensors, text in (
        ({f"{O_PROJ}.weight": ones * np.nan}, "o_proj: holds NaN or infinity"),
        ({f"{O_PROJ}.weight": ones * np.inf}, "o_proj: holds NaN or infinity"),
        ({STATE: ones[0], f"{O_PROJ}.weight": ones}, f"{STATE}: lies beside the layer {O_PROJ}"),
    ):
        with synthetic.refused(text):
            list(convert_tensors(tensors.items(), Rules.of("mxfp4-ocp")))
    for options, text in (
        ({"format": "bf16"}, "format bf16"),
        ({"format": "gpt-oss", "config": {"model_type": "gpt_oss"}}, "--format gpt-oss holds mxfp4 only"),
    ):
        with synthetic.refused(text):
            Rules.of("nvfp4-te", **options)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tensors": {"mlp.down_proj.weight": np.ones((32, 32))}}, "tensors is a dict; needs (name, array) pairs"),
        ({"tensors": ["mlp.down_proj.weight"]}, "tensors has the entry 'mlp.down_proj.weight'; needs (name, array)"),
        ({"tensors": [("mlp.down_proj.weight",)]}, "tensors has the entry ('mlp.down_proj.weight',); needs (name, arr"),
        ({"tensors": [(3, np.ones(4))]}, "the name 3 is int; a str is needed"),
        ({"tensors": [("a.weight", [[1.0]])]}, "a.weight is list; an array of NumPy, CuPy, PyTorch or JAX is needed"),
        ({"tensors": [("a.weight", None)]}, "a.weight is NoneType; an array"),
        ({"rules": "mxfp4"}, "rules is 'mxfp4'; needs a Rules, such as Rules.of('nvfp4-te')"),
        ({"since": []}, "since is []; needs a mapping (such as a dict) or None"),
    ],
)
def test_wrong_types(change, text):
    with pytest.raises(TypeError, match=re.escape("convert_tensors: ") + ".*" + re.escape(text)):
        found = convert_tensors(**{"tensors": [], "rules": Rules("mxfp4"), **change})
        assert isinstance(change.get("tensors"), list)  # other arguments are checked at the call
        list(found)


@NEEDS_ENVIRONMENT
@pytest.mark.parametrize("changed", [name for name in ("daz", "both") if name in BITS])
@pytest.mark.parametrize("recipe", ["nvfp4-te", "nvfp4-compressed-tensors"])
def test_subnormals_in_every_mode(changed, recipe):
    """A thread that flushes subnormals converts layers of subnormals as other threads do, and not as zeros."""
    layers = {name: np.full((16, 32), code, np.uint32).view(np.float32) for name, code in (("gate", 7), ("up", 200000))}

    def result():
        pairs = [(f"mlp.{name}_proj.weight", w) for name, w in layers.items()]
        try:
            return [(name, as_bytes(part).tobytes()) for name, part in convert_tensors(pairs, Rules.of(recipe))]
        except CheckpointError as error:
            return str(error)

    expected = result()
    with mode(changed):
        assert result() == expected


def test_models_that_mlx_and_deepseek_v4_formats_reject():
    """Models that an engine would load wrongly are refused.

    mlx-lm would drop the scales of Qwen3-MoE's experts, and vLLM needs input scales for NVFP4 experts of DeepSeek-V4.
    """
    expert = "model.layers.0.mlp.experts.0.down_proj.weight"
    rules = Rules.of("mxfp4-ocp", format="mlx", config={"model_type": "qwen3_moe"})
    tensors = [
        ("model.layers.0.self_attn.o_proj.weight", np.ones((32, 64), np.float32)),
        (expert, np.ones((32, 64), np.float32)),
    ]
    assert len(dict(convert_tensors(tensors[:1], rules))) == 2
    with synthetic.refused("would drop the scales of the experts of qwen3_moe models"):
        list(convert_tensors(tensors, rules))
    with synthetic.refused("not supported by --format mlx"):
        Rules.of("mxfp4-ocp", format="mlx", config={"model_type": "gpt_oss"})
    with synthetic.refused("with NVFP4 experts require one"):
        Rules.of("nvfp4-te", config={"model_type": "deepseek_v4"})
    Rules.of("nvfp4-te", config={"model_type": "deepseek_v4"}, input_scale=1.0)


def test_100_000_names_are_decided_in_seconds():
    names = [
        f"model.layers.{i // 1000}.mlp.experts.{i % 1000}.{leaf}_proj.weight"
        for i in range(33_334)
        for leaf in ("gate", "up", "down")
    ]
    rules, found = Rules.of("nvfp4-te", config={"num_hidden_layers": 40}), {}

    def decide_all():
        found.update(rules.decisions((name, "BF16", (64, 64)) for each in names for name in rules.names(each)))

    assert cpu_seconds(decide_all) < TEN
    assert len(found) == len(names) and all(decision.converted for decision in found.values())
