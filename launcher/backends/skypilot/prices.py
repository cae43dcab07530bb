"""The prices of rented GPUs, from SkyPilot's catalogs on this computer: offline, and without credentials. The
catalogs are fetched only on request.

Neighbours: `sky_prices.py` reads them, in a home that holds the catalogs and nothing else; `pricing.py` asks;
`price_snapshot.py` has the few prices that come with the package.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from launcher.backends.skypilot import sky_cache
from launcher.backends.skypilot.sky_cache import CATALOGS
from launcher.backends.skypilot.sky_home import SkyHome
from launcher.backends.skypilot.sky_process import SkyCallError, SkyCallTimeoutError, SkyProcess
from launcher.base.errors import LaunchError, PreflightError
from launcher.types.clouds import KNOWN_CLOUDS, SELF_HOSTED, has_account
from launcher.types.offers import Market, Offer

# Importing SkyPilot takes 2 to 4 s, reading a large catalog less than one.
_PRICES_SECONDS = 90.0
# A few files of up to 20 MB, from the web.
_FETCH_SECONDS = 180.0
_USER_ID = "00000000"


def places(
    infra: tuple[str, ...], user_home: Path | None = None, environ: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """`infra`; without any, the clouds this user has an account with. Raises PreflightError for none.

    Clusters of one's own are not among those: many a computer knows one that is not meant for this.
    """
    found = infra or _with_account(user_home or Path.home(), os.environ if environ is None else environ)
    if not found:
        raise PreflightError(
            "no cloud account is set up on this computer",
            f"there are no credentials for any of {', '.join(sorted(KNOWN_CLOUDS - SELF_HOSTED))}",
            "sky check  # says how to log in; prices need no account: launch plan --gpus H100:4 --infra aws",
        )
    return found


def places_to_show(
    infra: tuple[str, ...], user_home: Path | None = None, environ: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The places that a plan looks at, which needs no account: `infra`; the clouds with an account, or
    with a catalog on this computer. None if none of those has its prices here."""
    home, variables = user_home or Path.home(), os.environ if environ is None else environ
    known = with_catalog(home)
    candidates = (
        infra or _with_account(home, variables) or tuple(sorted(known & (KNOWN_CLOUDS - SELF_HOSTED)))
    )
    priced = any(place.partition("/")[0] in known | SELF_HOSTED for place in candidates)
    return candidates if priced else ()


def with_catalog(user_home: Path) -> set[str]:
    """The clouds whose catalog is on this computer."""
    return {path.parent.name for path in user_home.glob(f"{CATALOGS}/*/*/vms.csv")}


def _with_account(home: Path, variables: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(cloud for cloud in sorted(KNOWN_CLOUDS - SELF_HOSTED) if has_account(cloud, home, variables))


def refresh(infra: tuple[str, ...], user_home: Path | None = None) -> tuple[str, ...]:
    """Fetch these clouds' catalogs to SkyPilot's own folder. Returns the files that were not replaced
    because the user has changed them. Raises PreflightError when they cannot be fetched."""
    requested = dict.fromkeys(place.partition("/")[0] for place in infra)
    clouds = [cloud for cloud in requested if cloud not in SELF_HOSTED]
    if not clouds:
        return ()
    with tempfile.TemporaryDirectory(prefix="slipway-prices-") as folder:
        home = SkyHome(Path(folder), [], _USER_ID)
        sky = SkyProcess(home, home.folder / "skypilot.log")
        try:
            sky.call("fetch", _FETCH_SECONDS, clouds=clouds)
        except LaunchError as error:
            what = f"the prices of {', '.join(clouds)} cannot be fetched"
            raise PreflightError(
                what, error.why, "connect to the network, then run the same command again"
            ) from error
        finally:
            sky.end()
        kept = (user_home or Path.home()) / CATALOGS
        return tuple(sky_cache.save_catalogs(home.folder / CATALOGS, kept, anew=True))


def market(gpu: str, count: int, infra: tuple[str, ...], user_home: Path | None = None) -> Market:
    """The offers for these GPUs in the catalogs at hand. Raises PreflightError, also if SkyPilot is
    missing."""
    with tempfile.TemporaryDirectory(prefix="slipway-prices-") as folder:
        home = SkyHome(Path(folder), [], _USER_ID)
        catalogs = (user_home or Path.home()) / CATALOGS
        if catalogs.is_dir():
            # Without .meta they are a user's own to SkyPilot, which then does not fetch newer ones.
            shutil.copytree(catalogs, home.folder / CATALOGS, ignore=shutil.ignore_patterns(".meta"))
        sky = SkyProcess(home, home.folder / "skypilot.log")
        try:
            found = sky.call("offers", _PRICES_SECONDS, gpu=gpu, count=count, infra=list(infra))
        except (SkyCallError, SkyCallTimeoutError) as error:
            # Its log goes with the folder.
            hint = f"launch plan --gpus {gpu}:{count} --refresh"
            raise PreflightError(error.message, error.why, hint) from error
        finally:
            sky.end()
    return Market(
        offers=tuple(Offer(**offer) for offer in found["offers"]),
        types=found["types"],
        elsewhere=tuple(found["elsewhere"]),
        without_prices=tuple(found["without_prices"]),
        as_of=found["as_of"],
    )
