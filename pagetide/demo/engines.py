"""The engines of the demo: one with a small pool, elastic on a CPU, and one with room for all requests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..common.units import MIB

if TYPE_CHECKING:
    from ..engine.llm import LLM
    from ..engine.memory.planning import MemoryPlan
    from ..pressure import PrivateDevice

BLOCK_SIZE = 16
MAX_STEP_TOKENS = 160  # small, so that long prompts are prefilled in chunks alongside other requests
HEADROOM_BYTES = 8 * MIB  # of the private device
_SPARE_BYTES = 512 * MIB  # device memory for what the process holds besides weights and KV


def blocks_needed(prompts: list[str], max_new_tokens: int) -> list[int]:
    """Blocks that each prompt needs if it generates the maximum."""
    from ..engine.build import plan_only
    from ..engine.config import EngineConfig, resolve_model
    from ..engine.loading.loader import load_tokenizer

    tokenizer: Any = load_tokenizer(resolve_model("demo"))
    most = plan_only(EngineConfig.resolve("demo", device="cpu")).max_model_len
    lengths = [min(len(tokenizer(prompt)["input_ids"]) + max_new_tokens, most) for prompt in prompts]
    return [-(-(length - 1) // BLOCK_SIZE) for length in lengths]


def plan_pool(device: str, num_blocks: int) -> MemoryPlan:
    """The memory plan on `device`, with a pool of at most `num_blocks` blocks."""
    from ..engine.build import plan_only
    from ..engine.config import EngineConfig

    def plan(kv_memory: int | None) -> MemoryPlan:
        options: dict[str, Any] = {"dtype": "float32", "block_size": BLOCK_SIZE, "max_step_tokens": MAX_STEP_TOKENS}
        return plan_only(EngineConfig.resolve("demo", device=device, kv_memory=kv_memory, **options))

    return plan(num_blocks * BLOCK_SIZE * plan(None).kv_bytes_per_token)


@contextlib.contextmanager
def open_engines(plan: MemoryPlan, least_blocks: int, roomy_blocks: int) -> Iterator[tuple[LLM, LLM, PrivateDevice | None]]:
    """The engine with the small pool and the one with room for all; on a CPU the first is elastic, on a private device.

    The second is made last: the first one's lease covers the whole process, so it then has no memory to spare for KV.
    """
    from ..engine.llm import LLM
    from ..pressure import PrivateDevice

    common: dict[str, Any] = {"device": plan.device, "dtype": "float32", "block_size": BLOCK_SIZE}
    block_bytes = plan.kv_bytes_per_token * BLOCK_SIZE
    roomy_bytes = roomy_blocks * block_bytes
    device = None
    with contextlib.ExitStack() as stack:
        if plan.device == "cpu":
            others = _process_bytes() + 2 * plan.weights_bytes + plan.reserve_bytes + roomy_bytes + _SPARE_BYTES
            capacity = others + plan.kv_bytes + HEADROOM_BYTES
            device = stack.enter_context(PrivateDevice(capacity, HEADROOM_BYTES))
            elastic = {"min": least_blocks * block_bytes, "max": plan.kv_bytes}
            with device.here():
                tight = stack.enter_context(LLM("demo", **common, kv_memory=elastic, max_step_tokens=MAX_STEP_TOKENS))
        else:
            tight = stack.enter_context(
                LLM("demo", **common, kv_memory=plan.kv_bytes, max_step_tokens=MAX_STEP_TOKENS, share=False)
            )
        roomy = stack.enter_context(LLM("demo", **common, kv_memory=roomy_bytes, share=False))
        yield tight, roomy, device


def _process_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)
