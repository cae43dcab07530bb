"""Verifies that engines hold a committed version: stages, compares tensor by tensor, scores like the trainer.

Neighbours: publishing.py and reload.py (`versions/`) ask for it before a version answers; engine_client.py
talks to each engine; probe_comparison.py compares logprobs. Knows nothing of aliases, requests, steps
or HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import numpy as np

from runtime.gateway.engines.engine_client import AdapterReport, EngineClient, EngineError
from runtime.gateway.engines.probe_comparison import Errors, LogprobProbe, ProbeError, Scores
from runtime.shared.probe_file import PROBE_FILE

T = TypeVar("T")

# fp32: the largest difference of a served logprob from the trainer's; 5e-5 was measured with a large adapter.
MAX_ERROR_FP32 = 1e-3
# bf16: engine and trainer round in different places. Means of 0.012 (small adapter) to 0.054 (one that moves
# logprobs by several units) were measured, single tokens up to 0.26.
MEAN_ERROR_BF16 = 0.1
# The same token with its prefix from the cache and without: another order of summing and, in bf16, rounding.
MAX_ERROR_CACHED = {"float32": 1e-3, "bfloat16": 0.5}
# The engine's effect of the adapter, projected on the trainer's, must be it within this share.
_EFFECT_SHARE = 0.5


class VerificationError(Exception):
    """An engine does not hold the version, or not certainly. The text names the check and the engine."""


class Committed(Protocol):
    """The needed part of a checkpoint (shared/checkpoint.py)."""

    @property
    def folder(self) -> Path: ...
    @property
    def version(self) -> int: ...
    @property
    def adapter(self) -> Path: ...
    @property
    def adapter_sha256(self) -> str: ...


@dataclass(frozen=True)
class VersionCheck:
    """The result of a check. Errors are served minus trained logprobs over the probe's sampled tokens, all
    engines. `cached_error`: the error of a logprob when the prefix cache is read.

    `effect`: how far the adapter moves the probe's logprobs from the base, at most, by the trainer's numbers;
    `effect_share`: how much of that the engines show (1 is all of it), None if it is smaller than rounding.
    """

    version: int
    name: str
    engines: int
    modules: int
    sha256: str
    probe_tokens: int
    max_error: float
    mean_error: float
    cached_error: float
    effect: float
    effect_share: float | None
    stage_seconds: float
    verify_seconds: float
    probe_seconds: float


@dataclass(frozen=True)
class Measured:
    """The engines' reports on an adapter and their scores of its probe, in the engines' order. The
    seconds: to load it, to compare its tensors, to score its probe."""

    engines: list[str]
    report: AdapterReport
    probe: LogprobProbe
    scores: list[Scores]
    seconds: tuple[float, float, float]


class AdapterVerifier:
    """Stages adapters on engines and proves them there. The gateway's event loop is its only user."""

    def __init__(
        self,
        engines: list[EngineClient],
        served_name: str,
        dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        self._engines = engines
        self._served_name = served_name
        self._dtype = dtype
        # A name stands for one set of weights for ever: the engines' prefix caches know it by name (C33).
        self._weights: dict[str, str] = {}

    def name(self, version: int) -> str:
        """`policy@v12`."""
        return f"{self._served_name}@v{version}"

    async def verify(self, checkpoint: Committed) -> VersionCheck:
        """Stage, compare and score on every engine. Raises VerificationError, with nothing left staged."""
        return await self.verify_on(self._engines, checkpoint)

    async def verify_on(self, engines: list[EngineClient], checkpoint: Committed) -> VersionCheck:
        """The same on these engines alone: those that started anew, or have unloaded the version."""
        name = self.name(checkpoint.version)
        self._refuse_reuse(name, checkpoint)
        staged: list[EngineClient] = []
        try:
            return await self._verify(engines, name, checkpoint, staged)
        except (VerificationError, EngineError, ProbeError) as error:
            await self._unload(staged, name)
            raise VerificationError(f"{name}: {error}") from error

    async def measure(self, name: str, adapter: Committed) -> Measured:
        """Load, measure and unload an adapter that belongs to no version, on every engine.

        Raises VerificationError if one cannot load it, or holds something else.
        """
        try:
            return await self._measure(self._engines, name, adapter, [])
        except (EngineError, ProbeError) as error:
            raise VerificationError(str(error)) from error
        finally:
            await self._unload(self._engines, name)

    async def unload(self, version: int) -> None:
        """Forget a version on every engine, whatever their answers."""
        await self._unload(self._engines, self.name(version))

    async def unload_unused(self, may_unload: Callable[[int], bool]) -> list[int]:
        """Unload the unused versions on every engine. Returns the unloaded versions.

        `may_unload` decides for a version without awaiting; if it returns true, no request gets the version
        from then on: between its answer and the unload nothing may start (C35).
        """
        names = {name for loaded in await _gather(self._engines, EngineClient.adapters) for name in loaded}
        versions = {version: name for name in names if (version := self._version(name)) is not None}
        gone = [version for version in sorted(versions) if may_unload(version)]
        for version in gone:
            await self._unload(self._engines, versions[version])
        return gone

    def _refuse_reuse(self, name: str, checkpoint: Committed) -> None:
        if checkpoint.version < 1:
            raise VerificationError(f"{name}: version 0 is the base model, which is always served")
        known = self._weights.setdefault(name, checkpoint.adapter_sha256)
        if known != checkpoint.adapter_sha256:
            raise VerificationError(f"{name} had other weights before: a name is never used again")

    async def _verify(
        self, engines: list[EngineClient], name: str, checkpoint: Committed, staged: list[EngineClient]
    ) -> VersionCheck:
        found = await self._measure(engines, name, checkpoint, staged)
        errors = [
            self._judge_scores(engine, found.probe, scores)
            for engine, scores in zip(found.engines, found.scores, strict=True)
        ]
        stage_seconds, verify_seconds, probe_seconds = found.seconds
        return VersionCheck(
            version=checkpoint.version,
            name=name,
            engines=len(engines),
            modules=found.report.modules,
            sha256=found.report.sha256,
            probe_tokens=len(found.probe.policy),
            max_error=max(error.largest for error in errors),
            mean_error=max(error.mean for error in errors),
            cached_error=max(error.cached for error in errors),
            effect=found.probe.effect,
            effect_share=errors[0].effect_share,
            stage_seconds=stage_seconds,
            verify_seconds=verify_seconds,
            probe_seconds=probe_seconds,
        )

    async def _measure(
        self, engines: list[EngineClient], name: str, checkpoint: Committed, staged: list[EngineClient]
    ) -> Measured:
        started = time.monotonic()
        await _gather(engines, lambda engine: _load(engine, name, checkpoint.adapter, staged))
        loaded = time.monotonic()
        reports = await _gather(engines, lambda engine: engine.verify_adapter(name, checkpoint.adapter))
        for engine, report in zip(engines, reports, strict=True):
            _judge_report(engine.name, report, checkpoint.adapter_sha256)
        verified = time.monotonic()
        probe = LogprobProbe.read(checkpoint.folder / PROBE_FILE, await engines[0].context_length())
        scores = await _gather(engines, lambda engine: probe.score(engine, name))
        seconds = (loaded - started, verified - loaded, time.monotonic() - verified)
        return Measured(
            engines=[engine.name for engine in engines],
            report=reports[0],
            probe=probe,
            scores=scores,
            seconds=(round(seconds[0], 4), round(seconds[1], 4), round(seconds[2], 4)),
        )

    def _judge_scores(self, engine: str, probe: LogprobProbe, scores: Scores) -> Errors:
        errors = probe.errors(scores)
        if not np.isfinite(scores.served).all():
            raise VerificationError(f"{engine}: a served logprob is not finite")
        if not errors.cached <= MAX_ERROR_CACHED[self._dtype]:
            raise VerificationError(
                f"{engine}: a logprob is {errors.cached:.2g} off when the prefix cache is read: it holds "
                "other weights' keys and values under this name"
            )
        if self._dtype == "float32" and errors.largest > MAX_ERROR_FP32:
            raise VerificationError(
                f"{engine}: served and trained logprobs differ by {errors.largest:.2g} "
                f"(at most {MAX_ERROR_FP32})"
            )
        if errors.mean > MEAN_ERROR_BF16:
            raise VerificationError(
                f"{engine}: served and trained logprobs differ by {errors.mean:.2g} on average "
                f"(at most {MEAN_ERROR_BF16})"
            )
        if errors.effect_share is not None and abs(errors.effect_share - 1) > _EFFECT_SHARE:
            raise VerificationError(
                f"{engine}: it shows {errors.effect_share:.2f} of what the adapter does to the policy"
            )
        return errors

    async def _unload(self, engines: list[EngineClient], name: str) -> None:
        """Forget `name` everywhere; an engine that never had it, or is gone, needs nothing."""
        await asyncio.gather(*(engine.unload_adapter(name) for engine in engines), return_exceptions=True)

    def _version(self, name: str) -> int | None:
        alias, _, number = name.rpartition("@v")
        return int(number) if alias == self._served_name and number.isdigit() else None


async def _load(engine: EngineClient, name: str, adapter: Path, staged: list[EngineClient]) -> None:
    """Load it, and note the engine as one to take it from again.

    If the name is loaded already (a gateway died after staging it) the comparison decides which adapter it
    is.
    """
    staged.append(engine)
    try:
        await engine.load_adapter(name, adapter)
    except EngineError as error:
        if error.status != 400 or name not in await engine.adapters():
            raise
        staged.remove(engine)


def _judge_report(engine: str, report: AdapterReport, sha256: str) -> None:
    if not report.modules:
        raise VerificationError(f"{engine}: {'; '.join(report.mismatched[:3]) or 'it holds no module of it'}")
    if report.sha256 != sha256:
        raise VerificationError(f"{engine}: the adapter file is not the one the trainer committed")
    if not report.exact:
        what = "; ".join(report.mismatched[:3]) or "no tensor differs"
        raise VerificationError(
            f"{engine}: holds {report.modules} of {report.expected} modules, "
            f"{len(report.mismatched)} tensors differ from the file: {what}"
        )


async def _gather(engines: Iterable[EngineClient], ask: Callable[[EngineClient], Awaitable[T]]) -> list[T]:
    """Ask every engine at once; raises the first failure, when all have answered."""
    answers = await asyncio.gather(*(ask(engine) for engine in engines), return_exceptions=True)
    whole: list[T] = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        whole.append(answer)
    return whole
