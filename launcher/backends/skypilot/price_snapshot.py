"""A few list prices that come with the package, each with its day: for a plan without catalogs.

    price_snapshot.csv    cloud,region,instance_type,gpu,count,price_per_hour,read,source

A price is from SkyPilot's public catalog in the version `source`, a file at one commit; without a region it
is the same in all. `read` is the day on which the catalog was read; the version may have been older. The
prices are an orientation. Consent to a run needs prices from SkyPilot's newest catalogs.
Neighbours: `prices.py` reads those, `pricing.py` shows which of the two a price is from. Needs no network and
no SkyPilot.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from launcher.types.offers import Market, Offer

_FILE = Path(__file__).with_name("price_snapshot.csv")


@dataclass(frozen=True)
class Price:
    """One row: a machine with `count` GPUs for so many US dollars an hour, as read on a day (ISO)."""

    cloud: str
    region: str
    instance_type: str
    gpu: str
    count: int
    price_per_hour: float
    read: str
    source: str


def prices() -> list[Price]:
    """All rows of the snapshot."""
    with _FILE.open(encoding="utf-8", newline="") as file:
        return [_price(row) for row in csv.DictReader(file)]


def clouds() -> tuple[str, ...]:
    """The clouds with a price for at least one GPU."""
    return tuple(sorted({price.cloud for price in prices()}))


def market(gpu: str, count: int, infra: tuple[str, ...]) -> Market:
    """The snapshot's offers for these GPUs at these places. Without any, the price is unknown: a few rows
    do not prove that a cloud has no such machine."""
    same_gpu = [price for price in prices() if price.gpu.lower() == gpu.lower()]
    there = [(place, price) for place in infra for price in same_gpu if _is_at(place, price)]
    found = [(place, price) for place, price in there if price.count == count]
    if not found:
        clouds = dict.fromkeys(place.partition("/")[0] for place in infra)
        return Market(without_prices=tuple(clouds), snapshot_has={it: _counts(it, there) for it in infra})
    offers = [_offer(place, price) for place, price in found]
    return Market(
        offers=tuple(sorted(offers, key=lambda offer: (offer.price_per_hour, offer.infra))),
        snapshot_of=min(price.read for _, price in found),
    )


def _counts(place: str, there: list[tuple[str, Price]]) -> list[str]:
    """The GPU in each count that the snapshot has at a place, the largest first."""
    counts = sorted({(price.count, price.gpu) for at, price in there if at == place}, reverse=True)
    return [f"{gpu}:{count}" for count, gpu in counts]


def _price(row: dict[str, str]) -> Price:
    return Price(
        cloud=row["cloud"],
        region=row["region"],
        instance_type=row["instance_type"],
        gpu=row["gpu"],
        count=int(row["count"]),
        price_per_hour=float(row["price_per_hour"]),
        read=row["read"],
        source=row["source"],
    )


def _is_at(place: str, price: Price) -> bool:
    cloud, _, rest = place.partition("/")
    region = rest.partition("/")[0].lower()
    return price.cloud == cloud and region in ("", price.region or region)


def _offer(place: str, price: Price) -> Offer:
    cloud, _, rest = place.partition("/")
    infra = "/".join(part for part in (cloud, rest or price.region) if part)
    return Offer(place, infra, price.instance_type, price.gpu, price.count, price.price_per_hour)
