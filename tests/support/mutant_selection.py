"""Which mutants a normal run runs: the changed ones, and a third of the others that moves with the commits.

Changed is what the log of the last full run does not have as it is now (`mutant_digest.py`, `mutant_log.py`).
The third is chosen by HEAD: the commit's id, as a number, modulo three, is the place of the one that runs
among every three mutants in name order. Without a commit all run. Every process with the same tree chooses
the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.support.environment import REPOSITORY
from tests.support.mutant_digest import Digests
from tests.support.mutant_log import Log, commit
from tests.support.mutants import PATCHES, Mutant

THIRDS = 3


@dataclass(frozen=True)
class Selection:
    """All mutants there are, by why they run or do not; `since`: when the last full run began."""

    changed: tuple[Mutant, ...]
    turn: tuple[Mutant, ...]
    left_out: tuple[Mutant, ...]
    since: str | None

    @property
    def chosen(self) -> list[Mutant]:
        """Those that run, in name order."""
        return sorted(self.changed + self.turn, key=lambda mutant: mutant.name)

    def line(self) -> str:
        """What a run says of it."""
        known = f"the full run of {self.since}" if self.since else "any full run"
        said = f"mutations: {len(self.changed)} changed since {known}, {len(self.turn)} have their turn"
        if not self.left_out:
            return f"{said}, none is left out"
        names = " ".join(mutant.name for mutant in self.left_out)
        return f"{said}; {len(self.left_out)} unchanged are left out (`pytest -m long {PATCHES}`): {names}"


def select() -> Selection:
    """For this tree as it is now."""
    mutants, digests = Mutant.all(), Digests(REPOSITORY)
    run, caught = Log().read()
    seen = {name: line.digest for name, line in caught.items()}
    now = {mutant.name: digests.of(mutant) for mutant in mutants}
    return choose(mutants, now, seen, commit(), since=run.begun if run else None)


def choose(
    mutants: Sequence[Mutant],
    now: Mapping[str, str],
    seen: Mapping[str, str],
    commit: str | None,
    since: str | None = None,
) -> Selection:
    """By their digests now and in the log, and the commit."""
    changed, turn, left_out = [], [], []
    for place, mutant in enumerate(sorted(mutants, key=lambda mutant: mutant.name)):
        if seen.get(mutant.name) != now[mutant.name]:
            changed.append(mutant)
        elif commit is None or place % THIRDS == int(commit, 16) % THIRDS:
            turn.append(mutant)
        else:
            left_out.append(mutant)
    return Selection(tuple(changed), tuple(turn), tuple(left_out), since)
