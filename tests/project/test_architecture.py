"""Test the structure of the package: layers, quick imports, lazy properties, and the limits of tools/house.py."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import threading
from functools import cache

import pytest
from package_modules import FILES, MODULES, PACKAGE, ROOT, module_name
from together import together
from tool_module import tool_module

import fp4kit
from fp4kit.formats import ElementFormat
from fp4kit.lazy import lazy_property

# A module or package may import from the layers above its own and from its own package. "fp4kit" stands for
# fp4kit/__init__.py.
LAYERS = (
    {"startup"},
    {"arguments", "arithmetic", "lazy", "types"},
    {"formats", "units"},
    {"recipes"},
    {"reference"},
    {"arrays"},
    {"layouts"},
    {"quantized"},
    {"display", "storage"},
    {"call"},
    {"host"},
    {"cuda"},
    {"cpu"},
    {"ops"},
    {"training"},
    {"attention", "calibration"},
    {"contract"},
    {"fp4kit"},
    {"checkpoint", "evidence", "testing"},
    {"qat"},
    {"torch", "jax", "plot"},
    {"cli"},
    {"__main__"},
)
LAYER = {name: i for i, layer in enumerate(LAYERS) for name in layer}


@cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(node):
    """Yield all statements below a node. Unlike ast.walk, this does not visit expressions, which are most nodes."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, name, ()):
            yield child
            yield from statements(child)


@cache
def imported_modules(path):
    """Return the modules of fp4kit that a file imports; see found_imports."""
    return tuple(found_imports(path))


def found_imports(path):
    """Yield the modules of fp4kit that a file imports, at its top or inside functions."""
    for node in statements(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "fp4kit")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module.split(".")[0] == "fp4kit":
                for alias in node.names:
                    submodule = f"{node.module}.{alias.name}"
                    yield submodule if submodule in MODULES else node.module


