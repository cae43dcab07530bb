"""`launch bench --against trl`: both sides run one after the other, seed by seed, and compared.

Neighbours: `cli/bench_verb.py` calls, `our_side.py` and `trl_side.py` run, `side_by_side.py` judges,
`bench_report.py` shows. All that can be known to fail is asked before anything runs.
"""

from __future__ import annotations

from functools import partial

from launcher.base.home import Home
from launcher.bench import our_side, this_computer, trl_environment, trl_side
from launcher.bench.bench_report import Compared
from launcher.bench.ready import our_environment, refuse_what_cannot_run
from launcher.bench.runs import Side, looked_after, most_seconds, new_folder
from launcher.bench.shape import Shape
from launcher.bench.side_by_side import Pair
from launcher.models import model_folder
from launcher.screen.output import Output

OPPONENTS = ("trl",)


def against_trl(shape: Shape, output: Output, home: Home) -> Compared:
    """Both sides with each seed, which of them first by turns. Raises PreflightError and JobFailed."""
    refuse_what_cannot_run(home)
    trl_environment.check(home)
    our_environment(home, output)
    with output.busy("building TRL's environment", "once") as progress:
        python = trl_environment.python_of(home, progress)
    folder = new_folder(home)
    model, most = model_folder.tiny_folder(), most_seconds(shape)
    found = Compared(shape, this_computer.described(), str(folder))
    for number in range(shape.seeds):
        task = shape.task(number, model)
        sides: dict[str, Side] = {
            our_side.NAME: partial(our_side.run, task, home, most),
            trl_side.NAME: partial(trl_side.run, task, python, most),
        }
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        runs = {side: looked_after(side, number, shape, sides[side], folder, output) for side in order}
        found.runs += runs.values()
        found.pairs.append(Pair.of(runs[our_side.NAME], runs[trl_side.NAME], shape.first_step))
    return found
