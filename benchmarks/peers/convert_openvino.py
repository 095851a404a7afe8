"""Converts a model in transformers' format for OpenVINO. Runs in OpenVINO's environment.

    python -m benchmarks.peers.convert_openvino MODEL TYPE...

Writes MODEL/openvino, with weights in float32, which the engine converts to float32 or bfloat16 as it computes; and
MODEL/openvino-int8 and MODEL/openvino-int4, as nncf compresses weights by default, but int4 in all layers and in groups of 128.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nncf
import openvino
from optimum.exporters.openvino import export_from_model
from transformers import AutoModelForCausalLM

MODES = {
    "int8": {"mode": nncf.CompressWeightsMode.INT8_ASYM},
    "int4": {"mode": nncf.CompressWeightsMode.INT4_ASYM, "group_size": 128, "ratio": 1.0},
}


def convert(folder: str) -> None:
    """Export the model with its KV cache as a state."""
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
