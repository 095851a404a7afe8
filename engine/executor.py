"""What executes plans on one device: a model that has been checked, its attention, its memory and its runner.

`build.py` makes one in the engine's process; every shard of a divided model makes its own.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import native
from ..allocator.arena import Arena
from ..allocator.cuda_arena import CudaArena
from ..allocator.errors import AllocatorError, DriverUnavailable, OutOfDeviceMemory
from ..allocator.host_arena import HostArena
from ..cache.layer_groups import blocks_to_hold
from ..cache.manager import CacheManager
from ..cache.storage import Storage, TensorArena
from ..common.host_memory import free_host_bytes
from ..common.units import format_bytes
from ..native import instructions
from ..version import __version__
from .attention.backends import AttentionSpec
from .attention.choose import WatchedKernel
from .attention.context import AttentionKernel
from .attention.decoder_layers import LayerWatch
from .attention.gathered import install as attend_by_sequence
from .attention.gathered import is_installed as attends_by_sequence
from .attention.interface import register
from .attention.latent import attend_to_latents
from .attention.states import install as keep_states
from .collectives.group import ALONE, ShardGroup
from .config import EngineConfig
from .errors import ConfigError, NotEnoughMemory
from .execution.disk_files import BlockKind, DiskFiles, folder_of, kept_dir
from .execution.disk_tier import BlockCopier, DiskTier
from .execution.graph_sizes import sizes_for
from .execution.graphs import CudaRecorder
from .execution.host_pool import HostPool
from .execution.memory_operations import MemoryExecutor
from .execution.row_states import RowStates
from .execution.runner import ModelRunner
from .layers.fusion import fuse
from .layers.kernels import kernels_on
from .layers.linears import rows_as_they_are
from .layers.onednn import PackedLinear, bound_primitives
from .layers.torch_linears import TorchLinear
from .loading.arena_weights import ArenaWeights
from .loading.checkpoint import Checkpoint
from .loading.division import Division
from .loading.loader import load_model, load_tokenizer
from .loading.mapped_weights import Level, MappedWeights
from .loading.packed_model import free_merged
from .loading.probe import probe, random_tokens
from .loading.quantized_kv_check import TOKENS, calibration_tokens, check_quantized_kv
from .loading.weight_cache import WeightCache
from .memory.engine_memory import READY_LIMIT_BYTES
from .memory.lease_holder import LeaseHolder, lease_host_copy
from .memory.memory_plan import MemoryPlan, is_cpu
from .process.cpu_threads import one_thread
from .process.log_suppression import quiet_transformers
from .process.memory_usage import trim
from .sampling.follower import TokenFollower
from .sampling.sampler import Sampler

log = logging.getLogger(__name__)

# Of the disk tier's index for each place, where blocks of tokens have no bytes; more than the longest sequences need
_SPARE_NODES = 4
_TRIAL_TOKENS = 5  # over which a model is run before and after modules are replaced


@dataclass(frozen=True, slots=True, eq=False)
class CheckedModel:
    """A model that can be served over the plan's blocks, with its tokenizer, and what its layers need of a kernel."""

    model: Any
    tokenizer: Any | None
    specs: Counter[AttentionSpec]


