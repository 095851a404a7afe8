"""One shard of a divided model: its slice of the weights, its part of every block, and a runner that gets every plan."""

from __future__ import annotations

import logging
import os
import pickle
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...allocator.arena import Arena
from ...allocator.errors import DriverError
from ...cache.storage import TensorArena
from ...common.frames import ChannelClosed, PickleChannel
from ...scheduler.plan import Plan
from ..attention.choose import Site, choose
from ..collectives.factory import open_group
from ..collectives.group import CollectiveCount, ShardGroup
from ..collectives.sharded_modules import gather_on_first
from ..errors import EngineError
from ..execution.host_pool import HostPool
from ..execution.lockstep import Lockstep
from ..execution.runner import ModelRunner, PendingStep
from ..execution.transfers import Download
from ..executor import collect, empty_caches, load_checked, make_runner, open_arena, open_host_pool
from ..loading.checkpoint import Checkpoint
from ..loading.division import Division
from ..loading.hub_kernels import no_hub_kernels
from ..loading.loader import choose_dtype, free_bytes, total_bytes
from ..loading.shard_check import check_against, reference_logits
from ..memory.lease_holder import LeaseHolder
from ..memory.planning import model_geometry
from ..process.memory_usage import process_bytes, trim
from ..sampling.follower import TokenFollower
from ..sampling.sampler import Sampler
from ..text.encoder import Encoder
from .messages import CopyBlocks, ExecutePlan, Hello, Launch, LoadShard, PlanDone, PutBytes, ShardCall, ShardFailed, ShardLoaded
from .pulse import KINDS, Heartbeat

log = logging.getLogger(__name__)

