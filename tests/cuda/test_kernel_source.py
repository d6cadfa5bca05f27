"""Test fp4kit.cuda.source: what it returns is what fp4kit launches, in every launch that calls of the tests make."""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import cycle, product
from types import SimpleNamespace
from unittest.mock import patch

import kernel_calls
import numpy as np
import pytest
from exhaustive import exhaustive
from host import cupy_on_host
from host.instantiations import launching_on
from inputs import BF16
from kernel_calls import (
    F16,
    F32,
    KINDS,
    call_of,
    dequantize_as_it_was,
    fake_quantize,
    fake_quantize_backward,
    partial,
    quantize,
    quantize_both,
    quantize_by_table,
    quantize_with_scales,
    requantize,
)
from own_formats import UE5M3
from together import together

import fp4kit
import fp4kit.cuda
from fp4kit.cuda import amax, cached_calls, compiler, dispatch, launch, matrix, transforms
from fp4kit.formats import E2M1
from fp4kit.ops import engines
from fp4kit.recipes import RECIPES
from fp4kit.recipes.schema import with_row_blocks
from fp4kit.reference.stochastic import TE_SIGN_MASK

AMAXES_OF_OTHERS = (kernel_calls.amax, partial, requantize)  # calls whose amaxes are not those of quantize's recipe
# The functions that prepare the launches of source(), and the modules that hold them.
BUILDERS = {
    "quantize_launch": (matrix,),
    "dequantize_launch": (matrix,),
    "amax_launch": (matrix,),
    "hadamard_amax_launch": (amax,),
    "clip_launch": (matrix,),
    "transpose_launch": (transforms, cached_calls),
    "swizzle_launch": (transforms, cached_calls),
}
# Kernels that source() does not return: they are parts of operations of several launches, or need no recipe.
OTHERS = {
    *("ceil_x", "ceil_x_errors"),
    *("amax_columns", "count_changed", "hadamard_columns", "hadamard_rows", "implied_amax", "least_losses", "matmul"),
    *("matmul_fp4", "matmul_truncate", "pack_codes", "partial_amax", "partial_cast", "partial_place"),
    *("requantize_amax", "requantize_keep", "requantize_range", "rotate", "row_losses", "search", "search_factors"),
    *("search_full", "search_hessian", "search_msmodelslim", "search_quest", "unpack_codes"),
}
OPTIONAL = {"amax_out", "column_amax_out", "random", "seed", "counter", "tensor_amax"}
MASKS = {None: False, TE_SIGN_MASK: True, 0: "no_signs"}


class Made(SimpleNamespace):
    """A launch: the builder and its arguments (None for other launches), source, name, grid, block and bytes."""


def compiler_or_skip():
    """Skip the test if NVRTC is not installed, but fail under CI=true."""
    try:
        compiler.nvrtc_library()
    except RuntimeError as error:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(str(error))


@contextmanager
def recording():
    """Yield a list of all launches that fp4kit makes, as Made. No kernel runs."""
    made, prepared, current = [], {}, []

    def function(source, name, device):
        def launched(grid, threads, arguments, stream=None):
            facts = prepared.get(current[-1]) if current else None
            made.append(
                Made(how=facts, source=source, name=name, grid=grid, block=threads, data=arguments[0].tobytes())
            )

        return launched

    def noting(name, builder):
        def noted(*arguments, **options):
            result = builder(*arguments, **options)
            bound = inspect.signature(builder).bind(*arguments, **options)
            bound.apply_defaults()
            prepared[result] = name, bound.arguments
            return result

        return noted

    call = launch.Launch.__call__

    def called(self, *values, stream=None):
        current.append(self)
        try:
            call(self, *values, stream=stream)
        finally:
            current.pop()

    engines._CALLS.clear()
    with ExitStack() as stack:
        stack.enter_context(cupy_on_host.installed())
        stack.enter_context(launching_on(function, cupy_on_host))
        stack.enter_context(patch.object(cupy_on_host, "rehearsing", True))
        stack.enter_context(patch.object(launch.Launch, "__call__", called))
        for name, modules in BUILDERS.items():
            noted = noting(name, getattr(modules[0], name))
            for module in modules:
                stack.enter_context(patch.object(module, name, noted))
        yield made
    engines._CALLS.clear()


