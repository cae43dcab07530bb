"""Imports the client, of which only what needs DSPy imports it."""

from __future__ import annotations

import sys

from launcher import client

assert client.connect and client.group
assert client.Trajectory and client.TrajectoryGroup and client.gather_trajectory_groups and client.retry
assert not {"dspy", "numpy", "openai"} & sys.modules.keys()
assert client.GRPO
assert "dspy" in sys.modules
