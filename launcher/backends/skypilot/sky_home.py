"""SkyPilot's private home for one run: one cloud's credentials, its own API server on its own port.

Neighbours: `sky_process.py` calls SkyPilot in it, `sky_config.py` has its configuration, `cloud_machine.py`
makes one for each run and removes it when the machine is proven down. Each run has its own home, so that no
run meets another's server, keys or state, and ending one ends no other. Its server is there while a machine
is made and while one is ended, not in between. Knows nothing of clusters.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from launcher.backends.skypilot import sky_cache, sky_config, sky_credentials
from launcher.base import process_inspection, processes, proxies
from launcher.base.errors import PreflightError
from launcher.base.module_command import module_command
from launcher.base.processes import ProcessId
from launcher.types.clouds import clouds_of, credential_paths, has_account, is_variable_of, no_account

SERVER_SECONDS = 90.0
_SERVER = "launcher.backends.skypilot.sky_server"
_END_SECONDS = 3.0
_HEALTH_SECONDS = 5.0
# A port that was free may be another's a moment later; not three times in a row.
_PORTS = 3
# A server takes seconds to start, and a look at one that answers is one at all processes of this computer.
_POLL_SECONDS, _RAREST_POLL_SECONDS = 0.1, 1.0
_NOBODY: frozenset[ProcessId] = frozenset()
_HOME_VARIABLE = "SLIPWAY_SKYPILOT_HOME"
_PORT = "api-port"
# The user's environment variables that SkyPilot gets for every cloud.
_PLAIN = ("PATH", "LANG", "LC_", "TERM", "TMPDIR", "SSL_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "USER")


class NoServerError(PreflightError):
    """SkyPilot's API server cannot be had."""


