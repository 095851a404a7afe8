"""Window blocks: what is released, found and evicted, in a cache that serves one prompt after the other."""

from __future__ import annotations

import numpy as np
import pytest

from pagetide.allocator.blocks import BlockAllocator
from pagetide.cache.layer_groups import LayerGroup, split_into_tables
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.cache.state_tables import tables_for

SIZE, WINDOW = 4, 32
GROUPS = (LayerGroup(), LayerGroup(2, WINDOW))


class OneRow:
    """A cache that computes one prompt at a time, in chunks of `chunk` tokens."""

    def __init__(self, num_blocks: int, groups: tuple[LayerGroup, ...] = GROUPS, chunk: int = 16, **more: int) -> None:
        tables = tables_for(groups, BlockAllocator(1 + num_blocks), SIZE, 1, 1000)
        self.cache = CacheManager(tables, PrefixHasher(SIZE, b"seed"), **more)
        self.chunk = chunk
        self.most_held = 0

    def serve(self, prompt: np.ndarray) -> int:
        """Compute `prompt`. Returns how many of its tokens were found."""
        cache, row = self.cache, np.array([0])
        chain = cache.chain(prompt, None)
        hit = cache.lookup(chain, len(prompt) - 1)
        assert cache.admit(0, len(prompt), hit) is not None
        computed = hit.num_tokens
        while computed < len(prompt):
            cache.release_passed(row, np.array([computed]).take)
            computed, _ = cache.reach(0, computed, min(computed + self.chunk, len(prompt)), cache.pool.available)
            cache.commit(0, chain, computed, is_prompt=computed == len(prompt))
            cache.check_invariants()
            self.most_held = max(self.most_held, int(cache.row_tables.held_blocks(row)[0]))
        cache.release(row)
        cache.check_invariants()
        return hit.num_tokens

    def found(self, prompt: np.ndarray) -> int:
        return self.cache.lookup(self.cache.chain(prompt, None), len(prompt) - 1).num_tokens


def prompts(*lengths: int) -> list[np.ndarray]:
    return [np.random.default_rng(i).integers(0, 99, n).astype(np.int32) for i, n in enumerate(lengths)]


def test_a_long_prompt_holds_its_windows_and_a_chunk() -> None:
    one = OneRow(1000)
    (prompt,) = prompts(400)
    one.serve(prompt)
    assert one.most_held <= 100 + 2 * (WINDOW // SIZE + 1 + 16 // SIZE)
    assert one.cache.pool.counts().live == 0
    assert one.found(prompt) == 396, "with memory to spare, all that was passed is found"
    assert one.found(prompt[:200]) == 196


def test_what_windows_have_passed_goes_first() -> None:
    one = OneRow(300)
    old, new = prompts(400, 320)
    one.serve(old)
    assert one.found(old[:200]) == 196
    one.serve(new)
    assert one.found(new) == 316
    assert one.found(old) == 396, "the end of the prompt is kept"
    assert one.found(old[:200]) == 0, "nothing is left in the middle, where no window is whole"


@pytest.mark.parametrize("tokens", [4, 8, 16])
def test_a_little_that_is_evicted_shortens_a_hit_and_does_not_end_it(tokens: int) -> None:
    """The longest place at which each group can go on, within half a window of the end."""
    (prompt, other) = prompts(400, tokens)
    holds = 100 + 2 * (WINDOW + WINDOW // 2) // SIZE
    one = OneRow(holds)
    one.serve(prompt)
    assert one.found(prompt) == 396
    one.serve(other)
    assert 396 - WINDOW // 2 <= one.found(prompt) < 400


def test_no_more_is_evicted_than_is_needed() -> None:
    """Nodes go with their window blocks: of those fewer are enough."""
    one = OneRow(900, (LayerGroup(), LayerGroup(6, WINDOW)), chunk=1000)
    for prompt in prompts(120, 120, 120):
        one.serve(prompt)
    free = one.cache.pool.num_free
    one.cache.swapping.make_room(70)
    assert 70 <= one.cache.pool.num_free - free < 77
    one.cache.check_invariants()


def test_where_requests_leave_a_common_prefix_pages_are_kept() -> None:
    common, *ends = prompts(200, 150, 150, 150, 150)
    one = OneRow(330)
    for end in ends[:2]:
        one.serve(np.concatenate((common, end)))
    one.serve(ends[2])
    assert one.found(np.concatenate((common, ends[3]))) == 200, "the second request went another way there"


def test_without_a_layer_that_reads_all_tokens() -> None:
    one = OneRow(40, (LayerGroup(1, WINDOW),))
    prompt, other = prompts(300, 60)
    one.serve(prompt)
    assert one.most_held <= WINDOW // SIZE + 1 + 16 // SIZE
    assert one.found(prompt) == 296
    assert one.serve(other) == 0
    assert one.cache.pool.counts().cached <= 40


def test_a_prompt_of_any_length_is_found_without_a_layer_that_reads_all_tokens() -> None:
    """It has more blocks of tokens than a small pool has window blocks, and a place in the index for each of them."""
    one = OneRow(20, (LayerGroup(1, WINDOW),))
    prompt, other = prompts(900, 60)
    one.serve(prompt)
    assert one.found(prompt) == 896
    assert one.serve(other) == 0
    assert one.found(other) == 56


@pytest.mark.parametrize("host_slots", [0, 900])
def test_rows_have_places_for_their_tokens_however_many_prompts_are_cached(host_slots: int) -> None:
    one = OneRow(100, (LayerGroup(1, WINDOW),), chunk=333, host_slots=host_slots)
    index = one.cache.index
    for prompt in prompts(*[999] * (index.capacity // 249 + 3)):
        assert one.serve(prompt) == 0
        assert one.found(prompt) == 996
    assert index.num_nodes > index.capacity - 250, "all nodes were in use"


def test_layers_are_split_into_tables_with_little_padding() -> None:
    assert split_into_tables([[8] * 7]) == [[0] * 7], "one group, one table"
    full, window = split_into_tables([[8] * 5, [8] * 29])
    assert (max(full), max(window)) == (0, 5)
    assert split_into_tables([[8] * 12, [8] * 12]) == [[0] * 12, [0] * 12]
    few, many = split_into_tables([[8] * 21, [8] * 7])
    assert (max(few), max(many)) == (2, 0)
