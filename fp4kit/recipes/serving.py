"""Define the recipes of engines and of kernels that serve models, such as vLLM, SGLang and DeepGEMM."""

from __future__ import annotations

from fp4kit.formats import E2M1, E4M3, MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4
from fp4kit.recipes.schema import Alias, Made, of_format, producer, unscaled, variant

_VLLM_ACTIVATIONS = "vLLM 0.33 csrc/libtorch_stable/quantization/fp4/nvfp4_utils.cuh cvt_warp_fp16_to_fp4"


@producer("vllm", "vLLM", "0.33", package="vllm")
def vllm() -> Made:
    """Yield the recipes of vLLM: its emulation of NVFP4, its MX quantizers, its KV caches and its online NVFP4.

    vLLM uses its emulation and its MX quantizers where it has no CUDA kernel. Online NVFP4 (nvfp4_per_token) quantizes
    weights while they are loaded. Activations are then quantized by FlashInfer with one scale per token.
    """
    nvfp4 = of_format(
        NVFP4,
        "nvfp4-vllm-emulation",
        "tensor_rule=vllm block_rule=vllm decode_rule=compressed_tensors sign=negative amax_nan=propagate",
        source="vLLM 0.33 utils/nvfp4_emulation_utils.py ref_nvfp4_quant",
        exact="codes of the emulation on a CPU and a GPU, and the decoded values on a CPU. Not equal for "
        "blocks of a tensor with inf or NaN, for which vLLM has no codes",
    )
    yield nvfp4
    yield variant(
        nvfp4,
        "nvfp4-vllm-emulation-cuda",
        "block_rule=vllm_cuda decode_rule=vllm_cuda",
        source="vLLM 0.33 utils/nvfp4_emulation_utils.py _nvfp4_quant_dequant_kernel (Triton)",
        exact="values of the fused fake quantizer on an H200",
    )
    kv = of_format(
        NVFP4,
        "nvfp4-vllm-kv",
        "tensor_rule=divided block_rule=vllm_kv decode_rule=flashinfer_kv",
        source="vLLM 0cd789b csrc/libtorch_stable/nvfp4_kv_cache_kernels.cu, without 4over6",
        exact="the KV cache kernel, except for blocks of only NaN. The "
        "tensor scale is the checkpoint's k_scale or v_scale. Decodes as FlashInfer's nvfp4_kv_dequantize",
        versions=("0cd789b", "0cd789b"),
    )
    yield kv
    yield variant(
        kv,
        "nvfp4-vllm-static-divisor",
        "tensor_rule=vllm decode_rule=product",
        source=_VLLM_ACTIVATIONS,
        exact="activations under compressed-tensors' input_global_scale, which is 2688 * (1 / tensor_amax) in float32 "
        "and divides on decode. Not equal for a tensor_amax below 1e-8 and for blocks of only NaN",
        versions=None,  # that of vLLM
    )
    yield of_format(
        NVFP4,
        "nvfp4-vllm-online",
        "tensor_rule=vllm block_rule=flashinfer amax_nan=lanes flush=True",
        source="vLLM 0136201 layers/quantization/online/nvfp4.py _quantize_moe_weight_to_nvfp4",
        exact="the weights of one expert by --quantization nvfp4_per_token, without 4over6, with the approximate "
        "reciprocals of sm_90. Not equal for tensors with inf or NaN. Activations: nvfp4-vllm-token",
        versions=("0136201", "0136201"),
    )
    mxfp4 = of_format(
        MXFP4,
        "mxfp4-vllm",
        "block_rule=e8m0_even_normal",
        source="vLLM 0.33 utils/mxfp4_utils.py downcast_to_mxfp",
        exact="codes of the Triton kernel for bfloat16 and float16 on a GPU, where blocks with scale 2^-127 are zeros",
    )
    yield mxfp4
    yield variant(
        mxfp4,
        "mxfp4-vllm-cpu",
        "block_rule=e8m0_even_finite",
        exact="codes of the Triton kernel, run in Triton's interpreter",
    )
    yield Alias(
        "mxfp8-vllm",
        "mxfp8-modelopt",
        source="vLLM 0.33 utils/mxfp8_utils.py _mxfp8_e4m3_quantize_torch",
        exact="equals this recipe except for blocks with an infinity, whose elements are 0 there",
    )
    yield Alias(
        "nvfp4-vllm-static",
        "nvfp4-vllm-kv",
        source=_VLLM_ACTIVATIONS,
        exact="gives vLLM's codes and scales for activations under Model-Optimizer's input_scale, tensor_amax / 2688",
    )
    yield Alias(
        "nvfp4-vllm-token",
        "nvfp4-flashinfer-token",
        source="vLLM 0136201 layers/quantization/online/nvfp4.py, which calls FlashInfer",
        exact="gives the activations of vLLM --quantization nvfp4_per_token",
    )


