"""Test arguments of the wrong kind, such as a string for an int: the function raises a clear error before any work."""

import inspect
import re
from dataclasses import replace

import numpy as np
import pytest
from amax_inputs import FC1, QKV, experts_of, state_of
from together import together

import fp4kit
from fp4kit import layouts
from fp4kit.calibration import Collector
from fp4kit.cpu import library
from fp4kit.formats import E2M1
from fp4kit.layouts import kv
from fp4kit.storage.files import CheckpointError
from fp4kit.training.amax_state import AmaxCollector, AmaxName, AmaxState
from fp4kit.training.communicators import SingleProcess, _check_gather
from fp4kit.training.settings import FakeQuantSettings

X = np.ones((32, 64), np.float32)
Q = fp4kit.quantize(X, "nvfp4-te-2d")
FLAT = X.reshape(-1)
KEYS = np.ones((2, 2, 64), np.float32)
CACHE = kv.KVCache("vllm-hnd", np.zeros((1, 2, 2, 4, 36), np.uint8))
RIGHT = {
    "amax": {"x": X, "recipe": "nvfp4"},
    "amax_grouped": {"xs": [X], "recipe": "nvfp4"},
    "cast_master_weights": {"shards": [fp4kit.Shard(FLAT, X.shape)], "comm": SingleProcess(), "recipe": "nvfp4-te-2d"},
    "compare": {"a": Q, "b": X},
    "compare_recipes": {"x": X, "recipes": ["nvfp4", "mxfp4"]},
    "concatenate": {"qs": [Q, Q], "axis": 0},
    "dequantize": {"q": Q},
    "dequantize_kv": {"cache": CACHE},
    "engine_keys": {"recipe": "nvfp4", "dtype": "float16"},
    "explain": {"x": X, "recipe": "nvfp4", "index": (3, 5)},
    "fake_quantize": {"x": X, "recipe": "nvfp4"},
    "fake_quantize_backward": {"grad": X, "x": X, "recipe": "nvfp4", "pass_through": False},
    "fake_quantize_grouped": {"xs": [X], "recipe": "nvfp4"},
    "fake_quantize_grouped_backward": {"grads": [X], "xs": [X], "recipe": "nvfp4", "pass_through": False},
    "GroupedPlan": {"xs": [X], "recipe": "nvfp4"},
    "custom_recipe": {"id": "mine", "element": E2M1},
    "hadamard": {"x": X, "size": 16},
    "identify": {"q": Q, "x": X},
    "identify_kv": {"arrays": CACHE.arrays, "keys": KEYS, "values": KEYS, "slots": [0, 1]},
    "error_budget": {"x": X, "w": X, "recipe_x": "nvfp4-te", "recipe_w": "nvfp4-te"},
    "matmul": {"a": Q, "b": Q},
    "matmul_grouped": {"a": [Q], "b": [Q]},
    "pack": {"codes": Q.packed & 7},
    "serving": {"engine": "transformers", "scheme": "nvfp4-w4a4"},
    "parity": {"train": fp4kit.Contract(weights="nvfp4-te"), "rollout": fp4kit.Contract(weights="nvfp4-modelopt")},
    "partial_amax": {"shard": FLAT, "shape": (32, 64), "start": 0, "recipe": "nvfp4-te-2d"},
    "partial_cast": {
        "shard": FLAT,
        "out": Q.packed.copy(),
        "block_amax": np.ones((2, 4), np.float32),
        "shape": (32, 64),
        "start": 0,
        "recipe": "nvfp4-te-2d",
    },
    "quantize": {"x": X, "recipe": "nvfp4"},
    "quantize_both": {"x": X, "recipe": "nvfp4"},
    "quantize_grouped": {"xs": [X], "recipe": "nvfp4"},
    "quantize_kv": {"cache": CACHE, "keys": KEYS, "values": KEYS, "slots": [0, 1]},
    "quantize_static": {"x": X, "recipe": "nvfp4-vllm-static", "input_scale": 0.001},
    "random_signs": {"size": 16, "seed": 3},
    "recipe": {"id": "nvfp4"},
    "recipes": {"of": "nvfp4"},
    "requantize": {"q": Q, "recipe": "mxfp4"},
    "rotate": {"x": X, "matrices": np.eye(16, dtype=np.float32)},
    "search_scales": {"x": X, "recipe": "nvfp4-modelopt-static"},
    "set_num_threads": {"count": 2},
    "swizzle": {"q_or_scales": Q, "layout": "swizzled_8x4"},
    "transpose": {"q": Q},
    "unit": {"id": "sm100"},
    "unpack": {"packed": Q.packed},
    "unswizzle": {"q_or_scales": Q.block_scale, "layout": "linear", "shape": Q.block_scale.shape},
}
FILES = {"save": {"path": "w.safetensors", "arrays": {"w": Q}}, "load": {"path": "w.safetensors"}}
WRONG = [
    3,
    -1,
    2.5,
    "three",
    None,
    [1, 2],
    {},
    object(),
    np.zeros(3),
    np.zeros((2, 2), np.uint8),
    np.zeros((0, 16), np.float32),
]
NOT_CALLED = {"engine", "num_threads", "specification", "units"}  # they take no arguments
NOT_CALLED |= {"get_include", "get_library", "get_reciprocals"}
# cast_master_weights makes a MasterWeightsPlan, so it raises the plan's errors. threads raises only when it is entered.
NOT_CALLED |= {"MasterWeightsPlan", "threads"}
NOT_CALLED |= {"open_checkpoint"}  # its errors name the file (tests/checkpoint/model/test_layers.py)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(library, "_default", [1])  # set_num_threads changes this list
    fp4kit.save("w.safetensors", {"w": Q})
    STATE.save("a.safetensors", stacked=True)


