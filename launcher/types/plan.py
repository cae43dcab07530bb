"""The plan of a run: its resources and its maximum cost, before anything starts. Pure: no files, no network.

Neighbours: `offers.py` has the machines for rent, `pricing.py` brings their prices, `price_agreement.py` asks
for consent to the plan, `run.py` keeps to it, `setting_sources.py` has the requested settings. A run on this
computer costs nothing, whatever its budget.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

from launcher.base.errors import UsageError
from launcher.base.units import format_duration, format_money
from launcher.types.adapter import InitialAdapter
from launcher.types.machine import TIMER_SECONDS
from launcher.types.offers import Market, Offer, affordable, available, gpus_of, places
from launcher.types.settings import Settings
from runtime.fitness import Needs
from runtime.shared.memory.planning import MemoryPlan

THIS_COMPUTER = "this computer"
# The deadline of a rented run that has neither a deadline nor a budget.
DEFAULT_RENTED_SECONDS = 4 * 3600.0
# Settings of the runtime that the plan of the GPUs' memory decides, unless another source has set them.
MEMORY_SETTINGS = (
    "train.activation_checkpointing",
    "train.pack_tokens",
    "engine.max_model_len",
    "engine.max_num_seqs",
    "engine.memory_fraction",
    "engine.kv_cache_gib",
)
# Settings of rented runs only; on the command line they imply one.
_RENTED_ONLY = ("infra", "budget", "max_price", "disk", "copy_rate")
# Settings of runs with named GPUs, rented or not.
_GPU_ONLY = ("train_gpus", "infer_gpus")
# The image, the driver and the runtime's environment; checkpoints, samples and logs.
_SYSTEM_GB = 60
_NO_PRICE = "no price: a cluster of your own"
_MIN_DISK_GB = 100
_DISK_STEP_GB = 50


@dataclass(frozen=True)
class GpuSplit:
    """GPUs and their split between training and inference, rented or this computer's own. With one GPU, both
    share it. `model_bytes`: the weights, None if their size is unknown. `dtype`: the type they are computed
    in. `memory`: the memory plan, None if it is unknown; for the model, unless `without_memory` has another
    reason.
    """

    gpus: str
    _: KW_ONLY
    train_gpus: int
    infer_gpus: int
    model_bytes: int | None = None
    dtype: str = "bfloat16"
    memory: MemoryPlan | None = None
    without_memory: str | None = None

    @property
    def is_one_gpu(self) -> bool:
        """Whether engine and trainer are on the same GPU."""
        return self.train_gpus + self.infer_gpus > gpus_of(self.gpus)[1]

    def needs(self, variant: str) -> Needs:
        """The machine's requirements for them, with this build of the runtime."""
        return Needs(
            variant,
            self.gpus,
            self.train_gpus,
            self.infer_gpus,
            self.model_bytes or 0,
            self.dtype,
            self.memory.gpu_bytes if self.memory else 0,
        )


@dataclass(frozen=True)
class LocalGpus(GpuSplit):
    """This computer's own GPUs: `gpus` is "local:2"."""


@dataclass(frozen=True)
class RentedGpus(GpuSplit):
    """The GPUs to rent: one of these types, at the first place of `infra` that has them.

    `disk_gb` None leaves the size to SkyPilot. `max_price_per_hour`: the user agreed to no more, None if
    there is no price.
    """

    infra: tuple[str, ...]
    idle_minutes: int
    disk_gb: int | None
    max_price_per_hour: float | None = None


