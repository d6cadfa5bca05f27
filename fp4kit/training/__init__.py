"""Training with FP4: primary weights from shards, settings of fake quantization, amax state."""
