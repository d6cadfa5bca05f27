"""Define all containers that fp4kit reads or writes. A container is one way to store a quantized linear layer as
tensors: their names, dtypes and shapes, and the formats of codes and scales (see container.py).

The table describes a layer P of shape [..., N, K]. Codes and scales are row-major. In a byte of two 4-bit codes,
element 2j of a row is in the low nibble and element 2j + 1 in the high nibble:

| container                               | codes                       | scales                 | tensor scale                  |
|-----------------------------------------|-----------------------------|------------------------|-------------------------------|
| modelopt NVFP4                          | P.weight U8 [N, K/2]        | P.weight_scale F8_E4M3 | P.weight_scale_2 F32 []       |
| modelopt mxfp4                          | P.weight U8 [N, K/2]        | P.weight_scale U8      |                               |
| modelopt MXFP8                          | P.weight F8_E4M3 [N, K]     | P.weight_scale U8      |                               |
| compressed-tensors nvfp4-pack-quantized | P.weight_packed U8 [N, K/2] | P.weight_scale F8_E4M3 | P.weight_global_scale F32[1]* |
| compressed-tensors mxfp4-pack-quantized | P.weight_packed U8 [N, K/2] | P.weight_scale U8      |                               |
| compressed-tensors mxfp8-quantized      | P.weight F8_E4M3 [N, K]     | P.weight_scale U8      |                               |
| sglang-mxfp8                            | P.weight F8_E4M3 [N, K]     | P.weight_scale_inv U8  |                               |
| gpt-oss                                 | P_blocks U8 [E,N,K/32,16]   | P_scales U8 [E,N,K/32] |                               |
| gpt-oss (.blocks), (.weight_blocks)     | the same under P.blocks, P.weight_blocks | P.scales, P.weight_scales |               |
| modelopt NVFP4 stacks                   | P U8 [E, K/2, N]            | P_weight_scale F8_E4M3 | P_weight_scale_2 F32 [] **    |
| deepseek-v4                             | P.weight I8 [N, K/2]        | P.scale F8_E8M0        |                               |
| deepseek-v4 nvfp4                       | as modelopt NVFP4           |                        |                               |
| fp8 128x128                             | P.weight F8_E4M3 [N, K]     | P.weight_scale_inv F32 |                               |
| fp8 128x128 ue8m0                       | P.weight F8_E4M3 [N, K]     | P.scale F8_E8M0        |                               |
| fp8 32x32, fp8 64x64                    | as fp8 128x128, in smaller tiles; "ue8m0": P.scale F8_E8M0, as DeepSeek-V4.1 has it  |
| fp8 TILE ue8m0 weight_scale_inv         | P.weight F8_E4M3 [N, K]     | P.weight_scale_inv F8_E8M0 |                           |
| mlx mxfp4                               | P.weight U32 [N, K/8]       | P.scales U8            |                               |
| mlx nvfp4, mlx nvfp4 global             | P.weight U32 [N, K/8]       | P.scales U8            | P.global_scale F32 [] ***     |
| mlx mxfp8                               | P.weight U32 [N, K/4]       | P.scales U8            |                               |
| modelopt NVFP4 group 32                 | P.weight U8 [N, K/2]        | P.weight_scale F8_E4M3 | P.weight_scale_2 F32 []       |
| quark nvfp4, mimo mxfp4                 | as modelopt NVFP4, as modelopt mxfp4                                                 |
| vllm fused mxfp4                        | P_weight U8 [E, N, K/2]     | P_weight_scale U8      |                               |
| msmodelslim mxfp4, msmodelslim mxfp8    | as modelopt mxfp4, as modelopt MXFP8                                                 |
| modelopt NVFP4_AWQ                      | as modelopt NVFP4, and P.pre_quant_scale [K], which multiplies the columns           |
| modelopt NVFP4_SVD                      | as modelopt NVFP4_AWQ, and low-rank parts A [r, K] and B [N, r]; see slabs.values_of |
| METHOD FP8                              | P.weight F8_E4M3 [N, K]     |                        | P.weight_scale []             |
| METHOD FP8 per row                      | P.weight F8_E4M3 [N, K]     | P.weight_scale [N, 1]  |                               |
| METHOD FP8 128x128                      | P.weight F8_E4M3 [N, K]     | P.weight_scale         |                               |
| comfy nvfp4                             | P.weight U8 [N, K/2], high nibble first | P.weight_scale F8_E4M3, swizzled | P.weight_scale_2  |
| comfy mxfp8                             | P.weight F8_E4M3 [N, K]     | P.weight_scale, swizzled |                             |
| comfy float8_e4m3fn, float8_e5m2, int8_tensorwise | P.weight F8_E4M3, F8_E5M2, I8 |                | P.weight_scale []             |
| comfy int8_tensorwise per row           | P.weight I8 [N, K]          | P.weight_scale [N]     |                               |
| comfy scaled_fp8, scaled_fp8 e5m2       | P.weight F8_E4M3, F8_E5M2   |                        | P.scale_weight []             |
| cast to float8_e4m3fn, float8_e5m2      | P.weight F8_E4M3, F8_E5M2; codes are the values                                      |
| torchao NVFP4, MXFP4, MXFP8             | P._weight_qdata             | P._weight_scale, swizzled | P._weight_per_tensor_scale |
| gguf MXFP4                              | P.weight MXFP4 [N, K]       | in its blocks          |                               |
| gguf NVFP4, gguf NVFP4 scaled           | P.weight NVFP4 [N, K]       | in its blocks          | P.scale F32 [1]               |

*    Decoding divides by the stored value; all other containers multiply.
**   The scales are [E, K/16, N]. The tensor scale is one value for all experts, or one value per expert.
***  The stored value is the tensor's amax: the tensor scale times the largest value of a block (6 * 448). The
     containers "mlx nvfp4" and "gguf NVFP4" have no tensor scale.

METHOD is modelopt, compressed-tensors or quark. With compressed-tensors, decoded values are rounded to the dtype of the
scales. ComfyUI's layers also have a tag, P.comfy_quant, or an entry in the safetensors metadata.

MLX and GGUF containers store experts as stacks [E, N, K], with one tensor scale per expert.

Sources: Model-Optimizer 0.47 export/quant_utils.py; compressed-tensors 0.20 compressors; SGLang 0.5.23 fp8.py;
transformers 5.23 integrations/mxfp4.py; the DeepSeek-V4 release; MLX 0.32.4, mlx-lm 0.32.2; llama.cpp 0c1e57098.
"""  # noqa: E501

