"""Write, compile and load kernels, one instantiation at a time, and cache them in memory and on disk.
An instantiation is C++ text that includes a kernel's file and defines the types and constants that the kernel uses; a
cubin is a compiled instantiation. The options keep subnormals (-ftz=false) and round a product before it is added
(-fmad=false). CuPy's RawKernel would append -ftz=true, so this module calls NVRTC itself, and CuPy only loads cubins.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.arrays import imports
from fp4kit.formats import (
    E2M1,
    E4M3,
    E5M2,
    INT4,
    Codebook,
    ElementFormat,
    IntegerOrFloat,
    PairedMicroexponents,
    is_same,
)
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import BLOCK_RULES, NOISE_STOCHASTICS
from fp4kit.recipes.schema import encodes_first, fake_unit, then_encodes

SOURCES = Path(__file__).parent / "kernels"
OPTIONS = ("-std=c++17", "-ftz=false", "-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-lineinfo")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


@cache
def files(sources: Path) -> dict[str, Path]:
    """Return {file name: path} for all CUDA C++ files (.cu, .cuh) in the folder `sources` and its subfolders."""
    # File names are unique, because `#include` lines in the kernels name no folder.
    return {path.name: path for path in sorted(sources.rglob("*.cu*"))}


def with_headers(source: str, name: str = "fp4kit.cu") -> str:
    """Return an instantiation with the files that it includes, directly or indirectly, in place of the #include lines.

    `name` is what the compiler's log calls the instantiation.
    """
    included: set[str] = set()

    def expanded(text: str, name: str) -> Iterator[str]:
        for number, line in enumerate(text.split("\n"), 1):
            found = _INCLUDE.match(line)
            if found is None:
                yield "" if line == "#pragma once" else line
            elif found[1] in included:
                yield ""
            else:
                included.add(found[1])
                yield f'#line 1 "{found[1]}"'
                yield from expanded(text_of(files(SOURCES)[found[1]]), found[1])
                yield f'#line {number + 1} "{name}"'

    return "\n".join(expanded(source, name))


@cache
def text_of(path: Path) -> str:
    """Return the text of a file."""
    return path.read_text()


def architecture(capability: str) -> str:
    """Return the architecture for NVRTC's option -arch, such as "sm_90" for the compute capability "90"."""
    return f"sm_{capability}a" if int(capability) >= 100 else f"sm_{capability}"


def compile_source(source: str, arch: str, name: str = "fp4kit.cu") -> tuple[bytes, str]:
    """Compile an instantiation for an architecture such as "sm_90", and return the cubin and the compiler's log."""
    return compile_cubin(with_headers(source, name), (*OPTIONS, f"-arch={arch}"), name)


class Resources(NamedTuple):
    """The registers and the memory of a kernel.

    Attributes:
        registers: registers per thread.
        spill_bytes: bytes per thread that are stored and loaded because registers do not suffice.
        stack_bytes: bytes of stack per thread.
        shared_bytes: bytes of static shared memory per thread block.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


_REPORT = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\s+"
    r"ptxas info\s+: Used (\d+) registers(?:.*?(\d+) bytes smem)?"
)


def resources(source: str, arch: str, kernel: str) -> tuple[Resources, bytes]:
    """Compile an instantiation, and return what one of its kernels uses, and the cubin."""
    options = (*OPTIONS, f"-arch={arch}", "--ptxas-options=-v")
    cubin, log = compile_cubin(with_headers(source), options, f"{kernel}.cu")
    found = _REPORT.search(log, max(log.find(f"'{kernel}'"), 0))
    if found is None:
        raise CompileError(f"fp4kit.cuda: NVRTC {compiler_version()} reports no resources of {kernel}:\n{log}")
    stack, stores, loads, registers, shared = (int(number or 0) for number in found.groups())
    return Resources(registers, stores + loads, stack, shared), cubin


def cache_folder() -> Path:
    """Return the folder of cached cubins: ~/.cache/fp4kit/cuda if possible, otherwise one in the temporary
    directory.
    """
    # The folder must be writable and owned by this user.
    roots = (Path.home() / ".cache", Path(tempfile.gettempdir()) / f"fp4kit-{os.getuid()}")
    folders = [root / "fp4kit" / "cuda" for root in roots]
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    raise RuntimeError(
        f"fp4kit.cuda: this user can neither use {folders[0]} nor {folders[1]} for compiled kernels; needs one of these"
        " folders, owned by this user and writable"
    )


def _key(source: str, arch: str) -> str:
    """Return the cache key of an instantiation: a digest of everything that its cubin depends on."""
    parts = [with_headers(source), *OPTIONS, arch, str(compiler_version())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def cubin_path(source: str, arch: str, rebuild: bool = False) -> Path:
    """Return the path of an instantiation's cubin (compiled kernel) in the cache."""
    # The cubin is written under a temporary name and then renamed, so that no process reads an incomplete file.
    path = cache_folder() / f"{_key(source, arch)}.cubin"
    if rebuild or not path.exists():
        cubin, _ = compile_source(source, arch)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        os.replace(temporary, path)
    return path


