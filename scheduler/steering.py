"""Beam moves: continue a sequence from the tokens of a sequence of its family, with a token chosen by the caller."""

from __future__ import annotations

import numpy as np

from ..cache.manager import CacheManager
from .running import Running
from .sequence import Sequence
from .waiting import Waiting


class BeamSteering:
    """Applies moves to sequences that are held or not yet admitted. Mutates them, `running`, `waiting` and the cache."""

    def __init__(self, cache: CacheManager, running: Running, waiting: Waiting) -> None:
        self._cache = cache
        self._running = running
        self._waiting = waiting

    def move(self, sequence: Sequence, source: Sequence, token: int) -> None:
        """Continue `sequence` from the tokens of `source`, which may be itself, with `token`."""
        if sequence is not source:
            self._follow(sequence, source)
        if sequence.row is not None:
            self._running.give(sequence.row, token)
            return
        sequence.tokens = np.append(sequence.tokens, np.int32(token))
        if sequence.held:
            self._waiting.let_go(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """Let `sequence` wait without a row until a move names it."""
        if sequence.row is not None:
            self._running.leave([sequence])
        elif sequence.held:
            return
        else:
            self._waiting.remove(sequence)
        sequence.held = True
        self._waiting.hold(sequence)

    def _follow(self, sequence: Sequence, source: Sequence) -> None:
        """Let `sequence` wait for a row and the blocks of `source`."""
        if sequence.row is not None:
            self._running.leave([sequence], computed=False)
        else:
            self._waiting.remove(sequence)
        self._cache.swapping.drop_for(sequence.request.request_id)
        self._running.commit(source)  # so that the shared tokens become findable once
        sequence.tokens = self._running.tokens_of(source)
        sequence.chain = self._cache.chain(sequence.tokens, sequence.request.cache_salt)
        sequence.leader, sequence.shares = source, len(sequence.tokens)
        sequence.held, sequence.computed = True, 0
        self._waiting.hold(sequence)
