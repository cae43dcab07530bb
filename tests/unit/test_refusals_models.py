"""A model that a folder does not have, or that cannot be served or trained, is refused with 3.

A model of the hub: `test_refusals_hub.py`.
"""

# ruff: noqa: E501 - tables: a line is a case
from __future__ import annotations

import json

import pytest

from tests.support.refusals import Place, Refused, check, place

__all__ = ["place"]

pytestmark = pytest.mark.process


def model(place: Place, **changes: bytes | str | None) -> None:
    """A whole model folder `m`, each change a file's content instead (None: no such file)."""
    files: dict[str, bytes | str | None] = {
        "config.json": '{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}',
        "model.safetensors": safetensors(),
        "tokenizer.json": "{}",
        "tokenizer_config.json": '{"chat_template": "{{ messages }}"}',
    }
    folder = place.folder / "m"
    folder.mkdir()
    for name, content in {**files, **changes}.items():
        if content is not None:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def safetensors(missing_bytes: int = 0) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(8 - missing_bytes)


NARROW = json.dumps(
    {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
    }
)
INDEX = "model.safetensors.index.json"
MODELS = [
    Refused("--model ./nothing", 3, "no model ./nothing", "no such folder", "launch --model Qwen/"),
    Refused("--model /nowhere/at/all", 3, "no model /nowhere/at/all", "no such folder", "launch --model Qwen/"),
    Refused("--model gpt", 3, "no model gpt", "not a hub name (owner/name)", "launch --model Qwen/"),
    Refused("--model f", 3, "no model f", "it is a file, not a folder", "launch --model",
            done=lambda place: place.write("f", "")),
    Refused("--model m", 3, "the model m cannot be used", "no config.json", "ls -l",
            done=lambda place: model(place, **{"config.json": None})),
    Refused("--model m", 3, "the model m cannot be used", "config.json is damaged", "download the model again",
            done=lambda place: model(place, **{"config.json": "{"})),
    Refused("--model m", 3, "the model m cannot be used", "config.json is damaged: it is not a JSON object", "again",
            done=lambda place: model(place, **{"config.json": "[]"})),
    Refused("--model m", 3, "the model m cannot be used", "passes a state along its tokens", "--model Qwen/",
            done=lambda place: model(
                place, **{"config.json": '{"architectures": ["MambaForCausalLM"], "state_size": 16}'})),
    Refused("--model m", 3, "the model m cannot be used", "no *.safetensors", "ls -l",
            done=lambda place: model(place, **{"model.safetensors": None, "model.bin": "x"})),
    Refused("--model m", 3, "the model m cannot be used", "cut short: ", "download the model again",
            done=lambda place: model(place, **{"model.safetensors": safetensors(1)})),
    Refused("--model m", 3, "the model m cannot be used", "not a safetensors file, or cut short", "again",
            done=lambda place: model(place, **{"model.safetensors": b"no"})),
    Refused("--model m", 3, "the model m cannot be used", "its header is damaged", "download the model again",
            done=lambda place: model(place, **{"model.safetensors": b"\2" + bytes(7) + b"xx"})),
    Refused("--model m", 3, "the model m cannot be used", "2.safetensors: listed in the index, but missing", "again",
            done=lambda place: model(place, **{INDEX: '{"weight_map": {"w": "2.safetensors"}}'})),
    Refused("--model m", 3, "the model m cannot be used", "no weight_map", "download the model again",
            done=lambda place: model(place, **{INDEX: "{}"})),
    Refused("--model m", 3, "the model m cannot be used", "names files outside its folder", "ls -l",
            done=lambda place: model(place, **{INDEX: '{"weight_map": {"w": "../x.safetensors"}}'})),
    Refused("--model m", 3, "the model m cannot be used", "no tokenizer", "ls -l",
            done=lambda place: model(place, **{"tokenizer.json": None})),
    Refused("--model m", 3, "the model m cannot be used", "tokenizer.json is damaged", "download the model again",
            done=lambda place: model(place, **{"tokenizer.json": "{"})),
    Refused("--model m", 3, "the model m cannot be used", "no chat template", "an instruct model",
            done=lambda place: model(place, **{"tokenizer_config.json": "{}"})),
]  # fmt: skip


@pytest.mark.parametrize("refused", MODELS, ids=lambda refused: refused.why)
def test_a_model_that_cannot_be_served_or_trained_is_3(refused: Refused, place: Place) -> None:
    check(refused, place)


def test_n05_a_model_whose_heads_no_cpu_kernel_has_is_3_for_a_run_and_a_plan(place: Place) -> None:
    what, why = "the model m cannot be served on a CPU", "its heads are 16 wide"
    refused = Refused("--model m", 3, what, why, "launch plan --model m --gpus H100:1")
    model(place, **{"config.json": NARROW})
    check(refused, place)
    planned = place.typed("plan", "--model", "m")
    assert planned.returncode == 3 and what in planned.stderr and why in planned.stderr
    assert what not in place.typed("plan", "--model", "m", "--gpus", "H100:1", "--infra", "aws").stderr


def test_a_model_that_a_cpu_computes_in_bf16_alone_is_3_in_fp32(place: Place) -> None:
    inner = {
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "num_attention_heads": 2,
        "linear_num_key_heads": 1,
    }
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": inner,
    }
    what, why = (
        "the model m cannot be served on a CPU in float32",
        "computed in bfloat16 on a CPU, not in float32",
    )
    model(place, **{"config.json": json.dumps(config)})
    check(Refused("--model m", 3, what, why, "launch --model m --set dtype=bfloat16"), place)
    planned = place.typed("plan", "--model", "m")
    assert planned.returncode == 3 and "launch plan --model m --set dtype=bfloat16" in planned.stderr
    assert what not in place.typed("plan", "--model", "m", "--set", "dtype=bfloat16").stderr


def test_a_context_longer_than_the_models_is_3(place: Place) -> None:
    words = "--set engine.max_model_len=1025"
    check(Refused(words, 3, "the context cannot be 1025 tokens", "has 1024 tokens", "set it lower"), place)
