"""Models with states, simulated: prompt tokens that are found, and one pool for states, K and V beside divided ones.

python -m benchmarks.state_pool [--questions 25] [--requests 400] [--json FILE] [--seed 0]

**Found.** Prompts go through a real `CacheManager`, one at a time: 20 documents of 2,000 tokens with 25 questions each, in turn
and at random, with room for 20 states besides K and V; one prefix of 2,000 tokens before all questions; a prompt of 64 tokens
that is asked twice; 100 chats of 2 to 20 turns, at random, with room for 80 states. Beside it, over the same prompts, where
others keep states, with K and V of all tokens and as many states, of which the oldest goes first:

    grid     at multiples of 528 tokens (vLLM, "align")
    ends     at the last multiple of 64 tokens of a prompt (SGLang)

**One pool.** The real scheduler serves 400 requests that arrive at random, on a modelled card and model: an RTX 4090 with 4 GiB
for states, K and V of Qwen3.5-4B, of which a sequence's state takes 49.5 MiB and K and V of a token 32 KiB. A divided pool has
room for a number of states, which as many rows can have, and K and V in the rest. Goodput: requests a second that had the first
token within two seconds and three times what their prompt takes alone, and the others at 10 a second at least.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.arguments import parser_of, whole
from benchmarks.figures import Figure, report
from benchmarks.modelled_clock import RTX_4090
from pagetide.allocator.blocks import BlockAllocator
from pagetide.cache.block_table import Int32
from pagetide.cache.layer_groups import LayerGroup, state_group
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.cache.reuse_density import ReuseDensity
from pagetide.cache.state_tables import tables_for
from pagetide.scheduler.cost import SwapCost
from pagetide.scheduler.plan import Plan, Result
from pagetide.scheduler.request import Request, Sampling
from pagetide.scheduler.scheduler import Scheduler
from pagetide.scheduler.state import Limits

BLOCK = 16
DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS = 20, 2_000, 60
CHATS, MOST_TURNS = 100, 20
STATE_BLOCKS = 101  # of Qwen3.5-0.8B

# ---- what is found ------------------------------------------------------------------------------


class Prefixes:
    """A pool with room for `num_states` states, and K and V of `num_tokens` tokens."""

    def __init__(self, num_states: int, num_tokens: int, longest: int) -> None:
        num_blocks = 1 + -(-num_tokens // BLOCK) + (num_states + 2) * STATE_BLOCKS + -(-longest // BLOCK)
        groups = (LayerGroup(), state_group(STATE_BLOCKS))
        tables = tables_for(groups, BlockAllocator(num_blocks), BLOCK, 1, longest + 1)
        self._cache = CacheManager(tables, PrefixHasher(BLOCK, b"states"), eviction=ReuseDensity)

    def serve(self, tokens: Int32) -> int:
        """The tokens of a prompt that are found."""
        cache, length = self._cache, len(tokens)
        chain = cache.chain(tokens, None)
        hit = cache.lookup(chain, length - 1)
        assert cache.admit(0, length, hit) is not None, "what is not held must be evictable"
        done = hit.num_tokens
        while done < length:
            done, _ = cache.reach(0, done, length, cache.pool.available)
            cache.commit(0, chain, done, done == length)
        cache.release(np.array([0]))
        return hit.num_tokens


class Placed:
    """At most `num_states` states, at the places that `places` names for a prompt of so many tokens; the oldest goes first."""

    def __init__(self, num_states: int, places: Callable[[int], range]) -> None:
        self._num_states, self._places = num_states, places
        self._kept: OrderedDict[bytes, None] = OrderedDict()

    def serve(self, tokens: Int32) -> int:
        """The tokens of a prompt that are found."""
        text = tokens[:-1].tobytes()
        found = max((prefix for prefix in self._kept if text.startswith(prefix)), key=len, default=b"")
        new = [text[: place * tokens.itemsize] for place in self._places(len(tokens) - 1)]
        for prefix in (found, *new) if found else new:
            if len(prefix) >= len(found):
                self._kept[prefix] = None
                self._kept.move_to_end(prefix)
        while len(self._kept) > self._num_states:
            self._kept.popitem(last=False)
        return len(found) // tokens.itemsize


def grid(length: int) -> range:
    """vLLM's places."""
    return range(528, length + 1, 528)