def part(module):
    """Return the entry of LAYERS for a module: its top-level package or module in fp4kit, such as "ops"."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


@together("module", MODULES)
def test_imports_point_one_way(module):
    assert part(module) in LAYER, f"{module} has no layer: add it to LAYERS"
    for other in imported_modules(MODULES[module]):
        assert other in MODULES, f"{module} imports {other}, which does not exist"
        assert part(other) == part(module) or LAYER[part(other)] < LAYER[part(module)], f"{module} imports {other}"


def test_contributing_lists_every_part_of_the_package():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    missing = {name for name in LAYER if f"`{name}/`" not in text and f"`{name}.py`" not in text}
    assert missing == {"__main__"}


ENGINES = ("fp4kit.cpu", "fp4kit.cuda", "fp4kit.host")
DISPATCHERS = {
    "fp4kit.ops.engines",
    "fp4kit.ops.explain",
    "fp4kit.ops.identify",
}  # identify and explain compute on the host only


@together("module", [name for name in MODULES if part(name) in ("ops", "training")])
def test_the_engine_is_chosen_in_one_place(module):
    """No module of fp4kit.ops and fp4kit.training except DISPATCHERS imports an engine or tests the type of an array.

    The others leave the choice to ops/engines.py, which follows what the parsed call says about devices.
    """
    imported = {other for other in imported_modules(MODULES[module]) if other.startswith(ENGINES)}
    assert not imported or module in DISPATCHERS, imported
    if part(module) == "ops":
        text = MODULES[module].read_text(encoding="utf-8")
        assert not re.search(r"isinstance\([^)]*np\.ndarray", text), "call fp4kit.arrays.imports.on_device"


def test_imports_have_no_cycles():
    graph = {module: set(imported_modules(MODULES[module])) - {module} for module in MODULES}
    graph = {
        module: {other for other in others if other != module.rpartition(".")[0]} for module, others in graph.items()
    }
    while graph:
        leaves = {module for module, others in graph.items() if not others & graph.keys()}
        assert leaves, f"a cycle among {sorted(graph)}"
        graph = {module: others for module, others in graph.items() if module not in leaves}


def top_level_imports(path):
    """Yield the names of the packages that importing a file imports."""
    for node in tree(path).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


@together("path", FILES, ids=module_name)
def test_optional_packages_are_imported_when_they_are_needed(path):
    imported = {"cuda": {"cupy", "cupy_backends"}, "torch": {"torch"}, "jax": {"jax"}, "evidence": {"hypothesis"}}
    allowed = imported.get(part(module_name(path)), set())
    optional = {"cupy", "cupy_backends", "gguf", "jax", "matplotlib", "mpi4py", "torch", "pytest", "hypothesis"}
    assert set(top_level_imports(path)) & optional <= allowed


def run(code):
    """Run Python code in a new process in the root of the checkout. Return the words that it prints."""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return result.stdout.split()


def test_importing_fp4kit_is_light():
    """Importing fp4kit imports no optional package, and not the CUDA engine, which the first array on a GPU imports."""
    heavy = {"cupy", "torch", "jax", "rich", "matplotlib", "mpi4py", "scipy", "pytest", "fp4kit.cuda"}
    assert not heavy & set(run("import sys, fp4kit; print(*sys.modules)"))


@pytest.mark.parametrize(
    ("start", "most", "packages"),
    [
        ("import fp4kit", 66, {"fp4kit", "ml_dtypes", "numpy"}),
        ("from fp4kit.cli import main; main(['--help'])", 71, {"fp4kit", "ml_dtypes", "numpy", "rich", "safetensors"}),
    ],
)
def test_few_modules_are_imported_at_the_start(start, most, packages):
    """Importing fp4kit and `fp4kit --help` take at most 0.25 s beyond NumPy's import.

    On two cores of an AMD EPYC they take 0.07 s and 0.09 s beyond it (the smallest of 20 runs, November 2026). The test
    counts modules, because other work on the machine changes times.
    """
    code = f"import sys; before = {{*sys.modules}}\n{start}\nprint('modules', *({{*sys.modules}} - before))"
    words = run(code)
    found = words[len(words) - words[::-1].index("modules") :]
    assert len([name for name in found if name.partition(".")[0] == "fp4kit"]) <= most
    third_party = {name.partition(".")[0] for name in found} - sys.stdlib_module_names
    assert third_party <= packages


@together("path", FILES, ids=module_name)
def test_no_attribute_is_computed_under_a_lock(path):
    """No module imports functools.cached_property; fp4kit.lazy replaces it.

    In Python 3.10 and 3.11, cached_property holds a lock, which a forked process could inherit in the locked state.
    """
    names = {alias.name for node in ast.walk(tree(path)) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert "cached_property" not in names


def test_the_public_api():
    assert sorted(fp4kit.__all__) == fp4kit.__all__
    for name in fp4kit.__all__:
        assert getattr(fp4kit, name).__doc__, name
    assert re.fullmatch(r"\d+\.\d+\.\d+", fp4kit.__version__)
    assert f'version = "{fp4kit.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@together("path", FILES, ids=module_name)
def test_no_environment_variable_changes_a_result(path):
    """The package reads no environment variable, with two exceptions.

    The documented flags of fake-quantized training are read if the caller asks for them by name. The number of threads
    is set for worker processes and read by the compiled engine, whose results do not depend on it.
    """
    if path.relative_to(PACKAGE).as_posix() not in (
        "training/settings.py",
        "checkpoint/executors.py",
        "cpu/library.py",
    ):
        assert not re.search(r"os\.environ|\bgetenv|from os import .*environ", path.read_text(encoding="utf-8"))


def test_the_compiled_engine_reads_the_number_of_threads_alone():
    text = (PACKAGE / "cpu" / "library.py").read_text(encoding="utf-8")
    assert re.findall(r"(?:environ|getenv).*", text) == ['environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()']


@together("path", FILES, ids=module_name)
def test_kernels_are_compiled_in_one_place(path):
    """Only cuda/compiler.py compiles, through the binding cuda/compiler.py."""
    place = path.relative_to(PACKAGE).as_posix()
    if place not in ("cuda/compiler.py", "cuda/compiler.py"):
        compiles = r"\b(RawModule|RawKernel|ElementwiseKernel|ReductionKernel|cupy\.fuse|cupyx\.jit|nvrtc)\b"
        kinds = (ast.Attribute, ast.Name, ast.Import, ast.ImportFrom)
        code = "\n".join(ast.unparse(node) for node in ast.walk(tree(path)) if isinstance(node, kinds))
        assert not re.search(compiles, code)


def test_typing_marker():
    assert (PACKAGE / "py.typed").is_file()


class Counting:
    def __init__(self):
        self.calls = 0

    @lazy_property
    def value(self):
        """Its explanation."""
        self.calls += 1
        return [self.calls]


def test_a_lazy_property_is_computed_once():
    one, other = Counting(), Counting()
    assert one.value is one.value and one.calls == 1 and other.calls == 0
    assert vars(one)["value"] == [1]
    assert isinstance(Counting.value, lazy_property) and Counting.value.__doc__ == "Its explanation."


def test_threads_that_meet_get_one_value():
    """Two threads that compute the value at once both finish and get one object.

    Each thread waits inside the method until the other has entered it, which a lock would prevent.
    """
    meeting = threading.Barrier(2)

    class Meeting:
        @lazy_property
        def value(self):
            meeting.wait(10)
            return object()

    shared, found = Meeting(), []
    threads = [threading.Thread(target=lambda: found.append(shared.value)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] is found[1]


def test_formats_keep_their_arrays():
    f = ElementFormat("F", 3, 2, 3)
    assert f.midpoints is f.midpoints and f.values is f.values


@pytest.mark.exhaustive
def test_limits() -> None:
    house = tool_module("house")
    found = house.counts()
    above = {name: found[name] for name, (limit, _) in house.LIMITS.items() if found[name] > limit}
    assert not above, "tools/house.py counts more than its limits: take something away, or argue for more"
