"""How a model is divided over shards: transformers' tensor-parallel plan, read as data, becomes a cut for each parameter.

    columns     q, k, v, gate, up: each shard has some of the outputs           no collective
    rows        o, down: each shard has some of the inputs                      its outputs are summed over the shards
    experts     of a mixture: cut like gate, up and down                        the output of all of them is summed
    vocabulary  embedding: some of the rows                                     rows of others are zero, then summed
                output head: some of the columns                                columns are gathered

Query heads are divided, and the heads of K and V with them; where there are fewer of these than shards, several shards have the
same one. What the plan leaves whole, such as latent attention, every shard has and computes; so it does layers with states.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from ...cache.geometry import Geometry, LayerShape
from ..errors import UnsupportedModel
from .checkpoint import Checkpoint
from .meta_models import meta_model
from .stored_formats import StoredWeight
from .weight_files import StoredTensor

COLUMNS = {"colwise"}
ROWS = {"rowwise"}
PACKED = {"packed_colwise"}
PACKED_ROWS = {"packed_rowwise"}  # of experts with transposed weights, in which "colwise" is down's
GATHERED = {"colwise_gather_output", "colwise_rep"}
SPLIT_INPUT = {"rowwise_split_input", "rowwise_rep"}
EXPERTS = {"moe_tp_experts"}
WHOLE = {
    "replicate",
    "replicated_with_grad_allreduce",
    "mla_kv_a_proj",
    "local_params",
    "embedding_rowwise",
    "embedding_colwise",
    "sequence_parallel",
    "all_reduce",
}
_EXPERT_LEAF = re.compile(r"\.experts\.\d+\.(?:(gate_proj|up_proj|w1|w3)|(down_proj|w2))\.weight$")
_UNIT = 8  # elements: 16 bytes of 16-bit types
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a tensor each shard has: `ranges[shard]` of dimension `dim`, one behind the other."""

    dim: int
    ranges: tuple[tuple[Range, ...], ...]

    @classmethod
    def exact(cls, dim: int, length: int, size: int) -> Cut:
        """Equal parts of a length that can be divided: of heads."""
        part = length // size
        return cls(dim, tuple(((rank * part, (rank + 1) * part),) for rank in range(size)))

    @classmethod
    def even(cls, dim: int, length: int, size: int, parts: int = 1, unit: int = 1) -> Cut:
        """Equal parts, up to a few elements: borders are multiples of `unit`, or of 8, which kernels ask for, where that is
        possible.

        With `parts` 2, each half of the dimension is cut.
        """
        part = length // parts
        unit = next((one for one in (math.lcm(unit, _UNIT), _UNIT) if part % one == 0 and part // one >= size), 1)
        borders = [rank * (part // unit) // size * unit for rank in range(size + 1)]
        return cls(dim, tuple(tuple((p * part + b, p * part + e) for p in range(parts)) for b, e in pairwise(borders)))

    def width(self, rank: int) -> int:
        """The length of the dimension on shard `rank`."""
        return sum(end - begin for begin, end in self.ranges[rank])

    def shape(self, whole: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape on shard `rank`."""
        shape = list(whole)
        shape[self.dim] = self.width(rank)
        return tuple(shape)

    def of(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of shard `rank`: a view, if it is in one piece."""
        pieces = [tensor.narrow(self.dim, begin, end - begin) for begin, end in self.ranges[rank]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """The cuts of one model over `size` shards.

    Attributes:
        cuts: Of parameters, by name; others are whole on every shard.
        reduced: Modules with outputs that are sums over the shards: linear layers cut by rows, and experts.
        embedding: Name of the input embedding, if it is cut.
        head: Name of the output head, if it is cut.
        kv_heads: By layer, the heads of K and V on each shard.
        kv_groups: Query heads of each head of K and V on a shard, by attention module, where they are others than in the whole
            model.
        whole_layers: Layers with attention, or with states, that every shard computes.
        parameters: (elements, bytes of an element, whether of floating point) of each parameter, by name.
        unit: Inputs of cut layers begin at multiples of this where that is possible: of groups of quantized weights.
        stored: By name of a tensor in the files, the parameter that it becomes, where that has another name.
    """

    size: int
    cuts: Mapping[str, Cut]
    reduced: tuple[str, ...]
    embedding: str | None
    head: str | None
    kv_heads: tuple[int, ...]
    kv_groups: Mapping[str, int]
    whole_layers: tuple[int, ...]
    parameters: Mapping[str, tuple[int, int, bool]]
    unit: int
    stored: Mapping[str, str]

    @classmethod
    def of(cls, checkpoint: Checkpoint, size: int, layers: tuple[LayerShape, ...]) -> Division:
        """The division of the checkpoint's model. Reads no weights. `layers` are the whole model's.

        Raises UnsupportedModel if its parts cannot be divided so that each shard computes what it should.
        """
        if not checkpoint.weights.safetensors and not checkpoint.weights.gguf:
            raise UnsupportedModel(
                f"{checkpoint.spec.name} cannot be divided over {size} shards: its weights are pickled, and parts of such "
                "a file cannot be read; save it as safetensors, by save_pretrained()"
            )
        if checkpoint.by_quantizer:
            raise UnsupportedModel(
                f"{checkpoint.spec.name} cannot be divided over {size} shards: its weights are stored in a quantized form that "
                "only a library reads; take the checkpoint it was made of, with quantization='int8' if need be"
            )
        model, unit = meta_model(checkpoint), math.lcm(1, *(one.inputs_together for one in checkpoint.stored.values()))
        stored = stored_names(model, [tensor.name for tensor in checkpoint.tensors])
        division = replace(_Divider(model, size, layers, checkpoint.spec.name, unit).divide(), stored=stored)
        for rank in range(size):
            division.stored_parts(checkpoint, rank)
        return division

    def stored_parts(self, checkpoint: Checkpoint, rank: int) -> dict[str, StoredWeight]:
        """What shard `rank` reads of the checkpoint's quantized weights. Raises UnsupportedModel if a cut is within a group."""
        parts = {}
        for name, one in checkpoint.stored.items():
            cut = self.cut_of(name, one.plain_shape)
            try:
                parts[name] = one if cut is None else one.part(cut.dim, cut.ranges[rank])
            except ValueError as error:
                raise UnsupportedModel(
                    f"{checkpoint.spec.name} cannot be divided over {self.size} shards: the quantized weight {name} cannot, "
                    f"since {error}; take another number of shards, one device, or the checkpoint that it was made of"
                ) from error
        return parts

    def part(self, name: str, rank: int) -> int:
        """Elements of a parameter on shard `rank`."""
        elements, _, _ = self.parameters[name]
        if (cut := self.cuts.get(name)) is None:
            return elements
        whole = sum(cut.width(r) for r in range(self.size))
        length = max(end for ranges in cut.ranges for _, end in ranges)
        return elements // length * cut.width(rank) if whole else 0

    def weights_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weights of the largest shard, floating-point ones as `dtype`."""
        sizes = {n: dtype.itemsize if floats else itemsize for n, (_, itemsize, floats) in self.parameters.items()}
        return max(sum(self.part(name, rank) * sizes[name] for name in sizes) for rank in range(self.size))

    def replicated_bytes(self, dtype: torch.dtype) -> int:
        """Those bytes of `weights_bytes` that every shard has."""
        return sum(
            elements * (dtype.itemsize if floats else itemsize)
            for name, (elements, itemsize, floats) in self.parameters.items()
            if name not in self.cuts
        )

    def geometry(self, geometry: Geometry) -> Geometry:
        """The layout of one shard's blocks, of the whole model's."""
        layers = tuple(replace(layer, num_kv_heads=heads) for layer, heads in zip(geometry.layers, self.kv_heads, strict=True))
        return replace(geometry, layers=layers)

    def cut_of(self, name: str, shape: Sequence[int]) -> Cut | None:
        """The cut of a tensor of the checkpoint: a parameter, or a part of one expert, of which transformers joins all."""
        name = self.stored.get(name, name)
        if name in self.cuts or name in self.parameters:  # of tied parameters only one is among these
            return self.cuts.get(name)
        if (expert := _EXPERT_LEAF.search(name)) is not None and any(".experts." in one for one in self.cuts):
            dim = 0 if expert.group(1) else 1
            return Cut.even(dim, shape[dim], self.size, unit=self.unit)
        return None

    def largest_part(self, tensor: StoredTensor) -> StoredTensor:
        """What the shard with most of a checkpoint's tensor has of it."""
        cut = self.cut_of(tensor.name, tensor.shape)
        if cut is None or not tensor.num_elements:
            return tensor
        part = replace(tensor, shape=cut.shape(tensor.shape, max(range(self.size), key=cut.width)))
        return replace(part, num_bytes=tensor.num_bytes // tensor.num_elements * part.num_elements)

    def describe(self) -> str:
        """What is not divided, as a clause; empty if that is only little vectors."""
        if not self.whole_layers:
            return ""
        number = len(self.whole_layers)
        return f"attention or states of {number} layers are not divided: every shard holds and computes all of them"


def stored_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """The new names of those tensors in files that transformers renames as it loads them into `model`, or with names that
    lack the base model's prefix.
    """
    renamings = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
    prefix, parameters = (f"{model.base_model_prefix}.", {name for name, _ in model.named_parameters(remove_duplicate=False)})
    found = {}
    for name in names:
        renamed = name
        for one in renamings:
            renamed, _ = one.rename_source_key(renamed)
        candidates = (renamed, f"{prefix}{renamed}", renamed.removeprefix(prefix))
        renamed = next((one for one in candidates if one in parameters), renamed)
        if renamed != name:
            found[name] = renamed
    return found


class _Divider:
    """Finds the cuts of one model."""

    def __init__(self, model: Any, size: int, layers: tuple[LayerShape, ...], name: str, unit: int = 1) -> None:
        self.model = model
        self.unit = unit
        self.size = size
        self.layers = layers
        self.name = name
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.plan: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
        self.cuts: dict[str, Cut] = {}
        self.reduced: list[str] = []
        self.kv_heads = [layer.num_kv_heads for layer in layers]
        self.kv_groups: dict[str, int] = {}

    def divide(self) -> Division:
        """Raises UnsupportedModel."""
        if not any(style in COLUMNS | PACKED | GATHERED for style in self.plan.values()):
            raise self.refusal("transformers has no tensor-parallel plan for it")
        for style in self.plan.values():
            if style not in COLUMNS | ROWS | PACKED | PACKED_ROWS | GATHERED | SPLIT_INPUT | EXPERTS | WHOLE:
                raise self.refusal(f"transformers' plan for it asks for {style!r}, which is not known here")
        whole = self.attentions()
        for name, module in self.modules.items():
            if self.style(name) in EXPERTS:
                self.experts(name, module)
        for name, module in self.modules.items():
            if isinstance(module, nn.Linear) and f"{name}.weight" not in self.cuts:
                self.mlp_layer(name, module)
        self.pair_up()
        if not self.cuts:
            raise self.refusal(
                "transformers' plan for it divides none of its layers"
                + (", only sets of whole experts, and these are not divided here" if self.has_expert_plan else "")
            )
        embedding, head = self.vocabulary()
        parameters = {name: (one.numel(), one.itemsize, one.is_floating_point()) for name, one in self.model.named_parameters()}
        return Division(
            self.size, self.cuts, tuple(self.reduced), embedding, head, tuple(self.kv_heads), self.kv_groups, whole,
            parameters, self.unit, {},
        )  # fmt: skip

    @property
    def has_expert_plan(self) -> bool:
        """Whether transformers has a plan by which each device has some of the experts (gpt-oss)."""
        return bool(getattr(self.model.config.get_text_config(decoder=True), "base_model_ep_plan", None))

    def style(self, name: str) -> str | None:
        """The plan's style for a module or parameter."""
        return self.plan.get(name) or self.plan.get(_NUMBERS.sub("*", name))

    def refusal(self, why: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.name} ({type(self.model).__name__}) cannot be divided over {self.size} shards: {why}")

    def even(self, dim: int, length: int, parts: int = 1) -> Cut:
        return Cut.even(dim, length, self.size, parts, self.unit)

    # ---- attention

    def attentions(self) -> tuple[int, ...]:
        """Cut the projections of attention by heads. Returns the layers that stay whole, those with states among them."""
        whole = [index for index, layer in enumerate(self.layers) if layer.states]
        for name, module in self.modules.items():
            index = getattr(module, "layer_idx", None)
            if not isinstance(index, int) or not 0 <= index < len(self.layers) or not self.layers[index].num_kv_heads:
                continue
            linears = {child: one for child, one in module.named_children() if isinstance(one, nn.Linear)}
            if not linears:  # a layer that says its index too
                continue
            styles = {child: self.style(f"{name}.{child}") for child in linears}
            rows = [child for child, style in styles.items() if style in ROWS]
            columns = [child for child, style in styles.items() if style in COLUMNS]
            if rows and columns:
                self.attention(name, index, linears, columns, rows)
            else:
                whole.append(index)
        return tuple(sorted(set(whole)))

    def attention(self, name: str, index: int, linears: dict[str, nn.Linear], columns: list[str], rows: list[str]) -> None:
        layer = self.layers[index]
        # Of latents, which all heads share, V has another size.
        v_dim = self.model.config.get_text_config(decoder=True).v_head_dim if layer.v_in_k else layer.v_dim
        heads = linears[rows[0]].in_features // max(1, v_dim)
        self.check_heads(heads, layer.num_kv_heads, index)
        for child in columns:
            of = linears[child]
            dims = {"k": layer.k_dim, "v": layer.v_dim}
            kind = child[0] if child[:2] in ("k_", "v_") else None
            if kind is not None and of.out_features == layer.num_kv_heads * dims[kind]:
                cut = self.kv_cut(layer.num_kv_heads, dims[kind])
            elif of.out_features % heads == 0:
                cut = Cut.exact(0, of.out_features, self.size)
            else:
                raise self.refusal(f"{name}.{child} has {of.out_features} outputs, which are not those of {heads} heads")
            self.cut_linear(f"{name}.{child}", of, cut)
        for child in rows:
            self.cut_linear(f"{name}.{child}", linears[child], Cut.exact(1, linears[child].in_features, self.size))
        for parameter, own in self.modules[name].named_parameters(recurse=False):  # such as sinks, one for each head
            if own.shape[:1] == (heads,):
                self.cuts[f"{name}.{parameter}"] = Cut.exact(0, heads, self.size)
        self.kv_heads[index] = max(1, layer.num_kv_heads // self.size)
        if layer.num_kv_heads < self.size and not layer.v_in_k:
            self.kv_groups[name] = heads // self.size

    def check_heads(self, heads: int, kv_heads: int, index: int) -> None:
        """Raises UnsupportedModel if the heads cannot be divided."""
        fits = [n for n in range(2, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        if self.size not in fits:
            would = f"tensor_parallel_size could be {', '.join(map(str, fits))}" if fits else "it cannot be divided at all"
            raise self.refusal(
                f"layer {index} has {heads} query heads and {kv_heads} heads of K and V, and each shard needs as many query "
                f"heads as the others, and whole heads of K and V: {would}"
            )

    def kv_cut(self, heads: int, dim: int) -> Cut:
        """The heads of K or V: divided, or one of them on several shards."""
        if heads >= self.size:
            return Cut.exact(0, heads * dim, self.size)
        own = [rank * heads // self.size for rank in range(self.size)]
        return Cut(0, tuple(((head * dim, (head + 1) * dim),) for head in own))

    # ---- the rest

    def experts(self, name: str, module: nn.Module) -> None:
        """Cut the joined experts of a mixture by their width."""
        for child, of in module.named_parameters(recurse=False):
            style = self.style(f"{name}.{child}")
            if of.dim() != 3 and style in COLUMNS | PACKED | PACKED_ROWS | ROWS:
                raise self.refusal(f"{name}.{child} has shape {list(of.shape)}, and experts have three dimensions")
            if style in PACKED:
                self.cuts[f"{name}.{child}"] = self.even(1, of.shape[1], parts=2)
            elif style in PACKED_ROWS:
                self.cuts[f"{name}.{child}"] = self.even(2, of.shape[2], parts=2)
            elif style in COLUMNS:
                self.cuts[f"{name}.{child}"] = self.even(1, of.shape[1])
            elif style in ROWS:
                self.cuts[f"{name}.{child}"] = self.even(2, of.shape[2])
        if any(cut.startswith(f"{name}.") for cut in self.cuts):
            self.reduced.append(name)

    def mlp_layer(self, name: str, linear: nn.Linear) -> None:
        """Cut a linear layer outside of attention."""
        style = self.style(name)
        if style in COLUMNS:
            self.cut_linear(name, linear, self.even(0, linear.out_features))
        elif style in PACKED:
            self.cut_linear(name, linear, self.even(0, linear.out_features, parts=2))
        elif style in ROWS:
            self.cut_linear(name, linear, self.even(1, linear.in_features))

    def pair_up(self) -> None:
        """Cut joined gate and up projections, which the plan gathers because their halves are taken apart."""
        by_parent = defaultdict[str, dict[str, str]](dict)
        for name, module in self.modules.items():
            if isinstance(module, nn.Linear) and (style := self.style(name)) in GATHERED | SPLIT_INPUT:
                parent, _, child = name.rpartition(".")
                by_parent[parent]["up" if style in GATHERED else "down"] = name
                by_parent[parent][child] = name
        for found in by_parent.values():
            up, down = found.get("up"), found.get("down")
            if up is None or down is None or len(found) != 4:
                continue
            first, last = self.modules[up], self.modules[down]
            assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
            if first.out_features == 2 * last.in_features and "gate_up" in up:
                self.cut_linear(up, first, self.even(0, first.out_features, parts=2))
                self.cut_linear(down, last, self.even(1, last.in_features))

    def cut_linear(self, name: str, linear: nn.Linear, cut: Cut) -> None:
        self.cuts[f"{name}.weight"] = cut
        if cut.dim == 0 and linear.bias is not None:
            self.cuts[f"{name}.bias"] = cut
        if cut.dim == 1:
            self.reduced.append(name)

    def vocabulary(self) -> tuple[str | None, str | None]:
        """Cut embedding and output head, both or, if they are not tied, those that can be."""
        names = {module: name for name, module in self.modules.items()}
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        tied = head is not None and embedding.weight is head.weight
        divisible = {None} | GATHERED | COLUMNS  # older plans do not name the head
        by_head = type(head) is nn.Linear and self.style(names[head]) in divisible and len(head.weight) >= self.size
        by_rows = isinstance(embedding, nn.Embedding) and embedding.max_norm is None and len(embedding.weight) >= self.size
        if tied and not (by_head and by_rows):
            return None, None
        if by_rows:
            self.cuts[f"{names[embedding]}.weight"] = Cut.even(0, len(embedding.weight), self.size)
        if by_head:
            self.cut_linear(names[head], head, Cut.even(0, head.out_features, self.size))
        return names[embedding] if by_rows else None, names[head] if by_head else None
