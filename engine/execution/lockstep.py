"""Keeps the shards of a model together when one of them fails: all repeat the same parts of a step, and defer the same chunks.

A step is computed without a word about errors. The shard that raises aborts the collectives, so that every other one raises
in its running or next one: at the latest in the broadcast of the tokens, which no shard leaves before all have arrived. Then
each comes here.
"""

from __future__ import annotations

import pickle
from typing import Any, NoReturn

from ..collectives.group import CollectiveAborted, ShardGroup
from ..errors import EngineError


class ShardsDiverged(EngineError):
    """The shards of a model are not at the same place of the same step: nothing that they compute together can be trusted."""


class PeerFailed(RuntimeError):
    """Another shard could not compute this part."""


class Lockstep:
    """The agreement of one shard with the others. With a group of one it does nothing."""

    def __init__(self, group: ShardGroup) -> None:
        self.group = group

    @property
    def is_alone(self) -> bool:
        """Whether there is only one shard."""
        return self.group.size == 1

    def stop(self) -> None:
        """This shard cannot go on with the step as planned: let every other one raise."""
        if not self.is_alone:
            self.group.abort()

    def agree(self, step_id: int, state: Any) -> list[Any]:
        """After `stop`, on all shards: the `state` of each, by rank. Raises ShardsDiverged."""
        if self.is_alone:
            return [state]
        self.group.reset()
        return self._exchange(step_id, state)

    def settle(self, step_id: int, error: BaseException | None) -> BaseException | None:
        """After a part that every shard has computed or failed at: this shard's error, or PeerFailed; None if all computed it.

        Raises ShardsDiverged.
        """
        if self.is_alone:
            return error
        if error is None:
            try:
                self._exchange(step_id, None)
                return None
            except CollectiveAborted:
                pass
        else:
            self.group.abort()
        own = None if isinstance(error, CollectiveAborted) else error
        texts = self.agree(step_id, None if own is None else f"{type(own).__name__}: {own}")
        if own is not None:
            return own
        rank = next((rank for rank, text in enumerate(texts) if text is not None), 0)
        return PeerFailed(f"shard {rank}: {texts[rank]}")

    def all_agree(self, well: bool) -> bool:
        """Whether `well` on all shards. For choices that every shard must make alike."""
        return well if self.is_alone else all(self._exchange(-1, well))

    def _exchange(self, step_id: int, state: Any) -> list[Any]:
        said = [pickle.loads(data) for data in self.group.exchange(pickle.dumps((step_id, state)))]
        if any(step != step_id for step, _ in said):
            self._diverged([step for step, _ in said])
        return [state for _, state in said]

    def _diverged(self, steps: list[int]) -> NoReturn:
        raise ShardsDiverged(f"the shards of the model are at different steps: {', '.join(map(str, steps))}")
