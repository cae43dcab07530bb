"""`launch doctor`: checks whether this computer is ready for local and rented runs, and names a fix for each
problem. Changes nothing.

Neighbours: `preflight.py`, `ports.py` and `environments.py` do the checks, `teardown/leftovers.py` finds
leftovers. All checks run at once, each with a bound, so a dead network or disk costs only seconds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launcher.backends import environments
from launcher.base import credentials, disk, embedded_models
from launcher.base.cores import usable_cores
from launcher.base.errors import EXIT_OK, LaunchError, PreflightError
from launcher.base.home import Home
from launcher.base.layout import columns
from launcher.config import ports, preflight, remote_tools
from launcher.console.output import Output
from launcher.types.settings import LOCAL_GPUS

if TYPE_CHECKING:
    from launcher.backends.skypilot.orphaned_machines import OrphanReport
    from launcher.backends.skypilot.sky_process import SkyProcess

CHECK_SECONDS = 2.0
# For one run on the embedded model; larger models need more.
_MIN_MEMORY_BYTES = 4 * 10**9
_MIN_CORES = 2
_LOCAL_RUN = "a run on this computer"
# Requirements on this computer of a run on rented machines, besides SkyPilot, its tools and an account.
_NEEDED_EVERYWHERE = frozenset({"python", "folders", "settings"})

# Asked about where no setting names GPUs: the smallest that serve and train.
_GPUS_ASKED_FOR = "L4:1"
# The beginning of a cloud's check's name.
_CLOUD = "cloud "

State = Literal["ok", "warn", "fail", "info"]


@dataclass(frozen=True)
class Check:
    """One answer. `fail`: no run can work on this computer; `warn`: something will not, or not well."""

    name: str
    state: State
    detail: str
    fix: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def doctor(output: Output, env_file: Path | None, *, ask: bool = False) -> int:
    """Show every check and two verdicts. The exit code tells whether a local run can work; on a Mac, where
    none can, whether a rented one can. `ask`: each cloud with an account is asked, too."""
    home = Home.find()
    checks = run_checks(home, env_file)
    if ask:
        with output.busy("asking the clouds"):
            checks += _ask_clouds(home, env_file)
    here = all(check.state != "fail" for check in checks)
    lacking = _missing_for_rental(checks)
    rows = [[check.state.upper(), check.name, check.detail] for check in checks]
    lines = []
    for check, line in zip(checks, columns(rows).splitlines(), strict=True):
        lines.append(line)
        if check.fix and check.state in ("warn", "fail"):
            lines.append(f"      fix: {check.fix}")
    cannot = f"a run on rented machines cannot work yet: {'; '.join(lacking)}"
    lines.append(cannot if lacking else "a run on rented machines can work")
    lines.append(_local_verdict(here))
    output.result(
        {"ready": here, "ready_rented": not lacking, "checks": [check.to_dict() for check in checks]},
        "\n".join(lines),
    )
    ready = here if sys.platform == "linux" else not lacking
    return EXIT_OK if ready else PreflightError.exit_code


def _local_verdict(works: bool) -> str:
    if works:
        return f"{_LOCAL_RUN} can work"
    return (
        f"{_LOCAL_RUN} cannot work yet"
        if sys.platform == "linux"
        else f"{_LOCAL_RUN} cannot work: it needs Linux"
    )


def _missing_for_rental(checks: list[Check]) -> list[str]:
    """The things that a rented run lacks, as far as this computer knows, one word each."""
    lacking = [check.name for check in checks if check.state == "fail" and check.name in _NEEDED_EVERYWHERE]
    if _installed_skypilot() is None:
        lacking.append("SkyPilot is not installed")
    lacking += [f"{tool} is not installed" for tool in remote_tools.missing_tools()]
    if not _with_credentials():
        lacking.append("no account with any cloud")
    asked = [check for check in checks if check.name.startswith(_CLOUD)]
    if asked and all(check.state == "warn" for check in asked):
        lacking.append("no cloud lets you in")
    return lacking


def run_checks(home: Home, env_file: Path | None, bound_seconds: float = CHECK_SECONDS) -> list[Check]:
    """Every check's result, in order."""
    questions: list[tuple[str, Callable[[], Check]]] = [
        ("python", _python),
        ("platform", _platform),
        ("compiler", _compiler),
        ("uv", _uv),
        ("memory", _memory),
        ("folders", lambda: _folders(home)),
        ("disk", lambda: _disk(home)),
        ("port", lambda: _port(home)),
        ("gpus", _gpus),
        ("environment", lambda: _environment(home)),
        ("network", lambda: _network(home, bound_seconds)),
        ("model", _model),
        ("settings", lambda: _settings(home, env_file)),
        ("accounts", lambda: _accounts(env_file)),
        ("left over", lambda: _leftovers(home)),
        ("skypilot", _skypilot),
        ("clouds", _clouds),
    ]
    answers: dict[str, Check] = {}
    threads = [
        threading.Thread(target=_run_check, args=(name, question, answers), name=name, daemon=True)
        for name, question in questions
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + bound_seconds + 0.5  # a question that bounds itself may still answer
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = f"no answer in {bound_seconds:g} s"
    return [answers.get(name) or Check(name, "warn", late) for name, _ in questions]


def _run_check(name: str, question: Callable[[], Check], answers: dict[str, Check]) -> None:
    try:
        answers[name] = question()
    except LaunchError as error:
        why = f"{error.message}: {error.why}" if error.why else error.message
        answers[name] = Check(name, "fail", why, error.hint)
    except Exception as error:  # noqa: BLE001 - a question that breaks is an answer, too
        answers[name] = Check(name, "warn", f"could not be looked at: {error!r}")


# ------------------------------------------------------------------ the computer


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", "ok", f"{version}, {sys.executable}")


def _platform() -> Check:
    preflight.check_platform()
    import platform

    where = " in a container" if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() else ""
    who = ", as root" if os.getuid() == 0 else ""
    return Check("platform", "ok", f"{platform.system()} {platform.machine()}{where}{who}")


def _compiler() -> Check:
    """torch compiles a few kernels if it finds a compiler; without one it uses its own."""
    found = next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)
    if found:
        return Check("compiler", "ok", found)
    return Check("compiler", "warn", "none: runs without compiled kernels", "apt-get install g++")


