# SPDX-License-Identifier: Apache-2.0
"""Which positions of a request have draft KV: the rest is never attended (vllm#47930).

A KV connector restores what the target wrote and knows nothing of the drafter; a drafter that faulted wrote nothing.
The target does not mind, but a draft that attends to such rows is noise.
"""

from collections.abc import Container, Iterable, Sequence


class ContextValidity:
    """Host bookkeeping by physical cache block, so that a later request that shares a block is told too.

    A request's usable context is [start, end of what is written): `start(request_id)`, 0 for almost all. Blocks are
    those of one KV cache group of `block_size` tokens; a request's own list is in the order of its positions.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._unwritten: set[int] = set()
        self._start: dict[str, int] = {}

    @property
    def has_starts(self) -> bool:
        """Whether any request's context begins behind its first position."""
        return bool(self._start)

    def start(self, request_id: str) -> int:
        """The first position from which on the request's draft KV is written."""
        return self._start.get(request_id, 0)

    def begin(
        self, request_id: str, blocks: Sequence[int], computed: int, restored: tuple[int, int] | None = None
    ) -> int:
        """A request enters the batch, new or resumed, with `computed` tokens that are in the cache already.

        restored: positions [first, end) among them that came from outside. Returns how many of the computed positions
        must not be attended.
        """
        self._start.pop(request_id, None)
        held = -(-computed // self.block_size)
        self.allocated(blocks[held:])
        if restored is not None:
            first, end = restored
            self._mark(blocks, first, end)
        start = 0
        if self._unwritten:
            last = max((i for i, block in enumerate(blocks[:held]) if block in self._unwritten), default=-1)
            start = min((last + 1) * self.block_size, computed)
        if start:
            self._start[request_id] = start
        return start

    def allocated(self, blocks: Iterable[int]) -> None:
        """Blocks that were handed out empty: what stands in them will be written before it is read."""
        if self._unwritten:
            self._unwritten.difference_update(blocks)

    def missed(self, request_id: str, blocks: Sequence[int], first: int, end: int) -> None:
        """The positions [first, end) of a request should have been written and were not."""
        if end > first:
            self._mark(blocks, first, end)
            self.restart(request_id, end)

    def restart(self, request_id: str, start: int) -> None:
        """Nothing before `start` is to be attended for this request, whoever wrote it."""
        self._start[request_id] = max(start, self.start(request_id))

    def forget(self, alive: Container[str]) -> None:
        """Drop what belongs to requests that have ended. Their blocks keep their marks: others may share them."""
        for request_id in [request_id for request_id in self._start if request_id not in alive]:
            del self._start[request_id]

    def _mark(self, blocks: Sequence[int], first: int, end: int) -> None:
        # Block 0 stands for blocks that have left a sliding window.
        covered = blocks[first // self.block_size : -(-end // self.block_size)]
        self._unwritten.update(block for block in covered if block)
