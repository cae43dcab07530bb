"""Offers for the requested GPUs: which machines there are, and which are within the price.

Neighbours: `prices.py` brings the market from SkyPilot's catalogs, `plan.py` makes a plan of the remaining
ones. Pure: no files, no network. If nothing is left, the error has the reason and a request that would
succeed.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.base.errors import CapacityError, PreflightError, UsageError
from launcher.base.suggestions import closest_match
from launcher.base.units import duration_word, format_money, money_word
from launcher.types.settings import LOCAL_GPUS, Settings
from runtime.shared import gpu_memory

# By SkyPilot's names. The machine's real GPUs are checked again before the long install (fitness.py).
_NOT_NVIDIA = ("tpu", "mi", "trainium", "inferentia", "gaudi", "radeon")
_TOO_OLD = frozenset({"K80", "M60", "P4", "P40", "P100", "T4", "V100", "V100-32GB", "RTX6000", "RTX8000"})
_ARM = frozenset({"GH200", "T4G"})
_MIN_SIMILARITY = 0.5
_Texts = dict[str, Callable[[Any], str]]
# Options that a plan's command repeats as they were typed; model, GPUs and place besides.
_SPLIT: _Texts = {"train_gpus": str, "infer_gpus": str}
_OF_RENTED: _Texts = {"disk": str, "budget": money_word, "max_price": money_word}
_OF_EVERY_RUN: _Texts = {"max": duration_word, "lease": duration_word, "idle": duration_word}


class NoPricesError(PreflightError):
    """No catalog at hand could have a price. Everything that needs no price is still shown."""


@dataclass(frozen=True)
class Offer:
    """One kind of machine at one place, by SkyPilot's price catalog; its `infra` matched the requested entry
    `asked`.

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
    """The offers of all catalogs at hand for the requested GPUs, the cheapest first.

    `types`: every GPU type there and its counts per machine; `elsewhere`: other clouds that have the type;
    `without_prices`: requested clouds without a catalog; `as_of`: the time of the oldest file. `snapshot_of`:
    the prices came with the package, and the oldest is of this day (ISO). `snapshot_has`: if the snapshot
    has no such machine, by requested place the counts that it has of this GPU, such as "H100:8".
    """

    offers: tuple[Offer, ...] = ()
    types: dict[str, list[int]] | None = None
    elsewhere: tuple[str, ...] = ()
    without_prices: tuple[str, ...] = ()
    as_of: float | None = None
    snapshot_of: str | None = None
    snapshot_has: Mapping[str, list[str]] = field(default_factory=dict)


def gpus_of(text: str) -> tuple[str, int]:
    """Type and count of "H100:4"."""
    gpu, _, count = text.rpartition(":")
    return gpu, int(count)


def available(settings: Settings, market: Market) -> tuple[Offer, ...]:
    """All offers for the request. Raises an error with the reason if there are none."""
    gpu, count = gpus_of(settings.gpus or "")
    _refuse_unfit(settings, gpu)
    if market.offers:
        return market.offers
    types = market.types or {}
    infra = ",".join(settings.infra)
    if not types and market.without_prices:
        without = ",".join(market.without_prices)
        raise NoPricesError(
            f"there are no prices for {', '.join(market.without_prices)} on this computer",
            _why_no_prices(market),
            f"{plan_command(settings, settings.gpus or '', default_infra=without)} --refresh",
        )
    known = next((name for name in types if name.lower() == gpu.lower()), None)
    if known is not None and count in types[known]:
        raise CapacityError(
            f"no cloud offers {count}×{known}{_at_places(infra)}",
            "other regions have them",
            plan_command(settings, f"{known}:{count}", infra.partition("/")[0]),
        )
    if known is not None:
        best = max([one for one in types[known] if one < count], default=min(types[known]))
        raise CapacityError(
            f"no machine has {count} {known}{_at_places(infra)}",
            f"a machine there has {', '.join(map(str, types[known]))}",
            plan_command(settings, f"{known}:{best}", infra),
        )
    if market.elsewhere:
        raise CapacityError(
            f"no cloud offers {gpu}{_at_places(infra)}",
            f"{', '.join(market.elsewhere)} may have them",
            plan_command(settings, f"{gpu}:{count}", market.elsewhere[0]),
        )
    refuse_unknown(settings, types)
    usable = sorted(name for name in types if _unfit(name) is None)
    raise CapacityError(
        f"no cloud offers {gpu}{_at_places(infra)}",
        f"there are {', '.join(usable) or 'none'}",
        plan_command(settings, f"{next(iter(usable), 'H100')}:{count}", infra),
    )


def _why_no_prices(market: Market) -> str:
    found = [f"{_listed(gpus)} on {place}" for place, gpus in market.snapshot_has.items() if gpus]
    if not found:
        return "prices come from SkyPilot's catalogs, which launch fetches only on request"
    without = ", ".join(place for place, gpus in market.snapshot_has.items() if not gpus)
    none = f", none on {without}" if without else ""
    return f"the price snapshot that comes with launch has {'; '.join(found)}{none}"


