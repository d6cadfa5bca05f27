"""One module per producer, each with an ADAPTER; their names; and why other producers have none."""

NAMES = (
    "compressed_tensors",
    "gguf",
    "mlx",
    "modelopt",
    "torchao",
)

WITHOUT = {  # by the producer that a recipe's id names
    "deepgemm": "DeepGEMM's package needs CUDA to be imported; recorded outputs are compared by --check",
    "flashinfer": "FlashInfer quantizes with CUDA kernels, which need a GPU",
    "qat": "open training stacks have no package of their own",
    "triton-kernels": "triton_kernels is on no package index; recorded outputs are compared by --check",
}
