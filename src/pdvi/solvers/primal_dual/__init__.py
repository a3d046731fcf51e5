"""The paper: Algorithm 1, its oracles and its penalty."""
