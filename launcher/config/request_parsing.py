"""Parses the request: the settings of every source, the command, and the run to resume.

Neighbours: `setting_sources.py` reads the sources, `resume_source.py` the settings of a resumed run;
`request_validation.py` is next. Only reads: nothing is checked against this computer, ended or started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base.home import Home
from launcher.config import resume_source, setting_sources
from launcher.records.records import RecordStore, RunRecord
from launcher.types.settings import Settings


@dataclass(frozen=True)
class ParsedRequest:
    """Without a `command` the endpoint is held. `folder`: the command's folder, None for this one.
    `earlier`: the record of the run to resume, None for a new run."""

    settings: Settings
    command: tuple[str, ...] = ()
    folder: Path | None = None
    earlier: RunRecord | None = None


def parse_request(
    flags: Mapping[str, Any],
    sets: tuple[str, ...],
    env_file: Path | None,
    command: tuple[str, ...],
    home: Home,
) -> ParsedRequest:
    """The flag `resume` names a run to resume: its record's values hold unless they are given again.

    Raises LaunchError for values that cannot be read, contradict each other, or would train another policy
    than that run's.
    """
    if flags.get("resume") is None:
        settings = setting_sources.load(flags, sets, env_file, home=home, command=command)
        return ParsedRequest(settings, command)
    settings = setting_sources.load(flags, sets, env_file, home=home)
    earlier = resume_source.find(RecordStore(home), flags["resume"])
    settings = resume_source.merge_settings(settings, earlier)
    if command or not earlier.command:
        return ParsedRequest(settings, command, None, earlier)
    return ParsedRequest(settings, earlier.command, resume_source.working_folder(earlier), earlier)
