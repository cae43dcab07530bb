"""Errors on the routes of Anthropic's Messages API, in the form that its clients read.

Neighbours: the gateway refuses there (gateway/dialects/), and the relay does before it
(`launcher/proxy/relay_rules.py`). Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ROUTES = re.compile(r"(?:/rollouts/[^/]+)?/v1/messages(?:/count_tokens)?")
# Status → Anthropic's name of the error.
_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def is_messages_route(path: str) -> bool:
    """Whether a path, without its query, is one of these routes."""
    return _ROUTES.fullmatch(path) is not None


def in_anthropics_form(status: int, error: Mapping[str, Any]) -> dict[str, Any]:
    """The body of an error answer. `error`: the inner object of one in OpenAI's form, of which all but the
    type is kept."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    rest = {name: value for name, value in error.items() if name != "type" and value is not None}
    return {"type": "error", "error": {"type": kind, **rest}}
