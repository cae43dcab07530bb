"""A program behind `--` that could not run, or whose folder hides a package of ours, is refused first."""

# ruff: noqa: E501 - tables: a line is a case
from __future__ import annotations

import pytest

from tests.support.refusals import Place, Refused, check, place

__all__ = ["place"]

pytestmark = pytest.mark.process

PROGRAMS = [
    Refused("--", 2, "no program after --", "the program to run goes after --", "launch -- python my.py"),
    Refused("-- no-such-program", 3, "cannot run no-such-program", "no such program on PATH", "which no-such"),
    Refused("-- ./none", 3, "cannot run ./none", "no such file", "ls ."),
    Refused("-- lib", 3, "cannot run lib", "it is a folder", "ls lib",
            done=lambda place: place.write("lib/x.py", "")),
    Refused("-- x.py --steps 3", 3, "cannot run x.py", "in this folder, but not on PATH",
            "launch -- python x.py --steps 3", done=lambda place: place.write("x.py", "")),
    Refused("-- ./x.py", 3, "cannot run ./x.py", "is not executable", "launch -- python ./x.py",
            done=lambda place: place.write("x.py", "")),
    Refused("-- ./x.sh", 3, "cannot run ./x.sh", "is not executable", "chmod +x ./x.sh",
            done=lambda place: place.write("x.sh", "#!/bin/sh\n")),
    Refused("-- ./x", 3, "cannot run ./x", "names /no/perl, which does not exist", "head -1",
            done=lambda place: place.write("x", "#!/no/perl -w\n", 0o700)),
    Refused("-- python3 train.py", 3, "cannot run train.py", "no such file in", "ls *.py"),
    Refused("python x.py --steps 3", 2, "python is not a verb", "after --", "launch -- python x.py --steps 3"),
]  # fmt: skip


@pytest.mark.parametrize("refused", PROGRAMS, ids=str)
def test_a_program_that_cannot_run_is_found_first(refused: Refused, place: Place) -> None:
    check(refused, place)


def test_an_empty_word_is_no_program(place: Place) -> None:
    done = place.typed("--", "")
    assert done.returncode == 3
    assert done.stderr.splitlines()[0] == "Error: cannot run an empty command"


@pytest.mark.parametrize("form", ["runtime.py", "runtime/__init__.py", "launcher.py", "launcher/__init__.py"])
@pytest.mark.parametrize("options", ["", "--gpus H100:4 --infra aws --yes "])
def test_g11_a_program_beside_a_name_that_hides_ours_is_refused_first(
    form: str, options: str, place: Place
) -> None:
    place.write("my.py", "")
    place.write(form, "")
    name = form.partition("/")[0]
    hides = f"{place.folder}/{name} hides the package {name.removesuffix('.py')} that comes with launch"
    check(
        Refused(
            f"{options}-- python3 my.py",
            3,
            hides,
            "Python looks in the program's folder first",
            f"mv {place.folder}/{name}",
        ),
        place,
    )
