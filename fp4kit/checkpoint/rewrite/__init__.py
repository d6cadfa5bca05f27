"""The ways in which a weight gets from one stored form to another: new codes, or the old ones under new scales or names."""