def _listed(words: list[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def refuse_unknown(settings: Settings, types: Iterable[str] = ()) -> None:
    """A name that neither these catalogs' `types` nor the table of GPUs' memory have. Raises UsageError.

    Without catalogs there may be such a GPU all the same.
    """
    gpu, count = gpus_of(settings.gpus or "")
    named = {name.upper(): name for name in (*types, *gpu_memory.TABLE_MIB, LOCAL_GPUS)}
    if gpu.upper() in named or gpu_memory.memory_bytes(gpu) is not None:
        return
    usable = {key: name for key, name in named.items() if _unfit(name) is None}
    meant = usable.get(closest_match(gpu.upper(), usable, _MIN_SIMILARITY) or "")
    infra = "" if meant == LOCAL_GPUS else ",".join(settings.infra)
    unknown = f"no GPU is called {gpu}" if types else f"launch knows no GPU called {gpu}"
    raise UsageError(
        f"--gpus {settings.gpus}: {unknown}",
        (f"did you mean {meant}?" if meant else f"there are {', '.join(sorted(usable.values()))}")
        + ("" if types else " (others may be in SkyPilot's catalogs, which are not on this computer)"),
        plan_command(settings, f"{meant or 'H100'}:{count}", infra),
    )


def plan_command(
    settings: Settings,
    gpus: str,
    infra: str | None = None,
    *,
    default_infra: str = "",
    max_price: float | None = None,
) -> str:
    """The command for the plan of the same run on other GPUs, elsewhere or at another price.

    `infra`: "" is anywhere, None as it was typed, `default_infra` where it was not. Every option that was
    typed and still applies is repeated.
    """
    model, places = settings.values.get("model"), settings.values.get("infra")
    words = ["launch", "plan"]
    if model is not None and model.source != "default":
        words += ["--model", model.value]
    words += ["--gpus", gpus]
    here = gpus.startswith(f"{LOCAL_GPUS}:")
    if infra is None:
        infra = ",".join(places.value if places is not None else ()) or default_infra
    if infra and not here:
        words += ["--infra", infra]
    texts = _OF_EVERY_RUN | ({} if here else _OF_RENTED) | (_SPLIT if gpus == settings.gpus else {})
    words += _typed_options(settings, texts, {} if max_price is None else {"max_price": max_price})
    for key, value in settings.values.items():
        if value.source == f"--set {key}":
            words += ["--set", f"{key}={value.value}"]
    return shlex.join(words)


def _typed_options(settings: Settings, texts: _Texts, instead: Mapping[str, Any]) -> list[str]:
    """The options of `texts` that the user typed, as words; those of `instead` have another value."""
    words: list[str] = []
    for key, text in texts.items():
        option, value = "--" + key.replace("_", "-"), settings.values.get(key)
        if key in instead:
            words += [option, text(instead[key])]
        elif value is not None and value.source == option:
            words += [option, text(value.value)]
    return words


def affordable(settings: Settings, offers: tuple[Offer, ...]) -> tuple[Offer, ...]:
    """The offers within --max-price, cheapest first. Raises CapacityError if there are none."""
    offers = tuple(sorted(offers, key=lambda offer: (offer.price_per_hour, offer.infra)))
    cap = settings.max_price
    found = offers if cap is None else tuple(offer for offer in offers if offer.price_per_hour <= cap)
    if found:
        return found
    cheapest = offers[0]
    enough = math.ceil(cheapest.price_per_hour * 100) / 100
    raise CapacityError(
        f"--max-price {format_money(cap or 0)}: no offer is that cheap",
        f"{cheapest.count}×{cheapest.gpu} cost {format_money(cheapest.price_per_hour)}/h or more, "
        f"on {cheapest.infra}",
        f"{plan_command(settings, settings.gpus or '', max_price=enough)}  # or other GPUs",
    )


def places(candidates: tuple[Offer, ...], offers: tuple[Offer, ...]) -> tuple[str, ...]:
    """The places where SkyPilot may look, cheapest first, each as it was requested.

    A place's regions stand one by one if some of them are too dear.
    """
    too_dear = {offer.asked for offer in offers if offer not in candidates}
    places = [offer.infra if offer.asked in too_dear else offer.asked for offer in candidates]
    return tuple(dict.fromkeys(places))


def _refuse_unfit(settings: Settings, gpu: str) -> None:
    """A GPU that the runtime's build cannot use. Raises UsageError, before anything is rented."""
    if (why := _unfit(gpu)) is not None:
        other = f"{plan_command(settings, 'L4:1')}  # or A100:1, H100:1"
        raise UsageError(f"--gpus {gpu}: this GPU cannot be used", why, other)


def _unfit(gpu: str) -> str | None:
    """Why the runtime's build cannot use a GPU; None if it may. Such a one is never suggested."""
    if gpu.lower().startswith(_NOT_NVIDIA):
        return "the runtime is built for NVIDIA's CUDA"
    if gpu.upper() in _TOO_OLD:
        return "it has no bfloat16; Ampere, Ada, Hopper and newer GPUs do"
    if gpu.upper() in _ARM:
        return "its machines have ARM processors; the runtime needs x86-64"
    return None


def _at_places(infra: str) -> str:
    return f" on {infra}" if infra else ""
