"""What a model is, by its folder, its name or the hub: can it be served, how large is it."""
