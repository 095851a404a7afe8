"""Trains the small bundled demo model from plain text on one CPU core.

The engine needs a real model that anybody can carry in a repository: small enough for 16 MiB, good enough that its
text is recognisably English, and with a tokenizer that survives any UTF-8 input.  This script makes one from scratch:

1. cut the texts into parts and set whole parts aside for validation and the held-out figure, before anything is fitted;
2. train a byte-level BPE tokenizer and a Llama-architecture model on the rest (resumable, reproducible);
3. fit an interpolated modified Kneser-Ney 5-gram on the same tokens, as the figure to beat;
4. measure both on the held-out text in bits per byte, draw samples, and write the model folder with its model card.

Every number in the card is measured here.  An interrupted run continues when the same command is given again.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

BOS, EOS = "<|bos|>", "<|eos|>"
# A conversation as a scene of a play, which is what the model has read.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role | upper }}:\n{{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:\n{% endif %}"
)
BOS_ID, EOS_ID = 0, 1
PART_BYTES = 8192
HELDOUT_EVERY, VALIDATION_EVERY = 32, 64
HEADING = re.compile(r"\s*(CHAPTER|Chapter|BOOK|PART|ACT|SCENE|(FIRST |SECOND )?EPILOGUE|Epilogue)\b.{0,80}")


# --------------------------------------------------------------------------------------------------------------------
# Settings
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingSettings:
    """Everything that decides the weights; a checkpoint is resumed only if all of it is the same."""

    text_sha256: str
    seed: int
    steps: int
    precision: str
    threads: int
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    context: int
    short_context: int
    short_share: float
    tokens_per_step: int
    lr: float
    weight_decay: float
    dropout: float

    def short_steps(self) -> int:
        """Steps on short windows; the rest uses the full context so that every position is trained."""
        return int(self.steps * self.short_share)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line; the defaults are those of the bundled model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", nargs="+", type=Path, required=True, metavar="FILE", help="UTF-8 text files to train on")
    add("--out", type=Path, default=Path("build/demo_model"), help="folder for the finished model")
    add("--work", type=Path, default=Path(tempfile.gettempdir()) / "train_demo_model", help="checkpoints and caches")
    add("--seed", type=int, default=0)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="optimizer steps (reproducible)")
    length.add_argument("--minutes", type=float, help="choose the steps by a short measurement to last about this long")
    add("--threads", type=int, default=1, help="torch threads; part of what makes a run reproducible")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16 autocast is faster on CPUs with AMX")
    add("--vocab", type=int, default=4096)
    add("--hidden", type=int, default=256)
    add("--layers", type=int, default=8)
    add("--heads", type=int, default=8)
    add("--kv-heads", type=int, default=4)
    add("--intermediate", type=int, default=704)
    add("--context", type=int, default=1024, help="longest window, and the model's position limit")
    add("--short-context", type=int, default=256, help="window of the first part of the training")
    add("--short-share", type=float, default=0.75, help="share of the steps on short windows")
    add("--tokens-per-step", type=int, default=2048)
    add("--lr", type=float, default=1.5e-3)
    add("--weight-decay", type=float, default=0.1)
    add("--dropout", type=float, default=0.1, help="on the residual branches, one mask a sequence")
    add("--checkpoint-every", type=int, default=100, help="steps between checkpoints")
    add("--validate-every", type=int, default=250, help="steps between validations")
    add("--samples", type=int, default=20, help="samples to draw from the finished model")
    add("--sample-tokens", type=int, default=200)
    add("--hardware", default="one CPU core", help="words for the model card")
    args = parser.parse_args(argv)
    if args.steps is None and args.minutes is None:
        args.steps = 4000
    return args


# --------------------------------------------------------------------------------------------------------------------
# Text: parts, split, passages
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Passages (whole paragraphs each) of the three disjoint uses of the text."""

    train: list[str]
    validation: list[str]
    heldout: list[str]


def paragraphs_of(text: str) -> list[str]:
    """Paragraphs without the blank lines between them, and without tables of contents.

    A run of four or more headings with nothing in between is a table of contents; left in, it teaches loops.
    """
    paragraphs = [p.strip("\n") for p in re.split(r"\n[ \t]*\n", text.replace("\r\n", "\n")) if p.strip()]
    kept: list[str] = []
    run: list[str] = []
    for paragraph in [*paragraphs, ""]:
        if paragraph and HEADING.fullmatch(paragraph):
            run.append(paragraph)
            continue
        kept += run if len(run) < 4 else run[-1:]
        run = []
        if paragraph:
            kept.append(paragraph)
    return kept


def grouped(paragraphs: list[str], sizes: Iterator[int], break_at_heading: bool) -> list[list[str]]:
    """Join consecutive paragraphs into groups of at least the next size in bytes."""
    groups: list[list[str]] = []
    size, limit = 0, 0
    for paragraph in paragraphs:
        if not groups or size >= limit or (break_at_heading and size > 200 and HEADING.fullmatch(paragraph)):
            groups.append([])
            size, limit = 0, next(sizes)
        groups[-1].append(paragraph)
        size += len(paragraph.encode()) + 2
    return groups


