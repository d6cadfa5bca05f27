"""Import arrays of other libraries without a copy, and return results as arrays of these libraries."""
