"""Engines over quantized K and V: disturbed requests get the tokens of undisturbed ones; wrong arguments are refused."""

from __future__ import annotations

import re

import pytest
from quantized import check_disturbed

from pagetide import LLM
from pagetide.engine.config import EngineConfig
from pagetide.engine.errors import ConfigError


def test_disturbed_requests_get_the_same_tokens() -> None:
    check_disturbed("int8", "host tier")


def test_an_unknown_type_is_refused_and_left_out_it_is_the_models_own() -> None:
    for wrong in ("int4", "float8", "bfloat16", 8, True):
        with pytest.raises(ConfigError, match=f"kv_cache_dtype must be one of auto, int8, fp8, got {wrong!r}"):
            EngineConfig.resolve("demo", kv_cache_dtype=wrong)
    for own in ({}, {"kv_cache_dtype": None}):
        assert EngineConfig.resolve("demo", **own).kv_cache_dtype == "auto"


def test_a_backend_that_reads_no_scales_is_refused() -> None:
    said = "attention='native' cannot serve this model: it takes no K and V in float8_e4m3fn with scales; use 'auto'"
    with pytest.raises(ConfigError, match=re.escape(said)):
        LLM("demo", device="cpu", kv_memory="4MiB", share=False, attention="native", kv_cache_dtype="fp8")
