"""Makes the machine that a plan asks for: processes on this computer, or a rented cluster.

Neighbours: `run.py` asks for it with the fresh record, `plan.py` decides which; `machine_from_record.py`
finds one again. Knows nothing of a machine's work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from launcher.base import credentials, embedded_models
from launcher.base.home import Home
from launcher.records.lease import Limits
from launcher.records.records import RecordStore, RunRecord
from launcher.types.machine import Machine, Progress, no_progress
from launcher.types.plan import Plan
from runtime.fitness import Needs

# For tests only: which build of the runtime a rented machine gets. A machine without GPUs is never taken for
# one that was meant: where "cuda" is wanted and no driver answers, setting up fails.
VARIANT_VARIABLE = "SLIPWAY_CLOUD_VARIANT"


def machine_for(
    plan: Plan,
    record: RunRecord,
    store: RecordStore,
    home: Home,
    secrets: Mapping[str, str] | None = None,
    warn: Progress = no_progress,
    copy_rate: float | None = None,
) -> Machine:
    """A new machine. `secrets` are for its runtime alone, not for the program."""
    if plan.rented is None:
        needs = None if plan.own is None else plan.own.needs("cuda")
        return local_machine(record, store, home, secrets, needs)
    from launcher.backends.cloud_machine import CloudMachine
    from launcher.teardown import rented_leftovers

    rented_leftovers.remember_clouds(home, plan.rented.infra)
    variant = os.environ.get(VARIANT_VARIABLE, "cuda")
    return CloudMachine(
        record.id,
        store.folder(record.id),
        infra=list(plan.rented.infra),
        gpus=plan.rented.gpus,
        idle_minutes=plan.rented.idle_minutes,
        disk_gb=plan.rented.disk_gb,
        max_price_per_hour=plan.rented.max_price_per_hour,
        variant=variant,
        needs=plan.rented.needs(variant),
        model=_own_folder(plan.model),
        keep=lambda description: store.update(record.id, machine=description),
        secrets=secrets,
        variables=credentials.rented_environ(os.environ),
        alias=record.name,
        copy_rate=copy_rate,
        limits=_limits(plan, record),
        warn=warn,
    )


def _limits(plan: Plan, record: RunRecord) -> Limits:
    boot = record.place.boot if record.place else None
    until = (plan.deadline_seconds, plan.budget)
    return Limits(record.life.begun, *until, spent=plan.spent, begun_boot=record.begun_boot, boot=boot)


def _own_folder(model: str) -> Path | None:
    """The user's own model, which the machine cannot get by itself."""
    folder = Path(model).expanduser().absolute()
    return folder if not embedded_models.is_embedded(model) and folder.is_dir() else None


def machine_of(record: RunRecord, store: RecordStore, home: Home) -> Machine:
    """The machine of an earlier life of a run: a resume goes on from its files."""
    if record.machine.get("kind") == "cloud":
        from launcher.backends.cloud_machine import CloudMachine

        return CloudMachine.from_description(record.machine)
    return local_machine(record, store, home)


def local_machine(
    record: RunRecord,
    store: RecordStore,
    home: Home,
    secrets: Mapping[str, str] | None = None,
    needs: Needs | None = None,
) -> Machine:
    """The machine of a run on this computer, on its own GPUs if it `needs` them."""
    from launcher.backends.local_machine import LocalMachine

    return LocalMachine(
        record.id,
        store.folder(record.id) / "machine",
        home.environments,
        keep=lambda description: store.update(record.id, machine=description),
        secrets=secrets,
        needs=needs,
    )
