"""What the trainer's tests share: a tiny random Qwen2 on disk, policies on it, batches, a table as a policy.

The model has what goes wrong silently: grouped-query attention, tied embeddings, biases, and adapters whose
alpha is not their rank. transformers and peft are the independent engine.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.shared.batch import Batch
from runtime.shared.step_settings import UpdateSettings
from runtime.shared.train_config import TrainConfig
from runtime.trainer import policy as policies
from runtime.trainer.old_logprobs import OldLogprobs, PolicyHistory
from runtime.trainer.policy import Lora, Policy
from runtime.trainer.ranks import Ranks
from runtime.trainer.update import gradients, select

torch.set_num_threads(1)  # the models are tiny, and a pool of threads would not survive a fork

VOCABULARY = 97
EOS = 2
LORA = Lora(rank=4, alpha=12.0)
ALONE = Ranks(0, 1, "cpu")


def settings_of(loss: str = "grpo", **changes: Any) -> UpdateSettings:
    """A loss with its own values, and changes."""
    return UpdateSettings.of(TrainConfig.model_validate({"loss": loss, **changes}).model_dump())


SETTINGS = settings_of()


@functools.cache
def tiny_model() -> Path:
    """The folder of a random Qwen2, fp32; removed when the process ends."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = Path(tempfile.mkdtemp(prefix="slipway-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            eos_token_id=EOS,
            pad_token_id=EOS,
            initializer_range=0.15,
        )
    )
    return _saved(model, folder)


def tiny_llama(folder: Path, vocabulary: int = VOCABULARY, **changes: Any) -> Path:
    """A random Llama, fp32, of the width of the tiny model; by default like 3.2: tied, stretched."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.15,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }
    return _saved(LlamaForCausalLM(LlamaConfig(**shape | changes)), folder)


def _saved(model: Any, folder: Path) -> Path:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:  # transformers starts biases at 0 and norms at 1, which would hide mistakes
                weight.copy_(torch.randn_like(weight) * 0.2 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder)
    return folder


def edited_model(folder: Path, **changes: Any) -> Path:
    """A copy of the tiny model with changes in its config.json."""
    shutil.copytree(tiny_model(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def fresh_policy(dtype: str = "float32", lora: Lora = LORA, model: Path | None = None) -> Policy:
    """As a run starts: B is 0."""
    return policies.build(model or tiny_model(), lora, dtype=dtype, device="cpu", seed=0)


def trained_policy(dtype: str = "float32", lora: Lora = LORA, model: Path | None = None) -> Policy:
    """With an adapter that does something in every layer."""
    policy = fresh_policy(dtype, lora, model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, master in policy.master_weights.items():
            if ".lora_b." in name:
                master.copy_(torch.randn(master.shape, generator=generator) * 0.05)
    policy.refresh_working_copy()
    return policy


def peft_model(adapter: Path, model: Path | None = None) -> torch.nn.Module:
    """The independent engine: transformers with peft, fp32."""
    from peft import PeftModel

    return PeftModel.from_pretrained(plain_model(model or tiny_model()), str(adapter)).eval()


def plain_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A folder's model by transformers, with its own attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


@torch.no_grad()
def our_logits(policy: Policy, tokens: Tensor) -> Tensor:
    """[L] ids to logits [L, V], one sequence alone."""
    return policy.output(lone_hidden(policy, tokens))


def lone_hidden(policy: Policy, tokens: Tensor) -> Tensor:
    """[L] ids to hidden states [L, D], one sequence alone under a plain causal mask."""
    size = len(tokens)
    mask = torch.ones(1, size, size, dtype=torch.bool).tril()
    return policy.hidden(tokens[None].long(), torch.arange(size)[None], mask)[0]


@dataclass(frozen=True)
class Sample:
    """A sample as a test writes it down: pieces of tokens, each sampled or given."""

    pieces: Sequence[tuple[Sequence[int], bool]]
    group: int
    reward: float
    temperature: float = 1.0
    truncated: bool = False
    logprob: float = -3.0


def make_batch(samples: Sequence[Sample], step: int = 1) -> Batch:
    """One member per sample; behaviour logprobs vary around the sample's own."""
    random = np.random.default_rng(step)
    tokens = [np.concatenate([np.array(ids, np.int32) for ids, _ in sample.pieces]) for sample in samples]
    sampled = [
        np.concatenate([np.full(len(ids), was_sampled, np.uint8) for ids, was_sampled in sample.pieces])
        for sample in samples
    ]
    logprobs = [
        flags * (sample.logprob + random.normal(0, 0.2, len(flags))).astype(np.float32)
        for sample, flags in zip(samples, sampled, strict=True)
    ]
    count = len(samples)
    return Batch(
        tokens=np.concatenate(tokens),
        sampled=np.concatenate(sampled),
        logprobs=np.concatenate(logprobs).astype(np.float32),
        offsets=np.cumsum([0, *map(len, tokens)]).astype(np.int64),
        temperature=np.array([sample.temperature for sample in samples], np.float32),
        version=np.zeros(count, np.int64),
        truncated=np.array([sample.truncated for sample in samples], np.uint8),
        member=np.arange(count, dtype=np.int64),
        reward=np.array([sample.reward for sample in samples], np.float32),
        group=np.array([sample.group for sample in samples], np.int64),
        meta={
            "schema": 1,
            "kind": "train",
            "step": step,
            "key": f"key-{step}",
            "groups": [{"id": str(number)} for number in range(1 + max(sample.group for sample in samples))],
            "members": [],
            "samples": [],
            "counts": {"samples": count, "trained": count, "dropped": {}},
            "client_state": {"at": step},
        },
    )


