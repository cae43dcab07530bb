"""ART's backend by its methods: here it is the run that this program was started in.

`launch` started the run and `launch` ends it, so nothing here does. What a program calls itself is public;
what begins with `_` is what ART's own model asks of a backend, of release 0.5 and, where they differ, of 0.4.
Neighbours: `art_steps.py` and `supervised.py` make steps; `session.py` talks to the run, whose gateway knows
the model by the name it is registered under. Knows nothing of trajectories.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Self
from urllib.parse import quote

import httpx

from launcher.client.answers import json_of, refusal
from launcher.client.art import supervised
from launcher.client.art.art_notes import say_once
from launcher.client.art.art_steps import ArtTraining, TrainResult, has_nameless
from launcher.client.bodies import REQUEST_HEADER
from launcher.client.failures import Refused
from launcher.client.session import Session, connect
from launcher.client.train_kwargs import plain
from launcher.client.wire import new_request_id

_GOES_ON = "the run goes on until this program ends, or until you end it with `launch down`"
_COMES_HOME = "nothing is copied there: what is trained comes home with the run, and `launch export` gives it"
# Of a model's `_internal_config`, what a run is compared with; of the rest the run's gateway says what it is.
_COMPARED = ("peft_args", "init_args")


class SlipwayBackend:
    """The run as ART's backend. `run`: its name, from a program that `launch` did not start.

    Raises NotConnected outside a run, with the line that starts one.
    """

    def __init__(self, run: str | None = None, **others: Any) -> None:
        self.session: Session = connect(run)
        self._training = ArtTraining(self.session)
        for name in others:
            say_once(f"{name} has no effect: where a run is, and on what, is said to `launch`")

    @classmethod
    async def initialize_cluster(cls, cluster_name: str | None = None, **others: Any) -> Self:
        """The run that this program is in: `launch` has rented what it is on."""
        asked = "".join(
            f", {name}={value!r}" for name, value in others.items() if name in ("gpu", "resources")
        )
        say_once(f"the run is launch's, and so is its cluster (asked for was {cluster_name!r}{asked})")
        return await asyncio.to_thread(cls)

    # ------------------------------------------------------------------ what ends nothing

    async def close(self) -> None:
        """Nothing ends: it is said how the run does."""
        say_once(_GOES_ON)

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
        say_once(_GOES_ON)

    # ------------------------------------------------------------------ a model

    async def register(self, model: Any) -> None:
        """Let the run know the model by its name. One that is only asked needs no run.

        Raises Refused where the run trains another model, or another policy already.
        """
        if not _is_trainable(model):
            return
        said = json_of(await self._sent("/register", _said_of(model)))
        for note in said.get("notes") or ():
            say_once(str(note))

    async def _prepare_backend_for_training(self, model: Any, config: Any = None) -> tuple[str, str]:
        """Where the model is asked, and with which key."""
        if config:
            say_once("the server's own configuration has no effect: the run is served as `launch` began it")
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

        What is not said is as the run says. Where nothing can be trained there is no step, and why is
        said. Raises TrainingFailed for a keyword that the run cannot follow, or nothing to train for long.
        """
        groups = list(trajectory_groups)
        if not has_nameless(groups):
            return await asyncio.to_thread(self._training.step, groups, keywords)
        await asyncio.to_thread(self._training.meant, keywords)
        body = {**_logged(model, groups), "config": plain(keywords), "dev_config": {}, "verbose": False}
        answer = await self._sent("/_train_model", body)
        return await asyncio.to_thread(self._training.found_by_words, groups, answer.text)

    async def _train_model(
        self,
        model: Any,
        trajectory_groups: Iterable[Any],
        config: Any,
        dev_config: Any,
        verbose: bool = False,
    ) -> AsyncIterator[dict[str, float]]:
        """For release 0.4, whose model trains by itself: `model.train(groups, config=…)`.

        It loses what a choice carries beside its words, so the run looks for its samples by what was said.
        """
        body = {
            **_logged(model, trajectory_groups), "config": _fields(config), "dev_config": _fields(dev_config),
            "verbose": verbose,
        }  # fmt: skip
        answer = await self._sent("/_train_model", body)
        for line in answer.text.splitlines():
            yield json.loads(line)

    def _train_sft(
        self,
        model: Any,
        trajectories: Iterable[Any],
        config: Any,
        dev_config: Any = None,
        verbose: bool = False,
    ) -> AsyncIterator[dict[str, float]]:
        """Steps that learn the answers of trajectories, a batch each; what each measured."""
        return supervised.steps(self.session, trajectories, config)

    # ------------------------------------------------------------------ what is kept

    async def _delete_checkpoint_files(self, model: Any, steps_to_keep: list[int]) -> None:
        """Keep these. The run keeps its newest, and of older ones those that are pinned: none is deleted."""
        newest = await self._get_step(model)
        for step in {int(step) for step in steps_to_keep} - {0, newest}:
            await asyncio.to_thread(self._keep, step)

    def _keep(self, step: int) -> None:
        try:
            self.session.pin(f"{self.session.model}@v{step}", best_of="art")
        except Refused as refused:
            if refused.status != 404:
                raise
            say_once(f"step {step} is the best, and no longer kept: delete_checkpoints() earlier pins it")

    async def _delete_checkpoints(self, model: Any, benchmark: str, benchmark_smoothing: float = 1.0) -> None:
        """The same for release 0.4, of whose models the run has what was logged."""
        await self._sent(f"/_delete_checkpoints?benchmark={quote(benchmark)}", _said_of(model))

    async def _log(self, model: Any, trajectory_groups: Iterable[Any], split: str = "val") -> None:
        """For release 0.4, whose backend keeps what a model's trajectories were."""
        await self._sent("/_log", {**_logged(model, trajectory_groups), "split": split})

    async def _experimental_push_to_s3(self, model: Any, **others: Any) -> None:
        """Nothing is copied."""
        say_once(_COMES_HOME)

    async def _experimental_pull_from_s3(self, model: Any, **others: Any) -> None:
        """Nothing is copied."""
        say_once("nothing is fetched: the run goes on where it is, and `launch --resume` takes one up again")

    async def _sent(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """An answer of the run's. Raises Refused."""
        content = json.dumps(body).encode()
        headers = {REQUEST_HEADER: new_request_id(), "content-type": "application/json"}
        answer = await asyncio.to_thread(self.session.connection.wire.send, "POST", path, content, headers)
        if answer.is_error:
            raise refusal("POST", path, answer)
        return answer


def _is_trainable(model: Any) -> bool:
    return bool(getattr(model, "trainable", False))


def _said_of(model: Any) -> dict[str, Any]:
    """A model as the run is told of it: what it is, without the user's own configuration and keys."""
    config = getattr(model, "_internal_config", None) or {}
    said = {name: config[name] for name in _COMPARED if config.get(name) is not None}
    unread = dict.fromkeys((name for name in config if name not in _COMPARED), True)
    return {
        "name": model.name,
        "project": model.project,
        "trainable": _is_trainable(model),
        "base_model": getattr(model, "base_model", None),
        "_internal_config": plain(said) | unread,
    }


def _logged(model: Any, trajectory_groups: Iterable[Any]) -> dict[str, Any]:
    """Groups of trajectories as release 0.4 sends them."""
    groups = [group.model_dump(mode="json") for group in trajectory_groups]
    return {"model": _said_of(model), "trajectory_groups": groups}


def _fields(config: Any) -> dict[str, Any]:
    """The fields of a configuration that say something."""
    said = config if isinstance(config, Mapping) else config.model_dump() if config is not None else {}
    return {name: value for name, value in said.items() if value is not None}
