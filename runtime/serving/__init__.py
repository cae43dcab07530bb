"""Serving the policy: the gateway, the vLLM engines behind it, and what was sampled."""
