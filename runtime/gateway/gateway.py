"""The runtime's only endpoint: an allow-listed OpenAI API and the training routes, on a Unix socket.

    python -m runtime.gateway.gateway --config STATE/runtime.json      (the token on the first line of stdin)

Neighbours: the supervisor starts it; everything behind a route is in a file of its own (proxy.py, routes.py).
This file builds the application with its allow-list, and runs it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.responses import JSONResponse
from starlette.routing import Route

from runtime.gateway.completions.proxy import Completions
from runtime.gateway.dialects.errors import AnthropicErrors
from runtime.gateway.dialects.generate import generate_routes
from runtime.gateway.dialects.messages import Messages
from runtime.gateway.dialects.response_store import ResponseStore
from runtime.gateway.dialects.responses import Responses
from runtime.gateway.dialects.tokenizer import TokenizerRoutes
from runtime.gateway.engines.engine_client import EngineClient
from runtime.gateway.engines.engine_pool import EnginePool
from runtime.gateway.engines.version_check import AdapterVerifier
from runtime.gateway.fine_tuning.routes import FineTuning
from runtime.gateway.http.auth import BearerAuth
from runtime.gateway.http.bodies import BodyReader
from runtime.gateway.http.error_handlers import install_error_handlers
from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.requests import request_fields
from runtime.gateway.requests.answer_limit import limit_answer
from runtime.gateway.requests.grammar_size import check_grammar_size
from runtime.gateway.requests.request_fields import Kind
from runtime.gateway.routes import slipway_routes
from runtime.gateway.samples.lookup import lookup_routes
from runtime.gateway.samples.rollout_samples import sample_routes
from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.status_reader import StatusReader
from runtime.gateway.steps.examples import Examples
from runtime.gateway.steps.queue import StepQueue
from runtime.gateway.steps.rewind import Rewind
from runtime.gateway.steps.rollout_log import RolloutLog, RolloutLogLimits, selection_of, tokenizer_of
from runtime.gateway.steps.text_members import TextMembers
from runtime.gateway.train_kwargs import train_kwargs_routes
from runtime.gateway.validations import Validations, validation_routes
from runtime.gateway.versions.model_check import ModelCheck
from runtime.gateway.versions.policy_name import PolicyName, policy_name_routes
from runtime.gateway.versions.publishing import Publisher
from runtime.gateway.versions.versions import Versions, kept_versions, weights_of
from runtime.shared import open_files
from runtime.shared.checkpoint import SERVING, Checkpoint, CheckpointStore, newest_step
from runtime.shared.model_names import ModelNames
from runtime.shared.process_status import SupervisorStatus
from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.stdin_token import read_token

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 3
# So many new objects are looked through at a time: most of a request's are gone by themselves until then.
_YOUNG_OBJECTS = 10_000


@dataclass(frozen=True)
class Components:
    """Everything behind the routes, wired together."""

    clients: list[EngineClient]
    pool: EnginePool
    completions: Completions
    samples: SampleStore
    versions: Versions
    steps: StepQueue
    model_check: ModelCheck
    status_reader: StatusReader
    validations: Validations
    rollout_log: RolloutLog
    policy_name: PolicyName
    fine_tuning: FineTuning
    state_dir: Path
    config: RuntimeConfig

    def context_tokens(self) -> int | None:
        """The longest sequence that every engine takes, prompt and answer; None while unknown."""
        return _context_tokens(self.config, self.clients)


def _context_tokens(config: RuntimeConfig, clients: list[EngineClient]) -> int | None:
    lengths = (config.engine.max_model_len, *(client.facts.context_length for client in clients))
    return min((length for length in lengths if length is not None), default=None)


def build_components(config: RuntimeConfig) -> Components:
    """Wire the gateway's parts. Reads the files of earlier processes; connects to nothing yet."""
    state_dir, socket_dir = Path(config.state_dir), Path(config.socket_dir)
    supervisor_status = SupervisorStatus(state_dir, config.lease_seconds)
    clients = [EngineClient(socket_dir / f"engine-{index}.sock") for index in range(config.engines)]
    checkpoints = CheckpointStore(state_dir / "checkpoints")
    rewind = Rewind.read(state_dir)
    # One adapter's place stays free: the next version is staged while the present ones are served.
    versions = Versions(
        state_dir / SERVING,
        config.served_name,
        keep=config.engine.max_loras - 1,
        kept=lambda: kept_versions(checkpoints),
        weights=lambda version: weights_of(checkpoints, version),
        reused_after=rewind.reused_after if rewind else None,
        names=ModelNames.of(config),
    )
    samples = SampleStore(state_dir / "samples")
    verifier = AdapterVerifier(clients, config.served_name, config.dtype)
    publisher = Publisher(clients, supervisor_status, verifier, versions, checkpoints, state_dir)
    pool = publisher.pool
    model_check = ModelCheck(config, pool, verifier)

    async def publish(checkpoint: Checkpoint) -> dict[str, Any]:
        await model_check.passed()
        return await publisher.publish(checkpoint)

    def check(kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        limit_answer(kind, body, config.engine.answer_tokens, _context_tokens(config, clients))
        try:
            check_grammar_size(body)
            return request_fields.check(kind, body, config.device)
        except request_fields.BadField as error:
            raise ApiError(400, error.message, param=error.param) from error

    def ignored_fields(kind: Kind, body: dict[str, Any]) -> tuple[str, ...]:
        return request_fields.ignored_fields(kind, body, config.device)

    def trainer_failure() -> str | None:
        status = supervisor_status.child("trainer")
        return f"the trainer failed: {status.get('detail')}" if status.get("state") == "failed" else None

    texts = TextMembers(samples, pool, versions)
    limits = RolloutLogLimits(rollouts=config.logged_rollouts)
    rollout_log = RolloutLog(state_dir, lambda: tokenizer_of(config.model_path), limits)
    steps = StepQueue(
        state_dir,
        samples,
        checkpoints,
        publish,
        trainer_failure=trainer_failure,
        max_staleness=config.max_staleness,
        train=config.train,
        resolve=texts.resolve,
        learn=Examples(pool).tokenise,
        rollout_log=rollout_log,
    )
    steps.taken = lambda groups: pool.router.forget(
        member.rollout for group in groups for member in group.members
    )
    status_reader = StatusReader(config, supervisor_status, pool, versions, samples, model_check)
    validations = Validations(state_dir, newest_step(checkpoints))
    policy_name = PolicyName(state_dir, versions, config.served_name, ModelNames.of(config))
    versions.also = policy_name.meaning
    return Components(
        clients=clients,
        pool=pool,
        completions=Completions(pool, versions, samples, check, ignored_fields, config, steps.warnings),
        samples=samples,
        versions=versions,
        steps=steps,
        model_check=model_check,
        status_reader=status_reader,
        validations=validations,
        rollout_log=rollout_log,
        policy_name=policy_name,
        fine_tuning=FineTuning(
            state_dir, steps, versions, config.train.learning_rate, lambda: _context_tokens(config, clients)
        ),
        state_dir=state_dir,
        config=config,
    )


def build_app(parts: Components) -> FastAPI:
    """The application without its lock: tests walk its routes; `main` puts BearerAuth around it."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        loops = (
            parts.pool.watch,
            parts.model_check.run,
            parts.steps.run,
            parts.fine_tuning.run,
        )
        background = [asyncio.create_task(_exit_on_failure(work())) for work in loops]
        yield
        await parts.completions.in_flight.close()
        for task in background:
            task.cancel()
        for client in parts.clients:
            await client.close()

    app = FastAPI(lifespan=life, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.router.routes += _openai_routes(parts)
    metrics = parts.state_dir / "metrics.jsonl"
    app.include_router(slipway_routes(parts.steps, parts.status_reader, metrics, parts.versions.checkpoint))
    app.include_router(sample_routes(parts.samples))
    app.include_router(lookup_routes(parts.samples.of_content, parts.steps.has))
    app.include_router(policy_name_routes(parts.policy_name))
    app.include_router(
        validation_routes(
            parts.validations,
            lambda: parts.versions.current,
            lambda validation, version: partial(
                parts.rollout_log.write_validation,
                validation,
                version,
                selection_of(validation, parts.samples),
                parts.samples,
            ),
        )
    )
    app.include_router(train_kwargs_routes(parts.config, parts.context_tokens))
    app.include_router(parts.fine_tuning.router)
    _answer_head(app)
    app.add_middleware(BodyReader)
    install_error_handlers(app)
    return app


def _answer_head(app: FastAPI) -> None:
    """HEAD is answered as GET, as OpenAI does; the server leaves the body out."""
    for route in app.routes:
        methods = route.methods if isinstance(route, Route) else None
        if methods is not None and "GET" in methods:
            methods.add("HEAD")


def _openai_routes(parts: Components) -> list[Route]:
    async def health(request: Request) -> Response:
        return Response(b'{"ok":true}', media_type="application/json")

    def described(model: dict[str, Any]) -> dict[str, Any]:
        context = parts.context_tokens()
        return model if context is None else model | {"max_model_len": context}

    async def models(request: Request) -> Response:
        listed = parts.versions.models()
        return JSONResponse(listed | {"data": [described(model) for model in listed["data"]]})

    async def model(request: Request) -> Response:
        return JSONResponse(described(parts.versions.model(request.path_params["model"])))

    responses = Responses(parts.completions.serve, ResponseStore(parts.state_dir / "responses"))
    messages = Messages(parts.completions.serve, parts.completions.render)
    name = parts.config.served_name
    tokenizer = TokenizerRoutes(parts.completions, name)
    routes = [Route("/healthz", health, methods=["GET"])]
    for root in ("", "/rollouts/{rollout}"):
        prefix = f"{root}/v1"
        routes += [
            *generate_routes(root, parts.completions.serve, name),
            *tokenizer.routes(root),
            Route(f"{prefix}/models", models, methods=["GET"]),
            Route(f"{prefix}/models/{{model:path}}", model, methods=["GET"]),
            Route(f"{prefix}/chat/completions", parts.completions.endpoint("chat"), methods=["POST"]),
            Route(f"{prefix}/completions", parts.completions.endpoint("completion"), methods=["POST"]),
            *responses.routes(prefix),
            *messages.routes(prefix),
        ]
    return routes


async def _exit_on_failure(work: Any) -> None:
    """Run a loop that must not end. If it fails, the process ends, and the supervisor starts it again."""
    try:
        await work
    except Exception:  # after any error: half a gateway would look well
        log.exception("a loop of the gateway ended")
        os._exit(1)


def bind(path: Path) -> socket.socket:
    """A listening Unix socket only this user may open, put in place of a dead gateway's in one step."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(fresh))
    fresh.chmod(0o600)
    listener.listen(1024)
    os.rename(fresh, path)
    return listener


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="runtime.gateway.gateway")
    parser.add_argument("--config", required=True, help="state_dir/runtime.json")
    config_path = Path(parser.parse_args(arguments).config)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    token = read_token()
    if not token:
        log.error("no token on the first line of stdin")
        return 2
    open_files.raise_limit()  # a request in flight holds two, and most systems give 1,024
    config = RuntimeConfig.model_validate_json(config_path.read_text())
    parts = build_components(config)
    if why := parts.steps.start_failure:
        log.error("the run cannot begin with its adapter: %s", why)
        return 2
    app = AnthropicErrors(BearerAuth(build_app(parts), token))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            proxy_headers=False,  # no proxy stands in between, and nothing here reads them
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
    )
    # The present objects stay, and need not be searched again and again.
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(server.serve([bind(Path(config.socket_dir) / "gateway.sock")]))
    return 0


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
