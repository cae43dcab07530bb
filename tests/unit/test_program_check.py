"""Before anything is served: a program whose Python cannot read it, or has not what it imports, is refused.

Each way to start a program is asked for as it is typed (launcher/config/program_check.py); what is not
certain to fail is never refused. The Pythons are real ones.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from launcher.base.errors import PreflightError
from launcher.base.home import Home
from launcher.config import import_probe, program_check
from launcher.records.records import RecordStore
from launcher.teardown import program_log
from tests.support.refusals import Place, Refused, check, place

__all__ = ["place"]

pytestmark = pytest.mark.process

# A loaded computer may take its time here; what is given up in time is `test_..._in_time`'s.
_PATIENT_SECONDS = 120.0
_MISSING = "import no_such_module_here\n"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_check, "BOUND_SECONDS", _PATIENT_SECONDS)


@pytest.fixture
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with nothing installed: the wrong one."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def _said(folder: Path, typed: str, **environ: str) -> str | None:
    return program_check.check(shlex.split(typed), folder, {**os.environ, **environ})


def _put(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o700)


def test_n04_a_missing_module_is_refused_before_anything_starts(place: Place) -> None:
    place.write("my.py", f"import os\nimport dspy\n\n{_MISSING}")
    check(
        Refused(
            f"-- {sys.executable} -u my.py --steps 3",
            3,
            "cannot run my.py",
            "line 4 imports no_such_module_here, which",
            f"{sys.executable} -c 'import no_such_module_here'",
        ),
        place,
    )


@pytest.mark.parametrize("options", ["", "--gpus H100:4 --infra aws --yes "])
def test_n04_a_syntax_error_is_refused_before_anything_starts(options: str, place: Place) -> None:
    place.write("my.py", "import os\n\ndef broken(:\n    pass\n")
    check(
        Refused(
            f"{options}-- {sys.executable} my.py",
            3,
            "cannot run my.py",
            "line 3 is no Python to",
            f"{sys.executable} -m py_compile my.py",
        ),
        place,
    )


def test_n04_the_wrong_python_is_refused_and_the_right_one_named(tmp_path: Path, bare: Path) -> None:
    _put(tmp_path, "my.py", '"""A program."""\n\nimport os\n\nimport dspy\n')
    with pytest.raises(PreflightError) as refused:
        _said(tmp_path, f"{bare} my.py")
    assert refused.value.why is not None and "line 5 imports dspy" in refused.value.why
    assert refused.value.hint is not None and refused.value.hint.startswith(
        f"{sys.executable} -c 'import dspy'"
    )
    assert _said(tmp_path, f"{sys.executable} my.py") is None
    _put(tmp_path, "modern.py", "x = 1\nasync def f():\n    return [await one for one in x]\n")
    assert _said(tmp_path, f"{bare} modern.py") is None


# Each would fail, or not, in a way that cannot be known: what is typed, and the files.
WAYS = {
    "a module": ("{python} -m my", {"my.py": _MISSING}),
    "code": ("{python} -c 'import no_such_module_here'", {}),
    "its standard input": ("{python} -", {}),
    "uv run": ("uv run python my.py", {"my.py": _MISSING}),
    "uv run with a package": ("uv run --with no-such-module-here my.py", {"my.py": _MISSING}),
    "its own packages (PEP 723)": (
        "uv run --script my.py", {"my.py": f'# /// script\n# dependencies = ["x"]\n# ///\n{_MISSING}'},
    ),
    "poetry run": ("poetry run python my.py", {"my.py": _MISSING}),
    "env": ("env A=1 {python} my.py", {"my.py": _MISSING}),
    "a shell's script": ("bash x.sh", {"x.sh": "python my.py\n", "my.py": _MISSING}),
    "a shell's line": ("bash -c 'python my.py'", {"my.py": _MISSING}),
    "a notebook": ("jupyter nbconvert --execute my.ipynb", {"my.ipynb": "{}"}),
    "its first line": ("./my.py", {"my.py": f"#!/usr/bin/env python3\n{_MISSING}"}),
    "a folder": ("{python} app", {"app/__main__.py": _MISSING}),
    "a file without an end": ("{python} my", {"my": _MISSING}),
    "options that are not known": ("{python} -x my.py", {"my.py": f"no python\n{_MISSING}"}),
    "a script in a Python's place": ("./python my.py", {"python": "#!/bin/sh\nexit 0\n", "my.py": _MISSING}),
    "no Python at all": ("accelerate launch my.py", {"my.py": _MISSING}),
    "a guarded import": ("{python} my.py", {"my.py": f"try:\n    {_MISSING}except ImportError:\n    pass\n"}),
    "for type checkers": (
        "{python} my.py", {"my.py": f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {_MISSING}"},
    ),
    "in a function": ("{python} my.py", {"my.py": f"def later():\n    {_MISSING}"}),
    "under a condition": ("{python} my.py", {"my.py": f'if __name__ == "x":\n    {_MISSING}'}),
    "a module beside it": ("{python} my.py", {"my.py": "import beside\n", "beside.py": _MISSING}),
    "a folder beside it": ("{python} my.py", {"my.py": "import data\n", "data/x.txt": ""}),
    "one of another folder": ("{python} sub/my.py", {"sub/my.py": "import beside\n", "sub/beside.py": ""}),
}  # fmt: skip

# What may change where a module is found, or put it there, in the lines before its import.
TRICKS = {
    "a path that is changed": "import sys\nsys.path.insert(0, 'lib')\n",
    "a path under another name": "from sys import path\npath[:0] = ['lib']\n",
    "a site's folder": "import site\nsite.addsitedir('lib')\n",
    "a finder": "import importlib\nimportlib.import_module('hook')\n",
    "what installs it": "import subprocess\nsubprocess.run(['pip'])\n",
    "a path by another module": "import logging\nlogging.sys.path.append('lib')\n",
    "a finder by another module": "import logging\nlogging.os.sys.meta_path.clear()\n",
    "another program in its place": "import os\nif 'A' not in os.environ:\n    os.execv('x', ['x'])\n",
}
WAYS |= {name: ("{python} my.py", {"my.py": text + _MISSING}) for name, text in TRICKS.items()}


@pytest.mark.parametrize("way", WAYS)
def test_n04_what_is_not_certain_is_never_refused_and_nothing_is_said(way: str, tmp_path: Path) -> None:
    typed, files = WAYS[way]
    for name, text in files.items():
        _put(tmp_path, name, text)
    assert _said(tmp_path, typed.format(python=sys.executable)) is None


# The import may be supplied by what runs before it: a line is said, and the run goes on.
DOUBTS = {
    "a module of one's own": f"import beside\n{_MISSING}",
    "a package that nobody has looked at": f"import pytest\n{_MISSING}",
    "a call": f"import os\nos.environ['A'] = '1'\nprint(make())\n{_MISSING}",
    "an end before it": f"import sys\nif len(sys.argv) < 2:\n    raise SystemExit\n{_MISSING}",
    "a call by a known name": f"def print(text):\n    make(text)\nprint('x')\n{_MISSING}",
    "another thing by a known name": f"str = print\nstr('x')\n{_MISSING}",
    "a decorator": f"@wrapped\ndef f(): ...\n{_MISSING}",
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_n04_what_may_be_supplied_is_a_line_and_no_refusal(doubt: str, tmp_path: Path) -> None:
    _put(tmp_path, "beside.py", "")
    _put(tmp_path, "my.py", DOUBTS[doubt])
    said = _said(tmp_path, f"{sys.executable} my.py")
    assert said is not None and "my.py imports no_such_module_here in line" in said


def test_n04_an_archive_is_run_whatever_its_name_ends_with(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "my.py", "w") as archive:
        archive.writestr("__main__.py", _MISSING)
    assert _said(tmp_path, f"{sys.executable} my.py") is None


def test_n04_where_modules_are_found_is_as_the_program_will_find_them(tmp_path: Path) -> None:
    _put(tmp_path, "my.py", "import os\nimport elsewhere\n")
    _put(tmp_path, "lib/elsewhere.py", "raise SystemError('executed')\n")
    assert _said(tmp_path, f"{sys.executable} my.py", PYTHONPATH="lib") is None
    for typed in ("my.py", "-E my.py"):
        with pytest.raises(PreflightError):
            _said(tmp_path, f"{sys.executable} {typed}", **({"PYTHONPATH": "lib"} if "-E" in typed else {}))
    _put(tmp_path, "arbors.py", "import arbor\nimport no_such_module_here\n")
    with pytest.raises(PreflightError) as refused:
        program_check.check([sys.executable, "arbors.py"], tmp_path, os.environ, arbor=True)
    assert "no_such_module_here" in str(refused.value.why)


def test_s08_peft_is_not_missed_where_arbor_supplies_it(tmp_path: Path) -> None:
    _put(tmp_path, "my.py", "import arbor\nfrom peft import LoraConfig\n")
    _put(tmp_path, "late.py", "from peft import LoraConfig\nimport arbor\n")
    assert program_check.check([sys.executable, "my.py"], tmp_path, os.environ, arbor=True) is None
    with pytest.raises(PreflightError, match=r"cannot run late\.py"):
        program_check.check([sys.executable, "late.py"], tmp_path, os.environ, arbor=True)


def test_n04_nothing_of_the_program_or_beside_it_is_executed(tmp_path: Path) -> None:
    trap = "open('executed', 'w').close()\n"
    for name in ("ast", "os", "re", "enum", "sys", "mine", "sitecustomize"):
        _put(tmp_path, f"{name}.py", trap)
    _put(tmp_path, "my.py", f"{trap}import mine.part\nimport ast, re\n")
    before = {path.name for path in tmp_path.iterdir()}
    assert _said(tmp_path, f"{sys.executable} my.py") is None
    assert {path.name for path in tmp_path.iterdir()} == before


def test_n04_a_python_that_does_not_answer_in_time_is_asked_no_more(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.mkdir()
    _put(slow, "sitecustomize.py", "import time\ntime.sleep(600)\n")
    _put(tmp_path, "my.py", _MISSING)
    environ = {**os.environ, "PYTHONPATH": str(slow)}
    assert program_check.check([sys.executable, "my.py"], tmp_path, environ, bound_seconds=0.3) is None


def test_n04_a_package_that_supplies_nothing_adds_no_path_and_no_finder_of_other_names() -> None:
    code = (
        "import importlib, sys\nfound = []\n"
        "for name in sys.argv[1:]:\n"
        "    path, hooks = sys.path[:], len(sys.path_hooks)\n"
        "    try: importlib.import_module(name)\n"
        "    except ImportError: continue\n"
        "    found.append(name)\n"
        "    assert sys.path == path and len(sys.path_hooks) == hooks, name\n"
        "made = [one for one in sys.meta_path if one.__class__ is not type]\n"
        "assert not [one for one in made if one.find_spec('no_such', None)]\n"
        "print(*found)\n"
    )
    names = sorted(import_probe.WITHOUT_FINDERS)
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"dspy", "openai", "numpy", "launcher"} <= set(done.stdout.split())


def test_n04_logs_of_a_run_whose_program_failed_are_the_programs(place: Place) -> None:
    store = RecordStore(Home.find({"LAUNCH_HOME": str(place.home)}))
    for name, code, said in (("failed", 1, "NameError: x"), ("good", 0, "fine"), ("silent", 1, "")):
        record = store.create(name=name, command=("python", "my.py"))
        folder = store.folder(record.id)
        (folder / "launch.log").write_text("the story\n")
        (folder / program_log.FILE).write_text(said)
        store.update(record.id, state="verified", exit_code=code)
    shown = {name: place.typed("logs", name).stdout for name in ("failed", "good", "silent")}
    assert shown == {"failed": "NameError: x", "good": "the story\n", "silent": "the story\n"}
    assert place.typed("logs", "failed", "--which", "launch").stdout == "the story\n"
