"""Provide tools for training with FP4.

master_weights.py quantizes weights whose master copies are sharded; settings.py configures fake quantization;
amax_state.py collects and stores amaxes; communicators.py connects processes.
"""
