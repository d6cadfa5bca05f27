"""Collect the amaxes of activations, from which the input scales of NVFP4 layers are computed.

    collector = Collector()
    for batch in calibration_set:
        collector.collect("model.layers.0.mlp.down_proj", inputs_of_that_layer(batch))
    collector.save("activations.safetensors")        # for fp4kit convert --activations
    collector.input_scales()["model.layers.0.mlp.down_proj"]

fp4kit.torch.collect fills a Collector while a PyTorch model runs. An input scale is the tensor scale of a layer's
inputs. An engine that quantizes activations to NVFP4 needs one per layer, because it cannot know the largest input in
advance.
"""

from fp4kit.calibration.collector import Collector
from fp4kit.calibration.headroom import Headroom
from fp4kit.calibration.scales import input_global_scale, input_scale

__all__ = ["Collector", "Headroom", "input_global_scale", "input_scale"]


def __dir__() -> list[str]:
    """Return the public names, so that completion shows no others."""
    return list(__all__)
