"""Which models of transformers give the same text from paged blocks: each is run and compared, or refused.

    python -m benchmarks.model_families [--families llama qwen3 ...] [--models Qwen/Qwen3-0.6B ...] [--json FILE]
                                        [--document docs/models.md]

Every causal language model type of the installed transformers, and every published checkpoint of published_models.yaml, is
made tiny with random weights and served by an `LLM` in float32 on the CPU: a type from memory, a checkpoint from a folder.
References are transformers' `generate`, greedy, each prompt alone, and the tokens and log-probabilities of plain forward passes
without a cache. Compared with them: prompts of several lengths in one batch; and the same in a pool too small for all
of them, so that requests are preempted and computed again.

Each runs in a process of its own, forked after the imports, with a limit of time and memory: one that fails ends nothing.
`--document` writes the tables of docs/models.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import re
import resource
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from pagetide import LLM, ConfigError, RequestOutput, RequestRejected, SamplingParams, UnsupportedModel
from pagetide.cache.geometry import LATENT_TYPES
from pagetide.engine.attention import gathered
from pagetide.engine.attention.gathered import may_attend_by_itself
from pagetide.engine.attention.states import limit_time_steps, may_have_states
from pagetide.engine.errors import CheckpointError

from .published_models import (
    LAYERS,
    VOCABULARY,
    PublishedModel,
    class_of,
    published_config,
    published_models,
    save,
    shrunk,
    small,
)

MOST_PARAMETERS = 20_000_000

_MAMBA = {"mamba_n_heads": 12, "mamba_d_head": 8, "mamba_d_state": 16}
_DELTA = [*["linear_attention"] * 3, "full_attention"]
# Beyond small sizes; None removes a size.
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [2]},
    "cohere_compass_text": {"layer_types": ["full_attention"] * LAYERS},
    "codegen": {"n_head": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "bailing_hybrid": {"num_expert_group": 2, "num_experts_per_tok": 2, "layer_types": _DELTA},
    "helium": {"head_dim": 8},
    "kimi_linear": {"num_experts_per_token": 2, "layer_types": _DELTA, "linear_head_dim": 16, "linear_num_heads": 6},
    # The default configurations of these have no layer of one kind, unlike their published checkpoints.
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2, "expert_layer_period": 2},
    "dots3_note_text": {"per_layer_config": None},
    "gemma3n_text": {"num_kv_shared_layers": 0, "laurel_rank": 8},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 9},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 2, "num_decoder_layers": 2},
    "reformer": {"axial_pos_embds_dim": [16, 32]},
    "mamba2": {"hidden_size": 48, "num_heads": 8, "head_dim": 12, "n_groups": 2, "state_size": 16},
    "zamba": {"num_hidden_layers": 5, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"layer_types": ["mamba", "mamba", "hybrid", "mamba"], "hybrid_layer_ids": [2]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    **{name: {"head_dim": 16} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    **{name: {"head_dim": 16, "global_head_dim": 32} for name in ("gemma4_text", "gemma4_unified_text")},
}


class CannotBeTiny(Exception):
    """No tiny model of this type could be made; says why."""


def tiny_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A random float32 model in eval mode that never ends a text. Raises CannotBeTiny."""
    try:
        config = tiny_config(model_type)
        with torch.device("meta"):
            parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if parameters > MOST_PARAMETERS:
            raise CannotBeTiny(f"{parameters:,} parameters remain")
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    except CannotBeTiny:
        raise
    except Exception as error:
        raise CannotBeTiny(f"{type(error).__name__}: {error}") from error
    return ready(model, seed)