def test_every_function_is_here():
    functions = {name for name in fp4kit.__all__ if inspect.isfunction(getattr(fp4kit, name))}
    assert functions - NOT_CALLED <= RIGHT.keys() | FILES.keys()


@pytest.mark.parametrize("name", [*RIGHT, *FILES])
def test_errors_carry_the_name(name):
    """If an argument has the wrong kind, the error begins with the function's name.

    Some values are accepted, but no required argument may be just any object.
    """
    function, right = getattr(fp4kit, name), (RIGHT | FILES)[name]
    function(**right)
    refused = 0
    for argument, parameter in inspect.signature(function).parameters.items():
        if argument == "op":  # any text is valid: errors begin with it
            continue
        for value in WRONG:
            try:
                function(**{**right, argument: value})
            except CheckpointError as error:
                assert name == "parity" and str(error).startswith("three: does not exist")
            except (TypeError, ValueError, IndexError, NotImplementedError) as error:
                assert str(error).startswith(f"{name}: "), f"{argument}={value!r}"
                refused += 1
            except FileNotFoundError:
                assert name == "load" and value == "three"
            else:
                assert type(value) is not object or parameter.default is not parameter.empty, argument
    assert refused >= 4


def test_fake_quantizers_round_to_nearest_alone():
    for rounding in (np.zeros(3), "stochastic", 3):
        with pytest.raises(
            ValueError, match=r"^fake_quantize: mxfp4-microxcaling-nearest rounds to nearest only; got rounding="
        ):
            fp4kit.fake_quantize(X, "mxfp4-microxcaling-nearest", rounding=rounding)


@pytest.mark.parametrize("flag", ["high_nibble_first", "tensor_scale_divides"])
@pytest.mark.parametrize("value", ["False", 2, 0.5, {}, [], np.zeros(2)], ids=str)
def test_flags_of_from_parts(flag, value):
    """A flag must be a bool: the truth value of another object could change the values without an error."""
    with pytest.raises(TypeError, match=f"^from_parts: {flag} is .*; needs True or False"):
        fp4kit.Quantized.from_parts(Q.packed, Q.block_scale, Q.tensor_scale, recipe=Q.recipe, **{flag: value})


