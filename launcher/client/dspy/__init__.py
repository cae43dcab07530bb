"""All that needs DSPy: the policy as an LM, the optimizer GRPO."""
