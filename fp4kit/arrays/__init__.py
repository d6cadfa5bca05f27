"""Arrays of other arrays: how they come in (DLPack) and how results go back to them."""
