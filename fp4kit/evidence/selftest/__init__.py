"""Compare the engines of this machine with the specification."""
