"""Asks the user to agree to the price of a run, before any request to a provider.

Neighbours: `pricing.py` makes the plan, `consent.py` asks, `launching.py` calls; `plan_verb.py` shows the
same table. Knows nothing of the prices' source.
"""

from __future__ import annotations

from datetime import date

from launcher.base.errors import UsageError
from launcher.base.layout import columns
from launcher.base.units import format_duration, format_money
from launcher.config import memory_table
from launcher.console import consent
from launcher.console.output import Output
from launcher.types.offers import Offer, plan_command
from launcher.types.plan import GpuSplit, Plan
from launcher.types.settings import Settings

_SHOWN_CANDIDATES = 8
_NO_MODEL = "not known for this model"


def refuse_without_consent(settings: Settings) -> None:
    """Raises UsageError if no user can agree and --yes was not given; then no price is looked up."""
    if not settings.rented or settings.yes or consent.is_interactive():
        return
    raise _no_terminal_error(
        f"{plan_command(settings, settings.gpus or '')}  # what it costs; then the same run with --yes"
    )


def confirm(output: Output, plan: Plan, settings: Settings) -> None:
    """Ask the user to agree to the maximum cost, before any call of a provider. Raises UsageError without
    it."""
    if plan.rented is None or settings.yes:
        return
    if not consent.can_prompt(output):
        raise _no_terminal_error("run the same command with --yes")
    output.note(table(plan))
    if not consent.confirm(output, f"{plan.describe_cost()}. Proceed?"):
        again = "run it again with a shorter --max or a smaller --budget"
        raise UsageError("not agreed to", "nothing was rented", again)


def table(plan: Plan) -> str:
    """The full plan to agree to: the use of the GPUs, the limits of the run, its possible places."""
    rented = plan.rented
    assert rented is not None
    limits = [f"lease {format_duration(plan.lease_seconds)}", f"idle {rented.idle_minutes}m"]
    limits += [] if plan.deadline_seconds is None else [f"deadline {format_duration(plan.deadline_seconds)}"]
    limits += [] if plan.budget is None else [plan.describe_budget(plan.budget)]
    disk = "SkyPilot's usual size" if rented.disk_gb is None else f"{rented.disk_gb} GB"
    lines = [
        f"  model   {plan.trained_model}",
        *gpu_usage(rented),
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
    rest = [f"  and {more} more, up to {format_money(plan.max_price_per_hour)}/h"] if more else []
    return "\n".join([*lines, columns(rows), *rest])


def gpu_usage(gpus: GpuSplit) -> list[str]:
    """The split of the GPUs, and whether everything fits."""
    apart = f"{gpus.infer_gpus} for inference, {gpus.train_gpus} for training"
    return [
        f"  GPUs    {'shared by inference and training' if gpus.is_one_gpu else apart}",
        f"  memory  {memory_table.line(gpus.memory) if gpus.memory else gpus.without_memory or _NO_MODEL}",
    ]


def _price(offer: Offer) -> str:
    return f"{format_money(offer.price_per_hour)}/h" if offer.price_per_hour else "-"


def _no_terminal_error(hint: str) -> UsageError:
    return UsageError("there is no terminal to ask you about the price", "renting GPUs costs money", hint)
