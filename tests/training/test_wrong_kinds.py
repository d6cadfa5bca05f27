"""Test arguments of the wrong kind for amax states, settings and layouts: the called function raises a clear error."""

import re

import numpy as np
import pytest
from amax_inputs import FC1, QKV, experts_of, state_of
from together import together

import fp4kit
from fp4kit import layouts
from fp4kit.training.amax_state import AmaxCollector, AmaxName, AmaxState
from fp4kit.training.communicators import SingleProcess
from fp4kit.training.settings import FakeQuantSettings

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


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    STATE.save("a.safetensors", stacked=True)


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
