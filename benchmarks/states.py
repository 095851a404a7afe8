"""Models with recurrent layers against transformers' `generate`, and their kernels against memory.

python -m benchmarks.states [--rounds 3] [--layers 8] [--hidden 1024] [--tokens 16] [--json FILE] [--seed 0]

The model has Qwen3.5's layers with random weights: three with the gated delta rule to one with attention, heads of 128,
float32; 162 million parameters by default. 16 prompts of 64 to 159 tokens are a batch, padded for `generate`. All times are
CPU times of this process; the two take turns.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from benchmarks.arguments import parser_of, whole
from benchmarks.figures import Figure, median, report
from benchmarks.load import random_qwen3_5
from pagetide import LLM, SamplingParams
from pagetide.cache.geometry import Geometry, LayerShape, StateShape
from pagetide.engine.layers import recurrences

HEADS, DIM, ROWS, BLOCK = 16, 128, 16, 16
CHANNELS = 3 * HEADS * DIM


def speed(layers: int, hidden: int, tokens: int, rounds: int, rng: np.random.Generator) -> list[Figure]:
    """Prefill and decode steps of a batch, as shares of what `generate` takes."""
    model = random_qwen3_5(hidden, layers, 0, 4096)
    prompts = [rng.integers(1, 32 * hidden, count).tolist() for count in rng.integers(64, 160, ROWS)]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = (torch.arange(longest) >= longest - torch.tensor([len(prompt) for prompt in prompts])[:, None]).long()

    def generate(count: int) -> list[list[int]]:
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return out[:, longest:].tolist()  # type: ignore[no-any-return]

    def serve(count: int) -> list[list[int]]:
        llm.reset_prefix_cache()
        params = SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)
        return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params)]

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model.save_pretrained(folder)
        with LLM(folder, dtype="float32", device="cpu", kv_memory="1GiB", share=False, max_seqs=ROWS) as llm:
            same = sum(one == other for one, other in zip(serve(tokens), generate(tokens), strict=True))
            times = {run: ([], []) for run in (serve, generate)}  # type: ignore[var-annotated]
            for _ in range(rounds):
                for run, (first, steps) in times.items():
                    first.append(cpu_s(lambda run=run: run(1)))  # type: ignore[misc]
                    all_s = cpu_s(lambda run=run: run(tokens))  # type: ignore[misc]
                    steps.append((all_s - first[-1]) / (tokens - 1))
    ratios = [[a / b for a, b in zip(*pair, strict=True)] for pair in zip(times[serve], times[generate], strict=True)]
    return [
        Figure("sequences with the tokens of generate", same, f"of {ROWS}", ROWS, "higher"),
        median("first tokens, generate", times[generate][0], "s"),
        median("first tokens / generate", ratios[0], "x", 1.0),
        median("a decode step, generate", [s * 1e3 for s in times[generate][1]], "ms"),
        median("a decode step / generate", ratios[1], "x", 0.25),
    ]


def kernels(copies: int) -> list[Figure]:
    """The gated delta rule for a token of each row, over `copies` of a layer's states in turn."""
    stride, per_block = 3 * DIM * DIM * 4, 3  # as Qwen3.5-0.8B: three heads to a block
    columns = -(-HEADS // per_block)
    places = torch.tensor([divmod(head, per_block) for head in range(HEADS)]).T.contiguous()
    places[1] *= DIM * DIM * 4
    memory = [torch.randn(ROWS * columns, stride // 4).view(torch.uint8) for _ in range(copies)]
    dense = [torch.randn(ROWS, HEADS, DIM, DIM) for _ in range(copies)]
    tables = torch.randperm(ROWS * columns).view(ROWS, columns)
    chunks = torch.stack((torch.arange(ROWS), torch.ones(ROWS, dtype=torch.int64), torch.ones(ROWS, dtype=torch.int64)))
    mixed = torch.randn(1, ROWS, CHANNELS).split(HEADS * DIM, -1)
    query, key, value = (one.view(1, ROWS, HEADS, DIM) for one in mixed)
    gates = {"g": -torch.rand(1, ROWS, HEADS), "beta": torch.rand(1, ROWS, HEADS)}
    assert "recurrent" in recurrences.install(modeling_qwen3_5), "the native kernels are not built"
    batch = {name: one.transpose(0, 1) for name, one in {"query": query, "key": key, "value": value, **gates}.items()}

    def native(turn: int) -> None:
        with recurrences.over(recurrences.StatesInBlocks(memory[turn], tables, chunks, {"recurrent": places})):
            modeling_qwen3_5.torch_chunk_gated_delta_rule(query, key, value, **gates, use_qk_l2norm_in_kernel=True)

    def torchs(turn: int) -> None:
        _, states = modeling_qwen3_5.torch_recurrent_gated_delta_rule(
            **batch, initial_state=dense[turn], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        dense[turn].copy_(states)

    def scaled(turn: int) -> None:
        dense[turn].mul_(0.999)

    times = {native: [], torchs: [], scaled: []}  # type: ignore[var-annotated]
    for turn in range(8 * copies):
        for number, (run, seconds) in enumerate(times.items()):  # each over states that no cache has from the others
            seconds.append(cpu_s(lambda run=run, at=turn + number * copies // 3: run(at % copies)))  # type: ignore[misc]
    name, of_native = f"gated delta rule, {ROWS} rows, {HEADS} heads", times[native]
    return [
        median(name, [seconds * 1e3 for seconds in of_native], "ms"),
        *(
            median(
                f"{other} / gated delta rule", [a / b for a, b in zip(times[run], of_native, strict=True)], "x", least, "higher"
            )
            for run, other, least in ((torchs, "torch's own", 20), (scaled, "x *= a over the same states", 0.9))
        ),
    ]


def cpu_s(run: Callable[[], object]) -> float:
    """CPU seconds of this process for a call."""
    before = time.process_time()
    run()
    return time.process_time() - before


def sizes() -> list[Figure]:
    """Bytes of a state in whole blocks, of those that it has."""
    figures = []
    for name, layers, heads, channels, kv_heads in (
        ("0.8B", 24, 16, 6144, 2),
        ("4B", 32, 32, 8192, 4),
        ("27B", 64, 48, 10240, 4),
    ):
        states = (StateShape("conv", 0, (channels, 4), "bfloat16"), StateShape("recurrent", 0, (heads, DIM, DIM), "float32"))
        of = [LayerShape(kv_heads, 256, 256) if i % 4 == 3 else LayerShape(0, 0, 0, states=states) for i in range(layers)]
        geometry = Geometry(tuple(of), BLOCK, "bfloat16")
        share = geometry.state_blocks * geometry.block_stride / geometry.state_bytes
        figures.append(Figure(f"bytes of a state of Qwen3.5-{name}, of those needed", share, "x", 1.02))
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--layers", type=whole, default=8)
    parser.add_argument("--hidden", type=whole, default=1024)
    parser.add_argument("--tokens", type=whole, default=16, help="of each sequence, from 2 on (default %(default)s)")
    parser.add_argument("--copies", type=whole, default=8, help="of a layer's states, for kernels (default %(default)s)")
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    figures = [*sizes(), *kernels(args.copies)]
    figures += speed(args.layers, args.hidden, max(2, args.tokens), args.rounds, rng)
    report("Models with recurrent layers", figures, args.seed, args.json)


if __name__ == "__main__":
    main()