class KeptModel:
    """A checked model that its engine leaves behind when it sleeps, with weights that take no memory of the device then: on a
    CPU they lie in files (`MappedWeights`), on CUDA in pinned host memory (`ArenaWeights`). The next engine goes on with it.
    """

    def __init__(self, loaded: CheckedModel, plan: MemoryPlan, files: object, weights: ArenaWeights | None = None) -> None:
        self.stays = False  # when its engine ends
        self._loaded: CheckedModel | None = loaded
        self.content = content_of(plan, files)
        self.weights: MappedWeights | ArenaWeights | None = weights  # on a CPU from the first sleep on
        self.kernel: AttentionKernel | None = None  # that its engine has chosen
        self.level: Level = 1  # of the last sleep

    @classmethod
    def of(
        cls,
        loaded: CheckedModel,
        checkpoint: Checkpoint,
        plan: MemoryPlan,
        files: object,
        config: EngineConfig,
        faults: Collection[str] = (),
    ) -> KeptModel | None:
        """None for a model with weights that cannot sleep: others use them, or they are in oneDNN's layout; on CUDA, the host
        has no room for a copy, or the engine never sleeps.

        Args:
            files: What `Checkpoint.stamps` said before they were read.
            faults: Parts that failed in the device's self-check.
        """
        if checkpoint.spec.loaded is not None:
            return None
        if not is_cpu(plan.device):
            weights = arena_of(loaded.model, config, plan, faults)
            return None if weights is None else cls(loaded, plan, files, weights)
        if any(isinstance(one, PackedLinear) for one in loaded.model.modules()):
            log.info("%s is loaded again after a sleep: weights in oneDNN's layout cannot lie in files", plan.model)
            return None
        return cls(loaded, plan, files)

    def fits(self, plan: MemoryPlan, files: object) -> bool:
        """Whether an engine with this plan can go on with the model: not if its `files` have changed (logged), in which weights
        may lie, and by which prefixes on disk are known.
        """
        content = content_of(plan, files)
        if content[0] != self.content[0]:
            log.info("%s is loaded again: its files have changed", plan.model)
        return content == self.content

    @property
    def asleep_bytes(self) -> int:
        """Bytes of weights that take no memory of the device while the model sleeps."""
        return 0 if self.weights is None else self.weights.num_bytes

    @property
    def uncounted_bytes(self) -> int:
        """Bytes of these that the process holds, or awaits, and `process_bytes` does not count."""
        return 0 if self.weights is None else self.weights.uncounted_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for a copy of these, of a model on CUDA."""
        return self.weights.num_bytes if isinstance(self.weights, ArenaWeights) else 0

    def sleep(self, level: Level) -> bool:
        """Give the memory of the weights back: see `drop` of either kind. No engine may use the model. Idempotent.

        On a CPU the files are made the first time. False if that, or giving back, fails (logged): the model is to be let go.
        """
        self.level = level
        try:
            if self.weights is None:
                assert self._loaded is not None
                self.weights = MappedWeights.of(self._loaded.model, WeightCache())
            self.weights.drop(level)
        except (OSError, AllocatorError) as error:
            log.warning("the model is loaded again when it wakes up, as its weights cannot sleep: %s", error)
            return False
        return True

    def wake(self) -> CheckedModel:
        """Begin to bring the weights back, layer by layer, while the engine is built and begins to compute.

        Raises NotEnoughMemory, and on CUDA also DriverError and OSError: it sleeps on.
        """
        assert self._loaded is not None
        if self.weights is not None:
            try:
                self.weights.fill()
            except OutOfDeviceMemory as error:
                remedy = "other processes took it meanwhile: try again, or let another model sleep"
                raise NotEnoughMemory(
                    error.asked_bytes, error.free_bytes, f"the weights that wake up, {error}", remedy
                ) from error
        return self._loaded

    def release(self) -> None:
        """End `wake`, and unless the model stays, let it go. Idempotent."""
        if self.kernel is not None:
            self.kernel.release_buffers()
        if self.weights is not None:
            self.weights.stop()
        if not self.stays:
            self._loaded = self.weights = None


def content_of(plan: MemoryPlan, files: object) -> tuple[Any, ...]:
    """Equal where weights and blocks are the same: the model's `files`, as `Checkpoint.stamps` tells them, and the layout."""
    return files, plan.device, plan.dtype, plan.quantization, plan.geometry.layout_id, plan.geometry.gathers


def arena_of(model: Any, config: EngineConfig, plan: MemoryPlan, faults: Collection[str]) -> ArenaWeights | None:
    """The weights of a model on CUDA in an arena, with a copy on the host, which is leased while it takes memory there.

    None, and the model is as it was: the engine never sleeps, or, which is logged, there is no room, or the device cannot.
    """
    if not config.sleeps:
        return None
    why: object = "a copy of its weights would take more than half of the host's free memory"
    if failed := [part for part in ("pool", "swaps") if part in faults]:  # arenas; pinned memory
        why = f"{' and '.join(failed)} failed in the device's self-check"
    elif plan.host_copy_bytes:
        try:
            return ArenaWeights.of(model, torch.device(plan.device), partial(lease_host_copy, config, plan))
        except (AllocatorError, NotEnoughMemory, RuntimeError) as error:  # RuntimeError: torch's
            why = error
    log.info("%s is loaded again after a sleep: %s", plan.model, why)
    return None


