"""List the adapters of producers. Each module in NAMES defines an ADAPTER; WITHOUT says why other producers
have none.
"""

NAMES = (
    "auto_round",
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
    "triton_kernels",
    "vllm",
)

WITHOUT = {  # {producer in a recipe id: why it has no adapter}
    "deepgemm": "DeepGEMM needs CUDA to be imported; recorded outputs are compared by --check",
    "flashinfer": "FlashInfer quantizes with CUDA kernels, which need a GPU",
    "qat": "open training stacks have no package of their own",
}
