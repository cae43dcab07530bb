"""Lays sequences out in rows: a shared prompt once, its completions as branches that never see each other.

Neighbours: update.py packs a step, forward.py reads the packs. Pure tensors; knows neither torchtune nor
vLLM, nor the use of the tokens.

A tree is one prompt and the sequences that begin with it. Its trunk is the prompt without the last token;
each branch repeats that last token at its head, so the first sampled token is predicted inside its own
branch. Positions in a branch go on from the trunk. A token sees its trunk and its own branch, up to itself.
Lengths are rounded up to few distinct ones, so that compiled or cached kernels meet few shapes; with
`fixed_rows`, for kernels that are compiled for each shape, to those of `shared/fixed_row_lengths.py`.

Names carry dimensions: B rows, L places of a row, T sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.shared.fixed_row_lengths import fixed_length, whole_blocks

_ROUND_TO = 64
_PACK_OVERHEAD = 128
PADDING = -1


@dataclass(frozen=True)
class Sequences:
    """Sequences to pack: their token ids, the sampled ones among them, and each sequence's beginning in the
    batch."""

    tokens: Sequence[Tensor]
    sampled: Sequence[Tensor]
    offsets: Sequence[int]


@dataclass(frozen=True)
class Pack:
    """A micro-batch of rows, and the tokens that are predicted in it.

    `row_T`, `place_T`: the place of the hidden state that predicts a sampled token; `target_T`: that token;
    `source_T`: its index among the step's N tokens; `sequence_T`: its sequence.
    """

    tokens_BL: Tensor
    positions_BL: Tensor
    tree_BL: Tensor
    branch_BL: Tensor
    row_T: Tensor
    place_T: Tensor
    target_T: Tensor
    source_T: Tensor
    sequence_T: Tensor

    def mask_BLL(self) -> Tensor:
        """True if place i sees place j: same tree, the trunk or its own branch, and j not after i."""
        same_tree = self.tree_BL[:, :, None] == self.tree_BL[:, None, :]
        branch_i, branch_j = self.branch_BL[:, :, None], self.branch_BL[:, None, :]
        visible = same_tree & ((branch_j == 0) | (branch_i == branch_j))
        # Padding shares a tree with nothing but padding: it sees itself, so no softmax is empty.
        return visible.tril()


@dataclass
class _Row:
    """A row while it is filled."""

    tokens: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    tree: list[Tensor] = field(default_factory=list)
    branch: list[Tensor] = field(default_factory=list)
    place: list[Tensor] = field(default_factory=list)
    target: list[Tensor] = field(default_factory=list)
    source: list[Tensor] = field(default_factory=list)
    sequence: list[Tensor] = field(default_factory=list)
    length: int = 0
    trees: int = 0


@dataclass(frozen=True)
class _Tree:
    prompt: Tensor
    members: tuple[int, ...]
    length: int


def pack(
    sequences: Sequences,
    chosen: Sequence[int],
    budget: int,
    *,
    fixed_rows: bool = False,
    one_sequence_per_row: bool = False,
) -> list[Pack]:
    """Pack the chosen sequences into micro-batches of at most `budget` places, padding counted.

    No row is longer than the longest tree that fits needs, and rows that are much shorter are packs of their
    own. A tree that is past the budget, for it is one sequence that is longer, is a pack by itself and makes
    no other row longer. With `one_sequence_per_row` each sequence has a row of its own: for models that pass
    a state along a row. The order depends on nothing but the arguments. Raises ValueError for a sequence
    without a prompt.
    """
    if fixed_rows:
        budget = whole_blocks(budget)
    trees = _split(sequences, _trees(sequences, chosen, one_sequence_per_row), budget)
    packs: list[tuple[list[_Row], int]] = []
    if fitting := [tree for tree in trees if tree.length <= budget]:
        length = budget if fixed_rows else _rounded(max(tree.length for tree in fitting))
        rows = _fill(sequences, fitting, length, one_sequence_per_row)
        if fixed_rows:
            cut = rows if one_sequence_per_row else _fill_to_the_end(sequences, fitting, length)
            packs = [([row], length) for row in min(rows, cut, key=lambda rows: _fixed_places(rows, budget))]
        else:
            packs = [(some, some[0].length) for some in _group_by_length(rows, budget)]
    packs += [(_fill(sequences, [tree], tree.length), tree.length) for tree in trees if tree.length > budget]
    if fixed_rows:
        return [_stack(rows, fixed_length(max(row.length for row in rows), budget)) for rows, _ in packs]
    return [_stack(rows, _rounded(length)) for rows, length in packs]


def _first_sampled(sequences: Sequences, sequence: int) -> int:
    first = int(sequences.sampled[sequence].to(torch.uint8).argmax())
    if first == 0:
        raise ValueError(f"sequence {sequence} has no prompt or no sampled token")
    return first


def _trees(sequences: Sequences, chosen: Sequence[int], one_sequence_per_row: bool) -> Iterator[_Tree]:
    """Samples by equal prompts, in order of first appearance; alone, each as a tree of its own."""
    by_prompt: dict[bytes, list[int]] = {}
    for sequence in chosen:
        prompt = sequences.tokens[sequence][: _first_sampled(sequences, sequence)]
        key = b"%d" % sequence if one_sequence_per_row else prompt.numpy().tobytes()
        by_prompt.setdefault(key, []).append(sequence)
    for members in by_prompt.values():
        prompt = sequences.tokens[members[0]][: _first_sampled(sequences, members[0])]
        yield _Tree(prompt, tuple(members), 0)


def _split(sequences: Sequences, trees: Iterator[_Tree], budget: int) -> list[_Tree]:
    """Cut a tree that is over the budget into several with the same trunk."""
    return [part for tree in trees for part in _split_at(sequences, tree, budget, budget)]


def _split_at(sequences: Sequences, tree: _Tree, first: int, others: int) -> Iterator[_Tree]:
    """A tree in parts with the same trunk, the first of at most `first` places if any sequence fits them.

    A sequence that is past `others` is a part by itself.
    """
    trunk = len(tree.prompt) - 1
    members: list[int] = []
    length, limit = trunk, first
    for sequence in tree.members:
        branch = len(sequences.tokens[sequence]) - 1 - trunk
        if length + branch > limit:
            limit = others
            if members:
                yield _Tree(tree.prompt, tuple(members), length)
                members, length = [], trunk
        members.append(sequence)
        length += branch
    yield _Tree(tree.prompt, tuple(members), length)


def _fill(
    sequences: Sequences, trees: list[_Tree], length: int, one_sequence_per_row: bool = False
) -> list[_Row]:
    """First fit, longest first; ties by order of appearance. Alone, a row for each tree."""
    rows: list[_Row] = []
    for tree in sorted(trees, key=lambda tree: -tree.length):
        row = next(
            (row for row in rows if not one_sequence_per_row and row.length + tree.length <= length), None
        )
        if row is None:
            row = _Row()
            rows.append(row)
        _append_tree(sequences, tree, row)
    return rows


def _fill_to_the_end(sequences: Sequences, trees: list[_Tree], length: int) -> list[_Row]:
    """One row after the other, longest tree first; a tree is cut where a row ends, its trunk once more in the
    next row. Each tree fits a row."""
    rows = [_Row()]
    for tree in sorted(trees, key=lambda tree: -tree.length):
        for part in _split_at(sequences, tree, length - rows[-1].length, length):
            if rows[-1].length + part.length > length:
                rows.append(_Row())
            _append_tree(sequences, part, rows[-1])
    return rows


def _fixed_places(rows: list[_Row], budget: int) -> int:
    """How many places the rows compute, padding too."""
    return sum(fixed_length(row.length, budget) for row in rows)


def _group_by_length(rows: list[_Row], budget: int) -> list[list[_Row]]:
    """Cut the rows, longest first, into packs within the budget that have the fewest places in all.

    As rows of a pack are as long as its longest. Each pack counts as some places more, for the fixed time of
    its forward and backward pass.
    """
    rows = sorted(rows, key=lambda row: -row.length)
    least, begins = [0], [0]  # of so many rows: places, and where the last of their packs begins
    for end in range(1, len(rows) + 1):
        found = []
        for start in reversed(range(end)):
            places = (end - start) * _rounded(rows[start].length)
            if found and places > budget:
                break
            found.append((least[start] + places + _PACK_OVERHEAD, start))
        places, start = min(found)
        least.append(places)
        begins.append(start)
    packs, end = list[list[_Row]](), len(rows)
    while end:
        packs.append(rows[begins[end] : end])
        end = begins[end]
    return packs[::-1]


def _append_tree(sequences: Sequences, tree: _Tree, row: _Row) -> None:
    trunk = len(tree.prompt) - 1
    _append(row, tree.prompt[:trunk], start=0, branch=0)
    for number, sequence in enumerate(tree.members, start=1):
        tokens, sampled = sequences.tokens[sequence], sequences.sampled[sequence].bool()
        at = row.length
        # The last token predicts nothing, so it needs no place.
        _append(row, tokens[trunk:-1], start=trunk, branch=number)
        (index,) = sampled.nonzero(as_tuple=True)
        row.place.append(at + index - 1 - trunk)
        row.target.append(tokens[index])
        row.source.append(index + sequences.offsets[sequence])
        row.sequence.append(torch.full_like(index, sequence))
    row.trees += 1


def _append(row: _Row, tokens: Tensor, *, start: int, branch: int) -> None:
    size = len(tokens)
    row.tokens.append(tokens)
    row.positions.append(torch.arange(start, start + size))
    row.tree.append(torch.full((size,), row.trees))
    row.branch.append(torch.full((size,), branch))
    row.length += size


def _stack(rows: list[_Row], length: int) -> Pack:
    def padded(name: str, fill: int) -> Tensor:
        stacked = torch.full((len(rows), length), fill, dtype=torch.long)
        for number, row in enumerate(rows):
            stacked[number, : row.length] = torch.cat(getattr(row, name))
        return stacked

    def joined(name: str) -> Tensor:
        return torch.cat([piece for row in rows for piece in getattr(row, name)]).long()

    sizes = [sum(len(piece) for piece in row.target) for row in rows]
    return Pack(
        tokens_BL=padded("tokens", 0),
        positions_BL=padded("positions", 0),
        tree_BL=padded("tree", PADDING),
        branch_BL=padded("branch", 0),
        row_T=torch.arange(len(rows)).repeat_interleave(torch.tensor(sizes)),
        place_T=joined("place"),
        target_T=joined("target"),
        source_T=joined("source"),
        sequence_T=joined("sequence"),
    )


def _rounded(length: int) -> int:
    return -(-length // _ROUND_TO) * _ROUND_TO