from __future__ import annotations

import copyreg
from dataclasses import replace
from typing import Any

from fp4kit.checkpoint.containers.container import (
    CODES,
    COLUMN_SCALE,
    INPUT_SCALE,
    LOW_RANK_A,
    LOW_RANK_B,
    SCALES,
    TAG,
    TENSOR_SCALE,
    Container,
)
from fp4kit.formats import E2M1, E4M3, E5M2, E8M0, INT8, NVFP4, ElementFormat
from fp4kit.layouts import GGUF_BLOCKS

_Pair = tuple[str, str]


def _modelopt(
    name: str, kind: str, element: ElementFormat, scale: ElementFormat, size: int, dtypes: _Pair
) -> Container:
    """Return one of Model-Optimizer's containers with block scales, for the constants of this file."""
    suffixes = {CODES: ".weight", SCALES: ".weight_scale"}
    if kind == "nvfp4":
        suffixes |= {TENSOR_SCALE: ".weight_scale_2", INPUT_SCALE: ".input_scale"}
    return Container(f"modelopt {name}", "modelopt", kind, element, scale, (1, size), suffixes, *dtypes)


def _compressed(
    name: str, kind: str, element: ElementFormat, scale: ElementFormat, size: int, dtypes: _Pair
) -> Container:
    """Return one of the containers of compressed-tensors with block scales, for the constants of this file."""
    suffixes = {CODES: ".weight" if kind == "mxfp8" else ".weight_packed", SCALES: ".weight_scale"}
    if kind == "nvfp4":
        suffixes |= {TENSOR_SCALE: ".weight_global_scale", INPUT_SCALE: ".input_global_scale"}
    full = f"compressed-tensors {name}"
    return Container(
        full, "compressed-tensors", kind, element, scale, (1, size), suffixes, *dtypes, (1,), kind == "nvfp4"
    )