def test_flags_of_encode():
    with pytest.raises(TypeError, match=r"^E4M3\.encode: saturate is 'False'; needs True or False"):
        fp4kit.formats.E4M3.encode(1e9, saturate="False")
    assert fp4kit.formats.E4M3.encode(1e9, saturate=0) == fp4kit.formats.E4M3.nan_code


@pytest.mark.parametrize("layout", [[], {}, np.zeros(2), slice(3), 3, "rows"], ids=str)
def test_layouts_of_a_quantized(layout):
    with pytest.raises(ValueError, match=r"^from_parts: scale_layout is .*; needs one of linear, swizzled_128x4"):
        fp4kit.Quantized.from_parts(Q.packed, Q.block_scale, Q.tensor_scale, recipe=Q.recipe, scale_layout=layout)
    with pytest.raises(ValueError, match=r"^Quantized: scale_layout is .*; needs one of linear, swizzled_128x4"):
        replace(Q, scale_layout=layout)


def test_seeds_that_are_memory():
    with pytest.raises(TypeError, match=r"^quantize: seed is <memory at .*; needs an int"):
        fp4kit.quantize(X, "nvfp4", rounding="stochastic", seed=memoryview(b"abc"))


def test_slices_are_written_as_between_brackets():
    for index, text in ((np.s_[0:3], "0:3"), (np.s_[3, 1:9:2], "1:9:2"), (np.s_[:, 0], ":"), (np.s_[..., 0], "...")):
        with pytest.raises(TypeError, match=rf"^explain: index is {re.escape(text)}; needs an int$"):
            fp4kit.explain(X, "nvfp4", index)
    with pytest.raises(TypeError, match=r"^quantize: axis is :, 0:16; needs an int$"):
        fp4kit.quantize(X, "nvfp4", axis=np.s_[:, 0:16])


STOCHASTIC = {"x": X, "recipe": "nvfp4", "rounding": "stochastic"}
PARTS = {"packed": Q.packed, "block_scale": Q.block_scale, "tensor_scale": Q.tensor_scale, "recipe": Q.recipe}
INTS = {  # the start of the error for an argument {} that must be an int: the call that takes it, and a valid value
    "quantize: axis is {}; needs an int": (lambda n: fp4kit.quantize(X, "nvfp4", axis=n), 1),
    "fake_quantize: axis is {}; needs an int": (lambda n: fp4kit.fake_quantize(X, "nvfp4", axis=n), 1),
    "amax: axis is {}; needs an int": (lambda n: fp4kit.amax(X, axis=(0, n)), 1),
    "fake_quantize_backward: axis is {}": (lambda n: fp4kit.fake_quantize_backward(X, X, "nvfp4", axis=n), 1),
    "quantize_grouped: xs[0]: axis is {}": (lambda n: fp4kit.quantize_grouped([X], "nvfp4", axis=n), 1),
    "GroupedPlan: xs[0]: axis is {}": (lambda n: fp4kit.GroupedPlan([X], "nvfp4", axis=n), 1),
    "search_scales: axis is {}": (lambda n: fp4kit.search_scales(X, "nvfp4-modelopt-static", axis=n), 1),
    "Quantized: axis is {}; needs an int": (lambda n: replace(Q, axis=n), 1),
    "from_parts: axis is {}; needs an int": (lambda n: fp4kit.Quantized.from_parts(**PARTS, axis=n), 1),
    "quantize: seed is {}; needs an int": (lambda n: fp4kit.quantize(**STOCHASTIC, seed=n), 1),
    "fake_quantize: seed is {}; needs an int": (lambda n: fp4kit.fake_quantize(**STOCHASTIC, seed=n), 1),
    "quantize_both: seed is {}; needs an int": (lambda n: fp4kit.quantize_both(**STOCHASTIC, seed=n), 1),
    "quantize: threads is {}; needs an int": (lambda n: fp4kit.quantize(X, "nvfp4", threads=n), 1),
    "set_num_threads: threads is {}; needs an int": (fp4kit.set_num_threads, 1),
    "threads: threads is {}; needs an int": (lambda n: fp4kit.threads(n).__enter__(), 1),
    "Quantized: shape is (32, {}); needs a tuple of ints": (lambda n: replace(Q, shape=(32, n)), 64),
    "unswizzle: shape is (32, {}); needs a tuple": (lambda n: fp4kit.unswizzle(Q.block_scale, "linear", (32, n)), 4),
    "partial_amax: start is {}": (lambda n: fp4kit.partial_amax(FLAT[1:], (32, 64), n, "nvfp4-te-2d"), 1),
    "search_scales: candidates is {}": (lambda n: fp4kit.search_scales(**RIGHT["search_scales"], candidates=(n, 1)), 1),
    "pad: multiple is {}; needs an integer of 1 or more": (lambda n: fp4kit.layouts.pad(X, n), 1),
    "pad: axis is {}; needs an int": (lambda n: fp4kit.layouts.pad(X, 3, n), 1),
    "shuffle_rows: M is {}; needs an integer of 0 or more": (lambda n: fp4kit.layouts.shuffle_rows(n, 16), 0),
    "Quantized: an end of the slice is {}; needs an int": (lambda n: Q[n:], 16),
    "Recipe nvfp4-te-2d: block is ({}, {}); needs": (lambda n: replace(Q.recipe, block=(n, n)), 16),
    "Recipe nvfp4-te-2d: scale_max is {}; needs an int": (lambda n: replace(Q.recipe, scale_max=n), 448),
    "all_gather: counts is [{}]": (lambda n: _check_gather(np.zeros(1), [n], SingleProcess()), 1),
}


