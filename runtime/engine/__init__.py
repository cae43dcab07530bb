"""The engine's process: one vLLM server, with our additions inside it."""
