"""`launch plan` and `launch --dry-run`: a run's resources, cost and memory fit.

Neighbours: `pricing.py` makes the plan, `price_agreement.py` and `memory_table.py` have its tables,
`commands.py` calls. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.base.errors import EXIT_OK, UsageError
from launcher.config import (
    memory_fit,
    memory_table,
    price_agreement,
    pricing,
    request_validation,
    setting_sources,
)
from launcher.console.output import Output
from launcher.types.offers import NoPricesError
from launcher.types.plan import Plan
from launcher.types.settings import Settings


def show(
    output: Output,
    flags: Mapping[str, Any],
    sets: tuple[str, ...],
    env_file: Path | None,
    *,
    refresh: bool = False,
) -> int:
    """Show the plan; with `refresh` the prices are fetched first."""
    if flags.get("resume") is not None:
        what = "--resume cannot be used with a plan"
        raise UsageError(what, "it would end the rest of that run; a plan changes nothing", "launch status")
    settings = setting_sources.load(flags, sets, env_file)
    for warning in settings.warnings:
        output.note(warning)
    if refresh:
        _refresh(output, settings)
    try:
        plan = pricing.make_priced_plan(settings, output.note, only_shown=True)
    except NoPricesError:
        _show_without_prices(output, settings)
        raise
    output.result(plan.to_dict(), _text(plan))
    # If the memory plan is known, the hub has answered if it had to be asked for the model's config.json.
    request_validation.validate_plan(settings, asks=plan.gpus is not None and plan.gpus.memory is not None)
    memory_fit.refuse_too_small(plan)
    return EXIT_OK


def _show_without_prices(output: Output, settings: Settings) -> None:
    """Show the model's memory. Anything that a run would refuse is reported before the missing prices."""
    gpus = pricing.plan_gpus_without_prices(settings, output.note)
    memory = [memory_table.text(gpus.memory)] if gpus.memory else []
    shown = [f"{settings.model} on {gpus.gpus}, prices not known", *price_agreement.gpu_usage(gpus), *memory]
    output.result({"model": settings.model, "rented": asdict(gpus)}, "\n".join(shown))
    request_validation.validate_plan(settings, asks=gpus.memory is not None)
    memory_fit.refuse_gpus(settings.model, gpus)


def _text(plan: Plan) -> str:
    gpus = plan.gpus
    if gpus is None:
        return _is_free(plan)
    memory = [memory_table.text(gpus.memory)] if gpus.memory else []
    terms = (
        [plan.describe_cost(), price_agreement.table(plan)]
        if plan.rented
        else [_is_free(plan), *price_agreement.gpu_usage(gpus)]
    )
    return "\n".join([*terms, *memory])


def _refresh(output: Output, settings: Settings) -> None:
    from launcher.backends.skypilot import prices

    if not settings.rented:
        raise UsageError(
            f"--refresh needs {'rented GPUs' if settings.own_gpus else '--gpus'}",
            "a run on this computer has no price",
            "launch plan --gpus H100:4 --refresh",
        )
    output.note("fetching SkyPilot's price catalogs")
    for file in prices.refresh(prices.places(tuple(settings.infra))):
        output.note(f"{file} is your own, so launch does not change it")


def _is_free(plan: Plan) -> str:
    return f"{plan.describe()}; nothing is rented"
