"""Converts a model in transformers' format for OpenVINO. Runs in OpenVINO's environment.

    python -m benchmarks.peers.convert_openvino MODEL

Writes MODEL/openvino, with weights in float32: the engine converts them to its type of computation.
"""

from __future__ import annotations

import sys

from optimum.exporters.openvino import export_from_model
from transformers import AutoModelForCausalLM


def convert(folder: str) -> None:
    """Export the model with its KV cache as a state."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    export_from_model(model, output=folder + "/openvino", task="text-generation-with-past", stateful=True, preprocessors=[])


if __name__ == "__main__":
    convert(sys.argv[1])