MODELOPT_NVFP4 = _modelopt("NVFP4", "nvfp4", E2M1, E4M3, 16, ("U8", "F8_E4M3"))
MODELOPT_MXFP4 = _modelopt("mxfp4", "mxfp4", E2M1, E8M0, 32, ("U8", "U8"))
MODELOPT_MXFP8 = _modelopt("MXFP8", "mxfp8", E4M3, E8M0, 32, ("F8_E4M3", "U8"))
CT_NVFP4 = _compressed("nvfp4-pack-quantized", "nvfp4", E2M1, E4M3, 16, ("U8", "F8_E4M3"))
CT_MXFP4 = _compressed("mxfp4-pack-quantized", "mxfp4", E2M1, E8M0, 32, ("U8", "U8"))
CT_MXFP8 = _compressed("mxfp8-quantized", "mxfp8", E4M3, E8M0, 32, ("F8_E4M3", "U8"))
SGLANG_MXFP8 = Container(
    "sglang-mxfp8",
    "sglang-mxfp8",
    "mxfp8",
    E4M3,
    E8M0,
    (1, 32),
    {CODES: ".weight", SCALES: ".weight_scale_inv"},
    "F8_E4M3",
    "U8",
)
GPT_OSS = Container(
    "gpt-oss",
    "gpt-oss",
    "mxfp4",
    E2M1,
    E8M0,
    (1, 32),
    {CODES: "_blocks", SCALES: "_scales"},
    "U8",
    "U8",
    stack="blocks",
)
DEEPSEEK_V4 = Container(
    "deepseek-v4", "deepseek-v4", "mxfp4", E2M1, E8M0, (1, 32), {CODES: ".weight", SCALES: ".scale"}, "I8", "F8_E8M0"
)
DEEPSEEK_V4_NVFP4 = replace(MODELOPT_NVFP4, name="deepseek-v4 nvfp4", format="deepseek-v4")
MODELOPT_STACKS = Container(
    "modelopt NVFP4 stacks",
    "",
    "nvfp4",
    E2M1,
    E4M3,
    (1, 16),
    {CODES: "", SCALES: "_weight_scale", TENSOR_SCALE: "_weight_scale_2", INPUT_SCALE: "_input_scale"},
    "U8",
    "F8_E4M3",
    stack="columns",
)
FP8_BLOCKS = Container(
    "fp8 128x128",
    "fp8",
    "fp8",
    E4M3,
    None,
    (128, 128),
    {CODES: ".weight", SCALES: ".weight_scale_inv"},
    "F8_E4M3",
    "F32",
)
# The safetensors dtypes of codes and scales in the containers that _fp8 returns. These are FP8 with one scale per layer
# or per row, or with 128x128 blocks whose scales are called weight_scale. fp4kit reads quark's, and Model-Optimizer's
# with blocks, but does not write them.
_FP8_DTYPES = ("F8_E4M3", "F32")


def _fp8(name: str, block: tuple[int, int], method: str) -> Container:
    """Return a container of FP8 codes with float32 scales."""
    part = SCALES if block[0] else TENSOR_SCALE
    suffixes = {CODES: ".weight", part: ".weight_scale", INPUT_SCALE: ".input_scale"}
    kind = {(128, 128): "fp8", (1, 0): "fp8 rows"}.get(block, "fp8 tensor")
    rounds = method == "compressed-tensors"
    sized = block if block[0] else (1, 0)
    is_read_only = method == "quark" or (method == "modelopt" and kind == "fp8")
    format = "" if is_read_only else method
    scalar = (1,) if rounds else ()
    flat = kind == "fp8 rows" and method == "modelopt"
    found = Container(f"{method} {name}", format, kind, E4M3, None, sized, suffixes, *_FP8_DTYPES, scalar)
    return replace(found, rounds=rounds, flat_scales=flat, method=method)


