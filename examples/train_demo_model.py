"""Trains the small bundled demo model from plain text on one CPU core.

    python examples/train_demo_model.py --text plays.txt novels.txt --out build/demo_model

Every 32nd passage is held out. A byte-level BPE tokenizer and the model are trained on the others. transformers and pagetide
load the folder that is written: weights in float16, tokenizer, generation settings, held-out excerpts, and a model card whose
numbers were measured by this run. The same texts, options and thread count on the same machine give the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

BOS, EOS = "<|bos|>", "<|eos|>"
BOS_ID, EOS_ID = 0, 1
# A conversation as a scene of a play, since plays are in the training text.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role | upper }}:\n{{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:\n{% endif %}"
)
PASSAGE_BYTES = 1500
HELDOUT_EVERY = 32
EXCERPT_BYTES = 6 * 1024  # of heldout.txt


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. The defaults give a model of the size of the bundled one, in about an hour."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", nargs="+", type=Path, required=True, metavar="FILE", help="UTF-8 text files to train on")
    add("--out", type=Path, default=Path("build/demo_model"), help="folder for the finished model")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1)
    add("--bf16", action="store_true", help="compute in bfloat16, which is faster on CPUs with AMX")
    add("--steps", type=int, default=4000)
    add("--tokens-per-step", type=int, default=2048)
    add("--lr", type=float, default=1.5e-3, help="peak of the learning rate")
    add("--vocab", type=int, default=4096)
    add("--hidden", type=int, default=256)
    add("--layers", type=int, default=8)
    add("--heads", type=int, default=8)
    add("--kv-heads", type=int, default=4)
    add("--intermediate", type=int, default=704)
    add("--context", type=int, default=1024, help="longest window, and the model's position limit")
    return parser.parse_args(argv)


def passages_of(text: str) -> Iterator[str]:
    """Consecutive whole paragraphs, joined to passages of at least PASSAGE_BYTES; the last one may be shorter."""
    passage = ""
    for paragraph in filter(str.strip, text.replace("\r\n", "\n").split("\n\n")):
        passage = f"{passage}\n\n{paragraph}" if passage else paragraph
        if len(passage.encode()) >= PASSAGE_BYTES:
            yield passage
            passage = ""
    if passage:
        yield passage


def split(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Passages to train on, and held-out passages evenly over the length of each text."""
    train, heldout = [], []
    for text in texts:
        passages = list(passages_of(text))
        middle = min(HELDOUT_EVERY, len(passages)) // 2
        heldout += passages[middle::HELDOUT_EVERY]
        train += [passage for index, passage in enumerate(passages) if index % HELDOUT_EVERY != middle]
    return train, heldout


