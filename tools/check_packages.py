"""Build what a release consists of, and check it: sizes, metadata, tags, contents, installation without a compiler.

    python tools/check_packages.py [--all-levels] [--into DIRECTORY]

Needs the extra `release`. By default, the wheel has the engine of this processor only, which compiles in 20 s. With
--all-levels, it is the wheel of a release.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"fp4kit": 5_000_000, "fp4kit-evidence": 17_000_000, "selection": 1_050_000, "sdist": 30_000_000}  # bytes
SECONDS = 10  # to install the wheel and its dependencies, without downloads; or 2.5 times NumPy's own time
NEEDED = ("tests/conftest.py", "fp4kit/evidence/recorded/te.npz", "fp4kit/cpu/source/c_api.cpp", "packaging/README.md")


def run(*command: str | Path, **options: object) -> str:
    """Run a command in ROOT and return its output; exit with its output if it fails."""
    result = subprocess.run(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **{"cwd": ROOT, **options}
    )  # type: ignore[call-overload]
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit code {result.returncode}\n{result.stdout}")
    return str(result.stdout)


START = time.monotonic()


def check(is_right: bool, text: str) -> None:
    """Print a line; exit if it says what is wrong."""
    print(f"{time.monotonic() - START:4.0f} s {'ok:' if is_right else 'WRONG:'} {text}", flush=True)
    if not is_right:
        sys.exit(1)


def build(source: Path, folder: Path, kind: str, levels: str) -> Path:
    """Build a distribution, "sdist" or "wheel", into a folder of its own; return its path."""
    environment = os.environ | {"FP4KIT_CPU_LEVELS": levels}
    run(sys.executable, "-m", "build", "-q", "--no-isolation", f"--{kind}", "--outdir", folder, source, env=environment)
    (path,) = folder.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return path


def clone(folder: Path) -> Path:
    """Copy the files that git tracks or does not ignore, because a build writes into its folder."""
    names = run("git", "ls-files", "-co", "--exclude-standard").splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def check_sdist(path: Path, folder: Path) -> Path:
    """Check a source distribution; return the folder with its files."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(folder, filter="data")
    check(set(NEEDED) <= names, f"the source distribution has {', '.join(NEEDED)}")
    check(path.stat().st_size <= LIMITS["sdist"], f"{path.name}: {path.stat().st_size:,} bytes")
    return folder / path.name.removesuffix(".tar.gz")


def check_wheel(path: Path, has_all: bool, is_pure: bool) -> None:
    """Check the size, the tag and the contents of a wheel of fp4kit."""
    libraries, size = [], path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith(".so"):
                libraries.append(entry.compress_size)
        selection = sum(entry.compress_size for entry in archive.infolist() if "evidence/selection/" in entry.filename)
        recorded = [name for name in archive.namelist() if "evidence/recorded/" in name and name.endswith(".npz")]
    tag = path.stem.split("-", 2)[2]
    check(tag == "py3-none-any" if is_pure else tag.startswith("py3-none-") and bool(libraries), f"tag {tag}")
    size += 0 if has_all or is_pure else max(libraries) * 102 // 100  # the third level, avx2, is 2% larger
    check(size <= LIMITS["fp4kit"], f"{path.name}: {size:,} bytes with all levels; {len(libraries)} libraries inside")
    check(not recorded and 0 < selection <= LIMITS["selection"], f"recordings in the wheel: {selection:,} bytes")


