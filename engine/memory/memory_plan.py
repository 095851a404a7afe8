"""The division of a device's memory as data and arithmetic, for a device that is there or only described. Imports no torch.

|<------------------------------ free before the weights -------------------------------->|
| weights, primitives | working reserve |       KV pool       | left to others           |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...allocator.host_arena import preferred_granule
from ...cache.geometry import EXTENT_TARGET_BYTES, ITEM_BYTES, PAGE_BYTES, FoundLayer, Geometry, GeometryError, LayerShape
from ...cache.layer_groups import LayerGroup
from ...common.units import GIB, MIB, format_bytes
from ..attention.backends import EXPANDED_FROM, buffer_bytes, expansion_bytes, gathering_bytes, states_bytes
from ..config import EngineConfig, KvMemory
from ..errors import ConfigError, NotEnoughMemory, UnsupportedModel
from ..execution.graph_sizes import sizes_for
from ..layers import Quantization
from ..loading.model_config import check_length, experts_per_token, layer_configs
from ..loading.models import KV_CACHE_DTYPES, KvCacheDtype

if TYPE_CHECKING:
    from ..loading.checkpoint import Checkpoint
    from ..loading.written_model import WrittenModel
    from .decode_rate import DecodeRate

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
    quantization: Quantization | None = None  # of the weights, made at load
    stored_as: str | None = None  # the format of weights that are stored quantized
    packed_bytes: Mapping[str, int] = field(default_factory=dict)  # of these weights, by form, those that stay as they are
    dequantized_bytes: int = 0  # and those that become `dtype`
    loading_bytes: int = 0  # held while weights are read on a CPU, besides those that stay
    num_shards: int = 1  # of the model; all other numbers are of one of them
    replicated_bytes: int = 0  # of the weights, those that every shard has
    decode: DecodeRate | None = None  # on a CPU whose rates were measured
    disk_buffer_bytes: int = 0  # of host memory: blocks on their way to disk and back; on a CPU a part of the reserve
    answers_bytes: int = 0  # of host memory: what a server may hold of outputs that are not delivered
    host_kv_bytes: int = 0  # of host memory: the host tier, with what suspended requests keep
    host_copy_bytes: int = 0  # of host memory: a copy of weights on CUDA, from which a sleeping model wakes up

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V per token in all layers."""
        return self.geometry.kv_bytes_per_token

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent and convolution states of a sequence, whatever its length."""
        return self.geometry.state_bytes

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
        columns = usable * geometry.columns_for_tokens(self.context)
        return columns // geometry.blocks_for_tokens(self.context) * self.block_size

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
        if all(group.window is None for group in self.geometry.kv_groups):
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
            "model", "device", "dtype", "quantization", "stored_as", "kv_cache_dtype", "free_bytes", "weights_bytes",
            "packed_bytes", "dequantized_bytes", "primitives_bytes", "reserve_bytes", "kv_bytes", "min_kv_bytes", "num_blocks",
            "block_size", "kv_bytes_per_token", "max_model_len", "context", "tokens_that_fit", "sequences_that_fit",
            "left_bytes", "num_shards", "replicated_bytes", "disk_buffer_bytes", "answers_bytes", "state_bytes",
            "host_kv_bytes", "host_copy_bytes",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names} | {
            "decode_estimate": None if self.decode is None else asdict(self.decode),
            "kv_cache_dtypes": {
                name: {
                    "kv_bytes_per_token": (other := self.with_kv_cache_dtype(name)).kv_bytes_per_token,
                    "sequences_that_fit": other.sequences_that_fit,
                }
                for name in KV_CACHE_DTYPES
            },
            "groups": [
                {
                    "layers": len(_layers_of(self.geometry, group)),
                    "window": group.window,
                    "chunked": group.chunked,
                    "tables": group.num_tables,
                    "kv_bytes_per_token": _bytes_per_token(self.geometry, group),
                }
                for group in self.geometry.kv_groups
            ],
            "without_windows": {"sequences_that_fit": self.without_windows().sequences_that_fit},
        }

    def describe(self) -> str:
        """The plan as lines of text."""
        has_scales, plain = self.geometry.has_scales, self.without_windows()
        other = self.with_kv_cache_dtype("auto" if has_scales else "int8")  # fp8 takes the same bytes
        lines = (
            ("model", f"{self.model} as {self.dtype} on {self.device}"),
            *([("shards", f"{self.num_shards}; what follows is of each")] if self.num_shards > 1 else []),
            ("free", format_bytes(self.free_bytes)),
            (
                "weights",
                format_bytes(self.weights_bytes) + (f" in {form}" if (form := self.quantization or self.stored_as) else ""),
            ),
            *(("... packed", f"{format_bytes(size)}, as {form}") for form, size in self.packed_bytes.items()),
            *([("... dequantized", f"{format_bytes(self.dequantized_bytes)}, as {self.dtype}")] * bool(self.dequantized_bytes)),
            *([("... on every shard", format_bytes(self.replicated_bytes))] if self.num_shards > 1 else []),
            *([("primitives", format_bytes(self.primitives_bytes))] if self.primitives_bytes else []),
            ("working reserve", format_bytes(self.reserve_bytes)),
            *([("host tier", f"{format_bytes(self.host_kv_bytes)} of host memory")] * bool(self.host_kv_bytes)),
            *([("disk tier", f"{format_bytes(self.disk_buffer_bytes)} of host memory")] * bool(self.disk_buffer_bytes)),
            *(
                [("answers", f"at most {format_bytes(self.answers_bytes)} of host memory, in a server")]
                * bool(self.answers_bytes)
            ),
            *([("to sleep", f"{format_bytes(self.host_copy_bytes)} of host memory, in a server")] * bool(self.host_copy_bytes)),
            ("KV pool", f"{format_bytes(self.kv_bytes)}: {self.num_blocks:,} blocks of {self.block_size} tokens"),
            ("... at least", format_bytes(self.min_kv_bytes)),
            ("KV per token", f"{self.kv_bytes_per_token:,} bytes in {self.kv_cache_dtype}"),
            *group_lines(self.geometry),
            ("tokens that fit", f"{self.tokens_that_fit:,}"),
            (f"sequences of {self.context:,}", f"{self.sequences_that_fit:,} at the same time"),
            (
                f"... in {self.dtype if has_scales else 'int8 or fp8'}",
                f"{other.sequences_that_fit:,} with the same memory, {other.kv_bytes_per_token:,} bytes per token",
            ),
            *([("... without windows", f"{plain.sequences_that_fit:,} with the same memory")] if plain is not self else ()),
            *([("decode", self.decode.describe())] if self.decode is not None else ()),
        )
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def group_lines(geometry: Geometry) -> list[tuple[str, str]]:
    """(name, text) of each group of layers, if not all keep all tokens, and of states, if layers have some."""
    states = [("states", f"{format_bytes(geometry.state_bytes)} per sequence, in the pool")] * bool(geometry.state_bytes)
    if all(group.window is None for group in geometry.kv_groups):
        return states
    lines = []
    for group in geometry.kv_groups:
        kept = f"the last {group.window:,} tokens" if group.window else "all tokens"
        if group.chunked:
            kept = f"tokens since the last multiple of {group.window:,}"
        number = len(_layers_of(geometry, group))
        lines.append((f"... in {number} layer{'s' * (number > 1)}", f"{_bytes_per_token(geometry, group):,} bytes, for {kept}"))
    return [*lines, *states]


def _layers_of(geometry: Geometry, group: LayerGroup) -> list[LayerShape]:
    """The layers of `group` with K and V of their own."""
    own = (layer for layer in geometry.layers if layer.shares is None and layer.num_kv_heads)
    return [layer for layer in own if (layer.window, layer.chunked) == (group.window, group.chunked)]


def _bytes_per_token(geometry: Geometry, group: LayerGroup) -> int:
    return sum(map(geometry.token_bytes, _layers_of(geometry, group)))


def plan_pool(
    config: EngineConfig,
    model: Checkpoint | WrittenModel,
    base: Geometry,
    *,
    device: str,
    dtype: str,
    free_bytes: int,
    total_bytes: int,
    weights_bytes: int,
    primitives_bytes: int = 0,
    reserve_bytes: int,
    context: int | None = None,
    remedy: Callable[[int], str | None] = lambda asked_bytes: None,
    **more: Any,
) -> MemoryPlan:
    """The plan of a device with so much memory, for a model of `base` geometry that takes so much of it.

    Args:
        device: "cpu", or another name, which is then of a CUDA device.
        context: As for `plan_memory`.
        remedy: What to do if that many bytes are asked for and not there, if it knows.
        more: Further fields of the plan.

    Raises NotEnoughMemory, ConfigError.
    """
    length, asked = model_length(config, model), config.kv_memory
    check_context(config, model, context)
    room = free_bytes - weights_bytes - primitives_bytes
    if base.state_bytes:
        sizes = [sum(state.num_bytes for state in layer.states) for layer in base.layers if layer.states]
        token_bytes = int(getattr(model.text_config, "hidden_size", 0) or 0) * ITEM_BYTES[dtype]
        reserve_bytes += states_bytes(sizes, config.max_seqs, config.max_step_tokens, token_bytes)
    if asked.max_bytes is None:
        geometry, num_blocks = auto_pool(base, is_cpu(device), room, reserve_bytes, config.max_seqs, length)
        if asked.min_bytes is not None and geometry.bytes_for_blocks(num_blocks) < asked.min_bytes:
            geometry, num_blocks = _pool_of(base, asked.min_bytes)
    else:
        most = max(total_bytes, free_bytes) - weights_bytes - primitives_bytes
        geometry, num_blocks = _pool_of(base, _most_bytes(asked, most))
    plan = MemoryPlan(
        model=model.spec.name,
        device=device,
        dtype=dtype,
        free_bytes=free_bytes,
        weights_bytes=weights_bytes,
        primitives_bytes=primitives_bytes,
        reserve_bytes=reserve_bytes,
        kv_bytes=geometry.bytes_for_blocks(num_blocks),
        num_blocks=num_blocks,
        min_extents=_least_extents(geometry, num_blocks, length, asked.min_bytes),
        geometry=geometry,
        max_model_len=length,
        context=context or length,
        quantization=config.quantization,
        host_kv_bytes=config.host_kv_memory,
        **more,
    )
    _refuse_bad_pool(plan, asked, remedy)
    return plan


def is_cpu(device: str) -> bool:
    """Whether a device of this name is the host. All others are CUDA devices."""
    return device.partition(":")[0] == "cpu"


def check_context(config: EngineConfig, model: Checkpoint | WrittenModel, context: int | None) -> None:
    """Raise ConfigError unless sequences of `context` tokens are none too long for the engine; None is the longest."""
    length = model_length(config, model)
    if context is not None and not 1 <= context <= length:
        raise ConfigError(f"context must be 1 to {length:,} tokens, which {model.spec.name} takes; got {context:,}")


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


def model_length(config: EngineConfig, model: Checkpoint | WrittenModel) -> int:
    """Maximum tokens of a sequence: `max_model_len`, else the model's context, else DEFAULT_CONTEXT.

    Raises ConfigError if `max_model_len` exceeds the model's positions.
    """
    limit = model.context_length
    if config.max_model_len is None:
        return limit or DEFAULT_CONTEXT
    check_length(config.max_model_len, limit, model.spec.name)
    return config.max_model_len


def auto_pool(
    geometry: Geometry, on_cpu: bool, free_after_weights: int, reserve_bytes: int, max_seqs: int, max_model_len: int
) -> tuple[Geometry, int]:
    """(geometry, blocks) of the default KV pool, in whole extents of `pool_geometry`.

    On CUDA it is 90 % of what weights and reserve leave free. On the host, which is shared with other programs, it is a quarter
    of what the weights leave free, and at most 1 GiB. On both it is

    - at most what `max_seqs` sequences of `max_model_len` and the null block can use;
    - at least one sequence of `max_model_len` and the null block, if weights and reserve leave that much.
    """
    per_sequence = geometry.blocks_for_tokens(max_model_len)
    room = max(0, free_after_weights - reserve_bytes)
    if on_cpu:
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
    tables = sum(group.num_tables for group in geometry.kv_groups if group.window is not None)
    return geometry.blocks_for_tokens(num_tokens) + tables * geometry.columns_for_tokens(min(_GOOD_CHUNK, num_tokens))


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
    one_expert, dense = (
        max(width) if isinstance(width, (list, tuple)) else width or 0  # of layers, or of experts for text and for images
        for width in (getattr(layer, name, None) for name in ("moe_intermediate_size", "intermediate_size"))
    )
    widest = dense or 4 * hidden
    intermediate = max(widest, experts_per_token(layer) * (one_expert or widest))
    attention = 2 * head_dim * (heads + 2 * kv_heads)
    # Queries, before and after the product by head; outputs the same way.
    if rank := getattr(layer, "kv_lora_rank", None):
        rope_dim, v_dim = layer.qk_rope_head_dim, layer.v_head_dim
        query = layer.qk_nope_head_dim + rope_dim
        attention = heads * (2 * query + rank + (rank + rope_dim) + rank + 2 * v_dim) + 3 * (rank + rope_dim)
    return int(4 * hidden + 3 * intermediate + attention)


def cuda_reserve_bytes(config: EngineConfig, model: Checkpoint | WrittenModel, geometry: Geometry, dtype: str) -> int:
    """Memory of a CUDA device for a step: that of `step_bytes`, the kernels' buffers and captured steps."""
    reserve = step_bytes(config, model, geometry, dtype, on_cpu=False) + buffer_bytes(config.attention)
    return reserve + (graph_bytes(model.text_config, config.max_seqs, dtype) if config.cuda_graphs else 0)


