"""OpenVINO GenAI's continuous batching as a process. Runs in its own environment."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.protocol import serve

TYPES = {"float32": "f32", "bfloat16": "bf16", "int8": "bf16", "int4": "bf16"}
QUANTIZED = ("int8", "int4")


class OpenvinoServer:
    """See `PeerEngine`."""

    def __init__(self, request: dict[str, Any]) -> None:
        # Without instructions for bfloat16 it computes in float32, and refuses K and V of another type.
        knows = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        kind = TYPES[request["dtype"]] if "BF16" in knows else "f32"
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = max(1, -(-request["kv_bytes"] // 2**30))  # GiB
        scheduler.max_num_seqs = request["max_seqs"]
        scheduler.max_num_batched_tokens = 4096
        scheduler.enable_prefix_caching = False
        self.settings = {"weights": request["dtype"], "kv": kind, "threads": request["threads"]}
        properties = {"KV_CACHE_PRECISION": kind, "INFERENCE_PRECISION_HINT": kind, "INFERENCE_NUM_THREADS": request["threads"]}
        folder = request["model"] + "/openvino"
        if request["dtype"] in QUANTIZED:
            folder += "-" + request["dtype"]
        else:
            properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """See `PeerEngine.run`."""
        config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        config.set_eos_token_id(0)  # ignored, but the unset one is refused
        began = time.perf_counter()
        inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        handles = [self._pipeline.add_request(i, tensor, config) for i, tensor in enumerate(inputs)]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        seconds = time.perf_counter() - began
        tokens = [list(handle.read_all()[0].generated_ids) for handle in handles]
        return {"seconds": seconds, "tokens": tokens}


if __name__ == "__main__":
    serve(OpenvinoServer)
