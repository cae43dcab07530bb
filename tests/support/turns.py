"""Whose turn it is: of the costliest tests, and of the unchanged mutations, a whole run takes a third.

Three whole runs in one checkout take all, if they pass. The first takes the turn that HEAD says, as a number,
and each run that passes leaves the next turn to the next. Without a commit it is everybody's. Whoever names a
file, a folder or marks gets all that is there; `--every-turn` does so in a whole run: before work is handed
over.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.environment import REPOSITORY
from tests.support.mutant_log import commit

# The beginnings of the ids of tests that take turns, some with their seconds of a processor. A test belongs
# here when it takes ten or more, and what it proves changes seldom or is proven on a smaller scale in every
# run. Each third costs about as much: `python -m tests.bench.minutes`.
TURNS: tuple[tuple[str, ...], ...] = (
    (
        "tests/cloud/test_ends.py::test_g17_",  # 99
        "tests/cloud/test_timers.py::test_g04_an_armed_",  # 32
        "tests/e2e/test_agents.py::test_b04_an_agent_",
        "tests/e2e/test_agents.py::test_b04_pydantic_",
        "tests/e2e/test_leaving.py::test_kill_9_",  # 45
        "tests/e2e/test_tomorrow.py::",  # 216
        "tests/e2e/test_trained_by_art.py::test_b07_openpipe_",  # 24
        "tests/e2e/test_trained_by_dspy.py::test_a11_",  # 62
        "tests/e2e/test_trained_by_examples.py::test_a08_",
        "tests/runtime/test_attention.py::",  # 27
        "tests/runtime/test_crash_engine.py::",  # 40
        "tests/runtime/test_engine_process.py::test_c23_",  # 33
        "tests/runtime/test_recipe.py::test_c43_",
        "tests/unit/test_trackio.py::",  # 17
    ),
    (
        "tests/cloud/test_ends.py::test_g29_",
        "tests/cloud/test_ends.py::test_g34_",
        "tests/cloud/test_launch.py::test_g02_",
        "tests/cloud/test_timers.py::test_g04_a_busy_",
        "tests/e2e/test_agents.py::test_b04_litellm_",
        "tests/e2e/test_exact_samples.py::",
        "tests/e2e/test_secrets.py::",
        "tests/e2e/test_trained_by_desk.py::test_b17_",  # 34
        "tests/e2e/test_trained_by_dspy.py::test_a14_",
        "tests/e2e/test_trained_by_examples.py::test_a20_prompts_",
        "tests/runtime/test_compiling.py::",  # 25
        "tests/runtime/test_crash_gateway.py::test_c40_g18_",  # 15
        "tests/runtime/test_engine_process.py::test_the_core_dies_",
        "tests/runtime/test_gateway.py::test_an_engine_that_dies_",
        "tests/runtime/test_recipe.py::test_c15_",
        "tests/runtime/test_recipe.py::test_g19_",
        "tests/unit/test_client_stock_grpo.py::",  # 29
        "tests/unit/test_denied_regions.py::",  # 76
        "tests/unit/test_other_account.py::test_p04_another_accounts_",
    ),
    (
        "tests/cloud/test_ends.py::test_g28_",
        "tests/cloud/test_forgotten.py::",
        "tests/cloud/test_leaving.py::test_g01_",  # 86
        "tests/cloud/test_matrix.py::test_g01_killed_when_",
        "tests/e2e/test_agents.py::test_b04_openai_agents_by_",
        "tests/e2e/test_arbor.py::",
        "tests/e2e/test_dspys_grpo_texts.py::test_a10_",
        "tests/e2e/test_killed.py::",  # 97
        "tests/e2e/test_leaving.py::test_g08_",
        "tests/e2e/test_trained_by_dspy.py::test_a15_",
        "tests/e2e/test_trained_by_games.py::",
        "tests/e2e/test_workbench.py::",
        "tests/runtime/test_crash_trainer.py::test_g20_g21_",
        "tests/runtime/test_crash_trainer.py::test_g21_",
        "tests/runtime/test_engine_process.py::test_an_engine_",
        "tests/runtime/test_gateway_fuzz.py::test_two_thousand_",
        "tests/unit/test_client_pool_replay.py::test_c59_a_replay_",
        "tests/unit/test_client_together.py::",  # 18
    ),
)


class Turns:
    """Whose turn it is in this checkout, kept beside what pytest keeps."""

    def __init__(self, tree: Path = REPOSITORY) -> None:
        self._file = tree / ".pytest_cache" / "turn"
        self._commit = commit(tree)

    def now(self) -> int | None:
        """0, 1 or 2; None where there is no commit."""
        if self._commit is None:
            return None
        kept = self._file.read_text() if self._file.exists() else self._commit
        return int(kept, 16) % len(TURNS)

    def pass_on(self) -> None:
        """This one's tests have passed."""
        turn = self.now()
        if turn is not None:
            self._file.parent.mkdir(exist_ok=True)
            self._file.write_text(str((turn + 1) % len(TURNS)))


def is_left_out(nodeid: str, turn: int | None) -> bool:
    """Whether a test has its turn in another run than this one."""
    of_others = (starts for number, starts in enumerate(TURNS) if turn not in (None, number))
    return any(nodeid.startswith(starts) for starts in of_others)
