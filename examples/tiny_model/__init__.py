"""The makers of the tiny models: the one that comes with Slipway, and the player of the examples' games."""
