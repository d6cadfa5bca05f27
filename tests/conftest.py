"""Set up all tests: reproducible Hypothesis examples, the selection of recipes per run, and shared fixtures."""

import gc
import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from zlib import crc32

# The workers use all processors. Threads of NumPy's matrix library would wait for each other actively, and a norm could
# take 50 times as long. The library reads this variable when NumPy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from exhaustive import USUAL, lot, seldom
from fuzz_faults import engine_away
from host.compiler import require_compiler
from host.libraries import Libraries
from hypothesis import settings
from mpi_processes import require_mpiexec
from specified import compiled_here, needs_specification, specification_everywhere

import fp4kit.cuda.engine  # noqa: F401  # now, while --cov still measures; see pytest_collection
from fp4kit.evidence.golden.golden_set import GoldenSet
from fp4kit.recipes import RECIPES

TESTS = Path(__file__).resolve().parent
settings.register_profile("fp4kit", derandomize=True, deadline=None, max_examples=50, database=None, print_blob=False)
settings.load_profile("fp4kit")


# By default JAX would reserve most of a GPU's memory, which workers and CuPy share.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# PyTorch threads sleep while they wait. If they spun beside the other workers, a 3 s example would take 10 s.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Open MPI's mpiexec refuses to run as root, and tests in a container often do.
os.environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

# The tests start some hundreds of processes. If the environment forbids bytecode files, each process and the next run
# would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


_COMPILERS = {name: os.environ.get(name) for name in ("CC", "CXX")}


def pytest_runtest_setup() -> None:
    """Name the compilers of the user again. In one run, a library had set CXX to gcc, which cannot link C++."""
    for name, command in _COMPILERS.items():
        if command is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = command


def without_waiting(descriptor: int) -> None:
    """Stand in for os.fsync: check the descriptor, but do not wait until the disk has stored the file.

    In a usual run, the tests would wait for the disk about 10,000 times. Commands that tests start call the real fsync.
    """
    os.fstat(descriptor)


os.fsync = without_waiting

# The slowest files, slowest first, so that workers that take one file at a time (--dist loadfile) finish together.
LONG = (
    *("project/test_notebooks", "cuda/test_gpu_search_scales", "cuda/test_gpu_variants", "cuda/test_kernels_compile"),
    *(
        "cuda/test_gpu_fake_quantize",
        "cuda/test_gpu_edges",
        "cuda/test_gpu_cached_calls",
        "cuda/test_mutations_on_host",
    ),
    *("evidence/fuzz/test_run_on_host", "project/test_train_example", "project/test_wrappers"),
    *("training/test_communicators", "project/test_readme"),
)


WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))  # the number of this worker


def pytest_configure(config):
    """Keep the order of pytest_collection_modifyitems.

    xdist's own order would run files with few but slow tests last.
    """
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


class Backwards(pytest.Dir):
    """A folder whose files are collected from the last to the first."""

    def collect(self):
        return reversed([*super().collect()])


def pytest_collect_directory(path, parent):
    """Let every other worker of pytest-xdist collect the tests from the last file to the first.

    In a fresh clone, workers that collect in the same order would all compile every test file. So each of two workers
    compiles half of the files, and reads what the other one has compiled. sort_long_first then restores the order.
    """
    return Backwards.from_parent(parent, path=path) if WORKER % 2 else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Exclude the thousands of collected items from garbage collection, because they live until the end.

    Also stop measuring coverage (--cov) until a test begins that is measured. By now all modules of fp4kit.cuda are
    imported.
    """
    if coverage := coverage_of(session.config):
        coverage.pause()
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def coverage_of(config):
    """Return pytest-cov's control of the measurement, or None without --cov."""
    return getattr(config.pluginmanager.get_plugin("_cov"), "cov_controller", None)


MANY = 12  # a test with more recipes than this takes only some of them in a usual run
# Files whose tests run every recipe in every run.
ALWAYS = ("evidence/golden/test_check", "recipes/test_table", "recipes/test_validate", "cli/test_recipes")


def pytest_addoption(parser):
    parser.addoption(
        "--every-recipe",
        action="store_true",
        help="an exhaustive run takes every test's case of every recipe, and all"
        " cases of GPU tests that run on the CPU",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(config, items):
    """Select the cases that this run takes; see exhaustive.py.

    A usual run takes the common recipes and 1/64 of the others. An exhaustive run takes another 1/64.
    Recipes whose field values all occur in common ones run only in exhaustive runs, with 1/64 of their cases.
    """
    left_out = [*mark_recipes(items), *thin_emulated(items)]
    if left_out and not config.getoption("every_recipe"):
        config.hook.pytest_deselected(items=left_out)
        gone = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in gone]
    sort_long_first(items)


PLAYS = re.compile(r"^(from|import) (on_gpu|host|fp4kit\.cuda)\b|played_gpu", re.MULTILINE)


@cache
def plays(path: Path) -> bool:
    """Return whether a test file runs kernels on the CPU, so that coverage (--cov, pyproject.toml) is measured there.

    The other files add nothing to what is measured, and measuring them would take half as long again.
    """
    return PLAYS.search(path.read_text(encoding="utf-8")) is not None


