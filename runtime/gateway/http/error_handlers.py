"""Answers every error behind a route in OpenAI's form.

Neighbours: gateway.py has an application's errors handled here; openai_errors.py has the words. Knows nothing
of the routes' work.
"""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route

from runtime.gateway.http.openai_errors import ApiError, not_served

log = logging.getLogger(__name__)


def install_error_handlers(app: FastAPI) -> None:
    """Handle every error of the application's routes."""
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(Exception, _answer_failure)


def _served(app: FastAPI) -> list[tuple[str, str]]:
    """The methods and paths of all routes."""
    return [
        (method, route.path)
        for route in app.routes
        if isinstance(route, Route)
        for method in sorted(route.methods or ())
        if method != "HEAD"
    ]


def _response(error: ApiError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body(), error.status, headers)


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _response(error)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code in (404, 405):
        served = _served(request.app)
        return _response(not_served(error.status_code, request.method, request.url.path, served))
    return _response(ApiError(error.status_code, str(error.detail)))


async def _answer_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:])
    return _response(ApiError(400, f"{where}: {first['msg']}", param=where or None))


async def _answer_failure(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _response(ApiError(500, f"the gateway failed: {type(error).__name__}"))
