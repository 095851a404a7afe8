"""Which model families of transformers give the same text from paged blocks: each is run and compared, or refused.

    python -m benchmarks.model_families [--families llama qwen3 ...] [--json FILE] [--document docs/models.md]

Every causal language model type of the installed transformers is made tiny with random weights and served
by an `LLM` in float32 on the CPU. References are transformers' `generate`, greedy, each prompt alone, and the tokens and
log-probabilities of plain forward passes without a cache. Compared with them: prompts of several lengths in one batch; and
the same in a pool too small for all of them, so that requests are preempted and computed again.

Each family runs in a process of its own, forked after the imports, with a limit of time and memory: a family that fails ends
nothing. `--document` writes the table of docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagetide import LLM, RequestOutput, RequestRejected, SamplingParams, UnsupportedModel
from pagetide.cache.geometry import LATENT_TYPES

VOCABULARY = 160
LAYERS = 4
MOST_PARAMETERS = 20_000_000

# What configurations call each size, and the small one.
NAMES = {
    "hidden_size n_embd d_model emb_dim dim embedding_size n_embed": 48,
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads": 6,
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers": LAYERS,
    "num_key_value_heads num_kv_heads multi_query_group_num swa_num_key_value_heads": 2,
    "intermediate_size ffn_dim n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim": 64,
    "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size q_lora_rank": 32,
    "num_experts num_local_experts n_routed_experts moe_num_experts": 4,
    "num_experts_per_tok moe_k moe_top_k top_k_experts n_group index_n_heads": 2,
    "max_position_embeddings n_positions max_seq_len n_ctx": 512,
    "vocab_size vocab_size_per_layer_input": VOCABULARY,
    "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim kv_lora_rank o_lora_rank hidden_size_per_layer_input": 16,
    "swa_head_dim swa_v_head_dim index_head_dim": 16,
    "swa_num_attention_heads": 6,
    "rotary_dim index_topk": 8,
    "sliding_window": 9,
    "topk_group": 1,
}
SIZES = {name: size for names, size in NAMES.items() for name in names.split()}
_MAMBA = {"mamba_n_heads": 12, "mamba_d_head": 8, "mamba_d_state": 16}
# Beyond small sizes; None removes a size.
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA,
    "cohere_compass_text": {"layer_types": ["full_attention"] * LAYERS},
    "codegen": {"n_head": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "helium": {"head_dim": 8},
    # Their published checkpoints have convolutions; the default configuration of lfm2 has none.
    "lfm2": {"layer_types": ["full_attention", "conv", "full_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["full_attention", "conv", "full_attention", "full_attention"]},
    "dots3_note_text": {"per_layer_config": None},
    "gemma3n_text": {"num_kv_shared_layers": 0, "laurel_rank": 8},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 9},
    "granitemoehybrid": _MAMBA,
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 2, "num_decoder_layers": 2},
    "reformer": {"axial_pos_embds_dim": [16, 32]},
    "zamba2": {"layer_types": ["mamba", "mamba", "hybrid", "mamba"]},
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
    randomize(model, seed)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval().requires_grad_(False)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The default configuration of a model type with small sizes."""
    kind = CONFIG_MAPPING[model_type]
    values = {**small(kind()), **SPECIAL.get(model_type, {})}
    return kind(**{name: value for name, value in values.items() if value is not None})


