"""Make the embedded model: `python -m runtime.tiny.make --out DIR [--seed N] [--steps N]` (about two minutes).

Trains a byte-level BPE and a Qwen2 of under a million parameters on the noisy phrase book of `grammar.py`
in the chat format of `chat.py`, both directions, then writes the Hugging Face folder that vLLM, torchtune
and transformers load: bf16 weights, tokenizer, chat template, `FIGURES.json` (`figures.py`) and a card.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from runtime.tiny import chat, grammar
from runtime.tiny.figures import DIRECTIONS, measure

SEED = 0
STEPS = 400
BATCH = 48
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 20
VOCABULARY = 768
REVERSE_SHARE = 0.33
MAX_POSITIONS = 1024

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Line = tuple[str, str]
"""A prompt already in the chat template, and the assistant's text up to and with `<|im_end|>`."""


def corpus(seed: int) -> Iterator[Line]:
    """Endless lines of the phrase book in DSPy's chat format, a third of them French to English."""
    choose = torch.Generator().manual_seed(seed)
    for phrase in grammar.noisy(seed):
        reverse = torch.rand((), generator=choose).item() < REVERSE_SHARE
        source, target = DIRECTIONS[1] if reverse else DIRECTIONS[0]
        prompt = chat.messages(source, target, getattr(phrase, source))
        yield _render(prompt), chat.completion(target, getattr(phrase, target)) + END


def _render(prompt: list[chat.Message]) -> str:
    """CHAT_TEMPLATE in Python, before there is a tokenizer to apply it."""
    turns = "".join(f"{START}{turn['role']}\n{turn['content']}{END}\n" for turn in prompt)
    return turns + f"{START}assistant\n"


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the corpus, so any text encodes and the words of the grammar are short."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = (part for line in islice(corpus(seed), 4000) for part in line)
    tokenizer.train_from_iterator(text, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, model_max_length=MAX_POSITIONS
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """A fresh Qwen2: 4 layers of width 128, head size 32 (the least that vLLM's CPU attention takes)."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def _batch(tokenizer: PreTrainedTokenizerFast, lines: list[Line]) -> dict[str, torch.Tensor]:
    """Right-padded `input_ids`, `attention_mask` and `labels` [B, L]; loss only on the assistant's tokens."""
    rows = [(tokenizer.encode(prompt), tokenizer.encode(answer)) for prompt, answer in lines]
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    assert tokenizer.pad_token_id is not None
    input_ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        input_ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    lengths = torch.tensor([len(prompt) + len(answer) for prompt, answer in rows])
    mask = (torch.arange(width) < lengths[:, None]).long()
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


def train(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, steps: int) -> float:
    """Supervised training in place; returns the mean loss of the last tenth of the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=WARMUP_STEPS),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - WARMUP_STEPS)),
        ],
        [WARMUP_STEPS],
    )
    lines, losses = corpus(seed), []
    model.train()
    for step in range(steps):
        loss = model(**_batch(tokenizer, list(islice(lines, BATCH)))).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)  # noqa: T201 - a script's progress
    model.eval()
    tail = losses[-max(1, steps // 10) :]
    return sum(tail) / len(tail)


def make(out: Path, seed: int = SEED, steps: int = STEPS) -> dict[str, object]:
    """Make the model, write the folder, return its figures (those of the bf16 weights as shipped)."""
    began = time.monotonic()
    torch.set_num_threads(2)
    tokenizer = make_tokenizer(seed)
    model = make_model(tokenizer, seed)
    loss = train(model, tokenizer, seed, steps)
    trained = time.monotonic() - began
    model.to(torch.bfloat16)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    figures: dict[str, object] = {
        "seed": seed,
        "steps": steps,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "loss": round(loss, 4),
        "train_seconds": round(trained, 1),
        **measure(model.float(), tokenizer),
    }
    (out / "FIGURES.json").write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the embedded model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    print(json.dumps(make(options.out, options.seed, options.steps), indent=2))  # noqa: T201 - its output


if __name__ == "__main__":
    main()
