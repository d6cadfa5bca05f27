"""Build fp4kit, with its compiled CPU engine (fp4kit/cpu) on Linux and macOS.

If the engine cannot be compiled, fp4kit installs as pure Python. A *level* is a set of processor features: base, avx2
or avx512. Each level is compiled to its own library. The environment variable FP4KIT_CPU_LEVELS names the levels to
compile: "native" (the default), "all", "none", or names of LEVELS separated by commas.
"""

import hashlib
import os
import platform
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

CPU = Path("fp4kit") / "cpu"
# The source files, those that compile slowest first.
SOURCES = [str(CPU / "source" / f"{name}.cpp") for name in ("elements", "rules", "decoders", "c_api")]
# -ffp-contract=off: no fused multiply-add, because the rules say where a product is rounded. The two -fno-*-math flags
# change no result and let the compiler vectorize loops.
FLAGS = ["-std=c++17", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-w"]
# Undo -fwrapv of Python's own flags, which makes decoding 8-bit codes 10% slower. No signed integer sum overflows here.
FLAGS += ["-fno-wrapv"]
PEEL = "-fpeel-loops"  # elements.cpp does without it: it would make a wheel 1% larger, and nothing faster
# With g++, these flags compile in half the time of -O3 (a quarter for avx512), and the libraries are as fast (g++ 12,
# November 2026).
OPTIMIZATION = [
    "-O2",
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    PEEL,
    "-fsplit-loops",
    "-fpredictive-commoning",
]
OPTIMIZATION += ["-ftree-partial-pre", "-fgcse-after-reload", "-fipa-cp-clone"]
# The flags for base beside a higher level. Only processors without AVX2, from before 2013, then run base, so it may be
# slow. It compiles in less than half the time, and takes a third of the space in a wheel.
SUBSTITUTE = ["-O1"]
# Further flags for c_api.cpp, which make calls up to 5% faster. Other files gain nothing from them.
ENGINE = ["-funswitch-loops", "-fsplit-paths"]
# Files other than c_api.cpp throw and catch nothing. Their tables for exceptions would make a wheel 2% larger.
PLAIN = ["-fno-exceptions", "-fno-asynchronous-unwind-tables"]
REQUESTED = os.environ.get("FP4KIT_CPU_LEVELS", "")  # see chosen_levels
OBJECTS = os.environ.get("FP4KIT_OBJECTS", "")  # a folder of object files that several builds share, or ""
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
LEVELS = {"base": []}
# Features that a processor needs for a level. fp4kit_level in source/c_api.cpp checks the same features.
FEATURES = {"avx2": {"avx2", "fma", "bmi2"}, "avx512": {"avx512bw", "avx512vl", "avx512dq", "avx512cd"}}
if IS_X86:
    LEVELS |= {"avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"]}


def chosen_levels(text: str) -> list[str]:
    """Return the levels to compile, from the value of FP4KIT_CPU_LEVELS. Unless the list is empty ("none"), it contains
    base, because the base library finds out which level the processor supports.
    """
    names = {name.strip() for name in text.split(",")} - {""} or {"native"}
    if unknown := names - {"native", "all", "none", *LEVELS}:
        sys.exit(
            f"FP4KIT_CPU_LEVELS: unknown {', '.join(sorted(unknown))}; known here: native, all, none,"
            f" {', '.join(LEVELS)}"
        )
    if names == {"none"}:
        return []
    if "all" in names:
        return [*LEVELS]
    if "native" in names:
        names |= native_levels()
    return [level for level in LEVELS if level == "base" or level in names]


def native_levels() -> set[str]:
    """Return the highest level that this machine's processor supports, or all levels if it cannot be determined."""
    features = features_of_processor() if IS_X86 else {""}
    if not features:
        return {*LEVELS}
    level = "base"
    for name in [*LEVELS][1:]:
        if not FEATURES[name] <= features:
            break
        level = name
    return {level}


def features_of_processor() -> set[str]:
    """Return the processor's feature names in lower case, or an empty set if the system does not list them."""
    try:
        if sys.platform == "darwin":
            command = ["sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features"]
            return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.lower().split())
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return set(next((line for line in lines if line.startswith("flags")), "").split())
    except (OSError, subprocess.SubprocessError):
        return set()


def extension(level: str) -> Extension:
    """Return the extension that builds the engine for one level. It is a C library that fp4kit.cpu.library loads, not a
    Python module.
    """
    digest = runpy.run_path(str(CPU / "source_digest.py"))["digest"]()
    return Extension(
        f"fp4kit.cpu._{level}",
        SOURCES,
        language="c++",
        extra_compile_args=[*FLAGS, *LEVELS[level], f'-DFP4KIT_DIGEST="{digest}"'],
        extra_link_args=["-pthread", "-Wl,-x" if sys.platform == "darwin" else "-s"],  # no names of local symbols
        optional=True,
        depends=[
            str(path)
            for path in (*(CPU / "source").iterdir(), *Path("fp4kit/cuda/kernels/rules").iterdir())
            if path.suffix != ".md"
        ],
    )


