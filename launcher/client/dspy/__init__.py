"""All that needs DSPy: the policy as an LM, the optimizer GRPO."""

from launcher.client.dspy import ast_in_threads, dspy_names

ast_in_threads.mend()
dspy_names.say()
