"""Access to a run's page: one-time links, and the cookie that a browser gets for one.

All of it is random and in the memory of the process that has the door: it ends with it. A cookie goes to any
port of this computer, whoever listens there; so the page's place has a part that nobody can guess, and the
cookie goes nowhere else.
Neighbours: `page_routes.py` asks. Knows nothing of what the page shows.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable

COOKIE = "slipway"
LINK_SECONDS = 300.0
# That nobody used yet.
_MOST_LINKS = 32


class PageKeys:
    """Of one door. `now`: a clock that does not go back."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._links: dict[str, float] = {}
        self._cookie = secrets.token_urlsafe(32)
        self.place = f"/page/{secrets.token_urlsafe(16)}/"

    def new_link(self) -> str:
        """A code that is good once, for some minutes."""
        while len(self._links) >= _MOST_LINKS:
            del self._links[next(iter(self._links))]
        code = secrets.token_urlsafe(32)
        self._links[code] = self._now() + LINK_SECONDS
        return code

    def use(self, code: str) -> bool:
        """Whether it is good; from now on it is not."""
        found = [one for one in self._links if hmac.compare_digest(one.encode(), code.encode())]
        return any(self._links.pop(one) > self._now() for one in found)

    def set_cookie(self) -> str:
        """The header that gives it: no script reads it, and no other site's page has it sent."""
        return f"{COOKIE}={self._cookie}; HttpOnly; SameSite=Strict; Path={self.place}"

    def is_cookie(self, given: str | None) -> bool:
        return given is not None and hmac.compare_digest(given.encode(), self._cookie.encode())
