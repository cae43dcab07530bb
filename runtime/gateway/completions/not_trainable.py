"""Warns at once, and not steps later, that none of a request's samples can be trained.

The answer has a header with the reason; the log and the run's status have a line for the first request of
each reason. A client can ask by a header to be refused instead, before anything is sampled.
Neighbours: proxy.py asks once per request; requests/distribution.py has the reasons. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable

from runtime.gateway.completions.request_parsing import ParsedRequest
from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.http.warnings import Warnings
from runtime.gateway.requests import distribution
from runtime.shared.headers import REFUSE, UNTRAINABLE_HEADER

_GREEDY = "greedy"
_OTHER_GRAMMAR = (
    "the trainer cannot repeat its grammar (beside tools or ignore_eos, of a model that thinks, or of "
    "another form than a schema, an object, a regex or a choice): ask for the format in the prompt"
)
_ADVICE = {
    _GREEDY: "a temperature of 0 has one answer and nothing to compare: ask with a temperature of 1",
    "tool_choice": 'it forces a tool call: leave it out or use "auto", and ask for the call in the prompt',
    "parallel_tool_calls": "it constrains tool calls by a grammar: name the rollout, or leave it out",
    "response_format": _OTHER_GRAMMAR,
    "structured_outputs": _OTHER_GRAMMAR,
}
_OF_ANY = "it changes the policy's distribution: leave it out"


def reason(request: ParsedRequest, repeats_grammars: Callable[[], bool] = distribution.never) -> str | None:
    """The reason no sample of this request can be trained; None if they can."""
    if request.tags.purpose != "train":
        return None
    try:
        return distribution.distorted_by(request.body, repeats_grammars=repeats_grammars)
    except (TypeError, ValueError, OverflowError):  # a temperature that is no number: it is refused as such
        return None


class TrainabilityCheck:
    """Use it from the gateway's event loop."""

    def __init__(self, warnings: Warnings, repeats_grammars: Callable[[], bool] = distribution.never) -> None:
        self._warnings = warnings
        self._repeats_grammars = repeats_grammars

    def check(self, request: ParsedRequest) -> str | None:
        """The reason that the answer is to name: of a rollout's requests. Raises ApiError(422)."""
        why = reason(request, self._repeats_grammars)
        if why is None:
            return None
        advice = _ADVICE.get(why, _OF_ANY)
        if request.trainable_only:
            param = "temperature" if why == _GREEDY else why
            message = (
                f"{why}: no sample of this request could be trained, and its header "
                f"`{UNTRAINABLE_HEADER}: {REFUSE}` asks to be told. {advice[0].upper()}{advice[1:]}"
            )
            raise ApiError(422, message, param=param, code="untrainable")
        if request.tags.rollout is None:
            return None
        line = f"rollout {request.tags.rollout}: samples with {why} are not trained: {advice}"
        self._warnings.warn_once(f"untrainable: {why}", line)
        return why