_FP8_BLOCKS = (("FP8", (0, 0)), ("FP8 per row", (1, 0)), ("FP8 128x128", (128, 128)))
FP8_LAYERS = tuple(
    _fp8(name, block, method) for method in ("modelopt", "compressed-tensors", "quark") for name, block in _FP8_BLOCKS
)
MODELOPT_FP8, MODELOPT_FP8_ROWS, _, CT_FP8, CT_FP8_ROWS, CT_FP8_BLOCKS = FP8_LAYERS[:6]
FP8_POWERS = Container(
    "fp8 128x128 ue8m0", "", "fp8", E4M3, E8M0, (128, 128), {CODES: ".weight", SCALES: ".scale"}, "F8_E4M3", "F8_E8M0"
)
_POWERS_INV = replace(
    FP8_POWERS,
    name="fp8 128x128 ue8m0 weight_scale_inv",
    suffixes={CODES: ".weight", SCALES: ".weight_scale_inv"},
    own_dtype=True,
    method="fp8",
)


def _tiled(like: Container, size: int) -> Container:
    """Return a variant of a container of FP8 in 128x128 tiles with tiles of another size, which is only read."""
    return replace(
        like, name=like.name.replace("128x128", f"{size}x{size}"), format="", block=(size, size), method="fp8"
    )


# The shape of the scales tells the size of the tiles. A layer that is a single tile has equal values in all sizes.
FP8_TILES = (
    _POWERS_INV,
    *(_tiled(like, size) for size in (64, 32) for like in (FP8_POWERS, FP8_BLOCKS, _POWERS_INV)),
)


# Model-Optimizer's NVFP4 with one E4M3 scale per 32 elements (W4A8_NVFP4_FP8).
MODELOPT_NVFP4_32 = replace(
    MODELOPT_NVFP4,
    name="modelopt NVFP4 group 32",
    format="",
    block=(1, 32),
    method="modelopt",
    algorithm="W4A8_NVFP4_FP8",
)
# Model-Optimizer's AWQ: decoded values are multiplied by one factor per column.
MODELOPT_AWQ = replace(
    MODELOPT_NVFP4,
    name="modelopt NVFP4_AWQ",
    format="",
    suffixes={**MODELOPT_NVFP4.suffixes, COLUMN_SCALE: ".pre_quant_scale"},
    method="modelopt",
)


def _svdquant(name: str, prefix: str) -> Container:
    """Return a container of Model-Optimizer's SVDQuant: NVFP4_AWQ with a low-rank matrix that is added on decode."""
    low_rank = {LOW_RANK_A: f"{prefix}svdquant_lora_a", LOW_RANK_B: f"{prefix}svdquant_lora_b"}
    return replace(MODELOPT_AWQ, name=f"modelopt {name}", suffixes={**MODELOPT_AWQ.suffixes, **low_rank})


# Exported Transformers models and exported Diffusers models use different names.
SVDQUANT = _svdquant("NVFP4_SVD", ".weight_quantizer._"), _svdquant("NVFP4_SVD of Diffusers", ".")


