"""Imports the client, of which only what needs DSPy imports it."""

from __future__ import annotations

import sys

from launcher import client

assert client.connect and client.group
assert "dspy" not in sys.modules and "numpy" not in sys.modules
assert client.GRPO
assert "dspy" in sys.modules
