"""The tokens that a grammar allowed at each sampled token, by the same compiler as the engine's (C9).

Neighbours: shared/grammar.py has the grammar as the gateway wrote it into the batch, forward.py asks for a
pack's masks, losses.py applies them. The model's tokenizer and xgrammar are loaded for the first grammar
only. Each turn's masks are computed once a step, in several threads, and equal ones are kept once.

Names carry dimensions: N tokens of the step, T sampled tokens of a pack, W words of 32 bits, one bit for each
of the V tokens of the vocabulary.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runtime.shared.batch import Batch, BatchError
from runtime.shared.grammar import Grammar
from runtime.trainer.network import end_tokens, load_tokenizer
from runtime.trainer.packing import Pack

if TYPE_CHECKING:
    import xgrammar

_log = logging.getLogger(__name__)

_THREADS = 8
_CACHE_BYTES = 256 * 2**20
# Turns whose masks are computed side by side.
_TURNS_AT_ONCE = 64
# The row of a token that may be any.
_ANY = 0


@dataclass(frozen=True)
class _Turn:
    """A turn that was held to a grammar: its places among the N tokens, and its sequence."""

    span: slice
    sequence: int
    grammar: int


class GrammarMasks:
    """Of one model: `folder` has its tokenizer, `vocabulary` is V of the engine and the output layer."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self._folder = folder
        self._vocabulary = vocabulary
        self._step: _StepMasks | None = None

    def checked(self, batch: Batch) -> Batch:
        """The batch, with the sequences named that its grammars, compiled here, do not allow: they are not
        trained.

        Every rank comes to the same. Raises BatchError where the grammars cannot be compiled.
        """
        if not batch.meta.get("grammars"):
            return batch
        try:
            others = sorted({turn.sequence for turn in _turns(batch) if not self._allows(batch, turn)})
        except (OSError, ValueError, RuntimeError, TypeError, KeyError) as error:
            raise BatchError(f"the grammars of its answers cannot be repeated: {error}") from error
        if not others:
            return batch
        _log.warning("%d sequences of step %d are of other grammars than recorded", len(others), batch.step)
        return replace(batch, meta=batch.meta | {"of_other_grammars": others})

    def of_pack(self, one: Pack, batch: Batch) -> Tensor | None:
        """A bit for each token that was allowed [T, W], int32 on the CPU; None where no grammar held a token.

        Tokens outside of grammars may have been any.
        """
        if self._step is None or self._step.batch is not batch:
            self._step = _StepMasks(batch, self._vocabulary, self._matchers(batch))
        return self._step.of_pack(one)

    def _allows(self, batch: Batch, turn: _Turn) -> bool:
        matcher = self._matchers(batch)(turn)
        return all(
            matcher.is_terminated() or matcher.accept_token(token)
            for token in batch.tokens[turn.span].tolist()
        )

    def _matchers(self, batch: Batch) -> Callable[[_Turn], xgrammar.GrammarMatcher]:
        """Makes a matcher for a turn of the batch; its compiler keeps what was compiled."""
        import xgrammar

        grammars = [Grammar.from_json(one) for one in batch.meta["grammars"]]
        compile_as = {
            "json": self._compiler.compile_json_schema,
            "regex": self._compiler.compile_regex,
            "ebnf": self._compiler.compile_grammar,
        }

        def matcher(turn: _Turn) -> xgrammar.GrammarMatcher:
            grammar = grammars[turn.grammar]
            stops = {*grammar.stop_token_ids, *self._ends}
            compiled = compile_as[grammar.kind](grammar.text)
            return xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(stops))

        return matcher

    @functools.cached_property
    def _ends(self) -> frozenset[int]:
        return end_tokens(self._folder, self._tokenizer)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._folder)

    @functools.cached_property
    def _compiler(self) -> xgrammar.GrammarCompiler:
        """With the engine's own settings."""
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._vocabulary)
        return xgrammar.GrammarCompiler(info, max_threads=_THREADS, cache_limit_bytes=_CACHE_BYTES)


class _StepMasks:
    """The masks of one step, of those turns that a pack of this rank has asked for."""

    def __init__(
        self, batch: Batch, vocabulary: int, matchers: Callable[[_Turn], xgrammar.GrammarMatcher]
    ) -> None:
        self.batch = batch
        self._matchers = matchers
        self._words = -(-vocabulary // 32)
        self._rows: list[Tensor] = []
        self._known: dict[bytes, int] = {}
        self._row_N = torch.full((len(batch.tokens),), _ANY, dtype=torch.int64)
        self._left = {turn.sequence: list[_Turn]() for turn in _turns(batch)}
        for turn in _turns(batch):
            self._left[turn.sequence].append(turn)
        self._row(torch.full((self._words,), -1, dtype=torch.int32))

    def of_pack(self, one: Pack) -> Tensor | None:
        """As `GrammarMasks.of_pack` says."""
        turns = [turn for here in one.sequence_T.unique().tolist() for turn in self._left.pop(here, ())]
        for start in range(0, len(turns), _TURNS_AT_ONCE):
            self._fill(turns[start : start + _TURNS_AT_ONCE])
        rows, row_T = self._row_N[one.source_T].unique(return_inverse=True)
        if rows.tolist() == [_ANY]:
            return None
        return torch.stack([self._rows[row] for row in rows.tolist()])[row_T]

    def _fill(self, turns: list[_Turn]) -> None:
        """Token by token, all turns at once."""
        import xgrammar

        batched = xgrammar.BatchGrammarMatcher(max_threads=_THREADS)
        masks = torch.zeros(len(turns), self._words, dtype=torch.int32)
        alive = [(turn, self._matchers(turn)) for turn in turns]
        place = 0
        while alive:
            matchers = [matcher for _, matcher in alive]
            batched.batch_fill_next_token_bitmask(matchers, masks, list(range(len(alive))))
            for row, (turn, _) in enumerate(alive):
                self._row_N[turn.span.start + place] = self._row(masks[row])
            tokens = [int(self.batch.tokens[turn.span.start + place]) for turn, _ in alive]
            batched.batch_accept_token(matchers, tokens)
            place += 1
            alive = [
                (turn, matcher)
                for turn, matcher in alive
                if turn.span.start + place < turn.span.stop and not matcher.is_terminated()
            ]

    def _row(self, mask_W: Tensor) -> int:
        """The number of a mask among those that differ."""
        key = mask_W.numpy().tobytes()
        if key not in self._known:
            self._known[key] = len(self._rows)
            self._rows.append(mask_W.clone())
        return self._known[key]


def _turns(batch: Batch) -> Iterator[_Turn]:
    """Those that were held to a grammar."""
    for sequence, sample in enumerate(batch.meta.get("samples") or ()):
        begins = int(batch.offsets[sequence])
        for turn in sample.get("turns") or ():
            if turn.get("grammar") is not None:
                span = slice(begins + turn["start"], begins + turn["end"])
                yield _Turn(span, sequence, int(turn["grammar"]))
