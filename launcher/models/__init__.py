"""A model, found by its folder, its name or on the hub: whether it can be served, and its size."""
