"""Copy the recordings and licenses of the clone into this folder, then build fp4kit-evidence. Its source distribution
already contains the copies.
"""

import shutil
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORDED = ROOT / "fp4kit" / "evidence" / "recorded"

if RECORDED.is_dir():
    package = HERE / "fp4kit_evidence"
    for path in package.glob("*.npz"):
        path.unlink()
    for path in RECORDED.iterdir():
        shutil.copy(path, package)
    for name in ("LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, HERE)
setup()
