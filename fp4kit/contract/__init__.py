"""Describe how a trainer or a server quantizes, as a Contract, and check that two sides compute with equal bits.

- schema.py: Contract, the settings of one side.
- to_json.py: a Contract as JSON data.
- words.py: differences between settings, in words.
- parity.py: fp4kit.parity, which compares two sides layer by layer.
- sides.py: a side of a comparison: a Contract, quantized or unquantized tensors, or a function.
- stacks.py: the matrices of a stack of experts as layers.
- making.py: how a side made the codes or values of a layer.
- stored_order.py: a wrong order of stored codes or scales.
- compare_layer.py: the comparison of one layer.
- steps.py: the steps of the arithmetic of two sides, and the first one that differs.
- products.py: the products of two sides.
- kv_layouts.py: the comparison of two layouts of KV pages.
- result.py: Parity and LayerParity, the results.
"""