@producer("sglang", "SGLang", "0.5.23", package="sglang")
def sglang() -> Made:
    """Yield the recipes of SGLang: the MXFP4 utilities of 0.5.23, and its online NVFP4, named nvfp4_online."""
    yield of_format(
        NVFP4,
        "nvfp4-sglang-online",
        "tensor_rule=sglang_online block_rule=four_over_six_cute four_over_six=mse fast_error=True amax_nan=lanes",
        source="SGLang 0.5.23 layers/quantization/nvfp4_online.py, FlashInfer 0.7.4 "
        "quantization_cute_dsl_utils.py _nvfp4_4over6_quant_from_values",
        exact="codes and block scales of one expert by --quantization nvfp4_online, whose w1 and w3 share an amax: "
        "4over6 with scales up to 448, squared errors and err_use_fast_math. weight_scale_2 is tensor_scale. Not equal "
        "for tensors with inf or NaN. Activations: "
        "nvfp4-sglang-token",
    )
    yield of_format(
        NVFP4,
        "nvfp4-sglang-online-a022252",
        "tensor_rule=sglang_online block_rule=flashinfer_cute amax_nan=lanes",
        source="SGLang a022252 layers/quantization/nvfp4_online.py _quantize_weight_nvfp4, which calls FlashInfer's "
        "CuTe-DSL kernel",
        exact="weights of one expert by --quantization nvfp4_online, without 4over6, whose w1 and w3 share an amax. "
        "Not equal for tensors with inf or NaN. Since 0.5.23, nvfp4-sglang-online",
        versions=("a022252", "a022252"),
    )
    util = of_format(
        MXFP4,
        "mxfp4-sglang-util",
        "block_rule=e8m0_sglang rounding=rnz sign=not_positive nan_code=8 round_scaled=True amax_nan=propagate",
        source="SGLang 0.5.23 mxfp4_tensor.py MXFP4QuantizeUtil",
        exact="codes. Logarithms and quotients are computed in the dtype of the elements, and every zero is code 8",
    )
    yield util
    yield variant(
        util,
        "mxfp4-sglang-kv",
        "block_rule=e8m0_sglang_kv rounding=rna sign=negative nan_code=0 block=1x16",
        source="SGLang 0.5.23 kvfp4_tensor.py FP4MXBlock16KVQuantizeUtil",
        exact="codes of eager execution, without torch.compile",
    )
    yield Alias(
        "nvfp4-sglang-token",
        "nvfp4-flashinfer-token",
        source="SGLang a022252 layers/quantization/nvfp4_online.py, which calls FlashInfer",
        exact="gives the activations of SGLang --quantization nvfp4_online",
    )


_TRITON_KERNELS_SOURCE = "triton_kernels v3.5.1 numerics_details/mxfp.py downcast_to_mxfp"
_TRITON_KERNELS_UP = "the PyTorch reference with ROUND_UP, and the Triton kernel except for blocks with NaN"
_TRITON_KERNELS_DOWN = "the PyTorch reference with ROUND_DOWN, and the Triton kernel except for blocks with NaN"


@producer("triton-kernels", "triton_kernels", "v3.5.1")
def triton_kernels() -> Made:
    """Yield the recipes of triton_kernels (OpenAI): v3.5.1, as in vLLM 0.33 and TensorRT-LLM, and its main branch."""
    up = of_format(
        MXFP4,
        "mxfp4-triton-kernels",
        "block_rule=e8m0_triton_up rounding=rna decode_rule=e8m0_flashinfer_api amax_nan=propagate",
        source=_TRITON_KERNELS_SOURCE,
        exact=f"{_TRITON_KERNELS_UP}. Ties round away from zero",
    )
    yield up
    yield variant(
        up,
        "mxfp4-triton-kernels-down",
        "block_rule=e8m0_triton_down",
        exact=f"{_TRITON_KERNELS_DOWN}. Ties round away from zero",
    )
    yield variant(
        up,
        "mxfp4-triton-kernels-main",
        "rounding=rn",
        source="triton_kernels main 018a674 (3.8) mxfp.py downcast_to_mxfp",
        versions=("018a674", "018a674"),
        exact="the PyTorch reference with ROUND_UP, except for the signs of infinities. Ties round to even since "
        "this commit",
    )
    for fmt, suffix in ((MXFP8_E4M3, ""), (MXFP8_E5M2, "-e5m2")):
        up = variant(up, f"mxfp8-triton-kernels{suffix}", "rounding=rn", element=fmt.element, exact=_TRITON_KERNELS_UP)
        yield up
        if not suffix:
            rule = "block_rule=e8m0_triton_down"
            yield variant(up, "mxfp8-triton-kernels-down", rule, exact=_TRITON_KERNELS_DOWN)


