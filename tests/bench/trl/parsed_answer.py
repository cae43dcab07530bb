"""An answer of the other trainer's, read as DSPy reads ours, and what it earns: a test holds the two alike.

Neighbours: `trl_program.py` rewards with it. Standard library only, but for `scored_answer.py` of our side's
programs: the other trainer's environment has nothing of `launcher`.
"""

from __future__ import annotations

import re

from scored_answer import letters

# An answer without its field, or cut off at its length limit. As `GRPO` has it where nobody says otherwise.
FORMAT_FAILURE = -1.0
_HEADER = re.compile(r"\[\[ ## (\w+) ## \]\]")


def french_of(answer: str) -> str | None:
    """The field `french` as DSPy's ChatAdapter reads it, None where it finds none."""
    fields: dict[str, list[str]] = {}
    name = ""
    for line in answer.splitlines():
        header = _HEADER.match(line.strip())
        if header is None:
            fields.setdefault(name, []).append(line)
            continue
        # Of a field that comes twice the first is read. What follows the header on its line belongs to it; of
        # an indented line DSPy cuts too little off, and so does this.
        name = header.group(1) if header.group(1) not in fields else ""
        fields.setdefault(name, []).append(line[header.end() :].strip())
    return "\n".join(fields["french"]).strip() if "french" in fields else None


def reward(answer: str, cut_off: bool) -> float:
    """What an answer earns in training."""
    french = french_of(answer)
    return FORMAT_FAILURE if cut_off or french is None else float(letters(french))
