"""Every form, layout, dialect and version of Megatron's checkpoints gives the same weights."""

from __future__ import annotations

import pytest
import torch

from megazero.checkpoint.box import Box
from megazero.checkpoint.part import Key, Part
from megazero.config.tree.model import ModelConfig
from megazero.formats.megatron.reader import ImportOptions, MegatronReader
from tests.formats.megatron.samples import (
    GPT2,
    LLAMA,
    PADDED,
    VOCAB,
    Layout,
    random_weights,
    save_deepspeed,
    save_layers,
    save_megatron,
)
from tests.tables import over_table

UNTIED = {"untie_embeddings_and_output_weights": True}
TRUSTED = ImportOptions(trust_pickle=True, vocab_size=VOCAB)
MEGATRON = [
    *(
        Layout(tp, pp, chunks)
        for tp, pp, chunks in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2), (1, 4, 1))
    ),
    *(Layout(2, 2, dialect=dialect) for dialect in ("fused", "old", "oldest", "late old")),
    Layout(2, 2, 2, dialect="old"),
]
VERSIONS = (None, 0.0, 1.0, 2.0, 3.0)


def read_all(reader: MegatronReader) -> dict[str, torch.Tensor]:
    """Read every tensor whole."""
    out = {key.name: torch.full(shape, torch.nan) for key, shape in reader.shapes.items()}
    reader.read([Part(Key(n), tuple(t.shape), Box.whole(t.shape), t) for n, t in out.items()])
    return out


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)


