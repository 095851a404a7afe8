"""Functions of an engine that raise where a test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pagetide import native
from pagetide.cache.storage import Storage
from pagetide.engine.attention.decoder_layers import FusedLayer
from pagetide.engine.build import Engine
from pagetide.engine.execution import runner as runner_module
from pagetide.engine.execution.host_pool import HostPool
from pagetide.engine.execution.transfers import Upload
from pagetide.engine.requests.beams import BeamSearch
from pagetide.engine.requests.groups import BeamGroup
from pagetide.engine.requests.states import RequestState
from pagetide.engine.sampling.constraints import Constraints
from pagetide.engine.sampling.logprobs import LogprobRequests
from pagetide.engine.sampling.sampler import Sampler
from pagetide.engine.text.detokenizer import Detokenizer

CAUSE = "planted"
EVERYBODY = "everybody"


@dataclass(frozen=True)
class Point:
    """A call that raises: `name` of what `owner` gives. `once` and `always` name whom it may end when it does so."""

    owner: Callable[[Engine], Any]
    name: str
    once: str | None = None
    always: str | None = EVERYBODY


POINTS = {
    "model": Point(lambda engine: engine.core.runner, "model"),
    **({"layer in one call": Point(lambda engine: FusedLayer, "compute")} if native.instructions() else {}),
    "kernel, attention": Point(lambda engine: type(engine.core.runner.kernel), "attend"),
    "kernel, writing": Point(lambda engine: type(engine.core.runner.kernel), "write"),
    "kernel, buffers": Point(lambda engine: type(engine.core.runner.kernel), "release_buffers", always=None),
    "upload": Point(lambda engine: Upload, "put"),
    "sampler, start of a row": Point(lambda engine: Sampler, "admit"),
    "sampler, end of a row": Point(lambda engine: Sampler, "release"),
    "sampler, drawing": Point(lambda engine: Sampler, "sample", always="draws"),
    "sampler, histories": Point(lambda engine: Sampler, "record_tokens", always="draws"),
    "sampler, candidates": Point(lambda engine: Sampler, "candidates", always="beams"),
    "sampler, ends of forms": Point(lambda engine: Sampler, "complete"),
    "log-probabilities, start of a row": Point(lambda engine: LogprobRequests, "admit"),
    "log-probabilities, end of a row": Point(lambda engine: LogprobRequests, "release"),
    "log-probabilities": Point(lambda engine: runner_module, "score", always="scores"),
    "beams, candidates": Point(lambda engine: BeamSearch, "record", "beams", "beams"),
    "beams, choice": Point(lambda engine: BeamSearch, "choose", "beams", "beams"),
    "beams, end": Point(lambda engine: BeamGroup, "_complete", "beams", "beams"),
    "constraint, masks": Point(lambda engine: Constraints, "masks", always="constraint"),
    "constraint, matcher": Point(lambda engine: Constraints, "matcher", always="constraint"),
    "host copies": Point(lambda engine: HostPool, "_copy", always=None),
    "host copies, beginning": Point(lambda engine: HostPool, "begin", always=None),
    "copies of blocks": Point(lambda engine: Storage, "copy", always=None),
    "map": Point(lambda engine: engine.arena, "map", always=None),
    "unmap": Point(lambda engine: engine.arena, "unmap", always=None),
    "measuring memory": Point(lambda engine: engine.core.memory._reporter.base, "_measure", always=None),
    "statistics": Point(lambda engine: type(engine), "stats", always=None),
    "text": Point(lambda engine: Detokenizer, "push", EVERYBODY),
    "end of a request": Point(lambda engine: RequestState, "finish", EVERYBODY),
}


class Fault:
    """Raises in the place of a function: at its call number `first`, and at all later ones where it does so `always`."""

    def __init__(self, inner: Callable[..., Any], first: int, always: bool, kind: type[BaseException] = RuntimeError) -> None:
        self.num_calls = self.num_raised = 0
        self._kind = kind
        self._inner, self._first, self._always = inner, first, always

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == self._first or (self._always and self.num_calls > self._first):
            self.num_raised += 1
            raise self._kind(CAUSE)
        return self._inner(*args, **kwargs)


@contextmanager
def planted(owner: Any, name: str, first: int, always: bool) -> Iterator[Fault]:
    """`owner.name` raises within the block."""
    inner = getattr(owner, name)
    fault = Fault(inner, first, always)

    def method(*args: Any, **kwargs: Any) -> Any:
        return fault(*args, **kwargs)

    method.__name__ = name
    if hasattr(inner, "forward"):  # a model, whose parameters matter
        method.forward = inner.forward  # type: ignore[attr-defined]
    own = name in vars(owner) or isinstance(getattr(type(owner), name, None), property)
    serves = FusedLayer._serves
    if name in ("attend", "write"):  # of a kernel, which layers in one call go past
        FusedLayer._serves = lambda *_: False  # type: ignore[method-assign]
    setattr(owner, name, method)
    try:
        yield fault
    finally:
        setattr(owner, name, inner) if own else delattr(owner, name)
        FusedLayer._serves = serves  # type: ignore[method-assign]