_DEEPGEMM_SOURCE = "DeepGEMM 54e2261 deep_gemm/utils/math.py"


@producer("deepgemm", "DeepGEMM", "54e2261")
def deepgemm() -> Made:
    """Yield the recipes of DeepGEMM 54e2261: its casts to FP4 and FP8.

    The recipes with UE8M0 scales have blocks of 32 elements. For DeepGEMM's own blocks of 128, make a variant with
    dataclasses.replace.
    """
    yield of_format(
        MXFP4,
        "mxfp4-deepgemm",
        "block_rule=e8m0_deepgemm rounding=rnz sign=unsigned_zero nan_code=0 amax_nan=propagate",
        source=_DEEPGEMM_SOURCE,
        exact="codes for blocks of 32. An amax below 1e-4 counts as 1e-4, and ties round toward zero",
    )
    yield of_format(
        MXFP8_E4M3,
        "mxfp8-deepgemm",
        "block_rule=e8m0_deepgemm amax_nan=propagate",
        source=_DEEPGEMM_SOURCE,
        exact="codes for blocks of 32. An amax below 1e-4 counts as 1e-4",
    )
    yield unscaled(
        E4M3,
        "fp8-deepgemm-block",
        "tensor_scaling=block tensor_rule=fp8_deepgemm amax_nan=propagate block=128x128",
        source=f"{_DEEPGEMM_SOURCE} per_block_cast_to_fp8",
        exact="codes and scales of per_block_cast_to_fp8 without UE8M0 on a CPU; its scales are every 128th row of "
        "tensor_scale. On a GPU, where PyTorch multiplies by float32(1 / 448) instead of dividing by 448, use "
        "tensor_rule='fp8_deepseek'. An amax below 1e-4 is replaced by 1e-4",
    )


_DEEPSEEK_READ = "except for blocks with infinities or NaN"


@producer("deepseek", "DeepSeek-V4", "V4")
def deepseek() -> Made:
    """Yield the recipes of DeepSeek-V4's inference code: quantizers of activations and of its compressed KV cache."""
    yield of_format(
        MXFP4,
        "mxfp4-deepseek-v4",
        "block_rule=e8m0_deepseek",
        source="DeepSeek-V4 inference/kernel.py fp4_act_quant",
        exact=f"the TileLang kernel, {_DEEPSEEK_READ}. Same as mxfp4-torchao-rceil except for these blocks "
        "and for amaxes below 2^-124",
    )
    yield of_format(
        NVFP4,
        "nvfp4-deepseek-v4",
        "tensor_scaling=none block_rule=deepseek apply=divide",
        source="DeepSeek-V4.1 inference/kernel.py fp4_act_quant with scale_dtype e4m3",
        exact=f"the TileLang kernel for compressed KV caches, {_DEEPSEEK_READ}",
    )
    yield unscaled(
        E4M3,
        "fp8-deepseek-v4",
        "tensor_scaling=block tensor_rule=fp8_deepseek apply=divide block=1x128",
        source="DeepSeek-V4 inference/kernel.py act_quant without scale_fmt",
        exact=f"the TileLang kernel, {_DEEPSEEK_READ}",
    )
    yield of_format(
        MXFP8_E4M3,
        "mxfp8-deepseek-v4",
        "block_rule=e8m0_deepseek_fp8",
        source="DeepSeek-V4 inference/kernel.py act_quant with scale_fmt",
        exact=f"the TileLang kernel with blocks of 128, which replace(recipe, block=(1, 128)) gives, {_DEEPSEEK_READ}. "
        "Differs from mxfp8-deepgemm in one step: amaxes are multiplied by 1/448 instead of divided by 448",
    )


_AITER_SOURCE = "aiter e404860 utility/fp4_utils.py, ops/quant.py per_1x32_f4_quant"
_AITER_TRITON = "aiter e404860 Triton kernel"


