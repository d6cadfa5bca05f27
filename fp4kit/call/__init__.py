"""Calls of the public functions, parsed once: arrays as the engines take them, options, amaxes and outputs, all
checked.
"""
