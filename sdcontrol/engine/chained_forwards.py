"""Forwards whose tokens only the device knows: what is sampled in one round is fed in the next.

Where tokens go is known beforehand, so that it is brought to the device once, for all rounds:

    chains   segments of the tokens to come, the longest first; round j feeds token j of each
    moves    [rounds, 3, chains]: position, slot and key index of what a round feeds; a chain that
             has ended goes to the null block and sees no keys

Nothing here waits for the device, unless a forward has no graph. Knows segments and runners;
nothing of drafts, sampling or requests.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from sdcontrol.engine.copies import upload
from sdcontrol.engine.packing import IntArray, Segment, pack
from sdcontrol.engine.runner import Graphs, ModelRunner
from sdcontrol.engine.static_inputs import Captured
from sdcontrol.engine.walk import take_rows

__all__ = ["ChainedForwards"]

_NO_KEYS = -(1 << 30)  # a key index so far down that nothing is seen
_FEWEST_LEFT = 2  # a smaller graph is taken once fewer than one chain in so many goes on


class ChainedForwards:
    """One forward per round over the chains that go on.

    The ids in `chains` do not matter. Whatever other forward the runner is to make comes before or
    after all of these: they keep what stands in the inputs of a graph.
    """

    def __init__(self, runner: ModelRunner, chains: Sequence[Segment]) -> None:
        lengths = [len(chain.tokens) for chain in chains]
        assert lengths == sorted(lengths, reverse=True)
        self._runner = runner
        self._chains = chains
        self._num_open = [sum(n > index for n in lengths) for index in range(lengths[0])]
        self._moves = upload(_moves(chains), runner.device)
        self._round = 0
        self._captured: Captured | None = None
        self._width = 0  # chains that the graph was taken for

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[open, vocab]` of the next round; the ids `tokens`, int64, may be of more chains.

        The logits are good until the runner's next forward.
        """
        index, self._round = self._round, self._round + 1
        fed = tokens[: self._num_open[index]]
        graphs = self._runner.graphs
        if graphs is not None:
            captured = self._graph_for(graphs, len(fed))
            if captured is not None:
                captured.inputs.go_on(fed, self._moves[index, :, : self._width])
                return graphs.replay(captured, len(fed))
        return self._eager(fed, index)

    def _graph_for(self, graphs: Graphs, num_open: int) -> Captured | None:
        """With pages up to the ends of the chains: until `go_on` they stand at their last token."""
        if self._captured is None or _FEWEST_LEFT * num_open <= self._width:
            ends = [_piece(chain, len(chain.tokens) - 1) for chain in self._chains[:num_open]]
            self._captured = graphs.captured(ends)
            self._width = num_open
            if self._captured is not None:
                self._captured.inputs.load(ends)
        return self._captured

    def _eager(self, tokens: Tensor, index: int) -> Tensor:
        runner = self._runner
        assert runner.cache is not None
        pieces = [_piece(chain, index) for chain in self._chains[: len(tokens)]]
        batch = pack(pieces, runner.cache.block_size, runner.device)
        batch.input_ids = take_rows(tokens, batch.order).unsqueeze(0)
        return take_rows(runner.compute(batch, runner.backend), batch.first_row)


def _piece(chain: Segment, index: int) -> Segment:
    """One token of a chain."""
    return Segment([0], chain.start + index, chain.table, [chain.slots[index]])


def _moves(chains: Sequence[Segment]) -> IntArray:
    lengths = np.array([len(chain.tokens) for chain in chains])
    rounds = np.arange(lengths[0])[:, None]
    positions = rounds + np.array([chain.start for chain in chains])
    is_open = rounds < lengths
    moves: IntArray = np.zeros((len(rounds), 3, len(chains)), dtype=np.int64)
    moves[:, 0] = np.where(is_open, positions, 0)
    moves[:, 2] = np.where(is_open, positions - [c.table.shift for c in chains], _NO_KEYS)
    moves[:, 1].T[is_open.T] = [slot for chain in chains for slot in chain.slots]
    return moves
