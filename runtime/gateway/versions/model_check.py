"""The model check (C58): engine and trainer must agree on the model before any request reaches the policy.

Neighbours: the trainer writes the files of a parity check (shared/parity_check.py), version_check.py has
every engine score them, parity_check.py judges the numbers; gateway.py publishes nothing before `passed`,
status_reader.py shows the phase. Knows nothing of requests or steps.

Passed once, it is not repeated in the same folder for the same model, adapters and programs; a crash in the
middle repeats it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtime.gateway.engines.engine_pool import EnginePool
from runtime.gateway.engines.parity_check import ParityError, ParityReport, judge
from runtime.gateway.engines.version_check import AdapterVerifier, VerificationError
from runtime.shared import failpoints, json_files
from runtime.shared import parity_check as on_disk
from runtime.shared.checkpoint import Checkpoint
from runtime.shared.runtime_config import RuntimeConfig

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
# Of engines that died while they were asked, and of those that live and refuse; other numbers are final.
_ATTEMPTS = 5
_REFUSALS = 2
# Of an adapter's hash, in the name that engines know it by.
_DIGITS = 12


class ModelCheck:
    """One runtime's. The gateway's event loop is its only user."""

    def __init__(self, config: RuntimeConfig, pool: EnginePool, verifier: AdapterVerifier) -> None:
        self._config = config
        self._state_dir = Path(config.state_dir)
        self._subject = on_disk.fingerprint(config)
        self._pool = pool
        self._verifier = verifier
        self._passed = asyncio.Event()
        # Why the model is refused.
        self.refusal: str | None = None
        # The content of admission.json.
        self.record: dict[str, Any] | None = None
        if on_disk.is_admitted(self._state_dir, self._subject):
            self.record = json_files.read_json(self._state_dir / on_disk.RECORD)
            self._passed.set()

    @property
    def is_passed(self) -> bool:
        return self._passed.is_set()

    async def passed(self) -> None:
        """Wait until the model is admitted; forever, if it is refused."""
        await self._passed.wait()

    async def run(self) -> None:
        """Check the model, unless it was checked before. Ends when that is decided."""
        attempts = refusals = 0
        while not (self.is_passed or self.refusal):
            adapter = await self._parity_check()
            started = time.monotonic()
            try:
                proof = await self._proof(adapter)
            except ParityError as error:
                self._refuse(str(error), error.proof, started)
            except VerificationError as error:
                attempts += 1
                refusals += not (self._changed(adapter) or await self._pool.check_all())
                log.warning("not admitted: %s", error)
                if refusals == _REFUSALS or attempts == _ATTEMPTS:
                    self._refuse(
                        f"the engine does not serve this model with an adapter: {error}", None, started
                    )
            else:
                self._admit(proof, started)
                await asyncio.to_thread(on_disk.remove, self._state_dir)

    async def _proof(self, adapter: Checkpoint) -> ParityReport:
        name = f"admission-{adapter.adapter_sha256[:_DIGITS]}"
        return judge(await self._verifier.measure(name, adapter), self._config.dtype)

    async def _parity_check(self) -> Checkpoint:
        """The trainer's adapter, once all engines are ready for it."""
        while True:
            if self._pool.all_ready:
                adapter = await asyncio.to_thread(on_disk.find, self._state_dir, self._subject)
                if adapter is not None:
                    return adapter
            await asyncio.sleep(_POLL_SECONDS)

    def _changed(self, adapter: Checkpoint) -> bool:
        """Whether the trainer, started anew, has meanwhile written new files for the check."""
        now = on_disk.find(self._state_dir, self._subject)
        return now is None or now.manifest != adapter.manifest

    def _admit(self, proof: ParityReport, started: float) -> None:
        failpoints.failpoint("admission.proven")
        self._write(started, admitted=True, **_plain(asdict(proof)))
        log.info("admitted: %s", self.record)
        self._passed.set()

    def _refuse(self, why: str, proof: ParityReport | None, started: float) -> None:
        log.error("%s is refused: %s", self._config.model_path, why)
        self.refusal = why
        self._write(started, admitted=False, reason=why, **({} if proof is None else _plain(asdict(proof))))

    def _write(self, started: float, *, admitted: bool, **details: Any) -> None:
        about = {"seconds": round(time.monotonic() - started, 4), "time": time.time(), **details}
        outcome = "admitted" if admitted else "refused"
        self.record = {
            "admitted": admitted,
            "model": self._config.model_name or self._config.model_path,
            "subject": self._subject,
            **about,
        }
        json_files.append_line(
            self._state_dir / "publications.jsonl", {"version": 0, "outcome": outcome, **about}
        )
        json_files.write_json(self._state_dir / on_disk.RECORD, self.record, durable=True)


def _plain(numbers: dict[str, Any]) -> dict[str, Any]:
    """Numbers as JSON has them; null for those that are not finite."""
    return {
        name: _plain(value)
        if isinstance(value, dict)
        else None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for name, value in numbers.items()
    }
