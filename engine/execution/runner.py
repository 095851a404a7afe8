"""The model runner: executes plans.

It keeps each row's tokens and sampling (`row_states.py`) and, on the device, the block tables. For each plan it packs the
chunks into one batch without padding, runs the model and samples. Memory operations run before the chunks, or concurrently
with them on blocks that no chunk uses (`memory_operations.py`).

On an asynchronous device, `begin` queues a plan and `PendingStep.wait` waits for its result.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ...cache.block_table import Index, Int32
from ...common.heartbeat import COMPILING_S, STILL_S, Progress
from ...scheduler.plan import NO_LOGPROBS, NO_TOKENS, Candidates, ChunkLogprobs, Failure, Plan, Result
from ..attention.context import AttentionKernel, StepContext, running
from ..attention.decoder_layers import fused_layers
from ..attention.states import ModelStates
from ..collectives.group import ALONE, CollectiveAborted, ShardGroup
from ..errors import Attempt, format_error
from ..layers.linears import is_native
from ..process.cpu_threads import CpuThreads
from ..process.memory_usage import trim
from ..sampling.logprobs import TokenSpan, score
from ..sampling.sampler import Sampler
from .batch import ON_ITS_WAY, DeviceRows, InputBatch, pack
from .graphs import DecodeGraphs, Record
from .host_pool import Swapped
from .lockstep import Lockstep, ShardsDiverged
from .memory_operations import MemoryExecutor, MemoryOperations, concatenated
from .parts import ChunkGroup, Computed, PendingTokens
from .row_states import RowStates
from .step_bound import StepBound
from .transfers import Array, Download, Stopwatch, Upload

if TYPE_CHECKING:
    from ..sampling.transforms import DrawSettings

log = logging.getLogger(__name__)

_RECORDING = -2  # in place of a step's number
_DRAINED_BLOCKS = 64  # at a time
_UPLOAD_BYTES = 64  # per token of the largest step: about eight numbers


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """A part of a plan, prepared for computation."""

    part: ChunkGroup
    batch: InputBatch
    sampling: Index  # places of the chunks that sample
    sampled_rows: Index  # their rows
    at: Index  # positions of the tokens they sample
    prompts: list[TokenSpan]  # prompt tokens to score
    keep: Index  # tokens of the batch that need logits
    settings: DrawSettings | None  # for draws without a wait; None: a row needs the slow path
    graph: int | None  # size of the captured graph to use

    @property
    def arrays(self) -> list[Array]:
        """The arrays to upload. The batch comes first, at the addresses that captured steps read."""
        draws = () if self.settings is None else self.settings.arrays
        return [*self.batch.arrays, self.keep, self.sampled_rows, *draws]


@dataclass(frozen=True, slots=True, eq=False)
class PendingStep:
    """A plan in execution."""

    _runner: ModelRunner
    _plan: Plan
    _moves: MemoryOperations
    _computed: Computed
    _watch: Stopwatch

    @property
    def is_done(self) -> bool:
        """Whether `wait` need not wait for the tokens."""
        return self._computed.drawn is None or self._computed.drawn.found.is_done

    def wait(self) -> Result:
        """Wait for the plan's result. Call it once per plan, in the order the plans were begun.

        If the tokens cannot be read from the device, all chunks are computed again, as in `ModelRunner.begin`.
        """
        plan, moves = self._plan, self._moves
        computed = self._computed
        swaps: list[Swapped] = []
        if computed.drawn is not None or moves.swaps:
            with self._runner.at_work():
                try:
                    computed = self._runner._collect(plan, computed)
                finally:
                    swaps = moves.done()
        failed, deferred = computed.failures, sorted(computed.deferred)
        counts, tokens = plan.samples.astype(np.int64), computed.tokens
        if without := [*failed, *deferred, *(c.index for c in computed.candidates)]:
            counts[without] = 0
        if np.count_nonzero(counts) < len(counts):
            tokens = tokens[counts > 0]
        return Result(
            plan.step_id,
            counts,
            tokens,
            tuple(Failure(i, message) for i, message in failed.items()),
            moves.mapped,
            moves.unmapped,
            moves.refused,
            lost_slots=concatenated([swap.lost_slots for swap in swaps]),
            failed_slots=concatenated(moves.failed_slots),
            failed_blocks=concatenated([*moves.failed_blocks, computed.lost_blocks]),
            deferred=np.array(deferred, np.int64),
            swapped=sum(swap.num_timed for swap in swaps),
            swap_s=sum(swap.seconds for swap in swaps),
            compute_s=self._watch.seconds(),
            scores=tuple(scores for scores in computed.scores if scores.index not in failed),
            candidates=tuple(computed.candidates),
            complete=np.array([i for i in computed.complete if i not in failed], np.int64),
        )


class ModelRunner:
    """One model on one device, or a shard of it, with its rows. Not thread-safe. Plans must come in the order they were made.

    Args:
        rows: Of the sequences that run, with their sampling.
        memory: The pool, and what resizes and swaps it.
        max_step_tokens: Sizes the upload buffer. Larger steps allocate memory of their own.
        group: The shards of the model, each with a runner that gets the same plans. The first one samples, and has the outputs.

    Attributes:
        overlaps: Whether sampled tokens stay on the device, so that a plan can begin before the previous one ends: on CUDA. It
            may be set before the first plan.
    """

    def __init__(
        self,
        model: Any,
        kernel: AttentionKernel,
        rows: RowStates,
        memory: MemoryExecutor,
        *,
        max_step_tokens: int = 8192,
        group: ShardGroup = ALONE,
    ) -> None:
        self.storage, self.arena, self.host = memory.storage, memory.arena, memory.host
        self.kernel = kernel
        self.model = model
        self._memory_executor = memory
        self._row_states = rows
        geometry, (num_rows, max_tokens) = self.storage.geometry, rows.tokens.shape
        self._layers = tuple(self.storage.layer(i) for i in range(len(geometry.layers)))
        self._states = ModelStates(self.storage.states) if self.storage.states else None
        self._device = self._layers[0].key.device
        self._stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        self.overlaps = self._stream is not None
        self.progress = Progress(STILL_S if self._stream is None else COMPILING_S)
        self._bound = StepBound(
            sum(one.nbytes for one in model.parameters()),  # quantized ones as if they were not
            geometry.kv_bytes_per_token,
            geometry.block_stride,
            geometry.extent_bytes,
            self._stream is None,
        )
        native = self._device.type == "cpu" and is_native(model)
        self._threads = CpuThreads(set_native=torch.ops.pagetide.set_threads.default if native else None)
        self._lockstep = Lockstep(group)
        self._block_size = geometry.block_size
        self._max_tokens = max_tokens
        self._rows = DeviceRows(num_rows, max_tokens, geometry, self._device)
        self._upload = Upload(self._device, _UPLOAD_BYTES * (max_step_tokens + num_rows) + 4096)

    @property
    def model(self) -> Any:
        """The callable that computes a step's logits. It may be replaced between steps.

        A step calls it in inference mode as

            model(input_ids=ids, position_ids=positions, use_cache=False, step=step, logits_to_keep=keep).logits

        with ids and positions int64 [1, T] and a `StepContext`, which has the block tables and the pool's K and V. `keep` is
        passed only to a model with a `logits_to_keep` parameter in its `forward` (or, without one, in its call): an int64
        tensor of places among the T tokens, or 1 if no logits are needed. The logits are [1, len(keep), vocabulary], or [1, T,
        vocabulary] without that parameter. The sampler overwrites them.

        A new model has no captured decode steps: `graphs` becomes None.
        """
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        self._model = model
        self._keeps = "logits_to_keep" in inspect.signature(getattr(model, "forward", model)).parameters
        self.graphs: DecodeGraphs | None = None
        self.fused_layers = fused_layers(model) if isinstance(model, torch.nn.Module) else 0

    @property
    def sampler(self) -> Sampler:
        """The sampler of all rows, on the first shard."""
        sampler = self._row_states.sampler
        assert isinstance(sampler, Sampler), "only the first shard of a model samples"
        return sampler

    def drain(self, places: Int32) -> npt.NDArray[np.uint8]:
        """The bytes [n, payload_bytes] of blocks, or, below 0, of these slots of the host tier, which is empty then and without
        memory: no step may follow.
        """
        assert self.host is not None
        data = np.empty((len(places), self.storage.geometry.payload_bytes), np.uint8)
        on_host, on_device = np.flatnonzero(places < 0), np.flatnonzero(places > 0)
        for found, part in self.host.drain(-places[on_host]):
            data[on_host[found]] = part
        for some in np.array_split(on_device, -(-len(on_device) // _DRAINED_BLOCKS) or 1):
            data[some] = self.storage.read(places[some])
        return data

    def copy_blocks(self, blocks: Int32) -> Download:
        """Begin to copy the bytes [n, payload_bytes] of `blocks`, between two steps."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            return Download(self.storage.bytes_of(blocks))

    @property
    def put_s_per_byte(self) -> float:
        """Seconds that a byte takes to where a plan puts it: none, as it is in this process."""
        return 0.0

    @property
    def lost(self) -> None:
        """None: what is in this process is not lost without it."""
        return None

    @property
    def mapped_extents(self) -> frozenset[int] | None:
        """The pool's extents that have memory; None without an arena."""
        return None if self.arena is None else self.arena.mapped_extents

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Run the body in inference mode. Device work goes to the stream on which the runner was made, whatever the caller's
        stream.
        """
        on_device = self._threads.for_a_step() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.inference_mode(), on_device:
            yield

    def record(self, sizes: Sequence[int], record: Record) -> None:
        """Capture decode steps of these sizes. If it raises, nothing is captured, on any shard."""
        graphs = DecodeGraphs(self._decode, record, self._lockstep.all_agree)
        with Attempt() as attempt, self.at_work():
            for size in sorted(sizes, reverse=True):
                self._upload.put(self._padding(size).arrays)
                graphs.add(size)
        if (failed := self._lockstep.settle(_RECORDING, attempt.error)) is not None:
            raise failed
        self.graphs = graphs

    def begin(self, plan: Plan) -> PendingStep:
        """Execute `plan`. A chunk that cannot be computed fails in the result; the other chunks still produce tokens.

        A step that raises is repeated in halves, down to single tokens. This is safe: a chunk writes only its own sequence's
        blocks, with the same values each time. A single token that raises is deferred, to be planned again; if it raises again,
        its chunk fails. Copies that raise are repeated once, then reported as failed. If the arena refuses to map or unmap, the
        rest of the plan still runs. Exceptions are errors of the bookkeeping.
        """
        self.progress.begin(self._bound.seconds(plan))
        with self.at_work():
            self._row_states.apply(plan)
            moves = MemoryOperations()
            with ExitStack() as undo:
                undo.callback(moves.done)
                self._memory_executor.begin(plan, moves)
                watch = Stopwatch(self._device)
                computed = self._compute_plan(plan)
                watch.stop()
                moves.fence()
                undo.pop_all()
        return PendingStep(self, plan, moves, computed, watch)

    def close(self) -> None:
        """Release the model, the views of the arena and the host tier. Nothing can be executed afterwards. Idempotent."""
        if self._stream is not None:
            self._stream.synchronize()
        if (host := self.__dict__.pop("host", None)) is not None:
            host.close()
        for name in (
            "_model",
            "storage",
            "arena",
            "kernel",
            "graphs",
            "_memory_executor",
            "_layers",
            "_rows",
            "_upload",
            "_states",
        ):
            self.__dict__.pop(name, None)

    def _compute_plan(self, plan: Plan) -> Computed:
        """The outputs of the plan's chunks."""
        if self._states is None:
            return self._outputs(plan)
        self._states.forget(np.array([*plan.released.tolist(), *plan.admitted], np.int64))
        computed = self._outputs(plan)
        done = np.ones(len(plan.rows), np.bool_)
        done[[*computed.deferred, *computed.failures]] = False
        self._states.done(plan.rows[done], (plan.starts + plan.lengths)[done])
        return computed

    def _outputs(self, plan: Plan) -> Computed:
        all_chunks = ChunkGroup.of(plan)
        parts = self._row_states.apart(all_chunks)
        if (self._row_states.faulty or len(parts) > 1) and len(all_chunks):
            self._lockstep.stop()
            return self._compute_in_parts(plan, parts)
        changes = self._rows.changes(plan)
        with Attempt() as attempt:
            work = self._prepare(all_chunks)
            uploaded = self._upload.put([*work.arrays, *changes])
            self._rows.follow(plan, uploaded[len(uploaded) - len(changes) :])
            return self._compute(work, uploaded)
        if isinstance(attempt.error, CollectiveAborted):
            log.info("step %d: another shard stopped computing it; repeating it in parts", plan.step_id)
        else:
            log.error("step %d raised; repeating it in parts", plan.step_id, exc_info=attempt.error)
        self._lockstep.stop()
        self._recover(all_chunks)
        self._lose_states(plan, attempt.error)
        return self._compute_in_parts(plan, list(all_chunks.halves()) or [all_chunks])

    def _collect(self, plan: Plan, computed: Computed) -> Computed:
        """`computed` with its pending tokens. If they cannot be read, all chunks are computed again: those of sequences with
        states, which are behind these chunks or behind those of the next step, from the start.
        """
        with Attempt() as attempt:
            self._collect_drawn(computed)
            return computed
        lost = f"the tokens of step {plan.step_id} could not be copied from the device"
        if not self._lockstep.is_alone:  # the others may have begun the next step
            raise ShardsDiverged(lost) from attempt.error
        log.error("%s; computing them again", lost, exc_info=attempt.error)
        newest = self._rows.newest.clone()  # of the next step, which has begun
        all_chunks = ChunkGroup.of(plan)
        self._recover(all_chunks)
        if self._states is not None and attempt.error is not None:
            self._row_states.lose(plan, plan.rows, format_error(attempt.error))
        computed = self._compute_in_parts(plan, [all_chunks])
        self._rows.newest.copy_(newest)
        return computed

    def _compute_in_parts(self, plan: Plan, parts: list[ChunkGroup]) -> Computed:
        """The outputs of the plan's chunks, computed part by part. A part that raises is divided further.

        Every shard comes here if one does, and computes the same parts.
        """
        total = Computed(np.zeros(len(plan.rows), np.int32))
        self._update_tables(plan)
        if not self._lockstep.is_alone:
            self._adopt_faults(plan)
            parts = self._row_states.apart(ChunkGroup.of(plan))
        parts.reverse()
        while parts:
            part = self._row_states.computable(plan, parts.pop(), total)
            if not len(part):
                continue
            newest = self._rows.newest.clone()
            if (error := self._compute_part(plan, part, total)) is not None:
                self._rows.newest.copy_(newest)  # the repetition may need these inputs
                self._recover(part)
                self._lose_states(plan, error)
                if self._states is not None and not self._lockstep.is_alone:
                    self._adopt_faults(plan)
                if halves := part.halves():
                    parts += reversed(halves)
                elif self._row_states.is_unsound(int(part.rows[0])):
                    parts.append(part)
                else:
                    self._row_states.defer_or_fail(plan, int(part.chunks[0]), error, total)
        self._row_states.computed(plan, total)
        if self._rows.states is not None and len(lost := self._row_states.lost(plan.rows)):
            total.lost_blocks = self._rows.states.numpy()[lost].ravel().astype(np.int32)
        return total

    def _compute_part(self, plan: Plan, part: ChunkGroup, total: Computed) -> BaseException | None:
        """Add the outputs of `part` to `total`, or return why it could not be computed, on this shard or another."""
        with Attempt() as attempt:
            work = self._prepare(part, recorded=False)
            computed = self._compute(work, self._upload.put(work.arrays))
            self._collect_drawn(computed)
        if isinstance(attempt.error, ShardsDiverged):
            raise attempt.error
        if (failed := self._lockstep.settle(plan.step_id, attempt.error)) is None:
            total.add(part, computed)
        return failed

    def _update_tables(self, plan: Plan) -> None:
        """Upload the plan's new table entries. If that raises twice, the chunks of these rows fail."""
        for _ in range(2):
            with Attempt() as attempt:
                self._rows.follow(plan, self._upload.put(self._rows.changes(plan)))
                return
            assert attempt.error is not None
            log.error("the block tables of step %d could not be changed", plan.step_id, exc_info=attempt.error)
            failure = format_error(attempt.error)
        for update in plan.tables:
            self._row_states.fail(update.rows, failure)

    def _adopt_faults(self, plan: Plan) -> None:
        """Let all shards know the same faults of rows."""
        self._row_states.adopt(self._lockstep.agree(plan.step_id, self._row_states.faults))

    def _lose_states(self, plan: Plan, error: BaseException | None) -> None:
        """Let the sequences be computed again with states that `error` left unknown."""
        if self._states is not None and error is not None and len(lost := self._states.take_lost()):
            log.error("step %d raised while states of %d sequences changed; computing these again", plan.step_id, len(lost))
            self._row_states.lose(plan, lost, format_error(error))

    def _recover(self, part: ChunkGroup) -> None:
        """Prepare for computing `part` again: free memory, and undo what sampling has advanced."""
        for free in (self.kernel.release_buffers, partial(trim, self._device)):
            try:
                free()
            except Exception:  # the repetition may succeed without it
                log.exception("memory could not be freed before a step is repeated")
        self._row_states.restart_sampling(part)

    def _prepare(self, part: ChunkGroup, recorded: bool = True) -> _Work:
        """Prepare `part` as one batch. Without `recorded`, no graph is used."""
        rows, starts, lengths = part.rows, part.starts, part.lengths
        ends = starts + lengths
        if np.count_nonzero(part.samples) == len(rows):
            sampling, sampled_rows, at = np.arange(len(rows)), rows, ends
        else:
            sampling = np.flatnonzero(part.samples)
            sampled_rows, at = rows[sampling], ends[sampling]
        prompts = self._row_states.logprob_requests.of_prompts(rows, starts, lengths)
        on_device = self.overlaps and self._row_states.draws_on_device(sampled_rows, at)
        settings = self.sampler.settings(sampled_rows, at) if on_device else None
        graph = None
        if recorded and self.graphs is not None and not prompts and 0 < len(sampling) == len(rows) == lengths.sum():
            graph = self.graphs.size_for(len(rows))
        batch = pack(self._row_states.tokens, rows, starts, lengths, graph or 0)
        keep = (batch.q_starts[: len(rows)] + lengths - 1)[sampling]
        if prompts:
            behind = [(batch.q_starts - starts)[p.place] + p.first - 1 + np.arange(p.length) for p in prompts]
            keep = np.concatenate([keep, *behind])
        return _Work(part, batch, sampling, sampled_rows, at, prompts, keep, settings, graph)

    def _compute(self, work: _Work, uploaded: Sequence[torch.Tensor]) -> Computed:
        """Run a batch, with its uploaded arrays `uploaded`."""
        part, computed = work.part, Computed(np.zeros(len(work.part), np.int32))
        if not len(part):
            return computed
        num_sampling = len(work.sampling)
        if work.graph is not None and self.graphs is not None:
            logits = self.graphs.logits(work.graph, num_sampling)
        else:
            width = -(-int(work.batch.kv_lens.max()) // self._block_size)
            inputs = uploaded[: len(work.batch.arrays)]
            step, ids, positions = self._rows.context(work.batch, inputs, width, self._layers, self.kernel, self.progress.beat)
            if self._states is not None and self._rows.states is not None:
                step = self._states.within(step, part.rows, self._rows.states[torch.from_numpy(part.rows)])
            logits = self._forward(step, ids, positions, uploaded[len(inputs)] if len(work.keep) else None)
        if self._lockstep.group.rank:  # the logits here are not all of them
            if num_sampling:
                self._take_tokens(computed, work, uploaded[len(work.batch.arrays) + 1])
            return computed
        if work.prompts:
            tokens = np.concatenate(
                [self._row_states.tokens[part.rows[p.place], p.first : p.first + p.length] for p in work.prompts]
            )
            self._add_logprobs(computed, part.chunks, work.prompts, logits[num_sampling:], tokens)
        if num_sampling and work.settings is not None:
            self._sample_on_device(computed, work, logits[:num_sampling], uploaded[len(work.batch.arrays) + 1 :])
        elif num_sampling:
            self._sample(computed, work, logits[:num_sampling])
            if self._lockstep.group.size > 1:
                self._lockstep.group.broadcast(self._to_device(computed.tokens[work.sampling].astype(np.int64)))
        return computed

    def _take_tokens(self, computed: Computed, work: _Work, rows: torch.Tensor) -> None:
        """Take the tokens that the first shard has sampled. `rows` are those that sample, on the device."""
        empty = torch.zeros(len(work.sampling), dtype=torch.int64, device=self._device)
        tokens = self._lockstep.group.broadcast(empty)
        if not self.overlaps:
            drawn = tokens.cpu().numpy().astype(np.int32)
            computed.tokens[work.sampling] = self._row_states.tokens[work.sampled_rows, work.at] = drawn
            return
        chunks = work.part.chunks[work.sampling]
        computed.drawn = PendingTokens(work.sampling, chunks, work.sampled_rows, work.at, Download(tokens))
        self._rows.newest.index_copy_(0, rows, tokens)
        self._row_states.tokens[work.sampled_rows, work.at] = ON_ITS_WAY

    def _sample_on_device(
        self, computed: Computed, work: _Work, logits: torch.Tensor, uploaded: Sequence[torch.Tensor]
    ) -> None:
        """Queue the sampling on the device without waiting. `uploaded` holds the rows, then the sampler's arrays."""
        assert work.settings is not None
        rows, settings = uploaded[0], uploaded[1 : 1 + len(work.settings.arrays)]
        found = self.sampler.draw(logits, work.settings, settings)
        sampled_rows, chunks = work.sampled_rows, work.part.chunks[work.sampling]
        computed.drawn = PendingTokens(work.sampling, chunks, sampled_rows, work.at, Download(found.packed))
        tokens = self._lockstep.group.broadcast(found.tokens)
        # Last: if anything before raises, the step is computed again with the old tokens as inputs.
        self._rows.newest.index_copy_(0, rows, tokens)
        self._row_states.tokens[sampled_rows, work.at] = ON_ITS_WAY

    def _collect_drawn(self, computed: Computed) -> None:
        """Wait for the pending tokens and record them."""
        drawn, computed.drawn = computed.drawn, None
        if drawn is None:
            return
        sampler = self._row_states.sampler
        tokens, bad = sampler.collect_samples(drawn.rows, drawn.found.wait())
        self._row_states.tokens[drawn.rows, drawn.at] = computed.tokens[drawn.places] = tokens
        for i in np.flatnonzero(bad):
            why = sampler.trouble(int(drawn.rows[i])) or _not_finite(int(drawn.at[i]))
            computed.failures.setdefault(int(drawn.chunks[i]), why)

    def _sample(self, computed: Computed, work: _Work, logits: torch.Tensor) -> None:
        """Sample the token `at[i]` of the chunk `sampling[i]` from `logits[i]`, and its logprobs. May overwrite the logits."""
        chunks, rows, sampling, at = work.part.chunks, work.part.rows, work.sampling, work.at
        beams = self._row_states.has_candidates[work.sampled_rows]
        if np.count_nonzero(beams):
            beam_logits = logits[self._to_device(np.flatnonzero(beams))]
            self._add_candidates(computed, chunks, rows, sampling[beams], at[beams], beam_logits)
            logits = logits[self._to_device(np.flatnonzero(~beams))]
            sampling, at = sampling[~beams], at[~beams]
            if not len(sampling):
                return
        sampled_rows = rows[sampling]
        samples = self._row_states.logprob_requests.of_samples(sampled_rows, at)
        places = np.array([s.place for s in samples], np.int64)
        raw = logits[self._to_device(places)] if samples else None  # a copy
        sampled, bad = self.sampler.sample(sampled_rows, at, logits)
        computed.tokens[sampling] = self._row_states.tokens[sampled_rows, at] = sampled
        if (complete := self.sampler.complete(sampled_rows)) is not None:
            computed.complete += chunks[sampling[complete]].tolist()
        if bad is not None:
            for i in np.flatnonzero(bad):
                why = self.sampler.trouble(int(rows[sampling[i]])) or _not_finite(int(at[i]))
                computed.failures.setdefault(int(chunks[sampling[i]]), why)
        if raw is not None:
            self._add_logprobs(computed, chunks[sampling], samples, raw, sampled[places])

    def _add_candidates(
        self, computed: Computed, chunks: Index, rows: Index, sampling: Index, at: Index, logits: torch.Tensor
    ) -> None:
        """Add the candidates for the token `at[i]` of the chunk `sampling[i]`, from `logits[i]`."""
        complete = self.sampler.complete(rows[sampling])
        for i, found in enumerate(self.sampler.candidates(rows[sampling], at, logits)):
            chunk, row = int(chunks[sampling[i]]), int(rows[sampling[i]])
            if complete is not None and complete[i]:
                computed.candidates.append(Candidates(chunk, NO_TOKENS, NO_LOGPROBS, NO_LOGPROBS))
            elif found is None:
                computed.failures[chunk] = self.sampler.trouble(row) or _not_finite(int(at[i]))
            else:
                computed.candidates.append(Candidates(chunk, *found))

    def _add_logprobs(
        self, computed: Computed, chunks: Index, spans: list[TokenSpan], logits: torch.Tensor, tokens: Int32
    ) -> None:
        """Add the logprobs of `tokens`. `tokens` and `logits` hold the spans one after the other."""
        scored = score(logits, tokens, max(s.k for s in spans))
        end = 0
        for s in spans:
            begin, end = end, end + s.length
            bad = np.flatnonzero(scored.bad[begin:end])
            if len(bad):
                computed.failures.setdefault(int(chunks[s.place]), _not_finite(s.first + int(bad[0])))
                continue
            ids, logprobs = scored.token_ids[begin:end, : 1 + s.k], scored.logprobs[begin:end, : 1 + s.k]
            computed.scores.append(ChunkLogprobs(int(chunks[s.place]), s.first, ids, logprobs, scored.ranks[begin:end]))

    def _forward(
        self, step: StepContext, input_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits [len(keep), vocab] after the batch's tokens `keep`. With None, the logits are not needed."""
        with running(step):
            output = self.model(
                input_ids=input_ids[None],
                position_ids=positions[None],
                use_cache=False,
                step=step,
                **({"logits_to_keep": 1 if keep is None else keep} if self._keeps else {}),
            )
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps or keep is None else logits[keep]

    def _padding(self, size: int) -> InputBatch:
        """A batch of padding decodes only."""
        none = np.empty(0, np.int64)
        return pack(self._row_states.tokens, none, none, none, size)

    def _decode(self, size: int) -> torch.Tensor:
        """Logits [size, vocab] of the batch of decodes that was uploaded last."""
        batch = self._padding(size)
        uploaded = self._upload.like(batch.arrays)
        batch = replace(batch, kv_lens=np.full(size, self._max_tokens))  # bounds
        step, ids, positions = self._rows.context(
            batch, uploaded, self._rows.num_columns, self._layers, self.kernel, self.progress.beat, bounded=True
        )
        with running(step):
            output = self.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, step=step)
        logits: torch.Tensor = output.logits[0]
        return logits

    def _to_device(self, array: Index) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _not_finite(position: int) -> str:
    return f"the model's logits behind token {position:,} are not finite numbers"
