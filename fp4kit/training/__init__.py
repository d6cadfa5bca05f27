"""Training with FP4: primary weights cast from shards of their master weights."""
