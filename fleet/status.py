"""The state of a fleet as plain data, and as metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from .followers import Followers
from .journal import JournalWriter
from .request_queue import RequestQueue
from .worker_table import WorkerEntry


def fleet_status(queue: RequestQueue, writer: JournalWriter, followers: Followers, now: float) -> dict[str, Any]:
    """Workers, queue, journal and front ends; with "stats" and "fleet_metrics" as the server's metrics page takes them."""
    workers = [_worker(worker, now) for worker in queue.workers]
    status: dict[str, Any] = {
        "model": None if queue.workers.model is None else queue.workers.model.name,
        "workers": workers,
        "queue": {"waiting": queue.num_waiting, "running": len(queue.entries) - queue.num_waiting, **asdict(queue.counters)},
        "journal": {
            "path": str(writer.journal.path),
            "commits": writer.num_commits,
            "unwritten": writer.num_unwritten,
            "fault": writer.fault,
        },
        "front_ends": dict(followers.positions()),
        "tenants": _tenants(queue, now),
    }
    status["stats"] = {"workers": {worker.name: worker.stats for worker in queue.workers if worker.stats}}
    status["fleet_metrics"] = fleet_metrics(status)
    return status


def _tenants(queue: RequestQueue, now: float) -> dict[str, dict[str, float]]:
    """Unfinished requests of each tenant, those that wait, and the seconds since the oldest was accepted."""
    found: dict[str, dict[str, float]] = {}
    for entry in queue.entries.values():
        one = found.setdefault(entry.request.tenant, {"unfinished": 0, "waiting": 0, "oldest_s": 0.0})
        one["unfinished"] += 1
        one["waiting"] += entry.worker is None
        one["oldest_s"] = max(one["oldest_s"], round(now - entry.accepted_at, 1))
    return found


def _worker(worker: WorkerEntry, now: float) -> dict[str, Any]:
    state = worker.state
    return {
        "name": worker.name,
        "state": "draining" if worker.is_draining else "ready",
        "node": worker.node,
        "pid": worker.pid,
        "epoch": worker.epoch & 0xFFFFFFFF,
        "requests": len(worker.running),
        "sequences": worker.num_sequences,
        "max_seqs": worker.max_seqs,
        "blocks": {
            "usable": state.usable_blocks,
            "limit": state.limit_blocks,
            "free": state.unused_blocks,
            "live": _live_blocks(worker),
        },
        "cached_blocks": worker.cached.num_cached,
        "preemptions": state.preemptions,
        "assigned": worker.num_assigned,
        "silent_s": round(now - worker.seen_at, 3),
        "device": state.device,
    }


def _live_blocks(worker: WorkerEntry) -> int:
    """Blocks that requests hold, by the newest statistics; before the first ones all that hold something."""
    held = max(worker.state.usable_blocks - worker.state.unused_blocks, 0)
    return min(int(worker.stats["blocks"]["live"]), held) if worker.stats else held


# Name: description, kind, and where the value of the whole fleet is.
_OF_QUEUE = {
    "waiting": ("Waiting requests", "gauge"),
    "running": ("Running requests", "gauge"),
    "accepted": ("Requests that were accepted", "counter"),
    "refused": ("Requests that were refused", "counter"),
    "ended": ("Requests that have ended", "counter"),
    "failed": ("Requests that have ended with an error", "counter"),
    "cancelled": (
        "Requests that their clients left or cancelled, and those that an operator or their age cancelled",
        "counter",
    ),
    "requeued": ("Requests taken from workers that died or hung", "counter"),
    "returned": ("Requests that workers handed back", "counter"),
    "assigned": ("Assignments of requests to workers", "counter"),
    "recorded_tokens": ("Tokens that were recorded", "counter"),
    "hit_blocks": ("Blocks of assigned prompts that their workers had cached", "counter"),
    "prompt_blocks": ("Blocks of assigned prompts", "counter"),
    "workers_lost": ("Epochs of workers that ended", "counter"),
}
_OF_WORKER = {
    "requests": ("Requests of a worker", "gauge"),
    "sequences": ("Sequences of a worker", "gauge"),
    "cached_blocks": ("Blocks that a worker can find", "gauge"),
    "silent_s": ("Seconds since the last message of a worker", "gauge"),
    "assigned": ("Requests that were assigned to a worker", "counter"),
}


def fleet_metrics(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The metrics of a fleet by name: help, type, and samples of labels and value."""
    queue, workers = status["queue"], status["workers"]
    metrics = {f"pagetide_fleet_{name}": _metric(text, kind, [({}, queue[name])]) for name, (text, kind) in _OF_QUEUE.items()}
    for name, (text, kind) in _OF_WORKER.items():
        samples = [({"worker": worker["name"]}, worker[name]) for worker in workers]
        metrics[f"pagetide_fleet_worker_{name}"] = _metric(text, kind, samples)
    metrics["pagetide_fleet_workers"] = _metric("Workers that are ready or draining", "gauge", [({}, len(workers))])
    fault = int(status["journal"]["fault"] is not None)
    metrics["pagetide_fleet_journal_fault"] = _metric("Whether the journal cannot be written", "gauge", [({}, fault)])
    return metrics


def _metric(text: str, kind: str, samples: Iterable[tuple[dict[str, str], float]]) -> dict[str, Any]:
    return {"help": text, "type": kind, "samples": [[labels, value] for labels, value in samples]}
