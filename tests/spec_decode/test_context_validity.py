# SPDX-License-Identifier: Apache-2.0
"""Which positions have draft KV: through sharing, reuse of blocks, faults and recovery, against a plain model."""

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dflash.spec_decode import ContextValidity

BLOCK = 4


def test_a_fresh_request_has_all_of_its_context() -> None:
    books = ContextValidity(BLOCK)
    assert books.begin("a", [1, 2, 3], 0) == 0
    assert books.begin("b", [1, 2, 4], 8) == 0
    assert books.start("a") == books.start("b") == books.start("unknown") == 0


def test_restored_positions_are_no_context_for_anyone_who_shares_them() -> None:
    books = ContextValidity(BLOCK)
    assert books.begin("a", [1, 2, 3], 8, restored=(0, 8)) == 8
    assert books.begin("b", [1, 2, 4], 8) == 8
    assert books.begin("c", [1, 5, 6], 4) == 4
    assert books.begin("d", [7, 8], 4) == 0


def test_a_local_prefix_before_the_restored_part_is_lost_with_it() -> None:
    """Attention takes one stretch up to the end, so that the written blocks before a hole are of no use."""
    books = ContextValidity(BLOCK)
    assert books.begin("a", [1, 2, 3, 4], 12, restored=(4, 12)) == 12
    assert books.begin("b", [1, 5], 4) == 0


def test_part_of_a_block_restored_ends_where_the_restored_part_does() -> None:
    books = ContextValidity(BLOCK)
    assert books.begin("a", [1, 2], 6, restored=(0, 6)) == 6


def test_blocks_handed_out_anew_are_clean() -> None:
    books = ContextValidity(BLOCK)
    books.begin("a", [1, 2, 3], 8, restored=(0, 8))
    books.forget({"b"})
    assert books.start("a") == 0
    books.begin("b", [2], 0)
    books.allocated([1])
    assert books.begin("c", [1, 2], 8) == 0


def test_missed_rows_restart_the_context_behind_them() -> None:
    books = ContextValidity(BLOCK)
    books.begin("a", [1, 2, 3], 0)
    books.missed("a", [1, 2, 3], 2, 6)
    assert books.start("a") == 6
    books.missed("a", [1, 2, 3], 6, 6)
    assert books.start("a") == 6
    assert books.begin("b", [1, 2, 4], 8) == 8


def test_the_block_that_stands_for_a_passed_window_is_never_marked() -> None:
    books = ContextValidity(BLOCK)
    books.begin("a", [0, 0, 3], 12, restored=(0, 12))
    assert books.begin("b", [0, 0, 4], 8) == 0
    assert books.begin("c", [0, 0, 3, 5], 12) == 12


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_unwritten_row_is_ever_context(data) -> None:
    """Random requests over a small pool, as a scheduler with prefix caching would place them: the model keeps, a
    physical slot, whether anybody wrote it since the block was handed out."""
    books, pool = ContextValidity(BLOCK), 10
    written = [[False] * BLOCK for _ in range(pool + 1)]
    cached: dict[tuple[int, ...], int] = {}
    held: dict[str, list[int]] = {}
    for step in range(data.draw(st.integers(1, 8))):
        for name in [name for name in held if data.draw(st.booleans(), label="ends")]:
            del held[name]
        books.forget(held)
        path = tuple(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3), label="prompt blocks"))
        blocks: list[int] = []
        for end in range(1, len(path) + 1):
            block = cached.get(path[:end])
            if block is None:
                break
            blocks.append(block)
        local = len(blocks)
        free = [b for b in range(1, pool + 1) if b not in blocks and not any(b in other for other in held.values())]
        if len(free) < len(path) - local + 1:
            continue
        outside = data.draw(st.integers(0, len(path) - local), label="restored blocks")
        for block in free[: len(path) - local + 1]:
            cached = {key: value for key, value in cached.items() if value != block}
            written[block] = [False] * BLOCK
            blocks.append(block)
        computed = (local + outside) * BLOCK
        name = f"r{step}"
        books.begin(name, blocks, computed, (local * BLOCK, computed) if outside else None)
        held[name] = blocks
        end = len(path) * BLOCK + 2
        if data.draw(st.booleans(), label="the drafter faults"):
            books.missed(name, blocks, computed, end)
        else:
            for position in range(computed, end):
                written[blocks[position // BLOCK]][position % BLOCK] = True
        for index in range(local, len(path)):
            cached[path[: index + 1]] = blocks[index]
        start = -(-books.start(name) // BLOCK) * BLOCK
        for position in range(start, end):
            assert written[blocks[position // BLOCK]][position % BLOCK], f"{name} attends {position}"
