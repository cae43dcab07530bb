"""Access to a run's page: one-time links, and the cookie that a browser gets for one.

All codes are random and only in the relay's memory, so they end with it. A browser sends a cookie to any port
of this computer, whichever program listens there. So the page's path has a part that cannot be guessed, and
the cookie is sent to that path only.
Neighbours: `page_routes.py` asks. Knows nothing of the page's content.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable

COOKIE = "slipway"
LINK_SECONDS = 300.0
# Links that were not used yet.
_MAX_LINKS = 32


class PageAuth:
    """The codes of one relay. `now`: a monotonic clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._links: dict[str, float] = {}
        self._cookie = secrets.token_urlsafe(32)
        self.place = f"/page/{secrets.token_urlsafe(16)}/"

    def new_link(self) -> str:
        """A code that works once, for some minutes."""
        while len(self._links) >= _MAX_LINKS:
            del self._links[next(iter(self._links))]
        code = secrets.token_urlsafe(32)
        self._links[code] = self._now() + LINK_SECONDS
        return code

    def forget_links(self) -> None:
        """No link works any more; who was let in stays in."""
        self._links.clear()

    def use(self, code: str) -> bool:
        """Whether the code is valid; it is used up."""
        found = [one for one in self._links if hmac.compare_digest(one.encode(), code.encode())]
        return any(self._links.pop(one) > self._now() for one in found)

    def set_cookie(self) -> str:
        """The Set-Cookie header: no script can read the cookie, and no other site's page sends it."""
        return f"{COOKIE}={self._cookie}; HttpOnly; SameSite=Strict; Path={self.place}"

    def is_cookie(self, given: str | None) -> bool:
        return given is not None and hmac.compare_digest(given.encode(), self._cookie.encode())
