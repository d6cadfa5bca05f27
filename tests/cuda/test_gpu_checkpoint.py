"""Test conversions whose weights are quantized on a GPU: they write the bytes that the CPU writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import synthetic
from kill_points import files_of
from on_gpu import DEVICES, ON_GPU

from fp4kit.checkpoint.convert import run_jobs as run_job
from fp4kit.checkpoint.convert.convert import convert, execute
from fp4kit.checkpoint.convert.job import QUANTIZE
from fp4kit.checkpoint.executors import Options
from fp4kit.checkpoint.model.model_files import open_source
from fp4kit.checkpoint.model.statistics import amax_and_nonfinite, amax_and_nonfinite_on
from fp4kit.checkpoint.model.weights import weights_of
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.plan.plan import jobs_of
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify

pytestmark = ON_GPU
PLACES = (0, 1) if DEVICES > 1 else (0,)


@pytest.mark.parametrize("recipe", ["nvfp4-te", "nvfp4-modelopt", "mxfp8-te"])
@pytest.mark.parametrize("threads", [0, 2] if DEVICES else [0])  # the simulated GPU works in one thread only
def test_bytes_are_those_of_the_cpu(tmp_path: Path, recipe: str, threads: int) -> None:
    """convert on GPUs writes the bytes of the CPU.

    The models have an expert of zeros (moe), and an odd number of rows in the last slab (dense).

    threads: the number of worker threads; 0 for the default.
    """
    for model in ("moe", "dense"):
        source = tmp_path / model
        getattr(synthetic, model)(source)
        if recipe == "mxfp8-te" and model == "dense":
            continue  # K = 80
        whole = files_of(convert(source, tmp_path / "cpu", recipe).destination)
        convert(source, tmp_path / "gpu", recipe, options=Options(workers=max(threads, 1), devices=PLACES))
        assert files_of(tmp_path / "gpu") == whole
        shutil.rmtree(tmp_path / "cpu")
        shutil.rmtree(tmp_path / "gpu")


@pytest.mark.exhaustive
def test_fp8_blocks_whose_last_rows_are_no_whole_block(tmp_path: Path) -> None:
    """convert on a GPU writes the bytes of the CPU for FP8 in blocks of 128x128."""
    tensors = {"mlp.down_proj.weight": synthetic.random("w", (300, 256)), "mlp.up_proj.weight": np.ones((7, 128), "f4")}
    synthetic.write_model(tmp_path / "m", {"model_type": "qwen3"}, tensors)
    whole = files_of(convert(tmp_path / "m", tmp_path / "cpu", "fp8-deepgemm-block").destination)
    convert(tmp_path / "m", tmp_path / "gpu", "fp8-deepgemm-block", options=Options(devices=PLACES))
    assert files_of(tmp_path / "gpu") == whole


def test_verified_by_the_gpu(tmp_path: Path) -> None:
    """verify on the GPU accepts bytes that the CPU wrote, and finds a single wrong byte."""
    for model in ("moe", "dense"):
        getattr(synthetic, model)(tmp_path / model)
        out = convert(tmp_path / model, tmp_path / f"{model} out").destination
        report = verify(out, tmp_path / model, options=Options(devices=PLACES))
        assert report.clean and all(layer.codes[1] for layer in report.layers)
        changed = next(w for w in weights_of(open_source(out).tensors, {}).values() if w.container is not None)
        with changed.located.file.path.open("r+b") as file:
            file.seek(changed.located.entry.start)
            old = file.read(1)[0]
            file.seek(changed.located.entry.start)
            file.write(bytes([old ^ 0x10]))
        report = verify(out, tmp_path / model, options=Options(devices=PLACES))
        assert {layer.name: layer.differing for layer in report.layers if layer.differing} == {changed.name: 1}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda t: np.dtype(t).name)
def test_amax_and_nonfinite(dtype: type) -> None:
    smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    rows = [[0, -0.0], [1, -3.5], [smallest, -smallest], [np.nan, 2], [-np.inf, np.inf], [np.nan, np.inf]]
    for values in (*rows, [0.5] * 77, [np.nan] + [7] * 40):
        x = np.array([values], dtype)
        found = amax_and_nonfinite_on(PLACES[-1], x)
        assert found == amax_and_nonfinite(x) and type(found[0]) is np.float32 and type(found[1]) is int


def test_devices_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic.dense(tmp_path / "m")
    plan, seen = make_plan(tmp_path / "m"), {}
    write = run_job.write_job

    def noted(job: run_job.Job, *rest: object) -> run_job.Done:
        if job.action == QUANTIZE:
            seen[job.key] = job.device
        return write(job, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(run_job, "write_job", noted)
    execute(plan, tmp_path / "out", Options(devices=PLACES))
    nowhere = {output.name: (Path(), 0) for tensor in plan.tensors for output in tensor.outputs}
    keys = [job.key for job in jobs_of(plan, nowhere) if job.action == QUANTIZE]
    assert seen == {keys[i]: PLACES[i % len(PLACES)] for i in range(14)}
    assert [job.device for job in jobs_of(plan, nowhere, (0, 1)) if job.action == QUANTIZE] == [0, 1] * 7
