"""Describe containers: how a quantized linear layer is stored as tensors, and which config entries declare it.

``table.py`` lists all containers, ``configs.py`` writes their configs and says what engines require of them,
``config_entries.py`` compares configs with tensors, and ``engines.py`` names engines.
"""
