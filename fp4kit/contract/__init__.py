"""Describe how a trainer or a server quantizes, as a Contract, and check that two sides compute with equal bits.

schema.py has the settings of one side, sides.py the weights and values of a side and how it made them, compare_layer.py
the comparison of one layer, and parity.py the comparison of two sides, fp4kit.parity.
"""
