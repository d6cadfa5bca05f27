"""fp4kit: quantize arrays to 4-bit floating point, bit for bit as Transformer Engine, vLLM and other producers do.

`quantize`, `dequantize`, `fake_quantize` and the other functions take an array of any library and a recipe id such as
"nvfp4-te". A recipe is the complete arithmetic of one producer, that is a library that writes FP4 numbers. `recipes()`
lists the ids.

Examples:
    >>> import fp4kit, numpy as np
    >>> x = np.float32([[0.1, -6, 2.4, 0.6] * 8])
    >>> q = fp4kit.quantize(x, "nvfp4-te")  # codes and scales; print(q) shows them
    >>> fp4kit.dequantize(q).shape, fp4kit.fake_quantize(x, "mxfp4")[0, :4]
    ((1, 32), array([ 0. , -6. ,  2. ,  0.5], dtype=float32))
    >>> fp4kit.recipe("nvfp4").id, fp4kit.recipes()[:2]
    ('nvfp4-te', ('nvfp4-te', 'nvfp4-te-2d'))
"""

import fp4kit.startup  # noqa: F401  # first, so that Ctrl-C works while the other modules are imported

# isort: split
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fp4kit.arguments import suggestion
from fp4kit.cpu.library import num_threads, set_num_threads, threads
from fp4kit.display import format_panel, html_of, text_of
from fp4kit.display import recipe_panel as panel
from fp4kit.lazy import FUNCTIONS
from fp4kit.ops.amax import amax, partial_amax, partial_cast, search_scales
from fp4kit.ops.engines import engine, specification
from fp4kit.ops.grouped import (
    GroupedPlan,
    amax_grouped,
    fake_quantize_grouped,
    fake_quantize_grouped_backward,
    quantize_grouped,
)
from fp4kit.ops.kv_cache import dequantize_kv, quantize_kv
from fp4kit.ops.matmul import matmul
from fp4kit.ops.quantize import (
    Requantized,
    dequantize,
    fake_quantize,
    fake_quantize_backward,
    quantize,
    quantize_both,
    requantize,
)
from fp4kit.ops.transforms import (
    concatenate,
    hadamard,
    pack,
    random_signs,
    rotate,
    swizzle,
    transpose,
    unpack,
    unswizzle,
)
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.slicing import allow_torch_load, moved_to, part_of, reduced, same_bits
from fp4kit.recipes import Recipe, custom_recipe, recipe, recipes
from fp4kit.units import DotAdd, FloorDotAdd, IntegerAdd, Unit, unit, units

_MODULES = ("attention", "calibration", "checkpoint", "cuda", "jax", "plot", "qat", "testing", "torch")
# Names that users may expect in this module: {name: end of the error message, which says where the name is}.
_ELSEWHERE = {
    **dict.fromkeys(
        ("FakeQuantSettings", "FakeQuantized", "fake_quantize_model"),
        "; it is in fp4kit.torch, after import fp4kit.torch",
    ),
    "linear": "; it is fp4kit.torch.linear, after import fp4kit.torch, or fp4kit.jax.linear, after import fp4kit.jax",
    "pad": "; it is fp4kit.layouts.pad",
    "convert": "; it is fp4kit.checkpoint.convert, after import fp4kit.checkpoint",
}

# {public name: the module that has it}, for names that are imported at their first use, so that importing fp4kit takes
# less time. They compare, explain or identify results, read or write files, or serve distributed training.
_LAZY = {
    "Comparison": "fp4kit.ops.compare",
    "Contract": "fp4kit.contract.schema",
    "ContractDiff": "fp4kit.contract.schema",
    "ErrorBudget": "fp4kit.ops.matmul",
    "ExplainedStep": "fp4kit.ops.explain",
    "Explanation": "fp4kit.ops.explain",
    "Identification": "fp4kit.ops.identify",
    "KVIdentification": "fp4kit.ops.kv_cache",
    "LayerParity": "fp4kit.contract.compare_layer",
    "MasterWeightsPlan": "fp4kit.training.master_weights",
    "Parity": "fp4kit.contract.compare_layer",
    "RecipeComparison": "fp4kit.ops.compare",
    "Shard": "fp4kit.training.master_weights",
    "Sparse": "fp4kit.quantized.sparse",
    "cast_master_weights": "fp4kit.training.master_weights",
    "compare": "fp4kit.ops.compare",
    "compare_recipes": "fp4kit.ops.compare",
    "engine_keys": "fp4kit.cpu.c_api",
    "error_budget": "fp4kit.ops.matmul",
    "explain": "fp4kit.ops.explain",
    "get_include": "fp4kit.cpu.c_api",
    "get_library": "fp4kit.cpu.c_api",
    "get_reciprocals": "fp4kit.cpu.c_api",
    "identify": "fp4kit.ops.identify",
    "identify_kv": "fp4kit.ops.kv_cache",
    "load": "fp4kit.storage.quantized_file",
    "matmul_grouped": "fp4kit.ops.matmul",
    "open_checkpoint": "fp4kit.checkpoint",
    "parity": "fp4kit.contract.parity",
    "quantize_static": "fp4kit.ops.amax",
    "save": "fp4kit.storage.quantized_file",
    "serving": "fp4kit.contract.engines",
    "servings": "fp4kit.contract.engines",
    "Serving": "fp4kit.contract.engines",
}

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fp4kit.contract.compare_layer import LayerParity, Parity
    from fp4kit.contract.engines import Serving, serving, servings
    from fp4kit.contract.parity import parity
    from fp4kit.contract.schema import Contract, ContractDiff
    from fp4kit.cpu.c_api import engine_keys, get_include, get_library, get_reciprocals
    from fp4kit.ops.amax import quantize_static
    from fp4kit.ops.compare import Comparison, RecipeComparison, compare, compare_recipes
    from fp4kit.ops.explain import ExplainedStep, Explanation, explain
    from fp4kit.ops.identify import Identification, identify
    from fp4kit.ops.kv_cache import KVIdentification, identify_kv
    from fp4kit.ops.matmul import ErrorBudget, error_budget, matmul_grouped
    from fp4kit.quantized.sparse import Sparse
    from fp4kit.storage.quantized_file import load, save
    from fp4kit.training.master_weights import MasterWeightsPlan, Shard, cast_master_weights

    def open_checkpoint(path: str | Path, recipe: str | Recipe | None = None) -> Mapping[str, Quantized]:
        """Open a checkpoint, and return its quantized layers by name. This is fp4kit.checkpoint.open_checkpoint.

        Args:
            path: a model directory, a .safetensors file or a GGUF file.
            recipe: the recipe of the layers, which determines how they are decoded. None for the recipe that the
                checkpoint records. If it records none, a recipe of the container's producer is used.

        Returns:
            A fp4kit.checkpoint.QuantizedLayers: a mapping from layer name to Quantized. Codes and scales are read when
            a layer is looked up.

        Raises:
            CheckpointError: there is no checkpoint at this path, or it is malformed.
            ValueError: no recipe has this id.
        """