# Containers of tools that store the tensors of the containers above under a quant_method of their own.
QUARK_MXFP4 = replace(MODELOPT_MXFP4, name="quark mxfp4", format="", method="quark")
QUARK_NVFP4 = replace(MODELOPT_NVFP4, name="quark nvfp4", format="", method="quark")
AUTO_ROUND = tuple(
    replace(like, name=like.name.replace("compressed-tensors", "auto-round"), format="", method="auto-round")
    for like in (CT_NVFP4, CT_MXFP4, CT_MXFP8)
)
# MiMo's experts. Its other layers are FP8 in 128x128 tiles. The config declares them with "store_dtype": "mxfp4".
MIMO_MXFP4 = replace(MODELOPT_MXFP4, name="mimo mxfp4", format="", method="fp8", algorithm="MXFP4")
# The form of experts in vLLM's memory: w13_weight holds the rows of w1 and of w3.
VLLM_EXPERTS = Container(
    "vllm fused mxfp4",
    "",
    "mxfp4",
    E2M1,
    E8M0,
    (1, 32),
    {CODES: "_weight", SCALES: "_weight_scale"},
    "U8",
    "U8",
    stack="rows",
    is_exact=True,
    method="mxfp4",
    algorithm="MXFP4",
)
# Layers that quant_model_description.json declares (see declarations.py).
MSMODELSLIM = (
    replace(MODELOPT_MXFP4, name="msmodelslim mxfp4", format="", method="msmodelslim"),
    replace(MODELOPT_MXFP8, name="msmodelslim mxfp8", format="", method="msmodelslim"),
)
# The layout of gpt-oss under other names: those of OpenAI's own release, and those of tools that keep ".weight".
GPT_OSS_NAMES = tuple(
    replace(GPT_OSS, name=f"gpt-oss ({codes})", format="", suffixes={CODES: codes, SCALES: scales}, method="gpt-oss")
    for codes, scales in ((".weight_blocks", ".weight_scales"), (".blocks", ".scales"))
)


def _comfy(like: Container, name: str, format: str = "comfy", **more: Any) -> Container:
    """Return a variant of a container as ComfyUI stores it: with a tag tensor and input scales."""
    suffixes = {**like.suffixes, INPUT_SCALE: ".input_scale", TAG: ".comfy_quant"}
    return replace(
        like, name=f"comfy {name}", format=format, suffixes=suffixes, swizzled=like.scale is not None, **more
    )


COMFY_NVFP4 = _comfy(MODELOPT_NVFP4, "nvfp4", high_first=True)
COMFY_AWQ = _comfy(MODELOPT_AWQ, "nvfp4 with pre_quant_scale", "", high_first=True)
COMFY_MXFP8 = _comfy(MODELOPT_MXFP8, "mxfp8")
COMFY_FP8 = _comfy(MODELOPT_FP8, "float8_e4m3fn")
COMFY_E5M2 = _comfy(MODELOPT_FP8, "float8_e5m2", element=E5M2, codes_dtype="F8_E5M2")
_INT8: dict[str, Any] = {"format": "", "element": INT8, "codes_dtype": "I8"}
COMFY_INT8 = _comfy(MODELOPT_FP8, "int8_tensorwise", kind="int8 tensor", **_INT8)
COMFY_INT8_ROWS = _comfy(MODELOPT_FP8_ROWS, "int8_tensorwise per row", kind="int8 rows", **_INT8)
# The older spelling of FP8 in ComfyUI, without tags.
COMFY_OLD = replace(
    MODELOPT_FP8,
    name="comfy scaled_fp8",
    format="",
    suffixes={CODES: ".weight", TENSOR_SCALE: ".scale_weight", INPUT_SCALE: ".scale_input"},
    method="",
)
COMFY_OLD_E5M2 = replace(COMFY_OLD, name="comfy scaled_fp8 e5m2", element=E5M2, codes_dtype="F8_E5M2")
# Weights that were cast to FP8, so that the codes are the values.
CAST_E4M3 = replace(COMFY_OLD, name="cast to float8_e4m3fn", suffixes={CODES: ".weight"})
CAST_E5M2 = replace(COMFY_OLD_E5M2, name="cast to float8_e5m2", suffixes={CODES: ".weight"})


def _torchao(name: str, like: Container, tensor_scale: bool = False) -> Container:
    """Return a variant of a container as torchao's safetensors files store it, with swizzled block scales."""
    suffixes = {CODES: "._weight_qdata", SCALES: "._weight_scale"}
    if tensor_scale:
        suffixes |= {TENSOR_SCALE: "._weight_per_tensor_scale", INPUT_SCALE: "._weight_act_per_tensor_scale"}
    name = f"torchao {name}"
    return replace(like, name=name, format="", suffixes=suffixes, swizzled=True, is_exact=True, method="torchao")


TORCHAO = (
    _torchao("NVFP4", MODELOPT_NVFP4, True),
    _torchao("NVFP4 without tensor scale", MODELOPT_NVFP4),
    _torchao("MXFP4", MODELOPT_MXFP4),
    _torchao("MXFP8", MODELOPT_MXFP8),
)


