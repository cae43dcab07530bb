"""Routes of other trainers' servers that a run once served: the one table of them, and the way there is now.

Neighbours: openai_errors.py words the answer to a route that is not served, and asks here first.
"""

from __future__ import annotations

_ART = (
    "the wire of ART's own client, as its release 0.4 has it, is retired: take release 0.5 with "
    "`from launcher.client.art import SlipwayBackend as LocalBackend`"
)
_ARBOR = (
    "the wire of Arbor's own client is retired: run the script by `launch --arbor -- python my.py`, "
    "whose `import arbor` is ours"
)
# Without `/v1`, which some clients put before them.
RETIRED: dict[str, str] = {
    **dict.fromkeys(
        ("/register", "/close", "/_prepare_backend_for_training", "/_get_step", "/_train_model", "/_log",
         "/_delete_checkpoints", "/_experimental_push_to_s3", "/_experimental_pull_from_s3"), _ART),
    **dict.fromkeys(
        ("/fine_tuning/grpo/initialize", "/fine_tuning/grpo/status", "/fine_tuning/grpo/step",
         "/fine_tuning/grpo/checkpoint", "/fine_tuning/grpo/terminate", "/fine_tuning/grpo/cancel",
         "/chat/launch", "/chat/kill"), _ARBOR),
}  # fmt: skip


def way_out(path: str) -> str | None:
    """The replacement for a retired route; None for any other."""
    return RETIRED.get(path.removeprefix("/v1"))
