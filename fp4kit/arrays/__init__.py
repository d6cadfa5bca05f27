"""Arrays of other libraries: how arguments are imported without a copy, and how results return to their library."""
