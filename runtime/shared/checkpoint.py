"""Checkpoints: whole or absent. The rename of a folder with its manifest in it *is* the commit of a step.

Neighbours: the recipe commits, the gateway lists, publishes and pins; manifest.py defines "whole". Knows
nothing of models, torch or serving.

    checkpoints/step-000007/
        adapter/adapter_model.safetensors  adapter/adapter_config.json     PEFT form
        optimizer.safetensors  rng.safetensors  probe.safetensors          for resume, verification
        state.json                                                         step, key, counters, client_state
        manifest.json                                                      sha256 and size of every file above
    checkpoints/pinned.json                                                the pins, the next to go first
    checkpoints/best.json                                                  the one that was named best last
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.shared import failpoints, json_files
from runtime.shared import manifest as manifests
from runtime.shared.manifest import ADAPTER_WEIGHTS, STATE, ManifestError
from runtime.shared.statuses import CheckpointInfo

__all__ = ["ADAPTER_WEIGHTS", "Checkpoint", "CheckpointError", "CheckpointStore", "checkpoint_name"]

ADAPTER = "adapter"
# In the run's folder: the version that is served, by the gateway's word.
SERVING = "serving.json"
# However few are asked for: a newest one that turns out broken must have one before it.
MIN_KEPT = 2
# Pinned at a time: each has the optimizer's moments with it, on the machine and at home.
MAX_PINNED = 32
_PINNED = "pinned.json"
_BEST = "best.json"
# Pins are changed in milliseconds; a process that holds the lock for longer stands still.
_PIN_SECONDS = 10.0
_log = logging.getLogger(__name__)


class CheckpointError(Exception):
    """A checkpoint is missing or not whole; the text names the file."""


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint on disk."""

    folder: Path
    manifest: dict[str, Any]
    state: dict[str, Any]

    @property
    def name(self) -> str:
        """`step-000007`."""
        return self.folder.name

    @property
    def step(self) -> int:
        """The step it committed."""
        return int(self.manifest["step"])

    @property
    def version(self) -> int:
        """The policy version it holds."""
        return int(self.manifest["version"])

    @property
    def adapter(self) -> Path:
        """The folder in PEFT form."""
        return self.folder / ADAPTER

    @property
    def adapter_sha256(self) -> str:
        """Hash of the adapter's weights file."""
        return str(self.manifest["adapter_sha256"])


def checkpoint_name(step: int) -> str:
    """The folder's name for a step."""
    return f"step-{step:06d}"


def served_checkpoint_names(state_dir: Path) -> set[str]:
    """The name of the served checkpoint; empty if none is. A restarted engine loads it, however far the
    trainer is."""
    try:
        serving = json_files.read_json(state_dir / SERVING)
        return set() if serving is None else {checkpoint_name(serving["version"])}
    except (OSError, ValueError, TypeError, KeyError) as error:
        _log.warning("%s does not say which checkpoint is served: %s", SERVING, error)
        return set()


def newest_step(store: CheckpointStore) -> int:
    """The newest committed step, by its folder's name; 0 before there is one."""
    return max((int(name.removeprefix("step-")) for name in store.names()), default=0)


