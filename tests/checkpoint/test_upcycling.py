"""A dense model's weights seen as those of a model with experts: every expert is the MLP, bit for bit."""

from __future__ import annotations

import random

import torch

from megazero.checkpoint.box import Box
from megazero.checkpoint.part import Key, Part
from megazero.checkpoint.upcycling import Upcycled, dense_model, router_names
from megazero.config.derive import EXPERT_FIELDS
from megazero.config.tree.model import ModelConfig
from megazero.spec.resolve import model_spec
from tests.formats.hf.samples import GPT2, LLAMA, MemorySource, random_weights
from tests.tables import over_table

FOUR = {"num_layers": 4}
MODELS = {
    "biases": GPT2.model_copy(update={"num_experts": (3,)}),
    "gated": LLAMA.model_copy(update={"num_experts": (3,)}),
    "every second": LLAMA.model_copy(update={**FOUR, "num_experts": (3,), "expert_interval": 2}),
    "pyramid": GPT2.model_copy(update={**FOUR, "num_experts": (2, 5), "moe_layer_freq": (0, 1, 0, 1)}),
}


def test_the_dense_model_has_no_setting_about_experts():
    model = MODELS["every second"].model_copy(
        update={"moe_router_topk": 3, "moe_aux_loss_coeff": (0.01,), "moe_expert_capacity_factor": 1.0}
    )
    assert dense_model(model) == LLAMA.model_copy(update=FOUR)
    assert {"num_experts", "expert_interval", "mlp_type"} < set(EXPERT_FIELDS)


def test_shapes_are_those_of_the_experts_and_the_routers_are_missing():
    model = MODELS["pyramid"]
    shapes = {
        key.name: shape
        for key, shape in Upcycled(random_weights(dense_model(model)), model_spec(model)).shapes.items()
    }
    assert {name: shape for name, shape in shapes.items() if ".mlp." in name} == {
        **{f"layers.{i}.mlp.up.weight": (74, 42) for i in (0, 2)},
        **{f"layers.{i}.mlp.up.bias": (74,) for i in (0, 2)},
        **{f"layers.{i}.mlp.down.weight": (42, 74) for i in (0, 2)},
        **{f"layers.{i}.mlp.down.bias": (42,) for i in (0, 2)},
        **{f"layers.{i}.mlp.experts.up.weight": (n, 74, 42) for i, n in ((1, 2), (3, 5))},
        **{f"layers.{i}.mlp.experts.up.bias": (n, 74) for i, n in ((1, 2), (3, 5))},
        **{f"layers.{i}.mlp.experts.down.weight": (n, 42, 74) for i, n in ((1, 2), (3, 5))},
        **{f"layers.{i}.mlp.experts.down.bias": (n, 42) for i, n in ((1, 2), (3, 5))},
    }
    assert router_names(model_spec(model)) == ("layers.1.mlp.router.weight", "layers.3.mlp.router.weight")
    assert shapes["layers.1.attention.qkv.weight"] == (6, 3, 7, 42)


@over_table("name", MODELS)
def test_every_part_is_that_of_the_dense_mlp_for_each_expert(name):
    """Reads random boxes of all tensors into strided memory."""
    model, draw = MODELS[name], random.Random(4)
    dense = random_weights(dense_model(model))
    source, parts = Upcycled(dense, model_spec(model)), []
    for key, shape in source.shapes.items():
        for _ in range(4):
            spans = [sorted(draw.sample(range(n + 1), 2)) for n in shape]
            box = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
            memory = torch.full([*reversed(box.shape), 2], torch.nan)[..., 0].permute(
                *range(len(shape) - 1, -1, -1)
            )
            parts.append(Part(key, shape, box, memory))
    source.read(parts)
    for part in parts:
        if ".experts." in part.key.name:
            layer = int(part.key.name.split(".")[1])
            whole = dense.tensors[Key(part.key.name.replace(".experts.", "."))]
            whole = whole.expand(model.experts_at(layer), *whole.shape)
        else:
            whole = dense.tensors[part.key]
        assert torch.equal(part.tensor, whole[part.box.slices]), part.key


def test_what_experts_share_is_read_once():
    class Counting(MemorySource):
        read_elements = 0

        def read(self, parts):
            parts = list(parts)
            Counting.read_elements += sum(part.box.numel for part in parts)
            super().read(parts)

    model = MODELS["gated"]
    source = Upcycled(
        Counting({key.name: tensor for key, tensor in random_weights(dense_model(model)).tensors.items()}),
        model_spec(model),
    )
    key = Key("layers.0.mlp.experts.up.weight")
    source.read([Part.whole(key, torch.empty(source.shapes[key]))])
    assert source.shapes[key] == (3, 2, 58, 36)
    assert Counting.read_elements == 2 * 58 * 36


def test_only_weights_are_taken():
    model: ModelConfig = MODELS["biases"]
    dense = random_weights(dense_model(model))
    dense.tensors[Key("layers.0.mlp.up.weight", "exp_avg")] = torch.ones(74, 42)
    assert {key.kind for key in Upcycled(dense, model_spec(model)).shapes} == {"weight"}
