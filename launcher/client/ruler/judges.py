"""Finds the judge that a program names: by a name, an address, a client, or the run.

    "openai/o3"                     a LiteLLM name
    "base", "policy@v7+3f2a9c1b"    a model of the run that the program is in
    run, (run, "policy")            a model of this Session; `base` unless another is named
    (base_url, api_key, model)      a server of OpenAI's chat completions
    (client, model)                 a client of OpenAI's SDK

Neighbours: `http_judge.py`, `run_judge.py`, `sdk_judges.py` are these. Knows nothing of the judged texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from launcher.client.ruler.http_judge import HttpJudge
from launcher.client.ruler.judge_failures import JudgeUnusable
from launcher.client.ruler.judge_protocol import Judge
from launcher.client.ruler.run_judge import RunJudge
from launcher.client.ruler.sdk_judges import ClientJudge, LiteLLMJudge
from launcher.client.session import Session, connect

_RUN_MODEL = re.compile(r"base|policy(@v\d+(\+\w+)?)?")


def resolve_judge(judge: Any, extra_params: Mapping[str, Any] | None = None) -> Judge:
    """The judge; `extra_params` go with each question to it: temperature, max_tokens, …

    Raises JudgeUnusable for a value that names none, NotConnected for a model of the run outside any run.
    """
    extra_params = dict(extra_params or {})
    match judge:
        case str() if _RUN_MODEL.fullmatch(judge):
            return RunJudge(connect().connection, judge, extra_params)
        case str() if judge:
            return LiteLLMJudge(judge, extra_params)
        case Session():
            return RunJudge(judge.connection, extra_params=extra_params)
        case (Session() as session, str(model)):
            return RunJudge(session.connection, model, extra_params)
        case (str(base_url), str(api_key), str(model)):
            return HttpJudge(base_url, api_key, model, extra_params)
        case (client, str(model)) if hasattr(client, "chat"):
            return ClientJudge(client, model, extra_params)
        case _ if hasattr(judge, "ask"):
            return judge
    raise JudgeUnusable(
        "There is no judge in what was given as one",
        f"it is {type(judge).__name__}",
        'give a LiteLLM name such as "openai/o3", (base_url, api_key, model), or the run itself',
    )
