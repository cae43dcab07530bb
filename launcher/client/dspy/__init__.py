"""All that needs DSPy: the policy as an LM, the optimizer GRPO."""

from launcher.client.dspy import ast_parse_retry, dspy_compat

ast_parse_retry.install()
dspy_compat.log_warnings()