def options_of(made, case):
    """Return the arguments of source() for a launch: (operation, dtype, options)."""
    (name, a), recipe, shape = made.how, case.recipe, case.shape
    if name == "quantize_launch":
        w, addresses = a["request"], dict(zip(a["choice"].arguments.struct.names, words(made), strict=True))
        operation, given = ("fake_quantize" if w.values else "quantize"), "tensor_amax"
        if w.scaled or w.calibrated:
            given = "scales" if w.scaled else "block_amax"
        elif w.finds_amax or (recipe.tensor_scaling == "block" and not addresses["tensor_amax"]):
            given = "none"
        axis = ("both" if addresses["packed"] else 0) if w.columns else -1
        rounding = "stochastic" if w.stochastic else "nearest"
        chosen = {
            "axis": axis,
            "given": given,
            "hadamard": MASKS[w.mask],
            "rounding": rounding,
            "scale_layout": w.layout,
        }
        return operation, w.dtype, {"shape": w.shape, "aligned": a["aligned_runs"], **chosen}
    if name == "dequantize_launch":
        return "dequantize", a["dtype"], {"shape": a["shape"], "scale_layout": a["layout"]}
    aligned = {"shape": shape, "aligned": "kAligned = true" in made.source}
    if name in ("amax_launch", "hadamard_amax_launch"):
        if len(a["x"].shape) == 2 and recipe.tensor_scaling != "block":
            aligned["shape"] = a["x"].shape
        axis = 0 if name == "hadamard_amax_launch" else -1
        return "tensor_amax", a["x"].dtype, {"hadamard": MASKS[a["mask"]], "axis": axis, **aligned}
    if name == "clip_launch":
        return "fake_quantize_backward", a["x"].dtype, aligned
    if name == "transpose_launch":
        return "transpose", BF16, {"shape": a["shape"][1:], "scale_layout": a["layout"]}
    layouts = a["layout"], a["target"]
    operation, layout = ("swizzle", layouts[1]) if layouts[0] == "linear" else ("unswizzle", layouts[0])
    return operation, BF16, {"scale_layout": layout, "aligned": "kQuads = true" in made.source, "shape": shape}


def words(made):
    return np.frombuffer(made.data, np.uint64).tolist()


def check(case):
    """Compare every launch of a call with source(). Return (names of compared kernels, names of other kernels)."""
    compared, left = set(), set()
    with recording() as made:
        case.run(cupy_on_host.asarray)
    assert made, f"{case} launches nothing"
    for one in made:
        if one.how is None or is_beyond(case, *one.how):
            left.add(one.name)
            continue
        operation, dtype, options = options_of(one, case)
        r = one.how[1]["request"].recipe if one.how[0] == "quantize_launch" else case.recipe
        r = case.recipe if r.id == case.recipe.id else r
        with patch.object(dispatch, "MIN_TABLE_ELEMENTS", 0) if case.make is quantize_by_table else nullcontext():
            kernel = fp4kit.cuda.source(operation, with_row_blocks(r), dtype.name, multiprocessors=2, **options)
        same(kernel, one)
        compared.add(one.name)
    return compared, left


def is_beyond(case, builder, arguments):
    """Return whether source() has no argument for what a launch does."""
    if builder == "dequantize_launch":  # source() decodes, in one launch, to the dtype that was quantized
        return arguments["original"] != arguments["dtype"] or matrix.implies_amaxes(arguments["r"])
    if builder == "clip_launch":
        return arguments["grad"].dtype != arguments["x"].dtype  # gradients have the dtype of x
    return builder == "amax_launch" and case.make in AMAXES_OF_OTHERS


