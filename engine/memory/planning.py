"""The memory plan of a model on a device that is there, for engine startup and `pagetide plan`.

Both call `plan_memory` with the bytes that are free *before* the weights are read. Nothing here allocates memory (on CUDA,
querying the free memory creates the process's context).
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ... import native
from ...cache.geometry import Geometry
from ...common import answer_memory
from ..config import EngineConfig
from ..errors import UnsupportedModel
from ..execution.disk_tier import planned_bytes
from ..layers.linears import scratch_bytes
from ..layers.onednn import by_head_primitive_bytes, primitive_bytes
from ..layers.packing import held_twice_bytes
from ..loading.checkpoint import Checkpoint
from ..loading.division import Division
from ..loading.loader import address_remedy, check_weights_fit, free_bytes, total_bytes
from ..loading.meta_models import found_layers, outlined
from ..loading.model_config import linear_shapes
from ..loading.models import ModelSpec
from ..loading.packed_model import loading_bytes
from ..loading.quantized_model import quantized_shapes
from ..loading.stored_model import stored_sizes
from ..loading.written_model import WrittenModel
from .decode_rate import decode_rate
from .memory_plan import (
    MemoryPlan,
    check_context,
    cuda_reserve_bytes,
    geometry_of,
    has_latents,
    model_length,
    plan_pool,
    step_bytes,
)


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
    check_context(config, checkpoint, context)
    there = free(device)
    weights = _weights_bytes(config, checkpoint, device, dtype, _with_known(free, {device: there}), division)
    base = model_geometry(config, checkpoint, device, dtype, division)
    primitives = _primitives_bytes(checkpoint, base, device, dtype)
    room = there - weights - primitives
    disk_buffer = _disk_buffer_bytes(config, checkpoint, base, device, room, free, division)
    stored = stored_sizes(checkpoint, device, dtype, division) if checkpoint.stored else None
    return plan_pool(
        config,
        checkpoint,
        base,
        device=str(device),
        dtype=_name(dtype),
        free_bytes=there,
        total_bytes=there if config.kv_memory.max_bytes is None else total(device),
        weights_bytes=weights,
        primitives_bytes=primitives,
        reserve_bytes=_reserve_bytes(config, checkpoint, base, device, dtype) + disk_buffer * (device.type == "cpu"),
        disk_buffer_bytes=disk_buffer,
        context=context,
        remedy=lambda asked_bytes: address_remedy(asked_bytes, device),
        loading_bytes=_loading_bytes(config, checkpoint, device, dtype, division),
        stored_as=checkpoint.stored_as,
        packed_bytes=stored.packed_bytes if stored else {},
        dequantized_bytes=stored.plain_bytes if stored else 0,
        decode=decode_rate(checkpoint, dtype, config.quantization) if device.type == "cpu" and division is None else None,
        answers_bytes=_answers_bytes(device, room, free),
        host_copy_bytes=0 if division is not None else _host_copy_bytes(config, device, weights, free),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _with_known(free: Callable[[torch.device], int], known: dict[torch.device, int]) -> Callable[[torch.device], int]:
    """`free`, without asking again for what is `known`."""
    return lambda device: known[device] if device in known else free(device)


def _loading_bytes(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, division: Division | None
) -> int:
    """Bytes held while weights are read, besides those that stay."""
    if device.type != "cpu" or config.quantization is not None:
        return 0
    if checkpoint.stored:
        return stored_sizes(checkpoint, device, dtype, division).loading_bytes
    tensors = checkpoint.tensors if division is None else tuple(map(division.largest_part, checkpoint.tensors))
    return loading_bytes(tensors, dtype)


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
    by_head = by_head_primitive_bytes(dtype) if has_latents(geometry) else 0
    if native.instructions() is not None:
        return by_head
    return primitive_bytes(linear_shapes(checkpoint.text_config), dtype) + by_head


def _reserve_bytes(
    config: EngineConfig, checkpoint: Checkpoint, geometry: Geometry, device: torch.device, dtype: torch.dtype
) -> int:
    """Memory for a step: its tensors, and on a CPU rows of products, on CUDA the kernels' buffers and captured steps."""
    if device.type == "cuda":
        return cuda_reserve_bytes(config, checkpoint, geometry, _name(dtype))
    widest = max(inputs for inputs, _ in linear_shapes(checkpoint.text_config))
    reserve = step_bytes(config, checkpoint, geometry, _name(dtype), on_cpu=True)
    return reserve + scratch_bytes(widest, config.max_step_tokens, dtype)