@pytest.mark.parametrize("value", [True, False, np.True_, np.False_, 1.0, np.float32(1), "1", object], ids=repr)
@together("text", INTS)
def test_ints_are_no_bools_and_no_floats(text, value):
    """A bool is rejected, because True would count as the axis or the seed 1, and so are floats."""
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(text.replace("{}", repr(value)))):
        INTS[text][0](value)


@together("text", INTS)
def test_ints_of_other_types(text):
    call, right = INTS[text]
    for kind in (int, np.int64, np.uint16):
        call(kind(right))


@pytest.mark.parametrize("seed", [-1, 2**64, np.int64(-5), 3 * 2**64 + 11])
def test_seeds_that_would_wrap(seed):
    for name, call in (("quantize", fp4kit.quantize), ("fake_quantize", fp4kit.fake_quantize)):
        with pytest.raises(ValueError, match=rf"^{name}: seed is {int(seed)}; needs 0 to 2\^64 - 1$"):
            call(**STOCHASTIC, seed=seed)
    with pytest.raises(ValueError, match=rf"^quantize_grouped: xs\[0\]: seed is {int(seed)}; needs 0 to 2\^64 - 1$"):
        fp4kit.quantize_grouped([X], "nvfp4", rounding="stochastic", seed=seed)


def test_the_seed_of_both_leaves_one_for_columns():
    fp4kit.quantize_both(**STOCHASTIC, seed=2**64 - 2)
    for seed in (-1, 2**64 - 1):
        with pytest.raises(ValueError, match=rf"^quantize_both: seed is {seed}; needs 0 to 2\^64 - 2$"):
            fp4kit.quantize_both(**STOCHASTIC, seed=seed)


@pytest.mark.parametrize("path", ["", ".", "/"])
def test_paths_without_a_name(path):
    for call in (lambda: fp4kit.save(path, {"w": Q}), lambda: fp4kit.load(path)):
        with pytest.raises(
            ValueError, match=r"^(save|load): path is '.?'; needs a path that ends with the name of a file"
        ):
            call()


@pytest.mark.parametrize("path", ["w.npz", "W.PT", "a/w.gguf"])
def test_paths_of_other_formats(path):
    """A safetensors file named w.npz could be read neither by NumPy nor by fp4kit's commands."""
    for call in (lambda: fp4kit.save(path, {"w": Q}), lambda: STATE.save(path), lambda: Collector().save(path)):
        with pytest.raises(
            ValueError, match=rf"^save: path is '{path}', but .* needs a name that ends in .safetensors$"
        ):
            call()


