"""The CUDA engine: kernels, the code that compiles and launches them, and the operations on CuPy arrays.

`source`, `compile` and `kernels` give the kernels to other programs, as fp4kit launches them. All modules of this
package can be imported without a GPU or CuPy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from operator import index
from struct import pack
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from fp4kit.arguments import explains_calls
from fp4kit.call import parse
from fp4kit.call.inputs import AbstractArray
from fp4kit.cuda import amax, compiler, dispatch, matrix, transforms
from fp4kit.cuda.compiler import Resources
from fp4kit.cuda.launch import Launch, Target
from fp4kit.cuda.search import without_search
from fp4kit.formats import FLOATS
from fp4kit.layouts import SCALE_LAYOUTS
from fp4kit.quantized.container import scale_shape, tensor_amax_shape
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.recipes.rules import COMFYUI_STOCHASTICS, SCALE_STOCHASTICS
from fp4kit.recipes.schema import has_tall_scales, with_row_blocks
from fp4kit.reference.tensor_rules import encodes_by_amax
from fp4kit.types import Hadamard, RoundingMode, ScaleLayout

__all__ = ["Field", "Kernel", "Resources", "compile", "kernels", "source"]


class Field(NamedTuple):
    """An argument of a kernel: a field of 8 bytes of the struct that the kernel takes by value.

    Attributes:
        name: its name.
        type: its C type, such as "const float*" for the address of float32 numbers, or "int64_t".
        meaning: what it holds. "null" means that the address is 0 in that case.
        needed: whether the launch needs an address. Other addresses may be 0.
        value: the number that fp4kit passes for this shape. 0 for addresses, and for numbers that the caller chooses.
        alignment: the number of bytes of which the address must be a multiple. 1 for numbers.
    """

    name: str
    type: str
    meaning: str
    needed: bool
    value: int
    alignment: int


@dataclass(frozen=True, repr=False)
class Kernel:
    """A kernel, and how fp4kit launches it for one matrix.

    The grid has one dimension. The launch has no dynamic shared memory, no attributes and one parameter, the struct of
    `fields`, by value.

    Attributes:
        operation: what it computes, as passed to `source`.
        call: the call to `source` that returns it, as text.
        arch: the architecture that it is compiled for, such as "sm_90" or "sm_100a".
        name: the name of the kernel, which has C linkage.
        grid: the number of thread blocks. The results do not depend on it. It must be a multiple of `cluster`.
        block: the number of threads per thread block. The kernel needs exactly this number.
        cluster: the number of thread blocks per cluster, which the cubin sets.
        options: the options for NVRTC or nvcc. Without -fmad=false and -ftz=false, bits of the results differ.
        fields: the fields of the struct, in order.
    """

    operation: str
    call: str
    arch: str
    name: str
    grid: int
    block: int
    cluster: int
    options: tuple[str, ...]
    fields: tuple[Field, ...]
    _instantiation: str

    def __repr__(self) -> str:
        """Return the call to `source`, the name, and the size of the launch."""
        return f"Kernel({self.call}: {self.name}, grid {self.grid}, block {self.block})"

    @property
    def source(self) -> str:
        """The CUDA C++ text that fp4kit compiles. It includes no file."""
        return compiler.with_headers(self._instantiation)

    @property
    def declaration(self) -> str:
        """A header for C and C++ programs: the struct, the name of the kernel, the grid and the block."""
        name, values = f"fp4kit_{self.operation}", ", ".join(str(f.value) for f in self.fields)
        facts = {"KERNEL": f'"{self.name}"', "GRID": self.grid, "BLOCK": self.block, "ARGUMENTS": f"{{{values}}}"}
        lines = [f"// {self.call}", "#pragma once", "#include <stdint.h>", f"struct {name} {{"]
        for f in self.fields:
            kind = f"{f.type}, aligned to {f.alignment}: " if f.type.endswith("*") else ""
            lines.append(f"  {'uint64_t' if kind else f.type} {f.name};  // {kind}{f.meaning}")
        return "\n".join([*lines, "};", *(f"#define {name.upper()}_{k} {v}" for k, v in facts.items()), ""])

    def pack(self, **values: int) -> bytes:
        """Return the bytes of the struct.

        Args:
            values: addresses and numbers, by the names of `fields`. Fields that are left out get their `Field.value`.

        Raises:
            TypeError: a name is unknown, a needed field is missing, or a value is no int.
            ValueError: a value does not fit its type; a needed address is 0; or an address is no multiple of
                `Field.alignment`.
        """
        needed = [f.name for f in self.fields if f.needed]
        if missing := [name for name in needed if name not in values]:
            raise TypeError(f"pack: {', '.join(missing)} missing; {self.name} needs {', '.join(needed)}")
        if unknown := values.keys() - {f.name for f in self.fields}:
            raise TypeError(f"pack: {self.name} has no field {min(unknown)!r}; see Kernel.fields")
        return pack(f"{len(self.fields)}Q", *(self._word(f, values.get(f.name, f.value)) for f in self.fields))

    def _word(self, field: Field, value: int) -> int:
        name, bits = f"pack: {field.name} is", 63 if field.type == "int64_t" else 64
        try:
            word = index(value)
        except TypeError:
            raise TypeError(f"{name} {value!r:.60}; needs an int, as {field.type}") from None
        if not 0 <= word < 1 << bits:
            raise ValueError(f"{name} {word}; {field.type} needs 0 to 2^{bits} - 1")
        if field.needed and word == 0:
            raise ValueError(f"{name} 0; {self.name} needs an address")
        if word % field.alignment:
            raise ValueError(f"{name} {word:#x}; {self.name} needs a multiple of {field.alignment}")
        return word

    def resources(self) -> Resources:
        """Return the registers and the memory that the kernel uses. NVRTC compiles it, which takes about a second."""
        return compiler.resources(self._instantiation, self.arch, self.name)[0]


@dataclass(frozen=True)
class _Array(AbstractArray):
    """An array for which a launch is prepared. It begins at a multiple of 16 bytes if `start` is 0."""

    target: Target
    start: int

    itemsize = property(lambda self: self.dtype.itemsize)
    data = property(lambda self: SimpleNamespace(ptr=self.start))
    device = property(lambda self: SimpleNamespace(id=self.target))


Prepared = tuple[Launch, list[str]]  # a launch, and the names of the fields that it needs


def _quantize(call: parse.Call, both: bool, values: bool = False) -> Prepared:
    r, x, columns = call.recipe, call.x, both or call.axis == 0
    request = matrix.launch_request(call, values=values, columns=columns)
    if columns and dispatch.find_kernel(request) is None and dispatch.find_kernel(matrix.launch_request(call)):
        raise parse.Declined(f"{r.id} has no kernel along columns; needs axis=-1 and a transposed copy of x")
    choice = dispatch.kernel_for(request)
    finds = call.tensor_amax is None and not call.has_scales and r.tensor_scaling != "none"
    by_rule = finds and dispatch.uses_fake_rule(request) and r.tensor_scaling == "block"  # needs no array of amaxes
    if finds and not by_rule:
        request = matrix.with_kernel_amax(call, request, x)
        if not request.finds_amax:
            raise parse.Declined(
                f"no kernel computes the amaxes of {x.shape} while it quantizes; needs given='tensor_amax', and the"
                " operation 'tensor_amax' before it"
            )
    aligned = matrix.has_aligned_runs(matrix.Matrix(x, values=x if values else None), request)
    names = {"packed": "packed", "block_scale": "scales", "tensor_scale": "tensor_scale"}
    prefixes = ("", "column_") if both else ("column_" * columns,)
    results = [prefix + names[part] for prefix in prefixes for part in call.part_specs() if part in names]
    reads_amax = encodes_by_amax(r) if call.has_scales else r.tensor_scaling != "none" and not by_rule
    reads_random = call.random is not None and r.stochastic not in ("te", *SCALE_STOCHASTICS)
    needed = {"tensor_amax": reads_amax, "block_amax": call.block_amax is not None, "random": reads_random}
    launch = matrix.quantize_launch(choice, request, aligned, x.target)
    return launch, ["x", *(["values"] if values else results), *(name for name in needed if needed[name])]


def _fake_quantize(call: parse.Call, both: bool) -> Prepared:
    return _quantize(call, both, values=True)


def _tensor_amax(call: parse.Call, both: bool) -> Prepared:
    r, x = call.recipe, call.x
    if r.tensor_scaling == "none":
        raise ValueError(f"source: {r.id} has no tensor scale, so it needs no tensor_amax")
    if has_tall_scales(r) or x.shape[-1] % r.tensor_columns or (call.axis == 0 and r.tensor_scaling != "tensor"):
        raise parse.Declined(f"the amaxes of {r.id} along axis {call.axis} take several launches; use fp4kit.quantize")
    if call.axis == 0 and call.mask is not None:
        return amax.hadamard_amax_launch(x, matrix.COUNTED[r.amax_nan], call.mask), ["x", "amax"]
    return matrix.amax_launch(*amax.tensor_amax_operands(x, r), call.mask), ["x", "amax"]


def _dequantize(call: parse.Call, both: bool) -> Prepared:
    r, x = with_row_blocks(call.recipe), call.x
    if matrix.implies_amaxes(r):
        raise parse.Declined(f"decoding {r.id} takes several launches; use fp4kit.dequantize")
    scales = ["scales"] * (r.scale is not None) + ["tensor_scale"] * (r.tensor_scaling != "none")
    launch = matrix.dequantize_launch(r, call.layout, x.dtype, x.dtype, x.shape, x.target)
    return launch, ["packed", *scales, "values"]


def _clip(call: parse.Call, both: bool) -> Prepared:
    limit = AbstractArray(tensor_amax_shape(call.x.shape, call.recipe), FLOAT32)
    return matrix.clip_launch(call.x, call.x, limit, call.x), ["grad", "x", "amax", "out"]


def _transpose(call: parse.Call, both: bool) -> Prepared:
    r, x = call.recipe, call.x
    parse.square_block("transpose", r, x.shape[0])
    transforms.check_square(r)
    launch = transforms.transpose_launch(x, x, r, call.layout, x, x, (1, *x.shape))
    return launch, ["codes", "scales", "codes_out", "scales_out"]


def _swizzle(call: parse.Call, both: bool) -> Prepared:
    x, (old, new) = call.x, ("linear", call.layout) if call.op == "swizzle" else (call.layout, "linear")
    if call.recipe.scale is None:
        raise ValueError(f"source: {call.recipe.id} has no block scales; {call.op} needs them")
    rows, columns = scale_shape(x.shape, call.recipe)
    return transforms.swizzle_launch(x, old, x, new, (1, rows, columns)), ["in", "out"]


# The architectures that NVRTC 12.9 to 13.5 know, from the oldest that kernels are tested for: {suffixes: numbers}.
_SUFFIXES = {"": (75, 80, 86, 87, 88, 89), "a": (90,), "af": (100, 101, 103, 107, 110, 120, 121)}
ARCHITECTURES = tuple(f"sm_{n}{s}" for suffixes, numbers in _SUFFIXES.items() for n in numbers for s in ("", *suffixes))
FLOAT32, DTYPES = FLOATS[0], {dtype.name: dtype for dtype in FLOATS}
Values = dict[str, tuple[Any, ...]]
_DEFAULTS = {"axis": -1, "scale_layout": "linear", "rounding": "nearest", "hadamard": False, "given": "tensor_amax"}
_LAYOUTS: Values = {"scale_layout": SCALE_LAYOUTS}
_TRANSFORMS: Values = {"hadamard": (False, True, "no_signs")}
_CHOICES: Values = {
    "rounding": ("nearest", "stochastic"),
    "given": ("none", "tensor_amax", "block_amax", "scales"),
} | _TRANSFORMS
# {operation: (the function that prepares its launch, the values of the options that it takes)}
_OPERATIONS: dict[str, tuple[Callable[[parse.Call, bool], Prepared], Values]] = {
    "quantize": (_quantize, {"axis": (-1, 0, "both")} | _LAYOUTS | _CHOICES),
    "fake_quantize": (_fake_quantize, _CHOICES),
    "tensor_amax": (_tensor_amax, {"axis": (-1, 0)} | _TRANSFORMS),
    "dequantize": (_dequantize, _LAYOUTS),
    "fake_quantize_backward": (_clip, {}),
    "transpose": (_transpose, _LAYOUTS),
    "swizzle": (_swizzle, {"scale_layout": SCALE_LAYOUTS[1:]}),
    "unswizzle": (_swizzle, {"scale_layout": SCALE_LAYOUTS[1:]}),
}


@explains_calls
def source(
    operation: str,
    recipe: str | Recipe,
    dtype: str = "bfloat16",
    arch: str = "sm_90",
    *,
    shape: tuple[int, int] = (4096, 4096),
    axis: Literal[-1, 0, "both"] = -1,
    scale_layout: ScaleLayout = "linear",
    rounding: RoundingMode = "nearest",
    hadamard: Hadamard = False,
    given: Literal["none", "tensor_amax", "block_amax", "scales"] = "tensor_amax",
    aligned: bool = True,
    multiprocessors: int = 132,
) -> Kernel:
    """Return the kernel that fp4kit launches for an operation on one matrix, and how it launches it. Needs no GPU.

    Args:
        operation: "quantize", "fake_quantize", "tensor_amax" (the amaxes from which quantize computes tensor scales),
            "dequantize", "fake_quantize_backward" (the gradient where |x| <= amax, otherwise 0), "transpose", "swizzle"
            or "unswizzle".
        recipe: a recipe or its id.
        dtype: the type of the elements and of the decoded values: "float32", "float16" or "bfloat16".
        arch: the architecture, such as "sm_90", "sm_100a" or "sm_100f": one from sm_75 on that NVRTC 12.9 to 13.5
            know. From sm_100 on, a name without a suffix means that with "a", which fp4kit compiles for its launches.
        shape: the rows and columns of the matrix x, which is contiguous.
        axis: for quantize and tensor_amax: -1 for blocks along rows, 0 along columns; "both" for both results of
            quantize, from one read.
        scale_layout: the layout of the block scales. For swizzle it is the new one, for unswizzle the old one.
        rounding: for quantize and fake_quantize: "nearest" or "stochastic".
        hadamard: for quantize, fake_quantize and tensor_amax: as in `fp4kit.quantize`.
        given: for quantize and fake_quantize: what the kernel reads beside x. "tensor_amax", if the recipe has tensor
            scales; "block_amax" for block amaxes too; "scales" for block scales and tensor scales; "none" if it
            computes the tensor amaxes itself, as fp4kit lets it for up to 2^19 elements and for short rows.
        aligned: whether arrays begin at multiples of 16 bytes. If not, `Field.alignment` is smaller where the kernel
            allows it.
        multiprocessors: the number of the GPU's multiprocessors, on which the grid depends. 132 for an H200.

    Returns:
        The kernel. Kernels of several shapes with equal `Kernel.source` can share a cubin.

    Raises:
        TypeError: recipe is neither a str nor a Recipe.
        ValueError: an argument is unknown or does not fit the operation, or a length does not fit the recipe.
        NotImplementedError: no kernel computes this, or fp4kit launches several kernels.

    Examples:
        >>> import fp4kit.cuda
        >>> kernel = fp4kit.cuda.source("quantize", "nvfp4-te", "bfloat16", "sm_100a", shape=(128, 4096))
        >>> kernel.name, kernel.grid, kernel.block, kernel.options[-1]
        ('quantize_kernel', 64, 256, '-arch=sm_100a')
        >>> [field.name for field in kernel.fields if field.needed]
        ['x', 'packed', 'scales', 'tensor_amax', 'tensor_scale']
    """
    if type(operation) is not str or operation not in _OPERATIONS:
        raise ValueError(f"source: operation is {operation!r:.60}; needs one of {', '.join(_OPERATIONS)}")
    prepare, takes = _OPERATIONS[operation]
    options = dict(zip(_DEFAULTS, (axis, scale_layout, rounding, hadamard, given), strict=True))
    for name, value in options.items():
        values = takes.get(name, (_DEFAULTS[name],))
        if value not in values:
            needed = " or ".join(map(repr, values))
            raise ValueError(f"source: {name} is {value!r:.60}; {operation} needs {needed}")
    try:
        r = recipe_of(operation, recipe)
    except (TypeError, ValueError) as error:
        raise type(error)(f"source: {str(error).removeprefix(f'{operation}: ')}") from None
    x = _matrix(dtype, arch, shape, 0 if aligned else 1, multiprocessors)
    try:
        dispatch.check_formats(r)
        launch, needs = prepare(_call(operation, x, r, options), axis == "both")
    except parse.Declined as reason:  # without the advice for arrays, which source does not take
        why = str(reason).removesuffix(f"; {dispatch.ON_THE_CPU}").removesuffix("; needs an array in host memory")
        raise NotImplementedError(f"source: {why}") from None
    (text, name), fields, target = launch.function, launch.fields.names or (), x.target.arch
    sizes = dict(zip(fields[len(fields) - len(launch.sizes) :], launch.sizes, strict=True))
    members = _members(text.splitlines()[-1], name)
    has_clusters = "#define FP4KIT_FINDERS" in text and int(re.sub(r"\D", "", target)) >= 90
    words = [f"{k}={v!r}" for k, v in {"shape": shape, **options}.items() if v != _DEFAULTS.get(k)]
    words = [*map(repr, (operation, r.id, dtype, target)), *words, *["aligned=False"] * (not aligned)]
    return Kernel(
        operation,
        f"source({', '.join(words)})",
        target,
        name,
        launch.grid[0],
        launch.block[0],
        compiler.FINDERS if has_clusters else 1,
        (*compiler.OPTIONS, f"-arch={target}"),
        tuple(
            Field(n, *members[n], n in needs, sizes.get(n, 0), _alignment(name, text, n, members[n][0], x, r))
            for n in fields
        ),
        text,
    )


def _matrix(dtype: str, arch: str, shape: tuple[int, int], start: int, multiprocessors: int) -> _Array:
    """Return the matrix of a call to source, or raise ValueError."""
    if type(dtype) is not str or dtype not in DTYPES:
        raise ValueError(f"source: dtype is {dtype!r:.60}; needs {', '.join(map(repr, DTYPES))}")
    if type(arch) is not str or arch not in ARCHITECTURES:
        raise ValueError(f"source: arch is {arch!r:.60}; needs one of {', '.join(ARCHITECTURES)}")
    target = compiler.architecture(arch[3:]) if arch[3:].isdigit() else arch
    if type(shape) is not tuple or len(shape) != 2 or not all(type(n) is int and n > 0 for n in shape):
        raise ValueError(f"source: shape is {shape!r:.60}; needs two positive ints, the rows and columns")
    if type(multiprocessors) is not int or multiprocessors < 1:
        raise ValueError(f"source: multiprocessors is {multiprocessors!r:.60}; needs a positive int")
    return _Array(shape, DTYPES[dtype], Target(target, multiprocessors), start)


def _call(op: str, x: _Array, r: Recipe, chosen: dict[str, Any]) -> parse.Call:
    """Return the checked Call of an operation, as fp4kit makes it for an array."""
    axis, layout, rounding, hadamard, given = chosen.values()
    if r.stochastic_only and "rounding" not in _OPERATIONS[op][1]:
        rounding = "stochastic"  # so that the call is accepted; its kernel does not round
    seed = AbstractArray(x.shape, FLOAT32) if r.stochastic in COMFYUI_STOCHASTICS else 0
    options = parse.QuantizeOptions(layout, rounding, seed if rounding == "stochastic" else None, hadamard)
    moved, is_searched = x.shape[::-1] if axis == 0 else x.shape, given == "block_amax" and bool(r.search)
    amaxes: dict[str, Any] = {}
    if given != "none" and r.tensor_scaling != "none":
        amaxes["tensor_amax"] = AbstractArray(tensor_amax_shape(moved, r), FLOAT32)
    if given == "block_amax" and not is_searched:
        amaxes["block_amax"] = AbstractArray(scale_shape(moved, r), FLOAT32)
    has_codes = op not in ("fake_quantize", "fake_quantize_backward", "tensor_amax")
    row = (-1, options._replace(hadamard=False)) if axis == "both" else (axis, options)
    call = parse.quantize_call(op, x, r, *row, has_codes=has_codes, **amaxes)
    call = parse.columnwise(call, options) if axis == "both" else call
    if is_searched:
        return call._replace(recipe=without_search(r), block_amax=x)
    return call._replace(block_scale=x, tensor_scale=x, tensor_amax=None) if given == "scales" else call


def _alignment(kernel: str, text: str, field: str, kind: str, x: _Array, r: Recipe) -> int:
    """Return the Field.alignment of a field of the C type `kind`, for an instantiation of a kernel."""
    if not kind.endswith("*"):
        return 1
    if field == "random":
        return 4 if r.stochastic in COMFYUI_STOCHASTICS else 1
    is_elements = "void" in kind
    if not is_elements and "uint8_t" not in kind:
        return 4
    if kind == "uint8_t*" and kernel.startswith("quantize") and r.block:
        return 1 if field == "scales" and kernel != "quantize_hif4_kernel" else 16  # others store single bytes
    flag = "kScaleWords" if "transpose" in kernel and "scales" in field else "(kAligned|kQuads)"
    is_wide = re.search(f"{flag} = true", text) and (is_elements or not kernel.startswith("quantize"))
    return 16 if is_wide else x.itemsize if is_elements else 1


@cache
def _members(include: str, kernel: str) -> dict[str, tuple[str, str]]:
    """Return {name: (C type, comment)} of the struct that a kernel takes, as the file of an #include declares it."""
    text, found = compiler.with_headers(include), {}
    (struct,) = re.findall(rf"\b{kernel}\((\w+) \w+\)", text)
    (body,) = re.findall(rf"^struct {struct} {{\n(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    for kind, names, comment in re.findall(r"^  ((?:const )?\w+)([^;]*);(.*(?:\n +//.*)*)", body, re.MULTILINE):
        kind = re.sub(r"\b(u|i)(\d+)", lambda m: f"{'u' * (m[1] == 'u')}int{m[2]}_t", kind)
        for star, name in re.findall(r"(\*?) ?(\w+)", names):
            found[name] = kind + star, " ".join(comment.replace("//", "").split())
    return found


@explains_calls
def compile(kernel: Kernel) -> bytes:
    """Return the cubin of a kernel, which NVRTC compiles. Needs no GPU.

    fp4kit loads the same cubin for its own launches. It is kept in ~/.cache/fp4kit/cuda.

    Args:
        kernel: a kernel that `source` or `kernels` returned.

    Raises:
        TypeError: kernel is no Kernel.
        RuntimeError: NVRTC is not installed, or it does not know the architecture.

    Examples:
        >>> import fp4kit.cuda
        >>> kernel = fp4kit.cuda.source("dequantize", "mxfp4-ocp")
        >>> cubin = fp4kit.cuda.compile(kernel)  # doctest: +SKIP
    """
    if not isinstance(kernel, Kernel):
        raise TypeError(f"compile: kernel is {kernel!r:.60}; needs a Kernel that source or kernels returned")
    return compiler.cubin_path(kernel._instantiation, kernel.arch).read_bytes()


@explains_calls
def kernels(
    recipe: str | Recipe, dtype: str = "bfloat16", arch: str = "sm_90", *, shape: tuple[int, int] = (4096, 4096)
) -> list[Kernel]:
    """Return the kernels that serve a recipe: one for every operation, axis of quantize and rounding.

    Args:
        recipe, dtype, arch, shape: as in `source`.

    Returns:
        The kernels. `Kernel.call` says what each serves, and `Kernel.resources()` its registers and memory. A kernel
        takes at most 2^33 elements and, if the recipe has blocks, at most 2^32 - 1 columns.

    Raises:
        TypeError, ValueError, NotImplementedError: as `source`, if no kernel serves the recipe.

    Examples:
        >>> import fp4kit.cuda
        >>> for kernel in fp4kit.cuda.kernels("int8-modelopt", shape=(64, 256)):
        ...     print(f"{kernel.operation:24}{kernel.name:28}{kernel.grid} x {kernel.block}")
        quantize                quantize_unblocked_kernel   2 x 256
        fake_quantize           fake_quantize_kernel        2 x 256
        tensor_amax             amax_kernel                 4 x 256
        dequantize              dequantize_kernel           4 x 256
        fake_quantize_backward  clip_kernel                 8 x 256
    """
    found: list[Kernel] = []
    errors: list[Exception] = []
    given = "block_amax" if recipe_of("kernels", recipe).search else "tensor_amax"
    for operation, (_, takes) in _OPERATIONS.items():
        options: dict[str, Any] = {"given": given} if "given" in takes else {}
        options |= {"scale_layout": "swizzled_128x4"} if "swizzle" in operation else {}
        axes = takes["axis"] if operation == "quantize" else (-1,)
        for axis, rounding in product(axes, takes.get("rounding", ("nearest",))):
            options |= {"shape": shape, "axis": axis, "rounding": rounding}
            try:
                found.append(source(operation, recipe, dtype, arch, **options))
            except (ValueError, NotImplementedError) as reason:
                errors.append(reason)
    if not found:
        raise errors[0]
    return found
