"""Say what an engine does if a tensor of a quantized layer is missing, per engine, container, layer and tensor.

Read in the sources of vLLM 0.33.0 (layers/quantization/modelopt.py, mxfp4.py, compressed_tensors) and SGLang 0.5.23
(layers/quantization/modelopt_quant.py, fp8.py, mxfp4.py, compressed_tensors). Both engines create all tensors of a
model before they load files. For quantized models, neither engine checks whether every tensor was
loaded. A missing tensor therefore keeps the value with which it was created.
"""

from __future__ import annotations

from fp4kit.checkpoint.loaders.exclusion_semantics import container_of

_MEMORY = "the engine uses uninitialised memory in its place"
_RAISES = 'loading raises "was never loaded"'
_ONE = "the engine uses 1.0 in its place, which is not calibrated"
_ZEROS = "the engine uses zeros in its place"
_PER_TOKEN = f"{_MEMORY}, unless it is configured to quantize the inputs of experts per token"
_INPUT_SCALES = (".input_scale", ".input_global_scale")


def consequence(engine: str, container: str, layer: str, suffix: str) -> str:
    """Return a clause that says what ``engine`` does if the tensor ``suffix`` of a layer is missing."""
    # If this is not known, the clause says so for an input scale; for any other tensor, it says that the layer cannot
    # be decoded.
    format = container.partition(" ")[0]
    is_expert = container_of(layer) is not None
    if engine == "vLLM":
        known = _vllm(format, container, is_expert, suffix)
    elif engine == "SGLang":
        known = _sglang(format, suffix)
    else:
        known = None
    if known is not None:
        return known
    if suffix in _INPUT_SCALES:
        return "it is not known what the engine does then"
    return "the layer cannot be decoded"


def _vllm(format: str, container: str, is_expert: bool, suffix: str) -> str | None:
    """Return a clause that says what vLLM does if a tensor of a layer is missing, or None if that is not known."""
    if container == "modelopt FP8" and suffix == ".input_scale":
        return None
    if format == "modelopt" and "NVFP4" in container and not is_expert and suffix == ".weight_scale":
        return _RAISES  # vLLM creates this tensor as NaN, and checks it
    if container in ("modelopt NVFP4", "deepseek-v4 nvfp4") and is_expert and suffix == ".input_scale":
        return _PER_TOKEN
    if format in ("modelopt", "compressed-tensors") or container == "deepseek-v4 nvfp4":
        return _MEMORY
    return _ZEROS if format == "gpt-oss" else None


def _sglang(format: str, suffix: str) -> str | None:
    """Return a clause that says what SGLang does if a tensor of a layer is missing, or None if that is not known."""
    if format == "modelopt" and suffix == ".input_scale":
        return _ONE
    if format in ("modelopt", "compressed-tensors"):
        return _MEMORY
    if format == "sglang-mxfp8" and suffix == ".weight_scale_inv":
        return _ZEROS
    return _ZEROS if format == "gpt-oss" else None
