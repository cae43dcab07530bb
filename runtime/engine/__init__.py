"""The engine's process: one vLLM server, and what we add inside it."""
