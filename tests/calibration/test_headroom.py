"""Test the rule "headroom" against amaxes that Model-Optimizer 0.47 computed, and its histogram at every edge."""

import math

import numpy as np
import pytest
from together import together

from fp4kit.calibration import BINS, Collector, Headroom, bin_of, edges


def inputs(case):
    """Return the inputs (64, 70) of a case of RECORDED, whose rows end with a part of a block."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((64, 70)).astype(np.float32)
    if case == "tail":
        x *= np.ldexp(1.0, rng.integers(-30, 10, (64, 1))).astype(np.float32)
    if case == "outlier":
        x[0, 0] = 5000
    if case == "constant":
        x[:] = 0.5
    return x


# (inputs, arguments, bit pattern of the amax that NVFP4ActHeadroomCalibrator of Model-Optimizer 0.47.0 returned with
# PyTorch 2.13 on a CPU)
RECORDED = [
    ("normal", {}, 0x46728177),
    ("normal", {"upper_percentile": 100.0}, 0x46728177),
    ("normal", {"rho": 1.0}, 0x405E60F5),
    ("normal", {"anchor_percentile": 50.0, "rho": 1024.0}, 0x450164D2),
    ("tail", {}, 0x44728177),
    ("tail", {"upper_percentile": 100.0}, 0x4466E47F),
    ("tail", {"rho": 1.0}, 0x44728177),
    ("tail", {"anchor_percentile": 50.0, "rho": 1024.0}, 0x45BF179A),
    ("outlier", {}, 0x46728177),
    ("outlier", {"upper_percentile": 100.0}, 0x46728177),
    ("outlier", {"rho": 1.0}, 0x4599E046),
    ("outlier", {"anchor_percentile": 50.0, "rho": 1024.0}, 0x4599E046),
    ("constant", {}, 0x45FD3E0C),
    ("constant", {"upper_percentile": 100.0}, 0x45FD3E0C),
    ("constant", {"rho": 1.0}, 0x3EFD3E0C),
    ("constant", {"anchor_percentile": 50.0, "rho": 1024.0}, 0x43FD3E0C),
]


@together("case, arguments, bits", RECORDED)
def test_amax_of_the_producer(case, arguments, bits):
    collector = Collector()
    collector.collect("a", inputs(case))
    found = collector.amaxes(Headroom(**arguments))["a"]
    assert (found.dtype, int(found.view(np.uint32))) == (np.dtype(np.float32), bits)


@pytest.mark.parametrize("percentile, found", [(50.0, 200), (50.1, 300), (100.0, 300)])
def test_a_percentile_is_the_first_bin_that_reaches_it(percentile, found):
    histogram = np.zeros(BINS, np.int64)
    histogram[[200, 300]] = 50
    anchor = 2.0 ** (-40 + (found + 0.5) * 80 / BINS)
    rule = Headroom(anchor_percentile=percentile, upper_percentile=100.0, rho=1024.0)
    assert rule.amax(histogram, np.float32(2**-30)) == np.float32(1024 * anchor)


def test_the_default_is_the_rule_by_name():
    collector = Collector()
    collector.collect("a", inputs("tail"))
    assert collector.amaxes("headroom") == collector.amaxes(Headroom()) != collector.amaxes("max")


def producer_bins(amaxes):
    """Return the bins of amaxes by the producer's formula in PyTorch."""
    torch = pytest.importorskip("torch")
    fraction = (torch.log2(torch.from_numpy(amaxes)) + 40.0) / 80.0
    return (fraction * BINS).floor().long().clamp(0, BINS - 1).numpy()


def test_every_edge_is_the_producers():
    """Each edge and its 64 neighbors on both sides fall in the bins that the producer's logarithm gives."""
    near = (edges()[:, None].astype(np.int64) + np.arange(-64, 65)).astype(np.uint32)
    found = np.searchsorted(edges(), near.reshape(-1), side="right")
    assert np.array_equal(found, producer_bins(near.reshape(-1).view(np.float32)))


def test_an_edge_belongs_to_the_bin_above_it():
    """An amax equal to an edge is counted in the bin above the edge, and the next smaller number in the bin below it.

    The producer counts in the same way.
    """
    collector, tested = Collector(), edges()[[0, 100, 255, 510]]
    amaxes = np.concatenate([tested, tested - np.uint32(1)]).view(np.float32)
    collector.collect("a", np.repeat(amaxes[:, None], 16, axis=1))
    assert [bin_of(amax) for amax in amaxes] == [1, 101, 256, 511, 0, 100, 255, 510]
    histogram = collector._entries("test")["a"].histogram
    assert np.flatnonzero(histogram).tolist() == [0, 1, 100, 101, 255, 256, 510, 511]


def test_amaxes_outside_the_histogram_are_counted_at_its_ends():
    assert [bin_of(np.float32(x)) for x in (1e-45, 2.0**-40, 1.0, 2.0**39.9, 3e38)] == [0, 0, 256, 511, 511]


def counted(**blocks):
    """Return a Collector of a layer "a" with blocks of equal elements: {"e" and the exponent of 2: number of blocks}.

    In an exponent, "m" stands for a minus sign: em30=1000 gives 1000 blocks of 2^-30.
    """
    collector = Collector()
    for name, count in blocks.items():
        magnitude = np.float32(2.0 ** int(name[1:].replace("m", "-")))
        collector.collect("a", np.full((count, 16), magnitude, np.float32))
    return collector


def test_blocks_far_below_the_upper_end_do_not_lower_the_anchor():
    """The anchor ignores block amaxes below a millionth of the upper end, whatever their share of the blocks."""
    center = 2.0 ** (-40 + 256.5 * 80 / 512)
    assert counted(e0=1, em30=1000).amaxes(Headroom(upper_percentile=100))["a"] == np.float32(16384 * center)
    assert counted(e0=1, em10=1000).amaxes(Headroom(upper_percentile=100))["a"] < 16384 * center / 512


def test_more_blocks_than_float32_can_count():
    """With 2^40 blocks, more than float32 counts exactly, the anchor is in the bin that its percentile reaches."""
    histogram = np.zeros(BINS, np.int64)
    histogram[100], histogram[300] = 1, 1 << 40
    found = Headroom(anchor_percentile=1e-9, rho=1.0).amax(histogram, np.float32(100))
    assert found == np.float32(2.0 ** (-40 + 300.5 * 80 / 512))


@together("name", ["anchor_percentile", "upper_percentile"])
@together("value", [0, -1, 100.1, math.nan])
def test_percentile_out_of_range(name, value):
    with pytest.raises(ValueError, match=rf"Headroom: {name} is {value}; needs a number above 0 and at most 100"):
        Headroom(**{name: value})


@pytest.mark.parametrize("rho", [0, -1.0, 28672, math.inf, math.nan])
def test_rho_out_of_range(rho):
    with pytest.raises(ValueError, match=rf"Headroom: rho is {rho}; needs a number above 0 and below 28672"):
        Headroom(rho=rho)


def test_headroom_without_histograms():
    collector = Collector(histogram=False)
    collector.collect("a", inputs("normal"))
    assert collector.amaxes()["a"] == np.abs(inputs("normal")).max()
    with pytest.raises(ValueError, match="the rule headroom needs histograms, which were not collected"):
        collector.amaxes("headroom")
