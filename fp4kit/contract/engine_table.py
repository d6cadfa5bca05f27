"""List what is known of each engine, a program that loads or computes quantized linear layers: which checkpoints it
loads, which it does not, and what it computes. fp4kit/contract/engines.py reads what engines compute (Serving), and
fp4kit/checkpoint/loaders/support.py what they load (Cell).
"""

from __future__ import annotations

from typing import NamedTuple

TORCH = "torch"  # the product of engines that multiply decoded operands by torch.nn.functional.linear


class Way(NamedTuple):
    """One way in which an engine loads and computes; see Serving.

    evidence: that of the operands and that of the product.
    rows: one line per row: scheme | container | weights, decode_rule | served_dtype | activations, input_scales. An
        empty cell stands for "" or None, and "same" for the recipe of the weights.
    """

    route: str
    device: str
    product: str
    evidence: str
    needs: str
    rows: str


class Engine(NamedTuple):
    """One engine.

    version: the version that was examined.
    loads: one line per row: containers | families of models, as support.py lists them | status | how it is known |
        note. "run": the engine was run on a CPU with a small model of the family; "read": its source was read. If two
        rows cover the same container and family, the later row holds. Rows for "dense" also hold for "llama" if it has
        no row.
    computes: the ways in which it computes.
    further: later versions, and libraries, with which the computation was examined too.
    """

    name: str
    version: str
    loads: str = ""
    computes: tuple[Way, ...] = ()
    further: str = ""

    @property
    def load_rows(self) -> list[tuple[list[str], list[str], str, str, str]]:
        """The rows of ``loads``: (names of containers, families, status, how it is known, note)."""
        rows = []
        for row in self.loads.strip().splitlines():
            names, families, status, how, note = (cell.strip() for cell in row.split("|"))
            containers = [CONTAINERS.get(name, name) for name in names.split()]
            rows.append((containers, families.split(), status, how, NOTES.get(note, note)))
        return rows


