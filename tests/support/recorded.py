"""What the tests of recorded outputs share."""


def groups(golden, file, suffix):
    """Prefixes of the keys of a file that end in suffix."""
    return [key.removesuffix(suffix) for key in golden.keys(file) if key.endswith(suffix)]
