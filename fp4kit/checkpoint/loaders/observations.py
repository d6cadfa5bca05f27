"""List what each engine was observed to do with each container.

A row of RUNS is (containers, families of models, engine, status, how, note). ``how`` is "run" if the engine was run on
a CPU with a small model of the family, "read" if its source was read, and "" if the status is "unknown". The engines
have the versions in ``engines.VERSIONS``. If two rows cover the same container, family and engine, the later row holds.
"""

from __future__ import annotations

from fp4kit.checkpoint.loaders.engines import How, Status

ObservationRow = tuple[tuple[str, ...], str, str, Status, How, str]

_NVFP4 = ("modelopt NVFP4", "modelopt W4A16_NVFP4")
_MXFP8 = ("modelopt MXFP8",)
_MXFP4 = ("modelopt mxfp4",)
_CT_NVFP4 = ("compressed-tensors nvfp4-pack-quantized",)
_CT_MXFP4 = ("compressed-tensors mxfp4-pack-quantized",)
_CT_MXFP8 = ("compressed-tensors mxfp8-quantized",)
_FP8 = ("modelopt FP8",)
_FP8_CHANNEL = ("modelopt FP8_PER_CHANNEL_PER_TOKEN",)
_CT_FP8 = ("compressed-tensors FP8", "compressed-tensors FP8 per row")
_CT_FP8_BLOCKS = ("compressed-tensors FP8 128x128",)
_FP8_BLOCKS = ("fp8 128x128",)
_CT_MIXED = ("compressed-tensors mixed-precision",)
_MIXED = ("modelopt MIXED_PRECISION",)
_SGLANG_MXFP8 = ("sglang-mxfp8",)
_GPT_OSS = ("gpt-oss",)
_DEEPSEEK_V4 = ("deepseek-v4",)
_BF16 = ("bf16",)

# Families whose linear layers have Hugging Face names. Rows for "dense" also hold for "llama" if "llama" has no row.
_HF = "dense moe deepseek_v3 vlm stacked_moe llama4"
_NAMES = (
    "choice of method, exclusions, names, shapes and dtypes were tested, but not the values that the engine computes"
)
_MTP = f"{_NAMES}; an exclusion that ends in an MLA projection applies to that projection in every layer"
_NO_MODELOPT = "the engine has no modelopt quantizer, so the shapes of packed weights are wrong for it"
_AS_ALONE = "each layer loads as in a checkpoint with its container alone"
_MIXABLE = "some versions load only layers in NVFP4, W4A16_NVFP4 and FP8, and treat all others as unquantized"
_SGLANG_CT = "not tried; alone, MXFP8 layers fail in this format, and so do MXFP4 layers that are not experts"
_SGLANG_MIXED = "not tried; the engine has a method for MIXED_PRECISION, but in MXFP8 layers it rejects weight_scale"
_NO_MODELOPT_FP8 = "the engine has no modelopt quantizer: it prints a warning, and uses the E4M3 codes as weights"
_ROUNDED_SCALES = (
    "the engine rounds scales to the dtype of the model, so that in bfloat16 values are off by up to 2^-9 of their size"
)
_WHOLE_PARTS = "only if the rows of every part of a fused layer, except the last part, are a multiple of 128"
_WHOLE_BLOCKS = (
    "tested without a GPU, where the engine dequantizes the weights to bfloat16, if the rows of every layer are a"
    " multiple of 128"
)
_LLAMA_SCALES = (
    "the engine's Llama loader renames weight_scale_inv to weight_scale and finds no such parameter (llama.py:723)"
)
_DEQUANTIZED = "tested without a GPU, where the engine dequantizes the weights to bfloat16"
_NO_PACKED = "the engine has no parameters for the biases of packed experts (w2_bias)"
SPLIT_EXPERTS = "the engine reads these experts only as stacks, and leaves separate experts at random values"
_KEPT_EXPERTS = (
    "experts stay unquantized, and the exclusion list must name the module that contains them, such as "
    "block_sparse_moe.experts"
)

