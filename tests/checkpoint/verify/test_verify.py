"""Test verify: a conversion has no errors, every byte of it is compared, and every injected fault is found
and named.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import oracle
import partly_quantized
import pytest
import synthetic
from changed_bytes import change
from exhaustive import every, exhaustive, half

from fp4kit.checkpoint import Options, Wishes, convert
from fp4kit.checkpoint.containers.engines import Issue
from fp4kit.checkpoint.containers.table import (
    CODES,
    CONTAINERS,
    CT_NVFP4,
    FP8_BLOCKS,
    FP8_POWERS,
    MODELOPT_MXFP8,
    MODELOPT_NVFP4,
    SCALES,
    VALUES,
    Container,
)
from fp4kit.checkpoint.findings import grouped
from fp4kit.checkpoint.loaders import support
from fp4kit.checkpoint.model.model_files import MANIFEST, open_source
from fp4kit.checkpoint.model.slabs import Readers, codes_of, slabs
from fp4kit.checkpoint.model.statistics import StoredCounts, amax_and_nonfinite, sqnr_db, tally
from fp4kit.checkpoint.verify.report import summary_of
from fp4kit.checkpoint.verify.verify import LayerReport, VerifyReport, prepare
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.cli import main
from fp4kit.formats import FLT_MAX
from fp4kit.storage.files import CheckpointError, read_header

PAIRS = [
    ("nvfp4-te", "modelopt"),
    ("nvfp4-compressed-tensors", "compressed-tensors"),
    ("mxfp4-ocp", "compressed-tensors"),
    ("mxfp8-te-2d", "modelopt"),
    ("mxfp8-te", "sglang-mxfp8"),
]
SOURCES = {**synthetic.MODELS, **synthetic.QUANTIZED, "gpt_oss": synthetic.gpt_oss}
ONES = [
    ("gpt_oss", "mxfp4-ocp", "gpt-oss"),
    ("gpt_oss_mxfp4", "mxfp4-ocp", "bf16"),
    ("deepseek_v4", "nvfp4-te", "deepseek-v4"),
    ("deepseek_fp8", "nvfp4-te", "bf16"),
    ("deepseek_fp8", "mxfp8-te", "modelopt"),
    ("deepseek_v4", "mxfp4-ocp", "bf16"),
]


def made(
    root: Path, name: str = "dense", recipe: str = "nvfp4-te", format: str | None = "modelopt", **options: Any
) -> tuple[Path, Path]:
    """Convert the synthetic model `name`, a key of SOURCES. Return (converted directory, source directory)."""
    SOURCES[name](root / "m")
    convert(root / "m", root / "out", recipe, format=format, **options)
    return root / "out", root / "m"


def errors(report: VerifyReport) -> list[Issue]:
    return [issue for issue in report.issues if issue.severity == "error"]


def poke(model: Path, name: str, at: int, change: Callable[[int], int]) -> None:
    """Change one byte of the tensor `name` in a checkpoint.

    at: the index of the byte in the tensor.
    change: a function from the old byte to the new one.
    """
    file, entry = open_source(model).tensors[name]
    data = bytearray(file.path.read_bytes())
    data[entry.start + at] = change(data[entry.start + at])
    file.path.write_bytes(data)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place by `change`, which modifies the loaded object."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("name", half(synthetic.MODELS))
@pytest.mark.parametrize(("recipe", "format"), PAIRS)
def test_conversions_are_clean_and_every_byte_is_compared(tmp_path: Path, name: str, recipe: str, format: str) -> None:
    check_clean(*made(tmp_path, name, recipe, format))


@pytest.mark.parametrize(("name", "recipe", "format"), ONES)
def test_other_sources_and_targets_are_clean(
    tmp_path: Path, name: str, recipe: str, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "refusal", lambda *pair: None)  # convert pairs that no engine loads, too
    # Engines load this pair of recipe and format only if every layer has an input scale.
    scale = 1.0 if (recipe, format) == ("nvfp4-te", "deepseek-v4") else None
    check_clean(*made(tmp_path, name, recipe, format, requantize=True, input_scale=scale))


def check_clean(model: Path, source: Path) -> None:
    """Assert that there is no error and that each byte of each tensor was compared with what the source gives."""
    report = verify(model, source)
    assert report.clean and not errors(report) and report.manifest == "equal"
    tensors = open_source(model).tensors
    held = sum(entry.nbytes for _, entry in tensors.values())
    copied = sum(stored.entry.nbytes for stored, _ in prepare(model, source).copies)
    assert sum(layer.compared for layer in report.layers) + copied == held
    assert all(layer.differing == 0 and layer.action for layer in report.layers)


def naive(
    form: Container, codes: np.ndarray, scales: np.ndarray, tensor_scale: np.float32 | None, x: np.ndarray
) -> StoredCounts:
    """Return the StoredCounts that `tally` must give for a layer, counted block by block with plain NumPy.

    form: the container.
    codes, scales, tensor_scale: the stored layer.
    x: the source's values.
    """
    bits, (height, width) = form.element.bits, form.block
    low, high = codes & 15, codes >> 4
    all_codes = np.stack([low, high], -1).reshape(len(codes), -1) if bits == 4 else codes
    numbers = scales if form.scale is None else form.scale.values[scales]
    facts: dict[str, float] = dict.fromkeys(StoredCounts.__dataclass_fields__, 0)
    facts |= {"elements": all_codes.size, "blocks": scales.size, "compared": x.size, "smallest_scale": math.inf}
    for (i, j), scale in np.ndenumerate(numbers):
        block = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
        part, source = all_codes[block], x[block].astype(np.float64)
        values = form.element.values[part].astype(np.float64)
        outer = 1.0 if tensor_scale is None else abs(float(tensor_scale))
        limit = abs(float(scale)) * float(form.element.max) * outer
        with np.errstate(all="ignore"):
            factor = np.float32(scale) if tensor_scale is None else np.float32(scale) * tensor_scale
            decoded = (form.element.values[part] * factor).astype(np.float64)
        largest = np.abs(values) == float(form.element.max)
        zero = scale == 0 or not values.any()
        facts["at_max"] += largest.sum()
        facts["nan_codes"] += np.isnan(values).sum()
        facts["nan_scales"] += not np.isfinite(scale)
        facts["negative_scales"] += bool(scale < 0)
        least = 2.0**-6 if form.scale is not None and form.scale.mantissa_bits else 2.0**-126
        facts["subnormal_scales"] += bool(0 < abs(scale) < least)
        facts["top_scales"] += form.scale is not None and abs(float(scale)) == float(form.scale.max)
        facts["zero_blocks"] += zero
        facts["zero_scales"] += bool(scale == 0 and values.any())
        lost = ((values == 0) & (source != 0)).sum()
        facts["hollow_blocks"] += not zero and lost >= 64 and 2 * lost > (source != 0).sum()
        facts["flushed_blocks"] += bool(zero and (source != 0).any())
        if zero and (source != 0).any():
            usable = np.isfinite(source)
            amax = np.abs(np.where(usable, source, 0)).max()
            smallest = 2.0**-126 if form.scale is None else float(form.scale.values[form.scale.values > 0].min())
            most, least_code = float(form.element.max), float(form.element.values[1])
            need = smallest * most if scale == 0 else abs(float(scale)) * least_code
            small = amax <= outer * need
            facts["underflowed_blocks"] += small
            facts["emptied_blocks"] += not small and scale != 0
        if np.isfinite(scale):
            facts["scale_logs"] += 0 if scale == 0 else int(np.rint(1024 * np.log2(abs(np.float64(scale)))))
            facts["scaled_blocks"] += scale != 0
            facts["largest_scale"] = max(facts["largest_scale"], abs(scale))
            facts["smallest_scale"] = min(facts["smallest_scale"], abs(scale))
        facts["reach"] = max(facts["reach"], 0 if zero or not np.isfinite(scale) else limit)
        facts["saturated"] += (largest & (np.abs(source) > limit)).sum()
        usable = np.isfinite(source)
        facts["nonfinite"] += (~usable).sum()
        facts["signal"] += (source[usable] ** 2).sum()
        rest = decoded[usable] - source[usable]
        facts["noise"] += (rest**2).sum() if np.isfinite(rest).all() else np.inf
    return StoredCounts(**{name: type(getattr(StoredCounts(), name))(value) for name, value in facts.items()})


SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 2.0**-126, float(FLT_MAX), -float(FLT_MAX), np.inf, -np.inf, np.nan, 6.0, 448.0]
MXFP4 = [form for form in CONTAINERS if form.kind == "mxfp4"]
DRAWN = (MODELOPT_NVFP4, CT_NVFP4, MODELOPT_MXFP8, FP8_BLOCKS, FP8_POWERS, *MXFP4)


@pytest.mark.parametrize("form", every(4, DRAWN), ids=str)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, *exhaustive([np.float32, np.float16])])
def test_tally_is_that_of_single_elements(form: Container, dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts over whole chunks equal those of a loop over single elements, for any number of rows per chunk.

    Codes, scales and values are random bytes.
    """
    monkeypatch.setattr(import_module("fp4kit.checkpoint.model.slabs"), "CHUNK_ELEMENTS", 7 * 96)
    rng = np.random.default_rng(CONTAINERS.index(form))
    for case in range(12):
        rows, columns = int(rng.integers(1, 100)), int(rng.integers(1, 6)) * 32
        if form.block[0] > 1:
            columns -= int(rng.integers(0, 31))
        codes, scales, scale, x = draw(rng, form, rows, columns, case)
        with np.errstate(all="ignore"), monkeypatch.context() as numpy_alone:
            found, wanted = (count(form, codes, scales, scale, x.astype(dtype)) for count in (tally, naive))
            numpy_alone.setattr("fp4kit.checkpoint.model.statistics.compare_stored", lambda *arrays: None)
            without = tally(form, codes, scales, scale, x.astype(dtype))
        same = {"signal": 0.0, "noise": 0.0}
        for one in (found, without):
            for a, b in ((getattr(one, name), getattr(wanted, name)) for name in same):
                assert a == b or abs(a - b) <= 1e-9 * b
            assert replace(one, **same) == replace(wanted, **same)
        held = tally(form, codes, scales, scale)
        assert (held.compared, held.sqnr_db, held.zero_blocks) == (0, None, found.zero_blocks)