def step_bytes(config: EngineConfig, model: Checkpoint | WrittenModel, geometry: Geometry, dtype: str, *, on_cpu: bool) -> int:
    """Memory for the tensors of a step: activations, logits, K and V that latent attention expands or other is given."""
    reserve = working_reserve_bytes(model.text_config, config.max_step_tokens, config.max_seqs, dtype, on_cpu=on_cpu)
    if config.max_step_tokens >= EXPANDED_FROM and has_latents(geometry):
        reserve += expansion_bytes(model.text_config, model_length(config, model), ITEM_BYTES[dtype])
    if geometry.gathers:
        reserve += gathering_bytes(model.text_config, model_length(config, model), ITEM_BYTES[dtype])
    return reserve


def has_latents(geometry: Geometry) -> bool:
    """Whether a layer caches latents."""
    return any(layer.v_in_k for layer in geometry.layers)


def working_reserve_bytes(text_config: Any, max_step_tokens: int, max_seqs: int, dtype: str, *, on_cpu: bool) -> int:
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
    logits = max_seqs * int(text_config.vocab_size) * (ITEM_BYTES[dtype] + 8)
    workspaces = 0 if on_cpu else CUDA_WORKSPACE_BYTES
    return int(max_step_tokens * per_token * ITEM_BYTES[dtype]) + logits + workspaces