def check_installation(wheel: Path, evidence: Path, folder: Path) -> None:
    """Install a wheel without a compiler on PATH, and run its quick self-test, then --check with all recordings."""
    downloads, home = folder / "downloads", folder / "venv"
    run(sys.executable, "-m", "pip", "download", "-q", "-d", downloads, wheel)
    venv.create(home, with_pip=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
    isolated = {"cwd": folder, "env": environment | {"PATH": str(home / "bin")}}
    check(not any(shutil.which(name, path=str(home / "bin")) for name in ("cc", "c++", "g++")), "no compiler on PATH")
    pip = (home / "bin" / "python", "-m", "pip", "install", "-q", "--no-index", "--find-links", downloads)

    def install(*what: str | Path) -> float:
        start = time.monotonic()
        run(*pip, "--force-reinstall", *what, **isolated)
        return time.monotonic() - start

    seconds, limit, text = install(wheel), float(SECONDS), ""
    for _ in range(2):  # other processes may slow an installation down
        if seconds > limit:
            numpy = install("--no-deps", "numpy")
            limit, text = max(limit, 2.5 * numpy), f"; NumPy alone in {numpy:.1f} s"
            seconds = min(seconds, install(wheel))
    check(seconds <= limit, f"installed in {seconds:.1f} s{text}")
    fp4kit = home / "bin" / "fp4kit"
    start = time.monotonic()
    output = run(fp4kit, "selftest", "--host", "--quick", **isolated)
    check("pip install fp4kit-evidence adds all" in " ".join(output.split()), "the self-test names the selection")
    print(output.splitlines()[0], output.splitlines()[-1], f"{time.monotonic() - start:.0f} s", sep="\n", flush=True)
    run(*pip, "--no-deps", evidence, **isolated)
    count = run(fp4kit, "recipes", "--check", **isolated).splitlines()[-1]
    equal = count.split(" arrays are equal")[0]
    stated = f"{int(equal.split()[0]):,} of {int(equal.split()[-1]):,} arrays are equal"
    check(stated in (ROOT / "README.md").read_text(encoding="utf-8"), f"with fp4kit-evidence, {count}")


def check_recipe() -> None:
    """Render the conda recipe for three platforms, with the newest Python that it must support."""
    from rattler_build import PlatformConfig, RenderConfig, Stage0Recipe, VariantConfig

    recipe = Stage0Recipe.from_file(ROOT / "packaging" / "conda" / "recipe.yaml")
    variants = VariantConfig.from_yaml("python: ['3.14.* *_cp314']\ncxx_compiler: [cxx]\nc_stdlib: [sysroot]\n")
    for platform in ("linux-64", "osx-arm64", "win-64"):
        config = RenderConfig(PlatformConfig(target_platform=platform, host_platform=platform))
        (variant,) = recipe.render(variants, config)
        script = variant.recipe.to_dict()["build"]["script"]
        check("pip install" in script["content"], f"conda recipe for {platform}: {script['env']}")


def main() -> None:
    """Build and check all distributions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all-levels", action="store_true")
    parser.add_argument("--into", type=Path, metavar="DIRECTORY")
    arguments = parser.parse_args()
    check_recipe()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = clone(folder / "clone")
        sdist = build(source, folder / "sdist", "sdist", "none")
        unpacked = check_sdist(sdist, folder / "unpacked")
        evidence = build(source / "packaging" / "evidence", folder / "evidence", "wheel", "none")
        size = evidence.stat().st_size
        check(size <= LIMITS["fp4kit-evidence"], f"{evidence.name}: {size:,} bytes")
        pure = build(source, folder / "pure", "wheel", "none")
        check_wheel(pure, arguments.all_levels, is_pure=True)
        wheel = build(unpacked, folder / "wheel", "wheel", "all" if arguments.all_levels else "native")
        check_wheel(wheel, arguments.all_levels, is_pure=False)
        run(sys.executable, "-m", "twine", "check", "--strict", sdist, evidence, pure, wheel)
        if sys.platform == "linux":
            print(*run(sys.executable, "-m", "auditwheel", "show", wheel).split("\n\n")[:2], sep="\n")
        check_installation(wheel, evidence, folder)
        for path in (sdist, evidence, pure, wheel) if arguments.into else ():
            arguments.into.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, arguments.into)


if __name__ == "__main__":
    main()
