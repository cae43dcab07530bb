"""Stands in for `python -m launcher.backends.skypilot.sky_calls`: the same calls, without an API server.

`launch` and `down` are worked at here by the functions the server itself calls. A launch goes as far as the
providers are played: there are machines, and nobody logs in to them. SkyPilot's pauses are cut short.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

_PAUSE_SECONDS = 0.01


class AsFarAsPlayed(BaseException):
    """There are machines; what follows is ssh."""


def play() -> None:
    """Put the server's own functions where its client's are."""
    from sky.backends import wheel_utils
    from sky.provision import provisioner

    import sky
    from sky import core, execution

    wheel = Path.home() / "wheel"

    def stop_here(*arguments: Any, **named: Any) -> None:
        raise AsFarAsPlayed

    def launch(task: Any, **named: Any) -> str:
        from sky.skylet.autostop_lib import AutostopWaitFor

        wheel.mkdir(exist_ok=True)
        assert named.pop("wait_for") is AutostopWaitFor.NONE
        try:
            execution.launch(task, **named)
        except AsFarAsPlayed:
            return "launched"
        raise AssertionError("it went further than is played")

    pause = time.sleep
    instead: list[tuple[Any, str, Any]] = [
        (sky, "launch", launch),
        (sky, "down", core.down),
        (sky, "stream_and_get", lambda request: request),
        # Built in 6 to 13 s for machines that nobody logs in to.
        (wheel_utils, "build_sky_wheel", lambda *arguments: (wheel, "0")),
        (provisioner, "post_provision_runtime_setup", stop_here),
        (time, "sleep", lambda seconds: pause(min(seconds, _PAUSE_SECONDS))),
    ]
    for place, name, act in instead:
        setattr(place, name, act)


if __name__ == "__main__":
    from launcher.backends.skypilot import sky_calls

    play()
    sky_calls.main()
