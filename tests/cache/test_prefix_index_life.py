"""Random lives of a prefix index and of the consumers of its events, on device and host, against a dict of token tuples."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from prefix_fakes import EventCopy, OldestFirst, Watched, WeakHasher, blocks_of

from pagetide.allocator.errors import BlockMisuse
from pagetide.cache.cache_events import CacheEventLog
from pagetide.cache.eviction import Lru
from pagetide.cache.prefix_hash import Chain, PrefixHasher
from pagetide.cache.prefix_index import PrefixIndex
from pagetide.cache.prefix_tree import PrefixTree
from pagetide.cache.reuse_density import ReuseDensity

Real = type[Lru] | type[ReuseDensity]

SIZE = 2
NUM_BLOCKS = 24
NUM_SLOTS = 5
Prefix = tuple[bytes | None, tuple[int, ...]]  # the salt, and all tokens up to the end of a block
PICKS = st.lists(st.integers(0, 1000), max_size=6)
TOKENS = st.lists(st.integers(0, 1), max_size=14)


@dataclass
class Sequence:
    chain: Chain
    table: list[int] = field(default_factory=list)
    num_done: int = 0

    def prefix(self, i: int) -> Prefix:
        """Of block `i`."""
        return self.chain.salt, tuple(self.chain.tokens[: (i + 1) * SIZE].tolist())


def behind(prefix: Prefix, other: Prefix) -> bool:
    """Whether `prefix` is `other`, or stands behind it."""
    return prefix[0] == other[0] and prefix[1][: len(other[1])] == other[1]


class Life(RuleBasedStateMachine):
    """`blocks` and `slots` say what is findable where. Every answer of the index is predicted from them, exactly."""

    num_bits = 128
    real: Real | None = None  # the policy; None: the naive one alone

    def __init__(self) -> None:
        super().__init__()
        hasher = PrefixHasher(SIZE, b"seed") if self.num_bits == 128 else WeakHasher(SIZE, self.num_bits, b"seed")
        policies: list[OldestFirst] = []

        def make(tree: PrefixTree) -> OldestFirst:
            policies.append(Watched(tree, self.real(tree)) if self.real else OldestFirst(tree))
            return policies[-1]

        self.log = CacheEventLog()
        self.index = PrefixIndex(hasher, NUM_BLOCKS, make, num_slots=NUM_SLOTS, host_eviction=make)
        self.index.report_to(self.log)
        self.copy = EventCopy()
        self.looks_now_and_then = False
        self.policy, self.host_policy = policies
        self.free = set(range(1, NUM_BLOCKS))
        self.references = dict.fromkeys(self.free, 0)
        self.sequences: list[Sequence] = []
        self.blocks: dict[Prefix, int] = {}
        self.slots: dict[Prefix, int] = {}

    def digest(self, prefix: Prefix) -> bytes:
        chain = self.index.hasher.chain(prefix[1], prefix[0])
        return chain.digests(chain.num_blocks)[-1].tobytes()

    @property
    def evictable(self) -> list[int]:
        """Blocks in the order of a walk through what is findable, which is none in particular."""
        return [block for block in self.blocks.values() if not self.references[block]]

    def expected_hit(self, chain: Chain, most: int) -> tuple[list[int], list[int]]:
        blocks, slots = [], []
        for i in range(min(most // SIZE, chain.num_blocks)):
            prefix = Sequence(chain).prefix(i)
            if prefix in self.blocks:
                blocks.append(self.blocks[prefix])
            elif prefix in self.slots:
                slots.append(self.slots[prefix])
            else:
                break
        return blocks, slots

    def take_free(self, n: int) -> list[int]:
        taken = sorted(self.free)[:n]
        self.free -= set(taken)
        self.references |= dict.fromkeys(taken, 1)
        return taken

    def retain(self, blocks: list[int]) -> None:
        self.index.mark_used([block for block in blocks if not self.references[block]])
        for block in blocks:
            self.references[block] += 1

    def release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.references[block] -= 1
        gone = [block for block in blocks if not self.references[block]]
        findable = set(self.blocks.values())
        self.index.mark_evictable([block for block in gone if block in findable])
        self.free |= {block for block in gone if block not in findable}

    def forget(self, blocks: list[int], slots: list[int]) -> None:
        """`blocks` and `slots` are findable no longer."""
        for known, gone in ((self.blocks, blocks), (self.slots, slots)):
            assert len(set(gone)) == len(gone)
            for prefix in [prefix for prefix, place in known.items() if place in gone]:
                del known[prefix]
        self.free |= {block for block in blocks if not self.references[block]}

    def places_behind(self, prefixes: list[Prefix]) -> tuple[set[int], set[int]]:
        return tuple(  # type: ignore[return-value]
            {place for other, place in known.items() if any(behind(other, prefix) for prefix in prefixes)}
            for known in (self.blocks, self.slots)
        )

    @rule(tokens=TOKENS, salt=st.sampled_from([None, None, b""]), most=st.integers(0, 14), back=st.booleans())
    def begin(self, tokens: list[int], salt: bytes | None, most: int, back: bool) -> None:
        chain = self.index.hasher.chain(tokens, salt)
        hit = self.index.lookup(chain, most)
        assert (hit.blocks.tolist(), hit.slots.tolist()) == self.expected_hit(chain, most)
        assert hit.num_tokens == SIZE * (len(hit.blocks) + len(hit.slots)) == SIZE * len(hit.nodes)
        sequence = Sequence(chain, hit.blocks.tolist())
        self.retain(sequence.table)
        returning = hit.slots[: len(self.free)].tolist() if back else []
        if returning:
            fresh = self.take_free(len(returning))
            self.index.promote(returning, fresh)
            for i, block in enumerate(fresh, len(sequence.table)):
                del self.slots[sequence.prefix(i)]
                self.blocks[sequence.prefix(i)] = block
            sequence.table += fresh
        self.index.accept(hit)
        assert len(self.policy.hits[-1]) == len(sequence.table)
        sequence.num_done = len(sequence.table)
        self.sequences.append(sequence)

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 1000), n=st.integers(1, 7))
    def compute(self, pick: int, n: int) -> None:
        sequence = self.sequences[pick % len(self.sequences)]
        first = sequence.num_done
        upto = min(first + n, sequence.chain.num_blocks, first + len(self.free))
        own = self.take_free(upto - first)
        sequence.table += own
        digests = {self.digest(prefix) for prefix in (*self.blocks, *self.slots)}
        findable = self.blocks.get(sequence.prefix(first - 1)) == sequence.table[first - 1] if first else True
        expected, freed = [], []
        for i, block in enumerate(own, first):
            prefix = sequence.prefix(i)
            if not findable:
                break
            if prefix in self.slots:
                freed.append(self.slots.pop(prefix))
                self.blocks[prefix] = block
            elif prefix not in self.blocks:
                if self.digest(prefix) in digests:
                    break
                digests.add(self.digest(prefix))
                self.blocks[prefix] = block
            expected.append(self.blocks[prefix])
        places = self.index.register(sequence.chain, np.array(sequence.table, np.int32), first)
        assert (places.blocks.tolist(), places.slots.tolist()) == (expected, freed)
        adopted = [(i, block) for i, block in enumerate(expected, first) if block != sequence.table[i]]
        self.retain([block for _, block in adopted])
        for i, block in adopted:
            self.release([sequence.table[i]])
            sequence.table[i] = block
        sequence.num_done = upto

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 1000), tokens=TOKENS)
    def generate(self, pick: int, tokens: list[int]) -> None:
        sequence = self.sequences[pick % len(self.sequences)]
        if sequence.chain.num_tokens < 30:
            sequence.chain.append(tokens)

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 1000))
    def end(self, pick: int) -> None:
        self.release(self.sequences.pop(pick % len(self.sequences)).table)

    @precondition(lambda self: self.evictable)
    @rule(picks=PICKS)
    def evict(self, picks: list[int]) -> None:
        evictable = self.evictable
        chosen = sorted({evictable[pick % len(evictable)] for pick in picks})
        expected = self.places_behind([prefix for prefix, block in self.blocks.items() if block in chosen])
        places = self.index.evict(chosen)
        assert (set(places.blocks.tolist()), set(places.slots.tolist())) == expected
        self.forget(places.blocks.tolist(), places.slots.tolist())

    @precondition(lambda self: self.evictable)
    @rule(n=st.integers(0, 8))
    def evict_the_policys_choice(self, n: int) -> None:
        victims = self.index.victims(n).tolist()
        assert len(victims) == min(n, len(self.evictable)) and set(victims) <= set(self.evictable)
        for number, block in enumerate(victims):
            prefix = next(prefix for prefix, other in self.blocks.items() if other == block)
            assert self.places_behind([prefix])[0] <= set(victims[: number + 1])
        places = self.index.evict(victims)
        assert places.blocks.tolist()[: len(victims)] == victims
        self.forget(places.blocks.tolist(), places.slots.tolist())

    @precondition(lambda self: self.slots)
    @rule(n=st.integers(0, 3))
    def evict_slots(self, n: int) -> None:
        victims = self.index.host_victims(n).tolist()
        expected = self.places_behind([prefix for prefix, slot in self.slots.items() if slot in victims])
        places = self.index.evict_slots(victims)
        assert len(victims) == min(n, len(self.slots))
        assert (set(places.blocks.tolist()), set(places.slots.tolist())) == expected == (set(), expected[1])
        self.forget([], places.slots.tolist())

    @precondition(lambda self: self.evictable)
    @rule(n=st.integers(1, 4))
    def demote(self, n: int) -> None:
        slots = sorted(set(range(NUM_SLOTS)) - set(self.slots.values()))[:n]
        blocks = self.index.victims(len(slots)).tolist()
        slots = slots[: len(blocks)]
        self.index.demote(blocks, slots)
        for block, slot in zip(blocks, slots, strict=True):
            prefix = next(prefix for prefix, other in self.blocks.items() if other == block)
            del self.blocks[prefix]
            self.slots[prefix] = slot
        self.free |= set(blocks)

    @rule(picks=PICKS)
    def move(self, picks: list[int]) -> None:
        used = sorted(set(self.references) - self.free)
        sources = sorted({used[pick % len(used)] for pick in picks})[: len(self.free)] if used else []
        targets = sorted(self.free)[: len(sources)]
        self.index.blocks.move(sources, targets)
        moved = dict(zip(sources, targets, strict=True))
        for source, target in moved.items():
            self.references[target], self.references[source] = self.references[source], 0
        self.free = self.free - set(targets) | set(sources)
        self.blocks = {prefix: moved.get(block, block) for prefix, block in self.blocks.items()}
        for sequence in self.sequences:
            sequence.table = [moved.get(block, block) for block in sequence.table]

    @rule(really=st.integers(0, 9))
    def reset(self, really: int) -> None:
        if not really:
            places = self.index.reset()
            assert set(places.blocks.tolist()) == set(self.blocks.values())
            assert set(places.slots.tolist()) == set(self.slots.values())
            self.forget(places.blocks.tolist(), places.slots.tolist())

    @rule(block=st.integers(1, NUM_BLOCKS - 1))
    def misuse(self, block: int) -> None:
        """What is refused changes nothing: the invariants see to it."""
        evictable = block in self.evictable
        prefix = next((prefix for prefix, other in self.blocks.items() if other == block), None)
        if not evictable:
            with pytest.raises(BlockMisuse):
                self.index.evict([block])
            with pytest.raises(BlockMisuse):
                self.index.mark_used([block])
        if evictable or prefix is None:
            with pytest.raises(BlockMisuse):
                self.index.mark_evictable([block])
        free_slots = sorted(set(range(NUM_SLOTS)) - set(self.slots.values()))[:1]
        if free_slots and (prefix is None or len(self.places_behind([prefix])[0]) > 1):
            with pytest.raises(BlockMisuse):
                self.index.demote([block], free_slots)
        for prefix, slot in list(self.slots.items()):
            if self.free and len(prefix[1]) > SIZE and (prefix[0], prefix[1][:-SIZE]) in self.slots:
                with pytest.raises(BlockMisuse):
                    self.index.promote([slot], [min(self.free)])

    @rule(often=st.booleans())
    def look(self, often: bool) -> None:
        """The consumer takes the events: from now on after every operation, or not before the next look."""
        self.follow()
        self.looks_now_and_then = not often

    def follow(self) -> None:
        self.copy.apply(self.log.take().events())
        blocks = self.copy.blocks
        assert blocks == blocks_of(self.index)
        expected = {}
        for prefix, on_host in (dict.fromkeys(self.blocks, False) | dict.fromkeys(self.slots, True)).items():
            salt, tokens = prefix
            first, second = np.frombuffer(self.digest(prefix), np.uint64).tolist()
            expected[first << 64 | second] = tokens[-SIZE:], on_host, salt if len(tokens) == SIZE else None
        assert {digest: (one.tokens, one.on_host, one.salt) for digest, one in blocks.items()} == expected

    @invariant()
    def the_consumer_agrees(self) -> None:
        if not self.looks_now_and_then:
            self.follow()

    @invariant()
    def the_index_agrees(self) -> None:
        self.index.check_invariants()
        findable = set(self.blocks.values())
        assert self.index.num_nodes == len(self.blocks) + len(self.slots)
        every = np.arange(1, NUM_BLOCKS)
        assert self.index.findable(every).tolist() == [block in findable for block in every]
        assert len(self.policy.depth) == len(self.blocks)
        assert len(self.policy.evictable) == len(self.evictable)
        assert len(self.host_policy.evictable) == len(self.host_policy.depth) == len(self.slots)
        for prefix in (*self.blocks, *self.slots):
            chain = self.index.hasher.chain(prefix[1], prefix[0])
            hit = self.index.lookup(chain, len(prefix[1]))
            assert (hit.blocks.tolist(), hit.slots.tolist()) == self.expected_hit(chain, len(prefix[1]))
            assert hit.num_tokens == len(prefix[1])


@pytest.mark.hypothesis
@pytest.mark.parametrize(
    ("num_bits", "real"), [(128, None), (128, Lru), (128, ReuseDensity), (6, None), (3, ReuseDensity), (1, Lru)]
)
def test_a_random_life_is_what_a_dict_of_token_tuples_says(num_bits: int, real: Real | None) -> None:
    machine = type("Life", (Life,), {"num_bits": num_bits, "real": real})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=60))
