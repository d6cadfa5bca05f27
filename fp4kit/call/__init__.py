"""Parse the arguments of public functions: check them, and store them in a Call, from which the engines compute.

A Call holds arrays as the engines take them, options, amaxes and outputs.
"""
