"""The memory of a model on devices that are not here, from its configuration alone. Imports no torch.

By the arithmetic of `memory_plan`, as for a CUDA device that is here. What is assumed instead of measured: CONTEXT_BYTES.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...cache.geometry import ITEM_BYTES, Geometry
from ...common.units import GIB, MIB, format_bytes, parse_bytes
from ..config import EngineConfig
from ..errors import ConfigError, ModelNotFound, NotEnoughMemory
from ..loading.gguf.file import is_gguf
from ..loading.models import IN_CACHE, fetch_command
from ..loading.weight_files import find_weights, stored_bytes, stored_twice
from ..loading.written_model import WrittenModel
from .memory_plan import MemoryPlan, check_context, cuda_reserve_bytes, geometry_of, group_lines, model_length, plan_pool

CONTEXT_BYTES = 512 * MIB  # of a device: CUDA's context and modules, before anything is allocated
TABLE_GIB = (8, 12, 16, 24, 48, 80)
# MiB of cards, as NVIDIA's driver reports them.
CARDS: Mapping[str, int] = {
    "rtx3060": 12_288, "rtx3080": 10_240, "rtx3090": 24_576, "rtx4060": 8188, "rtx4070": 12_282, "rtx4080": 16_376,
    "rtx4090": 24_564, "rtx5070": 12_227, "rtx5080": 16_303, "rtx5090": 32_607, "rtxa6000": 49_140, "t4": 15_360,
    "v100": 16_384, "l4": 23_034, "l40s": 46_068, "a10": 23_028, "a100-40gb": 40_960, "a100-80gb": 81_920, "h100": 81_559,
    "h200": 143_771, "b200": 183_359,
}  # fmt: skip


def card_bytes(name: str) -> int | None:
    """The memory of a card, by its name in CARDS; spaces, "-" and case do not count. None for an unknown one."""
    plain = {_plain(known): amount for known, amount in CARDS.items()}
    amount = plain.get(_plain(name))
    return None if amount is None else amount * MIB


def plan_device(device: str | None, memory: str | None) -> tuple[str | None, int | None]:
    """(name, bytes) of the device that is planned for but not here; (None, None) if it is here.

    Args:
        device: "cpu", the name of a card, or a device of this machine.
        memory: The memory of a device without a name, as `parse_bytes` reads it.

    Raises ConfigError.
    """
    card = None if device is None else card_bytes(device)
    if card is None and device is not None and device.partition(":")[0] not in ("auto", "cpu", "cuda"):
        known = ", ".join(CARDS)
        raise ConfigError(
            f"--device: {device!r:.80} is neither auto, cpu, cuda or cuda:N, nor one of {known}; or give --memory"
        )
    if memory is None:
        return (None, None) if card is None else (device, card)
    if card is not None:
        raise ConfigError(f"{device} has {format_bytes(card)}: leave out --memory or --device")
    try:
        num_bytes = parse_bytes(memory)
    except ValueError as error:
        raise ConfigError(f"--memory: {error}") from error
    return "cpu" if device == "cpu" else f"a device of {format_bytes(num_bytes)}", num_bytes


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "").replace("_", "").removeprefix("nvidia").removeprefix("geforce")


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a model takes of any CUDA device, and plans for some sizes of devices."""

    model: WrittenModel
    dtype: str
    source: str  # of the number of parameters
    notes: tuple[str, ...]
    weights_bytes: int
    reserve_bytes: int
    geometry: Geometry
    context: int  # tokens of the counted sequences
    plan: MemoryPlan | None  # of the device that was asked for
    table: Mapping[int, MemoryPlan | None]  # by bytes of the device; None: no room for weights and a block

    @property
    def sequence_bytes(self) -> int:
        """Bytes of the blocks of a sequence of `context` tokens."""
        return self.geometry.blocks_for_tokens(self.context) * self.geometry.block_stride

    def weights_by_form(self) -> dict[str, int]:
        """Bytes of the weights by type; int8 and int4 are of linear layers, on a CPU, beside all else in `dtype`."""
        plain = {name: self.model.num_parameters * ITEM_BYTES[name] for name in ("bfloat16", "float32")}
        itemsize = ITEM_BYTES[self.dtype]
        return plain | {
            "int8": self.model.quantized_bytes("int8", itemsize),
            "int4": self.model.quantized_bytes("int4", itemsize),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "model": self.model.spec.name,
            "estimated": True,
            "source": self.source,
            "notes": list(self.notes),
            "dtype": self.dtype,
            "parameters": self.model.num_parameters,
            "weights_bytes": self.weights_bytes,
            "weights_bytes_by_form": self.weights_by_form(),
            "reserve_bytes": self.reserve_bytes,
            "kv_bytes_per_token": self.geometry.kv_bytes_per_token,
            "context": self.context,
            "sequence_bytes": self.sequence_bytes,
            "plan": None if self.plan is None else self.plan.to_dict(),
            "table": [
                {"memory_bytes": memory, "plan": None if plan is None else plan.to_dict()}
                for memory, plan in self.table.items()
            ],
        }

    def describe(self) -> str:
        """The estimate as lines of text."""
        if self.plan is not None:
            lines = [
                self.plan.describe(),
                f"counted from {self.source}; driver and CUDA take {format_bytes(CONTEXT_BYTES)} more",
            ]
        else:
            forms = {name: format_bytes(amount) for name, amount in self.weights_by_form().items()}
            rows = (
                ("model", f"{self.model.spec.name} as {self.dtype}"),
                ("parameters", f"{self.model.num_parameters:,}, from {self.source}"),
                ("weights", format_bytes(self.weights_bytes)),
                (
                    "... in other forms",
                    f"{forms['float32']} in float32; on a CPU {forms['int8']} in int8, {forms['int4']} in int4",
                ),
                ("working reserve", format_bytes(self.reserve_bytes)),
                ("to sleep", f"{format_bytes(self.weights_bytes)} of host memory, in a server"),
                ("KV per token", f"{self.geometry.kv_bytes_per_token:,} bytes in {self.geometry.dtype}"),
                *group_lines(self.geometry),
                (f"a sequence of {self.context:,}", format_bytes(self.sequence_bytes)),
            )
            width = max(len(name) for name, _ in rows)
            lines = [f"{name:<{width}}  {value}" for name, value in rows]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes), "", *self._table()])

    def _table(self) -> Iterator[str]:
        """The plans of TABLE_GIB as lines."""
        rows: list[tuple[str, ...]] = [("device", "KV pool", "tokens", f"sequences of {self.context:,}", "... in int8 or fp8")]
        for memory, plan in self.table.items():
            name = f"{memory // GIB} GB"
            if plan is None:
                rows.append((name, "no room", "", "", ""))
                continue
            scaled = plan.with_kv_cache_dtype("int8")
            fits = (plan.tokens_that_fit, plan.sequences_that_fit, scaled.sequences_that_fit)
            rows.append((name, format_bytes(plan.kv_bytes), *(f"{number:,}" for number in fits)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            yield "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def estimate(
    config: EngineConfig,
    file: Path,
    *,
    device: str = "cuda",
    memory_bytes: int | None = None,
    context: int | None = None,
    model: WrittenModel | None = None,
) -> Estimate:
    """The estimate for the model of a configuration file, whether its weights are here or not.

    Args:
        model: That of the file; by default it is read from there, without torch.
        device: The name of the device that has `memory_bytes`.
        memory_bytes: All memory of the device that is asked for; None: only the table.
        context: Tokens of the sequences that are counted; None is the longest that the engine takes.

    Raises:
        UnsupportedModel: the model's sizes cannot be told from its configuration.
        NotEnoughMemory: the device has no room for weights and a block.
        ConfigError: the settings are of a CPU, or of a model that is divided.
    """
    if config.quantization is not None or config.devices or config.device.startswith("cpu"):
        raise ConfigError(
            "an estimate is of one CUDA device, without quantized weights: leave out --quantization, --tensor-parallel-size, "
            "--devices and --device cpu, or install torch, which counts these"
        )
    model = WrittenModel.read(config.model, file) if model is None else model
    check_context(config, model, context)
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    kept = [*model.kept_linears()]
    if kept and config.dtype == "auto" and dtype == "float16":
        dtype = "bfloat16"  # which the kernels take
    packed: Counter[str] = Counter()
    for form, _, num_bytes in kept if dtype == "bfloat16" else ():
        packed[form] += num_bytes
    source, notes, weights_bytes = _counted(model, dtype, file, packed)
    if packed:
        weights_bytes += packed.total() - sum(elements for _, elements, _ in kept) * ITEM_BYTES[dtype]
    geometry = geometry_of(config, model, dtype, on_cpu=False, found=model.found)
    reserve_bytes = cuda_reserve_bytes(config, model, geometry, dtype)

    def planned(name: str, memory: int) -> MemoryPlan:
        free_bytes = max(0, memory - CONTEXT_BYTES)
        if weights_bytes > free_bytes:
            what = f"the weights of {model.spec.name} as {dtype} on {name}"
            raise NotEnoughMemory(weights_bytes, free_bytes, what, "take a smaller model or a larger device")
        return plan_pool(
            config, model, geometry, device=name, dtype=dtype, free_bytes=free_bytes, total_bytes=free_bytes,
            weights_bytes=weights_bytes, reserve_bytes=reserve_bytes, context=context, packed_bytes=packed,
            stored_as=model.stored_as if packed else None, host_copy_bytes=weights_bytes * config.sleeps,
        )  # fmt: skip

    table: dict[int, MemoryPlan | None] = {}
    for memory in (size * GIB for size in TABLE_GIB):
        try:
            table[memory] = planned(f"{memory // GIB} GB", memory)
        except NotEnoughMemory:
            table[memory] = None
    plan = None if memory_bytes is None else planned(device, memory_bytes)
    counted = context or model_length(config, model)
    return Estimate(model, dtype, source, notes, weights_bytes, reserve_bytes, geometry, counted, plan, table)


def _counted(model: WrittenModel, dtype: str, file: Path, packed: Mapping[str, int]) -> tuple[str, tuple[str, ...], int]:
    """(source, notes, bytes of the weights in `dtype`): by the headers of weight files if these have what is counted alone.

    `packed`: bytes of what stays as it is stored, by form.
    """
    counted, folder = model.num_parameters, file if is_gguf(file) else file.parent
    if model.stored_as is not None:
        stored = stored_bytes(folder)
        files = "" if stored is None else f", in files of {format_bytes(stored)}"
        note = f"the weights are stored in {model.stored_as}{files}; here they count as {dtype}"
        if packed:
            sizes = ", ".join(f"{format_bytes(size)} in {form}" for form, size in packed.items())
            note += f", and {sizes}: a card without torch's kernels for these takes more"
        return file.name, (note,), counted * ITEM_BYTES[dtype]
    try:
        weights = find_weights(folder) if file == model.spec.config_file else None
    except ModelNotFound:
        cached = model.spec.source == IN_CACHE
        size = format_bytes(counted * ITEM_BYTES[model.dtype])
        note = f"the weights are not here; fetch them, {size} or more, with: {fetch_command(model.spec.name)}"
        return file.name, (note,) if cached else (), counted * ITEM_BYTES[dtype]
    tensors = weights.tensors() if weights is not None and weights.safetensors else ()
    twice = stored_twice(tensors, tied=bool(getattr(model.text_config, "tie_word_embeddings", False)))
    there = sum(tensor.num_elements for tensor in tensors if tensor is not twice)
    if there == counted:
        return "the headers of its weight files", (), counted * ITEM_BYTES[dtype]
    note = f"the weight files have {there:,} parameters; those of the text decoder alone count"
    return file.name, (note,) if there else (), counted * ITEM_BYTES[dtype]
