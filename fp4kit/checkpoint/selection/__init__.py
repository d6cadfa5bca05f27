"""Select the layers to quantize, and group the layers that must share a tensor scale."""
