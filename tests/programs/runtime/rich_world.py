"""A run for DSPy programs, its engine scripted: `rich_world.py FOLDER`. Says its socket; ends with stdin.

A line on stdin is why each step from now on fails; an empty one: they do so no longer.
It answers in ChatAdapter's form, by the fields that a question's system message asks for: lists, booleans and
nested values, sometimes after words of its own or thoughts, and sometimes in no form at all, but for what is
held out.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

from tests.runtime.gateway_run import GatewayRun

_FIELD = re.compile(r"^\d+\. `(\w+)` \(([^\n]+?)\):", re.MULTILINE)
_counter = itertools.count()
_FORMLESS = 0.1


def says(messages: list[dict[str, Any]]) -> str:
    """Another answer each time."""
    number = next(_counter)
    chosen = random.Random(number)
    if chosen.random() < _FORMLESS and "held out" not in messages[-1]["content"]:
        return f"I would rather not say, for the {number}th time."
    outputs = messages[0]["content"].partition("Your output fields are:")[2].partition("All interactions")[0]
    fields = "".join(
        f"[[ ## {name} ## ]]\n{_value(kind, number, chosen)}\n\n" for name, kind in _FIELD.findall(outputs)
    )
    before = chosen.choice(["", "", "Sure! Here it is:\n\n", "<think>\nLet me see: [1] first.\n</think>\n\n"])
    return before + fields + "[[ ## completed ## ]]"


def _value(kind: str, number: int, chosen: random.Random) -> str:
    if kind == "bool":
        return chosen.choice(["True", "False", "true", "false"])
    if kind == "list[str]":
        items = [f"query {number}", 'with "quotes", commas', "<b>tag</b> & more"][: chosen.randrange(1, 4)]
        return json.dumps(items, indent=chosen.choice([None, 2]), ensure_ascii=chosen.random() < 0.5)
    if kind == "list[Fact]":
        fact = {
            "title": f"t{number}",
            "tags": ["a", "b c"],
            "certain": True,
            "numbers": {"one": 1.0, "half": 0.5},
        }
        return json.dumps([fact] * chosen.randrange(0, 3))
    return chosen.choice(
        [f"Answer {number}.", f"  spaced {number}: ünïcode\n\ntwo paragraphs <x>", f"- {number}"]
    )


def main(folder: str) -> None:
    run = GatewayRun(Path(folder))
    run.engine.says = says
    print(run.gateway.socket, flush=True)
    for line in sys.stdin:
        run.trainer.fails = line.strip() or None
        print("so be it", flush=True)
    run.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
