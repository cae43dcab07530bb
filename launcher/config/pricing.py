"""Makes a run's plan with its prices. Sends no request to a provider.

Neighbours: `plan.py` makes the plan, `prices.py` has the prices, `price_agreement.py` asks for consent to it;
`launching.py` asks for a run, `plan_verb.py` to show it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from launcher.backends import local_gpus
from launcher.base.errors import PreflightError, UsageError
from launcher.base.units import format_money
from launcher.config import credential_expiry, memory_fit
from launcher.models import model_size
from launcher.records import lives
from launcher.records.records import RunRecord
from launcher.types.clouds import SELF_HOSTED
from launcher.types.offers import Market, gpus_of, plan_command, refuse_unknown
from launcher.types.plan import Plan, RentedGpus, make_plan, split_unpriced_gpus
from launcher.types.settings import Settings
from runtime.shared import gpu_memory

_OLD_DAYS = 14
# Less of a budget than a cent, in US dollars, is nothing.
_MIN_BUDGET_LEFT = 0.01


def make_priced_plan(
    settings: Settings,
    say: Callable[[str], None] = lambda line: None,
    *,
    only_shown: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The plan for these settings: with prices at hand if GPUs are rented, and with the memory.

    `say` gets notes on the prices, and the progress as well without `progress`. A plan that is `only_shown`
    may use the prices that came with the package. Raises UsageError, CapacityError, PreflightError.
    """
    gpus = settings.gpus
    if gpus is None:
        return make_plan(settings)
    token = settings.secrets.get("HF_TOKEN")
    size = model_size.weights_bytes(settings.model, os.environ, token.value if token else None)
    if settings.own_gpus:
        return _on_own_gpus(settings, make_plan(settings, model_bytes=size), say, only_shown)
    settings, market = _look_up_prices(settings, gpus, progress or say, only_shown)
    plan = make_plan(settings, market, size)
    assert plan.rented is not None
    for line in (*_warnings(settings, market), *credential_expiry.warnings(plan)):
        say(line)
    return replace(plan, rented=_with_memory(settings, plan.rented, say))


def subtract_earlier_cost(plan: Plan, record: RunRecord) -> Plan:
    """The plan of another life of a run: the budget is the run's, and the cost of its earlier lives is spent.

    Raises UsageError if nothing of it is left.
    """
    if plan.budget is None or plan.max_price_per_hour == 0:
        return plan
    spent = lives.cost(record.lives, time.time())
    if plan.budget - spent < _MIN_BUDGET_LEFT:
        label = record.name or record.id
        raise UsageError(
            f"the budget of {label} is spent: nothing was rented",
            f"it is {format_money(plan.budget)} for all of its lives, which have cost {format_money(spent)}",
            f"launch --resume {label} --budget {math.ceil(spent + plan.budget)}",
        )
    return replace(plan, spent=spent)


def plan_gpus_without_prices(settings: Settings, say: Callable[[str], None]) -> RentedGpus:
    """The part of a plan that needs no prices: the split of the GPUs, and their memory.

    `say` gets the same notes as for a plan with prices.
    """
    for line in _unchosen_model(settings):
        say(line)
    return _with_memory(settings, split_unpriced_gpus(settings), say)


def _with_memory(settings: Settings, rented: RentedGpus, say: Callable[[str], None]) -> RentedGpus:
    kind = gpus_of(rented.gpus)[0]
    memory, remark = memory_fit.plan_memory(settings, rented, kind)
    if remark:
        say(remark)
    if memory is None and gpu_memory.memory_bytes(kind) is None:
        return replace(rented, without_memory="not known for this GPU")
    return replace(rented, memory=memory)


def refuse_without_account(plan: Plan, user_home: Path | None = None) -> None:
    """Raises PreflightError without an account: prices need none, a run does."""
    from launcher.types.clouds import clouds_of, has_account, no_account

    for cloud in clouds_of(list(plan.rented.infra)) if plan.rented else []:
        if not has_account(cloud, user_home or Path.home(), os.environ):
            raise no_account(cloud)


def _on_own_gpus(settings: Settings, plan: Plan, say: Callable[[str], None], only_shown: bool) -> Plan:
    """The plan with the memory of this computer's own GPUs. One that is `only_shown` may do without any."""
    assert plan.own is not None
    try:
        chosen = local_gpus.choose(replace(plan.own, model_bytes=None).needs("cuda"), os.environ)
        smallest = min(chosen, key=lambda gpu: gpu.memory_bytes or 0)
        memory, remark = memory_fit.plan_memory(settings, plan.own, smallest.name, smallest.memory_bytes)
        if memory is None:
            local_gpus.choose(plan.own.needs("cuda"), os.environ)  # the weights alone, then
    except PreflightError as error:
        if not only_shown:
            raise
        say(f"a run would be refused here: {error.why}")
        return replace(
            plan, own=replace(plan.own, without_memory="not known: no GPU of this computer will do")
        )
    if remark:
        say(remark)
    return replace(plan, own=replace(plan.own, memory=memory))


def _look_up_prices(
    settings: Settings, gpus: str, say: Callable[[str], None], only_shown: bool
) -> tuple[Settings, Market]:
    """The prices at hand, and the settings with the places they are for."""
    from launcher.backends.skypilot import price_snapshot, prices

    requested = tuple(settings.infra)
    if not prices.with_catalog(Path.home()) and not SELF_HOSTED & {
        place.partition("/")[0] for place in requested
    }:
        refuse_unknown(settings)
    infra = prices.places_to_show(requested) if only_shown else prices.places(requested)
    if not infra:
        infra = requested or price_snapshot.clouds()
        return replace(settings, infra=infra), price_snapshot.market(*gpus_of(gpus), infra)
    say("reading SkyPilot's price catalogs")
    return replace(settings, infra=infra), prices.market(*gpus_of(gpus), infra)


def _warnings(settings: Settings, market: Market) -> list[str]:
    """Warnings before money is spent: about the model, and about these prices."""
    return [*_unchosen_model(settings), *_about_prices(settings, market)]


def _unchosen_model(settings: Settings) -> list[str]:
    """Rented GPUs without `--model` train the built-in model: allowed, and seldom meant."""
    model = settings.values.get("model")
    if model is None or model.source != "default":
        return []
    return [
        f"no --model: the rented GPUs would train {settings.model}, "
        "the built-in model of 0.9 million parameters",
        f"Hint: --model Qwen/Qwen2.5-7B-Instruct  # or --model {settings.model}, if that is meant",
    ]


def _about_prices(settings: Settings, market: Market) -> list[str]:
    """Warnings about these prices: their age, and places without prices."""
    gpus = settings.gpus or ""
    if market.snapshot_of is not None:
        cloud = market.offers[0].infra.partition("/")[0]
        needed = "there are no price catalogs on this computer, and a run needs one"
        return [f"{needed}: {plan_command(settings, gpus, default_infra=cloud)} --refresh"]
    missing = [
        f"{cloud} is left out, for its prices are not here: "
        f"{plan_command(settings, gpus, default_infra=cloud)} --refresh"
        for cloud in market.without_prices
    ]
    days = 0 if market.as_of is None else int((time.time() - market.as_of) / 86400)
    old = f"these prices are {days} days old: {plan_command(settings, gpus)} --refresh  # fetches newer ones"
    return [*missing, *([old] if days > _OLD_DAYS else [])]