def _uv() -> Check:
    from runtime import bootstrap

    try:
        return Check("uv", "ok", bootstrap.find_uv())
    except bootstrap.BootstrapError as error:
        return Check("uv", "fail", str(error), "pip install uv")


def _memory() -> Check:
    import psutil

    cores = usable_cores()
    memory = psutil.virtual_memory()
    detail = f"{cores} cores, {disk.format_bytes(memory.available)} of {disk.format_bytes(memory.total)} free"
    if memory.available < _MIN_MEMORY_BYTES:
        least = disk.format_bytes(_MIN_MEMORY_BYTES)
        return Check("memory", "warn", f"{detail}; a run needs about {least}", "close other programs")
    if cores < _MIN_CORES:
        return Check("memory", "warn", f"{detail}; engine and trainer share one core", "expect a slow run")
    return Check("memory", "ok", detail)


def _gpus() -> Check:
    """Only `--gpus local` needs them; its plan tells whether a model fits on them."""
    from launcher.backends import local_gpus
    from runtime.fitness import Needs
    from runtime.nvidia_smi import UnfitMachineError

    try:
        found = local_gpus.usable(Needs("cuda", f"{LOCAL_GPUS}:1"), os.environ)
    except UnfitMachineError as unfit:
        return Check("gpus", "info", f"{unfit}; needed only for --gpus {LOCAL_GPUS}")
    names = ", ".join(f"{count}×{name}" for name, count in Counter(gpu.name for gpu in found).items())
    return Check("gpus", "ok", f"{names} will do: launch --gpus {LOCAL_GPUS}:{len(found)}")


def _folders(home: Home) -> Check:
    preflight.check_folders(home)
    return Check("folders", "ok", f"{home.data} and {tempfile.gettempdir()} can be written")


