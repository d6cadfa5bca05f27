"""Find cases in the recorded outputs of producers."""


def groups(golden, file, suffix):
    """Return the prefixes of all keys in a recorded file that end in `suffix`. Each prefix belongs to one case.

    Args:
        golden: a GoldenSet.
        file: the name of a file in the GoldenSet.
        suffix: the end of the keys, such as "/cutlass".
    """
    return [key.removesuffix(suffix) for key in golden.keys(file) if key.endswith(suffix)]
