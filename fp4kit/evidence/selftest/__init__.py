"""Compare the engines of this machine with the specification (`fp4kit selftest`)."""
