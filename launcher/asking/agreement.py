"""A run's plan with the prices it needs: made, shown, agreed to. No provider is asked for anything here.

Neighbours: `plan.py` makes the plan, `machines/skypilot/prices.py` has the prices; `request.py` needs a plan
for a run, `run.py` has it agreed to, `launch plan` and `--dry-run` only show it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from launcher.asking import setting_sources
from launcher.base.errors import EXIT_OK, UsageError
from launcher.base.units import format_duration, format_money
from launcher.models import model_size
from launcher.screen import consent
from launcher.screen.output import Output, columns
from launcher.values.plan import Market, Offer, Plan, gpus_of, make_plan
from launcher.values.settings import Settings

_SHOWN_CANDIDATES = 8
_OLD_DAYS = 14


def make(
    settings: Settings, say: Callable[[str], None] = lambda line: None, *, only_shown: bool = False
) -> Plan:
    """The plan for these settings, with the prices at hand where GPUs are to be rented.

    `say` gets what is going on, and what should be known of the prices. A plan that is `only_shown` may do
    with those that came with the package. Raises UsageError, CapacityError, PreflightError.
    """
    gpus = settings.gpus
    if gpus is None:
        return make_plan(settings)
    settings, market = _look(settings, gpus, say, only_shown)
    token = settings.secrets.get("HF_TOKEN")
    size = model_size.of(settings.model, os.environ, token.value if token else None)
    plan = make_plan(settings, market, size)
    for remark in _remarks(market):
        say(remark)
    return plan


def refuse_unasked(settings: Settings) -> None:
    """Nobody is there to agree, and nobody has with --yes: then prices are not even looked up."""
    if settings.gpus is None or settings.yes or consent.somebody_is_here():
        return
    raise _nobody(f"launch plan --gpus {settings.gpus}   (what it costs; then the same run with --yes)")


def refuse_without_account(plan: Plan, user_home: Path | None = None) -> None:
    """Prices need no account, a run does. Raises PreflightError."""
    from launcher.values.clouds import clouds_of, has_account, no_account

    for cloud in clouds_of(list(plan.rented.infra)) if plan.rented else []:
        if not has_account(cloud, user_home or Path.home(), os.environ):
            raise no_account(cloud)


def confirm(output: Output, plan: Plan, settings: Settings) -> None:
    """Have the most it can cost agreed to, before any call of a provider. Raises UsageError without that."""
    if plan.rented is None or settings.yes:
        return
    if not consent.can_ask(output):
        raise _nobody(f"launch --gpus {settings.gpus} --yes …")
    output.note(_table(plan))
    if not consent.agreed(output, f"{plan.describe_cost()}. Proceed?"):
        raise UsageError("not agreed to", "nothing was rented", f"launch --gpus {settings.gpus} --max 1h …")


def show(
    output: Output,
    flags: Mapping[str, Any],
    sets: tuple[str, ...],
    env_file: Path | None,
    *,
    refresh: bool = False,
) -> int:
    """`launch plan` and `launch --dry-run`: the plan and nothing else; with prices that are fetched now."""
    if flags.get("resume") is not None:
        what = "--resume does not go with a plan"
        raise UsageError(what, "what is left of that run would be looked at and ended", "launch status")
    settings = setting_sources.load(flags, sets, env_file)
    for warning in settings.warnings:
        output.note(warning)
    if refresh:
        _refresh(output, settings)
    plan = make(settings, output.note, only_shown=True)
    output.result(plan.to_dict(), f"{plan.describe_cost()}\n{_table(plan)}" if plan.rented else _free(plan))
    return EXIT_OK


# ------------------------------------------------------------------ how


def _look(
    settings: Settings, gpus: str, say: Callable[[str], None], only_shown: bool
) -> tuple[Settings, Market]:
    """The prices at hand, and the settings with the places they are for."""
    from launcher.machines.skypilot import price_snapshot, prices

    asked = tuple(settings.infra)
    infra = prices.places_to_show(asked) if only_shown else prices.places(asked)
    if not infra:
        infra = asked or price_snapshot.clouds()
        return replace(settings, infra=infra), price_snapshot.market(*gpus_of(gpus), infra)
    say("reading SkyPilot's price catalogs")
    return replace(settings, infra=infra), prices.market(*gpus_of(gpus), infra)


def _refresh(output: Output, settings: Settings) -> None:
    from launcher.machines.skypilot import prices

    if settings.gpus is None:
        raise UsageError(
            "--refresh goes with --gpus",
            "a run on this computer has no price",
            "launch plan --gpus H100:4 --refresh",
        )
    output.note("fetching SkyPilot's price catalogs")
    for file in prices.refresh(prices.places(tuple(settings.infra))):
        output.note(f"{file} is your own, and stays as it is")


def _nobody(hint: str) -> UsageError:
    return UsageError("nobody is here to agree to what it costs", "renting GPUs costs money", hint)


def _free(plan: Plan) -> str:
    return f"{plan.describe()}; nothing is rented"


def _table(plan: Plan) -> str:
    """What is agreed to, in full: how the GPUs are used, what ends the run, where it may be."""
    rented = plan.rented
    assert rented is not None
    use = f"{rented.infer_gpus} for inference, {rented.train_gpus} for training"
    limits = [f"lease {format_duration(plan.lease_seconds)}", f"idle {rented.idle_minutes}m"]
    limits += [] if plan.deadline_seconds is None else [f"deadline {format_duration(plan.deadline_seconds)}"]
    limits += [] if plan.budget is None else [f"budget {format_money(plan.budget)}"]
    disk = "SkyPilot's usual size" if rented.disk_gb is None else f"{rented.disk_gb} GB"
    lines = [
        f"  model   {plan.model}",
        f"  GPUs    {'shared by inference and training' if rented.shared else use}",
        f"  limits  {' · '.join(limits)}",
        f"  disk    {disk}{'' if plan.unpriced else '; it and traffic are billed apart from the machine'}",
    ]
    if plan.prices_of is not None:
        days = (date.today() - date.fromisoformat(plan.prices_of)).days
        lines.append(
            f"  prices  a snapshot that came with launch: SkyPilot's catalog as it was looked up on "
            f"{plan.prices_of}, {days} days ago; newer ones may differ"
        )
    shown = plan.candidates[:_SHOWN_CANDIDATES]
    rows = [["  IN THIS ORDER", "MACHINE", "PRICE"]]
    for offer in shown:
        rows.append([f"  {offer.infra}", offer.instance_type or "-", _price(offer)])
    more = len(plan.candidates) - len(shown)
    rest = [f"  and {more} more, up to {format_money(plan.dearest_per_hour)}/h"] if more else []
    return "\n".join([*lines, columns(rows), *rest])


def _price(offer: Offer) -> str:
    return f"{format_money(offer.price_per_hour)}/h" if offer.price_per_hour else "-"


def _remarks(market: Market) -> list[str]:
    """What should be known of these prices: what has none, and how old they are."""
    if market.snapshot_of is not None:
        cloud = market.offers[0].infra.partition("/")[0]
        needed = "there are no price catalogs on this computer, and a run needs one"
        return [f"{needed}: launch plan … --infra {cloud} --refresh"]
    missing = [
        f"{cloud} is left out, its prices are not on this computer: launch plan … --infra {cloud} --refresh"
        for cloud in market.without_prices
    ]
    days = 0 if market.as_of is None else int((time.time() - market.as_of) / 86400)
    old = f"these prices are {days} days old: launch plan … --refresh   (fetches newer ones)"
    return [*missing, *([old] if days > _OLD_DAYS else [])]
