"""The names of jobs: made once and never again, and what each means where a model is asked for.

    grpo:qwen2.5-1.5b-instruct:brave-otter-3f2a9c11:20261121         the newest policy
    …@s3    the policy as the job's round 3 left it; the newest one until a later round has left another
    …@v12   version 12 of the policy

A client takes the name that its last group was answered with, before that round is trained, and samples the
next round with it: so the name of the round last sent must mean the newest policy, and that of an earlier
one, which an optimized program may still hold, what it meant. Neighbours: jobs.py. Pure.
"""

from __future__ import annotations

import re
import secrets
import time

_FIRST = (
    "able", "apt", "bold", "brave", "brisk", "calm", "clear", "deft", "eager", "early", "fair", "fleet",
    "fond", "glad", "grand", "keen", "kind", "late", "light", "lucid", "merry", "mild", "neat", "proud",
    "quick", "quiet", "rapid", "sharp", "sound", "steady", "swift", "warm",
)  # fmt: skip
_SECOND = (
    "badger", "bison", "crane", "curlew", "dipper", "dunlin", "eagle", "egret", "falcon", "finch", "gannet",
    "gull", "hare", "heron", "ibis", "jackdaw", "kestrel", "lark", "lynx", "marten", "newt", "osprey",
    "otter", "pipit", "plover", "raven", "robin", "stoat", "swan", "tern", "vole", "wren",
)  # fmt: skip
_ODD = re.compile(r"[^a-z0-9._-]+")
_JOB = re.compile(r"grpo:[a-z0-9._-]{1,64}:(?P<folder>[a-z]+-[a-z]+-[0-9a-f]{8}):[0-9]{8}")
_ROUND = re.compile(r"s(0|[1-9][0-9]{0,8})")
_VERSION = re.compile(r"v(0|[1-9][0-9]{0,8})")


def new(model: str) -> str:
    """A job's id. What is random in it keeps lives, machines and forgotten jobs apart."""
    short = _ODD.sub("-", model.rstrip("/").rpartition("/")[2].partition(":")[0].lower())[:64].strip("-")
    words = f"{secrets.choice(_FIRST)}-{secrets.choice(_SECOND)}-{secrets.token_hex(4)}"
    return f"grpo:{short or 'model'}:{words}:{time.strftime('%Y%m%d', time.gmtime())}"


def folder_of(job: str) -> str | None:
    """The name of a job's folder, and its short one; None for what is no job's id."""
    found = _JOB.fullmatch(job)
    return found["folder"] if found else None


def after_round(job: str, number: int) -> str:
    """The policy as a round leaves it."""
    return f"{job}@s{number}"


def of_version(job: str, version: int) -> str:
    """A version, by a job's name."""
    return f"{job}@v{version}"


def parts(name: str) -> tuple[str, int | None, int | None]:
    """A name's job, and the round or the version in it. What is neither is not a job's: an empty one."""
    job, at, rest = name.partition("@")
    if not at:
        return job, None, None
    if found := _ROUND.fullmatch(rest):
        return job, int(found[1]), None
    if found := _VERSION.fullmatch(rest):
        return job, None, int(found[1])
    return "", None, None
