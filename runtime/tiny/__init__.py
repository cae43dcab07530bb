"""The embedded model: its weights, its phrase grammar, its chat format; `examples/tiny_model/` makes it."""
