"""One warning about split sequences: the reason why their turns are trained apart, and the remedy.

Neighbours: selection.py logs it for the first step that has some; samples/turns.py and
completions/prefix_continuation.py have the reasons. Pure.
"""

from __future__ import annotations

from runtime.shared.statuses import StepCounts

# Reason → remedy. The other reasons have none, or name it themselves.
_ADVICE = {
    "history rewritten": "send the earlier answers again as they were given, in every message",
    "text was changed by the client": "send the earlier answers again as they were given, calls included",
    "system prompt changed": "keep what changes, such as a time, out of the system prompt",
    "the template's own text changed": "the chat template writes a date: give it one by chat_template_kwargs",
    "tools changed": "give every turn of a conversation the same tools",
    "chat_template_kwargs changed": "give every turn the same chat_template_kwargs and reasoning_effort",
    "other temperature": "ask every turn of a conversation at one temperature",
    "calls after the first were left out": "ask in words for one call at a time, or allow several",
    "cut off": "give answers more max_tokens",
    "another conversation": "name the agents of a rollout apart, by the header x-slipway-predictor",
    "too long for the context": "ask for fewer max_tokens, or start with more --set engine.max_model_len",
}


def split_warning(counts: StepCounts) -> str | None:
    """The warning for a step; None if no sequence was split."""
    if not counts.sealed:
        return None
    reasons = sorted(counts.sealed_by.items(), key=lambda item: -item[1])
    why = ", ".join(f"{reason} ({count})" for reason, count in reasons)
    advice = _ADVICE.get(reasons[0][0]) if reasons else None
    line = f"{counts.sealed} of a step's {counts.samples} samples began a sequence of their own: {why}"
    return line if advice is None else f"{line}. {advice[0].upper()}{advice[1:]}"