@cache
def function(source: str, kernel: str, device: int) -> Any:
    """Return the CuPy function of one kernel of an instantiation, compiled if needed and loaded on a device."""
    # If the cached cubin cannot be loaded, compile it again.
    cupy = imports.cupy()
    with cupy.cuda.Device(device) as current:
        arch = architecture(current.compute_capability)
        try:
            return cupy.RawModule(path=str(cubin_path(source, arch))).get_function(kernel)
        except cupy.cuda.driver.CUDADriverError:
            return cupy.RawModule(path=str(cubin_path(source, arch, rebuild=True))).get_function(kernel)


class CompileError(RuntimeError):
    """The error that is raised if a kernel does not compile, or if another call to NVRTC fails.

    If a kernel does not compile, the message contains NVRTC's log.
    """


def _candidates() -> Iterator[str]:
    """Yield the places to look for NVRTC, in the order in which they are tried."""
    for folder in sys.path:
        root = Path(folder) / "nvidia"
        for pattern in ("cu13/lib/libnvrtc.so.13*", "cuda_nvrtc/lib/libnvrtc.so.12*"):
            yield from (str(path) for path in sorted(root.glob(pattern)) if ".alt." not in path.name)
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


@cache
def nvrtc_library() -> ctypes.CDLL:
    """Load the NVRTC library and return it."""
    for path in _candidates():
        try:
            if Path(path).is_absolute():
                # NVRTC opens its builtins library by name, which works only if that is loaded already.
                for builtins in Path(path).parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(builtins))
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise RuntimeError(
        "fp4kit.cuda: NVRTC was not found (libnvrtc.so.12 or .13); install it with the extra that fits the driver: "
        'pip install "fp4kit[cuda12]" or "fp4kit[cuda13]"'
    )


@cache
def compiler_version() -> tuple[int, int]:
    """Return NVRTC's major and minor version. Raise RuntimeError if NVRTC is not installed."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(nvrtc_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


def _check(status: int, call: str) -> None:
    """Raise CompileError if a call to NVRTC failed, that is, if its status is not 0."""
    if status:
        nvrtc_library().nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompileError(f"fp4kit.cuda: {call} failed: {nvrtc_library().nvrtcGetErrorString(status).decode()}")


def compile_cubin(source: str, options: tuple[str, ...], name: str) -> tuple[bytes, str]:
    """Compile a source, which includes no file, to a cubin, and return the cubin and the compiler's log."""
    nvrtc, program = nvrtc_library(), ctypes.c_void_p()
    given = source.encode(), name.encode(), 0, None, None
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), *given), "nvrtcCreateProgram")
    try:
        texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), texts)
        log = _text(program, "ProgramLog").decode(errors="replace").rstrip("\0\n")
        if status:
            raise CompileError(f"fp4kit.cuda: {name} did not compile with {' '.join(options)}:\n{log}")
        return _text(program, "CUBIN"), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(program: ctypes.c_void_p, what: str) -> bytes:
    """Return the output `what` of a compiled program as bytes: "CUBIN" or "ProgramLog"."""
    size = ctypes.c_size_t()
    _check(getattr(nvrtc_library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"nvrtcGet{what}Size")
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc_library(), f"nvrtcGet{what}")(program, buffer), f"nvrtcGet{what}")
    return buffer.raw


