"""Models with attention of their own, which call no attention interface: K and V gathered from blocks, sequence by sequence.

All that such attention sees is transformers' `Cache`: it hands over the K and V of new tokens, and gets those of the whole
sequence. Some also keep a key for each token by which they choose the tokens that they attend to. In a step the model is called
for each sequence by itself, with a cache that writes to the sequence's blocks and reads from them. The results are those of
transformers; a step reads the weights once for each of its sequences.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicIndexedLayer

from ...cache.geometry import FoundLayer, Geometry, LayerShape
from ...cache.storage import LayerCache
from .backends import tokens_in_a_piece
from .context import StepContext, running_step
from .quantized_kv import gather, store

log = logging.getLogger(__name__)

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # as transformers' modules import it
_CHOOSES = "indexed_attention"  # transformers' type of layers that choose tokens by a key


def may_attend_by_itself(kinds: Iterable[type[Any]], config: Any) -> bool:
    """Whether attention of a model with a part of one of these classes may be its own. False is certain of known classes."""
    return _chooses(config) or any(_INTERFACE not in vars(sys.modules[kind.__module__]) for kind in kinds)


def attends_by_itself(model: torch.nn.Module) -> bool:
    """Whether no part of `model` calls transformers' attention interface, or layers choose the tokens that they attend to."""
    modules = {type(one).__module__ for one in model.modules()}
    return _chooses(model.config) or not any(_INTERFACE in vars(sys.modules[name]) for name in modules)


def _chooses(config: Any) -> bool:
    return _CHOOSES in (getattr(config.get_text_config(decoder=True), "layer_types", None) or ())


def find_cached(model: Any, tokens: torch.Tensor) -> tuple[FoundLayer, ...]:
    """What each layer hands to the cache in a forward pass over `tokens` [1, T]; () if one hands it no K and V of each token.

    Works on the meta device. Raises what the model raises.
    """
    layers = [_NotedLayer() for _ in range(int(model.config.get_text_config(decoder=True).num_hidden_layers))]
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    model(input_ids=tokens, past_key_values=Cache(layers=layers), use_cache=True, **_positions(model.forward, positions))
    is_kept = all(layer.found.kv and layer.num_tokens == tokens.shape[1] for layer in layers)
    return tuple(layer.found for layer in layers) if is_kept else ()


def install(model: Any, geometry: Geometry, tokens: torch.Tensor) -> bool:
    """Let a step call `model`, if its attention is its own, for each sequence by itself. Returns whether it does.

    It does not, and nothing changes, if a forward pass over `tokens` [1, T] hands the cache something else than `geometry`
    has, or raises.
    """
    if not geometry.gathers:
        return False
    try:
        found = find_cached(model, tokens)
    except Exception as error:  # of the model's code
        log.debug("%s takes no cache: %s: %s", type(model).__name__, type(error).__name__, error)
        return False
    shapes = [(*one.kv, one.index_dim) for one in found if one.kv is not None]
    if not shapes or shapes != _shapes(geometry.layers, len(found)):
        return False
    model.forward = _BySequence(model.forward, found, model.config.get_text_config(decoder=True))
    log.warning("attention of %s is code of its own: sequences are computed one after the other", type(model).__name__)
    return True


def is_installed(model: Any) -> bool:
    """Whether steps call `model` for each sequence by itself."""
    return isinstance(vars(model).get("forward"), _BySequence)


def _shapes(layers: tuple[LayerShape, ...], num_layers: int) -> list[tuple[int, int, int, int]]:
    """Heads, and elements of K, of V and of the key that chooses, of each of the model's layers, as a geometry has them."""
    keys = iter(layers[num_layers:])
    shapes = []
    for shape in layers[:num_layers]:
        chosen = next(keys) if shape.chooses else None
        index_dim = 0 if chosen is None else chosen.k_dim + chosen.v_dim
        shapes.append((shape.num_kv_heads, shape.k_dim, shape.v_dim, index_dim))
    return shapes