class SkyHome:
    """`folder` is made by `make` (0700). `user_id`, eight hex digits, names SkyPilot's own sockets."""

    def __init__(self, folder: Path, infra: list[str], user_id: str) -> None:
        self.folder = folder
        self._clouds = clouds_of(infra)
        self._user_id = user_id
        self._user_home = Path.home()

    def make(
        self,
        user_home: Path | None = None,
        only: str | None = None,
        boot_commands: Sequence[str] = (),
    ) -> list[str]:
        """Make the home: links to the target clouds' credentials, the applicable user configuration, and a
        copy of SkyPilot's cache. Returns the configuration left out, one setting a line.

        `only` one of the clouds: SkyPilot uploads the credentials it sees while it launches (G16).
        `boot_commands`: the machine's commands at its first boot. Raises PreflightError if a cloud has no
        credentials, or the configuration cannot be read.
        """
        clouds = self._clouds if only is None else [only]
        user_home = user_home or Path.home()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.folder / ".sky").mkdir(mode=0o700, exist_ok=True)
        for cloud in clouds:
            self._link_credentials(cloud, user_home)
        self._user_home = user_home
        aws = sky_credentials.aws_config_with_user_home(user_home, os.environ) if "aws" in clouds else None
        if aws is not None:
            _write_if_missing(self.folder / sky_credentials.AWS_CONFIG, aws)
        plugins = self._plugins(clouds)
        if "aws" in plugins - set(clouds) and (user_home / ".aws").exists():
            self._link(".aws", user_home)
        sky_cache.populate(self.folder, user_home)
        users = Path(os.environ.get(sky_config.VARIABLE) or user_home / sky_config.CONFIG_PATH).expanduser()
        others = {"aws"} & plugins - set(clouds)
        config, left_out = sky_config.for_run(users, clouds, user_home, others, boot_commands)
        _write_if_missing(self.folder / sky_config.CONFIG_PATH, json.dumps(config) + "\n")  # JSON is YAML
        return left_out

    def sibling(self, folder: Path) -> SkyHome:
        """A home for the same clouds in another folder."""
        return SkyHome(folder, self._clouds, self._user_id)

    def _link_credentials(self, cloud: str, user_home: Path) -> None:
        if not has_account(cloud, user_home, os.environ):
            raise no_account(cloud)
        for place in credential_paths(cloud):
            if (user_home / place).exists():
                self._link(place, user_home)

    def _link(self, place: str, user_home: Path) -> None:
        """A link: credentials are renewed in place, and nothing of them is copied."""
        target = self.folder / place
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not target.is_symlink():
            target.symlink_to((user_home / place).absolute())

    def _plugins(self, clouds: list[str]) -> set[str]:
        """The clouds whose programs let in to a cluster of the user's own, where that is meant."""
        return (
            sky_credentials.clouds_of_kubeconfig(self._user_home, os.environ)
            if "kubernetes" in clouds
            else set()
        )

    def environ(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of SkyPilot's processes: of the user's own variables only those that the target
        clouds need."""
        environ = os.environ if environ is None else environ
        plugins = self._plugins(self._clouds)
        kept = {
            name: sky_credentials.expand_user(value, self._user_home)
            for name, value in environ.items()
            if name.startswith(_PLAIN)
            or proxies.is_proxy(name)
            or any(is_variable_of(cloud, name) for cloud in (*self._clouds, *plugins))
        }
        kept |= sky_credentials.credential_variables(plugins, self._user_home, environ)
        if (config := self.folder / sky_credentials.AWS_CONFIG).exists():
            kept["AWS_CONFIG_FILE"] = str(config)
        kept |= proxies.no_proxy(environ)  # its API server is on this computer and needs no proxy
        own = {
            "HOME": str(_without_blanks(self.folder)),
            "NO_COLOR": "1",
            "PYTHONUNBUFFERED": "1",
            "SKYPILOT_API_SERVER_LOCAL_PORT": str(self.port()),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "SKYPILOT_USER_ID": self._user_id,
            _HOME_VARIABLE: str(self.folder),
        }
        return kept | own

    # -------------------------------------------------------------- the API server

    def port(self) -> int:
        """The port of this home's API server: a free one, chosen once."""
        path = self.folder / _PORT
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(path.read_text())
        return self._choose_port()

    def _reuse_port(self) -> int:
        """The port it had, unless another process has it now."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            port = int((self.folder / _PORT).read_text())
            if not _is_port_taken(port):
                return port
        return self._choose_port()

    def _choose_port(self) -> int:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        (self.folder / _PORT).write_text(str(port))
        return port

    def healthy(self) -> bool:
        """Whether the API server of this home answers: a process of ours, of the installed version.

        Another server on its port does not count, nor one that an upgrade has left running.
        """
        url = f"http://127.0.0.1:{self.port()}/api/health"
        try:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(url, timeout=_HEALTH_SECONDS) as answer:
                health = json.load(answer)
        except (urllib.error.URLError, OSError, ValueError):
            return False
        current = isinstance(health, dict) and health.get("version") == health.get("version_on_disk")
        return current and any(
            process_inspection.listens(process.pid, self.port()) for process in self.processes()
        )

    def serve(self, bound_seconds: float = SERVER_SECONDS, spared: Set[ProcessId] = _NOBODY) -> None:
        """Make sure that the API server answers: the running one, or a new one. A new one takes the old port
        if it is free, because the `spared` processes know no other. Raises NoServerError."""
        if self.processes() and self.healthy():
            return
        why = ""
        for _ in range(_PORTS):
            self.end_server(spared)  # the remains of one that does not answer
            port = self._reuse_port()
            why = self._start_server(bound_seconds, spared)
            if not why:
                return
            if not _is_port_taken(port):  # else another process took it first: try another one
                break
        raise NoServerError(
            "SkyPilot's API server did not start", why, f"less {self.folder / 'api-server.log'}"
        )

    def _start_server(self, bound_seconds: float, spared: Set[ProcessId]) -> str:
        """Start one and wait for its answer; why there is none."""
        command = [*module_command(_SERVER), "--host=127.0.0.1", f"--port={self.port()}"]
        with (self.folder / "api-server.log").open("ab") as output:
            server = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environ() | {"IS_SKYPILOT_SERVER": "true"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        bound = time.monotonic() + bound_seconds
        pause = _POLL_SECONDS
        while not self.healthy():
            code = server.poll()
            if code is not None or time.monotonic() > bound:
                self.end_server(spared)
                return f"no answer in {bound_seconds:.0f} s" if code is None else f"it ended with code {code}"
            time.sleep(pause)
            pause = min(1.5 * pause, _RAREST_POLL_SECONDS)
        return ""

    def processes(self) -> set[ProcessId]:
        """Everything that was started in this home. SkyPilot renames its processes, which blots out their
        environment, so the folder they work in counts as well."""
        return process_inspection.with_variable(
            _HOME_VARIABLE, str(self.folder)
        ) | process_inspection.with_working_folder(self.folder)

    def end_server(self, spared: Set[ProcessId] = _NOBODY, grace_seconds: float = _END_SECONDS) -> None:
        """End the API server, its executors and all other processes that work here, except `spared`."""
        processes.end(lambda: self.processes() - processes.tree(spared), grace_seconds)

    def remove(self) -> None:
        """After the machine is proven down: the server and the folder go, its links' targets stay."""
        self.end_server()
        self.remove_folder()

    def remove_folder(self) -> None:
        """The folder alone, when nothing works in it any more."""
        # At once, then piece by piece: a half of it left by a kill would be taken for a home with a machine.
        going = self.folder.with_name(f".{self.folder.name}.going")
        shutil.rmtree(going, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            self.folder.rename(going)
        shutil.rmtree(going, ignore_errors=True)
        if (link := _without_blanks(self.folder)) != self.folder:
            link.unlink()


def _write_if_missing(path: Path, text: str) -> None:
    """Only if it is missing: a teardown makes its home again, and must not need room on a disk."""
    with contextlib.suppress(OSError):
        if path.read_text() == text:
            return
    path.write_text(text)


def _is_port_taken(port: int) -> bool:
    """Whether any process listens on a port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _without_blanks(folder: Path) -> Path:
    """A name of the folder that has no blank: SkyPilot hands ssh keys to rsync unquoted, which splits there.

    A link in /tmp where it has one, made again whenever it was swept out. Raises PreflightError.
    """
    if not re.search(r"\s", str(folder)):
        return folder
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    link = Path("/tmp") / f"slipway-{os.getuid()}-{digest}"
    try:
        if not _is_own_link(link, folder):
            link.unlink(missing_ok=True)
            link.symlink_to(folder)
    except OSError as error:
        why = f"{error.strerror}: SkyPilot cannot use a folder whose path has a space"
        hint = "set LAUNCH_HOME to a folder without a space in its path"
        raise PreflightError(f"cannot create {link}", why, hint) from error
    return link


def _is_own_link(link: Path, folder: Path) -> bool:
    """Whether it leads there and is this user's: in /tmp no other user can change it then."""
    try:
        return os.readlink(link) == str(folder) and link.lstat().st_uid == os.getuid()
    except OSError:
        return False