@producer("aiter", "AMD aiter", "e404860", package="amd-aiter")
def aiter() -> Made:
    """Yield the recipes of AMD aiter e404860: the PyTorch reference of its MXFP4 quantizers, and its Triton kernels."""
    up = of_format(
        MXFP4,
        "mxfp4-aiter",
        "block_rule=e8m0_aiter_up amax_nan=propagate",
        source=_AITER_SOURCE,
        exact="codes and scales with mode RoundUp, the default. Differs from mxfp4-torchao-rceil only for amaxes below "
        "2^-124",
    )
    yield up
    yield variant(
        up,
        "mxfp4-aiter-ceil",
        "block_rule=e8m0_aiter_ceil",
        exact="codes and scales with mode Ceil. Differs from mxfp4-torchao-ceil only for amaxes below 2^-124",
    )
    yield of_format(
        NVFP4,
        "nvfp4-aiter-triton",
        "tensor_scaling=none block_rule=aiter nan_code=4",
        source=f"{_AITER_TRITON} _nvfp4_quant_op",
        exact="codes and scales of the Triton kernel on an H100. Elements are multiplied by the reciprocal of the "
        "scale before it is rounded to E4M3, and zeros of a zero block become 2",
    )
    for name, of, mode in (("down", "mxfp4-ocp", "RoundDown"), ("even", "mxfp4-torchao-even", "Even")):
        yield Alias(
            f"mxfp4-aiter-{name}", of, source=_AITER_SOURCE, exact=f"gives aiter's codes and scales with mode {mode}"
        )
    yield Alias(
        "mxfp4-aiter-triton",
        "mxfp4-torchao-even",
        source=f"{_AITER_TRITON} _mxfp4_quant_op",
        exact="gives the codes of aiter's Triton kernel on an H100, except for blocks with an amax from 1.75 * 2^127 "
        "on, an infinity or NaN. Scales below 1 were recorded as 1 there, because the kernel casts a negative number "
        "to uint8",
    )


@producer("nunchaku", "Nunchaku (SVDQuant)", "3a3cc3d")
def nunchaku() -> Made:
    """Yield the recipe of Nunchaku, the inference engine of SVDQuant: its FP4 quantizer of activations."""
    yield of_format(
        NVFP4,
        "nvfp4-nunchaku",
        "tensor_scaling=none block_rule=nunchaku nan_code=7",
        source="Nunchaku 3a3cc3d src/kernels/zgemm/gemm_w4a4.cuh quantize_w4a4_fp4_from_fpsum_warp",
        exact="codes and scales of bfloat16 and float16 activations, before they are ordered for the tensor cores; "
        "except for blocks of only NaN. Elements are multiplied by the reciprocal of the scale before it is rounded "
        "to E4M3, so zeros of a zero block become 6",
    )


@producer("transformers", "transformers", "5.23", "5.24", package="transformers")
def transformers() -> Made:
    """Yield the recipe of Hugging Face transformers 5.24: FP8 weights in blocks of 128x128 with float32 scales."""
    yield unscaled(
        E4M3,
        "fp8-transformers-block",
        "tensor_scaling=block tensor_rule=fp8_transformers amax_nan=propagate block=128x128",
        source="transformers 5.24 integrations/finegrained_fp8.py Fp8Quantize",
        exact="codes, and weight_scale_inv, which holds every 128th row of tensor_scale. transformers leaves a weight "
        "unquantized if its number of rows is not a multiple of 128; here, its last blocks have fewer rows",
    )


_NNCF = "NNCF 3.4.0 nncf.compress_weights with the OpenVINO backend, mode {}"
_FROM_10000 = "of a weight with at least 10000 elements, which NNCF computes with OpenVINO"
_BELOW_10000 = "of a weight with fewer than 10000 elements, which NNCF computes with NumPy"


