"""The routes of ART's own server, as its release 0.4 asks for them.

    /register                        a model, by its name
    /_prepare_backend_for_training   where it is asked: the address at which this client came in
    /_get_step                       the policy's version
    /_train_model                    one step; a line of JSON when it is served
    /_log                            how trajectories did; a validation, where the policy was validated
    /_delete_checkpoints             the best is kept; the others go as the run has it

Neighbours: gateway.py mounts them; models.py and training.py do the work. The relay serves them without a
token under `--art`; here they ask for it, as every route does.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from runtime.gateway.arbor.bodies import whole
from runtime.gateway.arbor.surroundings import Runtime, on_disk
from runtime.gateway.art import bodies
from runtime.gateway.art.members import OfContent
from runtime.gateway.art.models import Models
from runtime.gateway.art.training import Training, refused
from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.http.step_errors import UnknownCheckpointError
from runtime.shared.checkpoint import checkpoint_name
from runtime.shared.model_names import ModelNames
from runtime.shared.schema import REQUEST_HEADER

log = logging.getLogger(__name__)

# Set by the relay: the address that the client itself knows this endpoint by.
DOOR_HEADER = "x-slipway-door"
# By it the relay says an error in the line that a client shows who shows no body.
REASON_HEADER = "x-slipway-reason"
_ADDRESS = re.compile(r"[\w.\[\]:-]{1,255}")
_REASON_CHARACTERS = 400
_UNPRINTABLE = re.compile(r"[^ -~]")
_ID_CHARACTERS = 100
# These clients send a key and know none.
_NO_KEY = "not-needed"
_ENDS_NOTHING = "the run goes on until `launch` ends it"
_COMES_HOME = "what is trained comes home with the run, and `launch export` gives it away: nothing is copied"


class Art:
    """What ART's clients may ask. The gateway's event loop is its only user."""

    def __init__(self, runtime: Runtime, names: ModelNames, of_content: OfContent) -> None:
        root: Path = runtime.state_dir / "art"
        self._runtime = runtime
        self.models = Models(root, runtime.versions, runtime.alias, names)
        self._training = Training(runtime, of_content)

    async def register(self, said: dict[str, Any], request: Request) -> Any:
        """Know a model, and answer what of its configuration has no effect. Raises ApiError."""
        return {"notes": self._registered(bodies.model_of(said))}

    async def prepare(self, said: dict[str, Any], request: Request) -> Any:
        """The address and the key that the model is asked with."""
        self._registered(bodies.model_in(said))
        address = request.headers.get(DOOR_HEADER, "")
        if not _ADDRESS.fullmatch(address):
            raise ApiError(400, "this route is for who comes in by the run's own address, under launch --art")
        return [f"http://{address}/v1", _NO_KEY]

    async def step(self, said: dict[str, Any], request: Request) -> Any:
        """The policy's version: how many steps it has taken."""
        self._registered(bodies.model_of(said))
        return self._runtime.versions.current

    async def train(self, said: dict[str, Any], request: Request) -> Any:
        """One step, once it is served."""
        model = bodies.model_in(said)
        if not model.trainable:
            raise ApiError(400, f"{model.name} is no trainable model", param="model")
        self._registered(model)
        groups = bodies.groups_of(said)
        keywords = bodies.keywords_of(said)
        keywords["verbose"] = bool(said.get("verbose"))
        asked = request.headers.get(REQUEST_HEADER, "")[:_ID_CHARACTERS] or uuid.uuid4().hex
        lines = await self._training.train(asked, groups, keywords)
        on_disk(lambda: self.models.log(model, "train", groups.means))
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        return Response(text, media_type="application/x-ndjson")

    async def log(self, said: dict[str, Any], request: Request) -> Any:
        """Keep how trajectories did; the policy's own, but for training, are a validation of the run."""
        model, split, groups = bodies.model_in(said), bodies.split_of(said), bodies.groups_of(said)
        self._registered(model)
        on_disk(lambda: self.models.log(model, split, groups.means))
        if model.trainable and split != "train" and "reward" in groups.means:
            version = self._runtime.versions.current
            self._runtime.validated(model.name, version, groups.means["reward"])
        return None

    async def delete(self, said: dict[str, Any], request: Request) -> Any:
        """Keep the best. The newest are kept in any case, and of the others so many as the run says."""
        model = bodies.model_of(said)
        self._registered(model)
        metric = request.query_params.get("benchmark", "val/reward")
        best = self.models.best(model, metric)
        if not best:  # nothing was measured, or nothing is better than what the run began with
            log.info("%s: no step is best by %s", model.name, metric)
            return None
        try:
            await self._runtime.steps.pin(checkpoint_name(best), "art")
        except UnknownCheckpointError as error:
            log.warning("%s: the best step by %s is %d: %s", model.name, metric, best, error)
        return None

    def _registered(self, model: bodies.Model) -> list[str]:
        """Know the model. Raises ApiError for what this run is not."""
        on_disk(lambda: self.models.register(model))
        said = {name: value for name, value in model.config.items() if value is not None}
        compared = {"peft_args": said.pop("peft_args", None)}
        init = said.pop("init_args", None)
        if isinstance(init, dict):
            compared["max_seq_length"] = init.get("max_seq_length")
        meant = self._runtime.meaning(compared)
        if meant.refusals:
            raise refused(meant.refusals)
        unread = [f"_internal_config: {name} has no effect: the run is begun by launch" for name in said]
        return [*meant.notes, *unread]


def art_routes(art: Art) -> list[Route]:
    """All of them."""
    work = {
        "/register": art.register,
        "/_prepare_backend_for_training": art.prepare,
        "/_get_step": art.step,
        "/_train_model": art.train,
        "/_log": art.log,
        "/_delete_checkpoints": art.delete,
    }
    routes = [Route(path, _answering(one), methods=["POST"]) for path, one in work.items()]
    for path, why in (
        ("/close", _ENDS_NOTHING),
        ("/_experimental_push_to_s3", _COMES_HOME),
        ("/_experimental_pull_from_s3", _COMES_HOME),
    ):
        routes.append(Route(path, _nothing_to_do(why), methods=["POST"]))
    return routes


def _answering(
    work: Callable[[dict[str, Any], Request], Awaitable[Any]],
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            found = await work(whole(await request.body()), request)
        except ApiError as error:
            headers = {name.decode(): value.decode() for name, value in error.headers()}
            return Response(error.body(), error.status, headers | {REASON_HEADER: reason_of(error.message)})
        return found if isinstance(found, Response) else JSONResponse(found)

    return answer


def _nothing_to_do(why: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        log.warning("%s: %s", request.url.path, why)
        return JSONResponse(None)

    return answer


def reason_of(message: str) -> str:
    """A message as it may stand in the first line of an answer."""
    return _UNPRINTABLE.sub("?", " ".join(message.split()))[:_REASON_CHARACTERS]