@dataclass(frozen=True)
class Plan:
    """Where, for how long, and for how much. Prices in US dollars; that of a rented run is the cheapest
    candidate's until it is known which one it got. `candidates`: in the order they are tried. `prices_of`:
    the day (ISO) of a snapshot that the prices are from; None if they are SkyPilot's catalogs'. `adapter`:
    the one that is trained on. `spent`: of the budget, in earlier lives of the run."""

    where: str
    model: str
    price_per_hour: float
    deadline_seconds: float | None
    lease_seconds: float
    budget: float | None
    rented: RentedGpus | None = None
    candidates: tuple[Offer, ...] = ()
    prices_of: str | None = None
    own: LocalGpus | None = None
    adapter: InitialAdapter | None = None
    spent: float = 0.0

    @property
    def gpus(self) -> GpuSplit | None:
        """The GPUs it runs on, whosever they are."""
        return self.rented or self.own

    @property
    def trained_model(self) -> str:
        """The model or adapter that is trained, in words."""
        return f"{self.model} with {self.adapter.describe()}" if self.adapter else self.model

    @property
    def max_price_per_hour(self) -> float:
        """The price of the dearest candidate: it is not known yet which one has capacity."""
        return max([self.price_per_hour, *[offer.price_per_hour for offer in self.candidates]])

    @property
    def unpriced(self) -> bool:
        """Whether it runs on the user's own cluster, whose price is not known here."""
        return self.rented is not None and self.max_price_per_hour == 0

    @property
    def max_cost(self) -> float | None:
        """The dearest candidate's price until the last rung has ended it. None when nothing bounds it.

        The last rung: this computer and the runtime are lost just before the deadline, then the lease runs
        out, then the machine's own timer. The budget is kept on the machine as well: then the timer runs.
        """
        if self.max_price_per_hour == 0:
            return 0.0
        timer_seconds = (60 * self.rented.idle_minutes if self.rented else 0) + TIMER_SECONDS
        bounds = []
        if self.budget is not None:
            bounds.append(self.budget - self.spent + self.max_price_per_hour * timer_seconds / 3600)
        if self.deadline_seconds is not None:
            seconds = self.deadline_seconds + self.lease_seconds + timer_seconds
            bounds.append(self.max_price_per_hour * seconds / 3600)
        return min(bounds) if bounds else None

    def describe(self) -> str:
        """One line: "tiny on this computer, $0.00/h, deadline 4h", "4×H100 on aws/us-east-1, $27.52/h, …"."""
        what = self.where if self.rented else f"{self.trained_model} on {self.where}"
        price = _NO_PRICE if self.unpriced else f"{format_money(self.price_per_hour)}/h"
        if self.max_price_per_hour > self.price_per_hour:
            price += f" (up to {format_money(self.max_price_per_hour)}/h elsewhere)"
        return f"{what}, {price}, {self._limits()}"

    def describe_cost(self) -> str:
        """The same with its maximum cost, for the user to agree to."""
        if self.unpriced:
            return self.describe()
        # Up to the next cent: less would not be the most.
        most = math.ceil(round((self.max_cost or 0) * 100, 6)) / 100
        return f"{self.describe()}: at most {format_money(most)}"

    def _limits(self) -> str:
        limits = []
        if self.deadline_seconds is not None:
            limits.append(f"deadline {format_duration(self.deadline_seconds)}")
        if self.rented and self.budget is not None:
            limits.append(self.describe_budget(self.budget))
        return ", ".join(limits) or "no deadline"

    def describe_budget(self, budget: float) -> str:
        """ "budget $40", "budget $40, $12.50 of it left"."""
        left = f", {format_money(budget - self.spent)} of it left" if self.spent else ""
        return f"budget {format_money(budget)}{left}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"cost_at_most": self.max_cost, "dearest_per_hour": self.max_price_per_hour}


