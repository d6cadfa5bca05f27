"""Plan a conversion: decide what happens to each tensor before any tensor is converted."""
