"""Find cases in the recorded outputs of producers."""


def groups(golden, file, suffix):
    """Return the keys of a recorded file that end in `suffix`, without it; each is the prefix of one case's arrays."""
    return [key.removesuffix(suffix) for key in golden.keys(file) if key.endswith(suffix)]
