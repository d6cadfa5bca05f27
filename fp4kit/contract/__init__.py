"""Describe how a trainer or a server quantizes, as a Contract, and check that two sides compute with equal bits.

- schema.py: Contract, the settings of one side.
- to_json.py: converts a Contract to JSON data and back.
- words.py: describes differences between settings in words.
- parity.py: fp4kit.parity, which compares two sides layer by layer.
- sides.py: a side of a comparison: a Contract, quantized or unquantized tensors, or a function.
- stacks.py: splits a stack of experts into one layer per matrix.
- making.py: finds how a side made the codes or values of a layer.
- stored_order.py: finds codes or scales that are stored in a wrong order.
- compare_layer.py: compares one layer of two sides.
- steps.py: finds the first step of the arithmetic, such as the block scale, in which two sides differ.
- products.py: computes the matrix products of a side.
- kv_layouts.py: compares two layouts of KV pages.
- result.py: Parity and LayerParity, the results.
"""
