"""Beam search: chooses the tokens that the beams of a prompt continue with, and scores finished beams.

The algorithm is that of transformers 5.23 (`_beam_search`), with its float32 numbers and its stopping rules. The scheduler
decides when beams are computed: docs/decisions/0024-beams.md.

Each step ranks the candidates of all beams by their sums of log-probabilities. The best that do not end continue as beams.
Those among the first `num_beams` that end are kept as hypotheses. With fewer candidates than beams, some requests are
spare until a later step uses them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from ...api.sampling_params import SamplingParams
from ...scheduler.outcome import BeamMove
from ...scheduler.plan import Candidates, Float32
from ...scheduler.request import FinishReason

DEFAULT_LENGTH_PENALTY = 1.0
_FLOAT32 = np.finfo(np.float32)


class Hypothesis(NamedTuple):
    """A finished continuation."""

    score: np.float32  # logprob / length ** length_penalty
    token_ids: list[int]
    reason: FinishReason
    logprob: float  # sum of the tokens' log-probabilities


class _Beam(NamedTuple):
    """A running continuation."""

    request_id: str
    token_ids: list[int]
    logprob: np.float32


class _Next(NamedTuple):
    """A chosen candidate of a beam: a token that continues or ends it."""

    beam: int
    token: int
    logprob: np.float32
    ends: bool


@dataclass(frozen=True, slots=True)
class BeamRules:
    """The settings of a search. `longest` is the limit in generated tokens. Each beam reports `num_candidates`."""

    num_beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    end_ids: frozenset[int]
    longest: int

    @classmethod
    def resolve(cls, params: SamplingParams, end_ids: Sequence[int], longest: int) -> BeamRules:
        """Build the rules from merged parameters; fills in the defaults."""
        penalty = DEFAULT_LENGTH_PENALTY if params.length_penalty is None else float(params.length_penalty)
        return cls(params.num_beams or 1, penalty, params.early_stopping or False, frozenset(end_ids), longest)

    @property
    def num_candidates(self) -> int:
        """Enough that `num_beams` are left even if every end id is among the best of each beam."""
        return max(2, 1 + len(self.end_ids)) * self.num_beams


class BeamSearch:
    """The beams of one prompt. Pass candidates to `record`; call `choose` once `ready`. Mutable, not thread-safe.

    Args:
        request_ids: Of the beams. All begin with the prompt alone, so the first choice uses the first one's candidates only.
    """

    def __init__(self, rules: BeamRules, request_ids: Sequence[str]) -> None:
        self.rules = rules
        self.over = False
        self._beams = [_Beam(name, [], np.float32(0)) for name in request_ids]  # best first
        self._spare: list[str] = []  # requests without a beam
        self._candidates: dict[str, Candidates] = {}
        self._ended: list[Hypothesis] = []  # best first, `num_beams` at most

    @property
    def ready(self) -> bool:
        """Whether all candidates for the next choice are there."""
        beams = self._beams if self._length else self._beams[:1]
        return not self.over and all(beam.request_id in self._candidates for beam in beams)

    @property
    def best(self) -> list[Hypothesis]:
        """The hypotheses so far, best first; if fewer than `num_beams` have ended, running beams fill up."""
        missing = self.rules.num_beams - len(self._ended)
        left = [self._hypothesis(b.token_ids, b.logprob) for b in self._beams] if missing and self._length else []
        return self._ended + left[:missing]

    def record(self, request_id: str, candidates: Candidates) -> None:
        """Record a beam's candidates. Those of a spare request are ignored."""
        if request_id not in self._spare:
            self._candidates[request_id] = candidates

    def choose(self) -> list[BeamMove]:
        """Choose the next token of each beam."""
        chosen = self._best_candidates()
        length = self._length + 1
        self._keep_ended(chosen)
        continuing = [one for one in chosen if not one.ends][: self.rules.num_beams]
        if not continuing or self._is_over(continuing[0].logprob, length):
            self.over = True
            return []
        return self._continue_beams(continuing)

    @property
    def _length(self) -> int:
        """Generated tokens of each beam."""
        return len(self._beams[0].token_ids)

    def _best_candidates(self) -> list[_Next]:
        """The best candidates of all beams, best first."""
        rules, beams = self.rules, self._beams if self._length else self._beams[:1]
        candidates = [self._candidates[beam.request_id] for beam in beams]
        owners = np.repeat(np.arange(len(beams)), [len(c.token_ids) for c in candidates])
        before = np.array([beam.logprob for beam in beams], np.float32)[owners]
        tokens = np.concatenate([c.token_ids for c in candidates])
        logprobs: Float32 = np.concatenate([c.logprobs for c in candidates]) + before
        keys: Float32 = np.concatenate([c.keys for c in candidates]) + before
        order = np.lexsort((tokens, owners, -keys))[: rules.num_candidates]
        last = self._length + 1 >= rules.longest
        return [_Next(int(owners[i]), int(tokens[i]), logprobs[i], last or int(tokens[i]) in rules.end_ids) for i in order]

    def _keep_ended(self, chosen: list[_Next]) -> None:
        """Keep the best `num_beams` hypotheses.

        New ones are the ending candidates among the first `num_beams`, and beams without candidates.
        """
        for beam in self._beams if self._length else ():
            if not len(self._candidates[beam.request_id].token_ids):
                self._ended.append(self._hypothesis(beam.token_ids, beam.logprob)._replace(reason="stop"))
        for one in chosen[: self.rules.num_beams]:
            if one.ends:
                tokens = [*self._beams[one.beam].token_ids, one.token]
                self._ended.append(self._hypothesis(tokens, one.logprob))
        self._ended.sort(key=lambda hypothesis: -hypothesis.score)  # stable: at equal scores the older comes first
        del self._ended[self.rules.num_beams :]

    def _is_over(self, best: np.float32, length: int) -> bool:
        """Whether there are enough hypotheses and no beam, with `best` as the highest sum, can yield a better one."""
        rules = self.rules
        if len(self._ended) < rules.num_beams:
            return False
        if rules.early_stopping is True:
            return True
        reaches = rules.longest if rules.early_stopping == "never" and rules.length_penalty > 0 else length
        return not self._score(best, reaches) > self._ended[-1].score

    def _continue_beams(self, chosen: list[_Next]) -> list[BeamMove]:
        """Turn the chosen candidates into beams and moves.

        The first candidate that continues a beam stays in its request; the others take requests of dropped beams, then spare
        requests.
        """
        first = not self._length
        names = [beam.request_id for beam in self._beams]
        kept = {} if first else {one.beam: None for one in chosen}
        spare = [name for place, name in enumerate(names) if place not in kept] + self._spare
        spare.reverse()
        beams, moves = [], []
        for one in chosen:
            stays = kept.pop(one.beam, 0) is None
            name = names[one.beam] if stays else spare.pop()
            source = name if first else names[one.beam]
            moves.append(BeamMove(name, source, one.token))
            beams.append(_Beam(name, [*self._beams[one.beam].token_ids, one.token], one.logprob))
        self._beams, self._candidates, self._spare = beams, {}, spare[::-1]
        return moves

    def _hypothesis(self, tokens: list[int], logprob: np.float32) -> Hypothesis:
        score = self._score(logprob, len(tokens))
        return Hypothesis(score, tokens, "stop" if tokens[-1] in self.rules.end_ids else "length", float(logprob))

    def _score(self, logprob: np.float32, length: int) -> np.float32:
        """`logprob / length ** length_penalty`, with the divisor clamped to the range of a float32."""
        try:
            divisor = length**self.rules.length_penalty
        except OverflowError:
            divisor = math.inf
        divisor = min(max(divisor, float(_FLOAT32.tiny)), float(_FLOAT32.max))
        with np.errstate(over="ignore"):
            return np.float32(logprob / np.float32(divisor))