PRELUDE = "".join(f'#include "{name}.cuh"\n' for name in ("block", "fake", "hif4", "scale_layout", "row_step"))


TYPES = {np.dtype(np.float32): "Float32", np.dtype(np.float16): "Float16", np.dtype(ml_dtypes.bfloat16): "Bfloat16"}
Trait = int | str | np.dtype  # a constant or type that an instantiation defines


def instantiation(file: str, struct: str = "", group: str = "", threads: int = 0, **traits: Trait) -> str:
    """Return the C++ source that instantiates the kernels in `file`.cu once.

    `group` is the name of one of these kernels to instantiate this kernel for a group of tensors (GROUPED). `threads`
    is the number of threads per thread block; 0 for that of rules/types.cuh.
    """
    number = f"#define FP4KIT_THREADS {threads}\n" if threads else ""
    definitions = [_definition(name, value) for name, value in traits.items()]
    kernels = GROUPED[group].source(file, group) if group else f'#include "{file}.cu"\n'
    return "\n".join([number + PRELUDE + struct, *definitions, kernels])


class GroupedEntry(NamedTuple):
    """Differences between kernels for groups, whose entries are otherwise equal (kernels/README.md, section Groups).

    Attributes:
        member: the declaration of the arguments of one tensor. They are taken by reference or by value, whichever needs
            fewer registers.
        run: the call of the device function that processes a piece; {} stands for whether its rows are aligned.
        start: statements that precede the call.
        before: statements of the kernel that precede all pieces.
        bounds: the launch bounds.
        backwards: whether the last pieces are taken first.
        include: the file that defines the device function; {} stands for the kernel's file without its suffix.
        types: definitions that precede the kernel.
        wide: the condition under which {} in `run` is true.
    """

    member: str
    run: str
    start: str = ""
    before: str = ""
    bounds: str = "kThreads"
    backwards: bool = False
    include: str = "{}.cu"
    types: str = ""
    wide: str = "kAligned || aligned"

    def source(self, file: str, kernel: str) -> str:
        """Return the text of the kernel `grouped_<kernel>_kernel`, for the kernel `kernel` of `file`.cu."""
        arguments = next(word for word in self.member.split() if word.rstrip("&").endswith("Arguments")).rstrip("&")
        order = "for_each_piece<true>" if self.backwards else "for_each_piece"
        header = "grouped_quantize" if "is_empty" in self.start else "grouped"
        return f"""#include "{header}.cuh"
#include "{self.include.format(file)}"
using Members = GroupOf<{arguments}, kSmall>::Type;
{self.types}
extern "C" __global__ void __launch_bounds__({self.bounds}) grouped_{kernel}_kernel(Members group) {{
  {self.before}
  {order}(group, []({self.member}, Grid grid, u32 aligned) {{
    {self.start}
    if ({self.wide}) {{
      {self.run.format("true")};
    }} else {{
      {self.run.format("false")};
    }}
  }});
}}
"""


