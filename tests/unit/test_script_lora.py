"""launcher/config/script_lora.py: the LoRA of an Arbor script is its run's, where its text has it (S4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.base.home import Home
from launcher.config.request_validation import parse_request
from launcher.config.setting_sources import load
from launcher.types.settings import Settings

RANK, ALPHA, LAYERS = "train.lora.rank", "train.lora.alpha", "train.lora.target_modules"
WRITTEN = 'train_kwargs = {"lora_config": {"r": 4, "lora_alpha": 12.5}}\n'


def settings(folder: Path, text: str, *sets: str, flags: dict[str, Any] | None = None) -> Settings:
    """Of `launch --arbor -- python my.py`."""
    (folder / "my.py").write_text(text)
    home = Home(folder / "data", folder / "config", folder / "cache")
    given = {"arbor": True} if flags is None else flags
    command = ("python", "my.py", "other.py")
    return load(given, sets, environ={}, folder=folder, home=home, command=command)


# A script, and what its run has.
SCRIPTS = [
    (WRITTEN, {RANK: 4, ALPHA: 12.5}),
    ('run(train_kwargs=dict(lora_config={"r": 4}))', {RANK: 4}),
    ("peft.LoraConfig(r=4, lora_alpha=2, target_modules=('q_proj', 'v_proj'))",
     {RANK: 4, ALPHA: 2, LAYERS: ["q_proj", "v_proj"]}),
    # What PEFT would have itself.
    ("lora_config = LoraConfig(target_modules='all-linear', lora_dropout=0.05)", {RANK: 8, ALPHA: 8}),
    ("peft_config = {'r': 4, 'use_rslora': True, **others}", {RANK: 4, "train.lora.use_rslora": True}),
    ("a = LoraConfig(r=4)\nb = LoraConfig(r=4)", {RANK: 4, ALPHA: 8}),
    # What is computed, or said in two ways, is the run's to refuse.
    ("LoraConfig(r=rank, lora_alpha=2 * 8)", {}),
    ("a = LoraConfig(r=4)\nb = LoraConfig(r=2)", {ALPHA: 8}),
    ("if small:\n    LoraConfig(r=4)\nelse:\n    LoraConfig(r=rank)", {ALPHA: 8}),
    ("LoraConfig(**of_another_place)\nlora_config = other", {}),
    ("LoraConfig(r=4, lora_alpha=None, target_modules='.*_proj')", {RANK: 4}),
    # What is no configuration, and no Python.
    ('print({"r": 4, "lora_alpha": 12})', {}),
    ("LoraConfig(r=4", {}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "taken"), SCRIPTS)
def test_s04_the_lora_that_a_script_writes_out_is_its_runs(
    tmp_path: Path, text: str, taken: dict[str, Any]
) -> None:
    found = settings(tmp_path, text)
    assert {key: it for key, it in found.runtime.items() if key.startswith("train.lora.")} == taken
    assert all(found.values[key].source == "my.py" for key in taken)
    assert len(found.warnings) == bool(taken)
    for key, value in taken.items():
        assert f"{key}={value}" in found.warnings[0] and found.warnings[0].endswith(": as my.py has it")


def test_s04_whoever_sets_it_and_an_adapter_win_over_the_script(tmp_path: Path) -> None:
    found = settings(tmp_path, WRITTEN, f"{RANK}=2")
    assert (found.runtime[RANK], found.runtime[ALPHA]) == ("2", 12.5)
    assert found.warnings == (f"{ALPHA}=12.5: as my.py has it",)
    (tmp_path / "launch.toml").write_text("[train]\nlora.rank = 32\nlora.alpha = 64\n")
    found = settings(tmp_path, WRITTEN)
    assert (found.runtime[RANK], found.runtime[ALPHA], found.warnings) == (32, 64, ())


def test_s04_only_a_new_run_of_arbors_script_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert RANK not in settings(tmp_path, WRITTEN, flags={}).runtime
    monkeypatch.chdir(tmp_path)
    home = Home(tmp_path / "data", tmp_path / "config", tmp_path / "cache")
    words = (("python", "my.py"), ("true",))
    ranks = [parse_request({"arbor": True}, (), None, it, home).settings.runtime.get(RANK) for it in words]
    assert ranks == [4, None]