_MOST_PENDING = 2  # plans that have begun
_LOOK_S = 2e-4


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A plan that has begun, or copies of blocks."""

    number: int
    step: PendingStep | Download
    answers: bool
    undone: tuple[int, ...]


class Shard:
    """Handles the driver's messages. Any exception but those of loading ends the process: the driver then ends the others."""

    def __init__(self, launch: Launch, channel: PickleChannel, heartbeat: Heartbeat) -> None:
        self._launch = launch
        self._channel = channel
        self._heartbeat = heartbeat
        self._device = torch.device(launch.devices[launch.rank])
        self._pending: deque[_Pending] = deque()
        self._puts: list[PutBytes] = []  # for the next plan
        self._runner: ModelRunner
        self._arena: Arena
        self._host: HostPool | None = None

    def serve(self, number: int) -> None:
        """Answer the `Launch` message `number`, and handle all that follow until the driver is gone."""
        torch.set_num_threads(self._launch.num_threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._send(number, Hello(os.getpid(), free_bytes(self._device), total_bytes(self._device), process_bytes(self._device)))
        try:
            while True:
                self._finish_due()
                if not self._pending:
                    self._heartbeat.progress.rest()
                    self._heartbeat.done = number
                number, message = self._channel.receive()
                self._heartbeat.progress.begin()
                try:
                    self._handle(number, message)
                except Exception as error:
                    self._send(number, ShardFailed(_portable(error)))
                    if not isinstance(message, LoadShard):
                        log.exception("shard %d ends", self._launch.rank)
                        return
        except ChannelClosed:
            return

    def _handle(self, number: int, message: Any) -> None:
        match message:
            case ExecutePlan():
                self._begin(number, message)
            case PutBytes():
                self._puts.append(message)
            case CopyBlocks():
                self._copy(number, message)
            case LoadShard():
                self._send(number, self.load(message))
            case ShardCall():
                self._finish_all()
                self._send(number, getattr(self, message.method)(*message.arguments))

    # ---- loading ---------------------------------------------------------------------------------

    def load(self, load: LoadShard) -> ShardLoaded:
        """Load this shard's part of the model, check it, map the minimum of the pool and make the runner."""
        launch, config, plan = self._launch, load.config, load.plan
        size, rank, device = len(launch.devices), launch.rank, self._device
        with no_hub_kernels():
            checkpoint = Checkpoint.open(config.model)
            dtype = choose_dtype(config.dtype, checkpoint, device)
            division = Division.of(checkpoint, size, model_geometry(config, checkpoint, device, dtype).layers)
            group = open_group(
                rank, size, device=device, devices=launch.devices, memory_fd=launch.group_fd, store_fd=launch.store_fd
            )
            holder = LeaseHolder(device, plan.weights_bytes)
            reference = reference_logits(checkpoint, device, dtype, plan.weights_bytes) if rank == 0 else None
            collect(device)
            checked = load_checked(
                config,
                checkpoint,
                device,
                dtype,
                plan,
                division,
                group,
                lambda model: check_against(model, reference, plan.model, group),
                load.faults,
            )
        kernel = self._kernel(load, dtype, checked.specs, group)
        gather_on_first(checked.model)
        arena = self._arena = self._open_arena(load, group)
        host = self._host = open_host_pool(plan, config, pins="swaps" not in load.faults)
        holder.arena, holder.host = arena, host
        encoder = Encoder(checked.tokenizer, checkpoint.vocab_size, checkpoint.bos_token_id, plan.max_model_len)
        sampler = TokenFollower() if rank else Sampler(load.num_rows, encoder.vocab_size, device, encoder.constraints)
        runner = self._runner = make_runner(
            checked.model, arena, plan, config, kernel, sampler, device=device, num_rows=load.num_rows,
            max_tokens=load.max_tokens, host=host, group=group, captures=group.captures and "graphs" not in load.faults,
        )  # fmt: skip
        usable = plan.min_extents * plan.geometry.blocks_per_extent - 1
        speed = None if host is None else host.measure(runner.storage, usable)
        self._heartbeat.progress = runner.progress
        self._heartbeat.measure = lambda: (
            holder.base_bytes,
            0 if host is None else host.mapped_bytes,
            _collectives(group.counts()),
        )
        collect(device)
        return ShardLoaded(
            kernel.name,
            kernel.captures,
            runner.overlaps,
            () if runner.graphs is None else runner.graphs.sizes,
            not isinstance(arena, TensorArena),
            0 if host is None else host.num_slots,
            speed,
            group.name,
        )

    def _kernel(self, load: LoadShard, dtype: torch.dtype, specs: Any, group: ShardGroup) -> Any:
        """The attention kernel that the first shard chooses: all must capture, and round, alike."""
        site = Site.of(self._device, dtype, load.plan.geometry)
        name, kernel = load.config.attention, None
        if group.rank == 0:
            kernel = choose(name, site, specs, faults=load.faults)
            name = kernel.name
        name = pickle.loads(group.exchange(pickle.dumps(name))[0])
        return kernel or choose(name, site, specs, faults=load.faults)

    def _open_arena(self, load: LoadShard, group: ShardGroup) -> Arena:
        """The arena with the minimum mapped: elastic on all shards, or on none."""
        plan = load.plan
        arena = open_arena(plan, self._device, elastic="pool" not in load.faults, ready_bytes=0)
        own = not isinstance(arena, TensorArena)
        if Lockstep(group).all_agree(own):
            arena.map(range(plan.min_extents))
        elif own:
            arena.close()
            arena = open_arena(plan, self._device, elastic=False)
        return arena

    # ---- steps -----------------------------------------------------------------------------------

    def _begin(self, number: int, step: ExecutePlan) -> None:
        plan: Plan = pickle.loads(step.plan)
        if self._puts:
            plan = replace(plan, reads=tuple(one.read for one in self._puts if one.step_id == plan.step_id))
            self._puts.clear()
        undone = self._undo(step.undo)
        pending = self._runner.begin(plan)
        if plan.resize and self._device.type == "cuda":
            self._arena.trim()  # nothing is held that the driver does not know of
        self._pending.append(_Pending(number, pending, step.answers, undone))

    def _copy(self, number: int, message: CopyBlocks) -> None:
        try:
            copied = self._runner.copy_blocks(message.blocks)
        except Exception as error:  # of the device: what is not copied is not kept
            self._send(number, _portable(error))
        else:
            self._pending.append(_Pending(number, copied, answers=True, undone=()))

    def _undo(self, extents: tuple[int, ...]) -> tuple[int, ...]:
        """Unmap `extents`, which the driver does not count as mapped. Returns those that are unmapped now."""
        mapped = self._arena.mapped_extents
        if left := [extent for extent in extents if extent in mapped]:
            try:
                self._arena.unmap(left)
                self._arena.trim()
            except DriverError as error:
                log.warning("%d extents could not be unmapped: %s", len(left), error)
        return tuple(extent for extent in extents if extent not in self._arena.mapped_extents)

    def _finish_due(self) -> None:
        """Wait for plans until there is a message to read, and room for one more plan."""
        while self._pending:
            num_plans = sum(isinstance(one.step, PendingStep) for one in self._pending)
            if self._runner.overlaps and num_plans < _MOST_PENDING:
                if self._channel.poll(0 if self._pending[0].step.is_done else _LOOK_S):
                    return
                if not self._pending[0].step.is_done:
                    continue
            self._finish_oldest()

    def _finish_all(self) -> None:
        while self._pending:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        pending = self._pending.popleft()
        try:
            result = pending.step.wait()
        except Exception as error:
            self._send(pending.number, ShardFailed(_portable(error)))
            raise ChannelClosed("the step failed") from error
        if pending.answers:
            is_plan = isinstance(pending.step, PendingStep)
            self._send(pending.number, PlanDone(result, pending.undone) if is_plan else result)

    # ---- calls -----------------------------------------------------------------------------------

    def empty_caches(self) -> None:
        """Free the caches of libraries and kernels."""
        empty_caches(self._runner, self._device)

    def tidy(self) -> None:
        """Return free heap memory to the system."""
        trim(self._device)

    def give_back_host(self, num_bytes: int) -> int:
        """Free host memory of the tier. Returns the bytes that it has left."""
        if self._host is None:
            return 0
        self._host.give_back(num_bytes)
        return self._host.mapped_bytes

    def _send(self, number: int, message: Any) -> None:
        self._channel.send((number, message))


def _collectives(counts: dict[str, CollectiveCount]) -> tuple[int, ...]:
    """Calls, bytes and nanoseconds of each of KINDS."""
    each = [counts.get(kind, CollectiveCount()) for kind in KINDS]
    return tuple(number for one in each for number in (one.calls, one.num_bytes, int(one.seconds * 1e9)))


def _portable(error: Exception) -> Exception:
    """`error`, if it can be pickled and read again; else its text."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        log.debug("an error cannot be pickled", exc_info=True)
    return EngineError(f"{type(error).__name__}: {error}")