def same(kernel, one):
    """Assert that a Kernel is the launch `one`: equal texts to compile, names, grids, blocks and bytes of arguments."""
    assert kernel._instantiation == one.source, kernel.call
    assert (kernel.name, (kernel.grid,), (kernel.block,)) == (one.name, one.grid, one.block), kernel.call
    given = dict(zip([f.name for f in kernel.fields], words(one), strict=True))
    chosen = {f.name for f in kernel.fields if f.type.endswith("*") or f.name in ("seed", "counter")}
    passed = {name: value for name, value in given.items() if value and name in chosen}
    assert kernel.pack(**passed) == one.data, kernel.call
    needed = {f.name for f in kernel.fields if f.needed}
    assert needed <= passed.keys() <= needed | OPTIONAL, kernel.call


CODES = [r for r in RECIPES.values() if not (r.fake_only or r.stochastic_only)]
DTYPES = cycle((BF16, F32, F16))
OWN = fp4kit.custom_recipe("ue5m3", E2M1, UE5M3, 16, scale_rounding="up", tensor_scale=True)
LARGE = (1024, 1024)  # too many elements for a kernel that computes the amax while it quantizes
BY_RECIPE = [
    *(call_of(quantize, r, next(DTYPES)) for r in CODES),
    *(call_of(fake_quantize, r, next(DTYPES)) for r in RECIPES.values() if r.fake_rule and not r.stochastic_only),
    *(call_of(dequantize_as_it_was, r, next(DTYPES)) for r in CODES[::4]),
    *(call_of(quantize_with_scales, r, next(DTYPES)) for r in CODES[::8]),
    *(call_of(quantize, r, F32, axis=0) for r in CODES[1::8] if r.block_size <= 64),
]
MORE = [
    call_of(quantize, OWN, F16),
    call_of(quantize, "nvfp4-te", shape=LARGE),
    call_of(quantize, "nvfp4-te", shape=LARGE, hadamard="no_signs"),
    call_of(quantize, "nvfp4-te", shape=LARGE, hadamard=True, axis=0),
    call_of(quantize, "nvfp4-te-rowscaled", shape=LARGE, tensor_amax=np.ones(1024, np.float32)),
    call_of(quantize, "fp8-modelopt-channel", shape=(512, 4096)),
    call_of(quantize, "nvfp4-te-2d", shape=LARGE, scale_layout="swizzled_8x4"),
    call_of(quantize, "nvfp4-modelopt-static", tensor_amax=4.0, block_amax=np.ones((64, 16), np.float32)),
    call_of(quantize, "nvfp4-comfy-kitchen-stochastic", rounding="stochastic", seed=7),
    call_of(fake_quantize, "mxfp4-mslk-stochastic", rounding="stochastic", seed=7),
    call_of(quantize_both, "nvfp4-te", shape=LARGE, hadamard=True, tensor_amax=4.0),
    call_of(quantize_both, "mxfp4-ocp", shape=(96, 160), misaligned=True),
    call_of(dequantize_as_it_was, "nvfp4-te-2d", F32, scale_layout="swizzled_8x4"),
    call_of(fake_quantize_backward, "nvfp4-te", F32),
    call_of(fake_quantize_backward, "nvfp4-te-rowscaled", F32, misaligned=True),
    call_of(fake_quantize_backward, "int4-modelopt", F32),
]


def test_what_calls_launch_is_what_source_returns():
    """Every kernel is either compared with source() or named in OTHERS."""
    compared, left = set(), set()
    for case in [*KINDS, *MORE]:
        for names, found in zip((compared, left), check(case), strict=True):
            names |= found
    single = {name.removesuffix("_kernel") for name in left - compared if not name.startswith("grouped_")}
    assert single <= OTHERS
    rows = {row.entry or name for name, row in launch.LAUNCHES.items()} | {c.kernel for c in dispatch.KERNEL_CHOICES}
    assert {name.removesuffix("_kernel") for name in compared} == rows - OTHERS


@together("case", BY_RECIPE)
def test_every_recipe(case):
    check(case)