_EMPTY = "if (is_empty<R, Input>(a, grid)) return;"  # the kernel stores the tensor scales of a tensor without elements
_QUANTIZE, _AMAX = "const QuantizeArguments& a", "const AmaxArguments& a"
# {kernel: its entry for groups}
GROUPED = {
    # Pieces are taken from the last one to the first one. So the next launch, which takes pieces in order, begins with
    # the data that was read last, and finds it in the L2 cache. The amax and quantization of 8 tensors of 1856 x 2688
    # take 49 us instead of 54 us (H200, 2026-11-21).
    "amax": GroupedEntry(_AMAX, "amax<Input, kCounted, {}>(a, grid)", backwards=True),
    "amax_rows": GroupedEntry(_AMAX, "amax_rows<Input, kCounted, {}>(a, grid)", backwards=True),
    "clip": GroupedEntry("const ClipArguments& a", "clip_gradient<Input, Gradient, {}>(a, grid)"),
    "fake_ms_eden": GroupedEntry(_QUANTIZE, "fake_ms_eden<R, Input, {}>(a, grid)"),
    "fake_quantize": GroupedEntry(_QUANTIZE, "fake_quantize<R, Input, {}>(a, grid)"),
    "quantize_hif4": GroupedEntry(_QUANTIZE, "quantize_hif4<R, Input, {}>(a, grid)"),
    "quantize_dual": GroupedEntry(_QUANTIZE, "quantize_dual<R, Input, {}>(a, grid)"),
    "quantize": GroupedEntry("QuantizeArguments a", "quantize<R, Input, {}>(a, grid)", _EMPTY),
    "quantize_tile": GroupedEntry(
        _QUANTIZE, "quantize_tile<R, Input, {}>(a, grid)", _EMPTY, include="quantize_tile.cuh"
    ),
    # The arguments are in shared memory, which takes 48 registers per thread instead of 64.
    "quantize_unblocked": GroupedEntry(
        "const QuantizeArguments& given",
        "quantize_unblocked<R, Input, {}>(a, grid)",
        f"__shared__ QuantizeArguments a; if (threadIdx.x == 0) a = given; __syncthreads(); {_EMPTY}",
    ),
    "search": GroupedEntry(
        "SearchArguments a",
        "search<R, Input, {}, kWeighted, kAll, kEight>(a, grid, memory)",
        before="__shared__ SearchMemory<kWeighted> memory; make_pruning_tables<R>(memory.tables);",
        bounds="kThreads, kWeighted ? 1 : 2",
    ),
    # `aligned` is 1 if codes can be moved 16 bytes at a time, plus 2 if scales can be moved four bytes at a time.
    "transpose": GroupedEntry(
        "const TransposeArguments& a",
        "transpose<ByteScales, {}>(a, grid)",
        "if (kAligned || aligned == 3u) { transpose<S, true>(a, grid); return; }",
        bounds="kThreads, kBlocksPerMultiprocessor",
        types="struct ByteScales : S { static constexpr bool kScaleWords = false; };",
        wide="aligned == 1u",
    ),
}


def _definition(name: str, value: Trait) -> str:
    """Return the C++ definition of a bool or int constant, of an enum constant ("Enum::value"), or of a type alias."""
    if isinstance(value, int):
        return f"constexpr {type(value).__name__} {name} = {str(value).lower()};"
    if isinstance(value, str) and "::" in value:
        return f"constexpr {value.split('::')[0]} {name} = {value};"
    return f"using {name} = {TYPES[value] if isinstance(value, np.dtype) else value};"


# The number of thread blocks in a cluster that computes the amax of a small array: the largest cluster that every GPU
# with clusters supports.
FINDERS = 8
THREAD_BYTES = 64  # bytes of elements that a thread of quantize loads at a time, unless a RowPlan says otherwise


def format_struct(f: ElementFormat, name: str) -> str:
    """Return the definition of the C++ struct `name`, which holds the constants of the element or scale format f."""
    largest = f.max
    f = INT4 if isinstance(f, IntegerOrFloat) else f
    facts = {
        "int kExponentBits": f.exponent_bits,
        "int kMantissaBits": f.mantissa_bits,
        "int kBits": f.bits,
        "int kStoredBits": f.packing.stored_bits,
        "int kBias": f.bias,
        "int kEmin": f.emin,
        "int kEmax": f.emax,
        "u32 kSignBit": f.sign_bit,
        "u32 kMaxCode": f.max_code,
        "u32 kNanCode": f.nan_code,
        "u32 kInfinityCode": f.max_code + 1 if f.specials == "ieee" else 0xFFFF,
        "u32 kMaxBits": int(np.float32(largest).view(np.uint32)),
        "bool kHasNan": f.specials != "none",
        "bool kIsInteger": f.is_integer,
        "bool kIsTable": isinstance(f, Codebook),
        "bool kIsE2m1": is_same(f, E2M1),
        "bool kIsE4m3": is_same(f, E4M3),
        "bool kIsE5m2": is_same(f, E5M2),
    }
    members = [constant(fact, value) for fact, value in facts.items()]
    if isinstance(f, Codebook):
        members += _table_members(f)
    return f"struct {name} {{ {' '.join(members)} }};"


