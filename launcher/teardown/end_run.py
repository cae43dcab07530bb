"""The order in which a run ends, whoever ends it: results home, everything down, proof, record.

Neighbours: `ending.py` of the run's own launch, `guardian.py` when that launch is dead, and `take_down.py`
for `launch down`, `gc` and `--resume` each bring an `EndPolicy`: how long results are waited for, and whether
an error is shown, logged or raised. Knows nothing of machines, records and the terminal.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from launcher.records.teardown_lock import LockHandle
from launcher.types.machine import Proof

COPYING_RESULTS = "copying results"
Result = TypeVar("Result", covariant=True)


class EndPolicy(Protocol[Result]):
    """What one way to end a run does at each step."""

    def bring_home(self, lock: LockHandle) -> None:
        """Copy the results; it remembers why they did not come. Raises to keep the machine for them."""

    def ended_by_another(self) -> Result | None:
        """The result, if another process has ended the run: its machine may be that of a next life by now.
        Raises to say that it is."""

    def take_down(self) -> Proof:
        """Close the endpoint, so that no lease is renewed, no request sent and no token kept. Then end
        machine and program. The proof, or the lack of one: it raises no Exception."""
        ...

    def write_record(self, proof: Proof) -> Result:
        """Record the end."""
        ...


def end_run(lock: LockHandle, policy: EndPolicy[Result]) -> Result:
    """End a run; its teardown lock is held, or could not be had. What `bring_home` raises keeps the machine.

    A process that stands still while it copies loses its turn, and has nothing to end when it goes on."""
    lock.report(COPYING_RESULTS)
    policy.bring_home(lock)
    if (ended := policy.ended_by_another()) is not None:
        return ended
    lock.report("down")
    proof = policy.take_down()
    lock.report("saving the record")
    return policy.write_record(proof)
