"""Choose and launch kernels: dispatch, geometry, one launcher per kernel."""
