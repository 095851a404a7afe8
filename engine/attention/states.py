"""Layers with states: what of their sequences they keep besides K and V, and how they are called over a packed row.

All that such a layer sees is transformers' `Cache`: the mixer, the innermost module that calls it, asks it for the states
behind the tokens before and gives it the new ones. There are two ways to call a mixer over a step's packed row [1, T, ...].

Packed, on a CPU with native kernels: once, as if no token were before. The functions of its module that compute with states
find these in their blocks (`layers/recurrences.py`), and change them there.

In parts: a mixer expects one sequence in each row of a batch, and either one token of each or several of all. So the packed row
is cut, and the outputs are joined:

    decode | decode | decode | first chunk | later chunk
    [3, 1, ...], with states   [1, a, ...]   [1, b, ...] with its state       a call each

Either way states change in place, layer by layer. What a step that raises has computed is not computed again
(`undone_outputs.py`).
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers.cache_utils import Cache, LinearAttentionLayer

from ...cache.block_table import Index
from ...cache.geometry import FoundLayer, Geometry, StateShape
from ...cache.storage import StateCache
from ..errors import UnsupportedModel
from ..layers import recurrences
from .backends import MOST_COPIED_STATES
from .context import StepContext, running_step
from .undone_outputs import MixerOutput, Tokens, UndoneOutputs, joined, map_tokens

_MOST_STATES = 8  # of one kind in a layer, while they are looked for
_KINDS = (recurrences.CONV, recurrences.RECURRENT)
_INSTALLED = "pagetide_mixers"  # the attribute of a model
_VECTORS = 64  # items that torch computes by vectors alone: two of the widest, in 16-bit types


class ModelStates:
    """The states of a model's layers in the pool, for the steps of one runner."""

    def __init__(self, caches: tuple[StateCache, ...]) -> None:
        self._of_layers: dict[int, dict[tuple[str, int], StateCache]] = {}
        for cache in caches:
            state = cache.place.state
            self._of_layers.setdefault(cache.place.layer, {})[state.kind, state.index] = cache
        self._undone = UndoneOutputs()

    def within(self, step: StepContext, rows: Index, blocks: torch.Tensor) -> StepContext:
        """`step` with the states of its chunks, which are of `rows` and lie in `blocks`, int64 [n, state_blocks]."""
        return replace(step, states=StepStates(self._of_layers, rows, blocks, step, self._undone))

    def forget(self, rows: Index) -> None:
        """`rows` have other sequences from now on, or none."""
        self._undone.forget(rows)

    def take_lost(self) -> Index:
        """The rows with states that a fault within a mixer left unknown, since the last call."""
        return self._undone.take_lost()

    def done(self, rows: Index, ends: Index) -> None:
        """The chunks of `rows` in a plan are done, up to `ends[i]` tokens; those of other rows may be repeated."""
        self._undone.done(rows, ends)


class StepStates:
    """The states of the chunks of one forward pass.

    Attributes:
        num_tokens: Of the packed row, padding included.
    """

    def __init__(
        self,
        of_layers: dict[int, dict[tuple[str, int], StateCache]],
        rows: Index,
        blocks: torch.Tensor,
        step: StepContext,
        undone: UndoneOutputs,
    ) -> None:
        self.num_tokens = step.write_offsets.shape[0]
        self.undone = undone
        self._of_layers = of_layers
        self._blocks = blocks
        starts, firsts, lengths = (
            one.astype(np.int64, copy=False) for one in (step.kv_lens - step.q_lens, step.q_starts, step.q_lens)
        )
        self._tokens = Tokens(rows, starts, firsts, lengths)
        self._chunks = np.arange(len(rows))
        self._repeats = undone.begin(self._tokens)
        self._packed: torch.Tensor | None = None

    def left(self, layer: int) -> tuple[Index, Tokens, list[MixerOutput]]:
        """The chunks that the mixer of `layer` has to compute, the tokens of each, and what it has computed of others."""
        return self.undone.left(layer, self._tokens) if self._repeats else (self._chunks, self._tokens, [])

    def in_blocks(self, layer: int, chunks: Index, tokens: Tokens) -> recurrences.StatesInBlocks:
        """The states of a layer for `tokens` of `chunks`, where they lie."""
        blocks, packed = self._blocks, self._packed
        if packed is None or self._repeats:
            self._packed = packed = torch.from_numpy(np.stack((tokens.firsts, tokens.lengths, tokens.starts > 0)))
        if len(chunks) < len(blocks):
            blocks = blocks[torch.from_numpy(chunks)]
        caches = self._of_layers[layer]
        memory = next(iter(caches.values())).memory
        return recurrences.StatesInBlocks(memory, blocks, packed, {kind: one.parts for (kind, _), one in caches.items()})

    def read(self, layer: int, chunks: Index) -> dict[tuple[str, int], torch.Tensor]:
        """Copies of the states `[len(chunks), *shape]` of a layer, by kind and index."""
        blocks = self._blocks[torch.from_numpy(chunks)]
        return {key: cache.read(blocks) for key, cache in self._of_layers[layer].items()}

    def write(self, layer: int, chunks: Index, states: dict[tuple[str, int], torch.Tensor]) -> None:
        """Replace the states of a layer."""
        blocks = self._blocks[torch.from_numpy(chunks)]
        for key, new in states.items():
            self._of_layers[layer][key].write(blocks, new)


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


