"""Parameters of the optimizer that mean nothing, contradict each other, or are as Arbor wants them."""

from __future__ import annotations

import dspy

from launcher.client import TrainingFailed
from tests.support import abuses as a
from tests.support.abuse_rows.row import ALL, Abuse

PARAMETERS = [
    Abuse(f"{name}={value!r}", asked_for={name: value}, says=says, error=ValueError, exit=6)
    for name, value, says in [
        ("num_train_steps", 0, "num_train_steps must be at least 1"),
        ("num_train_steps", "10", "num_train_steps must be a whole number, not '10'"),
        ("num_threads", True, "num_threads must be a whole number, not True"),
        ("num_rollouts_per_grpo_step", 1, "must be at least 2: a rollout is compared with the others"),
        ("seed", 0.5, "seed must be a whole number"),
        ("rollout_seconds", 0, "rollout_seconds must be above 0"),
        ("rollout_calls", 0, "rollout_calls must be at least 1"),
        ("failure_score", float("nan"), "failure_score must be a number"),
        ("format_failure_score", 0.0, "format_failure_score must be below failure_score"),
        ("checkpoint", "every", "checkpoint must be 'single-best' or 'improvements' or 'none', not 'every'"),
        ("staleness", -1, "staleness must be at least 0"),
        ("on_alarm", "pause", "on_alarm must be 'note' or 'stop'"),
        ("alarms", {"lenght": 3.0}, "there is no threshold 'lenght'; there are window, flat_groups, length"),
        ("alarms", {"length": 0}, "length must be a number above 0"),
        ("multitask", False, "one policy is trained for all predictors"),
        (
            "variably_invoked_predictor_grouping_mode",
            "fill",
            '"fill" would train copies of one sample as if they were several',
        ),
        ("variably_invoked_predictor_fill_strategy", "max", "belongs to the grouping mode 'fill'"),
        ("train_kwargs", {"top_p": 0.9}, "samples from a different distribution than the policy's"),
        ("train_kwargs", {"temperature": 0}, "temperature must be above 0 and at most 2"),
    ]
] + [
    Abuse(
        "an adapter for each LM, as dspy.GRPO takes",
        asked_for={"adapter": {None: dspy.ChatAdapter()}},
        says="adapter must be a dspy.Adapter, not a dict: there is one policy",
        error=TypeError,
        exit=6,
    ),
    Abuse(
        "train_kwargs for each of something that is no LM",
        asked_for={"train_kwargs": {1: {"temperature": 1.0}}},
        says="train_kwargs must map names to values, or each LM of the policy to such a mapping",
        error=TypeError,
        exit=6,
    ),
    Abuse(
        "train_kwargs that the run does not know, or cannot follow",
        asked_for={"train_kwargs": {"lerning_rate": 1e-5, "lora_config": {"r": 8}}},
        says="lora_config.r: 8 was requested, this run has 16; lerning_rate: it is unknown; did you "
        "mean learning_rate?",
        error=TrainingFailed,
        exit=6,
    ),
    Abuse(
        "a temperature that is not the LM's",
        a.at_temperature(0.2),
        asked_for={"train_kwargs": {"temperature": 0.8}},
        says="temperature=0.8, but the program's LM has temperature=0.2",
        error=ValueError,
        exit=6,
    ),
    Abuse(
        "no temperature, where the LM has one: the rollouts' own is said",
        a.at_temperature(0.2),
        says="rollouts sample at temperature 1, not the LM's 0.2",
        outcomes=ALL,
    ),
    Abuse(
        "what ArborGRPO wants said of the sampling, where it is neutral",
        asked_for={
            "train_kwargs": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0},
            "exclude_demos": True,
            "multitask": True,
        },
        outcomes=ALL,
    ),
]
