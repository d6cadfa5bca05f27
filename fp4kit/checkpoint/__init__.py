"""Checkpoints: plan and convert Hugging Face directories, look into them, compare them."""
