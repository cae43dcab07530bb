"""The routes of Arbor's own server, by both of their addresses: with `/v1`, and without it where a client's
`api_base` has no slash at its end.

Neighbours: gateway.py mounts them; jobs.py does the work. The relay serves them without a token under
`--arbor`; here they ask for it, as every route does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from runtime.gateway.arbor import bodies
from runtime.gateway.arbor.jobs import Jobs

_PREFIXES = ("/v1", "")


def arbor_routes(jobs: Jobs) -> list[Route]:
    """`POST …/fine_tuning/grpo/*`, `…/chat/launch` and `…/chat/kill`."""
    work = {
        "initialize": jobs.initialize,
        "status": jobs.status,
        "step": jobs.step,
        "checkpoint": jobs.checkpoint,
        "terminate": jobs.terminate,
        "cancel": jobs.cancel,
    }
    routes = []
    for prefix in _PREFIXES:
        routes += [
            Route(f"{prefix}/fine_tuning/grpo/{name}", _answering(one), methods=["POST"])
            for name, one in work.items()
        ]
        routes += [
            Route(f"{prefix}/chat/{name}", _nothing_to_do, methods=["POST"]) for name in ("launch", "kill")
        ]
    return routes


def _answering(
    work: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]],
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return JSONResponse(await work(bodies.whole(await request.body())))

    return answer


async def _nothing_to_do(request: Request) -> Response:
    """The policy is served for as long as the run lives, whoever launches or kills it."""
    return JSONResponse({"message": "the run serves its policy from its start to its end"})