class BuildEngine(build_ext):
    """Compile the sources of all levels in parallel, then link each level."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the path of a library, without the tag of a Python version: the library is not a Python module."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extensions(self) -> None:
        """Compile and link the levels whose library is stale."""
        self.parallel = None
        stale = [one for one in self.extensions if self.force or self.is_stale(one)]
        if not stale:
            return super().build_extensions()
        start, cores = time.monotonic(), cores_of_process()
        levels = ", ".join(one.name.rpartition("_")[2] for one in stale)
        say(f"compiling the CPU engine for {levels}: {len(SOURCES) * len(stale)} files on {cores} cores")
        optimization = self.optimization()
        is_alone = len(self.extensions) == 1
        self.objects: dict[str, list[Future[list[str]]]] = {one.name: [] for one in stale}
        with ThreadPoolExecutor(cores) as pool:
            for source in SOURCES:
                for one in stale:
                    flags = optimization if is_alone or not one.name.endswith("._base") else SUBSTITUTE
                    self.objects[one.name].append(pool.submit(self.compiled, one, source, flags))
        super().build_extensions()
        failed = any(future.exception() for futures in self.objects.values() for future in futures)
        say(
            "the CPU engine, or one of its levels, could not be compiled; fp4kit works without it, but slower"
            if failed
            else f"compiled in {time.monotonic() - start:.0f} s"
        )

    def is_stale(self, one: Extension) -> bool:
        """Return True if the library of a level is missing or older than its sources."""
        return newer_group([*one.sources, *one.depends], self.get_ext_fullpath(one.name), "newer")

    def optimization(self) -> list[str]:
        """Return the flags in OPTIMIZATION, or -O3 if the compiler (such as clang) does not support these flags."""
        compiler = getattr(self.compiler, "compiler_so_cxx", self.compiler.compiler_so)
        with tempfile.TemporaryDirectory() as folder:
            command = [
                *compiler,
                *OPTIMIZATION,
                *ENGINE,
                "-x",
                "c++",
                "-c",
                os.devnull,
                "-o",
                str(Path(folder) / "empty.o"),
            ]
            try:
                known = subprocess.run(command, capture_output=True).returncode == 0
            except OSError:
                known = False  # no compiler is installed; compiled() reports that
        return OPTIMIZATION if known else ["-O3"]

    def compiled(self, one: Extension, source: str, optimization: list[str]) -> list[str]:
        """Compile one source file for a level, and return the names of its object files."""
        folder = Path(self.build_temp) / one.name
        (folder / source).parent.mkdir(parents=True, exist_ok=True)
        if source.endswith("elements.cpp"):
            optimization = [flag for flag in optimization if flag != PEEL]
        if not source.endswith("c_api.cpp"):
            optimization = [*optimization, *PLAIN]
        elif optimization is OPTIMIZATION:
            optimization = [*OPTIMIZATION, *ENGINE]
        options = [*optimization, *one.extra_compile_args]
        compiler = getattr(self.compiler, "compiler_so_cxx", self.compiler.compiler_so)
        if not OBJECTS or shutil.which(compiler[0]) is None:
            return self.compiler.compile([source], output_dir=str(folder), extra_postargs=options)
        # The options contain the digest of all sources.
        version = subprocess.run([compiler[0], "--version"], capture_output=True, text=True).stdout
        key = hashlib.sha256("\0".join([*compiler, version, source, *options]).encode()).hexdigest()
        shared = Path(OBJECTS) / f"{key}.o"
        if not shared.exists():
            (made,) = self.compiler.compile([source], output_dir=str(folder), extra_postargs=options)
            shared.parent.mkdir(parents=True, exist_ok=True)
            os.replace(shutil.copy(made, f"{shared}.{os.getpid()}"), shared)
        return [str(shared)]

    def build_extension(self, one: Extension) -> None:
        """Link the object files of a level. Compilation errors are raised here, because setuptools handles them
        here.
        """
        path = self.get_ext_fullpath(one.name)
        if one.name not in getattr(self, "objects", {}):
            return
        objects = [name for future in self.objects[one.name] for name in future.result()]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, path, extra_postargs=one.extra_link_args, target_lang="c++")


class EngineWheel(bdist_wheel):
    """Tag the wheel for every Python 3, and for this platform only if it contains a library."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags: py3-none-<platform>, or py3-none-any if no library was compiled."""
        folder = Path(self.bdist_dir or "") / CPU
        return "py3", "none", super().get_tag()[2] if any(folder.glob("_*.so")) else "any"


def cores_of_process() -> int:
    """Return the number of processor cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def say(text: str) -> None:
    """Print a message. pip shows it only with -v."""
    print(f"fp4kit: {text}", flush=True)


if __name__ == "__main__":
    supported = sys.platform.startswith(("linux", "darwin"))
    levels = chosen_levels(REQUESTED) if supported else []
    setup(
        ext_modules=[extension(level) for level in levels],
        cmdclass={"build_ext": BuildEngine, "bdist_wheel": EngineWheel},
    )
