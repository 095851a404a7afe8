"""The memory plan of a device: weights, primitives, a working reserve and the KV pool. For `pagetide plan` and engine startup.

Both call `plan_memory` with the bytes that are free *before* the weights are read:

    |<------------------------------ free before the weights -------------------------------->|
    | weights, primitives | working reserve |       KV pool       | left to others           |

Nothing here allocates memory (on CUDA, querying the free memory creates the process's context).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import native
from ...allocator.host_arena import preferred_granule
from ...cache.geometry import EXTENT_TARGET_BYTES, PAGE_BYTES, Geometry, GeometryError, LayerShape
from ...cache.layer_groups import LayerGroup
from ...common import answer_memory
from ...common.units import GIB, MIB, format_bytes
from ..attention.backends import buffer_bytes
from ..attention.latent import EXPANDED_FROM, expansion_bytes
from ..config import EngineConfig, KvMemory
from ..cpu import Quantization
from ..cpu.linears import scratch_bytes
from ..cpu.onednn import by_head_primitive_bytes, primitive_bytes
from ..cpu.packing import held_twice_bytes
from ..errors import ConfigError, NotEnoughMemory, UnsupportedModel
from ..execution.graphs import sizes_for
from ..loading.checkpoint import Checkpoint
from ..loading.division import Division
from ..loading.loader import address_remedy, check_weights_fit, free_bytes, total_bytes
from ..loading.model_config import check_length, layer_configs, linear_shapes
from ..loading.models import KV_CACHE_DTYPES, KvCacheDtype
from ..loading.packed_model import loading_bytes

DEFAULT_CONTEXT = 4096  # tokens, for models without a limit
CUDA_GRANULE_BYTES = 2 * MIB
CUDA_WORKSPACE_BYTES = 256 * MIB  # for cuBLAS, kernels, and fragmentation of torch's allocator
_CUDA_SHARE = 0.9
_HOST_MOST_BYTES = GIB
_HOST_SHARE = 1 / 4
_LEAST_EXTENTS = 32  # of a pool, so that rounding to whole extents costs little
_GOOD_CHUNK = 256  # tokens of a prompt in a step
_SCALED: dict[KvCacheDtype, str] = {"int8": "int8", "fp8": "float8_e4m3fn"}  # types of elements; "auto": the model's


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory plan of one engine on one device, in bytes, tokens and blocks. Blocks include the null block."""

    model: str
    device: str
    dtype: str
    free_bytes: int  # before anything is loaded
    weights_bytes: int
    primitives_bytes: int  # oneDNN's, for matrix products with the weights on a CPU
    reserve_bytes: int  # for the activations of a step
    kv_bytes: int  # the largest pool, in whole extents
    num_blocks: int
    min_extents: int  # lower bound of the pool
    geometry: Geometry  # with extents that fit the pool
    max_model_len: int
    context: int  # tokens of the sequences counted in `sequences_that_fit`
    quantization: Quantization | None = None  # of the weights
    loading_bytes: int = 0  # held while weights are read on a CPU, besides those that stay
    num_shards: int = 1  # of the model; all other numbers are of one of them
    replicated_bytes: int = 0  # of the weights, those that every shard has
    answers_bytes: int = 0  # of host memory: what a server may hold of outputs that are not delivered

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V per token in all layers."""
        return self.geometry.kv_bytes_per_token

    @property
    def kv_cache_dtype(self) -> str:
        """The type of K and V: the model's, or one with scales."""
        return next((name for name, of in _SCALED.items() if of == self.geometry.dtype), self.dtype)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.geometry.block_size

    @property
    def num_extents(self) -> int:
        """Extents of the pool."""
        return self.geometry.extents_for_blocks(self.num_blocks)

    @property
    def min_kv_bytes(self) -> int:
        """The pool at its smallest."""
        return self.min_extents * self.geometry.extent_bytes

    @property
    def tokens_that_fit(self) -> int:
        """Tokens that the pool holds, in sequences of `context`."""
        geometry = self.geometry
        usable = geometry.usable_blocks(self.num_blocks)
        if not self.sequences_that_fit:
            return geometry.tokens_in_blocks(usable, self.context)
        slots = usable * geometry.slots_for_tokens(self.context)
        return slots // geometry.blocks_for_tokens(self.context) * self.block_size

    @property
    def sequences_that_fit(self) -> int:
        """Sequences of `context` tokens that the pool holds at the same time."""
        return self.geometry.usable_blocks(self.num_blocks) // self.geometry.blocks_for_tokens(self.context)

    @property
    def left_bytes(self) -> int:
        """Bytes that stay free on the device with the whole plan allocated."""
        return self.free_bytes - self.weights_bytes - self.primitives_bytes - self.reserve_bytes - self.kv_bytes

    def without_windows(self) -> MemoryPlan:
        """The plan if every layer kept all tokens, in a pool of the same bytes."""
        if all(group.window is None for group in self.geometry.groups):
            return self
        layers = tuple(replace(layer, window=None, chunked=False, table=0) for layer in self.geometry.layers)
        geometry, num_blocks = _pool_of(replace(self.geometry, layers=layers), self.kv_bytes)
        return replace(self, geometry=geometry, num_blocks=num_blocks)

    def with_kv_cache_dtype(self, kv_cache_dtype: KvCacheDtype) -> MemoryPlan:
        """The plan with K and V in another type, in a pool of the same bytes."""
        other = replace(self.geometry, dtype=_SCALED.get(kv_cache_dtype, self.dtype))
        if other == self.geometry:
            return self
        geometry, num_blocks = _pool_of(other, self.kv_bytes)
        return replace(self, geometry=geometry, num_blocks=num_blocks)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        names = (
            "model", "device", "dtype", "quantization", "kv_cache_dtype", "free_bytes", "weights_bytes", "primitives_bytes",
            "reserve_bytes", "kv_bytes", "min_kv_bytes", "num_blocks", "block_size", "kv_bytes_per_token", "max_model_len",
            "context", "tokens_that_fit", "sequences_that_fit", "left_bytes", "num_shards", "replicated_bytes",
            "answers_bytes",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names} | {
            "kv_cache_dtypes": {
                name: {
                    "kv_bytes_per_token": (other := self.with_kv_cache_dtype(name)).kv_bytes_per_token,
                    "sequences_that_fit": other.sequences_that_fit,
                }
                for name in KV_CACHE_DTYPES
            },
            "groups": [
                {
                    "layers": len(self._layers_of(group)),
                    "window": group.window,
                    "chunked": group.chunked,
                    "tables": group.num_tables,
                    "kv_bytes_per_token": self._bytes_per_token(group),
                }
                for group in self.geometry.groups
            ],
            "without_windows": {"sequences_that_fit": self.without_windows().sequences_that_fit},
        }

    def _bytes_per_token(self, group: LayerGroup) -> int:
        return sum(map(self.geometry.token_bytes, self._layers_of(group)))

    def _layers_of(self, group: LayerGroup) -> list[LayerShape]:
        """The layers of `group` with K and V of their own."""
        own = (layer for layer in self.geometry.layers if layer.shares is None and layer.num_kv_heads)
        return [layer for layer in own if (layer.window, layer.chunked) == (group.window, group.chunked)]

    def _describe(self, group: LayerGroup) -> tuple[str, str]:
        """A line about `group`."""
        kept = f"the last {group.window:,} tokens" if group.window else "all tokens"
        if group.chunked:
            kept = f"tokens since the last multiple of {group.window:,}"
        number = len(self._layers_of(group))
        return (f"... in {number} layer" + "s" * (number > 1), f"{self._bytes_per_token(group):,} bytes, for {kept}")

    def describe(self) -> str:
        """The plan as lines of text."""
        has_scales, plain = self.geometry.has_scales, self.without_windows()
        other = self.with_kv_cache_dtype("auto" if has_scales else "int8")  # fp8 takes the same bytes
        lines = (
            ("model", f"{self.model} as {self.dtype} on {self.device}"),
            *([("shards", f"{self.num_shards}; what follows is of each")] if self.num_shards > 1 else []),
            ("free now", format_bytes(self.free_bytes)),
            ("weights", format_bytes(self.weights_bytes) + (f" in {self.quantization}" if self.quantization else "")),
            *([("... on every shard", format_bytes(self.replicated_bytes))] if self.num_shards > 1 else []),
            *([("primitives", format_bytes(self.primitives_bytes))] if self.primitives_bytes else []),
            ("working reserve", format_bytes(self.reserve_bytes)),
            ("answers", f"at most {format_bytes(self.answers_bytes)} of host memory, in a server"),
            ("KV pool", f"{format_bytes(self.kv_bytes)}: {self.num_blocks:,} blocks of {self.block_size} tokens"),
            ("... at least", format_bytes(self.min_kv_bytes)),
            ("KV per token", f"{self.kv_bytes_per_token:,} bytes in {self.kv_cache_dtype}"),
            *(map(self._describe, self.geometry.groups) if plain is not self else ()),
            ("tokens that fit", f"{self.tokens_that_fit:,}"),
            (f"sequences of {self.context:,}", f"{self.sequences_that_fit:,} at the same time"),
            (
                f"... in {self.dtype if has_scales else 'int8 or fp8'}",
                f"{other.sequences_that_fit:,} with the same memory, {other.kv_bytes_per_token:,} bytes per token",
            ),
            *([("... without windows", f"{plain.sequences_that_fit:,} with the same memory")] if plain is not self else ()),
        )
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def plan_memory(
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    *,
    context: int | None = None,
    free: Callable[[torch.device], int] = free_bytes,
    total: Callable[[torch.device], int] = total_bytes,
    division: Division | None = None,
) -> MemoryPlan:
    """Plan the memory that is free on `device` now, before the weights are read. Allocates nothing.

    Args:
        context: Tokens of the sequences in `sequences_that_fit`; None is the longest that the engine takes. Does not change the
            pool.
        total: Returns all bytes of a device. A pool with a given maximum is planned within these: it starts at its minimum and
            may grow into memory that is not free yet.
        division: Plan one shard of the model. `free` and `total` are then of one shard.

    Raises:
        NotEnoughMemory: the weights, or the minimum KV memory besides them, do not fit.
        ConfigError: `max_model_len` or `context` exceeds the model's; the pool is too small for a block.
        UnsupportedModel: the shape of the model's KV cannot be determined.
    """
    length, name = model_length(config, checkpoint), checkpoint.spec.name
    if context is not None and not 1 <= context <= length:
        raise ConfigError(f"context must be 1 to {length:,} tokens, which {name} takes; got {context:,}")
    there = free(device)
    weights = _weights_bytes(config, checkpoint, device, dtype, _with_known(free, {device: there}), division)
    base = model_geometry(config, checkpoint, device, dtype, division)
    primitives = _primitives_bytes(checkpoint, base, device, dtype)
    reserve = _reserve_bytes(config, checkpoint, base, device, dtype)
    asked = config.kv_memory
    if asked.max_bytes is None:
        geometry, num_blocks = auto_pool(base, device, there - weights - primitives, reserve, config.max_seqs, length)
        if asked.min_bytes is not None and geometry.bytes_for_blocks(num_blocks) < asked.min_bytes:
            geometry, num_blocks = _pool_of(base, asked.min_bytes)
    else:
        geometry, num_blocks = _pool_of(base, _most_bytes(asked, max(total(device), there) - weights - primitives))
    plan = MemoryPlan(
        model=name,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        free_bytes=there,
        weights_bytes=weights,
        primitives_bytes=primitives,
        reserve_bytes=reserve,
        kv_bytes=geometry.bytes_for_blocks(num_blocks),
        num_blocks=num_blocks,
        min_extents=_least_extents(geometry, num_blocks, length, asked.min_bytes),
        geometry=geometry,
        max_model_len=length,
        context=context or length,
        quantization=config.quantization,
        loading_bytes=_loading_bytes(config, checkpoint, device, dtype, division),
        answers_bytes=_answers_bytes(device, there - weights - primitives, free),
    )
    _refuse_bad_pool(plan, asked)
    return plan