ALONE = SingleProcess()
STATE = state_of(experts_of(3))
CODES = np.arange(32, dtype=np.uint8).reshape(1, 32)
FLAG = "OPEN_TRAINING_MXFP4_FAKE_QAT_FLAG"


def collected():
    collector = AmaxCollector()
    collector.collect("layers.0.up_proj.weight_quantizer", np.float32(1))
    collector.collect("layers.0.gate_proj.weight_quantizer", np.float32(2))
    return collector


CALLS = {
    "collect": lambda wrong: AmaxCollector().collect(wrong, np.float32(1)),
    "collect_grouped": lambda wrong: AmaxCollector().collect_grouped(wrong, np.ones(2, np.float32)),
    "AmaxState": AmaxState,
    "freeze": lambda wrong: collected().freeze(wrong),
    "freeze group": lambda wrong: collected().freeze([wrong]),
    "freeze name": lambda wrong: collected().freeze([(wrong,)]),
    "select": STATE.select,
    "fit": STATE.fit,
    "fit shape": lambda wrong: state_of({QKV: 1}).fit({QKV: wrong}),
    "gather comm": STATE.gather,
    "gather experts": lambda wrong: STATE.gather(ALONE, experts=wrong),
    "gather numbers": lambda wrong: STATE.gather(ALONE, numbers=wrong),
    "gather count": lambda wrong: STATE.gather(ALONE, count=wrong),
    "part rank": lambda wrong: STATE.part(wrong, 4),
    "part size": lambda wrong: STATE.part(0, wrong),
    "part experts": lambda wrong: STATE.part(0, 1, experts=wrong),
    "part numbers": lambda wrong: STATE.part(0, 1, numbers=wrong),
    "save path": STATE.save,
    "save separator": lambda wrong: STATE.save("s.safetensors", separator=wrong),
    "save stacked": lambda wrong: STATE.save("s.safetensors", stacked=wrong),
    "load path": AmaxState.load,
    "load experts": lambda wrong: AmaxState.load("a.safetensors", experts=wrong),
    "load number": lambda wrong: AmaxState.load("a.safetensors", experts={"*": wrong}),
    "parameters": lambda wrong: FakeQuantSettings("nvfp4", parameters=wrong),
    "exclude": lambda wrong: FakeQuantSettings("nvfp4", exclude=wrong),
    "environ": FakeQuantSettings.from_environment,
    "flag": lambda wrong: FakeQuantSettings.from_environment({FLAG: wrong}),
    "is_quantized": FakeQuantSettings("nvfp4").is_quantized,
    "pack": layouts.pack,
    "unpack": layouts.unpack,
    "pad": lambda wrong: layouts.pad(wrong, 4),
    "pad axis": lambda wrong: layouts.pad(CODES, 3, wrong),
    "pack_gguf": lambda wrong: layouts.pack_gguf(wrong, CODES, "nvfp4"),
    "pack_gguf scales": lambda wrong: layouts.pack_gguf(CODES, wrong, "nvfp4"),
    "pack_gguf format": lambda wrong: layouts.pack_gguf(CODES, CODES, wrong),
    "unpack_gguf": lambda wrong: layouts.unpack_gguf(wrong, "nvfp4"),
    "pack_mlx": layouts.pack_mlx,
    "unpack_mlx": layouts.unpack_mlx,
    "swizzle_scales": lambda wrong: layouts.swizzle_scales(wrong, "swizzled_8x4"),
    "unswizzle_scales": lambda wrong: layouts.unswizzle_scales(wrong, "linear", (1, 32)),
    "unswizzle_scales shape": lambda wrong: layouts.unswizzle_scales(CODES, "linear", wrong),
    "padded_shape": lambda wrong: layouts.padded_shape(wrong, "linear"),
}
# Cases in CALLS for which None is not an error, because it stands for the argument's default.
DEFAULTS = {"gather numbers", "gather count", "part numbers", "load experts", "environ"}


