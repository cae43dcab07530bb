"""The runtime's configuration: the launcher writes it, the runtime's processes read it.

Neighbours: `train_config.py` has the keys under `train.`, `schema.py` the HTTP bodies. Pydantic only, so both
halves can import it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from runtime.shared.schema import Body
from runtime.shared.train_config import TrainConfig


class EngineConfig(Body):
    """One vLLM server per inference GPU group (one, on the CPU)."""

    max_model_len: int | None = Field(default=None, ge=64)
    # The most tokens of a chat answer whose request names no limit of its own.
    answer_tokens: int = Field(default=4096, ge=1)
    max_loras: int = Field(default=4, ge=3)
    # How many sequences an engine samples at a time; None: 64 on a CPU, vLLM's own default on a GPU.
    max_num_seqs: int | None = Field(default=None, ge=1)
    memory_fraction: float | None = Field(default=None, gt=0, le=0.95)
    # For keys and values. None: 1 on a CPU, on a GPU the rest of vLLM's fraction.
    kv_cache_gib: float | None = Field(default=None, gt=0)


class RuntimeConfig(Body):
    """The runtime's whole configuration, saved as `runtime.json` beside the run.

    `model_path` is a local folder in Hugging Face form, or a hub name the runtime downloads. `model_name` is
    the model's name in adapters, the same on every machine; None: `model_path` without its folder.
    `state_dir` holds samples, steps, checkpoints, logs; `socket_dir` (0700, short path) the sockets.
    """

    run_id: str
    model_path: str
    model_name: str | None = None
    served_name: str = "policy"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    engines: int = Field(default=1, ge=1)
    train_processes: int = Field(default=1, ge=1)
    state_dir: str
    socket_dir: str
    # A sample older than this many committed steps is dropped and counted, not trained (C39).
    max_staleness: int = Field(default=2, ge=0)
    lease_seconds: float = Field(default=60.0, gt=0)
    deadline_seconds: float | None = Field(default=None, gt=0)
    # How long engines and trainer may take to become ready, which a model that must come first decides.
    start_seconds: float = Field(default=1800.0, gt=0)
    wandb_mode: Literal["disabled", "offline", "online"] = "disabled"
    wandb_project: str = "slipway"
    wandb_name: str | None = None  # there; None is the run's id
    # How many completions of a step go to Weights & Biases as well, where the run does; 0: no texts go there.
    wandb_completions: int = Field(default=0, ge=0, le=64)
    # How many rollouts of a step come home as text, with their rewards; 0 keeps none.
    logged_rollouts: int = Field(default=64, ge=0, le=4096)
    # Whether each choice of an answer has `slipway: {sample, version}`, which names it for a reward.
    name_samples: bool = True
    # Whether a turn goes on from the ids of the turn before, if its client sends the same text again.
    continue_turns: bool = True
    train: TrainConfig = TrainConfig()
    engine: EngineConfig = EngineConfig()

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, values: dict[str, Any]) -> dict[str, Any]:
        """A dotted key is a key of a section: {"train.seed": 1} is {"train": {"seed": 1}}."""
        nested = {key: value for key, value in values.items() if "." not in key}
        for key in values.keys() - nested.keys():
            *sections, last = key.split(".")
            place = nested
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = values[key]
        return nested
