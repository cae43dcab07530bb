"""The prices of rented GPUs, from SkyPilot's catalogs on this computer: offline, and with nobody's keys.

Neighbours: `sky_calls.py` reads them, in a home that holds the catalogs and nothing else; `quote.py` asks.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from launcher.errors import PreflightError
from launcher.machines.sky_home import KNOWN, OWN, SkyHome, has_account
from launcher.machines.sky_process import SkyCallError, SkyCallLateError, SkyProcess
from launcher.plan import Market, Offer

# Importing SkyPilot takes 2 to 4 s, reading a large catalog less than one.
_PRICES_SECONDS = 90.0
_CATALOGS = ".sky/catalogs"
_USER_ID = "00000000"


def places(
    infra: tuple[str, ...], user_home: Path | None = None, environ: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """`infra`; without any, the clouds this user has an account with. Raises PreflightError for none.

    Clusters of one's own are not among those: many a computer knows one that is not meant for this.
    """
    home, variables = user_home or Path.home(), os.environ if environ is None else environ
    found = infra or tuple(cloud for cloud in sorted(KNOWN - OWN) if has_account(cloud, home, variables))
    if not found:
        raise PreflightError(
            "there is no account with any cloud on this computer",
            f"SkyPilot's credentials are there for none of {', '.join(sorted(KNOWN - OWN))}",
            "sky check   (says how to log in; prices need no account: launch plan --gpus H100:4 --infra aws)",
        )
    return found


def market(gpu: str, count: int, infra: tuple[str, ...], user_home: Path | None = None) -> Market:
    """What the catalogs at hand have of these GPUs. Raises PreflightError, also where SkyPilot is missing."""
    with tempfile.TemporaryDirectory(prefix="slipway-prices-") as folder:
        home = SkyHome(Path(folder), [], _USER_ID)
        catalogs = (user_home or Path.home()) / _CATALOGS
        if catalogs.is_dir():
            # Without .meta they are a user's own to SkyPilot, which then does not fetch newer ones.
            shutil.copytree(catalogs, home.folder / _CATALOGS, ignore=shutil.ignore_patterns(".meta"))
        sky = SkyProcess(home, home.folder / "skypilot.log")
        try:
            found = sky.call("offers", _PRICES_SECONDS, gpu=gpu, count=count, infra=list(infra))
        except (SkyCallError, SkyCallLateError) as error:
            # Its log goes with the folder.
            raise PreflightError(error.message, error.why, f"sky gpus list {gpu}:{count}") from error
        finally:
            sky.end()
    return Market(
        offers=tuple(Offer(**offer) for offer in found["offers"]),
        types=found["types"],
        elsewhere=tuple(found["elsewhere"]),
        without_prices=tuple(found["without_prices"]),
        as_of=found["as_of"],
    )