def small(config: PreTrainedConfig) -> dict[str, Any]:
    """The sizes that a configuration has, made small."""
    given = config.to_dict()
    values: dict[str, Any] = {name: value for name, value in SIZES.items() if given.get(name) is not None}
    values |= {name: small(getattr(config, name)) for name in config.sub_configs if getattr(config, name, None)}
    if "kv_lora_rank" in values:  # latent attention: every head has keys of its own
        values |= {"num_key_value_heads": 6} if "num_key_value_heads" in values else {}
    if hasattr(config, "pad_token_id"):
        values["pad_token_id"] = 0
    if getattr(config, "is_decoder", None) is False:
        values["is_decoder"] = True
    return values


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
PROMPT_LENGTHS = (3, 7, 12, 18, 21, 26)
NEW_TOKENS = 14
BLOCK_SIZE = 4
TOLERANCE = 1e-3  # of a log-probability
LONGEST_REASON = 240
LIMIT_S = 400
LIMIT_BYTES = 16 << 30


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was seen of a model type; `reason` is empty where the outputs are equal."""

    model_type: str
    class_name: str
    status: str
    reason: str = ""


def compare(model_type: str, model: PreTrainedModel) -> Outcome:
    """Serve a model and compare it with transformers."""
    name = type(model).__name__
    prompts = [[(17 * length + 31 * i * i + 7 * i) % (VOCABULARY - 1) + 1 for i in range(length)] for length in PROMPT_LENGTHS]
    try:
        batched, stats = run(model, prompts, "16MiB")
    except UnsupportedModel as error:
        return Outcome(model_type, name, REFUSED, reason_of(error, name))
    block_bytes = stats["memory"]["kv_bytes"] // stats["blocks"]["mapped"]
    runs = {"in a batch": batched, "after preemptions": preempted(model, prompts, block_bytes)}
    note = ""
    for index, prompt in enumerate(prompts):
        row = greedy(model, prompt)
        if row != generated(model, prompt):
            note = "as plain forward passes give them; transformers' `generate` differs from those"
        log_probs = log_probabilities(model, row)
        for how, outputs in runs.items():
            if why := difference(outputs[index], row, log_probs):
                return Outcome(model_type, name, DIFFERENT, f"{how}, a prompt of {len(prompt)} tokens: {why}")
    return Outcome(model_type, name, EQUAL, note)


def run(model: PreTrainedModel, prompts: list[list[int]], kv_memory: int | str) -> tuple[list[RequestOutput], Any]:
    """The outputs of all prompts at once, and the engine's numbers."""
    params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    with LLM(
        model, device="cpu", kv_memory=kv_memory, block_size=BLOCK_SIZE, max_seqs=len(prompts), max_step_tokens=32,
        max_model_len=64, prefix_caching=False, share=False,
    ) as llm:  # fmt: skip
        return llm.generate(prompts, params, progress=False), llm.stats()