def random_samples(
    seed: int, groups: int = 3, members: int = 3, prompt: int = 24, completion: int = 8, turns: int = 1
) -> list[Sample]:
    """Groups of a shared prompt each; with two turns an observation stands between sampled tokens."""
    random = np.random.default_rng(seed)

    def ids(length: int) -> list[int]:
        return random.integers(3, VOCABULARY, max(1, length)).tolist()

    found = []
    for group in range(groups):
        start = ids(prompt + int(random.integers(-3, 4)))
        for _ in range(members):
            pieces: list[tuple[list[int], bool]] = [(start, False)]
            for turn in range(turns):
                if turn:
                    pieces.append((ids(4), False))
                pieces.append((ids(completion + int(random.integers(-3, 4))), True))
            pieces.append(([EOS], True))
            found.append(
                Sample(pieces, group, float(random.normal()), temperature=float(random.choice([0.7, 1, 1.2])))
            )
    return found


def stale_batch(seed: int) -> Batch:
    """Ratios on both sides of every bound, answers of all lengths, two cut off, a group without variance."""
    samples = [replace(sample, logprob=-4.6) for sample in random_samples(seed, members=4, turns=2)]
    samples[1], samples[6] = replace(samples[1], truncated=True), replace(samples[6], truncated=True)
    flat = [replace(sample, group=3, reward=0.3) for sample in samples[8:10]]
    return make_batch([*samples, *flat])


def reordered(batch: Batch, order: Sequence[int]) -> Batch:
    """The same samples in another order."""
    spans = [batch.span(sample) for sample in order]

    def by_token(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values[span] for span in spans])

    return replace(
        batch,
        tokens=by_token(batch.tokens),
        sampled=by_token(batch.sampled),
        logprobs=by_token(batch.logprobs),
        offsets=np.cumsum([0, *(span.stop - span.start for span in spans)]).astype(np.int64),
        **{
            name: getattr(batch, name)[list(order)]
            for name in ("temperature", "version", "truncated", "member")
        },
    )


@dataclass(frozen=True)
class Measured:
    """The gradient of every master, and the step's means."""

    gradient: dict[str, Tensor]
    metrics: dict[str, float]


def measure(
    policy: Policy | TablePolicy,
    batch: Batch,
    settings: UpdateSettings = SETTINGS,
    ranks: Ranks = ALONE,
    past: PolicyHistory | None = None,
    old: OldLogprobs | None = None,
) -> Measured:
    """The step's gradient, without taking the step."""
    selected = select(batch, settings)
    for master in policy.master_weights.values():
        master.grad = None
    metrics = gradients(policy, batch, selected, settings, ranks, past, old)
    found = {
        name: master.grad.clone() for name, master in policy.master_weights.items() if master.grad is not None
    }
    assert found.keys() == policy.master_weights.keys()
    return Measured(found, metrics)


def by_whether_asked(batch: Batch) -> tuple[list[int], list[int]]:
    """The sequences of the group that behavior_logprobs.py asks about at the batch's step, and the others."""
    asked = batch.group[batch.member] == batch.step % len(set(batch.group))
    return np.flatnonzero(asked).tolist(), np.flatnonzero(~asked).tolist()


def of_engine(batch: Batch) -> OldLogprobs:
    """The engine's own logprobs in place of the trainer's: a loss as its paper has it, with one sampler."""
    return OldLogprobs(torch.from_numpy(batch.logprobs), 0)


def assert_same_gradient(found: dict[str, Tensor], expected: dict[str, Tensor], within: float = 1e-5) -> None:
    """Each tensor within `within` of the largest entry of all."""
    scale = max(float(value.abs().max()) for value in expected.values())
    assert scale > 1e-4, "the expected gradient is nothing"
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= within * scale, name


def table(seed: int = 0, rows: int = 64) -> Tensor:
    """Logits for a TablePolicy."""
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


class TablePolicy:
    """The policy whose logits at position p are row p of a table, whatever the tokens: gradients by hand."""

    def __init__(self, table_PV: Tensor) -> None:
        self.table = torch.nn.Parameter(table_PV.clone())
        self.master_weights = {"table": self.table}
        self.device = torch.device("cpu")
        self.one_sequence_per_row = False
        self._off = False

    @property
    def output(self) -> Callable[[Tensor], Tensor]:
        return lambda hidden: hidden

    def hidden(self, tokens_BL: Tensor, positions_BL: Tensor, mask_BLL: Tensor) -> Tensor:
        table = torch.zeros_like(self.table) if self._off else self.table
        return table[positions_BL]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, every token is as likely as any other."""
        self._off = True
        try:
            yield
        finally:
            self._off = False

    def collect_gradients(self) -> None:
        """The table is its own master."""