def constant(value: int) -> Iterator[int]:
    """The same size for ever."""
    while True:
        yield value


def uniform(rng: np.random.Generator, low: int, high: int) -> Iterator[int]:
    """Random sizes, so that the model cannot learn the end of a passage from its length."""
    while True:
        yield int(rng.integers(low, high))


def split_texts(texts: Sequence[str], seed: int) -> Split:
    """Set aside contiguous parts of every source, evenly over its length; cut the rest into training passages."""
    rng = np.random.default_rng([seed, 1])
    split = Split([], [], [])
    for text in texts:
        paragraphs = paragraphs_of(text)
        part_bytes = min(PART_BYTES, max(256, len(text) // 8))
        parts = grouped(paragraphs, constant(part_bytes), break_at_heading=False)
        for index, part in enumerate(parts):
            if index % HELDOUT_EVERY == min(16, len(parts) // 2):
                split.heldout.append("\n\n".join(part))
            elif index % VALIDATION_EVERY == min(40, len(parts) // 4):
                split.validation.append("\n\n".join(part))
            else:
                passages = grouped(part, uniform(rng, 1000, 5000), break_at_heading=True)
                split.train.extend("\n\n".join(passage) for passage in passages)
    return split


# --------------------------------------------------------------------------------------------------------------------
# Tokenizer
# --------------------------------------------------------------------------------------------------------------------


def train_tokenizer(passages: Sequence[str], vocab: int) -> Tokenizer:
    """Byte-level BPE: every byte is in the alphabet, so any UTF-8 text round trips exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(passages, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID), (EOS, EOS_ID)]
    )
    return tokenizer


def encode_documents(tokenizer: Tokenizer, passages: Sequence[str]) -> list[np.ndarray]:
    """Each passage as BOS, its tokens, EOS."""
    encoded = tokenizer.encode_batch(list(passages), add_special_tokens=False)
    return [np.array([BOS_ID, *e.ids, EOS_ID], dtype=np.int64) for e in encoded]


# --------------------------------------------------------------------------------------------------------------------
# Model
# --------------------------------------------------------------------------------------------------------------------


def blocked_causal_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of a whole window; for short windows as batched matrix products over blocks of 64 queries.

    For heads as small as these torch's fused CPU kernel spends most of a step in its backward pass; up to some 512
    tokens, plain products over only the keys that a block can see are about twice as fast.
    """
    block = 64
    with torch.autocast("cpu", enabled=False):
        batch, heads, length, dim = query.shape
        if length > 512:
            q, k = query.to(value.dtype), key.to(value.dtype)
            fused = nn.functional.scaled_dot_product_attention
            out = fused(q, k, value, is_causal=True, scale=scaling, enable_gqa=True)
            return out.transpose(1, 2).contiguous(), None
        groups, share = batch * key.shape[1], heads // key.shape[1]
        dtype = value.dtype
        q = (query * scaling).to(dtype).reshape(groups, share, length, dim)
        k = key.to(dtype).reshape(groups, length, dim).transpose(1, 2)
        v = value.reshape(groups, length, dim)
        hidden = torch.full((block, block), float("-inf"), dtype=dtype).triu(1)
        outputs = []
        for start in range(0, length, block):
            end = min(length, start + block)
            rows = end - start
            scores = torch.bmm(q[:, :, start:end].reshape(groups, share * rows, dim), k[:, :, :end])
            scores = scores.view(groups, share, rows, end)
            scores[..., start:end] += hidden[:rows, :rows]
            weights = torch.softmax(scores, -1).view(groups, share * rows, end)
            outputs.append(torch.bmm(weights, v[:, :end]).view(groups, share, rows, dim))
        out = torch.cat(outputs, 2).reshape(batch, heads, length, dim)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("blocked_causal", blocked_causal_attention)


class MeanCrossEntropy(torch.autograd.Function):
    """Mean cross entropy that makes its gradient at once and in place: the logits are the largest tensor of a step."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Loss of `logits` (tokens, vocabulary) against `targets` (tokens)."""
        scores = logits.to(torch.float32, copy=True)
        scores.sub_(scores.amax(-1, keepdim=True))
        picked = scores.gather(1, targets[:, None])
        totals = scores.exp_().sum(-1, keepdim=True)
        scores.div_(totals).scatter_add_(1, targets[:, None], torch.full_like(picked, -1.0)).div_(len(targets))
        ctx.save_for_backward(scores.to(logits.dtype))
        return (totals.log() - picked).mean()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The stored gradient."""
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0].to(gradient.dtype), None


class SequenceDropout(nn.Module):
    """Dropout with one mask for all positions of a sequence: costs almost no random numbers on a CPU."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def __call__(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """Forward hook on the projection that ends a residual branch."""
        if not module.training or self.rate == 0.0:
            return output
        keep = torch.empty(output.shape[0], 1, output.shape[2]).bernoulli_(1.0 - self.rate).div_(1.0 - self.rate)
        return output * keep.to(output.dtype)


def build_model(settings: TrainingSettings) -> LlamaForCausalLM:
    """A fresh model; residual projections start smaller, by the number of branches that add up."""
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=settings.vocab,
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        attn_implementation="blocked_causal",
    )
    model = LlamaForCausalLM(config)
    hook = SequenceDropout(settings.dropout)
    for layer in model.model.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.data.mul_((2 * settings.layers) ** -0.5)
            projection.register_forward_hook(hook)
    return model


def logits_of(model: LlamaForCausalLM, tokens: torch.Tensor, precision: str) -> torch.Tensor:
    """Logits of whole windows, without a cache."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


# --------------------------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------------------------


def batch_of(stream: np.ndarray, settings: TrainingSettings, step: int) -> torch.Tensor:
    """The windows of one step: a function of seed and step alone, so that a resumed run sees the same order.

    Every epoch cuts the stream at another random offset and visits the windows in another order.
    """
    short = step < settings.short_steps()
    length = settings.short_context if short else settings.context
    length = min(length, (len(stream) - 1) // 2)
    count = max(1, settings.tokens_per_step // length)
    windows = (len(stream) - 1) // length - 1
    first = (step if short else step - settings.short_steps()) * count
    rows = []
    for number in range(first, first + count):
        epoch, index = divmod(number, windows)
        rng = np.random.default_rng([settings.seed, 2, int(short), epoch])
        offset = int(rng.integers(length))
        start = offset + int(rng.permutation(windows)[index]) * length
        rows.append(stream[start : start + length + 1])
    return torch.from_numpy(np.stack(rows))


def learning_rate(settings: TrainingSettings, step: int) -> float:
    """Linear warmup over 4 % of the steps (at most 200), then a cosine to 2 % of the peak."""
    warmup = max(1, min(200, settings.steps // 25))
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, settings.steps - warmup)
    return settings.lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: nn.Module, settings: TrainingSettings) -> torch.optim.AdamW:
    """AdamW; norms are not decayed."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.98), fused=True)


def train_step(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    batch: torch.Tensor,
    settings: TrainingSettings,
    step: int,
) -> float:
    """One optimizer step; the dropout masks too depend on seed and step alone."""
    torch.manual_seed((settings.seed << 32) + step)
    logits = logits_of(model, batch[:, :-1], settings.precision)
    loss: torch.Tensor = MeanCrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(settings, step)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@torch.inference_mode()
def validation_loss(model: LlamaForCausalLM, documents: Sequence[np.ndarray], settings: TrainingSettings) -> float:
    """Nats per token over the validation documents, in separate windows of the full context.

    Only for comparing checkpoints: while the training is still on short windows, the positions it has not seen yet
    make this figure much too high.
    """
    model.eval()
    total, count = 0.0, 0
    for document in documents:
        for start in range(0, len(document) - 1, settings.context):
            window = torch.from_numpy(document[start : start + settings.context + 1])
            logits = logits_of(model, window[None, :-1], settings.precision)[0].float()
            total += float(nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
            count += len(window) - 1
    model.train()
    return total / count


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside the target, flush to disk, rename: a kill at any moment leaves the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    with open(temporary, "rb") as handle:
        os.fsync(handle.fileno())
    os.replace(temporary, path)


class Interrupt:
    """Inside `with`, turns SIGINT and SIGTERM into a flag that the training loop looks at between steps."""

    def __init__(self) -> None:
        self.raised = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        self._previous = {n: signal.signal(n, self._note) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self.raised = True


@dataclass
class Progress:
    """What a checkpoint holds besides model and optimizer."""

    step: int = 0
    seconds: float = 0.0
    best_loss: float = math.inf
    best_step: int = 0
    average: float = math.nan


class Trainer:
    """The training loop with its checkpoint file."""

    def __init__(self, settings: TrainingSettings, work: Path, args: argparse.Namespace) -> None:
        self.settings = settings
        self.path = work / "checkpoint.pt"
        self.checkpoint_every = args.checkpoint_every
        self.validate_every = args.validate_every
        self.model = build_model(settings)
        self.optimizer = make_optimizer(self.model, settings)
        self.progress = Progress()
        self.best: dict[str, torch.Tensor] = {}
        if self.path.exists():
            self._load()

    def _load(self) -> None:
        state = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.best = state["best"]
        self.progress = Progress(**state["progress"])
        print(f"resuming at step {self.progress.step} of {self.settings.steps}", flush=True)

    def save(self) -> None:
        """Write the checkpoint."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best": self.best,
            "progress": asdict(self.progress),
        }
        write_atomically(self.path, lambda path: torch.save(state, path))

    def _validate(self, documents: Sequence[np.ndarray]) -> None:
        loss = validation_loss(self.model, documents, self.settings)
        tqdm.write(f"step {self.progress.step}: train {self.progress.average:.4f}, validation {loss:.4f} nats/token")
        if loss < self.progress.best_loss:
            self.progress.best_loss, self.progress.best_step = loss, self.progress.step
            self.best = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def _step(self, stream: np.ndarray, validation: Sequence[np.ndarray]) -> None:
        """One step, and validation where it is due."""
        progress, begun = self.progress, time.monotonic()
        batch = batch_of(stream, self.settings, progress.step)
        loss = train_step(self.model, self.optimizer, batch, self.settings, progress.step)
        progress.average = loss if math.isnan(progress.average) else 0.98 * progress.average + 0.02 * loss
        progress.step += 1
        if progress.step % self.validate_every == 0 or progress.step == self.settings.steps:
            self._validate(validation)
        progress.seconds += time.monotonic() - begun

    def run(self, stream: np.ndarray, validation: Sequence[np.ndarray]) -> None:
        """Train to the end; an interruption saves a checkpoint and exits with 130."""
        progress, steps = self.progress, self.settings.steps
        self.model.train()
        with (
            Interrupt() as interrupt,
            tqdm(total=steps, initial=progress.step, desc="training", unit="step", mininterval=1.0) as bar,
        ):
            while progress.step < steps:
                self._step(stream, validation)
                bar.set_postfix(loss=f"{progress.average:.3f}", refresh=False)
                bar.update()
                if progress.step % self.checkpoint_every == 0 or progress.step == steps or interrupt.raised:
                    self.save()
                if interrupt.raised and progress.step < steps:
                    bar.close()
                    print(f"interrupted: step {progress.step} saved; the same command continues", flush=True)
                    sys.exit(130)

    def best_model(self) -> LlamaForCausalLM:
        """The model with the weights of the best validation."""
        self.model.load_state_dict(self.best)
        return self.model.eval()


def keep_freed_memory() -> None:
    """Let glibc reuse large freed blocks; without this every activation costs page faults again."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 64 << 20)):
            libc.mallopt(option, value)


# --------------------------------------------------------------------------------------------------------------------
# The figure to beat: a 5-gram
# --------------------------------------------------------------------------------------------------------------------


class KneserNey:
    """Interpolated modified Kneser-Ney over token ids (Chen and Goodman 1999), as sorted arrays of packed n-grams.

    The highest order uses raw counts; a lower order counts in how many different left contexts an n-gram was seen,
    except n-grams that start with BOS, which have none and keep raw counts.  At the start of a document only the
    context that exists is used.  The discounts come from the counts of counts; one factor an order is then tuned on
    the validation text, which only helps the baseline.
    """

    ORDER, BITS = 5, 12

    def __init__(self, documents: Sequence[np.ndarray], vocab: int) -> None:
        if vocab > 1 << self.BITS:
            raise ValueError(f"{self.ORDER}-grams are packed into 64 bits, which holds at most {1 << self.BITS} ids")
        self.vocab = vocab
        self.grams: list[np.ndarray] = []
        self.counts: list[np.ndarray] = []
        for order in range(1, self.ORDER + 1):
            packed = np.concatenate([self._pack(document, order) for document in documents])
            grams, counts = np.unique(packed, return_counts=True)
            self.grams.append(grams)
            self.counts.append(counts)
        for order in range(1, self.ORDER):
            self._count_contexts(order)
        self.scales = [1.0] * self.ORDER
        self.discounts = [self._discounts(counts) for counts in self.counts]
        self._index_contexts()

    def _pack(self, document: np.ndarray, order: int) -> np.ndarray:
        """All n-grams of this order in the document, packed into integers; those that end in its BOS are left out."""
        first = 1 if order == 1 else 0
        length = max(0, len(document) - order + 1)
        packed = np.zeros(length, dtype=np.int64)
        for shift in range(order):
            packed = (packed << self.BITS) | document[shift : shift + length]
        return packed[first:]

    def _count_contexts(self, order: int) -> None:
        """Replace raw counts by numbers of left contexts where there are left contexts."""
        suffixes = self.grams[order] & ((1 << (self.BITS * order)) - 1)
        seen, contexts = np.unique(suffixes, return_counts=True)
        grams, counts = self.grams[order - 1], self.counts[order - 1].copy()
        inner = (grams >> (self.BITS * (order - 1))) != BOS_ID if order > 1 else np.ones(len(grams), dtype=bool)
        counts[inner] = contexts[np.searchsorted(seen, grams[inner])]
        self.counts[order - 1] = counts

    @staticmethod
    def _discounts(counts: np.ndarray) -> np.ndarray:
        """D for counts 0, 1, 2 and 3 or more."""
        n1, n2, n3, n4 = (max(1, int((counts == c).sum())) for c in (1, 2, 3, 4))
        y = n1 / (n1 + 2 * n2)
        raw = np.array([0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
        return np.asarray(np.clip(raw, [0.0, 0.05, 0.05, 0.05], [0.0, 0.95, 1.9, 2.85]))

    def _index_contexts(self) -> None:
        """For each order the contexts, the total count below each, and how many n-grams of count 1, 2, 3+ it has."""
        self.contexts: list[np.ndarray] = []
        self.totals: list[np.ndarray] = []
        self.kinds: list[np.ndarray] = []
        for grams, counts in zip(self.grams, self.counts, strict=True):
            contexts, starts = np.unique(grams >> self.BITS, return_index=True)
            self.contexts.append(contexts)
            self.totals.append(np.add.reduceat(counts, starts))
            kinds = [np.add.reduceat((np.minimum(counts, 3) == kind).astype(np.int64), starts) for kind in (1, 2, 3)]
            self.kinds.append(np.stack([np.zeros_like(contexts), *kinds], 1))

    def probabilities(self, document: np.ndarray) -> np.ndarray:
        """Probability of each token after the BOS that starts the document."""
        result = np.full(len(document) - 1, 1.0 / (self.vocab - 1))
        for order in range(1, self.ORDER + 1):
            packed = self._pack(document, order)
            if not len(packed):
                break
            tail = slice(len(result) - len(packed), None)
            result[tail] = self._interpolate(order - 1, packed, result[tail])
        return result

    def _interpolate(self, index: int, packed: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Probabilities of one order from those of the order below."""
        discounts = self.discounts[index] * self.scales[index]
        place, known = find(self.contexts[index], packed >> self.BITS)
        totals = np.where(known, self.totals[index][place], 1)
        left_over = np.where(known, self.kinds[index][place] @ discounts / totals, 1.0)
        place, seen = find(self.grams[index], packed)
        counts = np.where(seen, self.counts[index][place], 0)
        own = np.maximum(counts - discounts[np.minimum(counts, 3)], 0) / totals
        return np.asarray(own + left_over * lower)

    def tune(self, documents: Sequence[np.ndarray]) -> None:
        """Choose one discount factor an order, from the lowest up, by the validation text."""
        for index in range(self.ORDER):
            costs = {}
            for scale in (0.8, 0.9, 1.0, 1.05):
                self.scales[index] = scale
                costs[scale] = sum(-np.log2(self.probabilities(document)).sum() for document in documents)
            self.scales[index] = min(costs, key=lambda scale: costs[scale])


def find(table: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of `keys` in the sorted `table`, and whether each is really there."""
    place = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return place, table[place] == keys


# --------------------------------------------------------------------------------------------------------------------
# Measurement
# --------------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def model_bits(model: LlamaForCausalLM, document: np.ndarray, context: int) -> float:
    """Bits of all tokens after BOS, each predicted once, in windows that advance by half the context."""
    bits, done = 0.0, 1
    stride = context // 2
    tokens = torch.from_numpy(document)
    for start in range(0, max(1, len(document) - 1), stride):
        window = tokens[start : start + context + 1]
        if start + len(window) <= done:
            break
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0].float()
        losses = nn.functional.cross_entropy(logits, window[1:], reduction="none")
        bits += float(losses[done - start - 1 :].sum()) / math.log(2)
        done = start + len(window)
    return bits


def bits_per_byte(passages: Sequence[str], tokenizer: Tokenizer, bits_of: Callable[[np.ndarray], float]) -> float:
    """Bits of every passage's tokens (BOS given, EOS not counted) over the bytes of its text."""
    documents = [document[:-1] for document in encode_documents(tokenizer, passages)]
    return sum(bits_of(document) for document in documents) / sum(len(passage.encode()) for passage in passages)


def heldout_excerpts(heldout: Sequence[str]) -> list[str]:
    """Some 6 to 8 KiB of the held-out text from all over it, each piece whole paragraphs from a paragraph start."""
    stride = max(1, len(heldout) // 5)
    order = [index for offset in range(stride) for index in range(offset, len(heldout), stride)]
    excerpts: list[str] = []
    for index in order:
        if sum(len(excerpt.encode()) for excerpt in excerpts) >= 6 * 1024:
            break
        taken: list[str] = []
        for paragraph in heldout[index].split("\n\n"):
            if len("\n\n".join([*taken, paragraph]).encode()) <= 1500:
                taken.append(paragraph)
            elif taken:
                break
        if taken:
            excerpts.append("\n\n".join(taken))
    return excerpts


def most_repeated(items: Sequence[Any], length: int = 8) -> int:
    """How often the most frequent run of `length` items occurs."""
    runs = Counter(tuple(items[i : i + length]) for i in range(len(items) - length + 1))
    return max(runs.values(), default=0)


@dataclass(frozen=True)
class SampleReport:
    """What the samples showed."""

    texts: list[str]
    word_8gram_max: int
    token_8gram_max: int
    ended: int
    free_runs: int
    free_tokens: int


def draw_samples(model: LlamaForCausalLM, tokenizer: Tokenizer, count: int, tokens: int) -> SampleReport:
    """Samples of exactly `tokens` tokens (EOS suppressed, one seed each), then free runs that may end by EOS."""
    start = torch.tensor([[BOS_ID]])
    texts, words, ids = [], 0, 0
    for seed in tqdm(range(count), desc="samples", unit="sample"):
        torch.manual_seed(seed)
        output = model.generate(start, max_new_tokens=tokens, min_new_tokens=tokens)[0, 1:].tolist()
        texts.append(tokenizer.decode(output))
        words = max(words, most_repeated(texts[-1].split()))
        ids = max(ids, most_repeated(output))
    torch.manual_seed(count)
    limit = min(512, model.config.max_position_embeddings - 1)
    starts = start.repeat(16, 1)
    runs = model.generate(starts, attention_mask=torch.ones_like(starts), max_new_tokens=limit)[:, 1:]
    ended = int((runs == EOS_ID).any(1).sum())
    return SampleReport(texts, words, ids, ended, len(runs), limit)


# --------------------------------------------------------------------------------------------------------------------
# Export
# --------------------------------------------------------------------------------------------------------------------

SOURCES = {
    "tinyshakespeare.txt": "plays of Shakespeare, from karpathy/char-rnn (`data/tinyshakespeare`); public domain text",
    "english_novels.txt": "*War and Peace* (Tolstoy, tr. Louise and Aylmer Maude), *Moby-Dick* (Melville), *Pride and "
    "Prejudice* (Austen), from the GITenberg texts 2600, 2701 and 1342; public domain in the USA",
}


def generation_config(context: int) -> GenerationConfig:
    """Defaults of generation: nucleus sampling, at most 128 tokens."""
    return GenerationConfig(
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        top_k=50,
        max_new_tokens=min(128, context // 2),
    )


def export_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """The folder as transformers reads it, weights in half precision."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    context = model.config.max_position_embeddings
    model.generation_config = generation_config(context)
    model.half().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


@dataclass(frozen=True)
class Figures:
    """Bits per byte over all held-out text and over the excerpts in heldout.txt."""

    model_fp32: tuple[float, float]
    model_fp16: tuple[float, float]
    ngram: tuple[float, float]


def measure(
    model: LlamaForCausalLM, folder: Path, tokenizer: Tokenizer, split: Split, excerpts: Sequence[str], context: int
) -> tuple[Figures, LlamaForCausalLM]:
    """All figures; exports the model on the way, and measures the rounded weights as read back from the folder."""

    def both(bits_of: Callable[[np.ndarray], float]) -> tuple[float, float]:
        return bits_per_byte(split.heldout, tokenizer, bits_of), bits_per_byte(excerpts, tokenizer, bits_of)

    begun = time.monotonic()
    baseline = KneserNey(encode_documents(tokenizer, split.train), tokenizer.get_vocab_size())
    baseline.tune(encode_documents(tokenizer, split.validation))
    ngram = both(lambda document: float(-np.log2(baseline.probabilities(document)).sum()))
    print(f"5-gram: {ngram[0]:.4f} bits/byte held out ({time.monotonic() - begun:.0f} s)", flush=True)
    model_fp32 = both(lambda document: model_bits(model, document, context))
    print(f"model: {model_fp32[0]:.4f} bits/byte held out", flush=True)
    export_model(model, tokenizer, folder)
    rounded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model_fp16 = both(lambda document: model_bits(rounded, document, context))
    print(f"model, weights rounded to float16: {model_fp16[0]:.4f} bits/byte held out", flush=True)
    return Figures(model_fp32, model_fp16, ngram), rounded


def card_text(facts: dict[str, Any], settings: TrainingSettings, figures: Figures, sampling: SampleReport) -> str:
    """The model card; every figure comes from this run."""
    rows = "\n".join(
        f"| {name} | {values[0]:.4f} | {values[1]:.4f} |"
        for name, values in (
            ("model, float32 weights", figures.model_fp32),
            ("model, weights rounded to float16 (as shipped)", figures.model_fp16),
            ("5-gram, interpolated modified Kneser-Ney", figures.ngram),
        )
    )
    excerpts = "\n\n".join("> " + text[:300].replace("\n", "\n> ") + " ..." for text in sampling.texts[:3])
    return CARD.format(
        **asdict(settings),
        **facts,
        rows=rows,
        excerpts=excerpts,
        word_max=sampling.word_8gram_max,
        token_max=sampling.token_8gram_max,
        ended=sampling.ended,
        free_runs=sampling.free_runs,
        free_tokens=sampling.free_tokens,
        sample_count=len(sampling.texts),
        head_dim=settings.hidden // settings.heads,
    )


CARD = """\
# Demo model

A toy Llama-architecture language model of {parameters:,} parameters, trained from scratch by
`examples/train_demo_model.py`. It exists so that the engine can be tried and tested with real text and no download.
This file is written by that script; every number in it was measured by the run that made the weights.

## Architecture

`LlamaForCausalLM`: {layers} layers, hidden size {hidden}, intermediate size {intermediate}, {heads} query heads and
{kv_heads} key/value heads of {head_dim}, tied embeddings, {context} positions (all trained), float16 weights.
Tokenizer: byte-level BPE of {vocab} entries, made from the training text only; `{bos}` is put in front of every text,
`{eos}` ends one. The folder takes {mebibytes:.1f} MiB.

## Data

{sources}

Neither the texts nor anything else that was copied from them beyond `heldout.txt` is part of this folder. Tables of
contents are dropped. The texts are cut into parts of some {part_kib} KiB at paragraph ends; every {heldout_every}nd
part is held out ({heldout_bytes:,} bytes) and every {validation_every}th is for validation ({validation_bytes:,}
bytes), before the tokenizer or the model see anything. The remaining {train_bytes:,} bytes ({train_tokens:,} tokens)
are cut at random paragraph ends into passages of 1 to 5 KB, each between `{bos}` and `{eos}`.

## Training

AdamW, peak learning rate {lr}, warmup and cosine, weight decay {weight_decay}, gradient clipping 1.0, dropout {dropout}
(one mask a sequence) on the residual branches. {steps} steps of {tokens_per_step} tokens ({epochs:.1f} epochs),
{short_percent:.0f} % of them on windows of {short_context} tokens and the rest on {context}; the weights are those of
the best validation (step {best_step}). Seed {seed}, {precision}, {threads} thread(s).

It took {minutes:.0f} minutes on {hardware}. Command:

    {command}

## Held-out bits per byte

| | all held-out text | `heldout.txt` |
|---|---|---|
{rows}

Bits of the tokens over the bytes of the original UTF-8 text. `{bos}` is given and `{eos}` is not counted; every token
is predicted once, in windows of {context} tokens that advance by {stride}, so that a token has at least {stride}
tokens of context where the passage has them. The 5-gram is fitted on the same tokens of the same training passages,
its discount factors are tuned on the validation text, and it is measured on the same tokens. `heldout.txt` has
excerpts of the held-out text, separated by lines with only `%%`.

## Samples

{sample_count} samples of {sample_tokens} tokens from `{bos}` alone, with the settings of `generation_config.json`,
seeds 0 to {last_seed}, `{eos}` suppressed so that all have the full length. Within one sample the most frequent word
8-gram occurs {word_max} time(s) and the most frequent token 8-gram {token_max} time(s). Left free, {ended} of
{free_runs} runs ended by `{eos}` within {free_tokens} tokens. Beginnings of the first three:

{excerpts}

## Limits

A toy. It writes grammatical-looking English in the manner of three novels and some plays, and nothing it says means
anything. It follows no instructions, knows no facts, and has the prejudices of its sources, which are from the 16th to
the 19th century. Any UTF-8 text can be tokenized, but text other than English is predicted badly. Positions beyond
{context} were never trained.
"""


def export_all(
    args: argparse.Namespace,
    settings: TrainingSettings,
    split: Split,
    tokenizer: Tokenizer,
    trainer: Trainer,
    tokens: int,
) -> None:
    """Measure, sample, and write the finished folder."""
    folder = args.work / "export"
    excerpts = heldout_excerpts(split.heldout)
    model = trainer.best_model()
    figures, rounded = measure(model, folder, tokenizer, split, excerpts, settings.context)
    sampling = draw_samples(rounded, tokenizer, args.samples, args.sample_tokens)
    print(f"most frequent 8-gram in a sample: words {sampling.word_8gram_max}, tokens {sampling.token_8gram_max}")
    (args.work / "samples.txt").write_text("\n\n%%\n\n".join(sampling.texts) + "\n", encoding="utf-8")
    (folder / "heldout.txt").write_text("\n%%\n".join(excerpts) + "\n", encoding="utf-8")
    facts = {
        "parameters": rounded.num_parameters(),
        "bos": BOS,
        "eos": EOS,
        "part_kib": PART_BYTES // 1024,
        "heldout_every": HELDOUT_EVERY,
        "validation_every": VALIDATION_EVERY,
        "heldout_bytes": sum(len(p.encode()) for p in split.heldout),
        "validation_bytes": sum(len(p.encode()) for p in split.validation),
        "train_bytes": sum(len(p.encode()) for p in split.train),
        "train_tokens": tokens,
        "epochs": settings.steps * settings.tokens_per_step / tokens,
        "short_percent": 100 * settings.short_share,
        "best_step": trainer.progress.best_step,
        "minutes": trainer.progress.seconds / 60,
        "hardware": args.hardware,
        "command": command_line(args, settings),
        "stride": settings.context // 2,
        "sample_tokens": args.sample_tokens,
        "last_seed": args.samples - 1,
        "sources": "\n".join(f"- `{p.name}`: {SOURCES.get(p.name, 'origin not recorded')}" for p in args.text),
    }
    size = sum(path.stat().st_size for path in folder.iterdir())
    card = card_text({**facts, "mebibytes": size / 2**20}, settings, figures, sampling)
    (folder / "README.md").write_text(card, encoding="utf-8")
    args.out.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir()):
        write_atomically(args.out / path.name, partial(shutil.copyfile, path))
    print(f"wrote {args.out}: {size / 2**20:.2f} MiB", flush=True)
    if max(sampling.word_8gram_max, sampling.token_8gram_max) > 3:
        print("warning: a sample repeats an 8-gram more than 3 times", file=sys.stderr)
    if figures.model_fp16[0] >= figures.ngram[0]:
        print("warning: the model is no better than the 5-gram", file=sys.stderr)


def command_line(args: argparse.Namespace, settings: TrainingSettings) -> str:
    """The command that repeats this run, with file names but no folders, and the steps instead of a duration."""
    words = ["python examples/train_demo_model.py --text", *(path.name for path in args.text)]
    words += [f"--steps {settings.steps}"]
    defaults = vars(parse_args(["--text", "x"]))
    for name in TrainingSettings.__dataclass_fields__:
        if name in defaults and name != "steps" and getattr(settings, name) != defaults[name]:
            words.append(f"--{name.replace('_', '-')} {getattr(settings, name)}")
    return " ".join(words)


# --------------------------------------------------------------------------------------------------------------------
# The run
# --------------------------------------------------------------------------------------------------------------------


def settings_of(args: argparse.Namespace, texts: Sequence[str], steps: int) -> TrainingSettings:
    """The settings of this command."""
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    names = set(TrainingSettings.__dataclass_fields__) - {"text_sha256", "steps"}
    return TrainingSettings(text_sha256=digest, steps=steps, **{name: getattr(args, name) for name in names})


def claim_work(work: Path, settings: TrainingSettings, by_minutes: bool) -> TrainingSettings:
    """Record the settings in the work folder, or check that they are those already recorded there."""
    path = work / "settings.json"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda p: p.write_text(json.dumps(asdict(settings), indent=2)))
        return settings
    stored, wanted = json.loads(path.read_text()), asdict(settings)
    if by_minutes:
        wanted["steps"] = stored.get("steps")
    changed = [f"{k} is {stored.get(k)} there and {wanted[k]} here" for k in wanted if stored.get(k) != wanted[k]]
    if changed:
        sys.exit(f"error: {work} holds a run with different settings ({'; '.join(changed)}); use another --work folder")
    return TrainingSettings(**wanted)


def steps_for(minutes: float, settings: TrainingSettings) -> int:
    """Steps that fit into `minutes`, by timing a few steps of both window lengths on random tokens."""
    stream = np.random.default_rng(0).integers(0, settings.vocab, 4 * settings.tokens_per_step + settings.context)
    model = build_model(settings)
    optimizer = make_optimizer(model, settings)
    cost = 0.0
    for share, first in ((settings.short_share, 0), (1 - settings.short_share, settings.short_steps())):
        for number in range(5):
            if number == 1:
                begun = time.monotonic()
            train_step(model, optimizer, batch_of(stream, settings, first), settings, first)
        cost += share * (time.monotonic() - begun) / 4
    return max(1, int(minutes * 60 / cost))


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything that is not done yet."""
    args = parse_args(argv)
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    texts = [path.read_text(encoding="utf-8") for path in args.text]
    settings = settings_of(args, texts, args.steps or 1000)
    if args.minutes is not None and not (args.work / "settings.json").exists():
        settings = settings_of(args, texts, steps_for(args.minutes, settings))
    settings = claim_work(args.work, settings, args.minutes is not None)
    split = split_texts(texts, settings.seed)
    tokenizer_path = args.work / "tokenizer.json"
    if not tokenizer_path.exists():
        write_atomically(tokenizer_path, lambda p: train_tokenizer(split.train, settings.vocab).save(str(p)))
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    stream = np.concatenate(encode_documents(tokenizer, split.train))
    sizes = [sum(len(p.encode()) for p in passages) for passages in (split.train, split.validation, split.heldout)]
    print("bytes: train {}, validation {}, held out {}".format(*sizes), f"({len(stream)} training tokens)", flush=True)
    trainer = Trainer(settings, args.work, args)
    trainer.run(stream, encode_documents(tokenizer, split.validation))
    export_all(args, settings, split, tokenizer, trainer, len(stream))


if __name__ == "__main__":
    main()