class CheckpointStore:
    """The `checkpoints` folder of a run."""

    def __init__(self, root: Path) -> None:
        self.root = root

    # ------------------------------------------------------------------ the commit

    def commit(
        self, step: int, version: int, state: dict[str, Any], write: Callable[[Path], None]
    ) -> Checkpoint:
        """Commit a step: `write` fills a temporary folder, then hash, fsync and one rename.

        A kill at any instant leaves either no such checkpoint or the whole of it; a failure (a full disk)
        removes its files. Raises FileExistsError when the step is committed already: a step happens once. One
        that is there but not whole is replaced.
        """
        folder = self.root / checkpoint_name(step)
        if self._is_whole(folder.name):
            raise FileExistsError(f"{folder.name} is committed already")
        self._clear_partials()
        self._remove(folder.name)  # a broken one, which `newest` passed over: the step is taken again
        partial = self.root / f".tmp-{folder.name}-{os.getpid()}"
        try:
            partial.mkdir(parents=True)
            write(partial)
            (partial / STATE).write_text(json.dumps(state))
            manifest = manifests.write(partial, step, version)
            failpoints.failpoint("checkpoint.manifest")
            os.rename(partial, folder)
        except BaseException:  # goes on as it came; a full disk wants its space back
            shutil.rmtree(partial, ignore_errors=True)
            raise
        failpoints.failpoint("checkpoint.renamed")
        json_files.fsync(self.root)
        return Checkpoint(folder, manifest, state)

    def _is_whole(self, name: str) -> bool:
        try:
            self.load(name)
        except CheckpointError:
            return False
        return True

    def _clear_partials(self) -> None:
        """Remove the remains of a killed commit; there is one writer, so nothing here is in use."""
        for path in self.root.glob(".tmp-*"):
            shutil.rmtree(path, ignore_errors=True)

    # ------------------------------------------------------------------ reading

    def load(self, name: str, *, verify: bool = True) -> Checkpoint:
        """The checkpoint of that name; `verify` reads every byte. Raises CheckpointError if not whole."""
        if "/" in name or name.startswith("."):
            raise CheckpointError(f"{name!r} is not a checkpoint's name")
        folder = self.root / name
        try:
            manifest = manifests.read(folder, verify=verify)
            state = json.loads((folder / STATE).read_text())
        except (ManifestError, OSError, ValueError) as error:
            raise CheckpointError(f"{name}: {error}") from error
        if checkpoint_name(manifest["step"]) != name:
            raise CheckpointError(f"{name}: it is that of step {manifest['step']}")
        return Checkpoint(folder, manifest, state)

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint; a damaged one is skipped and logged."""
        for name in reversed(self.names()):
            try:
                return self.load(name)
            except CheckpointError as error:
                _log.warning("skipped a checkpoint that is not complete: %s", error)
        return None

    def names(self) -> Sequence[str]:
        """Names of the committed checkpoints, oldest first."""
        return sorted(path.name for path in self.root.glob("step-*")) if self.root.is_dir() else []

    def readable(self) -> Iterator[Checkpoint]:
        """The kept checkpoints, oldest first, by their manifests and sizes: nothing is read in full."""
        for name in self.names():
            try:
                yield self.load(name, verify=False)
            except CheckpointError as error:
                _log.warning("skipped a checkpoint that is not complete: %s", error)

    def list(self) -> Sequence[CheckpointInfo]:
        """The kept checkpoints, oldest first, in the API's form."""
        pinned = self.pinned()
        return [_info(checkpoint, checkpoint.name in pinned) for checkpoint in self.readable()]

    # ------------------------------------------------------------------ pins

    def pinned(self) -> set[str]:
        """Names that `prune` does not remove."""
        return set(self._pins() or ())

    def pin(self, name: str, best_of: str | None = None) -> CheckpointInfo:
        """Pin a checkpoint. Raises CheckpointError when it is not there or not whole, OSError.

        `best_of`: an optimizer's name for the training whose best it is; the last one named so comes home as
        `best`. Past `MAX_PINNED` some are unpinned, and named in the answer: first former bests of a
        training, then those pinned longest ago; the last one named best never.
        """
        with self._retention_lock(_PIN_SECONDS) as held:
            if not held:
                raise TimeoutError(f"{name}: old checkpoints have been under removal for {_PIN_SECONDS} s")
            checkpoint = self.load(name)
            best, of = self._best()
            pins = [one for one in self._pinned_here() if one != name]
            if best in pins:  # surpassed by this one it is the next to go, and else the last
                pins.remove(best)
                pins.insert(0 if of == best_of else len(pins), best)
            pins.append(name)
            let_go, pins = pins[:-MAX_PINNED], pins[-MAX_PINNED:]
            json_files.write_json(self.root / _PINNED, pins, durable=True)
            if best_of is not None:
                json_files.write_json(self.root / _BEST, {"checkpoint": name, "of": best_of}, durable=True)
        if let_go:
            _log.warning("no longer pinned, because %d newer ones are: %s", MAX_PINNED, ", ".join(let_go))
        return _info(checkpoint, pinned=True).model_copy(update={"let_go": let_go})

    def prune(self, keep: int, protected: Collection[str] = ()) -> Sequence[str]:
        """Remove all older than the newest `keep` (2 at least) readable ones; returns the removed names.

        Pinned ones stay, and those in `protected`. Nothing is removed while pins change or when they cannot
        be read: the next prune makes up for it.
        """
        with self._retention_lock(0) as held:
            pins = self._pins() if held else None
            kept = [checkpoint.name for checkpoint in self.readable()][-max(MIN_KEPT, keep) :]
            if pins is None or not kept:
                return []
            removed = [name for name in self.names() if name < kept[0] and name not in {*pins, *protected}]
            for name in removed:
                self._remove(name)
        return removed

    def _pinned_here(self) -> Sequence[str]:
        """The pinned checkpoints that exist; all existing ones if the pins cannot be read, because any could
        be pinned."""
        there, pins = self.names(), self._pins()
        return there if pins is None else [name for name in pins if name in there]

    def _best(self) -> tuple[str, str] | tuple[None, None]:
        """The checkpoint that was named best last, and its work."""
        try:
            best = json_files.read_json(self.root / _BEST) or {}
            return str(best["checkpoint"]), str(best["of"])
        except (ValueError, TypeError, KeyError):
            return None, None

    def _pins(self) -> Sequence[str] | None:
        """None: there are pins, and they cannot be read."""
        try:
            return list(json_files.read_json(self.root / _PINNED) or ())
        except (ValueError, TypeError) as error:
            _log.warning("%s cannot be read, so no checkpoint is removed: %s", _PINNED, error)
            return None

    @contextmanager
    def _retention_lock(self, bound_seconds: float) -> Iterator[bool]:
        """Keep pinning (the gateway's) and pruning (the trainer's) apart; False when that took too long."""
        self.root.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + bound_seconds
        with open(self.root / ".retention", "w") as file:
            while not (held := _lock(file.fileno())) and time.monotonic() < end:
                time.sleep(0.01)
            yield held

    def _remove(self, name: str) -> None:
        """Renamed first: a half-removed folder must not look like a checkpoint."""
        if (self.root / name).exists():
            doomed = self.root / f".tmp-removed-{name}"
            os.rename(self.root / name, doomed)
            failpoints.failpoint("checkpoint.removing")
            shutil.rmtree(doomed)


def _info(checkpoint: Checkpoint, pinned: bool) -> CheckpointInfo:
    return CheckpointInfo(
        name=checkpoint.name,
        step=checkpoint.step,
        version=checkpoint.version,
        created=checkpoint.manifest["created"],
        bytes=sum(file["bytes"] for file in checkpoint.manifest["files"].values()),
        weights=checkpoint.adapter_sha256,
        pinned=pinned,
        client_state=checkpoint.state.get("client_state"),
        metrics=checkpoint.state.get("metrics", {}),
    )


def _lock(descriptor: int) -> bool:
    """Take the file's lock if it is free; the kernel releases it with the process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