def test_the_source_and_the_options_are_those_that_fp4kit_compiles(monkeypatch, tmp_path):
    compiled = []
    monkeypatch.setattr(compiler, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compiler, "compiler_version", lambda: (13, 0))
    monkeypatch.setattr(compiler, "compile_cubin", lambda *arguments: compiled.append(arguments) or (b"a cubin", ""))
    kernel = fp4kit.cuda.source("quantize", "nvfp4-te", "float16", "sm_100")
    assert fp4kit.cuda.compile(kernel) == b"a cubin"
    ((source, options, _),) = compiled
    assert (source, options) == (kernel.source, kernel.options) and kernel.arch == "sm_100a"
    assert "#include" not in source and {"-fmad=false", "-ftz=false", "-arch=sm_100a"} <= {*options}
    (file,) = tmp_path.iterdir()  # where the loader of fp4kit's own launches looks
    assert file == compiler.cubin_path(kernel._instantiation, kernel.arch)


@pytest.mark.parametrize("arch", ["sm_90", *exhaustive(["sm_75", "sm_120a"])])
def test_resources_are_read_from_the_compiler(arch):
    compiler_or_skip()
    kernel = fp4kit.cuda.source("quantize", "nvfp4-te", "bfloat16", arch)
    used = kernel.resources()
    assert 16 <= used.registers <= 64 and used.spill_bytes == used.stack_bytes == 0 and used.shared_bytes == 1024
    other = fp4kit.cuda.source("swizzle", "nvfp4-te", "bfloat16", arch, scale_layout="swizzled_128x4").resources()
    assert other.shared_bytes == 0


@pytest.mark.parametrize("operation", ["quantize", "tensor_amax"])
def test_the_source_compiles_alone(operation):
    """The name of the kernel is in the cubin, and NVRTC has nothing to say about the text."""
    compiler_or_skip()
    kernel = fp4kit.cuda.source(operation, "nvfp4-te", "float32", "sm_100a")
    cubin, log = compiler.compile_cubin(kernel.source, kernel.options, "kernel.cu")
    assert log == "" and kernel.name.encode() in cubin


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_nvcc_compiles_the_source(tmp_path):
    for name in ("nvfp4-te-2d", "int8-modelopt"):
        for kernel in fp4kit.cuda.kernels(name):
            (tmp_path / "kernel.cu").write_text(kernel.source)
            command = ["nvcc", "-cubin", *kernel.options, "kernel.cu", "-o", "kernel.cubin"]
            result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
            assert (result.returncode, result.stdout + result.stderr) == (0, ""), kernel.call
            assert kernel.name.encode() in (tmp_path / "kernel.cubin").read_bytes()


TYPE = r"(const )?(void|float|uint8_t|uint32_t)\*|u?int64_t"


def test_every_field_is_described():
    """A meaning has no names of the C++ code."""
    names = ("nvfp4-te-2d", "mxfp4-ocp", "nvfp4-fouroversix-ms-eden", "mxfp4-mslk-stochastic", "int8-modelopt")
    for kernel in (kernel for name in names for kernel in fp4kit.cuda.kernels(name)):
        for f in kernel.fields:
            assert f.meaning and not re.search(r"::|\bk[A-Z]|nullptr", f.meaning), (kernel.call, f)
            assert re.fullmatch(TYPE, f.type) and f.alignment in (1, 2, 4, 16), (kernel.call, f)


