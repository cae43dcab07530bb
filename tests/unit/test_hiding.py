"""import_shadowing.py: files beside a program that would be imported in the place of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.base.errors import PreflightError
from launcher.config import import_shadowing
from tests.support.environment import REPOSITORY

pytestmark = pytest.mark.process


def _put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")


FORMS = ["runtime.py", "runtime/__init__.py", "launcher.py", "launcher/__init__.py"]
COMMANDS = [
    "python my.py",
    "python3 -u my.py --steps 3",
    "uv run python my.py",
    "python -m my",
    "python -c 1",
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("command", COMMANDS)
def test_g11_a_name_that_hides_ours_is_refused_before_anything_starts(
    form: str, command: str, tmp_path: Path
) -> None:
    _put(tmp_path, "my.py", form)
    hidden = form.partition("/")[0]
    with pytest.raises(PreflightError) as refused:
        import_shadowing.refuse(command.split(), tmp_path, {})
    assert refused.value.message.startswith(f"{tmp_path}/{hidden} hides the package")
    assert refused.value.hint is not None
    assert refused.value.hint.startswith(f"mv {tmp_path}/{hidden} {tmp_path}/my_{hidden}")


def test_the_folder_of_the_script_counts_and_not_the_one_it_is_started_in(tmp_path: Path) -> None:
    _put(tmp_path, "here/runtime.py", "there/my.py")
    import_shadowing.refuse(["python", "../there/my.py"], tmp_path / "here", {})
    _put(tmp_path, "there/runtime.py")
    with pytest.raises(PreflightError, match=r"there/runtime\.py hides"):
        import_shadowing.refuse(["python", "../there/my.py"], tmp_path / "here", {})
    with pytest.raises(PreflightError, match=r"here/runtime\.py hides"):
        import_shadowing.refuse(["sh", "my.sh"], tmp_path, {"PYTHONPATH": "nowhere:here"})


@pytest.mark.slow
@pytest.mark.parametrize("form", ["runtime.py", "runtime/__init__.py"])
def test_g11_launch_says_so_where_it_meets_one_itself(form: str, tmp_path: Path) -> None:
    """`PYTHONPATH=. launch …`: that folder comes before what is installed for launch as well."""
    _put(tmp_path, form)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "launcher.cli.main", "plan"],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    assert f"{tmp_path}/runtime" in done.stderr and "hides the package runtime" in done.stderr


def test_what_hides_nothing_is_not_refused(tmp_path: Path) -> None:
    _put(tmp_path, "my.py", "runtime/notes.txt", "launcher/data.csv", "other.py")
    import_shadowing.refuse(["python", "my.py"], tmp_path, {})
    _put(tmp_path, "runtime.py")
    import_shadowing.refuse(["sh", "-c", "true"], tmp_path, {})
    # A checkout of ours that one works in is ours.
    import_shadowing.refuse(["python", "-m", "pytest"], REPOSITORY, {"PYTHONPATH": str(REPOSITORY)})


def test_a_copy_of_ours_hides_nothing(tmp_path: Path) -> None:
    """Whoever works on the runtime has launch take it from a folder of theirs."""
    copy = tmp_path / "changed" / "runtime"
    shutil.copytree(
        REPOSITORY / "runtime", copy, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors")
    )
    (copy / "__main__.py").write_text("print('changed')\n")
    import_shadowing.refuse(["sleep", "1"], tmp_path, {"PYTHONPATH": str(copy.parent)})
    (copy / "__init__.py").write_text('"""Another one."""\n')
    with pytest.raises(PreflightError, match="hides the package runtime"):
        import_shadowing.refuse(["sleep", "1"], tmp_path, {"PYTHONPATH": str(copy.parent)})


@pytest.mark.parametrize("form", FORMS)
def test_python_does_import_what_is_refused_and_not_what_is_not(form: str, tmp_path: Path) -> None:
    """Python itself decides: `hiding` must not say otherwise."""
    package = form.partition("/")[0].removesuffix(".py")
    (tmp_path / "my.py").write_text(f"import {package}; print({package}.__file__)")
    (tmp_path / package).mkdir()

    def imported() -> Path:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [sys.executable, "my.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
        )
        return Path(done.stdout.strip())

    assert not imported().is_relative_to(tmp_path)
    _put(tmp_path, form)
    assert imported() == tmp_path / form
