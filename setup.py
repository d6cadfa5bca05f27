"""The compiled host engine (fp4kit/cpu), for Linux and macOS; where it cannot be compiled, fp4kit installs without it."""

import platform
import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup

CPU = Path("fp4kit") / "cpu"
# No fused multiply-adds: a product is rounded where the rules round it. The others keep values, and let loops become vectors.
FLAGS = ["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-w"]
LEVELS = {"base": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    LEVELS |= {"avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"]}


def extension(level: str, flags: list[str]) -> Extension:
    """The engine for one level of a processor: a library with C functions, which fp4kit.cpu.native loads; no Python module."""
    digest = runpy.run_path(str(CPU / "digest.py"))["digest"]()
    return Extension(
        f"fp4kit.cpu._{level}",
        [str(CPU / "source" / f"{level}.cpp")],
        extra_compile_args=[*FLAGS, *flags, f'-DFP4KIT_DIGEST="{digest}"'],
        extra_link_args=["-pthread"],
        optional=True,
        depends=[str(path) for path in (*(CPU / "source").iterdir(), *Path("fp4kit/cuda/kernels/rules").iterdir())],
    )


supported = sys.platform.startswith(("linux", "darwin"))
setup(ext_modules=[extension(*level) for level in LEVELS.items()] if supported else [], options={"build_ext": {"parallel": 3}})