class _PackedLayer(_Layer):
    """A layer's part of the cache while its mixer is called over a packed row: as if no token were before."""

    def update_conv_state(self, conv_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The tokens alone: what goes before them is found in blocks."""
        return conv_states

    def update_recurrent_state(self, recurrent_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Nothing to do: states change in their blocks."""
        return recurrent_states


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

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """The recurrent state behind the tokens before, as MiniMax asks for it."""
        return self.layers[layer_idx].states.get((recurrences.RECURRENT, 0))

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Keep a recurrent state, as MiniMax gives it."""
        self.layers[layer_idx].update_recurrent_state(linear_cache)


def may_have_states(kind: type[Any]) -> bool:
    """Whether layers of models of class `kind` may have states: whether its module's code gives any to a cache."""
    source = _source(sys.modules[kind.__module__])
    return any(f"update_{of_kind}_state(" in source for of_kind in _KINDS) or "set_linear_cache(" in source


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


def limit_time_steps(model: Any) -> None:
    """Give the mixers of `model` its configuration's limits of time steps. Mutates it.

    Nemotron's take `time_step_min`, which is for making new weights, as a limit, and in chunks alone: the state behind a token
    would not be the same in a chunk and decoded.
    """
    if limit := getattr(model.config.get_text_config(decoder=True), "time_step_limit", None):
        for module in model.modules():
            if hasattr(module, "time_step_limit"):
                module.time_step_limit = tuple(limit)


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
    limit_time_steps(model)
    of_layers = Mixers(StatesCache(len(found)))
    for name, layer in mixers.items():
        module, states = model.get_submodule(name), geometry.layers[layer].states
        kinds = recurrences.install(sys.modules[type(module).__module__]) if tokens.device.type == "cpu" else frozenset()
        packs = all(state.kind in kinds and _is_packed(state) for state in states)
        module.forward = _Mixer(module.forward, layer, of_layers, states if packs else None)
        of_layers.packed |= packs
    name = _cache_name(model)

    def give(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs | {name: of_layers.cache} if running_step() is not None else kwargs

    model.register_forward_pre_hook(give, with_kwargs=True)
    model.__dict__[_INSTALLED] = of_layers
    return of_layers


def _is_packed(state: StateShape) -> bool:
    """Whether kernels compute over states of this kind where they are, if the functions that they replace are called."""
    if state.kind == recurrences.CONV:
        return not state.index and len(state.shape) == 2 and state.shape[1] in recurrences.KERNELS
    return not state.index and len(state.shape) == 3 and state.dtype == "float32"


def installed(model: Any) -> Mixers | None:
    """What `install` returned for `model`; None if it has no states."""
    return model.__dict__.get(_INSTALLED)


class Mixers:
    """What the mixers of a model share.

    Attributes:
        packed: Some are called over the packed row, by kernels.
        one_by_one: If not, a chunk that continues a sequence is computed token by token.
    """

    def __init__(self, cache: StatesCache) -> None:
        self.cache = cache
        self.packed = False
        self.one_by_one = False

    def simplify(self) -> bool:
        """Call mixers in the next way that depends on less. Returns whether there is one."""
        if self.packed:
            self.packed = False
        elif not self.one_by_one:
            self.one_by_one = True
        else:
            return False
        return True


class _Mixer:
    """Calls a mixer: over a packed row in a step, as it is otherwise. `packed` are its states if kernels compute over them."""

    def __init__(
        self, forward: Callable[..., Any], layer: int, of_layers: Mixers, packed: tuple[StateShape, ...] | None
    ) -> None:
        self._forward = forward
        self._layer = layer
        self._all = of_layers
        self._packs = packed is not None
        heads = [state.shape[0] for state in packed or () if state.kind == recurrences.RECURRENT]
        self._multiple = _VECTORS // math.gcd(_VECTORS, *heads) if heads else 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = running_step()
        if step is None or step.states is None:
            return self._forward(*args, **kwargs)
        kwargs.pop("step", None)
        states: StepStates = step.states
        chunks, tokens, pieces = states.left(self._layer)
        if not len(chunks):
            return joined(pieces, states.num_tokens)
        if self._packs and self._all.packed:
            output = self._call_packed(states, chunks, tokens, args, kwargs)
            if not pieces:
                return output
            pieces.insert(0, MixerOutput(torch.arange(states.num_tokens), output))
        else:
            pieces += self._call_in_parts(states, chunks, tokens, args, kwargs)
        return joined(pieces, states.num_tokens)

    def _call_packed(self, states: StepStates, chunks: Index, tokens: Tokens, args: Any, kwargs: Any) -> Any:
        """The output for all tokens; for those that are not left it means nothing.

        Tokens are padded, so that gates, an item for each token and head, are whole vectors to torch: what it computes item by
        item differs in the last bit.
        """
        num_tokens = states.num_tokens
        num_padded = -(-num_tokens // self._multiple) * self._multiple
        if num_padded > num_tokens:
            args, kwargs = map_tokens(lambda one: _padded(one, num_padded), (args, kwargs), num_tokens)
        layers = self._all.cache.layers
        layers[self._layer] = _PackedLayer(1)
        held = states.in_blocks(self._layer, chunks, tokens)
        kinds = len(held.places)
        try:
            with recurrences.over(held):
                output = self._forward(*args, **kwargs)
                states.undone.add(self._layer, tokens, output, num_padded)
        except BaseException:
            if len(held.places) < kinds:  # a kernel has run
                states.undone.lose(tokens)
            raise
        if num_padded > num_tokens:
            output = map_tokens(lambda one: one[:, :num_tokens], output, num_padded)
        return output

    def _call_in_parts(
        self, states: StepStates, chunks: Index, tokens: Tokens, args: Any, kwargs: Any
    ) -> Iterator[MixerOutput]:
        """The outputs of the parts of the packed row."""
        layers = self._all.cache.layers
        for part in _parts(tokens, self._all.one_by_one):
            places = tokens[part.chunks].places
            layers[self._layer] = layer = _Layer()
            if part.continues:
                layer.load(states.read(self._layer, chunks[part.chunks]))
            output = self._call_part(part, places, args, kwargs, states.num_tokens)
            layers[self._layer] = _Layer()
            own = tokens[part.chunks]
            packed = Tokens(own.rows, own.starts, np.cumsum(own.lengths) - own.lengths, own.lengths)
            states.undone.add(self._layer, packed, output, len(places))
            try:
                states.write(self._layer, chunks[part.chunks], layer.states)
            except BaseException:
                states.undone.lose(own)
                raise
            yield MixerOutput(places, output)

    def _call_part(self, part: _Part, places: torch.Tensor, args: Any, kwargs: Any, num_tokens: int) -> Any:
        """The output for the tokens at `places`, [1, len(places), ...]."""
        is_batch, pieces = part.size is None, []
        for numbers in torch.arange(len(places)).split(part.size or len(places)):
            cut = partial(_cut, places[numbers], is_batch)
            own_args, own_kwargs = map_tokens(cut, (args, kwargs), num_tokens)
            output = self._forward(*own_args, **own_kwargs)
            pieces.append(MixerOutput(numbers, _in_a_row(output, len(numbers)) if is_batch else output))
        return pieces[0].output if len(pieces) == 1 else joined(pieces, len(places))


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Tokens of a step that a mixer computes together: one of each of `chunks`, as a batch, or those of one chunk, at most
    `size` in a call.
    """

    chunks: Index
    size: int | None  # None: a batch
    continues: bool  # there are states of tokens before


def _parts(tokens: Tokens, one_by_one: bool) -> list[_Part]:
    """The parts of a packed row. `chunks` are places among `tokens`."""
    is_decode = (tokens.lengths == 1) & (tokens.starts > 0)
    decodes = np.flatnonzero(is_decode)
    parts = [_Part(decodes[at : at + MOST_COPIED_STATES], None, True) for at in range(0, len(decodes), MOST_COPIED_STATES)]
    for chunk in np.flatnonzero(~is_decode):
        length, continues = int(tokens.lengths[chunk]), bool(tokens.starts[chunk])
        parts.append(_Part(np.array([chunk]), 1 if one_by_one and continues else length, continues))
    return parts


def _cut(places: torch.Tensor, is_batch: bool, tensor: torch.Tensor) -> torch.Tensor:
    """The items of `places` of a tensor [1, T, ...]: [n, 1, ...] as a batch, else [1, n, ...]."""
    found = tensor[0, places]
    return found[:, None] if is_batch else found[None]


def _in_a_row(output: Any, number: int) -> Any:
    """The output of a batch [number, 1, ...] as [1, number, ...]."""
    if isinstance(output, (tuple, list)):
        return tuple(_in_a_row(one, number) for one in output)
    has_tokens = isinstance(output, torch.Tensor) and output.dim() >= 2 and output.shape[:2] == (number, 1)
    return output.transpose(0, 1) if has_tokens else output


def _padded(tensor: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """A tensor [1, T, ...] with zeros behind, [1, num_tokens, ...]."""
    return functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, num_tokens - tensor.shape[1]))


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