RUNS: tuple[ObservationRow, ...] = (
    (_NVFP4, _HF, "vLLM", "loads", "run", ""),
    (_NVFP4, _HF, "SGLang", "loads", "run", _NAMES),
    (_NVFP4, "deepseek_v3", "SGLang", "loads", "run", _MTP),
    (_NVFP4, _HF, "transformers", "fails", "run", _NO_MODELOPT),
    (_NVFP4, "granite_moe", "vLLM", "loads", "read", _KEPT_EXPERTS),
    (_NVFP4, "granite_moe", "transformers", "fails", "run", _NO_MODELOPT),
    (_NVFP4, "gpt_oss", "vLLM", "fails", "run", _NO_PACKED),
    (_NVFP4, "all", "Model-Optimizer", "loads", "run", ""),
    (_MXFP8, _HF, "vLLM", "loads", "run", ""),
    (
        _MXFP8,
        _HF,
        "SGLang",
        "fails",
        "run",
        "the engine's mxfp8 method needs weight_scale_inv and rejects weight_scale",
    ),
    (
        _MXFP8,
        "llama",
        "SGLang",
        "wrong values",
        "read",
        "the engine's mxfp8 method needs weight_scale_inv; its Llama loader logs the missing name and continues with "
        "scales of 0",
    ),
    (
        _MXFP8,
        _HF,
        "transformers",
        "wrong values",
        "run",
        "the engine has no modelopt quantizer: it prints a warning, and uses the E4M3 codes as weights",
    ),
    (_MXFP8, "all", "Model-Optimizer", "loads", "run", ""),
    (_MXFP4, "all", "vLLM", "fails", "run", "the engine's modelopt method does not support MXFP4"),
    (_MXFP4, "all", "SGLang", "fails", "run", "the engine's modelopt method does not support MXFP4"),
    (_MXFP4, "all", "transformers", "fails", "run", _NO_MODELOPT),
    (_MXFP4, "all", "Model-Optimizer", "loads", "run", ""),
    (
        _CT_NVFP4,
        _HF,
        "vLLM",
        "loads",
        "run",
        "the engine inverts the stored divisor, so values are off by up to 2 float32 ulp",
    ),
    (
        _CT_NVFP4,
        _HF,
        "SGLang",
        "loads",
        "run",
        "names and dtypes were tested, but not the values that the engine computes",
    ),
    (_CT_NVFP4, "granite_moe", "vLLM", "loads", "read", _KEPT_EXPERTS),
    (_CT_NVFP4, "dense vlm granite_moe llama4", "transformers", "loads", "run", ""),
    (_CT_NVFP4, "stacked_moe", "transformers", "wrong values", "run", SPLIT_EXPERTS),
    (
        _CT_NVFP4,
        "moe deepseek_v3",
        "transformers",
        "wrong values",
        "run",
        "the engine decodes experts without their global scale, and does not warn (transformers#48371)",
    ),
    (_CT_MXFP4, _HF, "vLLM", "loads", "run", ""),
    (_CT_MXFP4, "granite_moe", "vLLM", "loads", "read", _KEPT_EXPERTS),
    (
        _CT_MXFP4,
        "dense",
        "SGLang",
        "fails",
        "run",
        "linear layers that are not experts raise 'No compressed-tensors compatible scheme was found', because the "
        "engine has MXFP4 only for experts",
    ),
    (
        _CT_MXFP4,
        "moe deepseek_v3",
        "SGLang",
        "fails",
        "run",
        "the engine has MXFP4 only for experts, so it loads the checkpoint if nothing else is quantized (--preset "
        "experts)",
    ),
    (_CT_MXFP4, "dense moe deepseek_v3 vlm granite_moe llama4", "transformers", "loads", "run", ""),
    (_CT_MXFP4, "stacked_moe", "transformers", "wrong values", "run", SPLIT_EXPERTS),
    (_CT_MXFP8, "dense", "vLLM", "loads", "read", ""),
    (_CT_MXFP8, "moe deepseek_v3 vlm stacked_moe llama4", "vLLM", "loads", "run", ""),
    (_CT_MXFP8, "granite_moe", "vLLM", "loads", "read", _KEPT_EXPERTS),
    (_CT_MXFP8, "dense", "SGLang", "fails", "run", "the engine has no method for MXFP8 linear layers in this format"),
    (_CT_MXFP8, "dense vlm granite_moe llama4", "transformers", "loads", "run", ""),
    (_CT_MXFP8, "stacked_moe", "transformers", "wrong values", "run", SPLIT_EXPERTS),
    (
        _CT_MXFP8,
        "moe deepseek_v3",
        "transformers",
        "fails",
        "run",
        "the engine multiplies experts by their scales as if the scales were not per block",
    ),
    ((*_FP8, *_FP8_CHANNEL), "dense moe deepseek_v3 vlm", "vLLM", "loads", "read", ""),
    (_FP8, "dense moe deepseek_v3 vlm", "SGLang", "loads", "read", ""),
    ((*_FP8, *_FP8_CHANNEL), "all", "Model-Optimizer", "loads", "read", ""),
    ((*_FP8, *_FP8_CHANNEL), _HF, "transformers", "wrong values", "read", _NO_MODELOPT_FP8),
    ((*_FP8, *_FP8_CHANNEL), "dense moe deepseek_v3", "transformers", "wrong values", "run", _NO_MODELOPT_FP8),
    (_CT_FP8, "dense moe deepseek_v3 vlm", "vLLM", "loads", "read", ""),
    (_CT_FP8, "dense", "SGLang", "loads", "read", ""),
    (_CT_FP8, "dense moe", "transformers", "loads", "run", _ROUNDED_SCALES),
    (_CT_FP8, "stacked_moe", "transformers", "wrong values", "read", SPLIT_EXPERTS),
    ((*_CT_FP8_BLOCKS, *_FP8_BLOCKS), "dense moe deepseek_v3", "vLLM", "loads", "read", _WHOLE_PARTS),
    ((*_CT_FP8_BLOCKS, *_FP8_BLOCKS), "dense", "SGLang", "loads", "read", _WHOLE_PARTS),
    (_FP8_BLOCKS, "moe deepseek_v3", "SGLang", "loads", "read", _WHOLE_PARTS),
    (_FP8_BLOCKS, "llama", "SGLang", "wrong values", "read", _LLAMA_SCALES),
    (_FP8_BLOCKS, "dense moe deepseek_v3", "transformers", "loads", "run", _WHOLE_BLOCKS),
    (_FP8_BLOCKS, "stacked_moe llama4", "transformers", "wrong values", "read", SPLIT_EXPERTS),
    (_CT_FP8_BLOCKS, "dense", "transformers", "loads", "run", _ROUNDED_SCALES),
    (_CT_FP8_BLOCKS, "stacked_moe", "transformers", "wrong values", "read", SPLIT_EXPERTS),
    ((*_CT_NVFP4, *_CT_MXFP4, *_CT_MXFP8, *_CT_FP8, *_CT_FP8_BLOCKS), "all", "compressed-tensors", "loads", "run", ""),
    (_CT_MIXED, "dense moe deepseek_v3 vlm", "vLLM", "loads", "read", ""),
    (_CT_MIXED, _HF, "SGLang", "unknown", "", _SGLANG_CT),
    (_CT_MIXED, "dense", "transformers", "loads", "run", _AS_ALONE),
    (_CT_MIXED, "all", "compressed-tensors", "loads", "run", _AS_ALONE),
    (_MIXED, "dense moe deepseek_v3 vlm", "vLLM", "loads", "read", _MIXABLE),
    (_MIXED, _HF, "SGLang", "unknown", "", _SGLANG_MIXED),
    (_MIXED, _HF, "transformers", "fails", "read", _NO_MODELOPT),
    (_MIXED, "dense moe deepseek_v3", "transformers", "fails", "run", _NO_MODELOPT),
    (_SGLANG_MXFP8, _HF, "SGLang", "loads", "run", ""),
    (
        _SGLANG_MXFP8,
        "llama",
        "SGLang",
        "wrong values",
        "read",
        _LLAMA_SCALES,
    ),
    (_SGLANG_MXFP8, "dense llama moe deepseek_v3 vlm granite_moe", "transformers", "loads", "run", _DEQUANTIZED),
    (_SGLANG_MXFP8, "stacked_moe llama4", "transformers", "wrong values", "run", SPLIT_EXPERTS),
    (
        _SGLANG_MXFP8,
        _HF,
        "vLLM",
        "fails",
        "run",
        "the engine's mxfp8 method needs weight_scale, and reads only ignored_layers as exclusion list",
    ),
    (_GPT_OSS, "gpt_oss", "vLLM", "loads", "run", ""),
    (_GPT_OSS, "gpt_oss", "SGLang", "loads", "read", "only if intermediate_size is a multiple of 32"),
    (_GPT_OSS, "gpt_oss", "transformers", "loads", "run", _DEQUANTIZED),
    (_GPT_OSS, _HF, "transformers", "fails", "read", "the engine reads this format only for the experts of gpt_oss"),
    (_DEEPSEEK_V4, "deepseek_v4", "vLLM", "loads", "read", "only if config.json has expert_dtype fp4"),
    (_DEEPSEEK_V4, "deepseek_v4", "transformers", "loads", "run", _DEQUANTIZED),
    (
        ("deepseek-v4 nvfp4",),
        "deepseek_v4",
        "vLLM",
        "loads",
        "read",
        "only if quantization_config has moe_quant_algo NVFP4",
    ),
    (_BF16, f"{_HF} granite_moe", "vLLM", "loads", "read", ""),
    (_BF16, f"{_HF} granite_moe", "SGLang", "loads", "read", ""),
    (_BF16, "dense moe deepseek_v3 deepseek_v4 gpt_oss granite_moe", "transformers", "loads", "run", ""),
    (_BF16, "stacked_moe llama4", "transformers", "loads", "run", f"only if experts are stacks: {SPLIT_EXPERTS}"),
    (_BF16, "vlm", "transformers", "loads", "run", ""),
)