def mark_recipes(items):
    """Mark as exhaustive the cases whose recipe a usual run leaves out. Return the cases for --every-recipe alone."""
    rare, left_out = seldom(), []
    cases = [(item, recipes_of(item)) for item in items]
    others = Counter(_test_of(item) for item, names in cases if names and rare.isdisjoint(names))
    for item, names in cases:
        is_rare = not rare.isdisjoint(names)
        lots = [0 if name in USUAL else lot(item.originalname, name) for name in names]
        if is_rare:
            item.add_marker(pytest.mark.exhaustive)
            left_out += [item] * all(lots)
        elif names and others[_test_of(item)] > MANY and all(lots):
            item.add_marker(pytest.mark.exhaustive)
            left_out += [item] * (1 not in lots)
    return left_out


def thin_emulated(items):
    """Divide the cases of GPU tests that run on the CPU, which is slow. Return the cases for --every-recipe alone.

    Half of the tests are exhaustive. Of each test, the first usual case, the first exhaustive case and a quarter of the
    others run. The rest runs only with --every-recipe, and on a GPU.
    """
    left_out, known = [], set()
    for item in items:
        if "played_gpu" not in item.fixturenames:
            continue
        case = (_test_of(item), item.get_closest_marker("exhaustive") is None)
        if crc32(item.originalname.encode()) % 2:
            item.add_marker(pytest.mark.exhaustive)
        if case in known and crc32(item.nodeid.encode()) % 4:
            left_out.append(item)
        known.add(case)
    return left_out


@cache
def module_of(path: Path) -> str:
    """Return the path of a test file relative to tests/, without .py, such as "cpu/test_engine"."""
    return path.relative_to(TESTS).with_suffix("").as_posix()


def _test_of(item):
    return item.path, getattr(item, "originalname", None)


def recipes_of(item):
    """Return the recipes among a case's parameters, or an empty list if its test always runs every recipe."""
    if module_of(item.path) in ALWAYS or not hasattr(item, "callspec"):
        return []
    return [case for case in item.callspec.params.values() if isinstance(case, str) and case in RECIPES]


def sort_long_first(items):
    """Sort items by file: the files of LONG first, then the others in their order, or by path in xdist's workers."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.path.parts)
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(module_of(item.path), len(LONG)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Run tests of kernels, and the fixtures that they set up, under the specification; see specified.py.

    Measure the coverage of tests that run kernels on the CPU.
    """
    coverage = coverage_of(item.config) if plays(item.path) else None
    with specification_everywhere() if needs_specification(item) else nullcontext():
        if coverage:
            coverage.resume()
        try:
            return (yield)
        finally:
            if coverage:
                coverage.pause()


@pytest.fixture
def away(monkeypatch):
    """Install and return the engine "away" (fuzz_faults.py), which computes as the specification does."""
    return engine_away(monkeypatch)


@pytest.fixture(params=["specification", "compiled"])
def either_engine(request):
    """Run the test twice: on the specification and on the host's compiled engine."""
    with specification_everywhere() if request.param == "specification" else nullcontext():
        yield request.param


@pytest.fixture(scope="session")
def golden():
    """Return the recorded outputs of producers that are in the package."""
    return GoldenSet.find()


@pytest.fixture(scope="session")
def mpiexec():
    """Return the command, as a list, that starts MPI processes when "-n" and their number follow."""
    return require_mpiexec()


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """Yield the kernels compiled for the CPU, which all modules share that run kernels without a GPU."""
    folder = tmp_path_factory.mktemp("libraries")
    libraries = Libraries(folder, require_compiler(folder))
    yield libraries
    libraries.close()


@pytest.fixture(scope="module")
def played_gpu(request, libraries, golden):
    """Simulate a GPU on the CPU for all tests of a module (on_gpu.py).

    A rehearsal of the module's tests first collects and compiles the kernels that they launch.
    """
    with libraries.playing() as cupy:
        with compiled_here():
            libraries.rehearse(rehearsals(request, {"golden": golden}))
        yield cupy


def rehearsals(request: pytest.FixtureRequest, fixtures: dict[str, object]) -> Iterator[Callable[[], object]]:
    """Yield the module's selected tests as functions without arguments that ignore errors.

    Tests with fixtures other than those given are left out.
    """
    for item in request.session.items:
        if item.module is not request.module or item.get_closest_marker("gpu"):
            continue
        given = fixtures | (item.callspec.params if hasattr(item, "callspec") else {})
        wanted = inspect.signature(item.obj).parameters
        if wanted.keys() <= given.keys():
            yield partial(quietly, item.obj, {name: given[name] for name in wanted})


def quietly(test: Callable[..., object], arguments: dict[str, object]) -> None:
    """Call the test and ignore every error, because a rehearsal computes no results."""
    with suppress(Exception, pytest.skip.Exception, pytest.fail.Exception):
        test(**arguments)
