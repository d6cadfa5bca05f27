"""Give other programs the CPU engine: its header, its library, and what describes a recipe there."""

from __future__ import annotations

from pathlib import Path

from fp4kit.arguments import explains_calls
from fp4kit.cpu.codec import INPUTS, SEGMENT, decode_key, element_key, kept_factors, not_encoded, rule_key, tensor_key
from fp4kit.cpu.library import library
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.recipes.schema import decoding
from fp4kit.reference.arith import reciprocal_table


def get_include() -> str:
    """Return the folder of fp4kit.h, the header of the CPU engine's C API.

    Returns:
        The path of a folder, for the compiler's option -I.

    Examples:
        >>> import fp4kit, os
        >>> os.listdir(fp4kit.get_include())
        ['fp4kit.h']
    """
    return str(Path(__file__).parents[1] / "include")


def get_library() -> str:
    """Return the path of the CPU engine's library for this processor.

    A C program links it by this path or opens it with dlopen. Python opens it with ctypes.

    Returns:
        The path of a shared library. fp4kit.h declares its functions.

    Raises:
        OSError: the engine is not compiled here.

    Examples:
        >>> import ctypes, fp4kit
        >>> if fp4kit.engine() != "reference":
        ...     library = ctypes.CDLL(fp4kit.get_library())
    """
    found = library()
    if found.functions is None:
        raise OSError(f"get_library: the CPU engine is not available: {found.level}")
    return str(found.functions._name)


def get_reciprocals() -> bytes:
    """Return the table that the C function fp4kit_set_reciprocals takes.

    It corrects 1 / x to what the instruction rcp.approx.ftz.f32 gives on an NVIDIA GPU. Without it, recipes of kernels
    that use the instruction, such as FlashInfer's, make the functions of fp4kit.h return 1.

    Returns:
        2^23 signed bytes: the differences in ulp, by the mantissa bits of x. They were measured on an H200 (sm_90).

    Examples:
        >>> import fp4kit
        >>> len(fp4kit.get_reciprocals())
        8388608
    """
    return reciprocal_table().tobytes()


@explains_calls
def engine_keys(recipe: str | Recipe, dtype: str = "float32") -> dict[str, str | int | float]:
    """Return the texts and numbers by which a C program describes a recipe to the CPU engine.

    Args:
        recipe: a recipe or its id, which `quantize` computes without search and with at most one tensor scale per row.
        dtype: the type of the elements and of the decoded values: "float32", "float16" or "bfloat16".

    Returns:
        The keys "block_rule", "tensor_rule", "element" and "decoder", for the functions of fp4kit.h that return
        indices, the values of the fields "block", "block_rows", "tensor_step", "min_factor" and "max_factor", and
        "code_bits", the bits of memory per code. A key is "" if the recipe has no such rule.

    Raises:
        TypeError: recipe is neither a str nor a Recipe.
        ValueError: the recipe or the dtype is unknown, or the C API cannot compute the recipe.
        NotImplementedError: the recipe searches a constant for the whole array.

    Examples:
        >>> import fp4kit
        >>> fp4kit.engine_keys("nvfp4-te")["element"]
        'E2M1 multiply rn signbit'
    """
    r, x_dtype = recipe_of("engine_keys", recipe), {d.name: d for d in INPUTS}.get(dtype if type(dtype) is str else "")
    if x_dtype is None:
        raise ValueError(f"engine_keys: dtype is {dtype!r}; needs 'float32', 'float16' or 'bfloat16'")
    if r.is_custom or r.search or r.fake_only or r.tensor_scaling == "block" or not_encoded(r):
        raise ValueError(f"engine_keys: the C API cannot compute {r.id}; use fp4kit.quantize")
    rules = (rule_key(r) or "", tensor_key(r) or "", element_key(r), decode_key(decoding(r, x_dtype)))
    columns = r.block_size if r.block else SEGMENT
    block = r.element.packing.stored_bits, columns, r.block_rows, int(r.tensor_scaling == "row")
    names = "block_rule tensor_rule element decoder code_bits block block_rows tensor_step min_factor max_factor"
    return dict(zip(names.split(), (*rules, *block, *kept_factors(r, x_dtype)), strict=True))
