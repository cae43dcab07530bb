"""A journal from before receipts: what it says was received is a sample still, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

from runtime.gateway.samples.samples import SampleStore


def line(request: str, delivered: bool) -> str:
    """An exchange as it was written at commit 0edd49f."""
    said = {
        "request": request, "digest": f"digest of {request}", "created": 1.0,
        "tags": {"rollout": "r", "predictor": None, "call": None, "purpose": "train"},
        "model": "policy@v0", "version": 0, "temperature": 1.0, "settings": {"max_tokens": 8},
        "prompts": [[1]],
        "samples": [
            {
                "id": f"{request}:0", "prompt": 0, "completion_ids": [2], "logprobs": [-0.5],
                "finish_reason": "stop", "unscorable": None, "content": None, "retokenised": False,
            }
        ],
        "streamed": False, "answer": {"id": request}, "delivered": delivered,
    }  # fmt: skip
    return json.dumps(said) + "\n"


def test_c52_a_journal_without_receipts_is_read_as_it_was_meant(tmp_path: Path) -> None:
    claim = json.dumps({"claim": "claimed"}) + "\n"
    lines = line("received", True), line("unread", False), line("claimed", False), claim
    (tmp_path / "000001.jsonl").write_text("".join(lines))
    for store in (SampleStore(tmp_path), SampleStore(tmp_path)):
        assert [ref.request for ref in store.of_rollout("r")] == ["received", "claimed"]
        assert [ref.request for ref in store.unreceived_of_rollout("r")] == ["unread"]
        assert [store.load(ref)[1].completion_ids for ref in store.of_rollout("r")] == [[2], [2]]
        assert bytes(store.answer("unread").answer) == b'{"id": "unread"}'
    store.mark_received("unread")
    assert len(SampleStore(tmp_path).of_rollout("r")) == 3
