"""Arrays of other libraries: how they are imported (DLPack), and how results return to their library."""
