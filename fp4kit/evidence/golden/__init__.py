"""Compare recipes with recorded outputs of the producers (golden vectors)."""
