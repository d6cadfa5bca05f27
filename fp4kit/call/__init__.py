"""The parse of public functions: it turns their arguments into a Call, in which everything is checked.

A Call holds arrays as the engines take them, options, amaxes and outputs.
"""
