"""What vLLM's CPU build computes at all, by its own word: the one place that knows it here says the same."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from runtime.engine.command import arguments
from runtime.shared.architectures import CPU_HEAD_SIZES, PolicyError
from runtime.shared.json_files import write_json
from runtime.shared.runtime_config import RuntimeConfig


def test_n05_the_widths_of_heads_are_those_of_the_pinned_vllm() -> None:
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None
    source = Path(found.origin).parent / "v1" / "attention" / "backends" / "cpu_attn.py"
    (said,) = (
        node
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes"
    )
    answer = said.body[-1]
    assert isinstance(answer, ast.Return) and answer.value is not None
    assert tuple(ast.literal_eval(answer.value)) == CPU_HEAD_SIZES


@pytest.mark.parametrize("said", [{"head_dim": 16}, {"num_attention_heads": 8, "head_dim": None}])
def test_n05_an_engine_refuses_such_heads_before_vllm_starts(tmp_path: Path, said: dict[str, int]) -> None:
    config = {"model_type": "qwen2", "hidden_size": 128, "num_attention_heads": 4, **said}
    write_json(tmp_path / "config.json", config)
    told = {"run_id": "r", "model_path": str(tmp_path), "state_dir": "s", "socket_dir": "s"}
    with pytest.raises(PolicyError, match="its heads are 16 wide"):
        arguments(RuntimeConfig.model_validate(told), 0)
