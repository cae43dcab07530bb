"""The embedded agent model: its weights and its settings; `examples/tiny_agent/` makes it."""