def _disk(home: Home) -> Check:
    from runtime import bootstrap

    free = disk.free_bytes(home.environments)
    detail = f"{disk.format_bytes(free)} are free at {home.environments}"
    needed = bootstrap.NEEDED_BYTES["cpu"]
    if free < needed and not bootstrap.is_ready(home.environments):
        fix = "free some space, or set LAUNCH_HOME to a folder on a larger disk"
        return Check("disk", "fail", f"{detail}; the environment needs {disk.format_bytes(needed)}", fix)
    if free < 10**9:
        return Check("disk", "warn", detail, "free some space: a run writes checkpoints")
    return Check("disk", "ok", detail)


def _port(home: Home) -> Check:
    from launcher.records.endpoint import DEFAULT_PORT

    trouble = ports.why_port_unusable(DEFAULT_PORT)
    if trouble is None:
        return Check("port", "ok", f"{DEFAULT_PORT} is free")
    holder = ports.port_owner(DEFAULT_PORT, home) or trouble
    return Check("port", "info", f"{DEFAULT_PORT}: {holder}; a run takes the next free one")


# ------------------------------------------------------------------ the runtime


def _environment(home: Home) -> Check:
    from runtime import bootstrap

    environment = bootstrap.Environment(home.environments.absolute(), "cpu")
    if not environment.is_complete():
        detail = "not built yet; the first run builds it, which takes minutes and needs the network"
        return Check("environment", "info", detail)
    missing = environments.missing_packages(home.environments)
    if missing:
        few = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        detail = f"{len(missing)} packages are missing: {few}"
        return Check("environment", "fail", detail, f"rm -r {environment.folder}  # the next run builds it")
    return Check("environment", "ok", f"complete, in {environment.folder}")


def _network(home: Home, bound_seconds: float) -> Check:
    """Needed only while the environment is not built."""
    from runtime import bootstrap

    ready = bootstrap.is_ready(home.environments)
    trouble = environments.why_unreachable(bound_seconds=bound_seconds)
    if trouble is None:
        return Check("network", "ok", "the package index answers, or uv's cache has all packages")
    if ready:
        return Check("network", "info", f"{trouble}; the environment is built, so a run works offline")
    if trouble.startswith(environments.NO_ANSWER):
        return Check("network", "warn", f"{trouble}: it is slow or unreachable", "launch doctor  # again")
    return Check("network", "fail", trouble, "connect to the network for the first run")


def _model() -> Check:
    folders = [preflight.find_model(name) for name in embedded_models.NAMES]
    return Check("model", "ok", f"built in and complete: {', '.join(folders)}")


# ------------------------------------------------------------------ the user's own


def _settings(home: Home, env_file: Path | None) -> Check:
    """launch.toml, the user's configuration, LAUNCH_* and .env can be read and name known keys."""
    from launcher.config import setting_sources

    settings = setting_sources.load({}, (), env_file, home=home)
    if settings.warnings:
        text, _, fix = settings.warnings[0].partition(": ")
        return Check("settings", "warn", text, fix)
    sources = sorted({value.source.partition(":")[0] for value in settings.values.values()} - {"default"})
    return Check("settings", "ok", f"from {', '.join(sources)}" if sources else "all defaults")


def _accounts(env_file: Path | None) -> Check:
    """Which are known; a run asks for them only with `--wandb online` or a gated model."""
    read = credentials.read_dotenv(env_file, Path.cwd()).variables
    known = {name for name in ("HF_TOKEN", "WANDB_API_KEY") if os.environ.get(name) or read.get(name)}
    hub = "Hugging Face: HF_TOKEN" if "HF_TOKEN" in known else "Hugging Face: none (gated models need one)"
    wandb = preflight.has_wandb_account(dict.fromkeys(known, True), os.environ)
    board = "Weights & Biases: known" if wandb else "Weights & Biases: none (--wandb online needs one)"
    return Check("accounts", "info", f"{hub}; {board}")


def _leftovers(home: Home) -> Check:
    from launcher.teardown import leftovers

    notes: list[str] = []
    finds = leftovers.find_leftovers(home, None, False, leftovers.IDLE_SECONDS, note=notes.append)
    if not finds:
        return Check("left over", "ok", "; ".join(["earlier runs left nothing behind", *notes]))
    few = "; ".join(find.what for find in finds[:2]) + ("; …" if len(finds) > 2 else "")
    return Check("left over", "warn", f"{len(finds)}: {few}", "launch gc")


