"""Arguments that bypass the option parser: the program after `--`, and options of a run, at any place.

Neighbours: `main.py` makes one, `commands.py` hands it on to the verb's implementation. Knows nothing of
verbs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.console.output import Output

# The parameters of `launch` that are settings of a run; --max is `maximum` here, because `max` is Python's.
RUN_OPTIONS = (
    "model", "name", "resume", "from_run", "gpus", "infra", "train_gpus", "infer_gpus", "disk", "wandb",
    "trackio", "port", "openai_env", "arbor", "art", "budget", "max_price", "yes", "maximum", "lease", "idle",
    "grace", "copy_rate", "keep_output",
)  # fmt: skip


@dataclass(frozen=True)
class Invocation:
    """The arguments that bypass the option parser; `command` is None without a `--`. The options of a run
    are added. `started_by`: the whole line, for the hints of its program."""

    command: list[str] | None
    output: Output
    flags: Mapping[str, Any] = field(default_factory=dict)
    sets: tuple[str, ...] = ()
    env_file: Path | None = None
    started_by: str | None = None

    def with_options(self, given: Mapping[str, Any]) -> Invocation:
        """A copy with the options that the parser read, by parameter, over the earlier ones."""
        flags = {name: given.get(name) for name in RUN_OPTIONS}
        flags["max"] = flags.pop("maximum")
        flags["from"] = flags.pop("from_run")
        flags["infra"] = ",".join(flags["infra"]) if flags["infra"] else None
        env_file = given.get("env_file")
        return replace(
            self,
            flags={key: self.flags.get(key) if value is None else value for key, value in flags.items()},
            sets=(*self.sets, *(given.get("settings") or ())),
            env_file=self.env_file if env_file is None else Path(env_file),
        )
