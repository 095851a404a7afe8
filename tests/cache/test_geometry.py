"""Bytes and blocks both ways, the layout of a block, and shapes from configs against what real models hand over."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetide.cache.geometry import ALIGNMENT, Geometry, GeometryError, LayerShape, layer_shapes

os.environ.setdefault("HF_HUB_OFFLINE", "1")
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


# --- sizes


def test_a_known_model() -> None:
    assert LLAMA_8B.kv_bytes_per_token == 128 * 1024
    assert LLAMA_8B.block_bytes == LLAMA_8B.payload_bytes == LLAMA_8B.block_stride == 2 * MIB
    assert LLAMA_8B.waste_bytes == 0
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


def test_a_large_granule_is_filled_before_it_is_wasted() -> None:
    blocks = (LayerShape(2, 64, 64),) * 28  # 224 KiB a block of 16 in bfloat16
    geometry = Geometry(blocks, 16, "bfloat16", granule_bytes=2 * MIB)
    assert geometry.extent_bytes % (2 * MIB) == 0
    assert geometry.extent_bytes <= 32 * MIB
    assert geometry.waste_bytes == 0
    assert geometry.blocks_per_extent == 128  # 28 MiB, a whole number of granules


@given(geometries)
def test_an_extent_is_whole_granules_of_whole_blocks(geometry: Geometry) -> None:
    assert geometry.block_stride % ALIGNMENT == 0
    assert geometry.extent_bytes == geometry.blocks_per_extent * geometry.block_stride
    assert geometry.extent_bytes % geometry.granule_bytes == 0
    assert geometry.block_bytes <= geometry.payload_bytes <= geometry.block_stride
    assert geometry.block_bytes == geometry.kv_bytes_per_token * geometry.block_size
    assert geometry.waste_bytes == geometry.block_stride - geometry.block_bytes
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


# --- the layout of a block


def test_equal_layers_lie_as_one_array() -> None:
    piece = 16 * 8 * 128
    assert [LLAMA_8B.piece(layer) for layer in range(3)] == [(0, piece), (2 * piece, 3 * piece), (4 * piece, 5 * piece)]


def test_differing_layers_lie_one_after_the_other() -> None:
    assert [MIXED.piece(layer) for layer in range(6)] == [
        (0, 64),
        (128, 224),
        (0, 64),
        (288, 288),
        (288, 352),
        (288, 352),
    ]
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
    assert [geometry.piece(layer) for layer in range(6)] == [
        (0, 64),
        (128, 256),
        (0, 64),
        (320, 320),
        (320, 384),
        (320, 384),
    ]
    assert [geometry.scale_piece(layer) for layer in range(6)] == [
        (234, 242),  # the pieces end after 384 + 4 * 3 * 7 bytes
        (250, 254),
        (234, 242),
        (258, 258),
        (258, 270),
        (258, 270),
    ]
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


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_elements_of_one_byte_take_about_half(dtype: str, head_dim: int) -> None:
    shapes = (LayerShape(8, head_dim, head_dim),) * 24
    plain, quantized = Geometry(shapes, 16, "bfloat16"), Geometry(shapes, 16, dtype)
    assert plain.kv_bytes_per_token / quantized.kv_bytes_per_token == 2 * head_dim / (head_dim + 2)
    assert plain.block_stride / quantized.block_stride >= 1.9


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


# --- shapes from configs without their models


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
        (  # Nemotron-NAS
            {"block_configs": [{"attention": {"n_heads_in_group": 4}}, {"attention": {"no_op": True}}]},
            [(2, 8, 8), (0, 0, 0)],
        ),
        (  # gemma 4 in releases that name its global layers' sizes
            {
                "layer_types": ["sliding_attention", "full_attention"],
                "global_head_dim": 16,
                "num_global_key_value_heads": 1,
            },
            [(8, 8, 8), (1, 16, 16)],
        ),
        (
            {
                "layer_types": ["sliding_attention", "full_attention"],
                "swa_head_dim": 16,
                "swa_num_key_value_heads": 4,
                "swa_v_head_dim": 12,
            },
            [(4, 16, 12), (8, 8, 8)],
        ),
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
)  # fmt: skip
def test_sizes_that_cannot_be_are_named(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(GeometryError, match=says):
        layer_shapes(_config(**wrong))


# --- shapes from real configs against real models, tiny ones with random weights

TINY = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TWO_TYPES = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
FEW_EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
OLD = {"num_key_value_heads": None, "head_dim": None}  # families from before grouped queries do not know these
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "head_dim": None,
}
PER_LAYER_INPUT = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 32}
SHARING = TWO_TYPES | {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": None},
    "qwen2": {"head_dim": None},
    "qwen3": {},
    "mistral": {},
    "gemma2": TWO_TYPES,
    "gemma3_text": TWO_TYPES,
    "phi3": {"head_dim": None},
    "gpt2": OLD,
    "gpt_bigcode": OLD | {"multi_query": True},
    "opt": OLD | {"ffn_dim": 32, "word_embed_proj_dim": 32},
    "gpt_neox": OLD,
    "jetmoe": FEW_EXPERTS
    | OLD
    | {"num_attention_heads": None, "num_key_value_heads": 2, "kv_channels": 8}
    | {"num_experts_per_tok": 2},
    "mixtral": FEW_EXPERTS,
    "gpt_oss": FEW_EXPERTS | TWO_TYPES,
    "deepseek_v3": LATENT | {"first_k_dense_replace": 3},
    "minicpm3": LATENT,
    "mimo_v2_flash": TWO_TYPES | {"mlp_layer_types": ["dense"] * 4, "v_head_dim": 12},
    "gemma3n_text": SHARING
    | PER_LAYER_INPUT
    | {"num_kv_shared_layers": 3, "intermediate_size": [32] * 6, "activation_sparsity_pattern": [0.0] * 6}
    | {"laurel_rank": 4, "altup_num_inputs": 2},
    "gemma4_text": SHARING
    | PER_LAYER_INPUT
    | {"num_kv_shared_layers": 2, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
}


def _tiny(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    wanted = {name: value for name, value in (TINY | CONFIGS[model_type]).items() if value is not None}
    return CONFIG_MAPPING[model_type](**wanted)


def _handed_over(config: Any) -> dict[int, tuple[Any, Any]]:
    """Per layer the K and V, [1, num_kv_heads, tokens, dim], that one forward pass gives the attention function."""
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM

    seen: dict[int, tuple[Any, Any]] = {}

    def record(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> tuple[Any, None]:
        seen[module.layer_idx] = (key, value)
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register("pagetide_test_record", record)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="pagetide_test_record").eval()
    with torch.inference_mode():
        model(input_ids=torch.arange(3, 8)[None], use_cache=False)
    return seen


@pytest.mark.parametrize("model_type", CONFIGS)
def test_shapes_are_what_the_model_hands_over(model_type: str) -> None:
    config = _tiny(model_type)
    shapes, seen = layer_shapes(config, latents=False), _handed_over(config)
    assert len(seen) == len(shapes)
    for index, (key, value) in seen.items():
        shape = shapes[index]
        assert tuple(key.shape) == (1, shape.num_kv_heads, 5, shape.k_dim), index
        assert tuple(value.shape) == (1, shape.num_kv_heads, 5, shape.v_dim), index
        source = index if shape.shares is None else shape.shares
        assert key is seen[source][0]
        assert value is seen[source][1]
    assert len({id(key) for key, _ in seen.values()}) == sum(shape.shares is None for shape in shapes)


def test_the_configs_above_cover_what_differs() -> None:
    """The sizes are told apart by the tiny configs, so that a test above cannot pass by chance."""
    layers = {name: layer_shapes(_tiny(name), latents=False) for name in CONFIGS}
    shapes = {name: {(s.num_kv_heads, s.k_dim, s.v_dim) for s in of} for name, of in layers.items()}
    assert shapes["llama"] == {(2, 8, 8)}
    assert shapes["qwen3"] == {(2, 16, 16)}
    assert shapes["gpt2"] == {(4, 8, 8)}
    assert shapes["gpt_bigcode"] == {(1, 8, 8)}
    assert shapes["jetmoe"] == {(4, 8, 8)}
    assert shapes["deepseek_v3"] == {(4, 20, 10)}
    assert shapes["mimo_v2_flash"] == {(2, 16, 12), (4, 16, 12)}
    assert shapes["gemma4_text"] == {(2, 16, 16), (1, 32, 32)}
    assert [s.shares for s in layer_shapes(_tiny("gemma3n_text"))] == [None, None, None, 1, 2, 1]


@pytest.mark.parametrize("model_type", ["deepseek_v3", "minicpm3"])
def test_latent_attention_caches_a_head_whose_k_holds_its_v(model_type: str) -> None:
    assert set(layer_shapes(_tiny(model_type))) == {LayerShape(1, 16, 8, v_in_k=True)}


def test_other_types_with_the_names_of_latent_attention_cache_all_heads() -> None:
    latent = {"kv_lora_rank": 8, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
    assert set(layer_shapes(_config(**latent, model_type="unknown", num_attention_heads=4))) == {LayerShape(4, 20, 10)}


@pytest.mark.parametrize("new", [False, True])
def test_falcon_caches_what_the_geometry_says(new: bool) -> None:
    """It calls no registered attention function; its own cache shows what it would hand over."""
    import torch
    from transformers import FalconConfig, FalconForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = FalconConfig(**sizes, new_decoder_architecture=new, num_kv_heads=2 if new else None)
    with torch.inference_mode():
        cache = FalconForCausalLM(config).eval()(input_ids=torch.arange(3, 8)[None]).past_key_values
    (shape,) = layer_shapes(config)
    assert tuple(cache.layers[0].keys.shape) == (1, shape.num_kv_heads, 5, shape.k_dim)


def test_the_text_part_of_a_composite_config_is_found() -> None:
    from transformers import Gemma3Config

    config = Gemma3Config(text_config=_tiny("gemma3_text").to_dict())
    windows = [shape.window for shape in layer_shapes(config)]
    assert windows == [8, None] * 2
    geometry = Geometry.from_config(config, block_size=16, dtype="float32", extent_target_bytes=MIB)
    assert geometry.kv_bytes_per_token == 4 * 2 * 32 * 4
    assert geometry.extent_bytes == MIB