def _table_members(f: Codebook) -> list[str]:
    """Return the definitions of the C++ members that only a Codebook has (kernels/rules/codec.cuh)."""
    values = "".join(f"code == {code}u ? {_literal(value)} : " for code, value in enumerate(f.values[:-1]))
    value = f"FP4KIT_DEVICE float value(u32 code) {{ return {values}{_literal(f.values[-1])}; }}"
    if isinstance(f, PairedMicroexponents):
        target = int(np.float32(f.amax_target).view(np.uint32))
        return ["using HasPairs = void;", constant("u32 kAmaxTargetBits", target), value]
    # `nearest` returns the code of the value nearest to a float.
    steps = " + ".join(["0u", *(f"(x > {_literal(midpoint)})" for midpoint in f.midpoints)])
    codes = sum(int(code) << (4 * i) for i, code in enumerate(f.order))
    found = f"static_cast<u32>({codes}ull >> (4u * ({steps}))) & 15u"
    return [f"FP4KIT_DEVICE u32 nearest(float x) {{ return {found}; }}", value]


def _literal(x: np.float32) -> str:
    """Return a C++ expression that has exactly the bits of a float32 number."""
    return f"float_of({int(np.float32(x).view(np.uint32))}u)"


def constant(name: str, value: object) -> str:
    """Return the C++ definition of a static constant."""
    text = str(value).lower() if isinstance(value, bool) else f"{value}u" if name.startswith("u32") else str(value)
    return f"static constexpr {name} = {text};"


def has_table(r: Recipe) -> bool:
    """Return True if kernels look up the factor of a block in a table, by the code of its block scale."""
    # The rules nunchaku and aiter have no table, because their factor depends on the amax of the block.
    one_scale = r.scale == E4M3 and r.tensor_scaling in ("none", "tensor") and r.block_rows == 1
    return one_scale and not (r.block_rule and BLOCK_RULES[r.block_rule].reads_amax)


def _recipe_facts(r: Recipe) -> dict[str, object]:
    """Return the constants of the C++ struct R that depend only on the recipe, as {"type name": value}."""
    return {
        "int kBlock": r.block_size if r.block else 16,
        "int kTensorColumns": r.tensor_columns if r.block else 16,
        "int kBlockRows": r.block_rows,
        "int kScaleMax": r.scale_max,
        "u32 kNanCode": r.element.nan_code if r.nan_code is None else r.nan_code,
        "bool kHasBlocks": r.block is not None,
        "bool kHasScales": r.scale is not None,
        "bool kHasTable": has_table(r),
        "bool kIsOwn": r.is_custom,
        "bool kPropagateNan": r.amax_nan == "propagate",
        "bool kFlush": r.flush,
        "bool kDivide": r.apply != "multiply",
        "bool kCompare": r.apply == "compare",
        "bool kThenEncode": then_encodes(r),
        "bool kEncodeFirst": encodes_first(r),
        "bool kRoundScaled": r.round_scaled,
        "bool kStochasticFloat16": r.stochastic == "comfy_kitchen_fp8",
        "bool kRepacked": r.repacked,
        "bool kNanIsMax": r.nan_is_max,
        "bool kNanSign": r.nan_sign,
        "bool kNarrow": r.narrow,
        "bool kFourOverSix": r.four_over_six is not None,
        "bool kSquaredError": r.four_over_six == "mse",
        "bool kLargestError": r.four_over_six == "max",
        "bool kFastError": r.fast_error,
        "bool kIsCute": r.block_rule == "four_over_six_cute",
        "bool kLaneSums": r.lane_sums,
        "bool kKeepInfinity": r.keep_infinity,
        "AmaxNan kAmaxNan": f"AmaxNan::{r.amax_nan}",
        "Rounding kRounding": f"Rounding::{r.rounding}",
        "Sign kSign": f"Sign::{r.sign}",
        "TensorScaling kTensorScaling": f"TensorScaling::{r.tensor_scaling}",
    }


