"""llama.cpp with several sequences in a batch as a process. Runs in its own environment."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import gguf
import llama_cpp
import numpy as np

from benchmarks.peers.protocol import serve

BATCH = 2048
SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)  # lines of every layer
TYPES = {"float32": int(gguf.GGMLQuantizationType.F32), "bfloat16": int(gguf.GGMLQuantizationType.BF16)}
QUANTIZED_KV = int(gguf.GGMLQuantizationType.F16)  # its default


class LlamaCppServer:
    """See `PeerEngine`."""

    def __init__(self, request: dict[str, Any]) -> None:
        llama_cpp.llama_log_set(SILENT, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        path = f"{request['model']}/{request['dtype']}.gguf"
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = request["kv_tokens"], request["max_seqs"], True
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = request["threads"]
        params.type_k = params.type_v = TYPES.get(request["dtype"], QUANTIZED_KV)
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context with these types of KV")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        kv = request["dtype"] if request["dtype"] in TYPES else "float16"
        self.settings = {"weights": request["dtype"], "kv": kv, "threads": request["threads"]}

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """See `PeerEngine.run`."""
        began = time.perf_counter()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        items = [
            (token, place, number, place == len(prompt) - 1)
            for number, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        outputs: list[list[int]] = [[] for _ in prompts]
        for first in range(0, len(items), BATCH):
            self._decode(items[first : first + BATCH], outputs)
        for step in range(new_tokens - 1):
            self._decode([(out[-1], len(prompts[n]) + step, n, True) for n, out in enumerate(outputs)], outputs)
        return {"seconds": time.perf_counter() - began, "tokens": outputs}

    def _decode(self, items: list[tuple[int, int, int, bool]], outputs: list[list[int]]) -> None:
        """Compute (token, position, sequence, whether its logits count) items; add the next tokens to `outputs`."""
        batch = llama_cpp.llama_batch_init(len(items), 0, 1)
        batch.n_tokens = len(items)
        for i, (token, place, number, counts) in enumerate(items):
            batch.token[i], batch.pos[i], batch.logits[i] = token, place, counts
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, number
        status = llama_cpp.llama_decode(self._context, batch)
        llama_cpp.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode gave {status}")
        for i, (_, _, number, counts) in enumerate(items):
            if counts:
                logits = llama_cpp.llama_get_logits_ith(self._context, i)
                outputs[number].append(int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax()))


if __name__ == "__main__":
    serve(LlamaCppServer)
