"""Test the sampled error: for small matrices it equals verify's SQNR, and large ones are sampled evenly."""

from __future__ import annotations

from itertools import pairwise

import pytest
import synthetic

from fp4kit.checkpoint import convert
from fp4kit.checkpoint.model.model_files import open_source
from fp4kit.checkpoint.verify import reencode as module
from fp4kit.checkpoint.verify.reencode import SampledError, sampled_error
from fp4kit.checkpoint.verify.verify import verify


@pytest.mark.parametrize("name", ["dense", "fused", "deepseek_fp8"])
def test_the_error_of_all_rows_is_that_of_verify(tmp_path, name, monkeypatch) -> None:
    monkeypatch.setattr(module, "_SPAN_ROWS", 256)
    (synthetic.MODELS | synthetic.QUANTIZED)[name](tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "q", "nvfp4-te", requantize=True)
    found = sampled_error(tmp_path / "q", open_source(tmp_path / "m"))
    whole = {layer.name: layer.tally.sqnr_db for layer in verify(tmp_path / "q", tmp_path / "m").layers}
    single = {name: db for name, db in found.layers if "[" not in name}  # verify sums over the experts of a stack
    assert single == pytest.approx({name: whole[name] for name in single})
    assert [db for _, db in found.layers] == sorted(db for _, db in found.layers)


def test_many_or_large_matrices_are_sampled_evenly(tmp_path, monkeypatch) -> None:
    synthetic.dense(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "q", "nvfp4-te")
    source = open_source(tmp_path / "m")
    whole = sampled_error(tmp_path / "q", source)
    monkeypatch.setattr(module, "_MOST_MATRICES", 4)
    few = sampled_error(tmp_path / "q", source)
    assert (len(whole.layers), whole.total, len(few.layers), few.total) == (14, 14, 4, 14)
    assert {name.split(".")[2] for name, _ in few.layers} == {"0", "1"}
    monkeypatch.setattr(module, "_SAMPLED_ELEMENTS", 1)
    assert len(sampled_error(tmp_path / "q", source).layers) == 1


def test_spans_are_whole_blocks_within_the_matrix(tmp_path) -> None:
    synthetic.dense(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "q", "nvfp4-te")
    checks = module.checks_of(module.inspect_checkpoint(tmp_path / "q").layers.values(), {}, module.Settings())
    for check in checks:
        rows = check.stored.shape[-2]
        for count in (1, 2, 4):
            spans = module._spans(check, count)
            assert all(0 <= start < end <= rows and start % 16 == 0 for start, end in spans)
            assert sum(end - start for start, end in spans) == min(rows, 16 * count)
            assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_layers_three_decibels_below_the_median_are_outliers() -> None:
    error = SampledError((("a", 10.0), ("b", 17.5), ("c", 20.0), ("d", 20.5), ("e", 21.0)), 5)
    assert error.median == 20.0 and error.outliers == ("a",)