@producer("nncf", "NNCF (OpenVINO)", "3.4.0", package="nncf")
def nncf() -> Made:
    """Yield the recipes of NNCF 3.4.0, with which OpenVINO quantizes weights: NVFP4, MXFP4, MXFP8 and FP4.

    NNCF has two arithmetics, and chooses by the number of elements of the weight. A recipe does not depend on the
    number of elements, so there is one recipe per arithmetic. Values are those of OpenVINO with the inference precision
    float32, which reads every scale as float16.
    """
    nan = "NaN elements are left out of amaxes"
    large = of_format(
        NVFP4,
        "nvfp4-nncf",
        "tensor_rule=nncf block_rule=nncf decode_rule=nncf apply=divide nan_sign=True",
        source=_NNCF.format("NVFP4"),
        exact="codes, scales, global_scale and values of a weight with at least 10000 blocks. Elements are divided by "
        f"the block scale before it is rounded to E4M3. {nan}. Recorded for smaller weights, whose recipe, "
        "nvfp4-nncf-medium, is equal for an amax above 3.3e-4",
    )
    yield large
    exact = f"codes, scales, global_scale and values {_FROM_10000} in fewer than 10000 blocks of 16. {nan}"
    yield variant(large, "nvfp4-nncf-medium", "tensor_rule=nncf_medium", exact=exact)
    text = "tensor_rule=nncf_small block_rule=nncf_small amax_nan=propagate"
    exact = f"codes, scales, global_scale and values {_BELOW_10000}"
    yield variant(large, "nvfp4-nncf-small", text, exact=exact)
    for fmt, text, overflow in (
        (MXFP4, "nan_sign=True", ""),
        (MXFP8_E4M3, "rounding=rnh", ". Elements are rounded to float16 first, and become NaN above 464"),
    ):
        large = of_format(
            fmt,
            f"{fmt.name[:5].lower()}-nncf",
            f"block_rule=e8m0_nncf decode_rule=e8m0_nncf {text}",
            source=_NNCF.format(fmt.name),
            exact=f"codes, scales and values {_FROM_10000}. Some amaxes of M * 2^k, where M is the largest element "
            f"value, get the next larger scale. {nan}{overflow}",
        )
        yield large
        text = "block_rule=e8m0_nncf_small amax_nan=propagate"
        yield variant(large, f"{large.id}-small", text, exact=f"codes, scales and values {_BELOW_10000}{overflow}")
    for id, more, where in (("", "", _FROM_10000), ("-small", "_small amax_nan=propagate", _BELOW_10000)):
        text = "tensor_scaling=block decode_rule=fp8_comfy_kitchen_float16 apply=divide block=1x32 nan_sign=True"
        exact = f"codes and values {where}. NNCF stores the scales as float16, and divides by them before that"
        text, source = f"{text} tensor_rule=fp4_nncf{more}", _NNCF.format("FP4")
        yield unscaled(E2M1, f"fp4-nncf{id}", text, source=source, exact=exact)


@producer("onednn", "oneDNN", "2026.1.0", package="onednn")
def onednn() -> Made:
    """Yield the recipes of oneDNN 2026.1.0 (3.13): the dynamic scales of a matmul's destination."""
    source = "oneDNN 2026.1.0 (3.13) matmul ref:any with {} destination scales"
    exact = "codes and scales of finite float32 and bfloat16 sources. Products that underflow to -0 keep no sign here"
    for fmt, suffix, text in ((MXFP4, "", "nan_sign=True"), (MXFP8_E4M3, "", ""), (MXFP8_E5M2, "-e5m2", "")):
        text = f"block_rule=e8m0_floor sign=negative amax_nan=propagate {text or 'rounding=rnh'}"
        id, overflow = f"{fmt.name[:5].lower()}-onednn{suffix}", ". Elements do not saturate" * (fmt is not MXFP4)
        yield of_format(fmt, id, text, source=source.format("dynamic_mx"), exact=exact + overflow)
    text = "tensor_scaling=none block_rule=onednn sign=negative nan_sign=True amax_nan=propagate"
    exact = f"{exact}. A block of zeros has scale 1, and scales above 464 are NaN"
    yield of_format(NVFP4, "nvfp4-onednn", text, source=source.format("dynamic_fp"), exact=exact)


@producer("hf-kernels", "Hugging Face kernels", "e36c85a")
def hf_kernels() -> Made:
    """Yield the recipes of kernels-community/nvfp4-gemm, with which transformers quantizes to NVFP4 on load."""
    source = "kernels-community nvfp4-gemm e36c85a"
    yield of_format(
        NVFP4,
        "nvfp4-hf-kernels",
        "tensor_rule=hf_kernels block_rule=vllm_kv",
        source=f"{source}, cvt_warp_fp16_to_fp4 of vLLM, as transformers 5.24 NVFP4Config calls it",
        exact="weights and activations without NaN, with the approximate reciprocals of sm_90. global_scale "
        "is the reciprocal of tensor_scale before rounding, and divides on decode",
    )
    yield of_format(
        NVFP4,
        "nvfp4-hf-kernels-reference",
        "tensor_rule=hf_kernels block_rule=hf_kernels decode_rule=hf_kernels rounding=first sign=negative nan_code=0 "
        "amax_nan=propagate",
        source=f"{source} quantize_reference",
        exact="values on a CPU, and global_scale. Ties round to the smaller magnitude, unlike in the kernel. A block "
        "scale of 0 counts as 1e-12",
    )