SPLIT_EXPERTS = "the engine reads these experts only as stacks, and leaves separate experts at random values"
_NAMES_TESTED = (
    "choice of method, exclusions, names, shapes and dtypes were tested, but not the values that the engine computes"
)
NOTES = {  # what rows of loads call a note -> the note
    "names": _NAMES_TESTED,
    "names mtp": (
        f"{_NAMES_TESTED}; an exclusion that ends in an MLA projection applies to that projection in every layer"
    ),
    "names and dtypes": "names and dtypes were tested, but not the values that the engine computes",
    "no modelopt": "the engine has no modelopt quantizer, so the shapes of packed weights are wrong for it",
    "codes as weights": (
        "the engine has no modelopt quantizer: it prints a warning, and uses the E4M3 codes as weights"
    ),
    "as alone": "each layer loads as in a checkpoint with its container alone",
    "mixable": "some versions load only layers in NVFP4, W4A16_NVFP4 and FP8, and treat all others as unquantized",
    "ct not tried": "not tried; alone, MXFP8 layers fail in this format, and so do MXFP4 layers that are not experts",
    "mixed not tried": (
        "not tried; the engine has a method for MIXED_PRECISION, but in MXFP8 layers it rejects weight_scale"
    ),
    "rounded scales": (
        "the engine rounds scales to the dtype of the model, so that in bfloat16 values are off by up to 2^-9 of their"
        " size"
    ),
    "whole parts": "only if the rows of every part of a fused layer, except the last part, are a multiple of 128",
    "whole blocks": (
        "tested without a GPU, where the engine dequantizes the weights to bfloat16, if the rows of every layer are a"
        " multiple of 128"
    ),
    "llama scales": (
        "the engine's Llama loader renames weight_scale_inv to weight_scale and finds no such parameter (llama.py:723)"
    ),
    "dequantized": "tested without a GPU, where the engine dequantizes the weights to bfloat16",
    "no packed": "the engine has no parameters for the biases of packed experts (w2_bias)",
    "split experts": SPLIT_EXPERTS,
    "only stacks": f"only if experts are stacks: {SPLIT_EXPERTS}",
    "kept experts": (
        "experts stay unquantized, and the exclusion list must name the module that contains them, such as"
        " block_sparse_moe.experts"
    ),
    "needs inv": "the engine's mxfp8 method needs weight_scale_inv and rejects weight_scale",
    "llama needs inv": (
        "the engine's mxfp8 method needs weight_scale_inv; its Llama loader logs the missing name and continues with"
        " scales of 0"
    ),
    "needs weight_scale": (
        "the engine's mxfp8 method needs weight_scale, and reads only ignored_layers as exclusion list"
    ),
    "no MXFP4": "the engine's modelopt method does not support MXFP4",
    "inverts": "the engine inverts the stored divisor, so values are off by up to 2 float32 ulp",
    "no global scale": "the engine decodes experts without their global scale, and does not warn (transformers#48371)",
    "only experts": (
        "linear layers that are not experts raise 'No compressed-tensors compatible scheme was found', because the"
        " engine has MXFP4 only for experts"
    ),
    "preset experts": (
        "the engine has MXFP4 only for experts, so it loads the checkpoint if nothing else is quantized (--preset"
        " experts)"
    ),
    "scales of experts": "the engine multiplies experts by their scales as if the scales were not per block",
}
CONTAINERS = {  # what rows call containers -> their names
    "mo-nvfp4": "modelopt NVFP4",
    "mo-nvfp4a16": "modelopt W4A16_NVFP4",
    "mo-mxfp4": "modelopt mxfp4",
    "mo-mxfp8": "modelopt MXFP8",
    "mo-fp8": "modelopt FP8",
    "mo-fp8-rows": "modelopt FP8_PER_CHANNEL_PER_TOKEN",
    "mo-mixed": "modelopt MIXED_PRECISION",
    "ct-nvfp4": "compressed-tensors nvfp4-pack-quantized",
    "ct-mxfp4": "compressed-tensors mxfp4-pack-quantized",
    "ct-mxfp8": "compressed-tensors mxfp8-quantized",
    "ct-fp8": "compressed-tensors FP8",
    "ct-fp8-rows": "compressed-tensors FP8 per row",
    "ct-fp8-blocks": "compressed-tensors FP8 128x128",
    "ct-mixed": "compressed-tensors mixed-precision",
    "blocks": "fp8 128x128",
    "deepseek-v4-nvfp4": "deepseek-v4 nvfp4",
    **{f"mlx-{kind}": f"mlx {kind}" for kind in ("nvfp4", "mxfp4", "mxfp8")},
    **{f"gguf-{kind.lower()}": f"gguf {kind}" for kind in ("NVFP4", "MXFP4")},
}
_IN_TORCH = "one PyTorch build and kind of CPU, one attention implementation, and the same rows per call, more than one"
_TOKENS = "; inputs of three axes, because compressed-tensors gives a matrix one scale in place of one per row"
_ON_CARD = "one card and one kernel; a kernel that splits the axis of the sum adds in another order"
_COMPRESSED_TENSORS = "0.20.0"
ENGINES = (
    Engine(
        "transformers",
        "5.23.0",
        further=f"to 5.24.0, with compressed-tensors {_COMPRESSED_TENSORS} to 0.20.1",
        loads="""
mo-nvfp4 mo-nvfp4a16 | hf granite_moe | fails | run | no modelopt
mo-mxfp8 | hf | wrong values | run | codes as weights
mo-mxfp4 | all | fails | run | no modelopt
ct-nvfp4 | dense vlm granite_moe llama4 | loads | run |
ct-nvfp4 ct-mxfp4 ct-mxfp8 | stacked_moe | wrong values | run | split experts
ct-nvfp4 | moe deepseek_v3 | wrong values | run | no global scale
ct-mxfp4 | dense moe deepseek_v3 vlm granite_moe llama4 | loads | run |
ct-mxfp8 | dense vlm granite_moe llama4 | loads | run |
ct-mxfp8 | moe deepseek_v3 | fails | run | scales of experts
mo-fp8 mo-fp8-rows | hf | wrong values | read | codes as weights
mo-fp8 mo-fp8-rows | dense moe deepseek_v3 | wrong values | run | codes as weights
ct-fp8 ct-fp8-rows | dense moe | loads | run | rounded scales
ct-fp8-blocks | dense | loads | run | rounded scales
ct-fp8 ct-fp8-rows ct-fp8-blocks | stacked_moe | wrong values | read | split experts
blocks | dense moe deepseek_v3 | loads | run | whole blocks
blocks | stacked_moe llama4 | wrong values | read | split experts
ct-mixed | dense | loads | run | as alone
mo-mixed | hf | fails | read | no modelopt
mo-mixed | dense moe deepseek_v3 | fails | run | no modelopt
sglang-mxfp8 | dense llama moe deepseek_v3 vlm granite_moe | loads | run | dequantized
sglang-mxfp8 | stacked_moe llama4 | wrong values | run | split experts
gpt-oss | gpt_oss | loads | run | dequantized
gpt-oss | hf | fails | read | the engine reads this format only for the experts of gpt_oss
deepseek-v4 | deepseek_v4 | loads | run | dequantized
bf16 | dense moe deepseek_v3 deepseek_v4 gpt_oss granite_moe vlm | loads | run |
bf16 | stacked_moe llama4 | loads | run | only stacks
""",
        computes=(
            Way(
                "",
                "cpu",
                TORCH,
                "live live",
                _IN_TORCH + _TOKENS,
                """
nvfp4-w4a16 | ct-nvfp4 | nvfp4-compressed-tensors | bfloat16 |
nvfp4-w4a4 | ct-nvfp4 | nvfp4-compressed-tensors | bfloat16 | nvfp4-compressed-tensors-static, static
mxfp4-w4a16 | ct-mxfp4 | mxfp4-compressed-tensors | bfloat16 |
mxfp4-w4a4 | ct-mxfp4 | mxfp4-compressed-tensors | bfloat16 | same
mxfp8-w8a8 | ct-mxfp8 | mxfp8-compressed-tensors | bfloat16 | same
fp8-channel | ct-fp8-rows | fp8-modelopt-channel, fp8_compressed_tensors | | fp8-compressed-tensors-token
fp8-tensor | ct-fp8 | fp8-modelopt, fp8_compressed_tensors | | fp8-compressed-tensors-token
fp8-block | ct-fp8-blocks | fp8-deepgemm-block, fp8_compressed_tensors | | fp8-compressed-tensors-group
""",
            ),
            Way(
                "dequantize=True",
                "cpu",
                TORCH,
                "live live",
                _IN_TORCH,
                """
nvfp4-w4a16 | ct-nvfp4 | nvfp4-compressed-tensors, compressed_tensors_bfloat16 | |
mxfp4-w4a16 | ct-mxfp4 | mxfp4-compressed-tensors | |
fp8-channel-w8a16 | ct-fp8-rows | fp8-modelopt-channel | |
""",
            ),
        ),
    ),
    Engine(
        "vLLM",
        "0.33.0",
        loads="""
mo-nvfp4 mo-nvfp4a16 | hf | loads | run |
mo-nvfp4 mo-nvfp4a16 ct-nvfp4 ct-mxfp4 ct-mxfp8 | granite_moe | loads | read | kept experts
mo-nvfp4 mo-nvfp4a16 | gpt_oss | fails | run | no packed
mo-mxfp8 | hf | loads | run |
mo-mxfp4 | all | fails | run | no MXFP4
ct-nvfp4 | hf | loads | run | inverts
ct-mxfp4 | hf | loads | run |
ct-mxfp8 | dense | loads | read |
ct-mxfp8 | moe deepseek_v3 vlm stacked_moe llama4 | loads | run |
mo-fp8 mo-fp8-rows ct-fp8 ct-fp8-rows ct-mixed | dense moe deepseek_v3 vlm | loads | read |
ct-fp8-blocks blocks | dense moe deepseek_v3 | loads | read | whole parts
mo-mixed | dense moe deepseek_v3 vlm | loads | read | mixable
sglang-mxfp8 | hf | fails | run | needs weight_scale
gpt-oss | gpt_oss | loads | run |
deepseek-v4 | deepseek_v4 | loads | read | only if config.json has expert_dtype fp4
deepseek-v4-nvfp4 | deepseek_v4 | loads | read | only if quantization_config has moe_quant_algo NVFP4
bf16 | hf granite_moe | loads | read |
""",
        computes=(
            Way(
                "",
                "cuda",
                "sm100",
                "derived derived",
                _ON_CARD,
                """
nvfp4-w4a4 | ct-nvfp4 | nvfp4-compressed-tensors | | nvfp4-vllm-static-divisor, static
nvfp4-w4a4 | mo-nvfp4 | nvfp4-modelopt | | nvfp4-vllm-static, static
nvfp4-w4a4-token | | nvfp4-vllm-online | | nvfp4-flashinfer-token
mxfp8-w8a8 | ct-mxfp8 | mxfp8-compressed-tensors | | mxfp8-flashinfer
mxfp8-w8a8 | mo-mxfp8 | mxfp8-modelopt | | mxfp8-flashinfer
""",
            ),
            Way(
                "emulation",
                "cuda",
                TORCH,
                "recorded recorded",
                f"{_ON_CARD}; --linear-backend emulation; a model in bfloat16 or float16",
                """
nvfp4-w4a4 | ct-nvfp4 | nvfp4-compressed-tensors | | nvfp4-vllm-emulation-cuda, static
""",
            ),
            Way(
                "emulation without CUDA",
                "cpu",
                TORCH,
                "recorded recorded",
                f"{_IN_TORCH}; a model in bfloat16 or float16",
                """
nvfp4-w4a4 | ct-nvfp4 | nvfp4-compressed-tensors | | nvfp4-vllm-emulation, static
mxfp8-w8a16 | ct-mxfp8 | mxfp8-compressed-tensors | bfloat16 |
""",
            ),
        ),
    ),
    Engine(
        "SGLang",
        "0.5.23",
        loads="""
mo-nvfp4 mo-nvfp4a16 | hf | loads | run | names
mo-nvfp4 mo-nvfp4a16 | deepseek_v3 | loads | run | names mtp
mo-mxfp8 | hf | fails | run | needs inv
mo-mxfp8 | llama | wrong values | read | llama needs inv
mo-mxfp4 | all | fails | run | no MXFP4
ct-nvfp4 | hf | loads | run | names and dtypes
ct-mxfp4 | dense | fails | run | only experts
ct-mxfp4 | moe deepseek_v3 | fails | run | preset experts
ct-mxfp8 | dense | fails | run | the engine has no method for MXFP8 linear layers in this format
mo-fp8 | dense moe deepseek_v3 vlm | loads | read |
ct-fp8 ct-fp8-rows | dense | loads | read |
ct-fp8-blocks blocks | dense | loads | read | whole parts
blocks | moe deepseek_v3 | loads | read | whole parts
blocks | llama | wrong values | read | llama scales
ct-mixed | hf | unknown | | ct not tried
mo-mixed | hf | unknown | | mixed not tried
sglang-mxfp8 | hf | loads | run |
sglang-mxfp8 | llama | wrong values | read | llama scales
gpt-oss | gpt_oss | loads | read | only if intermediate_size is a multiple of 32
bf16 | hf granite_moe | loads | read |
""",
        computes=(
            Way(
                "",
                "cuda",
                "sm100",
                "derived derived",
                _ON_CARD,
                """
nvfp4-w4a4 | mo-nvfp4 | nvfp4-modelopt | | nvfp4-flashinfer-static, static
nvfp4-w4a4-token | | nvfp4-sglang-online | | nvfp4-flashinfer-token
""",
            ),
        ),
    ),
    Engine(
        "TensorRT-LLM",
        "its public kernels/quantization.cuh",
        computes=(
            Way(
                "",
                "cuda",
                "sm100",
                "derived derived",
                f"{_ON_CARD}; blocks whose scale underflows were not examined",
                """
nvfp4-w4a4 | mo-nvfp4 | nvfp4-modelopt | | nvfp4-flashinfer-static, static
""",
            ),
        ),
    ),
    Engine(
        "FlashInfer",
        "fb28d72",
        computes=(
            Way(
                "",
                "cuda",
                "sm100",
                "recorded derived",
                _ON_CARD,
                """
nvfp4-w4a4 | | nvfp4-flashinfer | | same, dynamic
mxfp4-w4a4 | | mxfp4-flashinfer | | same
mxfp8-w8a8 | | mxfp8-flashinfer | | same
""",
            ),
            Way(
                "",
                "cuda",
                "sm100",
                "derived derived",
                _ON_CARD,
                """
nvfp4-w4a4-token | | nvfp4-flashinfer | | nvfp4-flashinfer-token
""",
            ),
        ),
    ),
    Engine(
        "Transformer Engine",
        "d0067d0",
        computes=(
            Way(
                "",
                "cuda",
                "sm100",
                "recorded derived",
                _ON_CARD,
                """
nvfp4-w4a4 | | nvfp4-te-2d | | nvfp4-te, dynamic
nvfp4-w4a4-1d | | nvfp4-te | | same, dynamic
nvfp4-w4a4-row | | nvfp4-te | | nvfp4-te-rowscaled
mxfp8-w8a8 | | mxfp8-te | | same
""",
            ),
        ),
    ),
    Engine(
        "torchao",
        "0.18.0",
        computes=(
            Way(
                "",
                "cpu",
                TORCH,
                "live live",
                f"{_IN_TORCH}; kernel_preference=EMULATED for MX formats",
                """
nvfp4-w4a16 | | nvfp4-torchao | |
mxfp4-w4a4-floor | | mxfp4-torchao-floor-018 | | same
mxfp4-w4a4-rceil | | mxfp4-torchao-rceil-018 | | same
mxfp4-w4a4-ceil | | mxfp4-torchao-ceil-018 | | same
mxfp4-w4a4-even | | mxfp4-torchao-even-018 | | same
mxfp8-w8a8-floor | | mxfp8-torchao-floor-018 | | same
mxfp8-w8a8-rceil | | mxfp8-torchao-rceil-018 | | same
mxfp8-w8a8-ceil | | mxfp8-torchao-ceil-018 | | same
mxfp8-w8a8-even | | mxfp8-torchao-even-018 | | same
""",
            ),
        ),
    ),
    Engine(
        "MLX",
        "0.32.4",
        computes=(
            Way(
                "",
                "cpu",
                "mlx-cpu",
                "live live",
                "an x86-64 CPU; decoded weights and products are equal, not logits: its norms add in another order",
                """
nvfp4-w4a16 | mlx-nvfp4 | nvfp4-mlx-cpu | |
mxfp4-w4a16 | mlx-mxfp4 | mxfp4-mlx-cpu | |
mxfp8-w8a16 | mlx-mxfp8 | mxfp8-mlx-cpu | |
""",
            ),
        ),
    ),
    Engine(
        "llama.cpp",
        "xllamacpp 2026.10.11549",
        computes=(
            Way(
                "",
                "cpu",
                "ggml-avx2-repacked",
                "recorded live",
                "a build for AVX2 without VNNI; inputs in float32, which the product quantizes to Q8_0",
                """
mxfp4-w4a8 | gguf-mxfp4 | mxfp4-gguf | |
""",
            ),
            Way(
                "without repacking",
                "cpu",
                "ggml-avx2",
                "recorded live",
                "a build for AVX2 without VNNI; inputs in float32, which the product quantizes to Q8_0",
                """
mxfp4-w4a8 | gguf-mxfp4 | mxfp4-gguf | |
nvfp4-w4a8 | gguf-nvfp4 | nvfp4-gguf | |
""",
            ),
        ),
    ),
    Engine(
        "compressed-tensors",
        _COMPRESSED_TENSORS,
        loads="""
ct-nvfp4 ct-mxfp4 ct-mxfp8 ct-fp8 ct-fp8-rows ct-fp8-blocks | all | loads | run |
ct-mixed | all | loads | run | as alone
""",
    ),
    Engine(
        "Model-Optimizer",
        "0.47.0",
        loads="""
mo-nvfp4 mo-nvfp4a16 mo-mxfp4 mo-mxfp8 | all | loads | run |
mo-fp8 mo-fp8-rows | all | loads | read |
""",
        computes=(
            Way(
                "",
                "cpu",
                TORCH,
                "recorded recorded",
                _IN_TORCH,
                """
fp8-tensor | | fp8-modelopt | | same, static
fp8-token | | fp8-modelopt-channel-cpu | | same
""",
            ),
        ),
    ),
)
SERVING = ("vLLM", "SGLang", "transformers")  # engines that run a model; others in VERSIONS only decode its tensors
_LOADERS = (*SERVING, *(one.name for one in ENGINES if one.loads and one.name not in SERVING))
VERSIONS = {name: next(one.version for one in ENGINES if one.name == name) for name in _LOADERS}
