"""A judge that misbehaves as it is told, over real HTTP; it keeps what it is asked.

It judges by the text of a trajectory: a number behind `worth ` is its score.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "a-key-of-the-judge"
_TRAJECTORY = re.compile(r'<trajectory id="([^"]+)">\n(.*?)\n</trajectory>', re.DOTALL)


@dataclass(frozen=True)
class JudgeAsked:
    """One request."""

    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def text(self) -> str:
        return self.body["messages"][-1]["content"]

    @property
    def trajectories(self) -> dict[str, list[dict[str, Any]]]:
        """By id, in the order in which they are shown, as whoever reads the JSON has them."""
        return {name: json.loads(shown) for name, shown in _TRAJECTORY.findall(self.text)}


def fair(asked: JudgeAsked) -> list[dict[str, Any]]:
    """An entry for each trajectory, by what it is worth."""
    return [
        {"trajectory_id": name, "explanation": f"it is {worth(messages)}", "score": worth(messages)}
        for name, messages in asked.trajectories.items()
    ]


def worth(messages: list[dict[str, Any]]) -> float:
    found = re.search(r"worth (\d\.\d+)", json.dumps(messages))
    return float(found[1]) if found else 0.5


# What it answers: a text, a status with a text, or None for no answer at all.
Says = Callable[[JudgeAsked], str | tuple[int, str, dict[str, str]] | None]


def fair_text(asked: JudgeAsked) -> str:
    return json.dumps({"scores": fair(asked)})


@dataclass
class PlayedJudge:
    """`says` answers every request but the first ones, which `says_first` does, each once."""

    says: Says = fair_text
    says_first: list[Says] = field(default_factory=list)
    asked: list[JudgeAsked] = field(default_factory=list)
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    # Set as the test ends: whoever waits for an answer that does not come is let go.
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def model(self) -> tuple[str, str, str]:
        """As `ruler_score_group` takes it."""
        return self.url, KEY, "played-judge"


@contextmanager
def played_judge(says: Says = fair_text, says_first: list[Says] | None = None) -> Iterator[PlayedJudge]:
    judge = PlayedJudge(says, list(says_first or ()))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"judge": judge}))
    server.daemon_threads = True
    judge.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, args=(0.005,), daemon=True).start()
    try:
        yield judge
    finally:
        judge.over.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    judge: PlayedJudge

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length", 0)))
        asked = JudgeAsked({k.lower(): v for k, v in self.headers.items()}, json.loads(content))
        with self.judge.lock:
            self.judge.asked.append(asked)
            says = self.judge.says_first.pop(0) if self.judge.says_first else self.judge.says
        said = says(asked)
        if said is None:
            self.judge.over.wait(30)
            return
        status, text, headers = said if isinstance(said, tuple) else (200, _completion(said), {})
        self.send_response(status)
        for name, value in {"content-type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Tests print nothing."""


def _completion(text: str) -> str:
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "played-judge",
                       "choices": [choice], "usage": usage})  # fmt: skip
