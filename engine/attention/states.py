"""Layers with states: what of their sequences they keep besides K and V, and how they are called over a packed row.

All that such a layer sees is transformers' `Cache`: the mixer, the innermost module that calls it, asks it for the states
behind the tokens before and gives it the new ones. It expects one sequence in each row of a batch, and either one token of each
or several of all. So the packed row of a step [1, T, ...] is cut, and the outputs are joined:

    decode | decode | decode | first chunk | later chunk
    [3, 1, ...], with states   [1, a, ...]   [1, b, ...] with its state       a call each

New states stay with the step until all its chunks are done (`PlanStates`), so that a step that raises can be repeated.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from transformers.cache_utils import Cache, LinearAttentionLayer

from ...cache.block_table import Index
from ...cache.geometry import FoundLayer, Geometry, StateShape
from ...cache.storage import StateCache
from ..errors import UnsupportedModel
from ..layers import gated_delta
from .context import StepContext, running_step

_MOST_STATES = 8  # of one kind in a layer, while they are looked for
_KINDS = ("conv", "recurrent")
_INSTALLED = "pagetide_mixers"  # the attribute of a model


class PlanStates:
    """The new states of a plan's chunks, pass by pass. `keep` writes them, once they are certain.

    Attributes:
        passes: A pass that raised has to leave it.
    """

    def __init__(self, caches: tuple[StateCache, ...]) -> None:
        self._caches = caches
        self.passes: list[StepStates] = []

    def within(self, step: StepContext, rows: Index, blocks: torch.Tensor) -> StepContext:
        """`step` with the states of its chunks, which are of `rows` and lie in `blocks`, int64 [n, state_blocks]."""
        states = StepStates(self._caches, rows, blocks, step, tuple(self.passes))
        self.passes.append(states)
        return replace(step, states=states)

    def keep(self, rows: Index) -> None:
        """Write the new states of `rows`; forget all others."""
        passes, self.passes = self.passes, []
        for step in passes:
            step.write(rows)


class StepStates:
    """The states of the chunks of one forward pass."""

    def __init__(
        self,
        caches: tuple[StateCache, ...],
        rows: Index,
        blocks: torch.Tensor,
        step: StepContext,
        before: tuple[StepStates, ...] = (),
    ) -> None:
        self._caches = caches
        self._step = step
        self._parts: dict[bool, list[_Part]] = {}
        self._numbers = {(c.place.layer, c.place.state.kind, c.place.state.index): n for n, c in enumerate(caches)}
        self._rows = rows
        self._blocks = blocks
        self._before = [step for step in before if np.isin(step._rows, rows).any()]
        self._new: dict[int, list[tuple[Index, torch.Tensor]]] = {number: [] for number in range(len(caches))}

    def parts(self, one_by_one: bool) -> list[_Part]:
        """The parts of the packed row."""
        if one_by_one not in self._parts:
            self._parts[one_by_one] = _parts(self._step, one_by_one)
        return self._parts[one_by_one]

    def read(self, layer: int, chunks: Index) -> dict[tuple[str, int], torch.Tensor]:
        """The states `[len(chunks), *shape]` of a layer behind the tokens before those of `chunks`, by kind and index."""
        blocks = self._blocks[torch.from_numpy(chunks)]
        found = {}
        for (of_layer, kind, index), number in self._numbers.items():
            if of_layer == layer:
                found[kind, index] = states = self._caches[number].read(blocks)
                for step in self._before:  # of an earlier piece of the same chunk
                    step._update(number, self._rows[chunks], states)
        return found

    def put(self, layer: int, chunks: Index, states: dict[tuple[str, int], torch.Tensor]) -> None:
        """Take the states of a layer behind `chunks`."""
        for (kind, index), new in states.items():
            self._new[self._numbers[layer, kind, index]].append((chunks, new))

    def write(self, rows: Index) -> None:
        """Write the new states of those of `rows` that are here."""
        for number, entries in self._new.items():
            for chunks, states in entries:
                kept = np.flatnonzero(np.isin(self._rows[chunks], rows))
                if len(kept) == len(chunks):
                    self._caches[number].write(self._blocks[torch.from_numpy(chunks)], states)
                elif len(kept):
                    blocks = self._blocks[torch.from_numpy(chunks[kept])]
                    self._caches[number].write(blocks, states[torch.from_numpy(kept)])

    def _update(self, number: int, rows: Index, states: torch.Tensor) -> None:
        for chunks, new in self._new[number]:
            ours = {row: at for at, row in enumerate(self._rows[chunks].tolist())}
            for at, row in enumerate(rows.tolist()):
                if row in ours:
                    states[at] = new[ours[row]]


class _Layer(LinearAttentionLayer):
    """A layer's part of the cache during one call of its mixer: transformers' own rules over the given states."""

    def __init__(self, number_of_states: int = _MOST_STATES) -> None:
        super().__init__(number_of_states)
        self.kv: tuple[int, int, int] | None = None

    def load(self, states: dict[tuple[str, int], torch.Tensor]) -> None:
        """Begin behind `states`, which may be changed in place."""
        for (kind, index), tensor in states.items():
            getattr(self, f"{kind}_states")[index] = tensor
            getattr(self, f"is_{kind}_states_initialized")[index] = True
            self.has_previous_state[index] = True
            self.device, self.dtype = tensor.device, tensor.dtype
            if kind == "conv":
                self.conv_kernel_size[index] = tensor.shape[-1]

    @property
    def states(self) -> dict[tuple[str, int], torch.Tensor]:
        """The states now, by kind and index."""
        return {
            (kind, index): tensor
            for kind in _KINDS
            for index, tensor in getattr(self, f"{kind}_states").items()
            if tensor is not None
        }

    def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V are the attention's to keep."""
        self.kv = (key.shape[1], key.shape[3], value.shape[3])
        return key, value


