"""A timer from a machine's first boot on: it ends the machine if SkyPilot's own timer is never armed.

On AWS the machine sets this timer at its boot, before anything has to reach it. After the idle minutes and
ten more the machine shuts down, which stops it there (a stopped machine costs its disk, and `launch gc` ends
it). The timer is cancelled when SkyPilot's own timer is read back as armed. On other clouds a machine takes
no such command at boot, and the window stays; its length is in each run's summary.
Neighbours: `cloud_machine.py` arms and closes by these; `sky_config.py` has the commands in SkyPilot's
configuration.
"""

from __future__ import annotations

from launcher.backends.ssh.link import SshHost, run_on
from launcher.base.errors import PreflightError

# Clouds whose machines take commands for their boot from SkyPilot (`post_provision_runcmd`), and stop at a
# shutdown.
_CLOUDS = ("aws",)
# The time that a machine gets to come up and be armed, beside its idle minutes.
_MARGIN_MINUTES = 10
_UNIT = "slipway-unarmed"
_ARMED = "/run/slipway-armed"
_READ_SECONDS = 120.0
# By SkyPilot's own Python there: with idle minutes, and ending the machine.
_IS_ARMED = (
    "from sky.skylet import autostop_lib as a; c = a.get_autostop_config(); "
    "raise SystemExit(0 if c.autostop_idle_minutes >= 0 and c.down else 9)"
)
_CANCEL = (
    f"~/skypilot-runtime/bin/python -c '{_IS_ARMED}' && sudo touch {_ARMED} && "
    f"{{ sudo systemctl stop {_UNIT}.timer; test -e {_ARMED}; }}"
)


def boot_commands(cloud: str, idle_minutes: int) -> list[str]:
    """The machine's commands at its first boot, as root: a line each, plain text in YAML.

    The timer checks once more when it has run out, because it may be set after the machine was armed.
    """
    if cloud not in _CLOUDS:
        return []
    seconds = (idle_minutes + _MARGIN_MINUTES) * 60
    timer = f"systemd-run --unit={_UNIT} --timer-property=AccuracySec=1s --on-boot={seconds}"
    return [f"{timer} sh -c 'test -e {_ARMED} || shutdown -h now'"]


def cancel(host: SshHost, where: str) -> None:
    """Read SkyPilot's timer back, and cancel the boot timer. `where`: the machine's place, by the books.

    Raises PreflightError if SkyPilot's timer is not armed, LaunchError if the machine cannot be reached.
    """
    if where.partition("/")[0].lower() not in _CLOUDS:
        return
    done = run_on(host, _CANCEL, bound_seconds=_READ_SECONDS)
    if done.returncode != 0:
        stderr_lines = done.stderr.decode(errors="replace").strip().splitlines()
        why = stderr_lines[-1] if stderr_lines else f"its timer was read back with code {done.returncode}"
        raise PreflightError("the machine's own timer is not armed", why, None)