else:  # type checkers would accept any attribute of a module with __getattr__

    def __getattr__(name: str) -> Any:
        """Return the public object of this name, such as fp4kit.compare, which is imported only at its first use.

        Python calls this for a name that the module does not have yet. An object that is found is kept in the module,
        so each name comes here only once. Modules such as fp4kit.plot are imported too. Raise AttributeError for other
        names. The error message says where a name that users may expect here is, such as fp4kit.linear, or suggests a
        similar name.
        """
        if name in _LAZY:
            return globals().setdefault(name, getattr(import_module(_LAZY[name]), name))
        if name in _MODULES:
            try:
                return import_module(f"fp4kit.{name}")
            except ImportError as error:  # of a library, such as torch
                raise AttributeError(f"fp4kit.{name}: {error}", name=name) from error
        way_out = _ELSEWHERE.get(name) or suggestion(name, globals().get("__all__", ()))
        raise AttributeError(f"module 'fp4kit' has no attribute {name!r}{way_out}", name=name)


def __dir__() -> list[str]:
    """Return the names that dir(fp4kit) and completion show: the public names, __version__ and the modules."""
    return [*__all__, "__version__", "formats", "layouts", *_MODULES]


FUNCTIONS.update(  # methods of Quantized and Recipe call these functions; see lazy.py
    {
        "Quantized.dequantize": dequantize,
        "Quantized.from_parts": lambda *arguments: import_module("fp4kit.reference.tensor_rules").divisor_amaxes(
            *arguments
        ),
        "Quantized.to": moved_to,
        "Quantized.__getitem__": part_of,
        "Quantized.equals": same_bits,
        "Quantized.__reduce_ex__": reduced,
        "ElementFormat._repr_html_": lambda f: format_panel(f).html(),
        "Quantized.__str__": text_of,
        "Quantized._repr_html_": html_of,
        "Recipe.panel": panel,
        "Recipe.evidence": lambda recipe: import_module("fp4kit.evidence.live.run").evidence_of(recipe),
        "parity.open": lambda *arguments: import_module("fp4kit.checkpoint.contract").opened(*arguments),
        "parity.live": lambda model, recipe=None: import_module("fp4kit.torch.live").of_module(model, recipe=recipe),
        "Contract.of": lambda *arguments: import_module("fp4kit.checkpoint.contract").contract_of(*arguments),
    }
)

allow_torch_load()

__version__ = "0.3.0"

__all__ = [
    "Comparison",
    "Contract",
    "ContractDiff",
    "DotAdd",
    "ErrorBudget",
    "ExplainedStep",
    "Explanation",
    "FloorDotAdd",
    "GroupedPlan",
    "Identification",
    "IntegerAdd",
    "KVIdentification",
    "LayerParity",
    "MasterWeightsPlan",
    "Parity",
    "Quantized",
    "Recipe",
    "RecipeComparison",
    "Requantized",
    "Serving",
    "Shard",
    "Sparse",
    "Unit",
    "amax",
    "amax_grouped",
    "cast_master_weights",
    "compare",
    "compare_recipes",
    "concatenate",
    "custom_recipe",
    "dequantize",
    "dequantize_kv",
    "engine",
    "engine_keys",
    "error_budget",
    "explain",
    "fake_quantize",
    "fake_quantize_backward",
    "fake_quantize_grouped",
    "fake_quantize_grouped_backward",
    "get_include",
    "get_library",
    "get_reciprocals",
    "hadamard",
    "identify",
    "identify_kv",
    "load",
    "matmul",
    "matmul_grouped",
    "num_threads",
    "open_checkpoint",
    "pack",
    "parity",
    "partial_amax",
    "partial_cast",
    "quantize",
    "quantize_both",
    "quantize_grouped",
    "quantize_kv",
    "quantize_static",
    "random_signs",
    "recipe",
    "recipes",
    "requantize",
    "rotate",
    "save",
    "search_scales",
    "serving",
    "servings",
    "set_num_threads",
    "specification",
    "swizzle",
    "threads",
    "transpose",
    "unit",
    "units",
    "unpack",
    "unswizzle",
]
