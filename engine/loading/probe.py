"""Determines at load whether a model can be served from paged blocks, by observing it instead of by a list of names.

Four tests on a few random tokens, in as few forward passes as possible, since each reads all weights:

1. The plain model with transformers' own eager attention gives the reference logits.

2. The same run, with attention and mask functions replaced by recording ones. Every layer with K and V must call once, with the
geometry's shapes, causally, and without features that paged attention lacks. A mask comes with its rule, which is compared with
causality and the `sliding_window` keyword at positions far beyond the few tokens. Attention returns zeros here, to show its
effect on the logits.

3. pagetide's attention over blocks full of NaN, in chunks, packed with another sequence, must give the same logits. This
reveals state other than K and V, and dependence on a token's place in the batch.

4. In these passes the other sequence is at the far end of the context: its positions must not change the first one's logits.
If they differ, the passes are repeated without that, to tell the reasons apart.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import masking_utils
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

from ...cache.geometry import PAGE_BYTES, Geometry, LayerShape
from ...cache.storage import Storage, TensorArena
from ..attention.context import AttentionKernel, StepContext, lengths_on, running
from ..attention.gathered import is_installed
from ..attention.interface import LATENT_ATTENTION, register
from ..attention.states import ModelStates, installed
from ..attention.torch_kernel import TorchKernel
from ..errors import UnsupportedModel
from ..process.log_suppression import quiet_transformers

# Three sequences over a few steps, as (sequence, tokens) per chunk. Sequence 1 is another one; 0 and 2 have the same tokens, so
# that logits are compared, in three parts, from nothing and on top of earlier blocks (of 0), and as decodes (of 0 and 2).
STEPS = (((0, 10), (1, 5), (2, 16)), ((2, 1), (1, 1), (0, 6)), ((2, 1), (0, 1)))
COMPARED = (*range(17), 16, 17)  # the tokens' positions, those of sequence 0 first
PARTS = (slice(0, 10), slice(10, 16), slice(16, 19))
_LATER_CHUNK, _SEQUENCES = 1, 3
NUM_TOKENS, OTHER_TOKENS = 19, 6
BLOCK_SIZE = 4
NUM_BLOCKS = 13
FARTHEST = 1 << 20  # range of the mask comparison without a model limit

# Bounds on an error: relative to attention's contribution to the logits, plus relative to the logits.
TOLERANCES = {torch.float32: (1e-2, 2e-5), torch.float16: (0.1, 1e-2), torch.bfloat16: (0.2, 4e-2)}

# Keywords of attention functions that do not affect causal attention.
HARMLESS = {"cache_position", "layer_idx", "output_attentions", "output_hidden_states", "output_router_logits"}
HARMLESS |= {"position_ids", "return_dict", "use_cache", "past_key_values", "logits_to_keep"}

_OVERLAY = "blockwise_overlay"  # transformers' function of a mask rule, in `masking_utils`

_registries = threading.Lock()  # transformers' registries are process-wide


def probe(model: Any, geometry: Geometry, *, max_length: int | None = None, kernel: AttentionKernel | None = None) -> None:
    """Return if `model` gives the same logits from paged blocks as by itself.

    Costs five forward passes over at most 31 tokens, and a pool of a few blocks of 4 tokens on the model's device. Restores
    the model's attention implementation.

    Args:
        model: A causal language model of transformers, in eval mode, on its device.
        geometry: Only its layers and dtype matter here.
        max_length: Most tokens of a sequence; behaviour beyond it is ignored. None: the model's limit.
        kernel: By default a new TorchKernel.

    Raises:
        UnsupportedModel: it does not, or this cannot be determined; names the model, the layer and what to do.
    """
    with quiet_transformers(), _registries, _implementation_kept(model), torch.inference_mode():
        _Probe(model, geometry, max_length, kernel or TorchKernel()).run()


class _Probe:
    """One probe of one model."""

    def __init__(self, model: Any, geometry: Geometry, max_length: int | None, kernel: AttentionKernel) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.shapes = geometry.layers
        self.kernel = kernel
        self.device = next(one.device for one in model.parameters() if not one.is_meta)
        lengths = (getattr(self.config, "max_position_embeddings", None), max_length)
        self.limit = min((n for n in lengths if isinstance(n, int) and n > 0), default=FARTHEST)
        chunks = [shape.window for shape in geometry.layers if shape.chunked and shape.window is not None]
        self.block_size = math.gcd(BLOCK_SIZE, *chunks)  # of which chunks are whole numbers
        self.blocks = (NUM_BLOCKS - 1) * BLOCK_SIZE // self.block_size  # in each table
        few = replace(geometry, block_size=self.block_size, granule_bytes=PAGE_BYTES, extent_target_bytes=PAGE_BYTES)
        self.first_state = 1 + self.blocks * few.num_tables
        num_blocks = self.first_state + _SEQUENCES * few.state_blocks
        arena = TensorArena(few.extents_for_blocks(num_blocks), few.extent_bytes, self.device)
        self.storage = Storage(few, arena, self.device)
        self.tokens = random_tokens(model.config, NUM_TOKENS + OTHER_TOKENS).to(self.device)

    def run(self) -> None:
        """Raises UnsupportedModel."""
        if getattr(self.model.config, "is_encoder_decoder", False):
            raise self.refusal("it is an encoder-decoder, and only decoders can be served")
        right = self.plain("eager")
        if not right.isfinite().all():
            raise self.refusal("a plain forward pass of it gives logits that are not finite")
        calls, without = self.watch()
        if is_installed(self.model):  # its attention is its own
            self.model.set_attn_implementation("eager")
        else:
            self.judge(calls)
            self.model.set_attn_implementation(register())
        compared, dtype = (right[[*COMPARED]], without[[*COMPARED]]), self.storage.layer(0).key.dtype
        shift = max(0, self.limit - OTHER_TOKENS)
        if _worst(*compared, self.paged(shift), dtype)[1] <= 1:
            return
        part, excess = _worst(*compared, self.paged(0), dtype)
        mixers = installed(self.model)
        if excess > 1 and mixers is not None and mixers.simplify():  # some forget their state in a chunk that continues
            return self.run()
        if excess > 1:
            where = ("a prompt's first tokens", "a prompt's later chunk", "decoded tokens")[part]
            raise self.refusal(
                f"the logits of {where} differ from those of a plain forward pass (by {excess:.3g} times what rounding"
                " explains), so it keeps a state besides K and V, or ignores position_ids"
            )
        raise self.refusal(
            "its rotary embeddings change with the longest sequence of a batch, so requests would change each"
            f" other's results; set max_model_len to at most {self.unscaled_length()}"
        )

    def refusal(self, why: str) -> UnsupportedModel:
        """The error: which model, why, what to do."""
        kind = f"{type(self.model).__name__} (model type {getattr(self.config, 'model_type', '?')!r})"
        remedy = "Use transformers' generate for this model, or serve another"
        return UnsupportedModel(f"{kind} cannot be served out of paged blocks: {why}. {remedy}")

    # --- tests

    def plain(self, implementation: str) -> torch.Tensor:
        """float32 [19, vocabulary]: the first sequence's logits without pagetide."""
        try:
            self.model.set_attn_implementation(implementation)
            return _logits(self.model(input_ids=self.tokens[None, :NUM_TOKENS], use_cache=False))
        except Exception as error:
            raise self.refusal(f"a plain forward pass of it fails ({type(error).__name__}: {error})") from error

    def watch(self) -> tuple[list[_Call], torch.Tensor]:
        """The calls of a forward pass, and its logits if all attention returns zeros.

        Models may have special code under eager attention (sparse masks), so "eager" is observed first. Code that does not look
        up "eager" in the interface is observed under another name.
        """
        for name in ("eager", "pagetide_watch"):
            watch = _Watch()
            with watch.installed(name):
                logits = self.plain(name)
            if watch.calls:
                break
        return watch.calls, logits

    def paged(self, shift: int) -> torch.Tensor:
        """float32 [len(COMPARED), vocabulary]: logits by paged attention, with the other sequence's positions increased."""
        self.storage.blocks.view(self.storage.layer(0).key.dtype).fill_(math.nan)
        self.storage.clear([0])
        done, rows = [0, 0, 0], ([], [], [])  # type: tuple[list[int], tuple[list[torch.Tensor], ...]]
        states = ModelStates(self.storage.states)
        for chunks in STEPS:
            step, tokens, positions = self.pack(chunks, done, shift)
            try:
                sequences = np.array([sequence for sequence, _ in chunks])
                step = states.within(step, sequences, self.state_blocks(sequences))
                with running(step):
                    output = self.model(input_ids=tokens, position_ids=positions, use_cache=False, step=step)
                states.done(sequences, step.kv_lens.astype(np.int64))
                logits = _logits(output)
            except Exception as error:
                if (mixers := installed(self.model)) is not None and mixers.packed:
                    mixers.simplify()  # it computes with its states in another way
                    return self.paged(shift)
                raise self.refusal(f"a paged forward pass of it fails ({type(error).__name__}: {error})") from error
            starts = np.cumsum([0, *(n for _, n in chunks)])
            for (sequence, n), start in zip(chunks, starts, strict=False):
                done[sequence] += n
                rows[sequence].append(logits[start : start + n])
        return torch.cat([*rows[0], *rows[2][1:]])

    def pack(
        self, chunks: tuple[tuple[int, int], ...], done: list[int], shift: int
    ) -> tuple[StepContext, torch.Tensor, torch.Tensor]:
        """A step, its input ids and its position ids [1, T]."""
        ids, more = np.random.default_rng(0).permutation(np.arange(1, 1 + self.blocks)), BLOCK_SIZE // self.block_size
        unused = np.zeros(3 * more, np.int64)
        # By sequence, scattered.
        tables = (ids[: 5 * more], np.append(ids[5 * more : 7 * more], unused), ids[7 * more :])
        q_lens = np.array([n for _, n in chunks], np.int32)
        kv_lens = np.array([done[s] + n for s, n in chunks], np.int32)
        places = [(s, p) for s, n in chunks for p in range(done[s], done[s] + n)]  # (sequence, position) of each token
        step = StepContext(
            layers=tuple(self.storage.layer(i) for i in range(len(self.shapes))),
            kernel=self.kernel,
            q_starts=(np.cumsum(q_lens) - q_lens).astype(np.int32),
            q_lens=q_lens,
            kv_lens=kv_lens,
            num_decodes=int((q_lens == 1).sum()),
            **lengths_on(self.device, q_lens, kv_lens),
            tables=self.by_table(np.stack([tables[s] for s, _ in chunks])),
            write_blocks=self.by_table(np.array([tables[s][p // self.block_size] for s, p in places])),
            write_offsets=self.tensor(np.array([p % self.block_size for _, p in places])),
            block_size=self.block_size,
        )
        tokens = self.tokens[[(s == 1) * NUM_TOKENS + p for s, p in places]]
        return step, tokens[None], self.tensor(np.array([p + (s == 1) * shift for s, p in places]))[None]

    def state_blocks(self, sequences: np.ndarray[Any, Any]) -> torch.Tensor:
        """The blocks with the states of `sequences`, [n, state_blocks], scattered."""
        number = self.storage.geometry.state_blocks
        ids = self.first_state + np.random.default_rng(0).permutation(_SEQUENCES * number).reshape(_SEQUENCES, number)
        return self.tensor(ids[sequences])

    def tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """`array` as int64 on the model's device."""
        return torch.from_numpy(array.astype(np.int64)).to(self.device)

    def by_table(self, array: np.ndarray[Any, Any]) -> tuple[torch.Tensor, ...]:
        """Block ids up to `blocks`, and for each further table as many other ones; 0 stays the null block."""
        return tuple(
            self.tensor(array + (array > 0) * table * self.blocks) for table in range(self.storage.geometry.num_tables)
        )

    # --- judging

    def judge(self, calls: list[_Call]) -> None:
        """Raises UnsupportedModel for the first call that paged attention does not support, and for missing calls."""
        if not calls and any(shape.num_kv_heads for shape in self.shapes):
            raise self.refusal("its attention is code of its own that never calls transformers' attention interface")
        types = getattr(self.config, "layer_types", None) or ()
        counts: dict[int | None, int] = {}
        for call in calls:
            if call.layer is None or not 0 <= call.layer < len(self.shapes):
                raise self.refusal(f"{call.name} says it is layer {call.layer}, of {len(self.shapes)}")
            counts[call.layer] = counts.get(call.layer, 0) + 1
        for layer, shape in enumerate(self.shapes):
            kind = f" (of type {types[layer]!r})" if layer < len(types) else ""
            count, expected = counts.get(layer, 0), int(shape.num_kv_heads > 0)
            if count != expected:
                times = "never calls" if count == 0 else f"calls {count} times"
                raise self.refusal(
                    f"layer {layer}{kind} {times} transformers' attention interface in a forward pass; {expected} was"
                    " expected" + (": its state is of another kind than K and V" if count == 0 else "")
                )
        for call in calls:
            why = self.complaint(call)
            if why is not None:
                assert call.layer is not None
                if types and types[call.layer] == "chunked_attention" and not self.shapes[call.layer].chunked:
                    size = getattr(self.config, "attention_chunk_size", None)
                    why += f"; a block_size that divides its attention_chunk_size, {size}, or max_model_len={size} would do"
                raise self.refusal(f"layer {call.layer} ({call.name}) {why}")
        floor_scale = getattr(self.config, "floor_scale", None)
        if getattr(self.config, "attn_temperature_tuning", False) and floor_scale and self.limit > floor_scale:
            raise self.refusal(  # of llama 4's features, only this is invisible on few tokens
                "it scales queries by their place in the batch, as if that were their position; set max_model_len to"
                f" at most {floor_scale:,}, where the scale is 1"
            )

    def complaint(self, call: _Call) -> str | None:
        """What is wrong with one call."""
        assert call.layer is not None
        shape = call.expanded or self.shapes[call.layer]
        expected = [(1, shape.num_kv_heads, NUM_TOKENS, dim) for dim in (shape.k_dim, shape.v_dim)]
        if [call.key_shape, call.value_shape] != expected or call.num_queries != NUM_TOKENS:
            return (
                f"attends over K and V of shapes {call.key_shape} and {call.value_shape} with {call.num_queries}"
                f" queries; its configuration promises {expected[0]} and {expected[1]} with {NUM_TOKENS}"
            )
        if call.unknown:
            return f"hands its attention what paged attention does not know: {', '.join(call.unknown)}"
        if not call.is_causal or call.mask is None:
            return "lets a token see later ones"
        if call.rule is None:
            return "makes an attention mask of its own, by a rule that cannot be seen from outside"
        why = self.mask_complaint(call)
        own = self.shapes[call.layer]
        kept = None if own.chunked else own.window
        if why is None and kept is not None and (call.sliding_window or math.inf) > kept:
            why = f"has a window of {call.sliding_window}; its configuration promises {kept}, and no more is kept"
        return why

    def mask_complaint(self, call: _Call) -> str | None:
        """The first difference between the layer's mask and causality with its sliding window."""
        assert call.rule is not None
        assert call.layer is not None
        shape = self.shapes[call.layer]
        query, key = _position_pairs(self.limit, call.sliding_window or shape.window, self.device)
        ours = (key <= query) if call.sliding_window is None else (key <= query) & (key > query - call.sliding_window)
        if shape.chunked and shape.window is not None:
            ours &= key // shape.window == query // shape.window
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        try:
            theirs = torch.as_tensor(call.rule(zero, zero, query, key), device=self.device).bool().expand_as(ours)
        except Exception as error:
            return f"has a mask that depends on more than positions ({type(error).__name__}: {error})"
        different = (ours != theirs).nonzero()[:, 0]
        if not len(different):
            return None
        q, k = int(query[different[0]]), int(key[different[0]])
        sees = "lets" if theirs[different[0]] else "does not let"
        return (
            f"has a mask that {sees} token {q:,} see token {k:,}, where its sliding_window keyword is"
            f" {call.sliding_window}; up to {int(query[different].min()):,} tokens no difference was seen"
        )

    def unscaled_length(self) -> str:
        """The sequence length beyond which rotary embeddings scale, if the config gives it."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        known = rope.get("original_max_position_embeddings") or getattr(self.config, "original_max_position_embeddings", None)
        return f"{known:,}" if known else "the length it was trained for"


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A layer's call of its attention function."""

    layer: int | None
    name: str  # of its class
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    num_queries: int
    is_causal: bool
    sliding_window: int | None
    unknown: tuple[str, ...]  # keywords with a value that paged attention lacks
    expanded: LayerShape | None  # of a layer that hands latents to paged attention: what other attention gets
    mask: torch.Tensor | None
    rule: Callable[..., Any] | None  # (batch, head, query position, key position) -> visible; None if unknown


@dataclass(slots=True)
class _Watch:
    """Replaces attention and mask functions in one thread, and records their arguments."""

    calls: list[_Call] = field(default_factory=list)
    masks: list[tuple[torch.Tensor, Callable[..., Any]]] = field(default_factory=list)
    owner: int = field(default_factory=threading.get_ident)

    @contextmanager
    def installed(self, name: str) -> Iterator[None]:
        """A context in which models with attention implementation `name` use this watch."""
        registries = [
            (AttentionInterface._global_mapping, name, self.attend),
            (AttentionMaskInterface._global_mapping, name, self.make_mask),
        ]
        if (overlay := getattr(masking_utils, _OVERLAY, None)) is not None:
            registries.append((vars(masking_utils), _OVERLAY, _of_any_position(overlay)))
        before = [mapping.get(key) for mapping, key, _ in registries]
        for mapping, key, function in registries:
            mapping[key] = function
        try:
            yield
        finally:
            for (mapping, key, _), function in zip(registries, before, strict=True):
                if function is None:
                    mapping.pop(key, None)
                else:
                    mapping[key] = function

    def make_mask(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """transformers' eager mask, recorded with its rule."""
        mask: torch.Tensor | None = eager_mask(*args, **kwargs)
        padding = kwargs.get("attention_mask")
        seen = threading.get_ident() == self.owner and "mask_function" in kwargs and (padding is None or padding.all())
        if seen and mask is not None:  # None: all may see all
            self.masks.append((mask, kwargs["mask_function"]))
        return mask

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Record the call and return zeros. Calls of eager models from other threads get the real function."""
        if threading.get_ident() != self.owner:
            eager = sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
            return eager(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
        is_causal = kwargs.get("is_causal")
        known = {"scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal", *HARMLESS}
        rules = [rule for mask, rule in self.masks if attention_mask is not None and _same_memory(mask, attention_mask)]
        self.calls.append(
            _Call(
                layer=getattr(module, "layer_idx", None),
                name=type(module).__name__,
                key_shape=tuple(key.shape),
                value_shape=tuple(value.shape),
                num_queries=query.shape[2],
                is_causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
                sliding_window=kwargs.get("sliding_window"),
                unknown=tuple(name for name, value in kwargs.items() if value is not None and name not in known),
                expanded=getattr(getattr(module, LATENT_ATTENTION, None), "expanded", None),
                mask=attention_mask,
                rule=rules[0] if rules else None,
            )
        )
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _of_any_position(overlay: Callable[[torch.Tensor], Callable[..., Any]]) -> Callable[[torch.Tensor], Callable[..., Any]]:
    """transformers' mask rule of tokens that see their whole block, such as an image, from the block of each of the prompt's
    tokens, int64 [batch, tokens], for positions beyond the prompt too: they are of no block.
    """

    def make(blocks: torch.Tensor) -> Callable[..., Any]:
        rule, last = overlay(blocks), blocks.shape[-1] - 1

        def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
            queries, keys = (torch.as_tensor(positions, device=blocks.device) for positions in (query, key))
            known = rule(batch, head, queries.clamp(max=last), keys.clamp(max=last))
            return known & (queries <= last) & (keys <= last)

        return sees

    return make


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.dtype == other.dtype


@contextmanager
def _implementation_kept(model: Any) -> Iterator[None]:
    """Restores the attention implementation of the model and all its parts."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    todo = list(configs.values())
    while todo:
        config = todo.pop()
        for name in getattr(config, "sub_configs", ()):
            part = getattr(config, name, None)
            if part is not None and id(part) not in configs:
                configs[id(part)] = part
                todo.append(part)
    before = [(c, c._attn_implementation_internal) for c in configs.values() if hasattr(c, "_attn_implementation_internal")]
    try:
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def random_tokens(config: Any, count: int) -> torch.Tensor:
    """int64 [count], without ids named in the config (padding, images) if the vocabulary allows.

    `config` is a text config, or one that has one.
    """
    text = config.get_text_config(decoder=True)
    both = [*vars(config).items(), *vars(text).items()]
    named = {v for k, v in both if k.endswith(("_id", "_index", "_ids")) and isinstance(v, int)}
    usual = [t for t in range(text.vocab_size) if t not in named] or list(range(text.vocab_size))
    return torch.from_numpy(np.random.default_rng(1).choice(usual, count).astype(np.int64))


def _logits(output: Any) -> torch.Tensor:
    """float32 [T, vocabulary] of a batch of one."""
    logits: torch.Tensor = output.logits[0]
    return logits.float()


def _worst(right: torch.Tensor, without: torch.Tensor, got: torch.Tensor, dtype: torch.dtype) -> tuple[int, float]:
    """(part, excess): the worst part of PARTS, and its error over the tolerance.

    All tensors are [tokens, vocabulary]. Excess is infinite for NaN. In 16-bit types a part's median token counts, because
    rounding may route one token of a mixture of experts elsewhere; in float32 its worst token counts.
    """
    share, noise = TOLERANCES[dtype]
    bound = share * (right - without).norm(dim=-1) + noise * right.norm(dim=-1)
    excess = ((got - right).norm(dim=-1) / bound).nan_to_num(nan=math.inf)
    found = [float((p.max if dtype == torch.float32 else p.median)()) for p in (excess[part] for part in PARTS)]
    worst = int(np.argmax(found))
    return worst, found[worst]


def _position_pairs(limit: int, window: int | None, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [pairs]: query and key positions below `limit`, near and far apart, around powers of two and windows."""
    random = np.random.default_rng(2)
    powers = 2 ** np.arange(0, limit.bit_length())
    near = {int(p) + d for p in [*powers, window or 1] for d in (-1, 0, 1)}
    apart = np.array(sorted({*near, -1, -2, -7, 0, 3, 5, 7, *random.integers(0, limit, 16).tolist()}))
    query = np.unique([*range(min(limit, 64)), *near, limit - 1, *random.integers(0, limit, 400).tolist()])
    pairs = query[:, None], query[:, None] - apart
    inside = (pairs[0] < limit) & (pairs[0] >= 0) & (pairs[1] >= 0) & (pairs[1] < limit)
    queries, keys = (np.broadcast_to(p, inside.shape)[inside].astype(np.int64) for p in pairs)
    return torch.from_numpy(queries).to(device), torch.from_numpy(keys).to(device)
