"""Choose the layers to quantize, and those that share a tensor scale."""