def make_plan(settings: Settings, market: Market | None = None, model_bytes: int | None = None) -> Plan:
    """The plan for these settings; `market` if GPUs are to be rented.

    Raises UsageError, CapacityError, and NoPricesError if there are no prices at hand.
    """
    refuse_rental_options(settings)
    if settings.gpus is None:
        return _local_plan(settings, THIS_COMPUTER)
    count = gpus_of(settings.gpus)[1]
    if settings.own_gpus:
        own = split_local_gpus(settings, model_bytes)
        return _local_plan(settings, f"{count} GPU{'s' if count > 1 else ''} of {THIS_COMPUTER}", own)
    train, infer = split_gpus(count, settings.train_gpus, settings.infer_gpus)
    market = market or Market()
    candidates = affordable(settings, available(settings, market))
    deadline = settings.max_seconds
    first = candidates[0]
    dearest = max(offer.price_per_hour for offer in candidates)
    # A machine without a price spends no budget.
    if deadline is None and (settings.budget is None or dearest == 0):
        deadline = DEFAULT_RENTED_SECONDS
    return Plan(
        where=f"{count}×{first.gpu} on {first.infra}",
        model=settings.model,
        price_per_hour=first.price_per_hour,
        deadline_seconds=deadline,
        lease_seconds=settings.lease_seconds,
        budget=settings.budget,
        rented=RentedGpus(
            gpus=f"{first.gpu}:{count}",
            infra=places(candidates, market.offers),
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
        adapter=_adapter(settings),
    )


def _local_plan(settings: Settings, where: str, own: LocalGpus | None = None) -> Plan:
    """The plan of a run on this computer."""
    return Plan(
        where=where,
        model=settings.model,
        price_per_hour=0.0,
        deadline_seconds=settings.max_seconds,
        lease_seconds=settings.lease_seconds,
        budget=settings.budget,
        own=own,
        adapter=_adapter(settings),
    )


def split_unpriced_gpus(settings: Settings) -> RentedGpus:
    """How GPUs without prices would be split between training and serving. Raises UsageError."""
    assert settings.gpus is not None
    train, infer = split_gpus(gpus_of(settings.gpus)[1], settings.train_gpus, settings.infer_gpus)
    idle = round(settings.idle_seconds / 60)
    return RentedGpus(
        settings.gpus,
        settings.infra,
        idle,
        settings.disk_gb,
        train_gpus=train,
        infer_gpus=infer,
        dtype=_dtype(settings),
    )


def _adapter(settings: Settings) -> InitialAdapter | None:
    found = settings.adapter
    return InitialAdapter(str(found.folder), found.rank) if found else None


def split_local_gpus(settings: Settings, model_bytes: int | None = None) -> LocalGpus:
    """The split of this computer's own GPUs, if the settings name some. Raises UsageError."""
    assert settings.gpus is not None
    train, infer = split_gpus(gpus_of(settings.gpus)[1], settings.train_gpus, settings.infer_gpus)
    return LocalGpus(
        settings.gpus, train_gpus=train, infer_gpus=infer, model_bytes=model_bytes, dtype=_dtype(settings)
    )


def _dtype(settings: Settings) -> str:
    """The dtype of a run on GPUs, unless it is set."""
    return settings.runtime.get("dtype", "bfloat16")


def split_gpus(count: int, train: int | None = None, infer: int | None = None) -> tuple[int, int]:
    """The number of GPUs that train and of those that serve, of `count` in all; with one, both share it.
    Raises UsageError.

    By default a quarter trains, and at least one. Sampling a token reads all the weights for each of a few
    dozen sequences; a token is trained once, thousands at a time. So a GPU trains about three times as many
    tokens per second as it samples. Programs and metrics also wait for the sampling GPUs.
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
    train, infer = split_gpus(count)
    why = "a single GPU does both" if count == 1 else f"they must add up to {count}, at least 1 each"
    hint = f"say --train-gpus {train} --infer-gpus {infer}, or neither of them: that is the default"
    raise UsageError(f"{given}: not a valid split of {count} GPU{'s' if count > 1 else ''}", why, hint)


def disk_for(model_bytes: int | None) -> int | None:
    """GB of disk for a model, which is there twice while it is downloaded; None for one of unknown size."""
    if model_bytes is None:
        return None
    needed = _SYSTEM_GB + 2 * model_bytes / 10**9
    return max(_MIN_DISK_GB, math.ceil(needed / _DISK_STEP_GB) * _DISK_STEP_GB)


def refuse_rental_options(settings: Settings) -> None:
    """Where no GPUs are rented, options that ask for it. From a file they wait for one. Raises UsageError."""
    if settings.rented:
        return
    for key in _RENTED_ONLY if settings.own_gpus else (*_GPU_ONLY, *_RENTED_ONLY):
        option = "--" + key.replace("_", "-")
        if key in settings.values and settings.values[key].source == option:
            without = f"with --gpus {settings.gpus}" if settings.own_gpus else "without --gpus"
            raise UsageError(
                f"{option} needs {'rented GPUs' if settings.own_gpus else '--gpus'}",
                f"{without} the run stays on this computer",
                f"say --gpus as well, such as --gpus H100:4, or leave out {option}"
                if not settings.own_gpus
                else f"leave out {option}, or rent GPUs: --gpus H100:4",
            )
