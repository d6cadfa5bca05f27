"""Describe how a trainer or a server quantizes, as a Contract, and check that two sides compute with equal bits.

- schema.py: Contract, the settings of one side.
- to_json.py: a Contract as JSON data.
- words.py: differences between settings, in words.
- sides.py: a side of a comparison: a Contract, quantized or plain tensors, or a function.
- steps.py: the steps of the arithmetic of two sides, and the first one that differs.
- stored_order.py: a wrong order of stored codes or scales.
- products.py: the products of two sides.
- parity.py: fp4kit.parity, which compares two sides layer by layer.
"""