def _with_known(free: Callable[[torch.device], int], known: dict[torch.device, int]) -> Callable[[torch.device], int]:
    """`free`, without asking again for what is `known`."""
    return lambda device: known[device] if device in known else free(device)


def _loading_bytes(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, division: Division | None
) -> int:
    """Bytes held while weights are read, besides those that stay."""
    if device.type != "cpu" or config.quantization is not None:
        return 0
    return loading_bytes(checkpoint, dtype, division)


def _weights_bytes(
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    free: Callable[[torch.device], int],
    division: Division | None,
) -> int:
    """Bytes of the weights. Raises NotEnoughMemory if they do not fit."""
    weights = check_weights_fit(checkpoint, device, dtype, free, config.quantization, division)
    if device.type == "cpu" and config.quantization is None:  # else the head is quantized, and counted
        weights += held_twice_bytes(checkpoint.text_config, dtype)
    return weights


def _primitives_bytes(checkpoint: Checkpoint, geometry: Geometry, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes of oneDNN's primitives on a CPU."""
    if device.type != "cpu":
        return 0
    by_head = by_head_primitive_bytes(dtype) if _has_latents(geometry) else 0
    if native.instructions() is not None:
        return by_head
    return primitive_bytes(linear_shapes(checkpoint.text_config), dtype) + by_head


def _has_latents(geometry: Geometry) -> bool:
    return any(layer.v_in_k for layer in geometry.layers)


def _reserve_bytes(
    config: EngineConfig, checkpoint: Checkpoint, geometry: Geometry, device: torch.device, dtype: torch.dtype
) -> int:
    """Memory for a step: activations, logits, K and V that latent attention expands; the device's buffers.

    These are on CUDA the kernels' and captured steps, on a CPU rows of products.
    """
    reserve = working_reserve_bytes(checkpoint.text_config, config.max_step_tokens, config.max_seqs, dtype, device)
    if config.max_step_tokens >= EXPANDED_FROM and _has_latents(geometry):
        reserve += expansion_bytes(checkpoint.text_config, model_length(config, checkpoint), dtype)
    if device.type == "cpu":
        widest = max(inputs for inputs, _ in linear_shapes(checkpoint.text_config))
        reserve += scratch_bytes(widest, config.max_step_tokens, dtype)
    if device.type == "cuda":
        reserve += buffer_bytes(config.attention)
        if config.cuda_graphs:
            reserve += graph_bytes(checkpoint.text_config, config.max_seqs, dtype)
    return reserve


def _answers_bytes(device: torch.device, room_bytes: int, free: Callable[[torch.device], int]) -> int:
    """Host memory for answers. `room_bytes` are what weights leave on `device`."""
    return answer_memory.planned_bytes(room_bytes if device.type == "cpu" else free(torch.device("cpu")))


def _pool_of(base: Geometry, num_bytes: int) -> tuple[Geometry, int]:
    """(geometry with fitting extents, blocks) of a pool of `num_bytes`."""
    geometry = pool_geometry(base, num_bytes)
    return geometry, geometry.blocks_for_bytes(num_bytes)


def _most_bytes(asked: KvMemory, room_bytes: int) -> int:
    """The largest size of a pool: its maximum. If that is an upper bound only, it is clamped to `room_bytes`."""
    assert asked.max_bytes is not None
    if asked.max_bytes == asked.min_bytes:
        return asked.max_bytes
    return min(asked.max_bytes, max(room_bytes, asked.min_bytes or 0))


def model_length(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """Maximum tokens of a sequence: `max_model_len`, else the model's context, else DEFAULT_CONTEXT.

    Raises ConfigError if `max_model_len` exceeds the model's positions.
    """
    limit = checkpoint.context_length
    if config.max_model_len is None:
        return limit or DEFAULT_CONTEXT
    check_length(config.max_model_len, limit, checkpoint.spec.name)
    return config.max_model_len


def auto_pool(
    geometry: Geometry, device: torch.device, free_after_weights: int, reserve_bytes: int, max_seqs: int, max_model_len: int
) -> tuple[Geometry, int]:
    """(geometry, blocks) of the default KV pool, in whole extents of `pool_geometry`.

    On CUDA it is 90 % of what weights and reserve leave free. On the host, which is shared with other programs, it is a quarter
    of what the weights leave free, and at most 1 GiB. On both it is

    - at most what `max_seqs` sequences of `max_model_len` and the null block can use;
    - at least one sequence of `max_model_len` and the null block, if weights and reserve leave that much.
    """
    per_sequence = geometry.blocks_for_tokens(max_model_len)
    room = max(0, free_after_weights - reserve_bytes)
    if device.type == "cpu":
        wanted = min(int(max(0, free_after_weights) * _HOST_SHARE), _HOST_MOST_BYTES)
    else:
        wanted = int(room * _CUDA_SHARE)
    least, most = 1 + _blocks_to_compute(geometry, max_model_len), 1 + max_seqs * per_sequence
    most = max(least, most)
    about = min(most * geometry.block_stride, max(wanted, least * geometry.block_stride))
    fitted = pool_geometry(geometry, about)
    num_blocks = min(most, fitted.blocks_for_bytes(wanted))
    if num_blocks < least and fitted.bytes_for_blocks(least) <= room:
        num_blocks = least
    return fitted, fitted.blocks_for_bytes(fitted.bytes_for_blocks(num_blocks))  # use the last extent fully


def _least_extents(geometry: Geometry, num_blocks: int, max_model_len: int, min_bytes: int | None) -> int:
    """Minimum extents of the pool: for `min_bytes`, or else for one sequence, but at most a quarter of the pool."""
    most = geometry.extents_for_blocks(num_blocks)
    if min_bytes is not None:
        return min(most, max(1, -(-min_bytes // geometry.extent_bytes)))
    sequence = geometry.extents_for_blocks(1 + _blocks_to_compute(geometry, max_model_len))
    return max(1, min(sequence, -(-most // 4)))


def _blocks_to_compute(geometry: Geometry, num_tokens: int) -> int:
    """Blocks for one sequence, also while its prompt is computed: in windows, those of a chunk of a good size besides."""
    tables = sum(group.num_tables for group in geometry.groups if group.window is not None)
    return geometry.blocks_for_tokens(num_tokens) + tables * geometry.slots_for_tokens(min(_GOOD_CHUNK, num_tokens))


def pool_geometry(geometry: Geometry, kv_bytes: int) -> Geometry:
    """`geometry` with extents for a pool of `kv_bytes`: of the usual size, or smaller, so that there are 32.

    Extents of a large pool are whole huge pages, which are freed ten times faster.
    """
    granule = max(geometry.granule_bytes, preferred_granule(kv_bytes))
    target = min(EXTENT_TARGET_BYTES, max(granule, kv_bytes // _LEAST_EXTENTS))
    return replace(geometry, granule_bytes=granule).with_extents(target)


def _values_per_token(layer: Any) -> int:
    """Elements of a layer's activations for one token; `layer` is the configuration as that layer sees it."""
    hidden = int(getattr(layer, "hidden_size", 0) or 0)
    head_dim = getattr(layer, "head_dim", None) or hidden // (getattr(layer, "num_attention_heads", 0) or 1)
    heads = getattr(layer, "num_attention_heads", 0) or 0
    kv_heads = getattr(layer, "num_key_value_heads", None) or heads
    experts = getattr(layer, "num_experts_per_tok", 0) or 0
    one_expert = getattr(layer, "moe_intermediate_size", None) or 0
    dense = getattr(layer, "intermediate_size", None) or 4 * hidden
    widest = max(dense if isinstance(dense, (list, tuple)) else (dense,))
    intermediate = max(widest, experts * (one_expert or widest))
    attention = 2 * head_dim * (heads + 2 * kv_heads)
    # Queries, before and after the product by head; outputs the same way.
    if rank := getattr(layer, "kv_lora_rank", None):
        rope_dim, v_dim = layer.qk_rope_head_dim, layer.v_head_dim
        query = layer.qk_nope_head_dim + rope_dim
        attention = heads * (2 * query + rank + (rank + rope_dim) + rank + 2 * v_dim) + 3 * (rank + rope_dim)
    return int(4 * hidden + 3 * intermediate + attention)


def working_reserve_bytes(
    text_config: Any, max_step_tokens: int, max_seqs: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Bytes for the activations of the largest step, besides weights and KV.

        max_step_tokens x (4 hidden + 3 intermediate + 2 x (q + 2 kv)) x bytes per element, with latent attention instead of
            2 x (q + 2 kv): heads x (2 q + (3 rank + rope) + 2 v) + 3 x (rank + rope)
      + max_seqs x vocabulary x (bytes per element + 8)
      + 256 MiB of workspaces on CUDA

    Live at the same time in a layer: the residual, its norm, the outputs of attention and MLP; gate, up and their product (of
    all experts of a token); query, key and value, before and after the rotation. Logits are computed for the sequences that
    sample, and the sampler needs them twice as float32. Latent attention has queries and outputs by head both as the model has
    them and as products with latents. Of layers that differ, the largest counts.
    """
    per_token = max(map(_values_per_token, layer_configs(text_config)))
    logits = max_seqs * int(text_config.vocab_size) * (dtype.itemsize + 8)
    workspaces = 0 if device.type == "cpu" else CUDA_WORKSPACE_BYTES
    return int(max_step_tokens * per_token * dtype.itemsize) + logits + workspaces


def graph_bytes(text_config: Any, max_seqs: int, dtype: torch.dtype) -> int:
    """Bytes that captured decode steps keep: activations and logits of the largest; the others share its memory."""
    rows = sizes_for(max_seqs)[-1]
    return working_reserve_bytes(text_config, rows, rows, dtype, torch.device("cpu"))  # "cpu": without workspaces


def model_geometry(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, division: Division | None = None
) -> Geometry:
    """The layout of blocks of the model, or of one of its shards. Raises UnsupportedModel."""
    granule = PAGE_BYTES if device.type == "cpu" else CUDA_GRANULE_BYTES
    name = _SCALED.get(config.kv_cache_dtype, str(dtype).removeprefix("torch."))
    block_size = config.tokens_per_block()
    try:
        whole = Geometry.from_config(
            checkpoint.config,
            block_size=block_size,
            dtype=name,
            granule_bytes=granule,
            latents=checkpoint.caches_latents,
            max_tokens=model_length(config, checkpoint),
        )
    except GeometryError as error:
        raise UnsupportedModel(f"{checkpoint.spec.name}: {error}") from error
    return whole if division is None else division.geometry(whole)


def _refuse_bad_pool(plan: MemoryPlan, asked: KvMemory) -> None:
    room, asked_bytes = plan.free_bytes - plan.weights_bytes - plan.primitives_bytes, asked.max_bytes
    if asked_bytes is not None and asked.min_bytes != asked.max_bytes:  # only the minimum must be free now
        now_bytes, asked_bytes = plan.min_kv_bytes, asked.min_bytes
    else:
        now_bytes = plan.kv_bytes
    least_blocks = 1 + plan.geometry.blocks_for_tokens(1)  # the null block, and those of a token
    least = pool_geometry(plan.geometry, 0).bytes_for_blocks(least_blocks)
    if asked.max_bytes is not None and plan.num_blocks < least_blocks:
        raise ConfigError(
            f"kv_memory {format_bytes(asked.max_bytes)} is no pool: the least is {least_blocks} blocks, one of them the "
            f"null block, and one of {plan.block_size} tokens takes {format_bytes(plan.geometry.block_stride)}; ask "
            f"for {least:,} bytes or more, or for smaller blocks"
        )
    if plan.num_blocks < least_blocks or now_bytes > room:
        needed, besides = max(now_bytes, least), f"{format_bytes(plan.weights_bytes)} of weights"
        if plan.primitives_bytes:
            besides += f" and {format_bytes(plan.primitives_bytes)} of oneDNN's primitives"
        less = f"ask for at most {format_bytes(room)} of kv_memory, or " if asked_bytes and room >= least else ""
        raise NotEnoughMemory(
            needed,
            max(0, room),
            f"the KV pool of {plan.model} on {plan.device}, besides {besides}",
            address_remedy(plan.free_bytes + needed - room, torch.device(plan.device))
            or f"{less}free {format_bytes(needed - room)} on {plan.device}",
        )
