"""Converts a model in transformers' format for OpenVINO. Runs in OpenVINO's environment.

    python -m benchmarks.peers.convert_openvino MODEL TYPE...

Writes MODEL/openvino, with weights in float32, which the engine converts to float32 or bfloat16 as it computes; and
MODEL/openvino-int8 and MODEL/openvino-int4, as nncf compresses weights by default, but int4 in all layers and in groups of 128.
"""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import Path
from typing import Any

import nncf
import openvino
from optimum.exporters.openvino import export_from_model, model_configs
from optimum.exporters.openvino.model_patcher import Qwen3_5ModelPatcher
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

MODES = {
    "int8": {"mode": nncf.CompressWeightsMode.INT8_ASYM},
    "int4": {"mode": nncf.CompressWeightsMode.INT4_ASYM, "group_size": 128, "ratio": 1.0},
}


class Qwen3_5DynamicCache:
    """What optimum-intel derives from a class of transformers 5.2, the only one with which it exports Qwen3.5."""

    is_compileable = False

    def __init__(self, config: Any) -> None:
        self.layer_types = config.layer_types
        self.transformer_layers = [index for index, kind in enumerate(self.layer_types) if kind == "full_attention"]

    def get_mask_sizes(self, query_length: Any, layer: int) -> tuple[Any, int]:
        """Tokens with those before, and where they begin."""
        return query_length + self.get_seq_length(layer), 0  # type: ignore[attr-defined]


class WithPositions(Qwen3_5ModelPatcher):  # type: ignore[misc]
    """Exports Qwen3.5 with positions that are given: those that it counts are wrong in continuous batching."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        original, patched = self.model_orig_forward, self.patched_forward

        @functools.wraps(patched)
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(patched).bind(*args, **kwargs).arguments
            self.model_orig_forward = functools.partial(original, position_ids=given["position_ids"])
            return patched(*args, **kwargs)

        self.patched_forward = self.orig_forward = forward


def allow_qwen3_5() -> None:
    """Let Qwen3.5 be exported with transformers 5.5."""
    modeling_qwen3_5.Qwen3_5DynamicCache = Qwen3_5DynamicCache
    modeling_qwen3_5.Qwen3_5TextModel._update_linear_attn_mask = lambda *args: None  # as with states that are there
    model_configs.Qwen3_5TextOpenVINOConfig.MAX_TRANSFORMERS_VERSION = "5.5.99"
    model_configs.Qwen3_5TextOpenVINOConfig._MODEL_PATCHER = WithPositions


def convert(folder: str) -> None:
    """Export the model with its KV cache as a state."""
    allow_qwen3_5()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    export_from_model(model, output=folder + "/openvino", task="text-generation-with-past", stateful=True, preprocessors=[])


def compress(folder: str, dtype: str) -> None:
    """Write the exported model with smaller weights."""
    model = nncf.compress_weights(openvino.Core().read_model(folder + "/openvino/openvino_model.xml"), **MODES[dtype])
    Path(f"{folder}/openvino-{dtype}").mkdir(exist_ok=True)
    openvino.save_model(model, f"{folder}/openvino-{dtype}/openvino_model.xml")


if __name__ == "__main__":
    if not Path(sys.argv[1], "openvino", "openvino_model.xml").exists():
        convert(sys.argv[1])
    for each in sys.argv[2:]:
        if each in MODES and not Path(f"{sys.argv[1]}/openvino-{each}/openvino_model.xml").exists():
            compress(sys.argv[1], each)
