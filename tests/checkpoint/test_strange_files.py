"""Change one thing in a sound checkpoint: no conversion gives another value in silence, and verify notices the change.

strange_files.py draws the changes. The right values are those of the sound checkpoint. A conversion that gives other
values must refuse the checkpoint, or have a warning that the sound checkpoint does not have.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import oracle
import pytest
import strange_files
from exhaustive import exhaustive

from fp4kit.checkpoint import CheckpointError, execute, make_plan
from fp4kit.checkpoint.verify.verify import verify

FORMATS = ("bf16", "bf16", "compressed-tensors", "modelopt")
SLIGHT = ("by 2", "by 0.5", "by 2^1", "to BF16", "to F16")  # changes that only the source shows
FEW, ALL = 3, 2000 // len(strange_files.SOUND) + 1  # numbers of files per sound checkpoint


def converted(root: Path, form: str) -> tuple[oracle.Loaded, set[str]]:
    """Convert a checkpoint, decode the result, and return its tensors and the warnings of the conversion."""
    out, decoded = root.with_name(f"{root.name} out"), root.with_name(f"{root.name} decoded")
    for path in (out, decoded):
        shutil.rmtree(path, ignore_errors=True)
    plan = make_plan(root, format=form)
    report = execute(plan, out)
    if form != "bf16":
        execute(make_plan(out, format="bf16"), decoded)
    return oracle.load(out if form == "bf16" else decoded), {*plan.warnings, *report.doubts}


def differing(found: oracle.Loaded, right: oracle.Loaded, changed: strange_files.Files) -> list[str]:
    """Return the tensors with other values, and the layers that are gone although their tensors are there."""
    gone = [name for name in right if name not in found and name in changed.tensors]
    return gone + [name for name in right if name in found and found[name] != right[name]]


def issues(root: Path, source: Path | None = None) -> set[tuple[str, str, str]]:
    """Return what verify says about a checkpoint."""
    try:
        return {(issue.severity, issue.subject, issue.text) for issue in verify(root, source).issues}
    except CheckpointError as error:
        return {("error", "refused", str(error))}


@pytest.mark.parametrize("seeds", [range(FEW), *exhaustive([range(FEW, ALL)])], ids=["few", "all"])
@pytest.mark.parametrize("name", strange_files.SOUND)
def test_no_silent_value(tmp_path: Path, name: str, seeds: range) -> None:
    files = strange_files.sound(name, tmp_path)
    sound, root = tmp_path / "sound", tmp_path / "strange"
    source = strange_files.source_of(name, tmp_path) if name in strange_files.CONVERTED else None
    files.write(sound)
    usual: dict[str, tuple[oracle.Loaded, set[str]]] = {}
    known, silent = {True: issues(sound, source), False: issues(sound)}, []
    for seed in seeds:
        changed, what = strange_files.strange(files, seed)
        form = FORMATS[seed // len(strange_files.CHANGES) % len(FORMATS)]
        if form not in usual:
            try:
                usual[form] = converted(sound, form)
            except CheckpointError:  # a format that cannot hold this checkpoint
                form = "bf16"
                usual.setdefault(form, converted(sound, form))
        right, warnings = usual[form]
        shutil.rmtree(root, ignore_errors=True)
        changed.write(root)
        try:
            found, said = converted(root, form)
        except CheckpointError:
            continue
        wrong = differing(found, right, changed)
        if wrong and not said - warnings and not what.endswith(SLIGHT):
            silent.append(f"{seed} to {form}: {what}: {wrong[:3]}")
        errors = {i for i in issues(root, source) - known[True] if i[0] == "error"} if wrong and source else set()
        if wrong and source and "cast" not in what and not errors:
            silent.append(f"{seed} verified with the source: {what}: {wrong[:3]}")
        if wrong and not issues(root) - known[False] and not what.endswith(SLIGHT):
            silent.append(f"{seed} verified alone: {what}: {wrong[:3]}")
    assert not silent, "\n".join(silent)
