"""Alarms of a training that goes wrong while every step succeeds (C47): each is raised once.

Neighbours: `dspy/training.py` feeds one `StepRecord` a step and one validation at a time, `dspy/report.py`
shows each alarm; `on_alarm="stop"` ends the training there. `step_alarms.py` does both for every other loop.
Pure: knows nothing of DSPy, wire or clock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from statistics import fmean, pstdev

from launcher.client.step_record import StepRecord

# What usually helps, by the alarm's name.
ADVICE = {
    "flat_groups": "easier or harder examples, a finer metric, or dynamic_sampling=True",
    "length": "if the reward rises with it, the metric rewards length: change it",
    "repetition": "the metric rewards it: change it, and go on from a step before: launch --from RUN@STEP",
    "entropy": "a lower train.learning_rate, or train.kl_beta above 0",
    "truncation": "a larger max_tokens",
    "outside": "look at its quota and time-outs",
    "kl_behaviour": "less staleness or a lower train.learning_rate",
    "kl_reference": "a larger train.kl_beta",
    "masked": "less staleness or a lower train.learning_rate",
    "stale": "less staleness or a lower train.learning_rate",
    "ratio_max": "report it, with launch logs RUN --which trainer",
    "held_out": "more examples, or stop earlier: launch --from RUN@best",
}
_NGRAM = 4
_LAG = re.compile(r"lag(\d+)/trained_tokens")
# The part of a rise that is an alarm where the reward follows it.
_WHERE_FOLLOWED = 0.25
# The share of the tokens that a lag must have to be judged by itself.
_MIN_TOKEN_SHARE = 0.1


@dataclass(frozen=True)
class Thresholds:
    """When an alarm is raised. "The start" is the mean of the first `window` steps, "now" of the last."""

    window: int = 3
    # Share of groups whose rewards are all the same: there is nothing to learn from them.
    flat_groups: float = 0.9
    # Tokens of an answer, as a multiple of the start's.
    length: float = 2.0
    # Share of an answer's four-word sequences that occurred in it before, more than at the start.
    repetition: float = 0.2
    # Correlation of rewards with length or repetition, among the runs of an example. Where it is as high, a
    # quarter of the rise above is an alarm.
    follows: float = 0.9
    # Entropy of the sampled tokens, as a share of the start's.
    entropy: float = 0.1
    # Share of rollouts with an answer that ended at its length limit.
    truncation: float = 0.25
    # Share of rollouts that another model or a judge failed, so that they are left out.
    outside: float = 0.05
    # Nats a token between the policy that sampled and the one that is trained; also of the oldest alone.
    kl_behaviour: float = 0.05
    # Nats a token between the policy and the model before training (measured when train.kl_beta > 0).
    kl_reference: float = 1.0
    # Share of the trained tokens past train.dual_clip, which teach nothing: 0 without staleness.
    masked: float = 0.01
    # Share of the tokens of answers some steps old that a clip or train.dual_clip has stopped: 0.00 to 0.05
    # where the embedded model learns 2 steps behind, 0.4 to 0.8 under gspo's clip, where it learns half.
    stale: float = 0.2
    # The largest ratio of the trainer's to the engine's probability of one token, in each of the last
    # `window` steps; train.mismatch_cap bounds the weight of such a token.
    ratio_max: float = 100.0
    # Validations without a better score, while the training reward rises by `reward_rise` of its own spread
    # at the start.
    flat_validations: int = 3
    reward_rise: float = 0.5

    def __post_init__(self) -> None:
        for it in fields(self):
            value = getattr(self, it.name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
                raise ValueError(f"alarms: {it.name} must be a number above 0, not {value!r}")
        for name in ("window", "flat_validations"):
            if getattr(self, name) != int(getattr(self, name)):
                raise ValueError(f"alarms: {name} must be a whole number")

    @classmethod
    def of(cls, changes: Mapping[str, float] | None) -> Thresholds:
        """The defaults with some changed by name."""
        changes = dict(changes or {})
        known = [it.name for it in fields(cls)]
        for name in changes:
            if name not in known:
                raise ValueError(f"alarms: there is no threshold {name!r}; there are {', '.join(known)}")
        return cls(**changes)  # type: ignore[arg-type] - the counts are checked to be whole


@dataclass(frozen=True)
class StalenessBucket:
    """A step's answers of one age, in steps: their trained tokens, those stopped by a bound, and the nats
    between the policy that sampled and the one that is trained, added up."""

    tokens: float
    stopped: float
    kl: float = 0.0


@dataclass(frozen=True)
class Alarm:
    """One alarm: its name, the step after which it was raised, a sentence about the observation, and what
    usually helps."""

    name: str
    step: int
    text: str
    advice: str = ""


@dataclass
class Alarms:
    """Holds the observations so far. `raised`: all alarms, in order."""

    thresholds: Thresholds = field(default_factory=Thresholds)
    raised: list[Alarm] = field(default_factory=list)
    _steps: list[StepRecord] = field(default_factory=list)
    # Held-out scores, each with the number of steps observed before it.
    _scores: list[tuple[int, float]] = field(default_factory=list)

    def observe(self, record: StepRecord) -> list[Alarm]:
        """The alarms that this step raises for the first time."""
        self._steps.append(record)
        if len(self._steps) < self.thresholds.window:
            return []
        return self._raise(record.step, self._checks())

    def observe_validation(self, step: int, score: float) -> list[Alarm]:
        """The alarms that this held-out score raises for the first time."""
        if math.isfinite(score):
            self._scores.append((len(self._steps), score))
        return self._raise(step, [("held_out", self._held_out)])

    def _raise(self, step: int, looks: Iterable[tuple[str, Callable[[], str | None]]]) -> list[Alarm]:
        known = {it.name for it in self.raised}
        found = [
            Alarm(name, step, text, ADVICE[name])
            for name, look in looks
            if name not in known and (text := look())
        ]
        self.raised += found
        return found

    def _checks(self) -> Iterator[tuple[str, Callable[[], str | None]]]:
        yield "length", self._length
        yield "repetition", self._repetition
        yield "entropy", self._entropy
        yield "truncation", self._truncation
        yield "outside", self._outside
        yield "kl_behaviour", self._kl_behaviour
        yield "kl_reference", lambda: self._kl("kl_reference", "the model before training")
        yield "masked", self._masked
        yield "stale", self._stale
        yield "ratio_max", self._ratio_max
        yield "flat_groups", self._flat_groups  # last: those above may be why

    # ------------------------------------------------------------- one look each

    def _flat_groups(self) -> str | None:
        now = self._recent_mean("flat_groups")
        if now is None or now < self.thresholds.flat_groups:
            return None
        return (
            f"in {now:.0%} of the groups all rewards are equal, so there is almost nothing to learn: "
            "the task is solved, out of reach, or the metric does not tell answers apart"
        )

    def _length(self) -> str | None:
        start, now = self._first_mean("length"), self._recent_mean("length")
        rise = (self.thresholds.length - 1) * self._enough("reward_length")
        if not start or now is None or now < (1 + rise) * start:
            return None
        return (
            f"answers are {now / start:.1f} times as long as at the start ({start:.0f} -> {now:.0f} tokens)"
            f"{self._reward_meanwhile('reward_length')}"
        )

    def _repetition(self) -> str | None:
        start, now = self._first_mean("repetition"), self._recent_mean("repetition")
        rise = self.thresholds.repetition * self._enough("reward_repetition")
        if start is None or now is None or now < start + rise:
            return None
        return (
            f"answers repeat themselves: {now:.0%} of their four-word sequences were said before, "
            f"{start:.0%} at the start{self._reward_meanwhile('reward_repetition')}"
        )

    def _enough(self, correlation: str) -> float:
        """The part of a rise that is an alarm: less of it where the reward follows it."""
        now = self._recent_mean(correlation)
        return _WHERE_FOLLOWED if now is not None and now >= self.thresholds.follows else 1.0

    def _reward_meanwhile(self, correlation: str) -> str:
        """Whether the metric seems to pay for it."""
        if self._enough(correlation) < 1:
            now = self._recent_mean(correlation)
            return f", and the reward follows it: a correlation of {now:.2f} among tries of an example"
        window = self.thresholds.window
        then, now = self._rewards(0, window), self._rewards(-window, None)
        if not then or not now or fmean(now) <= fmean(then):
            return ""
        return (
            f", and the reward rose with it ({fmean(then):.3f} -> {fmean(now):.3f}): read the best rollouts"
        )

    def _entropy(self) -> str | None:
        start, now = self._first_mean("entropy"), self._recent_mean("entropy")
        if not start or now is None or now > self.thresholds.entropy * start:
            return None
        return f"the policy hardly varies its answers any more: entropy {start:.3f} -> {now:.3f} nats a token"

    def _truncation(self) -> str | None:
        now = self._recent_mean("truncation")
        if now is None or now < self.thresholds.truncation:
            return None
        return f"{now:.0%} of the rollouts had an answer cut off at the length limit"

    def _outside(self) -> str | None:
        now = self._recent_mean("outside")
        if now is None or now < self.thresholds.outside:
            return None
        failure = next((it.rollouts.failure for it in reversed(self._steps) if it.rollouts.failure), None)
        return (
            f"another model or a judge failed in {now:.0%} of the rollouts, which are left out, not scored"
            f"{f': {failure}' if failure else ''}"
        )

    def _kl(self, name: str, other: str) -> str | None:
        now, limit = self._recent_mean(name), getattr(self.thresholds, name)
        if now is None or now < limit:
            return None
        return f"the policy is {now:.3f} nats a token away from {other} (above {limit:g})"

    def _masked(self) -> str | None:
        now, answers = self._recent_mean("masked"), self._recent_mean("masked_answers")
        if now is None or now < self.thresholds.masked:
            return None
        inside = "" if answers is None else f", in {answers:.0%} of the answers,"
        return (
            f"{now:.1%} of the tokens{inside} are past train.dual_clip and teach nothing: "
            "the policy has moved far from the one that sampled them"
        )

    def _stale(self) -> str | None:
        found = self._oldest_above(lambda it: it.stopped, self.thresholds.stale)
        if found is None:
            return None
        lag, shares = found
        return (
            f"{shares[lag]:.0%} of the tokens {_age(lag)} old are past the clip or train.dual_clip"
            f"{_values_of_newer(lag, shares, '.0%')}: a smaller staleness or learning rate wastes fewer"
        )

    def _kl_behaviour(self) -> str | None:
        found = self._oldest_above(lambda it: it.kl, self.thresholds.kl_behaviour)
        if found is None:
            return self._kl("kl_behaviour", "the policy that sampled")
        lag, nats = found
        return (
            f"the policy is {nats[lag]:.3f} nats a token away from the one that sampled {_age(lag)} ago"
            f"{_values_of_newer(lag, nats, '.3f')}, above {self.thresholds.kl_behaviour:g}: "
            "a smaller staleness or learning rate keeps it nearer"
        )

    def _oldest_above(
        self, total: Callable[[StalenessBucket], float], limit: float
    ) -> tuple[int, dict[int, float]] | None:
        """The oldest lag whose tokens exceed `limit` on average, and the averages of every lag.

        Only a lag that is in each of the last steps and has enough tokens counts, because a few tokens prove
        nothing. If the policy's own tokens exceed it too, their age is not the reason.
        """
        steps = [staleness_buckets(it.status.metrics) for it in self._steps[-self.thresholds.window :]]
        tokens: dict[int, float] = {}
        sums: dict[int, float] = {}
        for lag, it in (found for lags in steps for found in lags.items()):
            tokens[lag] = tokens.get(lag, 0.0) + it.tokens
            sums[lag] = sums.get(lag, 0.0) + total(it)
        each = {lag: sums[lag] / tokens[lag] for lag in sorted(tokens, reverse=True) if tokens[lag]}
        if each.get(0, 0.0) >= limit:
            return None
        least = _MIN_TOKEN_SHARE * sum(tokens.values())
        steady = [lag for lag in each if tokens[lag] >= least and all(lag in lags for lags in steps)]
        return next(((lag, each) for lag in steady if each[lag] >= limit), None)

    def _ratio_max(self) -> str | None:
        measured = [it.status.metrics.get("ratio_max") for it in self._steps[-self.thresholds.window :]]
        least = min((it for it in measured if it is not None), default=0.0)
        if None in measured or not least >= self.thresholds.ratio_max:
            return None
        return (
            f"in each of the last {len(measured)} steps the trainer found a token {least:.0f} or more times "
            "as likely as the engine had said: do both have the same weights and the same tokens?"
        )

    def _held_out(self) -> str | None:
        count = self.thresholds.flat_validations
        if len(self._scores) <= count:
            return None
        (since, before), *later = self._scores[-count - 1 :]
        window = self.thresholds.window
        then, now = self._rewards(since, since + window), self._rewards(-window, None)
        spread = pstdev(self._rewards(0, window) or [0.0])
        if not then or not now or not spread or since + window > len(self._steps) - window:
            return None
        rise = fmean(now) - fmean(then)
        if max(score for _, score in later) > before or rise < self.thresholds.reward_rise * spread:
            return None
        return (
            f"the training reward rises ({fmean(then):.3f} -> {fmean(now):.3f}) and the held-out score does "
            f"not ({before:.3f} -> {later[-1][1]:.3f} over {count} validations)"
        )

    # ------------------------------------------------------------- windows

    def _first_mean(self, name: str) -> float | None:
        return _complete_mean(_measure(it, name) for it in self._steps[: self.thresholds.window])

    def _recent_mean(self, name: str) -> float | None:
        return _complete_mean(_measure(it, name) for it in self._steps[-self.thresholds.window :])

    def _rewards(self, begin: int, end: int | None) -> list[float]:
        return [reward for it in self._steps[begin:end] for reward in it.rollouts.all_rewards]


def _measure(record: StepRecord, name: str) -> float | None:
    """A step's figure by its name: the trainer's metrics, and those below. None or NaN: not measured."""
    rollouts, counts, metrics = record.rollouts, record.status.counts, record.status.metrics
    match name:
        case "flat_groups":
            return _share(counts.groups_without_variance, counts.groups)
        case "length":
            return rollouts.length
        case "repetition":
            return rollouts.repetition
        case "reward_length":
            return rollouts.reward_length
        case "reward_repetition":
            return rollouts.reward_repetition
        case "truncation":
            return rollouts.cut_off_rate
        case "outside":
            return _share(rollouts.outcomes.get("outside", 0), sum(rollouts.outcomes.values()))
        case "masked":
            return _share(metrics.get("masked_tokens"), metrics.get("trained_tokens"))
        case "masked_answers":
            return _share(metrics.get("masked_sequences"), counts.trained)
    return metrics.get(name)


def staleness_buckets(metrics: Mapping[str, float]) -> dict[int, StalenessBucket]:
    """A step's metrics by staleness in steps; an older runtime does not send them."""
    found: dict[int, StalenessBucket] = {}
    for lag in (int(it[1]) for it in map(_LAG.fullmatch, metrics) if it):
        names = ("trained_tokens", "clip_fraction", "masked_tokens", "kl_behaviour")
        values = [metrics.get(f"lag{lag}/{name}") for name in names]
        if None not in values:
            tokens, clipped, masked, kl = (it for it in values if it is not None)
            found[lag] = StalenessBucket(tokens, clipped * tokens + masked, kl * tokens)
    return found


def repeated_share(text: str) -> float:
    """The share of a text's four-word sequences that came before in it: 0 for a short or a fresh text."""
    words = text.split()
    sequences = [tuple(words[i : i + _NGRAM]) for i in range(len(words) - _NGRAM + 1)]
    return 1 - len(set(sequences)) / len(sequences) if sequences else 0.0


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _age(lag: int) -> str:
    return f"{lag} step" if lag == 1 else f"{lag} steps"


def _values_of_newer(lag: int, each: Mapping[int, float], form: str) -> str:
    """The values of fresher tokens, the stalest first: ` (1 step: 11%, 0 steps: 0%)`."""
    found = [f"{_age(it)}: {value:{form}}" for it, value in each.items() if it < lag]
    return f" ({', '.join(found)})" if found else ""


def _complete_mean(values: Iterable[float | None]) -> float | None:
    """None unless every one of them was measured."""
    found = list(values)
    if not found or any(it is None or not math.isfinite(it) for it in found):
        return None
    return fmean(it for it in found if it is not None)
