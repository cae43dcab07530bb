"""AutoRL: from a task's description to a trained policy, with RULER as the reward."""

from launcher.client.autorl.from_task import AutoRL, autorl
from launcher.client.autorl.pairwise_comparison import HELD_OUT_RUBRIC, BeforeAfter
from launcher.client.autorl.scenario_generation import Scenarios, scenarios

__all__ = ["HELD_OUT_RUBRIC", "AutoRL", "BeforeAfter", "Scenarios", "autorl", "scenarios"]
