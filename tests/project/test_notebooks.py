"""Test that notebooks run in a new kernel without errors and warnings, and print the outputs that are stored in them.

`PYTHONPATH=tests/support python tests/project/test_notebooks.py` runs each notebook and stores the new outputs.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from exhaustive import exhaustive

from fp4kit.checkpoint.convert import demo

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
TIMEOUT = 300  # seconds per notebook
# Absolute paths: /name/... or a drive letter, but not the slash of 16/32, https://name/ or </tag>.
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/<)])/[A-Za-z_][\w.-]*/|\b[A-Za-z]:\\")


def run_notebook(source: Path, target: Path) -> None:
    """Execute the notebook `source` in a new kernel, and write it with its outputs to `target`.

    Raises CellExecutionError at the first error.
    """
    import matplotlib.font_manager  # noqa: F401  # builds the font cache now: a slow first import warns in the notebook
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(source, as_version=4)
    NotebookClient(
        notebook, kernel_name="python3", timeout=TIMEOUT, record_timing=False, coalesce_streams=True
    ).execute()
    notebook.metadata = METADATA  # the kernel would add its own version
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        if "image/png" in output.get("data", {}):
            output["data"]["image/png"] = compact(output["data"]["image/png"])
    nbformat.validate(notebook)
    nbformat.write(notebook, target)


def compact(png: str) -> str:
    """Return a picture with at most 64 colors, which takes a third of the bytes. Both are PNG files in base64."""
    from PIL import Image

    target = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    picture.quantize(64, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(target, "PNG", optimize=True)
    return base64.b64encode(target.getvalue()).decode()


def run_in_subprocess(source: Path, target: Path, work: Path) -> None:
    """Run run_notebook in a new process, because pytest's filters would turn warnings of the event loop into errors.

    The kernel imports this checkout, starts in the empty folder `work`, and reads no settings of the user.
    NumPy's matrix products use one thread, which takes a tenth of the processor time for small matrices.
    """
    kept = {
        name: value for name, value in os.environ.items() if name != "MPLBACKEND" and not name.startswith("JUPYTER")
    }
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "tests" / "support"), kept.get("PYTHONPATH"))))
    own = {name: str(work / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")}
    command = [sys.executable, __file__, str(source), str(target)]
    result = subprocess.run(
        command,
        cwd=work,
        env={**kept, **own, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise RuntimeError(f"{source.name} does not run:\n{result.stderr[-4000:]}")


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def texts(cell: dict[str, Any]) -> list[str]:
    """Return all texts in the outputs of a cell; an image counts as the name of its type."""
    found = []
    for output in cell["outputs"]:
        found += ["".join(output[key]) for key in ("text", "evalue", "traceback") if key in output]
        for kind, data in sorted(output.get("data", {}).items()):
            found.append(kind if kind.startswith("image/") else "".join(data))
    return found


NAMES = [path.stem for path in NOTEBOOKS]
RUNS = exhaustive(NAMES)  # starting a kernel is slow
DEMO = (demo.MODULE, demo.PACKAGE)
NEEDS = {"02-training": ("torch", "torch"), "05-real-model": DEMO, "11-every-producer": DEMO}  # module, package


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_notebook_is_a_clean_run(notebook):
    """Each stored notebook was run once from top to bottom, without errors or output to stderr.

    It contains no path of the machine that ran it, and the usual metadata.
    """
    stored = load(notebook)
    cells = code_cells(stored)
    assert stored["metadata"] == METADATA
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell["outputs"] for cell in cells)
    for cell in stored["cells"]:
        outputs = cell.get("outputs", [])
        assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"], cell["id"]
        for text in ["".join(cell["source"]), *(texts(cell) if outputs else [])]:
            assert not ABSOLUTE_PATH.search(text), (cell["id"], text)
    assert notebook.stat().st_size < 300_000


def test_every_notebook_is_listed_with_the_guides():
    page = (ROOT / "docs" / "guides" / "notebooks.md").read_text(encoding="utf-8")
    assert re.findall(r"notebooks/([\w-]+)\.ipynb\)", page) == [path.stem for path in NOTEBOOKS]


@pytest.mark.parametrize("name", RUNS)
def test_fresh_run_prints_what_is_stored(name, tmp_path):
    """A new run gives no error, nothing on stderr, and the stored texts.

    For figures, only their presence is compared.
    """
    if name in NEEDS:
        module, package = NEEDS[name]
        if importlib.util.find_spec(module) is None:  # faster than an import of torch
            pytest.skip(f"{package} is not installed")
    notebook = ROOT / "notebooks" / f"{name}.ipynb"
    run_in_subprocess(notebook, tmp_path / notebook.name, tmp_path)
    fresh = load(tmp_path / notebook.name)
    for cell, stored in zip(code_cells(fresh), code_cells(load(notebook)), strict=True):
        assert not [o for o in cell["outputs"] if o.get("name") == "stderr"], (cell["id"], texts(cell))
        assert texts(cell) == texts(stored), (
            f"cell {cell['id']} is stale; `PYTHONPATH=tests/support python tests/project/test_notebooks.py` stores new"
            " outputs"
        )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        run_notebook(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        import tempfile

        for path in NOTEBOOKS:
            with tempfile.TemporaryDirectory() as folder:
                run_in_subprocess(path, path, Path(folder))
            print(f"stored {path.name}")
