"""An estimate of how fast a CPU decodes: the bytes of weights that a token reads, at the rates that `pagetide doctor` measured.

    $XDG_CACHE_HOME/pagetide/product-rates.json     ~/.cache if the variable is not set or not absolute

Attention, norms and everything between products take more time, so that it is a bound. Rates of other kernels, or of another
number of threads, are not used.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ... import native
from ...common.state_dir import keep_json, user_dir
from ...common.units import format_bytes
from ..layers import LEAST_QUANTIZED, Quantization, weight_bytes
from ..loading.checkpoint import Checkpoint
from ..loading.model_config import experts_per_token
from ..loading.weight_files import OUTPUT_HEADS, stored_twice
from ..process.cpu_threads import own_threads

log = logging.getLogger(__name__)

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names of the number of experts in configurations


@dataclass(frozen=True, slots=True)
class DecodeRate:
    """What a token of one sequence reads, and the time that the products with it take at least."""

    bytes_per_token: int
    seconds: float
    measured: str  # the day

    def describe(self) -> str:
        """In one line."""
        size = format_bytes(self.bytes_per_token)
        return (
            f"estimate: at most {1 / self.seconds:.3g} tokens/s of one sequence; each reads {size} of weights, at the rates "
            f"that pagetide doctor measured on {self.measured}"
        )


def rates_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Where rates are kept. Need not exist."""
    return user_dir("cache", environ) / "product-rates.json"


def record(rates: Mapping[str, float], file: Path | None = None) -> None:
    """Keep measured bytes per second of products by the form of their weights. Where that cannot be, only the log says so."""
    file = file or rates_file()
    try:
        keep_json(file, _machine() | {"at": time.strftime("%Y-%m-%d"), "bytes_per_s": dict(rates)})
    except OSError as error:
        log.info("rates of products are not kept in %s: %s", file, error)


def _recorded(file: Path) -> tuple[Mapping[str, float], str] | None:
    """The rates of this machine, and the day; None if there are none."""
    try:
        kept = json.loads(file.read_text("utf-8"))
        rates = {str(name): float(rate) for name, rate in kept["bytes_per_s"].items() if 0 < float(rate) < math.inf}
        return (rates, str(kept["at"])[:10]) if {name: kept[name] for name in _machine()} == _machine() else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.debug("the rates of products in %s are not used: %r", file, error)
        return None


def _machine() -> dict[str, Any]:
    return {"instructions": native.instructions(), "threads": own_threads()}


def decode_rate(
    checkpoint: Checkpoint, dtype: torch.dtype, quantization: Quantization | None = None, file: Path | None = None
) -> DecodeRate | None:
    """The estimate for a model on this CPU, where the context is short; None if rates of its forms were not measured here.

    Reads no weights.
    """
    recorded = _recorded(file or rates_file())
    if recorded is None or native.instructions() is None:
        return None
    (rates, day), sizes = recorded, _read_bytes(checkpoint, dtype, quantization)
    if not sizes or not sizes.keys() <= rates.keys():
        return None
    return DecodeRate(round(sum(sizes.values())), sum(size / rates[form] for form, size in sizes.items()), day)


def _read_bytes(checkpoint: Checkpoint, dtype: torch.dtype, quantization: Quantization | None) -> dict[str, float]:
    """Bytes that a token reads, by form: all weights, but of an embedding a row, and of experts those that it is routed to."""
    text, plain = checkpoint.text_config, str(dtype).removeprefix("torch.")
    tied = bool(getattr(text, "tie_word_embeddings", False))
    twice = stored_twice(checkpoint.tensors, tied=tied)
    share, sizes = _share_of_experts(text), dict[str, float]()
    for one in checkpoint.tensors:
        embeds = "emb" in one.name or "wte" in one.name
        if one is twice or (embeds and not tied):
            continue
        form, size = plain, float(one.num_elements * dtype.itemsize)
        if (stored := checkpoint.stored.get(one.name)) is not None and stored.packs:
            form, size = stored.form, stored.packed_bytes
        elif quantization is not None and len(one.shape) == 2 and one.num_elements >= LEAST_QUANTIZED:
            bits: Quantization = "int8" if embeds or one.name.endswith(OUTPUT_HEADS) else quantization
            form, size = bits, weight_bytes(*one.shape, bits)
        sizes[form] = sizes.get(form, 0) + size * (share if ".experts." in one.name else 1)
    return sizes


def _share_of_experts(text: Any) -> float:
    """Of a mixture's experts, those that a token is routed to."""
    count = next((one for name in _COUNTS if isinstance(one := getattr(text, name, None), int) and one > 0), 0)
    used = experts_per_token(text)
    return used / count if 0 < used <= count else 1.0
