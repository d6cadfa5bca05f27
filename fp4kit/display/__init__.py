"""Display Quantized, Recipe, Comparison and Identification objects, as printed text and as notebook HTML."""
