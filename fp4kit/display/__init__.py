"""What a notebook and print show of a Quantized, a Recipe, a Comparison and an Identification."""
