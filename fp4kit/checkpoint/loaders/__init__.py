"""Describe how inference engines load checkpoints: which containers each engine reads, and where it fails.

The package consists of data and pure functions; nothing in it reads a file. Source: vLLM 0.33.0, SGLang 0.5.23,
transformers 5.23.0, compressed-tensors 0.20.0 and Model-Optimizer 0.47.0. These engines were run on a CPU with their
own model classes and weight loaders, or their source was read.
"""
