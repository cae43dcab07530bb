"""Rollouts of programs in any SDK: requests inside a block are tagged, and nothing else is touched."""

from launcher.client.tracing.rollout import Rollout

__all__ = ["Rollout"]