def load_checked(
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    plan: MemoryPlan,
    division: Division | None = None,
    group: ShardGroup = ALONE,
    check: Callable[[Any], None] = lambda model: None,
    faults: Collection[str] = (),
) -> CheckedModel:
    """Load the model, or this shard's part of it, and check that it can be served.

    Args:
        check: Called before the model's attention is replaced.
        faults: Parts that failed in the device's self-check.

    Raises what `load_model`, `load_tokenizer` and `probe` raise.
    """
    if device.type == "cpu":
        bound_primitives()
    tokenizer = load_tokenizer(config.model)
    how: dict[str, Any] = {} if division is None else {"division": division, "group": group}
    early = check if config.quantization is not None else None  # before weights are rounded, which would hide a fault
    # With native kernels all of torch's operators are small here, unless it quantizes.
    small = config.quantization is None and device.type == "cpu" and native.instructions() is not None
    threads: Any = partial(one_thread, torch.ops.pagetide.set_threads.default) if small else nullcontext
    with threads():
        model = load_model(checkpoint, device, dtype, quantization=config.quantization, pack=True, check=early, **how)
    with rows_as_they_are(), threads():
        tokens = random_tokens(checkpoint.config, _TRIAL_TOKENS).to(device)
        kernels = None if "triton" in faults else kernels_on(device)
        if kernels is not None and checkpoint.spec.loaded is not None and kernels.merges_plain:
            kernels = kernels._replace(merges_plain=False)  # the weights stay in the caller's model, too
        computes = fuse(model, tokens, kernels).computes
        free_merged(model)
        packed = device.type == "cpu" or any(isinstance(one, TorchLinear) for one in model.modules())
        if packed and not computes and config.quantization is None:
            log.warning("linear layers of %s are not packed: the model does not compute with packed ones", plan.model)
            del model
            model = load_model(checkpoint, device, dtype, **how)
        if early is None:
            check(model)
        attend_to_latents(model, plan.geometry)
        with torch.inference_mode():
            keep_states(model, plan.geometry, tokens[None])
            if division is None:
                attend_by_sequence(model, plan.geometry, tokens[None])
        specs = _check_attention(model, plan, tokenizer, checkpoint)
    trim(device)  # of what was read, packed and joined
    return CheckedModel(model, tokenizer, specs)


def _check_attention(model: Any, plan: MemoryPlan, tokenizer: Any | None, checkpoint: Checkpoint) -> Counter[AttentionSpec]:
    """Check that the model can be served over the plan's blocks, and set its attention to these.

    Returns what its layers need of a kernel, with their number. Raises UnsupportedModel.
    """
    watched = WatchedKernel()
    plain = replace(plan.geometry, dtype=plan.dtype)
    layers = LayerWatch(model)
    with layers.noting():
        probe(model, plain, max_length=plan.max_model_len, kernel=watched)
    if not attends_by_sequence(model):
        with quiet_transformers():  # it warns of configurations of parts that were not loaded
            model.set_attn_implementation(register())
        layers.fuse()
    if plan.geometry.has_scales:
        tokens = calibration_tokens(tokenizer, checkpoint.config, min(TOKENS, plan.max_model_len))
        check_quantized_kv(model, plain, plan.geometry, tokens, name=plan.model, kv_cache_dtype=plan.kv_cache_dtype)
    return watched.specs


def open_arena(plan: MemoryPlan, device: torch.device, *, elastic: bool, ready_bytes: int = READY_LIMIT_BYTES) -> Arena:
    """The device's elastic arena with nothing mapped.

    On CUDA it is one fixed allocation unless `elastic`, or if the driver cannot be called. `ready_bytes` of unmapped memory are
    kept for the next mapping while they are freed in the background.
    """
    shape = (plan.num_extents, plan.geometry.extent_bytes)
    if device.type == "cpu":
        return HostArena(*shape)
    if device.type == "cuda" and elastic:
        try:
            index = torch.cuda.current_device() if device.index is None else device.index
            return CudaArena(*shape, index, ready_limit_bytes=ready_bytes)
        except DriverUnavailable as error:
            log.warning("the KV pool cannot grow and shrink: %s", error)
    return TensorArena(*shape, device)


def open_host_pool(plan: MemoryPlan, config: EngineConfig, *, pins: bool) -> HostPool | None:
    """The host tier's memory, not allocated yet. Raises NotEnoughMemory if the host has less free now, beside what the tier
    leaves to suspended requests; ConfigError.
    """
    asked = config.host_kv_memory
    if not asked:
        return None
    if asked > (free := free_host_bytes() + LeaseHolder.suspended_bytes()):
        remedy = "ask for less host_kv_memory, or for none"
        raise NotEnoughMemory(asked, free, f"the host tier of {plan.model}", remedy)
    try:
        return HostPool(plan.geometry, asked, pins=pins)
    except ValueError as error:
        raise ConfigError(f"host_kv_memory: {error}") from error