WRONG = [
    (
        ("multiply", "nvfp4-te"),
        {},
        ValueError,
        "source: operation is 'multiply'; needs one of quantize, fake_quantize, ",
    ),
    ((["quantize"], "nvfp4-te"), {}, ValueError, "source: operation is ['quantize']"),
    (("quantize", "nvfp5"), {}, ValueError, "source: no recipe is called 'nvfp5'"),
    (("swizzle", "mxfp4-msmodelslim-dual"), {"scale_layout": "swizzled_8x4"}, NotImplementedError, "mxfp4-msmodelslim"),
    (("quantize", "mxfp4-msmodelslim-ceil-x-search"), {}, NotImplementedError, "_ceil_x': a separate kernel chooses"),
    (("quantize", "nvfp4-modelopt-fake"), {}, ValueError, "is a fake quantizer and has values only"),
    (("quantize", "mxfp4-auto-round-opt"), {}, NotImplementedError, "source: mxfp4-auto-round-opt has search="),
    (("quantize", "nvfp4-te", "float64"), {}, ValueError, "source: dtype is 'float64'; needs 'float32', 'float16'"),
    *(
        (("quantize", "nvfp4-te", "float32", arch), {}, ValueError, f"source: arch is {arch!r}; needs one of sm_75, ")
        for arch in ("sm_70", "sm_76", "sm_999", "sm_89a", "sm_90f", "sm_100b", "90", 90)
    ),
    (("quantize", "nvfp4-te"), {"shape": (4, 100)}, ValueError, "quantize: axis 1 has length 100; nvfp4-te needs a"),
    (("quantize", "nvfp4-te"), {"shape": (4, 4, 64)}, ValueError, "source: shape is (4, 4, 64); needs two positive"),
    (("quantize", "nvfp4-te"), {"shape": (2**20, 2**20)}, ValueError, "a kernel takes at most 8589934592 (2^33)"),
    (("quantize", "nvfp4-te"), {"axis": 1}, ValueError, "source: axis is 1; quantize needs -1 or 0 or 'both'"),
    (("quantize", "nvfp4-te"), {"given": "amax"}, ValueError, "source: given is 'amax'; quantize needs 'none' or"),
    (("quantize", "nvfp4-te"), {"given": "none"}, NotImplementedError, "needs given='tensor_amax', and the operation"),
    (("quantize", "nvfp4-te"), {"given": "block_amax"}, ValueError, "block_amax was given, but nvfp4-te"),
    (("quantize", "int8-modelopt"), {"rounding": "stochastic"}, ValueError, "int8-modelopt has no stochastic rounding"),
    (("quantize", "nvfp4-te-rowscaled"), {"axis": 0}, NotImplementedError, "has no kernel along columns; needs axis"),
    (("quantize", "nvfp4-te"), {"multiprocessors": 0}, ValueError, "source: multiprocessors is 0; needs a positive"),
    (("dequantize", "nvfp4-te"), {"axis": 0}, ValueError, "source: axis is 0; dequantize needs -1"),
    (("dequantize", "nvfp4-te-rowscaled"), {}, NotImplementedError, "takes several launches; use fp4kit.dequantize"),
    (("tensor_amax", "mxfp4-ocp"), {}, ValueError, "source: mxfp4-ocp has no tensor scale"),
    (("tensor_amax", "fp8-deepgemm-block"), {}, NotImplementedError, "take several launches; use fp4kit.quantize"),
    (("transpose", "nvfp4-te"), {}, ValueError, "transpose: nvfp4-te has 1x16 blocks; needs square blocks"),
    (("swizzle", "nvfp4-te"), {}, ValueError, "source: scale_layout is 'linear'; swizzle needs 'swizzled_128x4' or"),
    (("swizzle", "fp8-modelopt"), {"scale_layout": "swizzled_8x4"}, ValueError, "has no block scales; swizzle needs"),
]


@together("arguments, options, error, message", WRONG)
def test_wrong_arguments(arguments, options, error, message):
    with pytest.raises(error, match=re.escape(message)) as caught:
        fp4kit.cuda.source(*arguments, **options)
    assert "asnumpy" not in str(caught.value) and "host memory" not in str(caught.value)  # there is no array


def test_kernels_of_a_recipe_that_has_none():
    with pytest.raises(ValueError, match="axis 1 has length 100; nvfp4-te needs a multiple of 16"):
        fp4kit.cuda.kernels("nvfp4-te", shape=(4, 100))
    with pytest.raises(NotImplementedError, match="own is computed by the specification alone"):
        fp4kit.cuda.kernels(fp4kit.custom_recipe("own", fp4kit.formats.E2M1, levels=[(512, "float32"), (32, "E8M0")]))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"y": 3}, TypeError, "pack: amax_kernel has no field 'y'; see Kernel.fields"),
        ({"amax": 2.0}, TypeError, "pack: amax is 2.0; needs an int, as uint32_t*"),
        ({"x": -1}, ValueError, "pack: x is -1; const void* needs 0 to 2^64 - 1"),
        ({"rows": 1 << 63}, ValueError, "pack: rows is 9223372036854775808; int64_t needs 0 to 2^63 - 1"),
        ({"amax": 0}, ValueError, "pack: amax is 0; amax_kernel needs an address"),
        ({"x": 0x1008}, ValueError, "pack: x is 0x1008; amax_kernel needs a multiple of 16"),
        ({"amax": 0x1002}, ValueError, "pack: amax is 0x1002; amax_kernel needs a multiple of 4"),
    ],
)
def test_wrong_values_of_fields(values, error, message):
    kernel = fp4kit.cuda.source("tensor_amax", "nvfp4-te")
    with pytest.raises(error, match=re.escape(message)):
        kernel.pack(**{"x": 0x1000, "amax": 0x1004} | values)
    with pytest.raises(TypeError, match="pack: x missing; amax_kernel needs x, amax"):
        kernel.pack(amax=0x1004)
    with pytest.raises(TypeError, match="compile: kernel is 'x'; needs a Kernel that source or kernels returned"):
        fp4kit.cuda.compile("x")


