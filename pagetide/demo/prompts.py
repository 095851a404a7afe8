"""The prompts of the demo: pieces of the bundled held-out text, on which the model was not trained."""

from __future__ import annotations

import random
from pathlib import Path


def passages() -> list[str]:
    """The passages of the held-out text."""
    from ..engine import demo_model

    text = Path(str(demo_model.__file__)).with_name("heldout.txt").read_text("utf-8")
    return [passage.strip() for passage in text.split("\n%%\n") if passage.strip()]


def demo_prompts(count: int, seed: int) -> list[str]:
    """Pieces of very different lengths."""
    texts = passages()
    rng = random.Random(seed)
    prompts = []
    for i in range(count):
        words = texts[i % len(texts)].split(" ")
        length = rng.choice([8, 20, 40, 80, 160, 240])
        first = rng.randrange(max(1, len(words) - length))
        prompts.append(" ".join(words[first : first + length]))
    return prompts


def waves(blocks: list[int], usable: int) -> list[range]:
    """The prompts that run together under pressure: first those that fill the pool of `usable` blocks, then the rest.

    `blocks` are what each prompt needs.
    """
    first, taken = 0, 0
    while first < len(blocks) and taken < usable:
        taken += blocks[first]
        first += 1
    return [wave for wave in (range(first), range(first, len(blocks))) if wave]
