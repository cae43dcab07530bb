"""The policy's answers that did not parse, also if the program swallows the exception.

Neighbours: `rollouts.py` puts the watch among DSPy's callbacks for each run; `program_rollout.py` keeps its
finds; `grouping.py` gives such an answer the format failure, for the tokens that were sampled. An answer is
judged once, by the outermost adapter that read it. Knows nothing of rewards or of HTTP.
"""

from __future__ import annotations

from typing import Any

from dspy.utils.callback import BaseCallback
from dspy.utils.exceptions import AdapterParseError, LMError

from launcher.client.dspy.program_rollout import Call
from launcher.client.dspy.tagging import Exchange, begin_exchange, last_exchange


class ParseFailureCallback(BaseCallback):
    """One for all threads: its state is in the context, or under the id of the parse."""

    def __init__(self) -> None:
        self._under_way: dict[str, Exchange] = {}

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        """Any LM, so that an answer of another than the policy is never taken for the policy's."""
        begin_exchange()

    def on_adapter_parse_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        exchange = last_exchange()
        if exchange is not None:
            exchange.depth += 1
            self._under_way[call_id] = exchange

    def on_adapter_parse_end(
        self, call_id: str, outputs: dict[str, Any] | None, exception: BaseException | None = None
    ) -> None:
        exchange = self._under_way.pop(call_id, None)
        if exchange is None:
            return
        exchange.depth -= 1
        if exchange.depth:
            return
        position = exchange.parsed
        exchange.parsed += 1
        if exchange.calls and _is_format_failure(exception):
            _note_parse_failure(exchange.calls[min(position, len(exchange.calls) - 1)], exception)

    def on_module_end(
        self, call_id: str, outputs: Any | None, exception: BaseException | None = None
    ) -> None:
        """Failures without a parse(): an empty answer, or an adapter that reads answers its own way."""
        exchange = last_exchange()
        if not isinstance(exception, AdapterParseError) or exchange is None or not exchange.calls:
            return
        rollout = exchange.calls[0].rollout
        if any(call.key in rollout.unparsed for call in exchange.calls):
            return
        answers = rollout.answers
        empty = [call for call in exchange.calls if call.key in answers and answers[call.key].empty]
        for call in empty or exchange.calls[-1:]:
            _note_parse_failure(call, exception)


PARSE_FAILURES = ParseFailureCallback()


def _is_format_failure(exception: BaseException | None) -> bool:
    """Whatever an adapter's parse() raises on a text is about the text, unless another LM failed in it."""
    return isinstance(exception, Exception) and not isinstance(exception, LMError)


def _note_parse_failure(call: Call, exception: BaseException | None) -> None:
    call.rollout.note_unparsed(call)
    call.rollout.parse_error = exception
