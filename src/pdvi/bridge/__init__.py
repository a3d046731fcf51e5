"""Models written for NumPyro, as problems: globals outside a plate, locals inside, expectations by fixed draws."""