def train_tokenizer(passages: Sequence[str], vocab: int, context: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every byte is in the alphabet, so any UTF-8 text round-trips exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(passages, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID), (EOS, EOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=CHAT_TEMPLATE,
    )


def build_model(args: argparse.Namespace, vocab: int) -> LlamaForCausalLM:
    """A model with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=args.hidden,
            intermediate_size=args.intermediate,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.kv_heads,
            max_position_embeddings=args.context,
            tie_word_embeddings=True,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
        )
    )


def train(model: LlamaForCausalLM, tokens: torch.Tensor, args: argparse.Namespace) -> None:
    """AdamW with warmup and cosine on random windows of the tokens: short ones first, then of the full context."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.1, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, min(200, args.steps // 25), args.steps)
    model.train()
    bar = tqdm(range(args.steps), desc="training", unit="step", mininterval=1.0)
    for step in bar:
        length = args.context // 4 if step < 0.75 * args.steps else args.context
        length = min(length, len(tokens))
        starts = torch.randint(len(tokens) - length + 1, (max(1, args.tokens_per_step // length),)).tolist()
        windows = torch.stack([tokens[start : start + length] for start in starts])
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            loss = model(input_ids=windows, labels=windows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.eval()


@torch.inference_mode()
def bits_per_byte(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, passages: Sequence[str]) -> float:
    """Bits of the passages' tokens after BOS, each predicted once, divided by the bytes of the text."""
    nats, context = 0.0, model.config.max_position_embeddings
    for passage in passages:
        tokens = torch.tensor(tokenizer(passage, verbose=False)["input_ids"])
        for start in range(0, len(tokens) - 1, context):
            window = tokens[start : start + context + 1]
            logits = model(input_ids=window[None, :-1], use_cache=False).logits[0]
            nats += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
    return nats / math.log(2) / sum(len(passage.encode()) for passage in passages)


def excerpts_of(heldout: Sequence[str]) -> list[str]:
    """Held-out passages from all over the text, of about EXCERPT_BYTES together."""
    fitting = [passage for passage in heldout if len(passage.encode()) < 2 * PASSAGE_BYTES] or list(heldout)
    return fitting[:: max(1, len(fitting) * PASSAGE_BYTES // EXCERPT_BYTES)]


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the folder as transformers reads it, with the weights in float16."""
    shutil.rmtree(folder, ignore_errors=True)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        top_k=50,
        max_new_tokens=min(128, model.config.max_position_embeddings // 2),
    )
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)


CARD = """\
# Demo model

A toy Llama-architecture language model of {parameters:,} parameters, trained from scratch by
`examples/train_demo_model.py`. That program wrote this file. The run that made the weights measured every number in it.

Trained on {train_bytes:,} bytes ({train_tokens:,} tokens) of {names} in {steps} steps of {tokens_per_step} tokens, which
took {minutes:.0f} minutes. Settings: {settings}.

## Held-out bits per byte

| | all held-out text | `heldout.txt` |
|---|---|---|
| model, weights rounded to float16 (as shipped) | {everything:.4f} | {excerpts:.4f} |

Bits of the tokens after `{bos}` over the bytes of the UTF-8 text. `heldout.txt` has excerpts of the held-out text, separated by
lines with only `%%`.

## Sample

> {sample}
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Train, measure, and write the model's folder."""
    args = parse_args(argv)
    begun = time.monotonic()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    passages, heldout = split([path.read_text("utf-8") for path in args.text])
    if not passages:
        sys.exit(f"error: the texts are too short: at least two passages of {PASSAGE_BYTES} bytes are needed")
    tokenizer = train_tokenizer(passages, args.vocab, args.context)
    documents = [[*ids, EOS_ID] for ids in tokenizer(passages, verbose=False)["input_ids"]]
    tokens = torch.tensor([token for document in documents for token in document])
    model = build_model(args, len(tokenizer))
    train(model, tokens, args)
    minutes = (time.monotonic() - begun) / 60

    save(model, tokenizer, args.out)
    model = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    excerpts = excerpts_of(heldout)
    (args.out / "heldout.txt").write_text("\n%%\n".join(excerpts) + "\n", "utf-8")
    everything = bits_per_byte(model, tokenizer, heldout)
    (sample,) = model.generate(torch.tensor([[BOS_ID]]))
    card = CARD.format(
        parameters=model.num_parameters(),
        train_bytes=sum(len(passage.encode()) for passage in passages),
        train_tokens=len(tokens),
        names=", ".join(f"`{path.name}`" for path in args.text),
        steps=args.steps,
        tokens_per_step=args.tokens_per_step,
        minutes=minutes,
        settings=json.dumps({name: value for name, value in vars(args).items() if name not in ("text", "out")}),
        everything=everything,
        excerpts=bits_per_byte(model, tokenizer, excerpts),
        bos=BOS,
        sample=tokenizer.decode(sample, skip_special_tokens=True).replace("\n", "\n> "),
    )
    (args.out / "README.md").write_text(card, "utf-8")
    print(f"wrote {args.out}: {everything:.4f} bits per byte of held-out text", flush=True)


if __name__ == "__main__":
    main()
