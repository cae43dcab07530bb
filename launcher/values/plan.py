"""What a run will use and the most it can cost, before anything starts. Pure: no files, no network.

Neighbours: `quote.py` brings the prices and has the plan confirmed, `run.py` keeps to it,
`setting_sources.py` gives the wishes. A run on this computer costs nothing, whatever its budget.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from launcher.base.errors import CapacityError, PreflightError, UsageError, suggestion
from launcher.base.units import format_duration, format_money
from launcher.values.settings import Settings

HERE = "this computer"
# What bounds a rented run for which nobody gave a deadline or a budget.
RENTED_SECONDS = 4 * 3600.0
# A machine's own timer looks once a minute, and the provider takes a while to end it.
TIMER_SECONDS = 90.0
# What only a rented run has; on the command line they ask for one.
_RENTED_ONLY = ("infra", "train_gpus", "infer_gpus", "budget", "max_price", "idle", "disk", "copy_rate")
# The image, the driver and the runtime's environment; checkpoints, samples and logs.
_SYSTEM_GB = 60
_NO_PRICE = "no price: a cluster of your own"
_LEAST_DISK_GB = 100
_DISK_STEP_GB = 50


@dataclass(frozen=True)
class Offer:
    """One kind of machine at one place, by SkyPilot's price catalog; its `infra` came of the entry `asked`.

    `instance_type` is None on a cluster of one's own, which has no price either.
    """

    asked: str
    infra: str
    instance_type: str | None
    gpu: str
    count: int
    price_per_hour: float


@dataclass(frozen=True)
class Market:
    """All the catalogs at hand say of the GPUs asked for, the cheapest offer first.

    `types`: every type there and how many of it one machine has; `elsewhere`: other clouds that have
    the type; `without_prices`: clouds asked for without a catalog; `as_of`: its oldest file's time.
    `snapshot_of`: the prices are those that came with the package, the oldest of them of this day (ISO).
    """

    offers: tuple[Offer, ...] = ()
    types: dict[str, list[int]] | None = None
    elsewhere: tuple[str, ...] = ()
    without_prices: tuple[str, ...] = ()
    as_of: float | None = None
    snapshot_of: str | None = None


# By SkyPilot's names. What a machine really has is looked at again before the long install (fitness.py).
_NOT_NVIDIA = ("tpu", "mi", "trainium", "inferentia", "gaudi", "radeon")
_TOO_OLD = frozenset({"K80", "M60", "P4", "P40", "P100", "T4", "V100", "V100-32GB", "RTX6000", "RTX8000"})
_ARM = frozenset({"GH200", "T4G"})


@dataclass(frozen=True)
class Rented:
    """What is rented, for the machine: one of these GPUs, at the first place of `infra` that has them.

    `disk_gb` None leaves the size to SkyPilot. Nothing dearer than `max_price_per_hour` was agreed to, None
    where nothing has a price. With one GPU, training and inference share it. `model_bytes`: the weights, None
    where their size is not known; `dtype`: what they are computed in.
    """

    gpus: str
    infra: tuple[str, ...]
    idle_minutes: int
    disk_gb: int | None
    train_gpus: int
    infer_gpus: int
    max_price_per_hour: float | None = None
    model_bytes: int | None = None
    dtype: str = "bfloat16"

    @property
    def shared(self) -> bool:
        """Whether engine and trainer are on the same GPU."""
        return self.train_gpus + self.infer_gpus > gpus_of(self.gpus)[1]


@dataclass(frozen=True)
class Plan:
    """Where, for how long, and for how much. Prices in US dollars; that of a rented run is the cheapest
    candidate's until it is known which one it got. `candidates`: in the order they are tried. `prices_of`:
    the day (ISO) of a snapshot that the prices are from; None where they are SkyPilot's catalogs'."""

    where: str
    model: str
    price_per_hour: float
    deadline_seconds: float | None
    lease_seconds: float
    budget: float | None
    rented: Rented | None = None
    candidates: tuple[Offer, ...] = ()
    prices_of: str | None = None

    @property
    def dearest_per_hour(self) -> float:
        """The price of the dearest candidate: nobody knows yet which one has room."""
        return max([self.price_per_hour, *[offer.price_per_hour for offer in self.candidates]])

    @property
    def unpriced(self) -> bool:
        """It is on a cluster of one's own, which has no price here."""
        return self.rented is not None and self.dearest_per_hour == 0

    @property
    def cost_at_most(self) -> float | None:
        """The dearest candidate's price until the last rung has ended it. None when nothing bounds it.

        The last rung: this computer and the runtime are lost just before the deadline, then the lease runs
        out, then the machine's own timer. The budget is kept on the machine as well: then the timer runs.
        """
        if self.dearest_per_hour == 0:
            return 0.0
        timer_seconds = (60 * self.rented.idle_minutes if self.rented else 0) + TIMER_SECONDS
        bounds = []
        if self.budget is not None:
            bounds.append(self.budget + self.dearest_per_hour * timer_seconds / 3600)
        if self.deadline_seconds is not None:
            seconds = self.deadline_seconds + self.lease_seconds + timer_seconds
            bounds.append(self.dearest_per_hour * seconds / 3600)
        return min(bounds) if bounds else None

    def cost_after(self, seconds: float) -> float:
        """What `seconds` of this run cost."""
        return self.price_per_hour * seconds / 3600

    def describe(self) -> str:
        """One line: "tiny on this computer, $0.00/h, deadline 4h", "4×H100 on aws/us-east-1, $27.52/h, …"."""
        what = self.where if self.rented else f"{self.model} on {self.where}"
        price = _NO_PRICE if self.unpriced else f"{format_money(self.price_per_hour)}/h"
        if self.dearest_per_hour > self.price_per_hour:
            price += f" (up to {format_money(self.dearest_per_hour)}/h elsewhere)"
        return f"{what}, {price}, {self._limits()}"

    def describe_cost(self) -> str:
        """The same with the most it can cost: what is agreed to."""
        if self.unpriced:
            return self.describe()
        # Up to the next cent: less would not be the most.
        most = math.ceil(round((self.cost_at_most or 0) * 100, 6)) / 100
        return f"{self.describe()}: at most {format_money(most)}"

    def _limits(self) -> str:
        limits = []
        if self.deadline_seconds is not None:
            limits.append(f"deadline {format_duration(self.deadline_seconds)}")
        if self.rented and self.budget is not None:
            limits.append(f"budget {format_money(self.budget)}")
        return ", ".join(limits) or "no deadline"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"cost_at_most": self.cost_at_most, "dearest_per_hour": self.dearest_per_hour}


