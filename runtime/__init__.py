"""Everything beside the GPUs: gateway, vLLM engines, trainer, checkpoints. Never SkyPilot or DSPy."""
