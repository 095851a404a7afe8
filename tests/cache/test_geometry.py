"""Bytes and blocks both ways, the layout of a block, and shapes from configs; tests/deep has those of real models."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetide.cache.geometry import ALIGNMENT, Geometry, GeometryError, LayerShape, layer_shapes

MIB = 1 << 20

LLAMA_8B = Geometry((LayerShape(8, 128, 128),) * 32, 16, "bfloat16")
MIXED = Geometry(
    (
        LayerShape(2, 8, 8),
        LayerShape(1, 24, 16),  # K and V of different size
        LayerShape(2, 8, 8, shares=0),
        LayerShape(0, 0, 0),  # no attention
        LayerShape(3, 5, 7),  # pieces that end between two cache lines
        LayerShape(3, 5, 7, shares=4),
    ),
    4,
    "float16",
)

layers = st.lists(
    st.builds(LayerShape, st.integers(1, 9), st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=5
).map(tuple)
geometries = st.builds(
    Geometry,
    layers,
    st.integers(1, 300),
    st.sampled_from(["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]),
    st.sampled_from([64, 4096, 65536, 2 * MIB]),
    st.integers(0, 64 * MIB),
)


def test_a_known_model() -> None:
    assert LLAMA_8B.kv_bytes_per_token == 128 * 1024
    assert LLAMA_8B.block_bytes == LLAMA_8B.payload_bytes == LLAMA_8B.block_stride == 2 * MIB
    assert (LLAMA_8B.blocks_per_extent, LLAMA_8B.extent_bytes) == (16, 32 * MIB)
    assert LLAMA_8B.blocks_for_tokens(0) == 0
    assert LLAMA_8B.blocks_for_tokens(16) == 1
    assert LLAMA_8B.blocks_for_tokens(17) == 2
    assert LLAMA_8B.extents_for_blocks(17) == 2
    assert LLAMA_8B.bytes_for_blocks(17) == 64 * MIB
    assert LLAMA_8B.blocks_for_bytes(64 * MIB - 1) == 16
    assert LLAMA_8B.usable_blocks(16) == 15


def test_a_pool_of_few_blocks_has_small_extents() -> None:
    small = LLAMA_8B.with_extents(0)
    assert (small.blocks_per_extent, small.extent_bytes) == (1, 2 * MIB)
    assert LLAMA_8B.with_extents(9 * MIB).extent_bytes == 8 * MIB


@given(geometries)
def test_an_extent_is_whole_granules_of_whole_blocks(geometry: Geometry) -> None:
    assert geometry.block_stride % ALIGNMENT == 0
    assert geometry.extent_bytes == geometry.blocks_per_extent * geometry.block_stride
    assert geometry.extent_bytes % geometry.granule_bytes == 0
    assert geometry.block_bytes <= geometry.payload_bytes <= geometry.block_stride
    assert geometry.block_bytes == geometry.kv_bytes_per_token * geometry.block_size
    if geometry.blocks_per_extent > 1:
        assert geometry.extent_bytes <= max(geometry.extent_target_bytes, geometry.granule_bytes)


@given(st.integers(1, 300), st.integers(1, 200), st.sampled_from([64, 256, 4096, 16384]), st.integers(0, 1 << 17))
def test_no_number_of_blocks_would_waste_less(tokens: int, dim: int, granule: int, target: int) -> None:
    geometry = Geometry((LayerShape(1, dim, dim),), tokens, "float16", granule, target)

    def stride(blocks: int) -> int:
        """The least stride with which so many blocks make whole granules."""
        size = -(-geometry.payload_bytes // ALIGNMENT) * ALIGNMENT
        while blocks * size % granule:
            size += ALIGNMENT
        return size

    room = max(target, granule)
    counts = range(1, min(room // geometry.payload_bytes, 2 * granule // ALIGNMENT) + 1)
    fitting = [stride(count) for count in counts if count * stride(count) <= room]
    assert geometry.block_stride == min(fitting, default=stride(1))


@given(geometries, st.integers(0, 1 << 40), st.integers(0, 1 << 24))
def test_bytes_and_blocks_are_inverse_up_to_an_extent(geometry: Geometry, num_bytes: int, num_blocks: int) -> None:
    blocks = geometry.blocks_for_bytes(num_bytes)
    assert 0 <= num_bytes - geometry.bytes_for_blocks(blocks) < geometry.extent_bytes
    again = geometry.blocks_for_bytes(geometry.bytes_for_blocks(num_blocks))
    assert 0 <= again - num_blocks < geometry.blocks_per_extent
    assert geometry.bytes_for_blocks(again) == geometry.bytes_for_blocks(num_blocks)
    assert geometry.extents_for_blocks(num_blocks) * geometry.blocks_per_extent == again


@given(geometries, st.integers(0, 1 << 24))
def test_blocks_hold_the_tokens_and_no_block_more(geometry: Geometry, tokens: int) -> None:
    assert 0 <= geometry.blocks_for_tokens(tokens) * geometry.block_size - tokens < geometry.block_size


def test_differing_layers_lie_one_after_the_other() -> None:
    pieces = [MIXED.piece(layer) for layer in range(6)]
    assert pieces == [(0, 64), (128, 224), (0, 64), (288, 288), (288, 352), (288, 352)]
    assert MIXED.kv_bytes_per_token == 2 * (2 * 16 + 40 + 3 * 12)
    assert MIXED.block_bytes == 4 * MIXED.kv_bytes_per_token
    assert MIXED.payload_bytes == 2 * (352 + 4 * 3 * 7)


@given(geometries)
def test_pieces_are_aligned_and_apart(geometry: Geometry) -> None:
    end = 0
    for index, layer in enumerate(geometry.layers):
        for offset, dim in zip(geometry.piece(index), (layer.k_dim, layer.v_dim), strict=True):
            assert end <= offset < end + ALIGNMENT
            assert offset * geometry.itemsize % ALIGNMENT == 0
            end = offset + geometry.block_size * layer.num_kv_heads * dim
    end_bytes = end * geometry.itemsize
    if geometry.has_scales:
        end_bytes += end_bytes % 2
        for index, layer in enumerate(geometry.layers):
            for offset in geometry.scale_piece(index):
                assert 2 * offset == end_bytes
                end_bytes += 2 * geometry.block_size * layer.num_kv_heads
    assert end_bytes == geometry.payload_bytes


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_scales_lie_behind_all_pieces(dtype: str) -> None:
    geometry = Geometry(MIXED.layers, 4, dtype)
    pieces = [geometry.piece(layer) for layer in range(6)]
    assert pieces == [(0, 64), (128, 256), (0, 64), (320, 320), (320, 384), (320, 384)]
    scales = [geometry.scale_piece(layer) for layer in range(6)]  # the pieces end after 384 + 4 * 3 * 7 bytes
    assert scales == [(234, 242), (250, 254), (234, 242), (258, 258), (258, 270), (258, 270)]
    assert geometry.payload_bytes == 2 * (270 + 4 * 3)
    assert geometry.kv_bytes_per_token == (2 * 16 + 40 + 3 * 12) + 2 * 2 * (2 + 1 + 3)
    assert geometry.block_bytes == 4 * geometry.kv_bytes_per_token


def test_v_within_k_has_one_piece_and_one_scale() -> None:
    layers = (LayerShape(1, 576, 512, v_in_k=True), LayerShape(1, 8, 8))
    geometry = Geometry(layers, 16, "int8")
    assert [geometry.piece(layer) for layer in (0, 1)] == [(0, 0), (16 * 576, 16 * 576 + 128)]
    start = (16 * 576 + 256) // 2
    assert [geometry.scale_piece(layer) for layer in (0, 1)] == [(start, start), (start + 16, start + 32)]
    assert geometry.kv_bytes_per_token == 576 + 2 + 2 * (8 + 2)
    assert Geometry(layers, 16, "bfloat16").kv_bytes_per_token == 2 * (576 + 16)


def test_other_elements_have_no_scales() -> None:
    assert not LLAMA_8B.has_scales
    with pytest.raises(GeometryError, match="elements of type bfloat16 have no scales"):
        LLAMA_8B.scale_piece(0)


def test_the_layout_id_names_what_fixes_the_payload_and_no_more() -> None:
    assert LLAMA_8B.layout_id == "block-major-1/bfloat16/16/32*8x(128+128)/0of1"
    assert MIXED.layout_id == "block-major-1/float16/4/2x(8+8),1x(24+16),=0,0x(0+0),3x(5+7),=4/0of1"
    assert LLAMA_8B.with_extents(4096).layout_id == LLAMA_8B.layout_id  # a host pool takes its blocks
    others = [
        Geometry(LLAMA_8B.layers, 32, "bfloat16"),
        Geometry(LLAMA_8B.layers, 16, "float16"),
        Geometry(LLAMA_8B.layers, 16, "int8"),
        Geometry(LLAMA_8B.layers, 16, "float8_e4m3fn"),
        Geometry((LayerShape(8, 128, 128, v_in_k=True),) * 32, 16, "bfloat16"),
        Geometry(LLAMA_8B.layers[1:], 16, "bfloat16"),
        Geometry(LLAMA_8B.layers, 16, "bfloat16", shard=(1, 2)),
    ]
    assert len({LLAMA_8B.layout_id, *(other.layout_id for other in others)}) == 8


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"block_size": 0}, "block_size"),
        ({"dtype": "float64"}, "float64"),
        ({"granule_bytes": 5000}, "granule_bytes"),
        ({"layers": ()}, "nothing to cache"),
        ({"layers": (LayerShape(0, 0, 0),)}, "nothing to cache"),
        ({"layers": (LayerShape(-1, 4, 4),)}, "layer 0"),
        ({"layers": (LayerShape(1, 4, 5, v_in_k=True),)}, "layer 0 has V of 5 elements within K of 4"),
        ({"layers": (LayerShape(1, 4, 4), LayerShape(1, 4, 4, shares=1))}, "layer 1 shares"),
        ({"layers": (LayerShape(1, 4, 4), LayerShape(1, 4, 8, shares=0))}, "layer 1 differs"),
    ],
)
def test_nonsense_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(GeometryError, match=says):
        Geometry(**{"layers": (LayerShape(1, 4, 4),), "block_size": 16, "dtype": "float32"} | wrong)


TWO_TYPES = {"layer_types": ["sliding_attention", "full_attention"]}


def _config(**attributes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64} | attributes)


@pytest.mark.parametrize(
    ("attributes", "shapes"),
    [
        ({}, [(8, 8, 8)] * 2),
        ({"num_key_value_heads": 2}, [(2, 8, 8)] * 2),
        ({"num_key_value_heads": None, "head_dim": None}, [(8, 8, 8)] * 2),
        ({"head_dim": 32}, [(8, 32, 32)] * 2),
        ({"multi_query": True}, [(1, 8, 8)] * 2),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, [(8, 8, 8)] * 2),  # falcon
        ({"num_kv_heads": [2, 4], "head_dim": 16}, [(2, 16, 16), (4, 16, 16)]),  # OpenELM
        ({"head_dim": 24, "v_head_dim": 16}, [(8, 24, 16)] * 2),
        ({"layer_types": ["full_attention", "mlp"]}, [(8, 8, 8), (0, 0, 0)]),
        # Nemotron-NAS
        ({"block_configs": [{"attention": {"n_heads_in_group": 4}}, {"attention": {"no_op": True}}]}, [(2, 8, 8), (0, 0, 0)]),
        # gemma 4 in releases that name its global layers' sizes
        (TWO_TYPES | {"global_head_dim": 16, "num_global_key_value_heads": 1}, [(8, 8, 8), (1, 16, 16)]),
        (TWO_TYPES | {"swa_head_dim": 16, "swa_num_key_value_heads": 4, "swa_v_head_dim": 12}, [(4, 16, 12), (8, 8, 8)]),
    ],
)
def test_names_that_families_use(attributes: dict[str, Any], shapes: list[tuple[int, int, int]]) -> None:
    found = layer_shapes(_config(**attributes))
    assert [(shape.num_kv_heads, shape.k_dim, shape.v_dim) for shape in found] == shapes


def test_shared_layers_read_the_last_unshared_one_of_their_type() -> None:
    kinds = ["full_attention", "sliding_attention"] * 3
    found = layer_shapes(_config(num_hidden_layers=6, num_kv_shared_layers=3, layer_types=kinds))
    assert [shape.shares for shape in found] == [None, None, None, 1, 2, 1]
    found = layer_shapes(_config(num_hidden_layers=4, kv_source_layers=[0, 0, 2, 2]))
    assert [shape.shares for shape in found] == [None, 0, None, 2]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (SimpleNamespace(num_attention_heads=8, hidden_size=64), "num_hidden_layers"),
        (SimpleNamespace(num_hidden_layers=2, hidden_size=64), "num_attention_heads"),
        (SimpleNamespace(num_hidden_layers=2, num_attention_heads=8), "head_dim or hidden_size"),
        (SimpleNamespace(num_hidden_layers=2, head_dim=8), "num_key_value_heads or num_attention_heads"),
        (_config(qk_nope_head_dim=4, qk_rope_head_dim=4), "v_head_dim"),
        (_config(layer_types=["full_attention", "linear_attention"]), "layer 1.*linear_attention"),
        (_config(layer_types=["full_attention"]), "layer_types"),
        (_config(layer_types=["full_attention", "sliding_attention"], num_kv_shared_layers=1), "num_kv_shared_layers"),
    ],
)
def test_what_is_missing_is_named(config: SimpleNamespace, says: str) -> None:
    with pytest.raises(GeometryError, match=says):
        layer_shapes(config)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"num_hidden_layers": -1}, "num_hidden_layers must be an integer from 0 to 1,048,576, got -1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be from 1 to 4,096, got 0"),
        ({"num_hidden_layers": 4097}, "num_hidden_layers must be from 1 to 4,096, got 4,097"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers must be an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_attention_heads": "8"}, "num_attention_heads must be an integer from 0 to 1,048,576, got '8'"),
        ({"num_key_value_heads": True}, "num_key_value_heads must be an integer"),
        ({"num_key_value_heads": [4]}, "num_key_value_heads has 1 items, and there is a layer 1"),
        ({"head_dim": math.nan}, "head_dim must be an integer .*, got nan"),
        ({"head_dim": 1 << 40}, "head_dim must be an integer"),
        ({"num_kv_shared_layers": "1"}, "num_kv_shared_layers must be an integer"),
        ({"kv_source_layers": [0]}, "kv_source_layers has 1 items, and there is a layer 1"),
        ({"kv_source_layers": [1, 1]}, "kv_source_layers: layer 0 cannot read K and V of layer 1"),
        ({"kv_source_layers": [0, -1]}, "kv_source_layers: layer 1 cannot read K and V of layer -1"),
        ({"block_configs": [None]}, "block_configs has 1 items, and there is a layer 1"),
        ({"block_configs": [{"attention": {"n_heads_in_group": 0}}] * 2}, "n_heads_in_group must be an integer of at least 1"),
    ],
)
def test_sizes_that_cannot_be_are_named(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(GeometryError, match=says):
        layer_shapes(_config(**wrong))


def test_other_types_with_the_names_of_latent_attention_cache_all_heads() -> None:
    latent = {"kv_lora_rank": 8, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
    assert set(layer_shapes(_config(**latent, model_type="unknown", num_attention_heads=4))) == {LayerShape(4, 20, 10)}
