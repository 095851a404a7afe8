"""Determines at load how much a quantized KV cache changes a model's next tokens, and refuses it where that is too much.

A text of `TOKENS` tokens runs through the model twice, with K and V in blocks of the model's type and in quantized ones. The
distributions of the next token are compared at each place. Some models have channels of K so large that the others are rounded
away; their tokens are then noise, which no check of shapes shows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ...cache.geometry import PAGE_BYTES, Geometry
from ...cache.storage import Storage, TensorArena
from .. import demo_model
from ..attention.context import StepContext, lengths_on, running
from ..attention.states import ModelStates
from ..attention.torch_kernel import TorchKernel
from ..errors import UnsupportedModel
from ..process.log_suppression import quiet_transformers
from .probe import random_tokens

log = logging.getLogger(__name__)

TOKENS = 256
LARGE_DIVERGENCE = 0.02  # nats; above, a warning
MOST_DIVERGENCE = 0.1  # nats; above, the model is refused
_LEAST_DISTINCT = 16  # ids; a tokenizer that gives fewer cannot read the text
_ROWS = 32  # compared at a time, in float32


@dataclass(frozen=True, slots=True)
class Divergence:
    """How much the distributions of the next token differ from those over K and V in the model's type."""

    nats: float  # mean Kullback-Leibler divergence
    agreement: float  # share of places with the same likeliest token

    def __str__(self) -> str:
        return (
            f"over a test text the distribution of the next token differs by {self.nats:.2g} nats on average, and the "
            f"likeliest token is the same in {self.agreement:.1%} of the places"
        )


def check_quantized_kv(
    model: Any, plain: Geometry, quantized: Geometry, tokens: torch.Tensor, *, name: str, kv_cache_dtype: str
) -> None:
    """Log how much the model's next tokens over blocks of `quantized` differ from those over `plain`. Much is a warning.

    Args:
        model: With paged attention.
        tokens: int64 [count], a text.
        name: Of the model, for messages.

    Raises:
        UnsupportedModel: it changes them too much.
    """
    found = divergence(model, plain, quantized, tokens)
    if not found.nats <= MOST_DIVERGENCE:
        finer = "'int8' or " if kv_cache_dtype == "fp8" else ""
        raise UnsupportedModel(
            f"{name} cannot be served with kv_cache_dtype={kv_cache_dtype!r}: {found}; the limit is {MOST_DIVERGENCE:g} nats. "
            f"Use kv_cache_dtype={finer}'auto'"
        )
    level = logging.WARNING if found.nats > LARGE_DIVERGENCE else logging.INFO
    log.log(level, "%s with kv_cache_dtype=%r: %s", name, kv_cache_dtype, found)


def calibration_tokens(tokenizer: Any | None, config: Any, count: int = TOKENS) -> torch.Tensor:
    """int64 [count]: the demo model's held-out text, or random ids for a model without a tokenizer that reads it."""
    ids: list[int] = []
    if tokenizer is not None:
        text = Path(str(demo_model.__file__)).with_name("heldout.txt").read_text("utf-8")
        with quiet_transformers():  # which warn of texts beyond the model's context
            ids = tokenizer.encode(text.replace("%%\n", ""))[:count]
    if len(ids) < count or len(set(ids)) < _LEAST_DISTINCT or max(ids) >= config.get_text_config(decoder=True).vocab_size:
        return random_tokens(config, count)
    return torch.tensor(ids)


def divergence(model: Any, plain: Geometry, quantized: Geometry, tokens: torch.Tensor) -> Divergence:
    """Compare a forward pass over blocks of `quantized` with one over `plain`. Logits that are not finite give NaN nats."""
    tokens = tokens.to(next(one.device for one in model.parameters() if not one.is_meta))
    with torch.inference_mode():
        rights, gots = (_logits(model, one, tokens).split(_ROWS) for one in (plain, quantized))
        nats = same = 0.0
        for right, got in zip(rights, gots, strict=True):
            right, got = right.float().log_softmax(-1), got.float().log_softmax(-1)
            nats += float(F.kl_div(got, right, reduction="sum", log_target=True))
            same += float((right.argmax(-1) == got.argmax(-1)).sum())
    return Divergence(nats / len(tokens), same / len(tokens))


def _logits(model: Any, geometry: Geometry, tokens: torch.Tensor) -> torch.Tensor:
    """[count, vocabulary]: of a forward pass of `tokens` as one chunk over a pool of its own."""
    device, count = tokens.device, len(tokens)
    own = replace(geometry, granule_bytes=PAGE_BYTES, extent_target_bytes=PAGE_BYTES)
    columns = own.columns_for_tokens(count)
    first_state = 1 + max(1, own.num_tables * columns)
    num_extents = own.extents_for_blocks(first_state + own.state_blocks)
    storage = Storage(own, TensorArena(num_extents, own.extent_bytes, device), device)
    places = torch.arange(count, device=device)
    tables = torch.arange(1, 1 + own.num_tables * columns, device=device).view(-1, 1, columns)
    lengths = np.array([count], np.int32)
    step = StepContext(
        layers=tuple(storage.layer(i) for i in range(len(own.layers))),
        kernel=TorchKernel(),
        q_starts=np.zeros(1, np.int32),
        q_lens=lengths,
        kv_lens=lengths,
        num_decodes=int(count == 1),
        **lengths_on(device, lengths, lengths),
        tables=tuple(tables),
        write_blocks=tuple(tables[:, 0, places // own.block_size]),
        write_offsets=places % own.block_size,
        block_size=own.block_size,
    )
    blocks = torch.arange(first_state, first_state + own.state_blocks, device=device)[None]
    with running(ModelStates(storage.states).within(step, np.zeros(1, np.int64), blocks)):
        output = model(input_ids=tokens[None], position_ids=places[None], use_cache=False, step=step)
    logits: torch.Tensor = output.logits[0]
    return logits
