"""Test reconcile: parts of a fused layer get one tensor scale, the reported cost is that of the decoded values, and all
other bytes stay.
"""

import hashlib
import json
from itertools import pairwise

import numpy as np
import pytest
import synthetic
from changed_bytes import change
from exhaustive import exhaustive

import fp4kit
from fp4kit.checkpoint import CheckpointError, convert
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.model.model_files import INDEX, MANIFEST, differences, open_source
from fp4kit.checkpoint.model.slabs import Readers, slabs, values_of
from fp4kit.checkpoint.model.weights import located, weights_of
from fp4kit.checkpoint.reconcile import reconcile
from fp4kit.checkpoint.selection.names import shared_amax_groups
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.cli import main
from fp4kit.contract.schema import FILE as CONTRACT
from fp4kit.formats import E4M3

FORMATS = ("modelopt", "compressed-tensors")
SCALE = {"modelopt": "weight_scale_2", "compressed-tensors": "weight_global_scale"}


def scale(root, form, factors):
    """Multiply the decoded tensor scales of some layers of a checkpoint, as if another tool had made it.

    factors: {end of a layer's name: factor}
    """
    (root / MANIFEST).unlink(missing_ok=True)
    for leaf, factor in factors.items():
        by = np.float32(factor)
        change(
            root, f"{leaf}.{SCALE[form]}", (lambda x, by=by: x * by) if form == "modelopt" else lambda x, by=by: x / by
        )


def decoded(root):
    """Return {layer: decoded values} of all quantized layers of a checkpoint."""
    model = open_source(root)
    with Readers() as readers:
        return {
            w.name: np.concatenate([values_of(w, slab) for slab in slabs(readers, w)])
            for w in weights_of(model.tensors, model.config).values()
            if w.container is not None
        }


def raw(root):
    model = open_source(root)
    with Readers() as readers:
        return {name: readers.bytes(located(*place)).tobytes() for name, place in model.tensors.items()}


@pytest.fixture(params=FORMATS)
def quantized(request, tmp_path):
    synthetic.moe(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "q", format=request.param)
    return request.param, tmp_path / "q"


def test_equal_scales_are_left_alone(quantized, tmp_path):
    _, root = quantized
    found = reconcile(root, tmp_path / "out")
    assert found.groups == 7 and found.repairs == () and found.destination is None and not (tmp_path / "out").exists()