def draw(
    rng: np.random.Generator, form: Container, rows: int, columns: int, case: int
) -> tuple[npt.NDArray[np.uint8], np.ndarray, np.float32 | None, npt.NDArray[np.float32]]:
    """Return random (codes, scales, tensor scale, source values) of a layer in the container `form`.

    Some blocks are zero, and some scales are special values such as NaN. case: a number that selects what is special.
    """
    codes = rng.integers(0, 256, (rows, columns * form.element.bits // 8)).astype(np.uint8)
    codes[rng.random(codes.shape) < (0.9 if case % 2 else 0.2)] = 0x80 if case % 3 else 0
    if form.element.bits == 8 and case % 4:
        codes[(codes & 0x7F) == 0x7F] = 0x7E
    shape = (-(-rows // form.block[0]), -(-columns // form.block[1]))
    scales = rng.integers(0, 256 if case % 2 else 127, shape).astype(np.uint8)
    numbers = rng.choice(np.array([*SPECIAL, 1, 0.1], np.float32), shape)
    x = (rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-20, 20)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = rng.choice(np.array(SPECIAL[: 6 if case % 2 else None], np.float32))
    tensor_scale = np.float32(2.0 ** rng.integers(-30, 10) * 1.1) if form.has_tensor_scale else None
    return codes, numbers if form.scale is None else scales, tensor_scale, x


def test_sqnr() -> None:
    assert sqnr_db(100.0, 1.0) == 20.0
    assert sqnr_db(0.0, 0.0) == sqnr_db(1.0, 0.0) == np.inf
    assert sqnr_db(0.0, 1.0) == sqnr_db(1.0, np.inf) == -np.inf
    assert StoredCounts().sqnr_db is None
    assert StoredCounts(compared=1, signal=1e3, noise=1.0).sqnr_db == pytest.approx(30)


def test_amax_and_nonfinite() -> None:
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        x = np.array([[-3, 1, -0.0], [np.nan, np.inf, -np.inf]], np.float32).astype(dtype)
        assert amax_and_nonfinite(x[:1]) == (3.0, 0)
        assert amax_and_nonfinite(x)[1] == 3
        assert amax_and_nonfinite(np.zeros((1, 4), dtype)) == (0.0, 0)


Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
NORM = "model.norm.weight"
DECLARED = "quantization_config"


def declare(model: Path, **changes: object) -> None:
    edit(model / "config.json", lambda config: config[DECLARED].update(changes))


def exclude(model: Path, *names: str) -> None:
    declare(model, ignore=list(names))
    edit(model / "hf_quant_config.json", lambda config: config["quantization"].update(exclude_modules=list(names)))


def undeclare(model: Path) -> None:
    edit(model / "config.json", lambda config: config.pop(DECLARED))
    (model / "hf_quant_config.json").unlink()


def flipped(part: str, at: int, change: Callable[[int], int] = lambda b: b ^ 1) -> Callable[[Path], object]:
    """Return a fault: a changed byte of the query layer."""
    return lambda m: poke(m, f"{Q}.{part}", at, change)


FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "code": (flipped("weight", 5), Q, "codes that differ from the source encoded with nvfp4-te"),
    "scale": (flipped("weight_scale", 0), Q, "bytes of block scales that differ"),
    "NaN scale": (flipped("weight_scale", 3, lambda b: 0x7F), Q, "block scales that are NaN or infinite: 1"),
    "negative scale": (flipped("weight_scale", 3, lambda b: b | 0x80), Q, "block scales that are negative"),
    "tensor scale": (flipped("weight_scale_2", 2), Q, "bytes of tensor scales, input scales or"),
    "copied": (lambda m: poke(m, NORM, 0, lambda b: b ^ 1), NORM, "a copied tensor that differ from the source: 1"),
    "file": (lambda m: (m / "extra.py").write_text("x"), "extra.py", "was not written by the conversion"),
    "lost file": (lambda m: (m / "tokenizer_config.json").unlink(), "tokenizer_config.json", "is missing"),
    "list": (lambda m: exclude(m, Q), "model.layers.0.self_attn.qkv_proj", "exclude all or none"),
    "list of junk": (lambda m: declare(m, ignore=[7]), "config.json", "a list of names is needed"),
    "method": (lambda m: declare(m, quant_method="fp8"), "config.json", "quant_method"),
    "algorithm": (lambda m: declare(m, quant_algo="NVFP4"), Q, "input_scale is missing"),
    "undeclared": (undeclare, "config.json", "quant_method is ''"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(tmp_path: Path, fault: str) -> None:
    model, source = made(tmp_path)
    inject, subject, text = FAULTS[fault]
    inject(model)
    report = verify(model, source, "nvfp4-te")
    found = [issue for issue in errors(report) if issue.subject == subject and text in issue.sentence]
    assert found, grouped(report.issues)
    assert not report.clean and main(["verify", str(model), "--source", str(source), "--quiet"]) == 1


SAID = [
    ({"num_hidden_layers": 7}, "error", "num_hidden_layers is 7; the source has "),
    ({"rms_norm_eps": 1e-3}, "error", "rms_norm_eps is 0.001; the source has 1e-06"),
    ({"hidden_act": "gelu"}, "error", 'hidden_act is "gelu"; the source has "silu"'),
    ({"tie_word_embeddings": True}, "error", "tie_word_embeddings is true; the source has false"),
    (
        {"rope_parameters": {"rope_theta": 1e4}},
        "error",
        "rope_parameters.rope_theta is 10000.0; the source has 500000.0",
    ),
    ({"layer_types": ["full"]}, "error", 'layer_types is ["full"]; the source has ["sliding"]'),
    ({"eos_token_id": 3}, "warning", "eos_token_id is 3; the source has 2"),
    ({"rms_norm_eps": None}, "error", "rms_norm_eps is null; the source has 1e-06"),
    ({"rope_scaling": {"factor": 8.0}}, "warning", "has rope_scaling, which the source lacks"),
    ({"rms_norm_eps": ...}, "warning", "lacks rms_norm_eps, which the source has; engines use their defaults"),
    ({"use_cache": False, "dtype": "float16", "transformers_version": "9"}, "", ""),
    ({"rope_theta": 500000.0, "mlp_bias": False, "rope_scaling": None}, "", ""),
]


def change_keys(config: dict[str, Any], changes: dict[str, Any]) -> None:
    """Set the keys of a config to the values in changes. Remove those whose value is ... ."""
    config.update(changes)
    for key in [key for key, value in changes.items() if value is ...]:
        del config[key]


@pytest.mark.parametrize(("changes", "severity", "text"), SAID)
def test_configs_that_differ_from_that_of_the_source(
    tmp_path: Path, changes: dict[str, Any], severity: str, text: str
) -> None:
    more = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "use_cache": True}
    more |= {"rope_parameters": {"rope_theta": 5e5}, "layer_types": ["sliding"], "eos_token_id": 2}
    synthetic.MODELS["dense"](tmp_path / "m")
    edit(tmp_path / "m" / "config.json", lambda config: config.update(more))
    convert(tmp_path / "m", tmp_path / "out", "nvfp4-te")
    assert not [one for one in verify(tmp_path / "out", tmp_path / "m").issues if one.subject == "config.json"]
    (tmp_path / "out" / MANIFEST).unlink()
    edit(tmp_path / "out" / "config.json", lambda config: change_keys(config, changes))
    found = verify(tmp_path / "out", tmp_path / "m").issues
    assert [(one.severity, one.text.startswith(text)) for one in found if one.subject == "config.json"] == (
        [(severity, True)] if severity else []
    )


def test_a_source_that_is_quantized_itself(tmp_path: Path) -> None:
    model, source = made(tmp_path)
    other = convert(source, tmp_path / "mx", "mxfp4-ocp", format="compressed-tensors").destination
    text = "the source is quantized itself (compressed-tensors mxfp4-pack-quantized), and most layers differ from it"
    assert any(one.text.startswith(text) for one in verify(model, other).issues)
    again = convert(other, tmp_path / "again", "nvfp4-te", requantize=True).destination
    assert not any("quantized itself" in one.text for one in verify(again, other).issues)


def test_the_source_of_another_model_is_named(tmp_path: Path) -> None:
    model, source = made(tmp_path)
    assert not any("another model" in one.text for one in verify(model, source).issues)
    other = tmp_path / "other"
    shutil.copytree(source, other)
    for path in other.glob("*.safetensors"):
        header = read_header(path)
        data = bytearray(path.read_bytes())
        for entry in header.entries:
            if len(entry.shape) == 2:
                values = np.random.default_rng(entry.start).standard_normal(entry.shape).astype(synthetic.BF16)
                data[entry.start : entry.start + entry.nbytes] = values.tobytes()
        path.write_bytes(data)
    (issue,) = (one for one in verify(model, other).issues if "probably another model" in one.text)
    assert issue.severity == "error" and re.match(r"the values of (\d+) of \1 layers do not resemble", issue.text)


def test_tensor_scales_that_disagree_name_the_loader_and_what_it_does(tmp_path: Path) -> None:
    model, _ = made(tmp_path)
    poke(model, f"{K}.weight_scale_2", 3, lambda b: b + 1)
    found = [issue for issue in errors(verify(model)) if "differs" in issue.text and issue.loader]
    assert [issue.loader.partition(" ")[0] for issue in found] == ["vLLM", "SGLang"]
    assert "(q_proj|k_proj|v_proj)" in found[0].subject and "the largest is used for all" in found[0].text


def test_both_configs_of_deepseek_v4_with_nvfp4_belong_there(tmp_path: Path) -> None:
    """verify accepts hf_quant_config.json beside DeepSeek-V4's config, because Model-Optimizer's script writes both."""
    model, source = made(tmp_path, "deepseek_v4", "nvfp4-te", "deepseek-v4", input_scale=1.0)
    assert (model / "hf_quant_config.json").exists()
    assert not [issue for issue in verify(model, source).issues if issue.subject == "hf_quant_config.json"]
    edit(model / "hf_quant_config.json", lambda config: config["quantization"].pop("exclude_modules"))
    assert any("quantization lacks exclude_modules" in issue.text for issue in verify(model, source).issues)


def test_a_layer_that_was_kept_and_is_not_listed(tmp_path: Path) -> None:
    """An unquantized layer that is not in the exclusion list is an error, because engines expect it to be quantized."""
    model, source = made(tmp_path, wishes=Wishes(keep=("model.layers.1.mlp.down_proj",)))
    assert verify(model, source).clean
    exclude(model, "lm_head")
    found = [issue for issue in errors(verify(model)) if "expected to be" in issue.text]
    subjects = {(issue.subject, issue.loader.partition(" ")[0]) for issue in found}
    assert subjects == {("model.layers.1.mlp.down_proj", engine) for engine in ("vLLM", "SGLang")}


@pytest.mark.parametrize("columns", [False, True])
def test_a_stack_of_experts_that_was_kept_and_is_not_listed(tmp_path: Path, columns: bool) -> None:
    """An unquantized stack of experts that is not in the exclusion list is an error.

    columns: True for stacks [E, K, N], False for stacks [E, N, K].
    """
    tensors = synthetic.fused(tmp_path / "rows")
    source, model, experts = tmp_path / "m", tmp_path / "out", "model.layers.0.mlp.experts"
    for leaf in ("gate_up_proj", "down_proj"):
        stack = tensors[f"{experts}.{leaf}"]
        tensors[f"{experts}.{leaf}"] = np.ascontiguousarray(stack.swapaxes(1, 2)) if columns else stack
    synthetic.write_model(source, {"num_hidden_layers": 1, "num_experts": synthetic.EXPERTS}, tensors)
    convert(source, model, "nvfp4-te", format="modelopt", wishes=Wishes(keep=("*.experts.*",)))
    assert verify(model, source).clean
    listed = json.loads((model / "config.json").read_text())[DECLARED]["ignore"]
    exclude(model, *(pattern for pattern in listed if "experts" not in pattern))
    found = [issue for issue in errors(verify(model)) if "expected to be" in issue.text]
    assert {issue.subject for issue in found} == {experts}
    assert {issue.loader.partition(" ")[0] for issue in found} == {"vLLM", "SGLang"}


def test_traps_are_warnings_that_name_the_engine(tmp_path: Path) -> None:
    model, source = made(tmp_path, "moe", "nvfp4-te", "compressed-tensors")
    report = verify(model, source)
    texts = [(issue.loader, issue.text) for issue in report.issues]
    assert report.clean and any(loader.startswith("transformers") and "global scale" in text for loader, text in texts)


@pytest.mark.parametrize("ends", [(".weight_scale",), (".weight",), (".weight", ".weight_scale", ".weight_scale_2")])
def test_a_lost_layer_does_not_accuse_those_that_share_its_scale(tmp_path: Path, ends: tuple[str, ...]) -> None:
    """The amax of q, k and v, and of gate and up, includes that of a member which the checkpoint has not in whole."""
    model, source = made(tmp_path)
    tensors, config = oracle.load(model), json.loads((model / "config.json").read_text())
    for layer in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        shutil.rmtree(model)
        lost = {f"model.layers.0.{layer}{end}" for end in ends}
        assert lost <= tensors.keys()
        arrays = oracle.arrays({name: x for name, x in tensors.items() if name not in lost})
        synthetic.write_model(model, config, arrays)
        report = verify(model, source, ignore=("*",) if len(ends) < 3 else ())
        assert not report.clean and len(report.layers) == 13 and not any(one.differing for one in report.layers)


@pytest.mark.parametrize("leaf", ["q_proj", "k_proj", "v_proj"])
def test_a_layer_that_is_kept_has_no_part_in_the_amax_of_the_others(tmp_path: Path, leaf: str) -> None:
    model, source = made(tmp_path, wishes=Wishes(keep=(f"*.{leaf}",)))
    assert len(found := verify(model, source).layers) == 12 and not any(one.differing for one in found)


def test_tensors_of_one_side(tmp_path: Path) -> None:
    """verify reports tensors that only the model or only the source has, and tensors that differ in shape or dtype.

    If a copied float tensor has another dtype than the source's, it is compared with the source's values rounded to
    that dtype, because tools cast some tensors.
    """
    model, source = made(tmp_path)
    tensors = dict(oracle.arrays(oracle.load(source)))
    shutil.rmtree(source)
    tensors["model.more.weight"] = tensors.pop("model.norm.weight")
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"][:32]
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].astype(np.float32)
    synthetic.write_model(source, {"model_type": "qwen3", "num_hidden_layers": 2}, tensors)
    report = verify(model, source)
    found = {issue.subject: issue.text for issue in errors(report)}
    assert found["model.more.weight"] == "is missing; the source has it"
    assert found["model.norm.weight"] == found[Q] == "is not in the source"
    text = "is BF16; the source has F32, which was rounded for the comparison"
    cast = Issue("warning", "model.embed_tokens.weight", text)
    assert cast in report.issues and "model.embed_tokens.weight" not in dict(report.changed)
    tensors["model.embed_tokens.weight"][5, 7] += 1
    shutil.rmtree(source)
    synthetic.write_model(source, {"model_type": "qwen3", "num_hidden_layers": 2}, tensors)
    assert 1 <= dict(verify(model, source).changed)["model.embed_tokens.weight"] <= 2
    assert any("is not the source file that was converted" in issue.text for issue in verify(model, source).issues)


def test_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """verify re-encodes the source with the user's recipe, or else with the recorded one.

    Without a recipe, it still compares the decoded values with the source.
    """
    model, source = made(tmp_path)
    assert verify(model, source).recipe == "nvfp4-te"
    assert not verify(model, source, "nvfp4-modelopt").clean
    with pytest.raises(CheckpointError, match=r"^--recipe: modelopt NVFP4 cannot store mxfp4-ocp, so no byte could"):
        verify(model, source, "mxfp4-ocp")
    # The report prints the findings and the last line of the command.
    found = verify(model, source, "nvfp4-modelopt")
    main(["verify", str(model), "--source", str(source), "--recipe", "nvfp4-modelopt"])
    printed = capsys.readouterr().out.splitlines()
    assert found.verdict == printed[-1] == str(found).splitlines()[-1]
    assert verify(model, source) and not found
    assert {*str(found).splitlines()} <= {*printed} and f"errors: {found.errors}," in found.verdict
    random = [issue.text for issue in verify(model, source, "nvfp4-comfy-kitchen-stochastic").issues]
    assert any("only rounds stochastically, and the seed of its codes is not known" in text for text in random)
    (model / MANIFEST).unlink()
    assert verify(model, source).recipe == "nvfp4-te"
    edit(model / "config.json", lambda c: c["quantization_config"].pop("fp4kit"))
    report = verify(model, source)
    assert (report.recipe, report.manifest, report.clean) == (None, "none", True)
    assert main(["verify", str(model), "--source", str(source)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"next: fp4kit identify {model} --source {source}, which finds the recipe to compare by" in lines
    assert not any(line.startswith("serve") for line in lines)
    text = "14 layers are not re-encoded: no recipe is recorded; give one with --recipe, which fp4kit identify finds"
    assert text in [issue.text for issue in report.issues]
    assert all(layer.compared == 0 and (layer.tally.sqnr_db or 0) > 18 for layer in report.layers)
    assert verify(model, source, "nvfp4-te").layers[0].compared


JUNK: list[object] = [None, [], "", 7, {"recipe": ["x"]}, {"recipe": {"x": 1}, "input_scale": 10**400, "nonfinite": []}]


@pytest.mark.parametrize("junk", JUNK)
def test_junk_in_the_records_is_no_crash(tmp_path: Path, junk: object) -> None:
    model, source = made(tmp_path)
    edit(model / MANIFEST, lambda m: m.update(request=junk, source=junk))
    edit(model / "config.json", lambda c: c["quantization_config"].update(fp4kit=junk, quant_algo=junk))
    assert verify(model, source).manifest == "differs"


def test_input_scale_and_nonfinite_values_as_they_were_asked_for(tmp_path: Path) -> None:
    tensors = synthetic.dense(tmp_path / "m")
    shutil.rmtree(tmp_path / "m")
    tensors[f"{Q}.weight"][3, 5], tensors[f"{Q}.weight"][0, 0] = np.inf, np.nan
    synthetic.write_model(tmp_path / "m", {"model_type": "qwen3", "num_hidden_layers": 2}, tensors)
    convert(tmp_path / "m", tmp_path / "out", "mxfp8-te", format="modelopt", nonfinite="saturate")
    report = verify(tmp_path / "out", tmp_path / "m")
    assert report.clean and any(issue.text.startswith("values of the source that are NaN") for issue in report.issues)
    assert next(layer for layer in report.layers if layer.name == Q).tally.nonfinite == 2
    wishes = Wishes(keep=("*.self_attn.*",))
    options = {"format": "modelopt", "input_scale": 0.5, "nonfinite": "keep"}
    convert(tmp_path / "m", tmp_path / "inputs", wishes=wishes, **options)  # type: ignore[arg-type]
    report = verify(tmp_path / "inputs", tmp_path / "m")
    assert report.errors == 1 and all(layer.others == (0, 8) for layer in report.layers)
    poke(tmp_path / "inputs", "model.layers.0.mlp.up_proj.input_scale", 3, lambda b: b ^ 1)
    assert [layer.others for layer in verify(tmp_path / "inputs", tmp_path / "m").layers if layer.differing] == [(1, 8)]


def test_workers_executors_and_slabs_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, source = made(tmp_path, "fused", "nvfp4-te-2d", "compressed-tensors")
    poke(model, "model.layers.0.mlp.experts.1.up_proj.weight_packed", 9, lambda b: b ^ 0x30)
    whole, done = verify(model, source), [0]
    assert verify(model, source, options=Options(workers=2)) == whole
    with ThreadPoolExecutor(3) as executor:
        assert verify(model, source, options=Options(executor=executor)) == whole
    monkeypatch.setattr(import_module("fp4kit.checkpoint.model.slabs"), "SLAB_BYTES", 64)
    counted = verify(model, source, options=Options(progress=lambda count: done.__setitem__(0, done[0] + count)))
    assert done[0] == prepare(model, source).nbytes
    assert [without_sums(layer) for layer in counted.layers] == [without_sums(layer) for layer in whole.layers]
    assert counted.issues == whole.issues
    counted_db, whole_db = ([layer.tally.sqnr_db for layer in one.layers] for one in (counted, whole))
    assert counted_db == pytest.approx(whole_db)
    assert [layer.name for layer in whole.layers if layer.differing] == ["model.layers.0.mlp.experts.1.up_proj"]


_OTHERS = [("nvfp4-comfy-kitchen", "comfy"), ("fp8-modelopt-channel", "modelopt")]
LOCATED = [*(("dense", *pair) for pair in [*PAIRS, *_OTHERS]), *ONES[:2]]


@pytest.mark.parametrize(("name", "recipe", "format"), [*LOCATED, ("", "nvfp4-gguf", ""), ("", "mxfp4-gguf", "")])
def test_the_first_difference_is_located(tmp_path: Path, name: str, recipe: str, format: str) -> None:
    """A changed byte is found where the reader of slabs finds the element that changed."""
    if name:
        model, source = made(tmp_path, name, recipe, format, requantize=True)
    else:
        model, source = partly_quantized.gguf(tmp_path / "m", recipe), tmp_path / "m" / "plain.gguf"
    layer = next(layer for layer in verify(model, source).layers if layer.compared and layer.shape[-2] > 32)
    stored = next(one.stored for one in prepare(model, source).checks if one.stored.name == layer.name)
    expert = stored.experts - 1

    def elements() -> list[npt.NDArray[Any]]:
        with Readers() as readers:
            (slab,) = slabs(readers, stored, expert)
        return [slab.values] if stored.container is None else [codes_of(stored.form, slab.codes), slab.scales]

    before = elements()
    for part in {VALUES, CODES, SCALES} & stored.parts.keys():
        place = stored.parts[part]
        at = place.entry.nbytes // stored.experts * expert + 18
        poke(model, place.entry.name, at, lambda b: b ^ 0x10)
        (found,) = next(one for one in verify(model, source).layers if one.name == layer.name).first
        old, new = (arrays[found.part == "scales"] for arrays in (before, elements()))
        row, column = np.argwhere(old != new)[0]
        both = [float(one[row, column]) for one in (new, old)]
        if found.part == "scales" and stored.form.scale is not None:
            both = [float(stored.form.scale.values[int(one)]) for one in both]
        assert np.array_equal([found.stored, found.expected], both, equal_nan=True)
        high, wide = stored.form.block if found.part == "scales" else (1, 1)
        place_in_stack = (expert if stored.experts > 1 else None, row * high, column * wide)
        assert (found.expert, found.row, found.column) == place_in_stack
        poke(model, place.entry.name, at, lambda b: b ^ 0x10)


def without_sums(layer: LayerReport) -> LayerReport:
    """Return the layer's report with its sums set to 0, because their rounding depends on the order of additions."""
    return replace(layer, tally=replace(layer.tally, signal=0.0, noise=0.0))


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifying a tensor of 32 MiB allocates the memory of a few slabs (groups of rows), not of the tensor."""
    x = np.random.default_rng(0).standard_normal((4096, 4096), dtype=np.float32).astype(ml_dtypes.bfloat16)
    synthetic.write_model(tmp_path / "m", {"num_hidden_layers": 1}, {"model.layers.0.mlp.down_proj.weight": x})
    del x
    monkeypatch.setattr(import_module("fp4kit.checkpoint.model.slabs"), "SLAB_BYTES", 1 << 20)
    convert(tmp_path / "m", tmp_path / "out")
    tracemalloc.start()
    assert verify(tmp_path / "out", tmp_path / "m").clean
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_statistics_are_those_of_the_layer(tmp_path: Path) -> None:
    """SQNR and the numbers of elements, blocks and zero blocks in the report are those computed on whole arrays."""
    model, source = made(tmp_path, "moe")
    tensors = oracle.arrays(oracle.load(source))
    loaded = oracle.arrays(oracle.load(model))
    for layer in verify(model, source).layers:
        x = tensors[f"{layer.name}.weight"].astype(np.float64)
        parts = (loaded[f"{layer.name}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2"))
        codes, scales, scale = (part.view(np.uint8) if part.dtype.itemsize == 1 else np.float32(part) for part in parts)
        noise = float(((x - oracle.decoded("nvfp4", codes, scales, scale)) ** 2).sum())
        assert layer.tally.elements == layer.tally.compared == x.size and layer.tally.blocks == x.size // 16
        assert layer.tally.sqnr_db == pytest.approx(sqnr_db(float((x**2).sum()), noise))
        assert layer.tally.zero_blocks == (x.size // 16 if not x.any() else 0)


def test_a_checkpoint_of_another_tool_is_not_compared_byte_by_byte(capsys: pytest.CaptureFixture[str]) -> None:
    data = Path(__file__).parents[2] / "data"
    made, source = data / "foreign" / "torchao--NVFP4WO", data / "foreign_sources" / "llama"
    main(["verify", str(made), "--source", str(source)])
    text = " ".join(capsys.readouterr().out.split())
    assert "layers without a fault; no bytes were compared: name the recipe by --recipe" in text
    assert "as expected" not in text and "bytes differ" not in text


def test_what_bytes_were_compared_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Decoded and renamed layers were not encoded with the recipe that the manifest records."""
    quantized, source = made(tmp_path)
    for format, expected in (("bf16", "the source decoded to bfloat16; "), ("compressed-tensors", "the source; ")):
        out = tmp_path / format
        convert(quantized, out, format=format)
        assert main(["verify", str(out), "--source", str(quantized), "--html", str(tmp_path / "page.html")]) == 0
        assert f" bytes differ from {expected}" in " ".join(capsys.readouterr().out.split())
        named = "<dt>recipe</dt><dd>none recorded<" in (tmp_path / "page.html").read_text()
        assert named == (verify(out, quantized).recipe is None) == (format == "bf16")
    assert verify(quantized, source).expected == "the source encoded with nvfp4-te"


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, source = made(tmp_path)
    assert main(["verify", str(model), "--source", str(source)]) == 0
    text = capsys.readouterr().out
    held = sum(entry.nbytes for name, (_, entry) in open_source(model).tensors.items() if "proj" in name)
    assert f"{Q} [64,64]" in text
    same = f"files match the manifest; 0 of {held} bytes differ from the source encoded with nvfp4-te; 0 of 6 other"
    assert same in text
    poke(model, f"{Q}.weight", 5, lambda b: b ^ 1)
    assert main(["verify", str(model), "--source", str(source), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["clean"], found["manifest"]) == ("fp4kit.verify/1", False, "differs")
    layer = next(layer for layer in found["layers"] if layer["name"] == Q)
    (first,) = layer["first"]
    assert (first["part"], first["row"], first["column"], first["stored"] ^ first["expected"]) == ("codes", 0, 10, 1)
    main(["verify", str(model), "--source", str(source)])
    line = f"{Q}: codes, row 0, column 10: {first['stored']} in the file, {first['expected']} expected"
    assert f"first difference: {line}" in " ".join(capsys.readouterr().out.split())
    assert layer["codes"] == {"differing": 1, "compared": 2048} and layer["scales"]["differing"] == 0
    poke(model, f"{Q}.weight", 5, lambda b: b ^ 1)
    poke(model, f"{Q}.weight_scale", 0, lambda b: b ^ 8)  # another exponent, which both commands show as values
    commands = (["verify", str(model)], ["identify", str(model)])
    said = []
    for command in commands:
        main([*command, "--source", str(source)])
        said += re.findall(r"block scales, row 0, column 0: \S+ in the file, \S+ expected", capsys.readouterr().out)
    assert len({*said}) == 1 and len(said) >= 2, said
    poke(model, f"{Q}.weight_scale", 0, lambda b: b ^ 8)
    poke(model, f"{Q}.weight", 5, lambda b: b ^ 1)
    assert main(["verify", str(model)]) == 1
    text = "error: model-00001-of-00002.safetensors: its content differs from what the conversion wrote"
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--recipe", "nvfp4-te"], "--recipe: says how layers were made from a source; add --source SRC"),
        (["--scale-search", "mse"], "--scale-search: says how layers were made from a source; add --source SRC"),
        (["--column-weights", "w"], "--column-weights: says how layers were made from a source; add --source SRC"),
        (
            ["--html", "{model}/page.html"],
            "lies inside the checkpoint, which it would change; choose another directory",
        ),
        (["--source", "{source}", "--html", "{source}/config.json"], "lies inside the checkpoint"),
        (["--html", "{model}/none/page.html"], "cannot be written; a file name in a directory that exists is needed"),
        (["--source", "{model}/none"], "does not exist; a Hugging Face model directory, "),
        (["--source", "{source}", "--workers", "0"], "workers: got 0; an integer of at least 1 is needed"),
    ],
)
def test_command_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    model, source = made(tmp_path)
    assert main(["verify", str(model), *(a.format(model=model, source=source) for a in arguments)]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("value", [0, 0.02])
def test_the_next_step_after_a_wrong_input_scale(value: float, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """identify does not look at input scales, so it is the next step only if something else is wrong, too."""
    model, source = made(tmp_path, input_scale=0.01)
    change(model, f"{Q}.input_scale", lambda x: np.full_like(x, value))
    for step in (f"convert {source} NEW --activations FILE", f"identify {model} --source {source}"):
        assert main(["verify", str(model), "--source", str(source)]) == 1
        assert f"next: fp4kit {step}, which" in " ".join(capsys.readouterr().out.split())
        change(model, f"{Q}.weight_scale", lambda x: x ^ 1, np.uint8)


def test_a_layer_that_is_not_read_is_counted(tmp_path: Path) -> None:
    model, source = made(tmp_path)
    for path in model.glob("*.safetensors"):
        start = f'"{Q}.weight":{{"dtype":"U8","shape":'.encode()
        path.write_bytes(path.read_bytes().replace(start + b"[64,32]", start + b"[32,64]"))
    for report in (verify(model, source), verify(model)):
        assert report.unread == (Q,) and "13 layers, 1 not read" in report.verdict
        assert re.search(f"13 of 14 layers as expected.*; not read: {Q}$", next(summary_of(report)))


def test_a_damaged_header_is_an_error(tmp_path: Path) -> None:
    model, source = made(tmp_path)
    (model / "model-00001-of-00002.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(CheckpointError, match="not a usable safetensors file"):
        verify(model, source)


def test_carried_codes_record_no_recipe_of_their_own(tmp_path: Path) -> None:
    """Codes that are copied to another container keep their recorded recipe. If none is recorded, none is written."""
    model, source = made(tmp_path, recipe="nvfp4-modelopt")
    convert(model, tmp_path / "renamed", format="compressed-tensors")
    own = json.loads((tmp_path / "renamed" / "config.json").read_text())["quantization_config"]["fp4kit"]
    assert (own["recipe"], own["codes"]) == ("nvfp4-modelopt", "carried")
    assert verify(tmp_path / "renamed", source).clean and verify(tmp_path / "renamed", model).clean
    edit(model / "config.json", lambda config: config["quantization_config"].pop("fp4kit"))
    convert(model, tmp_path / "unknown", format="compressed-tensors")
    own = json.loads((tmp_path / "unknown" / "config.json").read_text())["quantization_config"]["fp4kit"]
    assert "recipe" not in own and own["codes"] == "carried"
    report = verify(tmp_path / "unknown", source)
    assert report.clean and report.recipe is None