def ends(length: int) -> range:
    """SGLang's place."""
    return range(length // 64 * 64, length // 64 * 64 + 1) if length >= 64 else range(0)


def questions(order: Sequence[int], documents: Sequence[Int32], rng: np.random.Generator) -> list[Int32]:
    """A question to each document of `order`."""
    return [np.concatenate((documents[number], made(QUESTION_TOKENS, rng))) for number in order]


def chats(rng: np.random.Generator) -> list[Int32]:
    """The prompts of chats: each has all turns before it, and answers."""
    texts = [made(int(rng.integers(50, 400)), rng) for _ in range(CHATS)]
    left = rng.integers(2, MOST_TURNS + 1, CHATS)
    prompts = []
    while left.any():
        # A chat that has begun goes on soon: eight are as active as all others.
        active = np.flatnonzero(left)[:8] if rng.random() < 0.5 else np.flatnonzero(left)
        number = int(rng.choice(active))
        prompts.append(texts[number])
        texts[number] = np.concatenate((texts[number], made(int(rng.integers(100, 800)), rng)))
        left[number] -= 1
    return prompts


def made(count: int, rng: np.random.Generator) -> Int32:
    """Tokens that no other text has."""
    return rng.integers(0, 1 << 30, count, np.int32)


def found(questions_each: int, rng: np.random.Generator) -> Iterator[Figure]:
    """The shares of prompt tokens that are found."""
    documents = [made(DOCUMENT_TOKENS, rng) for _ in range(DOCUMENTS)]
    in_turn = np.tile(np.arange(DOCUMENTS), questions_each)
    for name, order in (("in turn", in_turn), ("at random", rng.permutation(in_turn))):
        prompts = questions(order.tolist(), documents, rng)
        yield from shares(f"{DOCUMENTS} documents, {questions_each} questions each, {name}", prompts, 20, 0.85)
    yield from shares(f"{CHATS} chats of 2 to {MOST_TURNS} turns", chats(rng), 80, 0.72)
    tokens = [Prefixes.serve(pool, prompt) for pool in [room_for(20)] for prompt in questions([0] * 3, documents, rng)]
    whole_blocks = float(DOCUMENT_TOKENS // BLOCK * BLOCK)
    yield Figure("a prefix of 2,000 tokens, third request: found", float(tokens[-1]), "tokens", whole_blocks, "higher")
    short = made(64, rng)
    tokens = [pool.serve(short) for pool in [room_for(20)] for _ in range(2)]
    yield Figure("a prompt of 64 tokens, asked again: found", float(tokens[-1]), "tokens", 48, "higher")


def room_for(num_states: int, num_tokens: int = DOCUMENTS * DOCUMENT_TOKENS, longest: int = 4_096) -> Prefixes:
    """A pool."""
    return Prefixes(num_states, num_tokens, longest)


def shares(name: str, prompts: Sequence[Int32], num_states: int, target: float) -> Iterator[Figure]:
    """What is found of `prompts`, here and where others keep states."""
    asked = sum(map(len, prompts))
    pools = {
        "": room_for(num_states, sum(len(one) for one in prompts[-4 * CHATS :]), max(map(len, prompts))),
        ", states at every 528 tokens": Placed(num_states, grid),
        ", states at ends": Placed(num_states, ends),
    }
    for label, pool in pools.items():
        share = sum(pool.serve(prompt) for prompt in prompts) / asked  # type: ignore[attr-defined]
        yield Figure(f"{name}: found{label}", share, "", None if label else target, "higher")


# ---- one pool -----------------------------------------------------------------------------------

CARD_BLOCKS = (4 << 30) // (BLOCK * 32 << 10)
BLOCKS_OF_STATE = 99
STATE_BYTES, KV_BYTES, WEIGHTS_BYTES, PARAMETERS = 49.5 * 2**20, 32 << 10, 8.4e9, 4.2e9
STEP_TOKENS, MOST_ROWS, OVERHEAD_S = 512, 256, 2e-3
SGLANG_SHARE = 0.9 / 1.9  # states, where 0.9 times as much memory is theirs as is for K and V


@dataclass(slots=True)
class Asked:
    """A request, and when it was answered; seconds."""

    due: float
    prompt_tokens: int
    output_tokens: int
    first: float = np.inf
    last: float = np.inf

    @property
    def in_time(self) -> bool:
        alone = seconds(self.prompt_tokens, 0, 1)
        return self.first - self.due <= 2 + 3 * alone and self.last - self.first <= 0.1 * (self.output_tokens - 1)


def seconds(tokens: int, before: int, rows: int) -> float:
    """What a step takes that computes `tokens` of `rows` sequences behind `before` tokens."""
    moved = WEIGHTS_BYTES + KV_BYTES * (before + tokens) + 2 * STATE_BYTES * rows
    return max(2 * PARAMETERS * tokens / RTX_4090.flops, moved / RTX_4090.bytes_per_s) + OVERHEAD_S


def load(share_of_long: float, rate: float, number: int, rng: np.random.Generator) -> list[Asked]:
    """`number` requests, `rate` a second: chats of some hundred tokens, and documents of 4,000 to 12,000."""
    due = np.cumsum(rng.exponential(1 / rate, number))
    is_long = rng.random(number) < share_of_long
    prompts = np.where(is_long, rng.integers(4_000, 12_000, number), rng.integers(50, 600, number))
    return [Asked(*one) for one in zip(due.tolist(), prompts.tolist(), rng.integers(50, 400, number).tolist(), strict=True)]


def goodput(requests: Sequence[Asked], share_of_states: float | None) -> float:
    """Requests in time, a second. `share_of_states`: of a divided pool; None: one pool."""
    for request in requests:
        request.first = request.last = np.inf
    rows, num_blocks, blocks_of_state = MOST_ROWS, CARD_BLOCKS, BLOCKS_OF_STATE
    if share_of_states is not None:  # a state takes a block that is not counted, as so many rows have room for theirs
        rows = min(MOST_ROWS, int(share_of_states * CARD_BLOCKS / BLOCKS_OF_STATE))
        num_blocks, blocks_of_state = int(CARD_BLOCKS * (1 - share_of_states)) + 2 * rows, 1
    longest = 13_000
    tables = tables_for((LayerGroup(), state_group(blocks_of_state)), BlockAllocator(1 + num_blocks), BLOCK, rows, longest)
    cache = CacheManager(tables, PrefixHasher(BLOCK, b"states"), eviction=ReuseDensity)
    scheduler = Scheduler(cache, Limits(rows, STEP_TOKENS, longest), SwapCost(BLOCK * KV_BYTES, BLOCK))
    rng, waiting, by_name, now = np.random.default_rng(0), list(requests)[::-1], {}, 0.0
    while waiting or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, waiting[-1].due)
        while waiting and waiting[-1].due <= now:
            request, name = waiting.pop(), str(len(waiting))
            by_name[name] = request
            tokens = rng.integers(4, 1 << 30, request.prompt_tokens, np.int32)
            scheduler.add(Request(name, tokens, Sampling(request.output_tokens), arrival=request.due))
        plan = scheduler.schedule(now)
        compute_s = seconds(plan.num_tokens, int(plan.starts.sum()), len(plan.rows)) if len(plan.rows) else OVERHEAD_S
        now += compute_s
        outputs = scheduler.apply(plan, computed(plan, compute_s))
        for name in outputs.request_ids:
            by_name[name].first = min(by_name[name].first, now)
        for end in outputs.finished:
            assert end.reason == "length", end
            by_name[end.request_id].last = now
    return sum(request.in_time for request in requests) / max(request.last for request in requests)


def computed(plan: Plan, compute_s: float) -> Result:
    """The result of a plan: a token of each chunk that samples."""
    counts = plan.samples.astype(np.int32)
    return Result(plan.step_id, counts, np.full(int(counts.sum()), 3, np.int32), compute_s=compute_s)


MIXES = {"short": (0.0, 16.0), "a tenth long": (0.1, 8.0), "half long": (0.5, 3.0), "long": (1.0, 1.8)}
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


def pools(number: int, rng: np.random.Generator) -> Iterator[Figure]:
    """The goodput of one pool, and of divided ones, over mixes of requests."""
    loads = {name: load(*mix, number, rng) for name, mix in MIXES.items()}
    one = {name: goodput(requests, None) for name, requests in loads.items()}
    divided = {share: {name: goodput(of, share) for name, of in loads.items()} for share in (*SHARES, SGLANG_SHARE)}
    for name, value in one.items():
        by_share = {share: of[name] for share, of in divided.items()}
        best = max(by_share, key=by_share.__getitem__)
        yield Figure(f"{name}: requests in time, one pool", value, "a second")
        yield Figure(f"{name}: one pool / divided at its best, {best:.0%} for states", value / by_share[best], "x")

    def relative(values: dict[str, float]) -> float:
        return float(np.mean([values[name] / one[name] for name in one]))

    best_share = max(SHARES, key=lambda share: relative(divided[share]))
    name = f"all mixes: one pool / divided, {best_share:.0%} for states, the best in hindsight"
    yield Figure(name, 1 / relative(divided[best_share]), "x", 1.0, "higher")
    name = f"all mixes: one pool / divided, {SGLANG_SHARE:.0%} for states, as SGLang does"
    yield Figure(name, 1 / relative(divided[SGLANG_SHARE]), "x", 1.2, "higher")


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--questions", type=whole, default=25, help="to each document (default %(default)s)")
    parser.add_argument("--requests", type=whole, default=400, help="of each mix (default %(default)s)")
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    report("States in one pool", [*found(args.questions, rng), *pools(args.requests, rng)], args.seed, args.json)


if __name__ == "__main__":
    main()