def _mlx(name: str, element: ElementFormat, scale: ElementFormat, size: int) -> Container:
    """Return the container "mlx NAME" for one of MLX's formats."""
    suffixes = {CODES: ".weight", SCALES: ".scales"}
    return Container(
        f"mlx {name}", "mlx", name, element, scale, (1, size), suffixes, "U32", "U8", stack="rows", is_exact=True
    )


def _gguf(kind: str, scale: ElementFormat) -> Container:
    """Return the GGUF container "gguf MXFP4" or "gguf NVFP4", in which codes and scales share a tensor."""
    block, dtype = GGUF_BLOCKS[kind], kind.upper()
    suffixes = {CODES: ".weight", INPUT_SCALE: ".input_scale"}
    return Container(
        f"gguf {dtype}",
        "gguf",
        kind,
        E2M1,
        scale,
        (1, block.group),
        suffixes,
        dtype,
        "U8",
        (1,),
        stack="rows",
        in_blocks=True,
    )


MLX_MXFP4, MLX_NVFP4, MLX_MXFP8 = (
    _mlx("mxfp4", E2M1, E8M0, 32),
    _mlx("nvfp4", E2M1, E4M3, 16),
    _mlx("mxfp8", E4M3, E8M0, 32),
)
MLX_GLOBAL = replace(
    MLX_NVFP4,
    name="mlx nvfp4 global",
    suffixes={**MLX_NVFP4.suffixes, TENSOR_SCALE: ".global_scale"},
    tensor_scale_unit=NVFP4.max,
)
GGUF_MXFP4, GGUF_NVFP4 = _gguf("mxfp4", E8M0), _gguf("nvfp4", E4M3)
GGUF_SCALED = replace(
    GGUF_NVFP4, name="gguf NVFP4 scaled", suffixes={**GGUF_NVFP4.suffixes, TENSOR_SCALE: ".scale"}, is_exact=True
)

CONTAINERS = (
    COMFY_AWQ,
    COMFY_NVFP4,
    COMFY_MXFP8,
    COMFY_FP8,
    COMFY_E5M2,
    COMFY_INT8,
    COMFY_INT8_ROWS,
    COMFY_OLD,
    COMFY_OLD_E5M2,
    *SVDQUANT,
    MODELOPT_AWQ,
    MODELOPT_NVFP4,
    MODELOPT_NVFP4_32,
    MODELOPT_MXFP4,
    MODELOPT_MXFP8,
    CT_NVFP4,
    CT_MXFP4,
    CT_MXFP8,
    SGLANG_MXFP8,
    *GPT_OSS_NAMES,
    GPT_OSS,
    DEEPSEEK_V4,
    DEEPSEEK_V4_NVFP4,
    MODELOPT_STACKS,
    FP8_BLOCKS,
    FP8_POWERS,
    *FP8_TILES,
    *FP8_LAYERS,
    QUARK_MXFP4,
    QUARK_NVFP4,
    MIMO_MXFP4,
    VLLM_EXPERTS,
    *MSMODELSLIM,
    *AUTO_ROUND,
    *TORCHAO,
    MLX_MXFP4,
    MLX_GLOBAL,
    MLX_NVFP4,
    MLX_MXFP8,
    GGUF_MXFP4,
    GGUF_SCALED,
    GGUF_NVFP4,
    CAST_E4M3,
    CAST_E5M2,
)


def container(name: str) -> Container:
    """Return the container in CONTAINERS that is called ``name``. Raise StopIteration if there is none."""
    return next(candidate for candidate in CONTAINERS if candidate.name == name)


def _with_block(name: str, block: tuple[int, int]) -> Container:
    """Return the container called ``name`` with ``block`` as its block."""
    # Unpickling a Container calls this function, so that a process has one object per container.
    found = container(name)
    return found if found.block == block else replace(found, block=block)


# Pickle a container by name, so that a worker process gets its own constant of this module and `is` comparisons work.
copyreg.pickle(Container, lambda one: (_with_block, (one.name, one.block)))
