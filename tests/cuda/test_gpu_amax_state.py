"""Test AmaxState on a GPU: amaxes are collected and frozen without waiting for the device.

They are copied to the host only when they are saved or gathered.
"""

import ml_dtypes
import numpy as np
import pytest
from on_gpu import ON_GPU, cupy, differing

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.training.amax_state import AmaxCollector, AmaxState
from fp4kit.training.communicators import SingleProcess

pytestmark = ON_GPU
BASE = "m.experts.fc1.weight_quantizer"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
def test_every_magnitude_comes_in_exactly(dtype):
    """Every 16-bit number is collected exactly, NaN and subnormals included.

    It comes in its own dtype or as the high bits of float32.
    """
    bits = np.arange(2**16, dtype=np.uint16)
    values = (bits.astype(np.uint32) << 16).view(np.float32) if dtype == np.float32 else bits.view(dtype)
    values = values[: 2**15]
    on_cpu, on_gpu = AmaxCollector(), AmaxCollector()
    for part in (values[::-1], np.zeros_like(values), values):
        on_cpu.collect("m.weight_quantizer", part)
        on_gpu.collect("m.weight_quantizer", cupy.asarray(part))
    gpu, cpu = (collector._single.popitem()[1] for collector in (on_gpu, on_cpu))
    # Converting float16 to float32 changes the bits of a NaN, and a GPU changes them in another way than a CPU.
    assert differing(gpu, cpu) == 0


def test_subnormals_are_told_apart():
    tiny = np.array([1, 2, 3], np.uint32).view(np.float32)
    collector = AmaxCollector()
    for value in (tiny, tiny[::-1]):
        collector.collect("m.weight_quantizer", cupy.asarray(value.copy()))
    state = collector.freeze()
    assert_same_bits(state["m.weight_quantizer"].get(), np.array([3, 2, 3], np.uint32).view(np.float32))
    assert_same_bits(state.checked()["m.weight_quantizer"], np.array([3, 2, 3], np.uint32).view(np.float32))


def test_collect_and_freeze_do_not_wait():
    """collect and freeze do not wait for the device: they work in a stream capture, where waiting is an error."""
    values = cupy.asarray(np.random.default_rng(1).random((8, 4, 1), np.float32))
    single = values[0].copy()
    warm = AmaxCollector()
    for _ in range(2):  # the first pass compiles the kernels
        warm.collect_grouped(BASE, values)
        warm.collect("m.input_quantizer", single)
    warm.freeze()
    collector = AmaxCollector()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        for _ in range(2):
            collector.collect_grouped(BASE, values)
            collector.collect("m.input_quantizer", single)
        state = collector.freeze()
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        assert all(isinstance(value, cupy.ndarray) for value in state.values())
        for i in range(8):
            assert_same_bits(state[f"{BASE}.{i}"].get(), values[i].get())


def test_nan_is_an_error_when_it_reaches_the_host(tmp_path):
    collector = AmaxCollector()
    collector.collect_grouped(BASE, cupy.asarray(np.float32([1, np.nan, 3])))
    collector.collect_grouped(BASE, cupy.asarray(np.float32([np.inf, 7, 3])))
    state = collector.freeze()
    for act in (
        state.checked,
        state.stacked,
        lambda: state.save(tmp_path / "a"),
        lambda: state.gather(SingleProcess()),
    ):
        with pytest.raises(ValueError, match=r"weight_quantizer\.1\._amax holds NaN \(1 of 1\)"):
            act()


def test_saved_loaded_and_used(tmp_path):
    weights = np.random.default_rng(2).standard_normal((6, 32, 64)).astype(np.float32)
    collector = AmaxCollector()
    for i, w in enumerate(weights):
        collector.collect(f"{BASE}_{i}", fp4kit.amax(cupy.asarray(w)))
    collector.collect("m.input_quantizer", np.float32(3))
    collector.freeze().gather(SingleProcess()).save(tmp_path / "a", stacked=True)
    for rank in range(3):
        mine = AmaxState.load(tmp_path / "a").part(rank, 3)
        for i, w in enumerate(weights[2 * rank :][:2]):
            amax = cupy.asarray(mine[f"{BASE}.{i}"])
            assert_same_bits(
                fp4kit.fake_quantize(cupy.asarray(w), "nvfp4-te", tensor_amax=amax).get(),
                fp4kit.fake_quantize(w, "nvfp4-te"),
            )


def test_host_and_device_do_not_mix():
    collector = AmaxCollector()
    collector.collect("m.weight_quantizer", np.float32(1))
    with pytest.raises(ValueError, match="needs one shape and one device"):
        collector.collect("m.weight_quantizer", cupy.asarray(np.float32(2)))
