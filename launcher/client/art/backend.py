"""ART's backend by its methods: here it is the run that this program was started in.

`launch` started the run and `launch` ends it, so nothing here does. Methods that a program calls are public;
those with `_` are called by ART's own model, as in its release 0.5.
Neighbours: `art_training.py` and `sft.py` make steps; `session.py` talks to the run, whose gateway knows the
model by the name it is registered under. Knows nothing of trajectories.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Self

from launcher.client import train_kwargs
from launcher.client.art import sft
from launcher.client.art.art_training import ArtTraining, TrainResult
from launcher.client.art.run_requests import post
from launcher.client.art.stderr_log import log_once
from launcher.client.failures import Refused
from launcher.client.no_progress import MAX_EMPTY_STEPS
from launcher.client.session import Session, connect

_RUN_CONTINUES = "the run goes on until this program ends, or until you end it with `launch down`"
_RESULTS_DOWNLOADED = (
    "nothing is copied there: what is trained comes home with the run, and `launch export` gives it"
)
_STARTED_BY_LAUNCH = "the run is begun by launch"
# A model's own configuration; its LoRA and its length are compared with the run's.
_CONFIG = "_internal_config"


class SlipwayBackend:
    """The run as ART's backend. `run`: its name, from a program that `launch` did not start.

    `max_empty_steps`: see `connect`. Raises NotConnected outside a run, with the line that starts one.
    """

    def __init__(self, run: str | None = None, max_empty_steps: int = MAX_EMPTY_STEPS, **others: Any) -> None:
        self.session: Session = connect(run, max_empty_steps=max_empty_steps)
        self._training = ArtTraining(self.session)
        for name in others:
            log_once(f"{name} has no effect: `launch` decides where a run is, and on which machine")

    @classmethod
    async def initialize_cluster(
        cls, cluster_name: str | None = None, max_empty_steps: int = MAX_EMPTY_STEPS, **others: Any
    ) -> Self:
        """The run that this program is in: `launch` has rented its machine."""
        details = "".join(
            f", {name}={value!r}" for name, value in others.items() if name in ("gpu", "resources")
        )
        log_once(f"the run is launch's, and so is its cluster (asked for was {cluster_name!r}{details})")
        return await asyncio.to_thread(cls, max_empty_steps=max_empty_steps)

    # ------------------------------------------------------------------ calls that end nothing

    async def close(self) -> None:
        """Ends nothing: a line tells how the run ends."""
        log_once(_RUN_CONTINUES)

    async def down(self) -> None:
        """The same as `close`."""
        await self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *ended: object) -> None:
        await self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        log_once(_RUN_CONTINUES)

    # ------------------------------------------------------------------ a model

    async def register(self, model: Any) -> None:
        """Let the run know the model by its name. One that is only asked needs no run.

        Raises Refused if the run trains another model, or another policy already, and TrainingFailed if
        the model's own configuration asks for another LoRA.
        """
        if _is_trainable(model):
            await asyncio.to_thread(self._register, model)

    def _register(self, model: Any) -> None:
        model_config = getattr(model, "_internal_config", None) or {}
        config = {name: value for name, value in model_config.items() if value is not None}
        compared = {"peft_args": config.pop("peft_args")} if "peft_args" in config else {}
        if isinstance(init := config.pop("init_args", None), Mapping) and init.get("max_seq_length"):
            compared["max_seq_length"] = init["max_seq_length"]
        resolved = train_kwargs.resolve(
            self.session.connection, compared, strict=False, trainer="art", source=_CONFIG
        )
        for note in (
            *resolved.notes,
            *(f"{_CONFIG}: {name} has no effect: {_STARTED_BY_LAUNCH}" for name in config),
        ):
            log_once(note)
        post(self.session, "/slipway/policy_name", {"name": model.name, "base_model": model.base_model})

    async def _prepare_backend_for_training(self, model: Any, config: Any = None) -> tuple[str, str]:
        """Where the model is asked, and with which key."""
        if config:
            log_once("the server's own configuration has no effect: the run is served as `launch` began it")
        return self.session.base_url, self.session.api_key

    def _model_inference_name(self, model: Any, step: int | None = None) -> str:
        """`name` means the newest version, `name@7` that of step 7; another's model is asked by its own."""
        if not _is_trainable(model):
            return model.inference_model_name or model.name
        return model.name if step is None else f"{model.name}@{step}"

    async def _get_step(self, model: Any) -> int:
        """The policy's version, which is how many steps it has taken."""
        return (await asyncio.to_thread(self.session.status)).version

    # ------------------------------------------------------------------ training

    async def train(self, model: Any, trajectory_groups: Iterable[Any], **keywords: Any) -> TrainResult:
        """One step on these groups, until it is served. The keywords are those of ART's `LocalBackend`.

        A keyword that is not given has the run's value. If nothing can be trained there is no step, and a
        line gives the reason. Raises TrainingFailed for a keyword that the run cannot follow, and when
        nothing could be trained `max_empty_steps` times in a row.
        """
        return await asyncio.to_thread(self._training.step, list(trajectory_groups), keywords)

    def _train_sft(
        self,
        model: Any,
        trajectories: Iterable[Any],
        config: Any,
        dev_config: Any = None,
        verbose: bool = False,
    ) -> AsyncIterator[dict[str, float]]:
        """Steps that learn the answers of trajectories, a batch each; yields the metrics of each step."""
        return sft.sft_steps(self.session, self._training.guard, trajectories, config)

    # ------------------------------------------------------------------ checkpoints

    async def _delete_checkpoint_files(self, model: Any, steps_to_keep: list[int]) -> None:
        """Keep these. The run keeps its newest, and of older ones those that are pinned: none is deleted."""
        newest = await self._get_step(model)
        for step in {int(step) for step in steps_to_keep} - {0, newest}:
            await asyncio.to_thread(self._pin, step)

    def _pin(self, step: int) -> None:
        try:
            self.session.pin(f"{self.session.model}@v{step}", best_of="art")
        except Refused as refused:
            if refused.status != 404:
                raise
            log_once(f"step {step} is the best, and no longer kept: delete_checkpoints() earlier pins it")

    async def _experimental_push_to_s3(self, model: Any, **others: Any) -> None:
        """Nothing is copied."""
        log_once(_RESULTS_DOWNLOADED)

    async def _experimental_pull_from_s3(self, model: Any, **others: Any) -> None:
        """Nothing is copied."""
        log_once("nothing is fetched: the run goes on where it is, and `launch --resume` takes one up again")


def _is_trainable(model: Any) -> bool:
    return bool(getattr(model, "trainable", False))
