"""The expiry of the user's cloud session, as far as this computer knows; the plan shows it.

Neighbours: `pricing.py` shows it beside the plan. Reads the files of login tools and sends no request.
Credentials that renew themselves are left out. Knows AWS's: temporary keys, and SSO without a refresh token.
"""

from __future__ import annotations

import configparser
import hashlib
import json
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher.base.units import format_duration
from launcher.types.clouds import clouds_of
from launcher.types.plan import Plan

# aws-vault, `aws configure export-credentials` and others; saml2aws and aws-mfa, in the credentials file.
_VARIABLES = ("AWS_CREDENTIAL_EXPIRATION", "AWS_SESSION_EXPIRATION")
_KEYS = ("x_security_token_expires", "aws_session_expiration", "expiration", "expires")
_TOKEN = "aws_session_token"


def warnings(
    plan: Plan, environ: Mapping[str, str] | None = None, user_home: Path | None = None
) -> list[str]:
    """A warning if a session ends before the run may end."""
    if plan.rented is None or "aws" not in clouds_of(list(plan.rented.infra)):
        return []
    ends = aws_session_expiry(os.environ if environ is None else environ, user_home or Path.home())
    if ends is None:
        return []
    left = ends - time.time()
    longest = plan.deadline_seconds
    if longest is not None and left > longest:
        return []
    when = "has no deadline" if longest is None else f"may last {format_duration(longest)}"
    if left <= 0:
        return ["your AWS session has ended: log in again, or nothing can be rented"]
    return [
        f"your AWS session ends in {format_duration(left)}, before the deadline: the run {when}. Its machine "
        "can still end itself then, but only a new login lets this computer end it and prove that"
    ]


def aws_session_expiry(environ: Mapping[str, str], user_home: Path) -> float | None:
    """Seconds since 1970; None if no end is known, or the session renews itself."""
    if environ.get("AWS_ACCESS_KEY_ID"):
        found = next((environ[name] for name in _VARIABLES if environ.get(name)), None)
        return None if found is None or not environ.get("AWS_SESSION_TOKEN") else _seconds(found)
    profile = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE") or "default"
    folder = user_home / ".aws"
    keys = _section(environ.get("AWS_SHARED_CREDENTIALS_FILE"), folder / "credentials", profile, user_home)
    if _TOKEN in keys:
        return next((_seconds(keys[name]) for name in _KEYS if name in keys), None)
    name = profile if profile == "default" else f"profile {profile}"
    section = _section(environ.get("AWS_CONFIG_FILE"), folder / "config", name, user_home)
    return _sso_ends(section, folder / "sso" / "cache")


def _sso_ends(section: Mapping[str, str], cache: Path) -> float | None:
    """The end by the token that a login has left; one with a refresh token is renewed."""
    begun_as = section.get("sso_session") or section.get("sso_start_url")
    if begun_as is None:
        return None
    name = hashlib.sha1(begun_as.encode(), usedforsecurity=False).hexdigest()
    try:
        token: Any = json.loads((cache / f"{name}.json").read_text())
        return None if token.get("refreshToken") else _seconds(token["expiresAt"])
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def _section(told: str | None, usual: Path, name: str, user_home: Path) -> Mapping[str, str]:
    path = usual if not told else Path(str(user_home / told[2:]) if told.startswith("~/") else told)
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text())
        return dict(parser[name])
    except (OSError, UnicodeDecodeError, configparser.Error, KeyError):
        return {}


def _seconds(text: str) -> float | None:
    """The seconds of an ISO time, with UTC if it names no zone, or of a number."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        found = datetime.fromisoformat(text.strip().replace("UTC", "+00:00").replace(" +", "+"))
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
