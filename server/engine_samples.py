"""An engine's statistics as samples for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

_NOT_STATES = ("usable", "limit", "mapped")  # among the counts of blocks


class Sample(NamedTuple):
    """A value of a metric. `labels` are those beside the model's and the engine's."""

    kind: Literal["gauge", "counter"]
    name: str
    text: str
    value: float
    labels: Mapping[str, str] = {}


def samples(stats: Mapping[str, Any]) -> Iterator[Sample]:
    """All samples of `AsyncLLM.stats()`; none of an empty mapping."""
    if stats:
        yield from _like_vllm(stats)
        yield from _prefixes(stats)
        yield from _pool(stats)
        yield from _work(stats)
        yield from _memory(stats)


def _like_vllm(stats: Mapping[str, Any]) -> Iterator[Sample]:
    waiting, others = stats["waiting"], stats["waiting_for_others"]
    yield Sample("gauge", "vllm:num_requests_running", "Requests in the running batch", stats["running"])
    yield Sample("gauge", "vllm:num_requests_waiting", "Requests that wait", waiting)
    name, text = ("vllm:num_requests_waiting_by_reason", "Requests that wait for blocks, a place, or another request's prompt")
    yield Sample("gauge", name, text, waiting - others, {"reason": "capacity"})
    yield Sample("gauge", name, text, others, {"reason": "deferred"})
    blocks = stats["blocks"]
    used, limit = blocks["live"] + blocks["in_flight"], blocks["limit"]
    text = "Used share of the KV blocks that the pool may have, 0 to 1"
    yield Sample("gauge", "vllm:kv_cache_usage_perc", text, min(used / limit, 1.0) if limit else 0.0)
    yield Sample("counter", "vllm:num_preemptions", "Preemptions", stats["preemptions"])
    yield Sample("counter", "vllm:generation_tokens", "Generated tokens", stats["generated_tokens"])
    host = stats["host_tier"]
    config = {
        "block_size": stats["block_size"],
        "cache_dtype": stats["dtype"],
        "enable_prefix_caching": stats["prefix_cache"] is not None,
        "num_cpu_blocks": host["total_blocks"] if host else 0,
        "num_gpu_blocks": blocks["limit"],
    }
    labels = {name: str(value) for name, value in config.items()}
    yield Sample("gauge", "vllm:cache_config_info", "The KV cache", 1.0, labels)


def _prefixes(stats: Mapping[str, Any]) -> Iterator[Sample]:
    prompt, cached = stats["prompt_tokens"], stats["cached_prompt_tokens"]
    yield Sample("counter", "vllm:prompt_tokens", "Tokens of admitted prompts", prompt)
    yield Sample("counter", "vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache", cached)
    sources = {"local_compute": prompt - cached, "local_cache_hit": cached, "external_kv_transfer": 0}
    for source, count in sources.items():
        name, text = "vllm:prompt_tokens_by_source", "Tokens of admitted prompts by where they came from"
        yield Sample("counter", name, text, count, {"source": source})
    if (cache := stats["prefix_cache"]) is not None:
        yield Sample("counter", "vllm:prefix_cache_queries", "Prompt tokens looked up", cache["lookup_tokens"])
        yield Sample("counter", "vllm:prefix_cache_hits", "Prompt tokens found", cache["hit_tokens"])
        text = "Blocks of prefixes that requests ask to be kept"
        yield Sample("gauge", "pagetide_retained_kv_blocks", text, cache["retained_blocks"])
        yield Sample("gauge", "pagetide_pinned_kv_blocks", "Blocks of pinned prefixes", cache["pinned_blocks"])


def _pool(stats: Mapping[str, Any]) -> Iterator[Sample]:
    blocks, extents = stats["blocks"], stats["extents"]
    for state, count in blocks.items():
        if state not in _NOT_STATES:
            yield Sample("gauge", "pagetide_kv_blocks", "KV blocks of mapped extents, by state", count, {"state": state})
    yield Sample("gauge", "pagetide_kv_blocks_limit", "Blocks that the pool may have now", blocks["limit"])
    counts = {"mapped": extents["mapped"], "unmapped": extents["total"] - extents["mapped"]}
    for state, count in counts.items():
        yield Sample("gauge", "pagetide_kv_extents", "Extents of the pool, with and without memory", count, {"state": state})
    if (host := stats["host_tier"]) is not None:
        free = host["total_blocks"] - host["used_blocks"]
        for state, count in (("used", host["used_blocks"]), ("free", free)):
            yield Sample("gauge", "pagetide_host_kv_blocks", "Blocks of the host tier", count, {"state": state})
        for direction in ("in", "out"):
            name, text = "pagetide_swapped_bytes", "Copied to the host tier and back"
            yield Sample("counter", name, text, host[f"swapped_{direction}_bytes"], {"direction": direction})
    if (disk := stats.get("disk_tier")) is not None:
        yield Sample("gauge", "pagetide_disk_kv_bytes", "Blocks of the disk tier", disk["bytes"])
        yield Sample("counter", "pagetide_disk_hit_tokens", "Prompt tokens that were read from disk", disk["hit_tokens"])
        for direction in ("read", "written"):
            name, text = "pagetide_disk_kv_moved_bytes", "Blocks written to disk and read"
            yield Sample("counter", name, text, disk[f"{direction}_bytes"], {"direction": direction})


def _work(stats: Mapping[str, Any]) -> Iterator[Sample]:
    labels = {name: str(stats[name]) for name in ("device", "dtype", "attention")}
    yield Sample("gauge", "pagetide_engine_info", "What the engine runs on", 1.0, labels)
    yield Sample("counter", "pagetide_steps", "Steps of the engine", stats["steps"])
    yield Sample("counter", "pagetide_computed_tokens", "Computed tokens of prompts and outputs", stats["computed_tokens"])
    text = "Tokens that were computed again after a preemption"
    yield Sample("counter", "pagetide_recomputed_tokens", text, stats["recomputed_tokens"])
    yield Sample("counter", "pagetide_forks", "Continuations that started from another one's blocks", stats["forks"])


def _memory(stats: Mapping[str, Any]) -> Iterator[Sample]:
    memory, host = stats["memory"] or {}, stats["host_tier"]
    kinds = {"weights": stats["weights_bytes"], "kv": stats["kv_bytes"], "prepared": memory.get("ready_bytes", 0)}
    if host is not None:
        kinds["host_kv"] = host["bytes"]
    for kind, count in kinds.items():
        yield Sample("gauge", "pagetide_memory_bytes", "Memory of the engine by what it holds", count, {"kind": kind})
    if not memory:
        return
    for name, text in (
        ("recalls", "Recalls of memory"),
        ("recalled_bytes", "Bytes that recalls took"),
        ("grown_bytes", "Bytes by which the pool grew"),
        ("given_back_bytes", "Bytes by which it shrank"),
        ("refused_resizes", "Extents that could not be mapped"),
        ("lost_brokers", "Connections to a broker that ended"),
    ):
        yield Sample("counter", f"pagetide_{name}", text, memory[name])
    if (lease := memory["lease"]) is None:
        return
    yield Sample("gauge", "pagetide_lease_connected", "1 while the lease has a broker", float(lease["connected"]))
    for kind in ("granted", "held", "min", "max", "recall_target"):
        if (count := lease[f"{kind}_bytes"]) is not None:
            yield Sample("gauge", "pagetide_lease_bytes", "The lease of the engine", count, {"kind": kind})
