"""Write and apply patches between two versions of a checkpoint. A patch holds only the bytes that changed.

Every file is checked by SHA-256."""
