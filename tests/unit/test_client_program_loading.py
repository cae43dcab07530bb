"""A saved program asks the run it is loaded in, the LM it is given, or a vLLM, and never OpenAI."""

from __future__ import annotations

import json
from pathlib import Path

import dspy
import pytest
from dspy.clients.base_lm import LM_CLASS_STATE_KEY

from launcher.client import NotConnected, PolicyLM, load
from tests.support import abuses as a
from tests.support.small_run import TOKEN, SmallRun

KEY = "sk-the-users-own-key"


@pytest.fixture
def run(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> SmallRun:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    run.answer = a.varied
    return run


def saved(run: SmallRun, path: Path) -> Path:
    program = a.Two()
    program.first.lm = PolicyLM(run.session(), max_tokens=9, extra_body={"min_p": 0.2})
    program.first.demos = [dspy.Example(english="cat", french="chat")]
    program.second.lm = dspy.LM("openai/gpt-5-mini", api_key=KEY, api_base="http://127.0.0.1:1/v1")
    program.save(path)
    return path


def test_a_predictor_of_the_policy_asks_this_run_with_its_settings_and_demos(
    run: SmallRun, tmp_path: Path
) -> None:
    path = saved(run, tmp_path / "program.json")
    program = a.Two()
    assert load(program, path) is program
    program.first(english="hello")
    body = run.asked[0].body
    assert (body["model"], body["max_tokens"], body["min_p"]) == ("policy", 9, 0.2)
    assert len(body["messages"]) == 4
    assert TOKEN not in path.read_text() and KEY not in path.read_text()


def test_a_predictor_of_another_model_is_left_without_one(run: SmallRun, tmp_path: Path) -> None:
    program = load(a.Two(), saved(run, tmp_path / "program.json"))
    assert isinstance(program, a.Two) and program.second.lm is None
    with dspy.context(lm=None), pytest.raises(ValueError, match="No LM is loaded"):
        program.second(french="bonjour")


def test_a_bare_predictor_is_loaded_as_it_was_saved(run: SmallRun, tmp_path: Path) -> None:
    """It is saved without a name, as the program of the README is."""
    program = dspy.Predict("english -> french")
    program.set_lm(PolicyLM(run.session(), max_tokens=9))
    program.demos = [dspy.Example(english="cat", french="chat")]
    program.save(tmp_path / "program.json")
    loaded = load(a.predict(), tmp_path / "program.json")
    loaded(english="hello")
    body = run.asked[0].body
    assert (body["model"], body["max_tokens"], len(body["messages"])) == ("policy", 9, 4)
    elsewhere = dspy.utils.DummyLM([{"french": "bonjour"}])
    assert load(a.predict(), tmp_path / "program.json", lm=elsewhere)(english="hi").french == "bonjour"
    with pytest.raises(ValueError, match="has no predictor 'first'"):
        load(a.Two(), tmp_path / "program.json")


def test_with_an_lm_of_its_own_it_needs_no_run(
    run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(run, tmp_path / "program.json")
    monkeypatch.delenv("LAUNCH_BASE_URL")
    with pytest.raises(NotConnected, match="launch -- python YOUR_PROGRAM"):
        load(a.Two(), path)
    elsewhere = dspy.utils.DummyLM([{"french": "bonjour"}, {"english": "hi"}])
    program = load(a.Two(), path, lm=elsewhere)
    assert program(english="hello").back == "hi"


@pytest.mark.parametrize(("model", "name"), [(None, "policy"), ("base", "base")])
def test_s05_dspy_alone_makes_it_a_program_of_a_vllm_and_asks_nobody_else(
    run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str | None, name: str
) -> None:
    """As `vllm serve` serves the export, where `launcher` is not installed."""
    program = a.predict()
    program.set_lm(PolicyLM(run.session(), model=model, max_tokens=9, extra_body={"min_p": 0.2}))
    program.save(tmp_path / "program.json")
    lm = json.loads((tmp_path / "program.json").read_text())["lm"]
    assert "launcher" not in lm[LM_CLASS_STATE_KEY] and "policy@" not in lm["model"]
    monkeypatch.delenv("LAUNCH_BASE_URL")
    vllm = SmallRun(answer=a.varied)
    monkeypatch.setenv("HOSTED_VLLM_API_BASE", vllm.base_url)
    monkeypatch.setenv("HOSTED_VLLM_API_KEY", TOKEN)
    loaded = a.predict()
    loaded.load(tmp_path / "program.json")
    loaded(english="hello")
    (asked,) = vllm.asked
    body = asked.body
    assert (body["model"], body["max_tokens"], body["min_p"]) == (name, 9, 0.2)
    assert KEY not in str(asked.headers)
    assert not body.keys() & {"launch_kwargs", "slipway_model"}
    vllm.close()


def test_s05_what_became_of_it_elsewhere_is_kept_when_it_comes_back(run: SmallRun, tmp_path: Path) -> None:
    """At a vLLM it is the policy still: of this run now, without its address. As another model it is not."""
    program = a.Two()
    program.set_lm(PolicyLM(run.session(), cache=True, max_tokens=9))
    program.save(tmp_path / "program.json")
    assert json.loads((tmp_path / "program.json").read_text())["first"]["lm"]["cache"] is False
    elsewhere = a.Two()
    elsewhere.load(tmp_path / "program.json")
    elsewhere.first.lm = elsewhere.first.lm.copy(api_base="http://127.0.0.1:1/v1", api_key=KEY)
    elsewhere.second.lm = elsewhere.second.lm.copy(model="openai/gpt-5-mini")
    elsewhere.save(tmp_path / "again.json")
    back = a.Two()
    load(back, tmp_path / "again.json")
    assert isinstance(back.first.lm, PolicyLM) and back.second.lm is None
    back.first(english="hello")
    assert (run.asked[0].body["model"], run.asked[0].body["max_tokens"]) == ("policy", 9)


def test_a_program_that_was_saved_with_our_class_still_loads(run: SmallRun, tmp_path: Path) -> None:
    path = saved(run, tmp_path / "program.json")
    state = json.loads(path.read_text())
    settings = {"max_tokens": 9, "extra_body": {"min_p": 0.2}, "num_retries": 0, "cache": False}
    kinds = {LM_CLASS_STATE_KEY: "launcher.client.PolicyLM", "model": "policy@v3", "model_type": "chat"}
    state["first"]["lm"] = kinds | settings
    path.write_text(json.dumps(state))
    program = a.Two()
    load(program, path)
    program.first(english="hello")
    assert (run.asked[0].body["model"], run.asked[0].body["min_p"]) == ("policy", 0.2)


def test_g14_a_pickled_program_has_no_token_and_asks_the_run_it_is_unpickled_in(
    run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = dspy.Predict("english -> french")
    program.set_lm(PolicyLM(run.session(), max_tokens=9))
    program.save(tmp_path / "whole", save_program=True)
    written = b"".join(file.read_bytes() for file in (tmp_path / "whole").iterdir())
    assert TOKEN.encode() not in written and run.base_url.encode() not in written
    other = SmallRun(answer=a.varied)
    monkeypatch.setenv("LAUNCH_BASE_URL", other.base_url)
    dspy.load(str(tmp_path / "whole"), allow_pickle=True)(english="hello")
    assert (len(run.asked), other.asked[0].body["max_tokens"]) == (0, 9)
    other.close()


@pytest.mark.parametrize("name", ["program.pkl", "program"])
def test_another_kind_of_file_is_refused(run: SmallRun, name: str) -> None:
    with pytest.raises(ValueError, match=r"program.save\('program.json'\)"):
        load(a.Two(), name)


def test_another_program_is_refused_by_the_name_it_lacks(run: SmallRun, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no predictor 'self'"):
        load(a.predict(), saved(run, tmp_path / "program.json"))
