"""Patches between two versions of a checkpoint: only the bytes that changed, checked by SHA-256."""
