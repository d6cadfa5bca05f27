"""fp4kit for PyTorch: differentiable, compilable operations on tensors. Import it by name: `import fp4kit.torch`.

- fake_quantize and fake_quantize_grouped have gradients.
- quantize returns a Quantized of tensors, and dequantize takes one.
- linear multiplies quantized activations and weights as a matrix unit does, with gradients.
- fake_quantize_model lets a model train with the weights that the converted checkpoint serves, and on request with
  fake-quantized activations. remove_fake_quantization undoes it.
- FakeQuantized parametrizes one parameter. FakeQuantSettings says which parameters, and with which recipe.
- merge_adapter merges a LoRA adapter into quantized weights, and says how much of it survives rounding.
- collect measures the inputs of a model's layers, from which input scales follow.
- of_module reads the model of a running engine, so that fp4kit.parity compares it with the trainer.

The operations are custom operators. So torch.compile(fullgraph=True), torch.export, torch.func, checkpointing, autocast
and CUDA graphs work, on CPU and CUDA. In compiled code, quantize, dequantize and recipes passed as Recipe objects need
PyTorch 2.13, because earlier versions do not trace objects made without their constructor.
"""

from fp4kit.arguments import only_public
from fp4kit.quantized.slicing import (
    allow_torch_load,
    rebuild_quantized,  # noqa: F401  # pickles name it here
)
from fp4kit.torch.adapters import MergedAdapter, merge_adapter
from fp4kit.torch.functions import (
    dequantize,
    fake_quantize,
    fake_quantize_grouped,
    linear,
    quantize,
    register_quantized,
)
from fp4kit.torch.inputs import collect
from fp4kit.torch.live import of_module
from fp4kit.torch.modules import fake_quantize_model, remove_fake_quantization
from fp4kit.torch.parameters import FakeQuantized
from fp4kit.training.settings import FakeQuantSettings

__all__ = [
    "FakeQuantSettings",
    "FakeQuantized",
    "MergedAdapter",
    "collect",
    "dequantize",
    "fake_quantize",
    "fake_quantize_grouped",
    "fake_quantize_model",
    "linear",
    "merge_adapter",
    "of_module",
    "quantize",
    "remove_fake_quantization",
]

only_public(globals())


register_quantized()
allow_torch_load()