def make_plan(settings: Settings, market: Market | None = None, model_bytes: int | None = None) -> Plan:
    """The plan for these settings; `market` where GPUs are to be rented.

    Raises UsageError, CapacityError, and PreflightError where there are no prices at hand.
    """
    if settings.gpus is None:
        _refuse_what_is_rented_only(settings)
        return Plan(
            where=HERE,
            model=settings.model,
            price_per_hour=0.0,
            deadline_seconds=settings.max_seconds,
            lease_seconds=settings.lease_seconds,
            budget=settings.budget,
        )
    count = gpus_of(settings.gpus)[1]
    train, infer = split(count, settings.train_gpus, settings.infer_gpus)
    market = market or Market()
    candidates = _affordable(settings, _offers(settings, market))
    deadline = settings.max_seconds
    first = candidates[0]
    dearest = max(offer.price_per_hour for offer in candidates)
    # What has no price spends no budget.
    if deadline is None and (settings.budget is None or dearest == 0):
        deadline = RENTED_SECONDS
    return Plan(
        where=f"{count}×{first.gpu} on {first.infra}",
        model=settings.model,
        price_per_hour=first.price_per_hour,
        deadline_seconds=deadline,
        lease_seconds=settings.lease_seconds,
        budget=settings.budget,
        rented=Rented(
            gpus=f"{first.gpu}:{count}",
            infra=_places(candidates, market.offers),
            idle_minutes=round(settings.idle_seconds / 60),
            disk_gb=settings.disk_gb or disk_for(model_bytes),
            train_gpus=train,
            infer_gpus=infer,
            max_price_per_hour=dearest or None,
            model_bytes=model_bytes,
            dtype=_dtype(settings),
        ),
        candidates=candidates,
        prices_of=market.snapshot_of,
    )


def _dtype(settings: Settings) -> str:
    """What a rented run computes in, unless it was told otherwise."""
    return settings.runtime.get("dtype", "bfloat16")


def gpus_of(text: str) -> tuple[str, int]:
    """Type and count of "H100:4"."""
    gpu, _, count = text.rpartition(":")
    return gpu, int(count)