def graph_bytes(text_config: Any, max_seqs: int, dtype: str) -> int:
    """Bytes that captured decode steps keep: activations and logits of the largest; the others share its memory."""
    rows = sizes_for(max_seqs)[-1]
    return working_reserve_bytes(text_config, rows, rows, dtype, on_cpu=True)  # on_cpu: without workspaces


def geometry_of(
    config: EngineConfig, model: Checkpoint | WrittenModel, dtype: str, *, on_cpu: bool, found: Sequence[FoundLayer] = ()
) -> Geometry:
    """The layout of blocks of the model. `found` as for `layer_shapes`. Raises UnsupportedModel."""
    try:
        return Geometry.from_config(
            model.text_config,
            block_size=config.tokens_per_block(),
            dtype=_SCALED.get(config.kv_cache_dtype, dtype),
            granule_bytes=PAGE_BYTES if on_cpu else CUDA_GRANULE_BYTES,
            latents=model.caches_latents,
            max_tokens=model_length(config, model),
            found=found,
        )
    except GeometryError as error:
        raise UnsupportedModel(f"{model.spec.name}: {error}") from error


def _refuse_bad_pool(plan: MemoryPlan, asked: KvMemory, remedy: Callable[[int], str | None]) -> None:
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
            remedy(plan.free_bytes + needed - room) or f"{less}free {format_bytes(needed - room)} on {plan.device}",
        )