@over_table("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
@over_table("layout", MEGATRON, ids=str)
def test_megatron(tmp_path, model, layout):
    weights = random_weights(model)
    if model.untie_embeddings_and_output_weights:
        layout = Layout(layout.tp, layout.pp, layout.chunks, layout.dialect, arguments=UNTIED)
    save_megatron(tmp_path, model, weights, layout)
    reader = MegatronReader(tmp_path, TRUSTED)
    assert_same(read_all(reader), weights)
    assert reader.model == model
    assert (reader.iteration, reader.padded_vocab_size) == (100, PADDED)
    assert ModelConfig.model_validate(reader.model_settings()) == model


@over_table("tp", [1, 2])
@over_table(
    "settings",
    [
        {"window_size": (8, 0), "window_attn_skip_freq": (2,), "softmax_type": "learnable"},
        {"window_size": (8, -1), "window_attn_skip_freq": (1, 1, 0, 1), "softmax_type": "off-by-one"},
        {"rotary_interleaved": True, "no_rope_freq": (0, 1, 1, 0)},
        {"position_embedding_type": "alibi"},
        {"position_embedding_type": "alibi", "embed_layernorm": True},
        {"softmax_scale": 0.2, "apply_layernorm_1p": True, "qk_layernorm": True},
        {"normalization": "LayerNorm", "qk_layernorm": True, "apply_wd_to_qk_layernorm": True},
    ],
    ids=str,
)
def test_variants_of_attention(tmp_path, settings, tp):
    """Values have the forms of Core's arguments: an interval is a number, a window from YAML a list."""
    model = LLAMA.model_copy(update=settings)
    weights = random_weights(model)
    freq = settings.get("window_attn_skip_freq", ())
    said = {"window_attn_skip_freq": freq[0] if len(freq) == 1 else list(freq)} if freq else {}
    save_megatron(tmp_path, model, weights, Layout(tp, arguments={**UNTIED, **settings, **said}))
    reader = MegatronReader(tmp_path, TRUSTED)
    assert_same(read_all(reader), weights)
    assert differing(reader.model, model) == []
    assert any("softmax_offset" in name for name in weights) == ("learnable" in settings.values())


def differing(a: ModelConfig, b: ModelConfig) -> list[str]:
    """The fields that differ, without the rope base of models that have no RoPE."""
    names = [name for name in ModelConfig.model_fields if name != "rotary_base" or a.rotates]
    return [name for name in names if getattr(a, name) != getattr(b, name)]


@over_table("further", [{}, {"glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0}])
@over_table("tp", [1, 2])
def test_gates_of_sigmoids(tmp_path, further, tp):
    """gpt-oss's activation, for which Megatron has the switch `quick_geglu`."""
    model = LLAMA.model_copy(update={"activation": "quick_geglu", **further})
    weights = random_weights(model)
    save_megatron(tmp_path, model, weights, Layout(tp, arguments={**UNTIED, "quick_geglu": True, **further}))
    reader = MegatronReader(tmp_path, TRUSTED)
    assert_same(read_all(reader), weights)
    assert reader.model == model


@pytest.mark.parametrize("tp", [1, 2])
def test_biases_of_queries_keys_and_values_alone(tmp_path, tp):
    model = LLAMA.model_copy(update={"add_qkv_bias": True})
    weights = random_weights(model)
    arguments = {**UNTIED, "add_qkv_bias": True}
    save_megatron(tmp_path, model, weights, Layout(tp, arguments=arguments))
    reader = MegatronReader(tmp_path, TRUSTED)
    assert_same(read_all(reader), weights)
    assert weights["layers.1.attention.qkv.bias"].shape == (2, 4, 8)
    assert reader.model == model


@over_table("version", VERSIONS)
@over_table("tp", [1, 2])
def test_versions_order_queries_keys_and_values_differently(tmp_path, version, tp):
    weights = random_weights(GPT2)
    save_megatron(tmp_path, GPT2, weights, Layout(tp, version=version, dialect="oldest"))
    assert_same(read_all(MegatronReader(tmp_path, TRUSTED)), weights)


@over_table("save", [save_deepspeed, save_layers])
@over_table("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
@over_table("tp", [1, 2])
def test_deepspeed(tmp_path, save, model, tp):
    weights = random_weights(model)
    arguments = UNTIED if model.untie_embeddings_and_output_weights else {}
    if model is LLAMA:  # as Megatron-DeepSpeed says the same
        arguments = {
            **UNTIED,
            "normalization": "rmsnorm",
            "group_query_attention": None,
            "num_query_groups": None,
            "num_key_value_heads": 2,
            "position_embedding_type": None,
            "use_rotary_position_embeddings": True,
            "rotary_base": None,
            "rope_theta": 500.0,
            "num_experts": [1],
        }
    stages = 2 if save is save_layers else 1
    save(tmp_path, model, weights, Layout(tp, stages, dialect="old", arguments=arguments))
    # The vocabulary's size is known from what DeepSpeed stores for its universal checkpoints.
    reader = MegatronReader(tmp_path, ImportOptions(trust_pickle=True))
    assert_same(read_all(reader), weights)
    assert reader.model == model


def test_a_release_and_one_checkpoint_of_a_run_can_be_named(tmp_path):
    weights = random_weights(GPT2)
    folder = save_megatron(tmp_path, GPT2, weights, Layout(2))
    assert MegatronReader(folder, TRUSTED).iteration == 100
    folder.rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert_same(read_all(MegatronReader(tmp_path, TRUSTED)), weights)


def test_parts_of_a_tensor_come_from_the_ranks_that_hold_them(tmp_path):
    weights = random_weights(LLAMA)
    save_megatron(tmp_path, LLAMA, weights, Layout(2, 2, arguments=UNTIED))
    reader = MegatronReader(tmp_path, TRUSTED)
    generator = torch.Generator().manual_seed(1)
    parts = []
    for name, tensor in weights.items():
        for _ in range(4):
            starts = [int(torch.randint(n, (), generator=generator)) for n in tensor.shape]
            rest = [n - start for n, start in zip(tensor.shape, starts, strict=True)]
            sizes = [1 + int(torch.randint(n, (), generator=generator)) for n in rest]
            box = Box(tuple(starts), tuple(sizes))
            # Of another dtype and not contiguous.
            memory = torch.full((*sizes, 2), torch.nan, dtype=torch.float64)[..., 0]
            parts.append(Part(Key(name), tuple(tensor.shape), box, memory))
    reader.read(parts)
    for part in parts:
        torch.testing.assert_close(
            part.tensor, weights[part.key.name][part.box.slices].double(), rtol=0, atol=0
        )


def test_half_precision_weights_are_widened_exactly(tmp_path):
    weights = {name: tensor.bfloat16() for name, tensor in random_weights(GPT2).items()}
    save_megatron(tmp_path, GPT2, weights, Layout(2))
    found = read_all(MegatronReader(tmp_path, TRUSTED))
    assert_same(found, {name: tensor.float() for name, tensor in weights.items()})


def test_files_of_torch_before_1_6_are_read(tmp_path):
    weights = random_weights(GPT2)
    folder = save_megatron(tmp_path, GPT2, weights, Layout(2, 2))
    for path in folder.rglob("*.pt"):
        torch.save(torch.load(path, weights_only=False), path, _use_new_zipfile_serialization=False)
    assert_same(read_all(MegatronReader(tmp_path, TRUSTED)), weights)


def test_only_one_stage_is_open_at_a_time(tmp_path, monkeypatch):
    """Files that cannot be memory-mapped are loaded whole, so only one stage may be in memory."""
    from megazero.formats.megatron import stages

    weights = random_weights(GPT2)
    save_megatron(tmp_path, GPT2, weights, Layout(2, 4))
    opened = []
    load = stages.load_pickle
    monkeypatch.setattr(
        stages, "load_pickle", lambda path, inert: opened.append(path.parent.name) or load(path, inert)
    )
    reader = MegatronReader(tmp_path, TRUSTED)
    del opened[:]
    for key, shape in reader.shapes.items():
        reader.read([Part(key, shape, Box.whole(shape), torch.empty(shape))])
    assert opened == [f"mp_rank_{tp:02d}_{pp:03d}" for pp in range(4) for tp in range(2)]