def tiny_published(published: PublishedModel, seed: int = 0) -> PreTrainedModel:
    """As `tiny_model`, of a published checkpoint's shape. Raises CannotBeTiny."""
    try:
        config = shrunk(published_config(published))
        if published.stored == "mxfp4":  # in blocks of 32
            for name in ("hidden_size", "intermediate_size"):
                setattr(config, name, -(-getattr(config, name) // 32) * 32)
        model = class_of(published)(config).float()
        model.set_attn_implementation("eager")
    except Exception as error:
        raise CannotBeTiny(f"{type(error).__name__}: {error}") from error
    return ready(model, seed)


def ready(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The model with random weights, in eval mode, which never ends a text."""
    randomize(model, seed)
    limit_time_steps(model)  # plain passes as decodes
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval().requires_grad_(False)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The default configuration of a model type with small sizes."""
    kind = CONFIG_MAPPING[model_type]
    values = {**small(kind()), **SPECIAL.get(model_type, {})}
    return kind(**{name: value for name, value in values.items() if value is not None})


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Random weights under which attention matters and the likeliest token is clearly so."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter += 0.3 * noise
        else:
            parameter.copy_(noise * (1.5 / math.sqrt(parameter.shape[-1])))


EQUAL, DIFFERENT, REFUSED, FAILED, NOT_TRIED = "equal", "different", "refused", "failed", "not tried"
OUT_OF_SCOPE = "out of scope"
# Types that fill masked words or translate; the others of these mappings are decoders.
ENCODERS = {
    *MODEL_FOR_MASKED_LM_MAPPING_NAMES, *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    *MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, "musicgen", "musicgen_melody", "trocr", "git",
} - {"reformer", "moss_transcribe_diarize"}  # fmt: skip
PROMPT_LENGTHS = (3, 7, 12, 18, 21, 26)
NEW_TOKENS = 14
BLOCK_SIZE = 4
TOLERANCE = 1e-3  # of a log-probability
LONGEST_REASON = 240
NO_FORM = "in floating point; its form of weights was not tried"
LIMIT_S = 400  # of a processor's time; ten times as long in all
LIMIT_BYTES = 16 << 30


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was seen of a model type, or of a published checkpoint by its name; `reason` is empty where outputs are equal."""

    model_type: str
    class_name: str
    status: str
    reason: str = ""


def compare(model_type: str, model: PreTrainedModel, served: PreTrainedModel | Path) -> Outcome:
    """Serve `served`, the model or its folder, and compare it with transformers. Raises UnsupportedModel if it is refused."""
    name = type(model).__name__
    prompts = [[(17 * length + 31 * i * i + 7 * i) % (VOCABULARY - 1) + 1 for i in range(length)] for length in PROMPT_LENGTHS]
    batched, stats = run(served, prompts, "16MiB")
    block_bytes = stats["memory"]["kv_bytes"] // stats["blocks"]["mapped"]
    runs = {"in a batch": batched}
    if (outputs := preempted(served, prompts, block_bytes)) is not None:
        runs["after preemptions"] = outputs
    note = "" if len(runs) == 2 else "in a batch; no pool was so small that requests were preempted"
    for index, prompt in enumerate(prompts):
        row = greedy(model, prompt)
        if row != generated(model, prompt):
            note = "as plain forward passes give them; transformers' `generate` differs from those"
        log_probs = log_probabilities(model, row)
        for how, given in runs.items():
            if why := difference(given[index], row, log_probs):
                if all(equal_in_double(model, prompts, outputs) for outputs in runs.values()):
                    return Outcome(model_type, name, EQUAL, "as transformers gives them in float64; its float32 differs")
                return Outcome(model_type, name, DIFFERENT, f"{how}, a prompt of {len(prompt)} tokens: {why}")
    return Outcome(model_type, name, EQUAL, note)


def equal_in_double(model: PreTrainedModel, prompts: list[list[int]], outputs: list[RequestOutput]) -> bool:
    """Whether all outputs are those of the model in float64: a near tie is decided by rounding in float32."""
    try:
        wide = copy.deepcopy(model).double()
        rows = [greedy(wide, prompt) for prompt in prompts]
        checked = zip(outputs, rows, strict=True)
        return not any(difference(output, row, log_probabilities(wide, row)) for output, row in checked)
    except (RuntimeError, TypeError):  # modules that compute in one type alone
        return False


def run(model: PreTrainedModel | Path, prompts: list[list[int]], kv_memory: int | str) -> tuple[list[RequestOutput], Any]:
    """The outputs of all prompts at once, and the engine's numbers."""
    params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    with LLM(
        model, device="cpu", dtype="float32", kv_memory=kv_memory, block_size=BLOCK_SIZE, max_seqs=len(prompts),
        max_step_tokens=32, max_model_len=64, prefix_caching=False, share=False,
    ) as llm:  # fmt: skip
        return llm.generate(prompts, params, progress=False), llm.stats()


def preempted(model: PreTrainedModel | Path, prompts: list[list[int]], block_bytes: int) -> list[RequestOutput] | None:
    """The outputs from a pool so small that requests are preempted; None if no such pool is found."""
    longest = -(-(max(PROMPT_LENGTHS) + NEW_TOKENS) // BLOCK_SIZE)
    few, many = range(2 * longest, longest, -1), range(4 * longest, 2 * longest, -1)
    several = range(4 * longest, 12 * longest, 3)  # blocks of a token, with groups of layers
    # Many, as small pools may have larger strides: of layers that differ, up to twice.
    for num_blocks in (*few, *many, *several):
        try:
            outputs, stats = run(model, prompts, (num_blocks + 1) * block_bytes)
        except (RequestRejected, ConfigError):  # longer than the pool; less than the states of a sequence
            continue
        if stats["preemptions"]:
            return outputs
    return None


@torch.inference_mode()
def generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """The prompt and what transformers' `generate` continues it with."""
    row = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
    return row[0].tolist()


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """The prompt and the likeliest tokens behind it, by a plain forward pass over the whole text for each."""
    row = list(prompt)
    for _ in range(NEW_TOKENS):
        row.append(int(model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1].argmax()))
    return row


@torch.inference_mode()
def log_probabilities(model: PreTrainedModel, row: list[int]) -> list[float]:
    """The log-probability of each token of the row but the first, from one forward pass."""
    logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
    chosen = torch.tensor(row[1:])[:, None]
    return logits.double().log_softmax(-1).gather(-1, chosen)[:, 0].tolist()


def difference(output: RequestOutput, row: list[int], log_probs: list[float]) -> str:
    """How an output differs from what transformers gives; empty if it does not."""
    expected = row[len(output.prompt_token_ids) :]
    if output.token_ids != expected:
        first = next(i for i, pair in enumerate(zip(output.token_ids, expected, strict=True)) if pair[0] != pair[1])
        return f"the generated token {first + 1} differs"
    given = [*(output.prompt_logprobs or ())[1:], *(output.completions[0].logprobs or ())]
    excess = max(abs(one.logprob - right) for one, right in zip(given, log_probs, strict=True))
    return "" if excess <= TOLERANCE else f"log-probabilities differ by up to {excess:.2g}"


def reason_of(error: UnsupportedModel, class_name: str) -> str:
    """The reason in a refusal, without the model's name, the remedy, and the size of a difference."""
    text = str(error).partition("out of paged blocks: ")[2] or str(error)
    text = text.removesuffix(". Use transformers' generate for this model, or serve another")
    return re.sub(r" \(by \S+ times what rounding explains\)", "", text.removeprefix(f"{class_name}: "))


def outcome_of(name: str) -> Outcome:
    """Make, serve and compare a model of this type, or a published checkpoint, in this process."""
    published = published_models().get(name)
    try:
        model = tiny_model(name) if published is None else tiny_published(published)
    except CannotBeTiny as error:
        return Outcome(name, "", NOT_TRIED, str(error))
    class_name = type(model).__name__
    try:
        return compare(name, model, model) if published is None else compare_from_folder(published, model)
    except UnsupportedModel as error:
        return Outcome(name, class_name, REFUSED, reason_of(error, class_name))
    except Exception as error:
        return Outcome(name, class_name, FAILED, f"{type(error).__name__}: {error}")


def compare_from_folder(published: PublishedModel, model: PreTrainedModel) -> Outcome:
    """Compare a published checkpoint, saved in its form, with transformers over what its weights stand for; where that form
    is refused, in floating point too.
    """
    class_name = type(model).__name__
    with tempfile.TemporaryDirectory() as folder:
        stored = save(model, published, Path(folder) / "model")
        try:
            outcome = compare(published.name, stored, Path(folder) / "model")
            return (
                replace(outcome, reason=NO_FORM)
                if outcome.status == EQUAL and stored is model and published.stored
                else outcome
            )
        except UnsupportedModel as error:
            reason = reason_of(error, class_name)
        except (CheckpointError, ConfigError) as error:
            reason = str(error).partition(" cannot be loaded: ")[2] or str(error)
        reason = re.sub(rf" ?{re.escape(folder)}/model(?:: | )?", "", reason)
    if published.stored:
        plain = compare_from_folder(published.unquantized, model)
        if plain.reason != reason:
            reason = f"{reason}. In floating point: {plain.reason or plain.status}"
    return Outcome(published.name, class_name, REFUSED, reason)


def outcome_in_process(model_type: str) -> Outcome:
    """`outcome_of` in a forked process with limits."""
    reader, writer = os.pipe()
    if (process := os.fork()) == 0:
        try:
            resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
            signal.alarm(10 * LIMIT_S)
            transformers.logging.set_verbosity_error()
            os.write(writer, json.dumps(asdict(outcome_of(model_type))).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if not answer:
        return Outcome(model_type, "", FAILED, f"its process ended with {status}")
    return Outcome(**json.loads(answer))


INTRODUCTION = """# Model families

<!-- Written by python -m benchmarks.model_families --document docs/models.md -->

pagetide has no list of supported models. At load a [probe](decisions/0006-models-are-probed.md) compares the model's logits
from paged blocks with those of a plain forward pass, and refuses a model that differs, with the reason. This document shows
what came out, with transformers {transformers} and torch {torch}: first for published checkpoints, then for every causal
language model type of transformers.

Each was made tiny with random weights in float32 and served on a CPU: prompts of {lengths} tokens in
one batch, with {new} new tokens each, and again in a pool so small that requests are preempted. *Equal* means that every
greedy token is that of transformers' `generate` for each prompt alone and of plain forward passes without a cache, and
that every log-probability is within {tolerance} of theirs; exceptions have a note.

**Limits.** A tiny random model is not a checkpoint: it shows that the computation is the same, not how good or how fast it is.
Types with images or sound were given text only. Nothing here was run on a GPU. The probe runs at each load, so a model
that is served has passed it.

## Popular checkpoints

{served} of {models} are served and equal to transformers.

Each was made from its published configuration and loaded from a folder. The pattern of layers, the ratios of heads and widths,
rotary scaling, softcaps, multipliers and tied embeddings are the published ones; windows are shorter than the texts. A
checkpoint that was trained from one of these, or whose `config.json` differs from one only in sizes, has the same answer.
`python -m benchmarks.model_families --models ID` repeats one.

The list has small and large checkpoints of the families that serving engines name most, as far as a public source shows their
configuration, and quantized forms of some. Counts of downloads were not at hand. `benchmarks/published_models.yaml` has
each one's configuration and its source.

**Stored quantized.** Linear layers were stored in the published form, and equal is equal to transformers over the numbers that
the form stands for. [quantization.md](quantization.md#quantized-checkpoints) has the forms that are read, and the families of
[GGUF files](quantization.md#gguf-files).

| checkpoint | class | answer |
|---|---|---|
{table}

## Model types

Each of the {total} causal language model types of transformers was made with 4 layers, a vocabulary of 160, and else the
defaults of its type; where no published checkpoint has these, with the layers of one. A checkpoint with other settings (another
rotary scaling, sliding windows, quantised weights) may be refused, and one with settings that avoid a refused part may
be served. `python -m benchmarks.model_families --families TYPE` repeats one.

**Images and sound.** Of transformers' image-text-to-text models the text is served, and other parts are neither read nor held
([0059](decisions/0059-text-of-multimodal-models.md)). Tiny ones that transformers saved gave, from their folders, the tokens
of the whole model: `aria`, `aya_vision`, `chameleon`, `cohere2_vision`, `cosmos3_omni`, `deepseek_vl`, `deepseek_vl_hybrid`,
`emu3`, `ernie4_5_vl_moe`, `exaone4_5`, `fast_vlm`, `fuyu`, `gemma3`, `gemma3n`, `gemma4`, `gemma4_unified`, `glm46v`,
`glm4v`, `glm4v_moe`, `glm_ocr`, `glmasr`, `got_ocr2`, `granite4_vision`, `granite_docling`, `hyperclovax_vision_v2`,
`idefics2`, `idefics3`, `internvl`, `kimi_k25`, `lfm2_vl`, `lfm3_vl`, `lighton_ocr`, `llama4`, `llava`, `llava_next`,
`llava_next_video`, `llava_onevision`, `minicpmv4_6`, `minimax_m3_vl`, `mistral3` (with a decoder of `mistral4` too),
`mistral_large4`, `molmo2`, `muse_glimmer`, `nemotron_h_omni`, `ovis2`, `paddleocr_vl`, `pp_chart2table`, `qianfan_ocr`,
`qwen2_5_omni` (the thinker), `qwen2_5_vl`, `qwen2_audio`, `qwen2_vl`, `qwen3_asr`, `qwen3_omni_moe` (the thinker),
`qwen3_vl`, `qwen3_vl_moe`, `smolvlm`, `step3p7`, `video_llama_3`, `video_llava`, `vipllava`, `voxtral`. Refused are
`paligemma`, in which tokens of a prompt see later ones, `git`, `mllama` (Llama 3.2 Vision), and models that compute nothing
without an image (`blip-2`, `idefics`, `instructblip`). Two hold parts for images inside their decoder, which are read and
held too: `chameleon` the coder of images, `ernie4_5_vl_moe` experts.

**Latent attention.** Types {latent} cache latents instead of
K and V of all heads ([0052](decisions/0052-latent-attention.md)).

**Attention of its own.** Types that call no attention interface, or choose the tokens that they attend to, are computed a
sequence at a time ([0061](decisions/0061-attention-of-its-own.md)): {own}.
"""
NOTES = {
    "gpt_oss": "published checkpoints are MXFP4: see the first table",
    "nemotron_h": "with its configuration's `time_step_limit` in chunks too, where transformers takes `time_step_min`",
}
SECTIONS = {
    EQUAL: "Served, and equal to transformers",
    REFUSED: "Refused at load",
    DIFFERENT: "Served, and not equal",
    FAILED: "Failed in another way",
    NOT_TRIED: "Not tried",
    OUT_OF_SCOPE: "Out of scope",
}
ANSWERS = {EQUAL: "**served, equal**", REFUSED: "refused", DIFFERENT: "not equal", FAILED: "failed", NOT_TRIED: "not tried"}


def out_of_scope(model_type: str) -> bool:
    """Whether the type is of an encoder or of an encoder and a decoder, which some can be asked to continue text with."""
    return model_type in ENCODERS


def document(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as Markdown: of published checkpoints in their order, then by model type."""
    models = [one for one in outcomes if one.model_type in published_models()]
    types = [one for one in outcomes if one not in models]
    parts = [
        INTRODUCTION.format(
            total=len(types), transformers=transformers.__version__, torch=torch.__version__.partition("+")[0],
            lengths=", ".join(map(str, PROMPT_LENGTHS)), new=NEW_TOKENS, tolerance=TOLERANCE,
            latent=", ".join(f"`{name}`" for name in sorted(LATENT_TYPES)), models=len(models),
            own=", ".join(f"`{one.model_type}`" for one in types if attends_by_itself(one)),
            served=sum(one.status == EQUAL for one in models), table="\n".join(map(answer, models)),
        )
    ]  # fmt: skip
    for status, title in SECTIONS.items():
        of_status = sorted((one for one in types if section_of(one) == status), key=lambda one: one.model_type)
        if not of_status:
            continue
        has_reason = any(one.reason for one in of_status)
        last = (f" {'note' if status == EQUAL else 'reason'} |", "---|---|") if has_reason else ("", "---|")
        parts += [f"### {title}", "", f"{len(of_status)} model types{SCOPE if status == OUT_OF_SCOPE else ''}.", ""]
        parts += [f"| model type | class |{last[0]}", f"|---|{last[1]}"]
        parts += [
            f"| `{one.model_type}` | {f'`{one.class_name}`' if one.class_name else ''} |"
            + f" {cell('; '.join(filter(None, (NOTES.get(one.model_type), one.reason))))} |" * has_reason
            for one in of_status
        ]
        parts.append("")
    return "\n".join(parts)


def attends_by_itself(outcome: Outcome) -> bool:
    """Whether a type is equal and its attention calls no interface of transformers, or chooses tokens."""
    if outcome.status != EQUAL:
        return False
    kind, config = getattr(transformers, outcome.class_name), tiny_config(outcome.model_type)
    if may_have_states(kind) or not may_attend_by_itself([kind], config):
        return False
    return gathered.attends_by_itself(tiny_model(outcome.model_type))


SCOPE = ": encoders, and encoders with decoders, that continue text only when asked to"


def section_of(outcome: Outcome) -> str:
    """The status, but for a type that was refused or not tried and is no decoder."""
    refused = outcome.status in (REFUSED, NOT_TRIED, FAILED)
    return OUT_OF_SCOPE if refused and out_of_scope(outcome.model_type) else outcome.status


def answer(outcome: Outcome) -> str:
    """A row of the table of checkpoints."""
    class_name = published_models()[outcome.model_type].class_name
    said = ANSWERS[outcome.status] + (f": {cell(outcome.reason)}" if outcome.reason else "")
    return f"| `{outcome.model_type}` | `{class_name}` | {said} |"


def cell(text: str) -> str:
    """A reason in one cell of a table: one line, cut if it is long."""
    line = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[")
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON].rsplit(' ', 1)[0]} ..."


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the families and the published checkpoints, and write what was seen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    types, names = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), list(published_models())
    parser.add_argument(
        "--families",
        nargs="+",
        metavar="TYPE",
        choices=types,
        help="model types of transformers (default: all, or none with --models)",
    )
    parser.add_argument(
        "--models", nargs="+", metavar="ID", choices=names, help="published checkpoints (default: all, or none with --families)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes as JSON too")
    parser.add_argument("--document", type=Path, metavar="FILE", help="write them as Markdown")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a fork has no threads but this one
    outcomes = []
    chosen = [*(args.models or ()), *(args.families or ())] or [*names, *types]
    for name in chosen:
        outcomes.append(outcome_in_process(name))
        print(f"{name:48} {outcomes[-1].status:10} {outcomes[-1].reason}"[:220], flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    if args.document:
        args.document.write_text(document(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main()