def preempted(model: PreTrainedModel, prompts: list[list[int]], block_bytes: int) -> list[RequestOutput]:
    """The outputs from a pool so small that requests are preempted."""
    longest = -(-(max(PROMPT_LENGTHS) + NEW_TOKENS) // BLOCK_SIZE)
    few, many = range(2 * longest, longest, -1), range(4 * longest, 2 * longest, -1)
    several = range(4 * longest, 12 * longest, 3)  # blocks of a token, with groups of layers
    # Many, as small pools may have larger strides: of layers that differ, up to twice.
    for num_blocks in (*few, *many, *several):
        try:
            outputs, stats = run(model, prompts, (num_blocks + 1) * block_bytes)
        except RequestRejected:  # longer than the pool
            continue
        if stats["preemptions"]:
            return outputs
    raise RuntimeError("no pool was so small that requests were preempted")


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


def outcome_of(model_type: str) -> Outcome:
    """Make, serve and compare a model of this type, in this process."""
    try:
        model = tiny_model(model_type)
    except CannotBeTiny as error:
        return Outcome(model_type, "", NOT_TRIED, str(error))
    try:
        return compare(model_type, model)
    except Exception as error:
        return Outcome(model_type, type(model).__name__, FAILED, f"{type(error).__name__}: {error}")


def outcome_in_process(model_type: str) -> Outcome:
    """`outcome_of` in a forked process with limits."""
    reader, writer = os.pipe()
    if (process := os.fork()) == 0:
        try:
            resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
            signal.alarm(LIMIT_S)
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
what came out for each of the {total} causal language model types of transformers {transformers}, with torch {torch}.

Each type was made tiny (4 layers, a vocabulary of 160) with random weights in float32 and served on a CPU: prompts of
{lengths} tokens in one batch, with {new} new tokens each, and again in a pool so small that requests are preempted.
*Equal* means that every greedy token is that of transformers' `generate` for each prompt alone and of plain forward passes
without a cache, and that every log-probability is within {tolerance} of theirs; exceptions have a note.
`python -m benchmarks.model_families --families TYPE` repeats one.

**Limits.** A tiny random model is not a checkpoint: one with other settings of the same type (another rotary scaling, sliding
windows, quantised weights) may be refused, and one with settings that avoid a refused part may be served. Types with
images or sound were given text only. Nothing here was run on a GPU. The probe runs at each load, so a model that is
served has passed it.

**Images and sound.** Of transformers' image-text-to-text models the text is served, and other parts are neither read nor held
([0059](decisions/0059-text-of-multimodal-models.md)). Tiny ones that transformers saved gave, from their folders, the tokens
of the whole model: `aria`, `aya_vision`, `cohere2_vision`, `cosmos3_omni`, `deepseek_vl`, `deepseek_vl_hybrid`, `fast_vlm`,
`fuyu`, `gemma3`, `gemma3n`, `gemma4`, `gemma4_unified`, `glm46v`, `glm4v_moe`, `glm_ocr`, `got_ocr2`,
`hyperclovax_vision_v2`, `idefics2`, `idefics3`, `internvl`, `kimi_k25`, `lfm2_vl`, `lighton_ocr`, `llama4`, `llava`,
`llava_next`, `llava_next_video`, `llava_onevision`, `minimax_m3_vl`, `mistral3` (with a decoder of `mistral4` too), `ovis2`,
`paddleocr_vl`, `pp_chart2table`, `qianfan_ocr`, `qwen2_vl`, `qwen2_5_omni_thinker`, `qwen2_5_vl`, `qwen3_omni_moe_thinker`,
`qwen3_vl`, `qwen3_vl_moe`, `smolvlm`, `video_llama_3`, `video_llava`, `vipllava`. Refused are `paligemma`, in which tokens of
a prompt see later ones, and models that compute nothing without an image (`blip-2`, `idefics`, `instructblip`).

**Stored quantized.** Published checkpoints of `gpt_oss` store their experts in MXFP4. With `accelerate` installed transformers
reads these, as bfloat16 on a CPU; a tiny one was served, with the tokens of transformers. The memory plan counts only
the size of the files, about a quarter of what the weights then take.

**Latent attention.** Types {latent} cache latents instead of
K and V of all heads ([0052](decisions/0052-latent-attention.md)).
"""
NOTES = {"gpt_oss": "published checkpoints are MXFP4: see above"}
SECTIONS = {
    EQUAL: "Served, and equal to transformers",
    REFUSED: "Refused at load",
    DIFFERENT: "Served, and not equal",
    FAILED: "Failed in another way",
    NOT_TRIED: "Not tried",
}


def document(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as Markdown, by model type."""
    parts = [
        INTRODUCTION.format(
            total=len(outcomes), transformers=transformers.__version__, torch=torch.__version__.partition("+")[0],
            lengths=", ".join(map(str, PROMPT_LENGTHS)), new=NEW_TOKENS, tolerance=TOLERANCE,
            latent=", ".join(f"`{name}`" for name in sorted(LATENT_TYPES)),
        )
    ]  # fmt: skip
    for status, title in SECTIONS.items():
        of_status = sorted((one for one in outcomes if one.status == status), key=lambda one: one.model_type)
        if not of_status:
            continue
        has_reason = any(one.reason for one in of_status)
        last = (f" {'note' if status == EQUAL else 'reason'} |", "---|---|") if has_reason else ("", "---|")
        parts += [f"## {title}", "", f"{len(of_status)} model types.", ""]
        parts += [f"| model type | class |{last[0]}", f"|---|{last[1]}"]
        parts += [
            f"| `{one.model_type}` | {f'`{one.class_name}`' if one.class_name else ''} |"
            + f" {cell(one.reason or NOTES.get(one.model_type, ''))} |" * has_reason
            for one in of_status
        ]
        parts.append("")
    return "\n".join(parts)


def cell(text: str) -> str:
    """A reason in one cell of a table: one line, cut if it is long."""
    line = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[")
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON].rsplit(' ', 1)[0]} ..."


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the families and write what was seen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--families", nargs="+", metavar="TYPE", default=list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        choices=list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), help="model types of transformers (default: all)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes as JSON too")
    parser.add_argument("--document", type=Path, metavar="FILE", help="write them as Markdown")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a fork has no threads but this one
    outcomes = []
    for model_type in args.families:
        outcomes.append(outcome_in_process(model_type))
        print(f"{model_type:28} {outcomes[-1].status:10} {outcomes[-1].reason}"[:200], flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    if args.document:
        args.document.write_text(document(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main()
