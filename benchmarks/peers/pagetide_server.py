"""pagetide as a process among its peers."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.peers.protocol import serve
from pagetide import LLM, SamplingParams


class PagetideServer:
    """See `PeerEngine`."""

    def __init__(self, request: dict[str, Any]) -> None:
        quantized = request["dtype"] in ("int8", "int4")
        dtype = "bfloat16" if quantized else request["dtype"]
        self._llm = LLM(
            request["model"], device="cpu", dtype=dtype, quantization=request["dtype"] if quantized else None,
            kv_memory=request["kv_bytes"], share=False, max_seqs=request["max_seqs"], prefix_caching=False,
        )  # fmt: skip
        self.settings = {"weights": request["dtype"], "kv": dtype, "threads": request["threads"]}

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """See `PeerEngine.run`."""
        params = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, params, progress=False)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": [list(output.token_ids) for output in outputs]}


if __name__ == "__main__":
    serve(PagetideServer)
