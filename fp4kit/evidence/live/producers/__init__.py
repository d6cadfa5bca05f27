"""List the adapters of producers. Each module in NAMES defines an ADAPTER; WITHOUT says why other producers
have none.
"""

NAMES = (
    "auto_round",
    "comfy_kitchen",
    "compressed_tensors",
    "fouroversix",
    "gguf",
    "microxcaling",
    "mlx",
    "modelopt",
    "quark",
    "qwix",
    "sglang",
    "te",
    "torchao",
    "transformers",
    "triton_kernels",
    "vllm",
)

WITHOUT = {  # {producer in a recipe id: why it has no adapter}
    "aiter": "aiter needs an AMD GPU to be imported; recorded outputs are compared by --check",
    "deepseek": "DeepSeek-V4's kernel needs TileLang and a GPU",
    "deepgemm": "DeepGEMM needs CUDA to be imported; recorded outputs are compared by --check",
    "flashinfer": "FlashInfer quantizes with CUDA kernels, which need a GPU",
    "fp-quant": "FP-Quant quantizes with Triton kernels, which need a GPU; recorded outputs are compared by --check",
    "mslk": "MSLK quantizes with Triton kernels, which need a GPU; recorded outputs are compared by --check",
    "nunchaku": "Nunchaku quantizes with CUDA kernels, which need a GPU of sm_120",
    "qat": "the trainers slime and miles have no package of their own",
}