def split(count: int, train: int | None = None, infer: int | None = None) -> tuple[int, int]:
    """How many of `count` GPUs train and how many serve; with one, both share it. Raises UsageError.

    By default a quarter trains, and at least one. A token is sampled by reading all the weights for each of a
    few dozen sequences, and is trained once, thousands at a time: about three times as many tokens per second
    and GPU. What samples is also what waits for programs and metrics.
    """
    if count == 1:
        found = (train or 1, infer or 1)
        fits = found == (1, 1)
    else:
        wanted = train or (max(1, count // 4) if infer is None else count - infer)
        found = (wanted, infer or count - wanted)
        fits = min(found) >= 1 and sum(found) == count
    if fits:
        return found
    given = " and ".join(
        f"--{name}-gpus {value}" for name, value in (("train", train), ("infer", infer)) if value
    )
    train, infer = split(count)
    why = "one GPU is shared by both" if count == 1 else f"together they are to be {count}, each at least 1"
    hint = f"launch --train-gpus {train} --infer-gpus {infer} …   (the default)"
    raise UsageError(f"{given}: not a way to use {count} GPU{'s' if count > 1 else ''}", why, hint)


def disk_for(model_bytes: int | None) -> int | None:
    """GB of disk for a model, which is there twice while it is downloaded; None for one of unknown size."""
    if model_bytes is None:
        return None
    needed = _SYSTEM_GB + 2 * model_bytes / 10**9
    return max(_LEAST_DISK_GB, math.ceil(needed / _DISK_STEP_GB) * _DISK_STEP_GB)


def _refuse_what_is_rented_only(settings: Settings) -> None:
    """From a file they wait for a run that is rented; on the command line they ask for one."""
    for key in _RENTED_ONLY:
        option = "--" + key.replace("_", "-")
        if key in settings.values and settings.values[key].source == option:
            raise UsageError(
                f"{option} goes with --gpus",
                "without --gpus the run is on this computer",
                f"launch --gpus H100:4 {option} …",
            )


def _refuse_unfit(gpu: str) -> None:
    """A GPU that the runtime's build cannot use. Raises UsageError, before anything is rented."""
    if gpu.lower().startswith(_NOT_NVIDIA):
        why = "the runtime is built for NVIDIA's CUDA"
    elif gpu.upper() in _TOO_OLD:
        why = "it computes no bfloat16: Ampere, Ada, Hopper and newer do"
    elif gpu.upper() in _ARM:
        why = "its machines have ARM processors, the runtime is built for x86-64"
    else:
        return
    raise UsageError(
        f"--gpus {gpu}: this GPU cannot be used", why, "launch plan --gpus L4:1   (or H100, A100, …)"
    )


def _offers(settings: Settings, market: Market) -> tuple[Offer, ...]:
    """All there is of what was asked for. Raises where there is nothing, with why."""
    gpu, count = gpus_of(settings.gpus or "")
    _refuse_unfit(gpu)
    if market.offers:
        return market.offers
    types = market.types or {}
    infra = ",".join(settings.infra)
    if not types and market.without_prices:
        raise PreflightError(
            f"there are no prices for {', '.join(market.without_prices)} on this computer",
            "prices are those of SkyPilot's catalogs, which are fetched when that is asked for",
            f"launch plan --gpus {gpu}:{count} --infra {','.join(market.without_prices)} --refresh",
        )
    known = next((name for name in types if name.lower() == gpu.lower()), None)
    there = f" --infra {infra}" if infra else ""
    if known is not None and count in types[known]:
        raise CapacityError(
            f"nobody rents out {count}×{known}{_on(infra)}",
            "the catalog has them in other regions",
            f"launch plan --gpus {known}:{count} --infra {infra.partition('/')[0]}",
        )
    if known is not None:
        best = max([one for one in types[known] if one < count], default=min(types[known]))
        raise CapacityError(
            f"no machine has {count} {known}{_on(infra)}",
            f"there, one machine has {', '.join(map(str, types[known]))}",
            f"launch plan --gpus {known}:{best}{there}",
        )
    if market.elsewhere:
        raise CapacityError(
            f"nobody rents out {gpu}{_on(infra)}",
            f"{', '.join(market.elsewhere)} may have them",
            f"launch plan --gpus {gpu}:{count} --infra {market.elsewhere[0]}",
        )
    meant = suggestion(gpu.upper(), types, 0.5)
    raise UsageError(
        f"--gpus {settings.gpus}: no GPU is called {gpu}",
        f"did you mean {meant}?" if meant else f"there are {', '.join(sorted(types)) or 'none'}",
        f"launch plan --gpus {meant or next(iter(sorted(types)), 'H100')}:{count}{there}",
    )


def _on(infra: str) -> str:
    return f" on {infra}" if infra else ""


def _affordable(settings: Settings, offers: tuple[Offer, ...]) -> tuple[Offer, ...]:
    """Those within --max-price, cheapest first. Raises CapacityError when none is."""
    offers = tuple(sorted(offers, key=lambda offer: (offer.price_per_hour, offer.infra)))
    cap = settings.max_price
    found = offers if cap is None else tuple(offer for offer in offers if offer.price_per_hour <= cap)
    if found:
        return found
    cheapest = offers[0]
    enough = math.ceil(cheapest.price_per_hour * 100) / 100
    raise CapacityError(
        f"--max-price {format_money(cap or 0)}: nothing is that cheap",
        f"{cheapest.count}×{cheapest.gpu} cost {format_money(cheapest.price_per_hour)}/h or more, "
        f"on {cheapest.infra}",
        f"launch plan --gpus {settings.gpus} --max-price {enough:.2f}   (or other GPUs)",
    )


def _places(candidates: tuple[Offer, ...], offers: tuple[Offer, ...]) -> tuple[str, ...]:
    """Where SkyPilot may look, in the order of price: what was asked for, as it was.

    Its regions one by one where some of them are too dear.
    """
    too_dear = {offer.asked for offer in offers if offer not in candidates}
    places = [offer.infra if offer.asked in too_dear else offer.asked for offer in candidates]
    return tuple(dict.fromkeys(places))