class StatesCache(Cache):
    """What a model with states is given as its cache: of each layer what `_Layer` has while its mixer is called."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_Layer() for _ in range(num_layers)])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are given."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Masks are attention's own."""
        return query_length, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the layer has the states behind a token before; None: never, since callers ask for all rows at once."""
        if layer_idx is None:
            return False
        found = self.layers[layer_idx].has_previous_state
        return any(found.values()) if state_idx is None else bool(found[state_idx])


def may_have_states(kind: type[Any]) -> bool:
    """Whether layers of models of class `kind` may have states: whether its module's code gives any to a cache."""
    source = _source(sys.modules[kind.__module__])
    return any(f"update_{of_kind}_state(" in source for of_kind in _KINDS)


def find_layers(model: Any, tokens: torch.Tensor) -> tuple[tuple[FoundLayer, ...], dict[str, int]]:
    """What each layer hands to the cache in a forward pass over `tokens` [1, T], and the layer of each mixer by name.

    Works on the meta device. Raises what the model raises.
    """
    config = model.config.get_text_config(decoder=True)
    watch = _MixerWatch(int(config.num_hidden_layers))
    with watch.of(model):
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        model(input_ids=tokens, position_ids=positions, use_cache=False, **{_cache_name(model): watch.cache})
    return tuple(map(_found, watch.cache.layers)), watch.mixers


