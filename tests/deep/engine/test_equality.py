"""The engine gives the tokens and logits of plain transformers: other families, windows of other sizes, quantized K and V."""

from __future__ import annotations

import equality
import pytest
import quantized
import windows
from families import FAMILIES

OTHERS = sorted(FAMILIES.keys() - {"llama"})
WINDOWS = [*((name, 8) for name in sorted(windows.MODELS)), ("gemma3_text", 24), ("llama4_text", 24), ("gpt_oss", 64)]
QUANTIZED = [*(("int8", case) for case in quantized.CASES), ("fp8", "chunks"), ("fp8", "host tier")]


@pytest.mark.parametrize("name", OTHERS)
def test_same_tokens_as_plain_transformers(name: str) -> None:
    equality.check_tokens(name, [(4, None, 12, 0.3), (16, 7, 12, 0.4), (100, None, 12, 0.5)])


def test_same_tokens_with_one_seat_and_in_few() -> None:
    cases = [(16, None, 1, 0.0), (100, 7, 3, 0.5), (256, None, 3, 0.5), (4, None, 12, 0.3)]
    equality.check_tokens("llama", cases)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "gpt2", "gpt_oss", "deepseek_v3"])
def test_same_logits_behind_chunks_and_resumes(name: str) -> None:
    equality.check_logits(name)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_oss", "deepseek_v3"])
def test_same_tokens_and_logits_behind_cached_prefixes(name: str) -> None:
    equality.check_prefixes(name, [(4, 7, 0.5), (100, None, 0.7)])


@pytest.mark.parametrize(("name", "window"), WINDOWS)
def test_same_tokens_of_windows_in_chunks_of_any_size(name: str, window: int) -> None:
    windows.check_chunks(name, window, [(None, 4), (7, 4), (3, 8), (2 * window, 2)])


@pytest.mark.parametrize(("name", "window"), WINDOWS)
def test_same_tokens_of_windows_behind_preemptions_prefixes_and_swaps(name: str, window: int) -> None:
    windows.check_disturbed(name, window, [(1.05, 0), (1.05, 400), (4, 0)])


@pytest.mark.parametrize(("kv_cache_dtype", "case"), QUANTIZED)
def test_disturbed_requests_over_quantized_kv_get_the_same_tokens(kv_cache_dtype: str, case: str) -> None:
    quantized.check_disturbed(kv_cache_dtype, case)