def _skypilot() -> Check:
    """Only rented machines need it: nothing here keeps a run on this computer from working."""
    found = _installed_skypilot()
    if found is None:
        fix = "pip install 'slipway-rl[cloud]'"
        return Check("skypilot", "info", "not installed; needed only for rented machines", fix)
    installed = f"{found} is installed"
    if missing := remote_tools.missing_tools():
        fix = remote_tools.install_command(missing)
        return Check("skypilot", "warn", f"{installed}, {' and '.join(missing)} not", fix)
    return Check("skypilot", "info", f"{installed}; ssh and rsync are here")


def _installed_skypilot() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("skypilot")
    except PackageNotFoundError:
        return None


def _with_credentials() -> list[str]:
    from launcher.types import clouds

    home = Path.home()
    return [cloud for cloud in sorted(clouds.KNOWN_CLOUDS) if clouds.has_account(cloud, home, os.environ)]


def _clouds() -> Check:
    """The clouds with credentials, by their paths, and those with prices here; no cloud is asked."""
    from launcher.backends.skypilot import prices
    from launcher.types import clouds

    known = _with_credentials()
    if not known:
        return Check("clouds", "info", "no cloud account; needed only for rented machines (sky check)")
    priced = prices.with_catalog(Path.home())
    without = [cloud for cloud in known if cloud not in priced and cloud not in clouds.SELF_HOSTED]
    price_note = (
        f"; prices of {', '.join(without)} are not on this computer" if without else "; prices are here"
    )
    return Check("clouds", "info", f"credentials for {', '.join(known)}{price_note}")


def _ask_clouds(home: Home, env_file: Path | None) -> list[Check]:
    """Whether each cloud takes the credentials here, before a price is agreed to: it is asked for a list, and
    AWS whether it would rent the GPUs of the settings."""
    from launcher.backends.skypilot import orphaned_machines, rental_check
    from launcher.config import setting_sources
    from launcher.types.clouds import clouds_of

    if _installed_skypilot() is None:
        return []
    gpus, infra = _GPUS_ASKED_FOR, ()
    with contextlib.suppress(LaunchError):  # the check of the settings says it
        settings = setting_sources.load({}, (), env_file, home=home)
        gpus, infra = settings.gpus if settings.gpus and settings.rented else gpus, settings.infra
    places = [place for place in infra if clouds_of([place]) == ["aws"]] or ["aws"]
    refusals: dict[str, str] = {}

    def ask_to_rent(cloud: str, sky: SkyProcess) -> None:
        with contextlib.suppress(LaunchError):  # then nothing is said of it
            refusals.update(rental_check.refusals(sky, gpus, places, home.runs) if cloud == "aws" else {})

    asked = _with_credentials()
    report = orphaned_machines.find(asked, home.runs, ask_to_rent)
    return [
        _no_rental(gpus, refusals) if cloud == "aws" and refusals else _answer_of(cloud, report)
        for cloud in asked
    ]


def _no_rental(gpus: str, refusals: Mapping[str, str]) -> Check:
    why = f"it lists machines, but rents no {gpus} in {', '.join(refusals)}: {next(iter(refusals.values()))}"
    return Check(f"{_CLOUD}aws", "warn", why, "ask who manages the account for ec2:RunInstances")


def _answer_of(cloud: str, report: OrphanReport) -> Check:
    name = f"{_CLOUD}{cloud}"
    if cloud in report.unlisted:
        return Check(name, "info", "it can be asked for a run's own machines alone", f"sky check {cloud}")
    if why := report.unasked.get(cloud):
        return Check(name, "warn", f"it does not answer: {why}", f"sky check {cloud}")
    places = [place for place in report.answered if place.lower().startswith(cloud)]
    denied = [place for place in report.denied if place.lower().startswith(cloud)]
    note = f"; a policy denies {', '.join(denied)}" if denied else ""
    return Check(name, "ok", f"it lets you in: {', '.join(places)}{note}")
