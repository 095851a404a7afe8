"""What samplers are compared with: transformers' own processors in transformers' own order, and random logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pagetide.engine.sampling.logits import Int64, Rows, argmax, index, on_device
from pagetide.engine.sampling.sampler import Sampler
from pagetide.scheduler.request import Sampling

Ids = npt.NDArray[np.int32]
Case = tuple[Sampling, Ids, int]  # of a row: the settings, all tokens, and the length of the prompt


def as_ids(values: Sequence[int] | npt.NDArray[Any]) -> Ids:
    return np.asarray(values, np.int32)


def admitted(cases: Sequence[Case], vocab_size: int, device: str = "cpu", *, at_hand: bool | None = None) -> Sampler:
    """A sampler whose row i is case i."""
    sampler = Sampler(len(cases), vocab_size, device, at_hand=at_hand)
    for row, (sampling, tokens, num_prompt) in enumerate(cases):
        sampler.admit(row, sampling, tokens, num_prompt)
    return sampler


def logits_of(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Logits [*shape]: smooth, or steep, sorted, with many equal ones, with excluded tokens, or not all finite."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    last = shape[-1]
    if kind == "rounded":
        return x.round()
    if kind == "steep":
        return x * 30
    if kind == "sorted":
        return x.sort().values
    if kind == "bf16":
        return x.bfloat16().float()
    if kind == "equal":
        return torch.full(shape, 1.25)
    if kind == "excluded":
        return torch.where(x < 0, -torch.inf, x).index_fill(-1, torch.tensor([last - 1]), 0.5)
    if kind == "one":
        return torch.full_like(x, -torch.inf).index_fill(-1, torch.tensor([seed % last]), 0.5)
    if kind == "wild":
        x[..., seed % last] = (torch.nan, torch.inf, 3e38, -3e38)[seed % 4]
    if kind == "nothing":
        return torch.full_like(x, (torch.nan, torch.inf, -torch.inf, -3e38)[seed % 4])
    return x


def processed(case: Case, scores: Tensor) -> Tensor:
    """float32[1, vocab]: the scores [1, vocab] with all but the warpers, and OpenAI's penalties behind repetition's."""
    sampling, tokens, num_prompt = case
    ids, ends = torch.from_numpy(tokens.astype(np.int64))[None], list(sampling.stop_token_ids)
    if sampling.logit_bias:
        scores = SequenceBiasLogitsProcessor({(i,): bias for i, bias in sampling.logit_bias})(ids, scores)
    if sampling.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    for token in tokens[num_prompt:]:
        scores = scores.index_add(1, torch.tensor([int(token)]), torch.tensor([[-sampling.frequency_penalty]]))
    for token in set(tokens[num_prompt:].tolist()):
        scores = scores.index_add(1, torch.tensor([token]), torch.tensor([[-sampling.presence_penalty]]))
    if any(list(word) not in [[i] for i in ends] for word in sampling.bad_words):
        scores = NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words], ends or None)(ids, scores)
    if sampling.min_new_tokens and ends:
        scores = MinNewTokensLengthLogitsProcessor(num_prompt, sampling.min_new_tokens, ends)(ids, scores)
    for processor in sampling.logits_processors:
        scores = processor(ids, scores)
    return scores


def warped(sampling: Sampling, scores: Tensor, least: int = 1) -> Tensor:
    """The scores [1, vocab] of what draws: temperature, top-k, top-p and min-p, each of which keeps at least so many tokens."""
    warpers = LogitsProcessorList()
    if sampling.temperature:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            warpers.append(TopKLogitsWarper(sampling.top_k, min_tokens_to_keep=least))
        if sampling.top_p < 1:
            warpers.append(TopPLogitsWarper(sampling.top_p, min_tokens_to_keep=least))
        if sampling.min_p:
            warpers.append(MinPLogitsWarper(sampling.min_p, min_tokens_to_keep=least))
    return warpers(torch.zeros((1, 1), dtype=torch.int64), scores)


def distribution(sampler: Sampler, rows: Rows, positions: Int64, logits: torch.Tensor) -> torch.Tensor:
    """float32[n, vocab]: the probabilities that `sampler.sample` draws from; greedy rows are one-hot.

    The logits must be ones for which it finds no bad row.
    """
    x = logits.detach().float().clone()
    sampler._treat(x, rows, positions)
    result = torch.nn.functional.one_hot(index(argmax(x)[0], x), sampler._transforms._vocab_size).float()
    settings = sampler._settings(rows, positions, sampler._transforms.draws(rows))
    uploaded = [on_device(array, x) for array in settings.arrays]
    for part in settings.parts:
        if sampler._native:
            weights = torch.ops.pagetide.sample(x, *(array[part.rows] for array in uploaded), True)[2]
        else:
            weights = sampler._transforms.weights(x, part, uploaded)[:, : sampler._transforms._vocab_size]
        result[uploaded[0][part.rows]] = weights / weights.sum(-1, keepdim=True, dtype=torch.float64).float()
    return result
