"""Provide what tests of recorded outputs share."""


def groups(golden, file, suffix):
    """Return the prefixes of a file's keys that end in suffix."""
    return [key.removesuffix(suffix) for key in golden.keys(file) if key.endswith(suffix)]
