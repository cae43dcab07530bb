"""RULER: a judge's scores of trajectories in comparison with one another, as their rewards."""

from launcher.client.ruler.judge_cache import JudgementCache
from launcher.client.ruler.judge_failures import JudgeFailed, JudgeUnusable
from launcher.client.ruler.judge_prompt import DEFAULT_RUBRIC
from launcher.client.ruler.judge_retries import Tries
from launcher.client.ruler.score_group import TrajectoryScore, ruler, ruler_score_group

__all__ = [
    "DEFAULT_RUBRIC",
    "JudgeFailed",
    "JudgeUnusable",
    "JudgementCache",
    "TrajectoryScore",
    "Tries",
    "ruler",
    "ruler_score_group",
]