@lru_cache(1024)
def recipe_struct(
    r: Recipe,
    layout: str = "linear",
    *,
    fake: bool = False,
    stochastic: bool = False,
    sign_mask: int | None = None,
    finds_amax: bool = False,
    row_step: tuple[str, int] = ("none", THREAD_BYTES),
    calibrated: bool = False,
) -> str:
    """Return the C++ structs for a recipe: its formats, and R, which names the formats, rules and options."""
    facts = _recipe_facts(r) | {
        "bool kStatic": r.static or calibrated,
        "u32 kSignMask": sign_mask or 0,
        "bool kFake": fake,
        "bool kStochastic": stochastic,
        "bool kHadamard": sign_mask is not None,
        "int kFinders": FINDERS if finds_amax else 0,
        "RowStep kRowStep": f"RowStep::{row_step[0]}",
        "int kThreadBytes": row_step[1],
        "ScaleLayout kLayout": f"ScaleLayout::{layout}",
    }
    if stochastic and r.stochastic in NOISE_STOCHASTICS:  # read by quantize_stochastic.cu alone
        facts["bool kMslkNoise"] = r.stochastic == "mslk"
        facts["bool kComfyuiOnGpu"] = r.stochastic == "comfyui_nvfp4_cuda"
    unit = fake_unit(r)
    if unit > 1:  # read by fake_ms_eden.cu alone
        facts["int kUnit"] = unit
        facts["bool kHasIntegers"] = r.fake_rule == "ms_eden_if4"
    formats = [format_struct(r.element, "ElementFormat"), format_struct(r.scale or E4M3, "ScaleFormat")]
    if isinstance(r.element, IntegerOrFloat):
        formats.append(format_struct(E2M1, "FloatFormat"))
    chooses = r.block_rule is None or BLOCK_RULES[r.block_rule].chooses
    block_rule, fake_rule = "none" if chooses else r.block_rule, r.fake_rule
    if r.block_rule and BLOCK_RULES[r.block_rule].whole:  # the fake rules of HiF4 are HiFloat4's
        block_rule, fake_rule = ("hif4", fake_rule) if fake and fake_rule else (block_rule, "hif4")
    names = [
        "using Element = ElementFormat;",
        "using Scale = ScaleFormat;",
        f"using TensorRule = tensor_{r.tensor_rule or 'none'};",
        f"using BlockRule = block_{block_rule};",
        f"using DecodeRule = {decode_rule(r)};",
        *([f"using FakeRule = fake_{fake_rule};"] if fake_rule and unit == 1 else []),
        *(["using FloatElement = FloatFormat;"] if isinstance(r.element, IntegerOrFloat) else []),
    ]
    constants = [constant(name, value) for name, value in facts.items()]
    cluster = [f"#define FP4KIT_FINDERS {FINDERS}"] if finds_amax else []
    return "\n".join([*cluster, *formats, f"struct R {{ {' '.join(names + constants)} }};"])


def decode_rule(r: Recipe) -> str:
    """Return the name of the C++ struct by which kernels decode a recipe, such as "decode_product"."""
    if r.scale is None and r.decode_rule == "product":
        return "decode_tensor"
    if r.is_custom and r.scale is not None and not r.scale.has_zero:
        return "decode_e8m0"  # recipes with E8M0 block scales have no tensor scale
    if isinstance(r.element, IntegerOrFloat):
        return f"two_formats<decode_{r.decode_rule}>"
    return f"decode_{r.decode_rule}"