class _BySequence:
    """Calls a model: for each sequence of a step by itself, as it is otherwise."""

    def __init__(self, forward: Callable[..., Any], found: tuple[FoundLayer, ...], text_config: Any) -> None:
        self._forward = forward
        self._text_config = text_config
        self.__signature__ = inspect.signature(forward)
        self._keeps = "logits_to_keep" in self.__signature__.parameters
        chosen = np.cumsum([bool(one.index_dim) for one in found]) - 1
        self._places = [  # of each layer's K and V, and of its keys that choose, among the step's layers
            (layer, len(found) + int(chosen[layer]) if one.index_dim else None) for layer, one in enumerate(found)
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = running_step()
        if step is None:
            return self._forward(*args, **kwargs)
        return self._by_sequence(step, **kwargs)

    def _by_sequence(
        self,
        running: StepContext,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_to_keep: torch.Tensor | int = 0,
        **rest: Any,
    ) -> Any:
        """`logits` [1, len(logits_to_keep), vocabulary], for 0 of all tokens."""
        num_tokens = int(running.q_lens.sum())
        kept = np.arange(num_tokens)
        if isinstance(logits_to_keep, torch.Tensor):
            kept = logits_to_keep.cpu().numpy()
        elif logits_to_keep:
            kept = kept[-logits_to_keep:]
        logits, output = None, None
        for chunk, tokens, num_tokens in self._pieces(running):
            cache = Cache(layers=[_OfSequence(running, chunk, tokens, num_tokens, *places) for places in self._places])
            wanted = np.flatnonzero((kept >= tokens.start) & (kept < tokens.stop))
            places = torch.from_numpy(kept[wanted] - tokens.start).to(input_ids.device)
            more = _positions(self, position_ids[:, tokens])
            if self._keeps:
                more["logits_to_keep"] = places if len(wanted) else 1
            output = self._forward(input_ids=input_ids[:, tokens], past_key_values=cache, use_cache=True, **more)
            if logits is None:
                logits = output.logits.new_zeros(1, len(kept), output.logits.shape[-1])
            if len(wanted):
                found = output.logits[0] if self._keeps else output.logits[0, places]
                logits[0, torch.from_numpy(wanted).to(logits.device)] = found
        assert output is not None
        output.logits = logits
        return output

    def _pieces(self, step: StepContext) -> Iterator[tuple[int, slice, int]]:
        """Chunks in pieces with scores that fit: the chunk, its tokens in the packed row, and how many are behind their end."""
        for chunk, (start, length, end) in enumerate(
            zip(step.q_starts.tolist(), step.q_lens.tolist(), step.kv_lens.tolist(), strict=True)
        ):
            size = tokens_in_a_piece(self._text_config, end)
            for at in range(0, length, size):
                size_here = min(size, length - at)
                yield chunk, slice(start + at, start + at + size_here), end - length + at + size_here


def _positions(forward: Callable[..., Any], positions: torch.Tensor) -> dict[str, Any]:
    """The argument with positions, of models that take one; others count the tokens of the cache."""
    return {"position_ids": positions} if "position_ids" in inspect.signature(forward).parameters else {}


class _NotedLayer(DynamicIndexedLayer):
    """A layer of a cache that notes what it is handed."""

    found = FoundLayer()
    num_tokens = 0

    def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_tokens += key.shape[2]
        shape = (key.shape[1], key.shape[3], value.shape[3]) if key.shape[1] == value.shape[1] else None
        self.found = FoundLayer(kv=shape, index_dim=self.found.index_dim)
        return key, value

    def update_indexer(self, keys: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.found = FoundLayer(kv=self.found.kv, index_dim=keys.shape[-1])
        return keys


class _OfSequence(DynamicIndexedLayer):
    """A layer of the cache of one sequence of a step, which lies in its blocks.

    Args:
        chunk: The sequence's, in the step.
        tokens: Its new tokens in the packed row.
        num_tokens: Of the sequence, with these.
        of_kv, of_index: Among the step's layers.
    """

    def __init__(self, step: StepContext, chunk: int, tokens: slice, num_tokens: int, of_kv: int, of_index: int | None) -> None:
        super().__init__()
        self._step, self._chunk, self._tokens, self._num_tokens = step, chunk, tokens, num_tokens
        self._of_kv, self._of_index = step.layers[of_kv], None if of_index is None else step.layers[of_index]

    def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """key [1, heads, new tokens, dim], value alike -> those of the whole sequence."""
        self._step.beat()
        key, value = self._kept(self._of_kv, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return key.transpose(0, 1)[None], value.transpose(0, 1)[None]

    def update_indexer(self, keys: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """keys [1, new tokens, dim] -> those of the whole sequence."""
        assert self._of_index is not None
        first = self._of_index.key.shape[-1]
        both = self._kept(self._of_index, keys[0, :, None, :first], keys[0, :, None, first:])
        return torch.cat(both, -1)[None, :, 0]

    def get_seq_length(self) -> int:
        """Tokens before the new ones."""
        return self._num_tokens - (self._tokens.stop - self._tokens.start)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The length of K and V, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    def _kept(self, cache: LayerCache, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write key and value [new tokens, heads, dim], and read those of the sequence."""
        step = self._step
        places = step.write_blocks[cache.table][self._tokens], step.write_offsets[self._tokens]
        blocks = step.tables[cache.table][self._chunk, : -(-self._num_tokens // step.block_size)]
        found = []
        for new, stored, scales in ((key, cache.key, cache.key_scale), (value, cache.value, cache.value_scale)):
            kind = stored.dtype if scales is None else new.dtype
            store(new.to(kind), stored, scales, places)
            whole = torch.empty((len(blocks), *stored.shape[1:]), dtype=kind, device=stored.device)
            gather(stored, scales, blocks, whole)
            found.append(whole.flatten(0, 1)[: self._num_tokens].to(new.dtype))
        return found[0], found[1]
