"""List the Python files and modules of fp4kit, for tests that check each of them."""

from pathlib import Path

import fp4kit

ROOT = Path(fp4kit.__file__).resolve().parent.parent
PACKAGE = ROOT / "fp4kit"
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path):
    """Return the module name of a Python file of the package: "fp4kit.ops.check" for fp4kit/ops/check.py.

    For the __init__.py of a package, return the name of the package.
    """
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}