@together("name", CALLS)
@pytest.mark.parametrize(
    "wrong", [None, 1.5, [0.5], object(), [object()], [[1]]], ids=lambda wrong: type(wrong).__name__
)
def test_wrong_kinds(name, wrong):
    if wrong is None and name in DEFAULTS:
        return
    with pytest.raises((TypeError, ValueError)) as error:
        CALLS[name](wrong)
    assert re.match(r"[A-Za-z_]+( state)?: .*(needs|needed|names)", str(error.value)), str(error.value)


@pytest.mark.parametrize("wrong", ["no", 2, 1.0, (), np.ones(2)], ids=repr)
def test_stacked_is_a_flag(wrong):
    with pytest.raises(TypeError, match=r"^save: stacked is .*; needs True or False$"):
        STATE.save("s.safetensors", stacked=wrong)


def test_numbers_are_not_cut_to_ints():
    with pytest.raises(TypeError, match=re.escape("part: numbers is [0.9, 1.9]; needs a sequence of ints")):
        STATE.part(0, 1, numbers=[0.9, 1.9])
    with pytest.raises(TypeError, match=re.escape("gather: numbers is [2.5, 1, 0]; needs a sequence of ints")):
        STATE.gather(ALONE, numbers=[2.5, 1, 0])


@pytest.mark.parametrize("share", [("gate_proj", "up_proj"), "up", ["gate_proj"]], ids=repr)
def test_a_name_is_no_group(share):
    """A single name is rejected as a group of names: its letters would be the names, and nothing would be shared."""
    with pytest.raises(TypeError, match=re.escape("needs groups of names, such as ('gate_proj', 'up_proj')")):
        collected().freeze(share)


def test_a_key_that_is_no_string_is_not_there():
    assert STATE.get(3) is None and None not in STATE
    with pytest.raises(TypeError, match="AmaxState: named has keys that are not AmaxName"):
        AmaxState({f"{FC1}._amax": np.float32(1)})
    assert AmaxName.find(3) is None


def test_experts_that_no_rank_has():
    """Experts must be numbered 0 to `count` - 1: one that no rank has is an error, and so is a surplus one."""
    for count in (1, 1 << 40):
        text = f"gather: '*' matches no expert on any rank; needs experts 0 to {count - 1}"
        with pytest.raises(ValueError, match=re.escape(text)):
            state_of({QKV: 1}).gather(ALONE, count=count)
    with pytest.raises(ValueError, match=re.escape(f"gather: {FC1}.0._amax is surplus; needs exactly 0 experts")):
        state_of({f"{FC1}.0": 1}).gather(ALONE, count=0)


@pytest.mark.parametrize("count", [10**7, 1 << 62])
def test_a_number_of_experts_takes_no_memory(count):
    """A huge number of experts in a file or an argument is rejected without allocating memory for them."""
    with pytest.raises(ValueError, match=re.escape(f"gather: {FC1}.3._amax and {count - 4} more are missing")):
        STATE.gather(ALONE, count=count)


def test_patterns_are_gone_through_once_more():
    """A generator of patterns is rejected, because it would be empty after its first use and quantize nothing."""
    with pytest.raises(ValueError, match=r"parameters is <generator .*; needs a tuple of wildcards"):
        FakeQuantSettings("nvfp4", parameters=(name for name in ("*",)))


def test_padding_stays_in_its_library():
    torch = pytest.importorskip("torch")
    x = torch.ones(3, 20, dtype=torch.bfloat16)
    padded = layouts.pad(x, 16)
    assert isinstance(padded, torch.Tensor) and padded.dtype == torch.bfloat16 and padded.shape == (3, 32)
    assert torch.equal(padded[:, :20], x) and not padded[:, 20:].any()
    assert layouts.pad(padded, 16) is padded
    assert fp4kit.quantize(padded, "nvfp4").packed.shape == (3, 16)
    with pytest.raises(ValueError, match="pad: x requires grad"):
        layouts.pad(torch.ones(3, requires_grad=True), 4)
