"""Check a checkpoint: integrity, loaders, values; compare two; reconcile scales."""
