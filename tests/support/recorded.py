"""Find cases in the recorded outputs of producers."""


def groups(golden, file, suffix):
    """Return the names of the cases of a recorded file that have a key ending in `suffix`.

    A key is the name of a case, followed by a suffix.

    Args:
        golden: a GoldenSet.
        file: the name of a file in the GoldenSet.
        suffix: the end of the keys, such as "/cutlass".
    """
    return [key.removesuffix(suffix) for key in golden.keys(file) if key.endswith(suffix)]