def install(model: Any, geometry: Geometry, tokens: torch.Tensor) -> Mixers | None:
    """Let the layers of `model` with states be called over packed rows in steps; None, and no change, if it has none.

    Raises UnsupportedModel if it fails with a cache, or if its states are not those of `geometry`.
    """
    if not geometry.state_bytes:
        return None
    try:
        found, mixers = find_layers(model, tokens)
    except Exception as error:  # of the model's code
        why = f"a forward pass of {type(model).__name__} with a cache fails ({type(error).__name__}: {error})"
        raise UnsupportedModel(f"{why}, so its states cannot be kept; use transformers' generate for this model") from error
    if [layer.states for layer in found] != [layer.states for layer in geometry.layers]:
        raise UnsupportedModel(f"layers of {type(model).__name__} keep other states with weights than without memory")
    of_layers = Mixers(StatesCache(len(found)))
    for name, layer in mixers.items():
        module = model.get_submodule(name)
        gated_delta.install(sys.modules[type(module).__module__], _in_step)
        module.forward = _Mixer(module.forward, layer, of_layers)
    name = _cache_name(model)

    def give(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs | {name: of_layers.cache} if running_step() is not None else kwargs

    model.register_forward_pre_hook(give, with_kwargs=True)
    model.__dict__[_INSTALLED] = of_layers
    return of_layers


def _in_step() -> bool:
    step = running_step()
    return step is not None and step.states is not None


def installed(model: Any) -> Mixers | None:
    """What `install` returned for `model`; None if it has no states."""
    return model.__dict__.get(_INSTALLED)


class Mixers:
    """What the mixers of a model share. `one_by_one`: a chunk that continues a sequence is computed token by token."""

    def __init__(self, cache: StatesCache) -> None:
        self.cache = cache
        self.one_by_one = False


class _Mixer:
    """Calls a mixer: over the parts of a packed row in a step, as it is otherwise."""

    def __init__(self, forward: Callable[..., Any], layer: int, of_layers: Mixers) -> None:
        self._forward = forward
        self._layer = layer
        self._all = of_layers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = running_step()
        if step is None or step.states is None:
            return self._forward(*args, **kwargs)
        states: StepStates = step.states
        layers = self._all.cache.layers
        kwargs.pop("step", None)
        num_tokens = step.write_offsets.shape[0]
        outputs = []
        carried: dict[tuple[str, int], torch.Tensor] = {}
        for part in states.parts(self._all.one_by_one):
            layers[self._layer] = layer = _Layer()
            if part.begins == "stored":
                layer.load(states.read(self._layer, part.chunks))
            elif part.begins == "carried":
                layer.load(carried)
            part_args, part_kwargs = _map(partial(part.cut, num_tokens), (args, kwargs))
            outputs.append(self._forward(*part_args, **part_kwargs))
            carried = layer.states
            if part.ends:
                states.put(self._layer, part.chunks, carried)
        layers[self._layer] = _Layer()
        return _join(outputs, states.parts(self._all.one_by_one), num_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Tokens of a step that a mixer computes in one call: `chunks` with one token each, or some of one chunk."""

    chunks: Index
    tokens: slice | torch.Tensor  # places in the packed row
    is_batch: bool
    begins: Literal["", "stored", "carried"]  # behind no token, the row's state, that of the part before
    ends: bool  # the state behind it is that behind the chunks

    def cut(self, num_tokens: int, one: Any) -> Any:
        """The part of `one`, if that has an item for each token [1, T, ...]."""
        if not isinstance(one, torch.Tensor) or one.dim() < 2 or one.shape[:2] != (1, num_tokens):
            return one
        found = one[0, self.tokens]
        return found[:, None] if self.is_batch else found[None]


def _parts(step: StepContext, one_by_one: bool) -> list[_Part]:
    """The parts of a packed row."""
    q_starts, q_lens, kv_lens = step.q_starts, step.q_lens, step.kv_lens
    starts = kv_lens - q_lens
    decodes = np.flatnonzero((q_lens == 1) & (starts > 0))
    parts = []
    if len(decodes):
        parts.append(_Part(decodes, torch.from_numpy(q_starts[decodes].astype(np.int64)), True, "stored", True))
    for chunk in np.flatnonzero((q_lens > 1) | (starts == 0)).tolist():
        first, end = int(q_starts[chunk]), int(q_starts[chunk] + q_lens[chunk])
        size = 1 if one_by_one and starts[chunk] else end - first
        for at in range(first, end, size):
            begins: Literal["", "stored", "carried"] = "carried" if at > first else "stored" if starts[chunk] else ""
            parts.append(_Part(np.array([chunk]), slice(at, at + size), False, begins, at + size == end))
    return parts


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `change` applied to what tuples, lists and dicts hold."""
    if isinstance(value, dict):
        return {key: _map(change, one) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_map(change, one) for one in value)
    return change(value)


def _join(outputs: list[Any], parts: list[_Part], num_tokens: int) -> Any:
    """The outputs of `parts` as one for the packed row: tensors with an item for each token; of others the first."""
    first = outputs[0]
    if isinstance(first, (tuple, list)):
        return tuple(_join(list(items), parts, num_tokens) for items in zip(*outputs, strict=True))
    shape = (len(parts[0].chunks), 1) if parts[0].is_batch else (1, first.shape[1] if isinstance(first, torch.Tensor) else 0)
    if not isinstance(first, torch.Tensor) or first.shape[:2] != shape:
        return first
    joined = first.new_zeros(1, num_tokens, *first.shape[2:])
    for part, output in zip(parts, outputs, strict=True):
        joined[0, part.tokens] = output[:, 0] if part.is_batch else output[0]
    return joined


class _MixerWatch:
    """A cache that notes which module calls it."""

    def __init__(self, num_layers: int) -> None:
        self.cache = StatesCache(num_layers)
        self.mixers: dict[str, int] = {}
        self._running: list[str] = []

    @contextmanager
    def of(self, model: torch.nn.Module) -> Iterator[None]:
        """A context in which forward passes of `model` are watched."""
        hooks = []
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name)))
            hooks.append(module.register_forward_hook(lambda *_: self._running.pop() and None, always_call=True))
        for index, layer in enumerate(self.cache.layers):
            for kind in _KINDS:
                setattr(layer, f"update_{kind}_state", self._noting(getattr(layer, f"update_{kind}_state"), index))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _noting(self, update: Callable[..., Any], layer: int) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.mixers[self._running[-1]] = layer
            return update(*args, **kwargs)

        return noting


def _found(layer: Any) -> FoundLayer:
    states = [
        StateShape(kind, index, tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch."))
        for (kind, index), tensor in layer.states.items()
    ]
    return FoundLayer(tuple(states), layer.kv)


@lru_cache
def _source(module: ModuleType) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):  # built in, or without its file
        return ""


def _cache_name(model: Any) -> str:
    """The name of the cache among the parameters of the model's forward."""
    parameters = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in parameters else "past_key_values"
