"""Rollouts of programs in any SDK: what is asked inside a block is tagged, and nothing else is touched."""

from launcher.client.tracing.rollout import Rollout

__all__ = ["Rollout"]