@pytest.mark.parametrize("factors", [{"up_proj": 0.3, "v_proj": 0.011}, {"up_proj": 0.25, "k_proj": 0.5}])
def test_the_loss_is_reported(quantized, tmp_path, factors):
    """Factors that are powers of two lose nothing in most layers. All other bytes and files stay."""
    form, root = quantized
    scale(root, form, factors)
    before, old = decoded(root), raw(root)
    found = reconcile(root, tmp_path / "out")
    after, new = decoded(tmp_path / "out"), raw(tmp_path / "out")
    assert {r.name.rpartition(".")[2] for r in found.repairs} >= {*factors}
    exact = sum(np.isinf(r.sqnr_db) and r.underflow == 0 for r in found.repairs)
    assert (exact > len(found.repairs) // 2) == ("k_proj" in factors)
    for repair in found.repairs:
        a, b = before[repair.name].astype(np.float64), after[repair.name].astype(np.float64)
        noise, signal = np.sum((a - b) ** 2), np.sum(a**2)
        wanted = np.inf if noise == 0 else 10 * np.log10(signal / noise)
        assert repair.sqnr_db == pytest.approx(wanted, rel=1e-9) and repair.before < repair.after
        codes = np.frombuffer(old[f"{repair.name}.weight_scale"], np.uint8)
        ratio = np.float32(repair.before) / np.float32(repair.after)
        scales = E4M3.encode(E4M3.values[codes] * ratio)
        assert scales.tobytes() == new[f"{repair.name}.weight_scale"]
        assert repair.changed == np.count_nonzero(scales != codes)
        assert repair.underflow == np.count_nonzero((scales == 0) & (codes != 0))
    touched = {f"{r.name}.{SCALE[form]}" for r in found.repairs}
    touched |= {f"{r.name}.weight_scale" for r in found.repairs if r.changed}
    assert {name for name in old if old[name] != new[name]} == touched
    names = [{path.name for path in folder.iterdir()} for folder in (root, tmp_path / "out")]
    # The contract is left out, because repaired scales are those of no recipe.
    assert INDEX in names[0] and names[0] - {CONTRACT} == names[1] - {MANIFEST}
    for name in {INDEX, "config.json", "hf_quant_config.json"} & names[0]:
        assert (root / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    assert differences(tmp_path / "out") == [] and reconcile(tmp_path / "out", None).repairs == ()


def test_only_a_report(quantized):
    form, root = quantized
    scale(root, form, {"up_proj": 0.3})
    before = sorted(path.name for path in root.parent.iterdir())
    assert len(reconcile(root, None).repairs) > 3
    assert sorted(path.name for path in root.parent.iterdir()) == before
    assert main(["reconcile", "--dry-run", str(root), "--quiet"]) == 1  # there is something to repair
    assert main(["reconcile", str(root), str(root.parent / "repaired"), "--quiet"]) == 0
    assert main(["reconcile", "--dry-run", str(root.parent / "repaired"), "--quiet"]) == 0


def test_refusals(quantized, tmp_path):
    form, root = quantized
    convert(tmp_path / "in", tmp_path / "mx", "mxfp8-te", format="modelopt")
    with synthetic.refused("has no layer in NVFP4 of Model-Optimizer or compressed-tensors"):
        reconcile(tmp_path / "mx", None)
    scale(root, form, {"up_proj": 0.3})
    with synthetic.refused("is the source"):
        reconcile(root, root)
    scale(root, form, {"up_proj": np.nan})
    with synthetic.refused("is not a positive normal float32"):
        reconcile(root, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_corrupt_scale_is_not_spread(quantized, tmp_path):
    """A damaged tensor scale is no disagreement to repair: reconcile refuses it, and verify does not advise it.

    Block scales are checked as by convert.
    """
    form, root = quantized
    name, up = f"layers.1.self_attn.k_proj.{SCALE[form]}", np.float32(10 if form == "modelopt" else 0.1)
    for text, power in (("s: its content differs", -7), ("128 of 128 block scales would", 0), ("allow values up", 14)):
        change(root, name, lambda x, by=up**power: x * by)
        with synthetic.refused(text):
            reconcile(root, tmp_path / "out")
        assert not any("reconcile" in issue.text for issue in verify(root).issues)
        (root / MANIFEST).unlink(missing_ok=True)
    assert main(["reconcile", str(root), str(tmp_path / "out"), "--allow-loss", "--quiet"]) == 0
    scale(root, form, {"layers.1.self_attn.k_proj": 1e-7, "up_proj": 0.3})
    for code, text in ((0, "most block scales are zero although their codes are not"), (127, "6144 values are NaN or")):
        change(root, "mlp.up_proj.weight_scale", lambda x, new=code: np.where(x >= 0, new, x), np.uint8)
        with synthetic.refused(f"mlp.up_proj: {text}"):
            reconcile(root, None)


def stored_scales(root):
    """Return {layer: stored bytes of its tensor scale or divisor} of the checkpoint in the directory `root`."""
    ends = tuple(f".{suffix}" for suffix in SCALE.values())
    return {name.rpartition(".")[0]: data for name, data in raw(root).items() if name.endswith(ends)}


def fused(root):
    """Return a list with one set per fused layer: the stored bytes of its parts' tensor scales."""
    scales = stored_scales(root)
    groups = shared_amax_groups(scales)
    return [{scales[name] for name in groups if groups[name] == group} for group in dict.fromkeys(groups.values())]


@pytest.mark.parametrize("factor", [0.73, 0.9, 1.37])
def test_parts_store_the_same_bits(tmp_path, factor):
    """reconcile gives all layers that engines fuse the same divisor, copied from one of them.

    If the divisor were computed again from the scale, it would differ in one of six cases, because the reciprocal of
    its reciprocal is rounded. verify would find the difference.
    """
    synthetic.dense(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "q", "nvfp4-compressed-tensors", format="compressed-tensors")
    scale(tmp_path / "q", "compressed-tensors", {"up_proj": factor, "k_proj": factor, "v_proj": factor})
    reconcile(tmp_path / "q", tmp_path / "out")
    assert all(len(bits) == 1 for bits in fused(tmp_path / "out"))
    assert not [issue for issue in verify(tmp_path / "out").issues if "differs" in issue.text]


def test_divisors_of_one_reciprocal_are_repaired(tmp_path):
    """Two divisors with one reciprocal are a difference to repair, because engines compare the divisors themselves."""
    synthetic.dense(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "q", "nvfp4-compressed-tensors", format="compressed-tensors")
    one = np.float32(1)
    drawn = np.linspace(1.9, 1.99, 1000, dtype=np.float32)
    twins = [x for x in drawn if one / x == one / np.nextafter(x, np.float32(2))]

    for leaf, divisor in (("q", twins[0]), ("k", np.nextafter(twins[0], np.float32(2))), ("v", twins[0])):
        change(tmp_path / "q", f"{leaf}_proj.weight_global_scale", lambda x, new=divisor: np.full_like(x, new))
    (tmp_path / "q" / MANIFEST).unlink()
    errors = [issue.text for issue in verify(tmp_path / "q").issues if issue.severity == "error"]
    assert any("reconcile repairs it" in text for text in errors)
    found = reconcile(tmp_path / "q", tmp_path / "out")
    assert [(r.changed, r.name.rpartition(".")[2]) for r in found.repairs] == [(0, "k_proj")] * 2
    assert all(len(bits) == 1 for bits in fused(tmp_path / "out")) and reconcile(tmp_path / "out", None).repairs == ()


def test_a_hugging_face_cache(quantized, tmp_path):
    """reconcile works on a Hugging Face cache, where all files, config and index included, are links to blobs."""
    form, root = quantized
    scale(root, form, {"up_proj": 0.3})
    blobs, snapshot = tmp_path / "model" / "blobs", tmp_path / "model" / "snapshots" / "1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(root.iterdir())):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    reconcile(root, tmp_path / "plain")
    reconcile(snapshot, tmp_path / "cached")
    assert raw(tmp_path / "plain") == raw(tmp_path / "cached")
    assert not [path for path in (tmp_path / "cached").iterdir() if path.is_symlink()]
    assert (tmp_path / "cached" / "config.json").read_bytes() == (root / "config.json").read_bytes()


def test_the_exact_loss_of_each_layer(quantized, tmp_path, capsys):
    """Each repair says how many block scales lose their value, and by how much; "exact" if none does."""
    form, root = quantized
    scale(root, form, {"up_proj": 0.3, "k_proj": 0.5})
    old = raw(root)
    found = {repair.name: repair for repair in reconcile(root, tmp_path / "out").repairs}
    new = raw(tmp_path / "out")
    for name, repair in found.items():
        before, after = (E4M3.values[np.frombuffer(one[f"{name}.weight_scale"], np.uint8)] for one in (old, new))
        stored = [np.frombuffer(one[f"{name}.{SCALE[form]}"], np.float32)[0] for one in (old, new)]
        a, b = ((x * s if form == "modelopt" else x / s) for x, s in zip((before, after), stored, strict=True))
        codes = old[f"{name}.{'weight' if form == 'modelopt' else 'weight_packed'}"]
        used = (np.frombuffer(codes, np.uint8).reshape(a.size, -1) & 0x77).any(axis=1)
        lossy = used & (a != b)
        assert repair.inexact == np.count_nonzero(lossy) and (used.all() or ".experts.3." in name)  # all zeros
        error = np.abs(b[lossy].astype(np.float64) / a[lossy] - 1).max(initial=0)
        assert repair.largest_error == error
        assert (repair.loss == "exact") == (not lossy.any()) == np.isinf(repair.sqnr_db)
    exact = {name.rpartition(".")[2] for name, one in found.items() if one.loss == "exact" and ".3." not in name}
    assert "up_proj" not in exact and {name.rpartition(".")[2] for name in found} >= {"up_proj", "k_proj"}
    assert main(["reconcile", "--dry-run", str(root)]) == 1
    text = capsys.readouterr().out
    assert "products of block and tensor scale change" in text and text.count("exact") == sum(
        one.loss == "exact" for one in found.values()
    )


def test_all_experts_of_a_layer_get_one_scale_on_request(quantized, tmp_path):
    """With --experts, gate and up of all experts are one group, and down is another; nothing else changes."""
    form, root = quantized
    assert reconcile(root, None).repairs == ()  # gate and up of an expert agree, experts do not
    report = reconcile(root, tmp_path / "out", experts=True)
    names = {name for name in stored_scales(root) if ".experts." in name}
    for layer in {name.split(".experts.")[0] for name in names}:
        for leaves in (("gate_proj", "up_proj"), ("down_proj",)):
            own = {name for name in names if name.startswith(layer) and name.endswith(leaves)}
            values = {name: decoded_scale(root, form, name) for name in own}
            bits = {stored_scales(tmp_path / "out")[name] for name in own}
            largest = max(values, key=values.__getitem__)
            assert bits == {stored_scales(root)[largest]} and len(own) == len(leaves) * synthetic.EXPERTS
    changed = {repair.name for repair in report.repairs}
    assert changed < names and {repair.group for repair in report.repairs} >= {
        "model.layers.1.mlp.experts.*.(gate_proj|up_proj)",
        "model.layers.1.mlp.experts.*.down_proj",
    }
    assert reconcile(tmp_path / "out", None, experts=True).repairs == ()
    a, b = decoded(root), decoded(tmp_path / "out")
    assert {name for name in a if a[name].tobytes() != b[name].tobytes()} <= changed
    assert main(["reconcile", "--dry-run", "--experts", str(root), "--quiet"]) == 1


def decoded_scale(root, form, name):
    value = np.frombuffer(stored_scales(root)[name], np.float32)[0]
    return value if form == "modelopt" else 1 / value


def test_the_matrices_of_a_stack_get_one_scale_on_request(tmp_path):
    """Stacks of Model-Optimizer hold one tensor scale per expert; with --experts, it is the same for all."""
    config = {"model_type": "llama4_text", "num_hidden_layers": 1, "num_local_experts": 3}
    declared = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    parts, made = {}, {}
    for leaf, shape in (("gate_up_proj", (128, 64)), ("down_proj", (64, 96))):
        name = f"model.layers.0.feed_forward.experts.{leaf}"
        x = synthetic.random(name, (3, *shape)) * np.float32([[[1]], [[2.5]], [[0.5]]])
        qs = made[name] = [fp4kit.quantize(one, "nvfp4-modelopt") for one in x]
        parts[name] = np.stack([q.packed.T for q in qs])
        parts[f"{name}_weight_scale"] = np.stack([q.block_scale.T for q in qs]).view(synthetic.E4M3)
        parts[f"{name}_weight_scale_2"] = np.array([q.tensor_scale for q in qs], np.float32).reshape(3)
    root = tmp_path / "q"
    synthetic.write_model(root, config | declared, parts)
    assert reconcile(root, None).repairs == ()
    report = reconcile(root, tmp_path / "out", experts=True)
    new, repairs = raw(tmp_path / "out"), {repair.name: repair for repair in report.repairs}
    assert len(repairs) == 4 and report.groups == 2
    for name, qs in made.items():
        scales = parts[f"{name}_weight_scale_2"]
        assert new[f"{name}_weight_scale_2"] == np.full(3, scales[1]).tobytes() and scales.argmax() == 1
        codes = [E4M3.encode(E4M3.values[q.block_scale] * (s / scales[1])) for q, s in zip(qs, scales, strict=True)]
        assert new[f"{name}_weight_scale"] == np.stack([one.T for one in codes]).tobytes()
        for e in (0, 2):
            a, b = E4M3.values[qs[e].block_scale] * scales[e], E4M3.values[codes[e]] * scales[1]
            assert repairs[f"{name}[{e}]"].inexact == np.count_nonzero(a != b) > 0
            assert repairs[f"{name}[{e}]"].group == name
    assert reconcile(tmp_path / "out", None, experts=True).repairs == ()


def apart(root, form, source, recipe="nvfp4-te"):
    """Quantize each part of a fused layer by itself, as a tool does that knows no fused layers."""
    names = {"modelopt": ("weight", "weight_scale_2"), "compressed-tensors": ("weight_packed", "weight_global_scale")}
    for name in shared_amax_groups(stored_scales(root)):
        q = fp4kit.quantize(source[f"{name}.weight"], recipe)
        if not q.tensor_scale or not q.packed.any():
            continue
        scale = q.tensor_scale if form == "modelopt" else np.float32(1) / q.tensor_scale
        change(root, f"{name}.{names[form][0]}", lambda _, q=q: q.packed.reshape(-1), np.uint8)
        change(root, f"{name}.weight_scale", lambda _, q=q: q.block_scale.reshape(-1), np.uint8)
        change(root, f"{name}.{names[form][1]}", lambda x, new=scale: np.full_like(x, new))


def record(root):
    """Write the digests of the present files into a manifest."""
    manifest = json.loads((root / MANIFEST).read_text())
    for name, facts in manifest["files"].items():
        data = (root / name).read_bytes()
        facts |= {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    (root / MANIFEST).write_text(json.dumps(manifest))


@pytest.fixture(params=FORMATS)
def unfused(request, tmp_path):
    """Return (form, directory of a checkpoint whose parts have tensor scales of their own, that of its source)."""
    source = synthetic.moe(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "q", "nvfp4-te", format=request.param)
    apart(tmp_path / "q", request.param, source)
    record(tmp_path / "q")
    return request.param, tmp_path / "q", tmp_path / "in"


def repaired(root, *steps):
    """Reconcile a checkpoint once per step, which says whether experts are joined, and return the last copy."""
    paths = [root, *(root.parent / f"repaired{i}" for i in range(len(steps)))]
    for (before, after), experts in zip(pairwise(paths), steps, strict=True):
        assert reconcile(before, after, experts=experts).repairs
    return paths[-1]


@pytest.mark.parametrize("steps", [(False,), (True,), (False, True)])
@pytest.mark.parametrize("has_manifest", [True, *exhaustive([False])])
def test_verify_repeats_the_repair(unfused, tmp_path, steps, has_manifest):
    """verify quantizes each part by itself and rescales it as reconcile did; the source counts as that of the model."""
    form, root, source = unfused
    if not has_manifest:
        (root / MANIFEST).unlink()
    path = repaired(root, *steps)
    for origin in (source, root if len(steps) == 1 else source):
        report = verify(path, origin)
        assert report.clean and "source file" not in str(report), str(report)
        assert all(layer.compared and not layer.differing for layer in report.layers)
    synthetic.moe(tmp_path / "elsewhere")
    other = next((tmp_path / "elsewhere").glob("*.safetensors"))
    other.rename(other.with_name("other.safetensors"))
    for index in (tmp_path / "elsewhere").glob("*.index.json"):
        index.write_text(index.read_text().replace(other.name, "other.safetensors"))
    texts = [issue.text for issue in verify(path, tmp_path / "elsewhere").issues]
    assert any("not the source file" in text for text in texts) == has_manifest
    listed = {name for step in json.loads((path / MANIFEST).read_text())["reconciled"] for name in step["layers"]}
    name = sorted(listed)[0]
    change(path, f"{name}.weight_scale", lambda x: np.where(np.arange(x.size) == 3, x ^ 1, x), np.uint8)
    change(path, f"{name}.{SCALE[form]}", lambda x: np.nextafter(x, np.float32(9)))
    found = [(issue.subject, issue.count) for issue in verify(path, source).issues if "differ from the" in issue.text]
    assert found == [(name, 1), (name, 1)]


def test_verify_repeats_the_repair_of_layers_that_shared_a_scale(tmp_path):
    """Gate and up of an expert had one tensor scale before all experts got one."""
    synthetic.moe(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "q", "nvfp4-te", format="modelopt")
    assert verify(repaired(tmp_path / "q", True), tmp_path / "in").clean


def test_the_list_of_earlier_manifests(unfused):
    """Earlier versions listed the names of one repair, and gave the repaired model as the source."""
    _, root, source = unfused
    path = repaired(root, False)
    manifest = json.loads((path / MANIFEST).read_text())
    names = manifest["reconciled"][0]["layers"]
    earlier = {"fp4kit_manifest": manifest["fp4kit_manifest"], "files": manifest["files"]}
    earlier |= {"version": "0.2.0", "reconciled": names, "source": manifest["repaired"]}
    (path / MANIFEST).write_text(json.dumps(earlier))
    report = verify(path, source)
    assert report.clean and "source file" not in str(report), str(report)
    for wrong in ({"a": 1}, [1], [{"experts": 1, "layers": []}], [{"experts": True, "layers": [1]}], "x"):
        (path / MANIFEST).write_text(json.dumps(earlier | {"reconciled": wrong}))
        with pytest.raises(CheckpointError, match="reconciled is malformed"):
            verify(path, source)


@pytest.mark.parametrize("all_rows", [False, *exhaustive([True])])
def test_identify_names_the_recipe_of_rescaled_layers(unfused, all_rows):
    """Without the manifest, identify finds that layers were rescaled, and from which recipe's scales."""
    _, root, source = unfused
    path = repaired(root, False)
    names = json.loads((path / MANIFEST).read_text())["reconciled"][0]["layers"]
    (path / MANIFEST).unlink()
    verdict = identify_checkpoint(path, source, all_rows=all_rows)
    assert verdict.is_clean and verdict.recipe == "nvfp4-te", str(verdict)
    assert {layer.name for layer in verdict.layers if layer.explanation.rescaled} == {*names}
    assert f"; {len(names)} layers rescaled to a shared tensor scale" in verdict.sentence
    change(path, f"{names[0]}.weight_scale", lambda x: np.where(np.arange(x.size) < 9, x ^ 1, x), np.uint8)
    assert not identify_checkpoint(path, source).is_clean


def test_a_loss_without_a_changed_block_scale_is_that_of_products(tmp_path, capsys):
    """If tensor scales differ by little, block scales stay, and their products with the tensor scale change."""
    synthetic.dense(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "q", "nvfp4-te", format="modelopt")
    scale(tmp_path / "q", "modelopt", {"up_proj": 0.99})
    assert all(one.changed == 0 < one.inexact for one in reconcile(tmp_path / "q", None).repairs)
    assert main(["reconcile", "--dry-run", str(tmp_path / "q")]) == 1
    text = capsys.readouterr().out
    assert "products of block and tensor scale change, by up to 1.01%" in text and "block scales changed" in text