def test_architectures_are_those_of_nvrtc():
    """Compile an empty kernel for every architecture of NVRTC, with every suffix."""
    compiler_or_skip()
    numbers = (ctypes.c_int * 64)()  # zeros behind those of NVRTC
    compiler.nvrtc_library().nvrtcGetSupportedArchs(numbers)
    for n, suffix in product((n for n in numbers if n >= 75), ("", "a", "f")):
        is_known = (arch := f"sm_{n}{suffix}") in fp4kit.cuda.ARCHITECTURES
        with nullcontext() if is_known else pytest.raises(compiler.CompileError):
            compiler.compile_cubin('extern "C" __global__ void empty() {}', (f"-arch={arch}",), "empty.cu")
        if is_known:
            kernel = fp4kit.cuda.source("quantize", "nvfp4-te", arch=arch)
            assert kernel.arch == f"sm_{n}{suffix or 'a' * (n >= 100)}"
            assert launch.architecture_of(launch.Target(kernel.arch, 1)) == f"sm_{n}"


def test_the_repr_names_the_call():
    shown = "Kernel(source('quantize', 'nvfp4-te', 'bfloat16', 'sm_90', shape=(4096, 4096)): quantize_kernel, grid 2048"
    assert repr(fp4kit.cuda.kernels("nvfp4-te")[0]).startswith(shown)


def test_the_declaration_is_the_struct():
    """The offsets of a C compiler are those of pack(), whose bytes every other test compares."""
    kernel = fp4kit.cuda.source("quantize", "nvfp4-te", shape=(64, 256))
    names = re.findall(r"^  u?int64_t (\w+);", kernel.declaration, re.MULTILINE)
    assert names == [f.name for f in kernel.fields] and len(kernel.pack(**dict.fromkeys(names, 16))) == 8 * len(names)
    assert '#define FP4KIT_QUANTIZE_KERNEL "quantize_kernel"\n' in kernel.declaration
    assert f"#define FP4KIT_QUANTIZE_GRID {kernel.grid}\n" in kernel.declaration


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is installed")
def test_declarations_can_be_included_twice(tmp_path):
    found = fp4kit.cuda.kernels("nvfp4-te-2d")
    for kernel in found:
        (tmp_path / kernel.operation).write_text(kernel.declaration)
    program = "".join(f'#include "{kernel.operation}"\n' for kernel in found + found)
    command = ["cc", "-Wall", "-Werror", "-fsyntax-only", "-I", str(tmp_path), "-xc", "-"]
    subprocess.run(command, input=program, text=True, check=True)


def test_clusters_only_where_the_gpu_has_them():
    for arch, cluster in (("sm_90", 8), ("sm_100a", 8), ("sm_89", 1)):
        kernel = fp4kit.cuda.source("quantize", "nvfp4-te", "bfloat16", arch, shape=(64, 256), given="none")
        assert kernel.cluster == cluster and kernel.grid % 8 == 0
    assert fp4kit.cuda.source("quantize", "nvfp4-te").cluster == 1


def test_the_module_needs_no_cupy():
    code = "import sys, fp4kit.cuda; fp4kit.cuda.kernels('mxfp4-ocp'); print('cupy' in sys.modules, *dir(fp4kit.cuda))"
    words = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert words[0] == "False" and {*fp4kit.cuda.__all__} <= {*words}
