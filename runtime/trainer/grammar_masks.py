"""The tokens that a grammar allowed at each sampled token, by the same compiler as the engine's (C9).

Neighbours: shared/grammar.py has the grammar as the gateway wrote it into the batch, forward.py asks for a
pack's masks, losses.py applies them. The model's tokenizer and xgrammar are loaded for the first grammar
only.

Names carry dimensions: N tokens of the step, T sampled tokens of a pack, W words of 32 bits, one bit for each
of the V tokens of the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runtime.shared.batch import Batch, BatchError
from runtime.shared.grammar import Grammar
from runtime.trainer.network import load_tokenizer
from runtime.trainer.packing import Pack

if TYPE_CHECKING:
    import xgrammar

_THREADS = 8
_CACHE_BYTES = 64 * 2**20


class GrammarMasks:
    """Of one model: `folder` has its tokenizer, `vocabulary` is V of the engine and the output layer."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self._folder = folder
        self._vocabulary = vocabulary

    def of_pack(self, one: Pack, batch: Batch) -> Tensor | None:
        """A bit for each token that was allowed [T, W], int32 on the CPU; None where no grammar held a token.

        Tokens outside of grammars may have been any. Raises BatchError where a grammar does not allow what
        was sampled by it: then the engine's was another.
        """
        place_N = torch.full((len(batch.tokens),), -1, dtype=torch.int64)
        place_N[one.source_T] = torch.arange(len(one.source_T))
        here = [(span, grammar) for span, grammar in _held(batch) if bool((place_N[span] >= 0).any())]
        if not here:
            return None
        masks_TW = torch.full((len(one.source_T), -(-self._vocabulary // 32)), -1, dtype=torch.int32)
        for span, grammar in here:
            self._fill(masks_TW, grammar, batch.tokens[span].tolist(), place_N[span].tolist())
        return masks_TW

    def _fill(self, masks_TW: Tensor, grammar: Grammar, tokens: list[int], places: list[int]) -> None:
        matcher = self._matcher(grammar)
        for token, place in zip(tokens, places, strict=True):
            if matcher.is_terminated():
                return
            if place >= 0:
                matcher.fill_next_token_bitmask(masks_TW, place)
            if not matcher.accept_token(token):
                raise BatchError(
                    f"the token {token} was sampled by a grammar ({grammar.kind}) that does not allow it"
                )

    def _matcher(self, grammar: Grammar) -> xgrammar.GrammarMatcher:
        import xgrammar

        compile_grammar = {
            "json": self._compiler.compile_json_schema,
            "regex": self._compiler.compile_regex,
            "ebnf": self._compiler.compile_grammar,
        }[grammar.kind]
        stops = {*grammar.stop_token_ids, *self._end}
        return xgrammar.GrammarMatcher(compile_grammar(grammar.text), override_stop_tokens=sorted(stops))

    @functools.cached_property
    def _end(self) -> tuple[int, ...]:
        end = self._tokenizer.eos_token_id
        return () if end is None else (end,)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._folder)

    @functools.cached_property
    def _compiler(self) -> xgrammar.GrammarCompiler:
        """With the engine's own settings; compiled grammars are kept."""
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._vocabulary)
        return xgrammar.GrammarCompiler(info, max_threads=_THREADS, cache_limit_bytes=_CACHE_BYTES)


def _held(batch: Batch) -> Iterator[tuple[slice, Grammar]]:
    """The turns that were held to a grammar: their places among the N tokens."""
    grammars = [Grammar.from_json(one) for one in batch.meta.get("grammars") or ()]
    for row, sample in enumerate(batch.meta.get("samples") or ()):
        begins = int(batch.offsets[row])
        for turn in sample.get("turns") or ():
            if turn.get("grammar") is not None:
                yield slice(begins + turn["start"], begins + turn["end"]), grammars[turn["grammar"]]