def _disk_buffer_bytes(
    config: EngineConfig,
    checkpoint: Checkpoint,
    geometry: Geometry,
    device: torch.device,
    room_bytes: int,
    free: Callable[[torch.device], int],
    division: Division | None,
) -> int:
    """Host memory for the disk tier, if there is one; of one shard, which holds every state whole. `room_bytes` are what
    weights leave on `device`.
    """
    if not config.disk_kv_memory:
        return 0
    host_bytes = room_bytes if device.type == "cpu" else free(torch.device("cpu"))
    sequence_bytes = geometry.kv_bytes_per_token * model_length(config, checkpoint) + geometry.state_bytes
    unit_bytes = geometry.payload_bytes * max(group.num_tables for group in geometry.groups)
    unit_bytes *= 1 if division is None else division.size
    return planned_bytes(sequence_bytes, host_bytes, unit_bytes)


def _host_copy_bytes(
    config: EngineConfig, device: torch.device, weights_bytes: int, free: Callable[[torch.device], int]
) -> int:
    """Host memory for a copy of weights on CUDA, from which a model wakes up; 0 if it would take over half of what is free."""
    if device.type == "cpu" or not config.sleeps:
        return 0
    return weights_bytes if 2 * weights_bytes <= free(torch.device("cpu")) - config.host_kv_memory else 0


def _answers_bytes(device: torch.device, room_bytes: int, free: Callable[[torch.device], int]) -> int:
    """Host memory for answers. `room_bytes` are what weights leave on `device`."""
    return answer_memory.planned_bytes(room_bytes if device.type == "cpu" else free(torch.device("cpu")))


def model_geometry(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, division: Division | None = None
) -> Geometry:
    """The layout of blocks of the model, or of one of its shards. Raises UnsupportedModel."""
    found = found_layers(checkpoint, dtype)
    whole = geometry_of(config, checkpoint, _name(dtype), on_cpu=device.type == "cpu", found=found)
    if division is not None and whole.gathers:
        raise UnsupportedModel(
            f"{checkpoint.spec.name} cannot be divided over shards: its attention is code of its own, and every shard would "
            "need all K and V of its layers; serve it on one device"
        )
    return whole if division is None else division.geometry(whole)


def outlined_model(spec: ModelSpec, file: Path) -> WrittenModel:
    """The model of a configuration file of any name, by the one that transformers makes of it, without memory. Weights that are
    stored quantized count as plain ones.

    Raises what `outlined` and `found_layers` raise.
    """
    with TemporaryDirectory() as folder:
        if file != spec.config_file:
            shutil.copy(file, Path(folder, "config.json"))
            spec = replace(spec, path=Path(folder))
        checkpoint = outlined(spec)
        found = found_layers(checkpoint, getattr(torch, checkpoint.dtype))
        shapes, head = quantized_shapes(checkpoint)
    quantized = getattr(checkpoint.config, "quantization_config", None)
    text, num_parameters = checkpoint.text_config, checkpoint.weights_bytes(torch.float32) // torch.float32.itemsize
    linears = Counter(shapes)
    return WrittenModel(
        spec=spec,
        text_config=text,
        dtype=checkpoint.dtype,
        context_length=checkpoint.context_length,
        caches_latents=checkpoint.caches_latents,
        stored_as=checkpoint.stored_as
        or (str(dict(quantized).get("quant_method") or "a quantized form") if quantized else None),
        stored=None,
        linears=linears,
        head=head,
        num_others=num_parameters - head - sum(n * k * count for (n, k), count in linears.items()),
        found=found,
    )
