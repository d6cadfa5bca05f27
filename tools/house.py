"""Count what a reader of the package has to read, and compare the counts with LIMITS.

    python tools/house.py            print them
    python tools/house.py entered    print which files a call enters, as JSON

A line of code is a line with a token that is no comment and no docstring; in C++ and CUDA, a line that is no comment.
Texts are docstrings and comments. Imports are counted by lines. A call enters a file if it executes a function of it.
"""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Count -> (limit; goal). A limit goes down, and up only by what a new capability needs.
LIMITS: dict[str, tuple[float, float]] = {
    "code lines of the package": (72450, 52000),
    "Python modules": (206, 200),
    "Python modules in one folder": (15, 15),
    "import lines": (3945, 3300),
    "texts per code line": (0.36, 0.38),
    "docstring lines of private functions": (1940, 2500),
    "code lines of tests": (62850, 42000),
    "files entered by the first quantize": (10, 10),
    "files entered by the first dequantize": (12, 11),
    "files entered by the first matmul": (11, 9),
    "files entered by quantize, specification": (12, 12),
    "files entered by a conversion": (41, 40),
    "files entered by a verification": (41, 40),
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT)


def files(folder: str, *endings: str) -> list[Path]:
    """Return the files of a folder that git tracks or does not ignore, and whose names have one of the endings."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", folder]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [ROOT / name for name in names if name.endswith(endings) and (ROOT / name).exists()]


def docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST, range]]:
    """Yield (node, lines) of every docstring."""
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            yield node, range(text.lineno, (text.end_lineno or text.lineno) + 1)


def count_python(source: str) -> Counter[str]:
    """Count the lines of a Python file: "code", "texts", "private docstrings" and "imports"."""
    tree, found = ast.parse(source), Counter[str]()
    texts: set[int] = set()
    for node, lines in docstrings(tree):
        texts |= {*lines}
        name = getattr(node, "name", "")
        if not isinstance(node, ast.ClassDef) and name.startswith("_") and not name.startswith("__"):
            found["private docstrings"] += len(lines)
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        if token.type not in _LAYOUT:
            code |= {*range(token.start[0], token.end[0] + 1)} - texts
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    found["imports"] = sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in imports)
    found["code"], found["texts"] = len(code), len(texts) + len(comments - code)
    return found


def count_cpp(source: str) -> Counter[str]:
    """Count the lines of a C++ or CUDA file: "code" and "texts"."""
    found, inside = Counter[str](), False
    for line in filter(None, map(str.strip, source.splitlines())):
        comment = inside or line.startswith(("//", "/*"))
        inside = (inside or line.startswith("/*")) and "*/" not in line
        found["texts" if comment else "code"] += 1
    return found


def entered() -> dict[str, list[str]]:
    """Return the files of the package that calls enter in this process, by the names in LIMITS."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    import fp4kit
    import fp4kit.checkpoint
    from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify

    found: dict[str, set[str]] = {}

    def count(name: str, call: Callable[[], Any]) -> Any:
        files = found.setdefault(f"files entered by {name}", set())
        sys.setprofile(lambda frame, event, argument: event == "call" and files.add(frame.f_code.co_filename))
        try:
            return call()
        finally:
            sys.setprofile(None)

    fp4kit.engine()  # load the compiled library
    x = np.ones((64, 4096), np.float32)
    q = count("the first quantize", lambda: fp4kit.quantize(x, "nvfp4-te"))
    count("the first dequantize", lambda: fp4kit.dequantize(q))
    count("the first matmul", lambda: fp4kit.matmul(q, q))
    with fp4kit.specification():
        count("quantize, specification", lambda: fp4kit.quantize(x, "nvfp4-te"))
    w = np.ones((64, 64), ml_dtypes.bfloat16)
    layers = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    tensors = {"model.embed_tokens.weight": w, **dict.fromkeys(layers, w), "model.norm.weight": w[0]}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "source"), Path(folder, "result")
        source.mkdir()
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
        count("a conversion", lambda: fp4kit.checkpoint.convert(source, result, "nvfp4-te"))
        count("a verification", lambda: verify(result, source))
    package = str(ROOT / "fp4kit")
    return {name: sorted(file for file in files if file.startswith(package)) for name, files in found.items()}


def entered_in_a_new_process() -> dict[str, list[str]]:
    """Return entered() of a process in which nothing is cached yet."""
    command = [sys.executable, __file__, "entered"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(result.stdout)
    return found


def counts() -> dict[str, float]:
    """Return the counts by the names in LIMITS."""
    modules = files("fp4kit", ".py")
    package = sum((count_python(path.read_text(encoding="utf-8")) for path in modules), Counter[str]())
    kernels = files("fp4kit", ".cu", ".cuh", ".h", ".cpp", ".inc")
    package += sum((count_cpp(path.read_text(encoding="utf-8")) for path in kernels), Counter[str]())
    tests = sum((count_python(path.read_text(encoding="utf-8")) for path in files("tests", ".py")), Counter[str]())
    return {
        "code lines of the package": package["code"],
        "Python modules": len(modules),
        "Python modules in one folder": max(Counter(path.parent for path in modules).values()),
        "import lines": package["imports"],
        "texts per code line": round(package["texts"] / package["code"], 3),
        "docstring lines of private functions": package["private docstrings"],
        "code lines of tests": tests["code"],
        **{name: len(files) for name, files in entered_in_a_new_process().items()},
    }


def main() -> int:
    """Print the counts beside their limits and goals, or entered() as JSON.

    Return 1 if a count is above its limit, otherwise 0.
    """
    if sys.argv[1:] == ["entered"]:
        print(json.dumps(entered()))
        return 0
    found = counts()
    print(f"{'':44}{'now':>10}{'limit':>10}{'goal':>10}")
    for name, (limit, goal) in LIMITS.items():
        print(f"{name:44}{found[name]:>10,}{limit:>10,}{goal:>10,}{'  above the limit' * (found[name] > limit)}")
    return int(any(found[name] > limit for name, (limit, _) in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