def open_disk_tier(
    plan: MemoryPlan, config: EngineConfig, checkpoint: Checkpoint, runner: BlockCopier, kernel: str, cache: CacheManager
) -> DiskTier | None:
    """The disk tier below the blocks of `runner`, which `cache` assigns. None without one, and if its folder cannot be used.

    `kernel` names what computes them. Raises ConfigError if `disk_kv_memory` holds no block.
    """
    if not config.disk_kv_memory:
        return None
    groups, size, per_place = plan.geometry.groups, plan.block_size, 0
    block_bytes = plan.num_shards * plan.geometry.payload_bytes
    if groups[0].window is not None:  # as many blocks of tokens as the longest sequences have for their units, and some more
        columns = -(-plan.max_model_len // size)
        per_place = -(-columns // blocks_to_hold(groups, columns, size)) + _SPARE_NODES
    layout = [plan.dtype, plan.quantization, plan.kv_cache_dtype, plan.geometry.layout_id, plan.device.partition(":")[0]]
    layout.append(kernel)
    if plan.num_shards > 1:
        layout.append(f"{plan.num_shards} shards")
    path = kept_dir() if config.disk_kv_path is None else Path(config.disk_kv_path)
    try:
        content = [__version__, transformers.__version__, torch.__version__, instructions(), *layout]
        identity = hashlib.sha256(json.dumps([*content, *WeightCache().digests(checkpoint)]).encode()).hexdigest()
        files = DiskFiles(
            folder_of(path, str(checkpoint.spec.path.resolve()), json.dumps(layout)),
            config.disk_kv_memory,
            BlockKind(identity, block_bytes, size, tuple(cache.index.windows.groups), per_place),
            config.prefix_hash_secret,
        )
    except OSError as error:
        log.warning("disk_kv_memory is not used: %s", error)
        return None
    used = format_bytes(files.index.num_used * files.block_bytes)
    log.info("the disk tier: %s of prefixes in %s, of at most %s", used, files.folder, format_bytes(config.disk_kv_memory))
    if plan.num_shards == 1:
        return DiskTier(files, runner, plan.disk_buffer_bytes)
    return DiskTier(files, runner, plan.num_shards * plan.disk_buffer_bytes // 2)  # the shards have the other half


def make_runner(
    model: Any, arena: Arena, plan: MemoryPlan, config: EngineConfig, kernel: AttentionKernel, sampler: Sampler | TokenFollower,
    *, device: torch.device, num_rows: int, max_tokens: int, host: HostPool | None, group: ShardGroup = ALONE,
    captures: bool = True,
) -> ModelRunner:  # fmt: skip
    """The runner of `model` over `arena`, with captured decode steps if device, model and kernel can, and it `captures`."""
    storage = Storage(plan.geometry, arena, device)
    rows, memory = RowStates(sampler, num_rows, max_tokens), MemoryExecutor(storage, arena, host)
    runner = ModelRunner(model, kernel, rows, memory, max_step_tokens=config.max_step_tokens, group=group)
    if config.overlap is not None:
        runner.overlaps = config.overlap
    by_row = bool(storage.states) or attends_by_sequence(model)
    if captures and config.cuda_graphs and device.type == "cuda" and not by_row:
        _record(runner, num_rows)
    return runner


def _record(runner: ModelRunner, num_rows: int) -> None:
    """Capture decode steps in CUDA graphs if kernel and model support it; otherwise log why not."""
    device = runner.storage.device
    if not runner.kernel.captures:
        log.info("decode steps are not captured in CUDA graphs: attention by %s cannot be", runner.kernel.name)
        return
    began = time.perf_counter()
    try:
        runner.record(sizes_for(num_rows), CudaRecorder(device))
    except Exception as error:  # of a library, or of a model that synchronizes with the device
        log.warning("decode steps are not captured in CUDA graphs: %s: %s", type(error).__name__, error)
        return
    finally:
        collect(device)  # return memory to the driver for the pool
    if runner.graphs is not None:
        sizes, took = runner.graphs.sizes, time.perf_counter() - began
        log.info("decode steps of up to %d rows captured in %d CUDA graphs, in %.1f s", sizes[-1], len(sizes), took)


def empty_caches(runner: ModelRunner, device: torch.device) -> None:
    """Free the caches of libraries and the buffers of the attention kernel."""
    runner.kernel.release_buffers()
    trim(device)


def collect(device: torch.device) -> None:
    """Free what nothing refers to any more. Models are full of reference cycles."""
    gc.collect()
    trim(device)
