"""Recorded outputs of the libraries that fp4kit reproduces. fp4kit finds the .npz files in this folder."""
