"""Feeds transformers' streamers from the engine: `put` for the prompt, `put` for each token, `end`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..api.sampling_params import SamplingParams
from .llm import LLM
from .requests.outputs import RequestOutput

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


def generate_into(streamer: BaseStreamer, llm: LLM, prompt_token_ids: Sequence[int], params: SamplingParams) -> RequestOutput:
    """Continue a prompt, and put the prompt's ids [1, T] and each new token [1] into `streamer`.

    Always ends the streamer, so that a reader in another thread does not wait forever.

    Raises ValueError for several continuations or beams, which a streamer cannot distinguish, and what `LLM.stream` raises.
    """
    if (params.n or 1) > 1 or (params.num_beams or 1) > 1:
        raise ValueError("a streamer takes one continuation: leave num_return_sequences and num_beams out")
    output: RequestOutput | None = None
    try:
        streamer.put(torch.tensor([list(prompt_token_ids)]))  # type: ignore[no-untyped-call]
        for chunk in llm.stream([list(prompt_token_ids)], params):
            for token_id in chunk.token_ids:
                streamer.put(torch.tensor([token_id]))  # type: ignore[no-untyped-call]
            output = chunk.output or output
    finally:
        streamer.end()  # type: ignore[no-untyped-call]
    assert output is not None
    return output
