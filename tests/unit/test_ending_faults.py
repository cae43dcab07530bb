"""launcher/run/ending.py: each call of the machine, the record and the token × each error × each phase.

Which calls there are is asked of the Machine protocol and of RecordStore; where each is made is written down
below, and compared with whole lives. So a call that is added later, or is made in another phase, fails here
until it is in the table, and raises by then.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from launcher.base.errors import JobFailed, LaunchError
from launcher.base.home import Home
from launcher.records.records import RecordStore
from tests.support.environment import REPOSITORY
from tests.support.pretend_calls import NAMES, OF_THEIR_OWN, PHASES, Fault, Place, calls_of, machine_calls
from tests.support.pretend_life import PretendLife, Seen

pytestmark = pytest.mark.process

# Exit codes in the words of examples/guides/troubleshooting.md.
OK, BUG, NOT_HERE, UNPROVEN, FAILED, LEFT_THERE = 0, 1, 3, 5, 6, 8
WORDS = {
    OK: "ok",
    BUG: "a bug",
    NOT_HERE: "not possible here",
    UNPROVEN: "not proven to be down",
    FAILED: "the program failed",
    LEFT_THERE: "results not home",
}
# What each kind of error comes to, where it is what ended the run.
ERRORS: dict[str, tuple[Callable[[], Exception], int]] = {
    "OSError": (lambda: OSError(28, "No space left on device", "somewhere"), NOT_HERE),
    "RuntimeError": (lambda: RuntimeError("a library's own"), BUG),
    "LaunchError": (lambda: LaunchError("it cannot be done", "nobody knows"), BUG),
}

# Where each call is made: all that a life of the first kind makes, then what those of another kind make too.
MADE: dict[str, dict[str, str]] = {
    "plain": {
        "created": "machine_from_plan.make record.create record.check_name record.list record.update "
        "machine.describe",
        "arm": "record.update machine.kind machine.arm machine.price_per_hour machine.describe",
        "push": "record.update machine.kind machine.push",
        "setup": "record.update machine.kind machine.setup",
        "serve": "record.update machine.kind machine.device_type machine.state_dir machine.socket_dir "
        "machine.serve",
        "connect": "record.update machine.kind token.keep machine.make_durable",
        "work": "record.update machine.make_durable record.load",
        "pull": "record.update machine.kind machine.close_wandb machine.pull record.load",
        "down": "record.update machine.kind machine.down machine.proof token.drop",
        "writing": "record.update machine.price_per_hour machine.committed machine.unarmed_seconds",
    },
    "rewound": {
        "created": "record.reopen record.list record.update token.drop",
        "push": "machine.upload_checkpoints",
    },
    "troubled": {
        "connect": "machine.ended machine.committed",
        "work": "machine.ended machine.committed",
        "pull": "machine.ephemeral machine.price_per_hour record.load",
    },
}
# What a life comes to in which nothing raises but what its trouble is.
COMES_TO = {"plain": OK, "rewound": OK, "troubled": LEFT_THERE}
# No run's own launch makes these: a guardian finds its record's store, verbs that look show what is broken.
NOBODYS = frozenset({"of_record", "unreadable"})
# A new record's, before there is one.
FIRST_OF_ALL = frozenset({"record.create", "record.check_name", "record.list"})
# Made beside the run, by a thread of its own or at its end.
BESIDE = frozenset({"machine.make_durable", "machine.committed", "record.load"})
WAY_UP = PHASES[: PHASES.index("pull")]


def places(life: str) -> set[Place]:
    """Where calls are made, by the table."""
    return {(phase, call) for phase, calls in MADE[life].items() for call in calls.split()}


def with_errors(cases: Iterable[tuple[str, ...]]) -> list[Any]:
    """Each case with each kind of error. Fast is each with one of them, in turn; the others are slow."""
    return [
        pytest.param(*case, error, marks=() if turn == number % len(ERRORS) else pytest.mark.slow)
        for number, case in enumerate(cases)
        for turn, error in enumerate(ERRORS)
    ]


def after(phase: str, other: str) -> bool:
    return PHASES.index(phase) > PHASES.index(other)


# ----------------------------------------------------------------- the table


def test_g27_every_call_of_a_machine_and_of_the_record_is_made_to_raise() -> None:
    calls = {f"machine.{name}" for name in machine_calls()}
    calls |= {f"record.{name}" for name in calls_of(RecordStore) - NAMES - NOBODYS}
    assert {call for life in MADE for _, call in places(life)} == calls | {
        "token.keep",
        "token.drop",
        "machine_from_plan.make",
    }


@pytest.mark.parametrize("life", MADE)
def test_g27_each_call_is_made_where_it_is_made_to_raise(tmp_path: Path, life: str) -> None:
    seen = PretendLife(tmp_path)(life, until={place for place in places(life) if place[1] in OF_THEIR_OWN})
    assert seen.code == COMES_TO[life], seen.stderr
    assert places(life) <= set(seen.made) <= places(life) | places("plain")


def test_where_a_run_is_kept_is_known_without_asking_anybody(tmp_path: Path) -> None:
    home = Home(tmp_path / "no folder", tmp_path, tmp_path)
    home.data.touch()
    store = RecordStore(home)
    assert [getattr(store, name)("slip-0") for name in sorted(NAMES)] == [
        home.runs / "slip-0",
        home.runs / "slip-0" / "record.json",
    ]


def test_the_exit_codes_here_are_the_guides() -> None:
    text = (REPOSITORY / "examples" / "guides" / "troubleshooting.md").read_text()
    codes = {int(code): words for code, words in re.findall(r"\| (\d+) \| ([^|]+?) (?=\|)", text)}
    assert {code: codes[code] for code in WORDS} == WORDS


# ----------------------------------------------------------------- one call


@pytest.mark.parametrize(
    ("life", "phase", "call", "error"),
    with_errors((life, *place) for life in MADE for place in sorted(places(life))),
)
def test_g27_a_call_that_raises_skips_nothing_of_the_end(
    tmp_path: Path, life: str, phase: str, call: str, error: str
) -> None:
    make, code = ERRORS[error]
    seen = PretendLife(tmp_path)(life, Fault(call, (phase,), make))
    assert seen.struck, "the call was made"
    if phase == "created" and (life == "rewound" or call in FIRST_OF_ALL):
        return nothing_begun(seen, code, life)
    if call == "machine_from_plan.make":
        return ended_without_a_machine(seen, code)
    ended_it = phase in WAY_UP and call not in BESIDE
    written = (phase, call) != ("writing", "record.update")
    if written and not ended_it:
        code = {"machine.proof": UNPROVEN, "machine.pull": LEFT_THERE}.get(call, COMES_TO[life])
    served = phase == "serve" and call not in ("record.update", "machine.kind")
    with_results = served or after(phase, "serve")
    ended(seen, code, with_results=with_results, proven=call != "machine.proof", written=written)
    assert (seen.folder / "token").exists() == (call == "token.drop")
    if written:
        assert seen.record is not None
        assert (seen.record.unpulled is not None) == (call == "machine.pull" or life == "troubled")
        assert seen.record.exit_code == (None if ended_it else 0), "the program did what it should"
    if not ended_it and (phase not in WAY_UP or call == "record.load"):
        assert troubles(seen) or seen.end["unpulled"] or code == UNPROVEN, "it is said"
    if phase == "pull" and (call == "machine.pull" or (life, call) == ("troubled", "record.load")):
        assert seen.asked.count("pull") == 2, "the machine was kept for its results"
    return None


@pytest.mark.parametrize(
    ("phase", "error"), with_errors((phase,) for phase in PHASES[: PHASES.index("work")])
)
def test_g27_a_record_that_cannot_be_read_at_an_early_end_changes_nothing_of_it(
    tmp_path: Path, phase: str, error: str
) -> None:
    """Read by nobody on the way up; after another failure, to see whether somebody has ended the run."""
    first = Fault(
        "machine.describe" if phase == "created" else "machine.kind", (phase,), lambda: JobFailed("it failed")
    )
    seen = PretendLife(tmp_path)("plain", first, Fault("record.load", (phase,), ERRORS[error][0]))
    # It looks before the copy and after it, which is in another phase where there is something to copy.
    assert seen.struck == (2 if after(phase, "serve") else 3)
    ended(seen, FAILED, with_results=after(phase, "serve"))
    assert troubles(seen) and seen.end["reason"] == "it failed"


# ----------------------------------------------------------------- all of them, from some phase on


@pytest.mark.parametrize(
    ("what", "phase", "error"), with_errors(itertools.product(["machine.*", "record.*", "*"], PHASES))
)
def test_g27_whatever_raises_from_some_phase_on_the_end_is_total(
    tmp_path: Path, what: str, phase: str, error: str
) -> None:
    make, code = ERRORS[error]
    at = PHASES.index(phase)
    seen = PretendLife(tmp_path)("plain", Fault(what, PHASES[at:], make))
    assert seen.struck
    written = what == "machine.*"
    if phase == "created" and not written:
        return nothing_begun(seen, code, "plain")
    proven = what == "record.*" or phase == "writing"
    if not proven:
        code = UNPROVEN
    elif written:
        code = OK
    ended(seen, code, with_results=after(phase, "serve"), proven=proven, written=written)
    if not written:
        assert seen.record is not None
        assert seen.record.state == PHASES[at - 1], "the last that could be written"
    return None


# ----------------------------------------------------------------- the guardian's end


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    "call",
    ["machine.ephemeral", "machine.pull", "machine.down", "machine.proof", "record.update", "token.drop"],
)
def test_g27_a_call_that_raises_skips_nothing_of_the_guardians_end(
    tmp_path: Path, call: str, error: str
) -> None:
    seen = PretendLife(tmp_path).left_to_its_guardian(Fault(call, PHASES, ERRORS[error][0]))
    assert seen.struck
    assert seen.asked[-2:] == ["down", "proof"]
    assert ("pull" in seen.asked) == (call != "machine.ephemeral")
    record = seen.record
    assert record is not None
    if call == "record.update":
        assert record.live and record.state == "work"
        return
    proven = call != "machine.proof"
    assert seen.code == (0 if proven else 1)
    assert (record.state, record.ended_by) == ("verified" if proven else "unverified", "guardian")
    assert (record.unpulled is not None) == (call in ("machine.ephemeral", "machine.pull"))


# ----------------------------------------------------------------- what every end promises


def nothing_begun(seen: Seen, code: int, life: str) -> None:
    """Nothing was made, so nothing is to end; and no record says otherwise."""
    assert seen.code == code, seen.stderr
    assert not seen.begun and seen.asked == [] and seen.guardian is None
    if life == "plain":
        assert seen.record is None
    else:
        assert seen.record is not None
        assert (seen.record.state, seen.record.ended_by, seen.record.earlier_lives) == (
            "verified",
            "launch",
            (),
        )


def ended_without_a_machine(seen: Seen, code: int) -> None:
    assert seen.code == code and seen.asked == [] and seen.guardian is None
    assert seen.record is not None and seen.record.state == "verified" and seen.record.reason
    assert seen.end["exit_code"] == code and seen.end["down"]["detail"] == "nothing was started"


def ended(seen: Seen, code: int, *, with_results: bool, proven: bool = True, written: bool = True) -> None:
    """Results tried, down asked, the proof looked for, the exit code by the table, and a record that is true:
    what is not `proven` or could not be `written` is live, and its guardian was not let go."""
    assert seen.begun and seen.code == code, seen.stderr
    assert ("pull" in seen.asked) == with_results, seen.asked
    assert seen.asked[-2:] == ["down", "proof"], seen.asked
    assert (seen.end["event"], seen.end["exit_code"]) == ("end", code)
    assert seen.end["down"]["verified"] == proven
    assert seen.guardian is None or seen.guardian.let_go == (proven and written)
    record = seen.record
    assert record is not None and record.live == (not (proven and written))
    if not written:
        assert record.ended_by is None and record.proof is None
        return
    assert (record.state, record.ended_by) == ("verified" if proven else "unverified", "launch")
    assert record.proof is not None and record.proof["verified"] == proven
    assert bool(record.reason) == bool(code)
    assert record.reason == seen.end["reason"]


def troubles(seen: Seen) -> list[str]:
    """What went wrong at the end besides, by the last object of `--json`."""
    return seen.end["troubles"]
