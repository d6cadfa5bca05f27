"""Make contracts of conversions and of checkpoints, and open checkpoints as sides of fp4kit.parity."""
