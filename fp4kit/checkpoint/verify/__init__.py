"""Check a checkpoint: integrity, loaders, values. Compare two checkpoints, and reconcile tensor scales."""
