"""Slices of given models: numbers as with one rank, or a refusal that names the layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from megazero.deepspeed.engine.weights import module_state
from megazero.deepspeed.initialize import initialize
from megazero.deepspeed.tensor_parallel.cutter import Cutter
from megazero.deepspeed.tensor_parallel.families import read_families
from megazero.deepspeed.tensor_parallel.heads import Heads
from megazero.deepspeed.tensor_parallel.policy import SlicingPolicy, slice_model
from megazero.deepspeed.tensor_parallel.slices import SlicedWeight, WeightPiece
from megazero.deepspeed.tensor_parallel.training import TensorParallelRequest, tp_model_init
from megazero.deepspeed.zero import Init
from megazero.errors import ConfigError, DataError
from megazero.mpu.context import ParallelContext, solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from tests.deepspeed.tiny_models import inputs, prompts, tiny
from tests.tables import over_table

PLAIN = SlicingPolicy()
TYPES = [kind for family in read_families() for kind in family.types]
FAST = {"llama", "qwen3", "mixtral", "phi3", "gpt2", "falcon", "mpt", "t5"}


def on_ranks(tp: int, work: Any, dp: int = 1) -> list[Any]:
    world = ThreadWorld(tp * dp, timeout=60.0)
    return world.run(lambda rank: work(thread_context(world, ProcessGrid(tp=tp, dp=dp), rank)))


def far(model: nn.Module, tp: int, policy: SlicingPolicy = PLAIN, *, trained: bool = False) -> float:
    """The largest difference of the logits of `tp` slices from the whole's, beside the largest logit."""
    batch = inputs(model)
    copies = [copy.deepcopy(model) for _ in range(tp)]

    def work(context: ParallelContext) -> torch.Tensor:
        mine = copies[context.rank]
        slice_model(Cutter(mine, context.tp, trained), policy)
        with torch.no_grad():
            return mine(**batch).logits

    with torch.no_grad():
        wanted = model(**batch).logits
    return max(float((found - wanted).abs().max() / wanted.abs().max()) for found in on_ranks(tp, work))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in TYPES]
)
@over_table("heads", [(4, 2), (3, 3), (6, 3), (4, 1)], ids=lambda pair: "of".join(map(str, pair)))
def test_slices_compute_what_the_whole_does(kind, heads):
    assert far(tiny(kind, *heads), 2) < 1e-5


@over_table(
    "keys",
    [
        {"multi_query": False, "alibi": True},
        {"multi_query": False},
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"new_decoder_architecture": True, "num_kv_heads": 1},
    ],
    ids=["alibi", "heads", "groups", "one group"],
)
def test_the_layouts_of_falcon(keys):
    assert far(tiny("falcon", 4, **keys), 2) < 1e-5


def test_heads_of_many_queries_in_gpt_bigcode():
    assert far(tiny("gpt_bigcode", multi_query=False), 2) < 1e-5


@pytest.mark.parametrize("trained", [False, True])
def test_four_ranks_share_one_key_value_head_or_two(trained):
    assert far(tiny("llama", 4, 1), 4, trained=trained) < 1e-5
    assert far(tiny("llama", 8, 2), 4, trained=trained) < 1e-5


@over_table(
    ("heads", "local"),
    [  # (query, key-value, ranks) -> (shared, local query, local key-value)
        ((8, 4, 2), (False, 4, 2)),
        ((6, 3, 2), (False, 4, 2)),
        ((3, 3, 2), (False, 2, 2)),
        ((8, 2, 4), (True, 2, 1)),
        ((8, 1, 2), (True, 4, 1)),
        ((6, 2, 4), (False, 3, 1)),
        ((5, 5, 4), (False, 2, 2)),
    ],
)
def test_heads_of_a_rank(heads, local):
    query, key_value, ranks = heads
    found = Heads(query, key_value, 8, ranks, 0)
    assert (found.shared, found.local_query, found.local_key_value) == local
    assert [Heads(8, 2, 8, 4, rank).used for rank in range(4)] == [(0, 8), (0, 8), (8, 8), (8, 8)]


@over_table(
    "pieces",
    [
        (WeightPiece(12, 12),),
        (WeightPiece(7, 7),),
        (WeightPiece(12, 3),),
        (WeightPiece(8, 8), WeightPiece(8, 8), WeightPiece(8, 8)),
        (WeightPiece(16, 4), WeightPiece(8, 2), WeightPiece(8, 2)),
        (WeightPiece(5, 5, align=8), WeightPiece(5, 5, align=8)),
    ],
)
@over_table("ranks", [1, 2, 3, 4])
def test_the_slices_of_all_ranks_are_the_whole(pieces, ranks):
    width = sum(piece.width for piece in pieces)
    whole = torch.arange(3.0 * width).view(width, 3) + 1
    sliced = SlicedWeight("weight", (width, 3), 0, pieces)
    slices = [sliced.of(whole, rank, ranks) for rank in range(ranks)]
    assert len({part.shape for part in slices}) == 1
    assert torch.equal(sliced.join(slices), whole)
    assert torch.equal(sum(part.sum() for part in slices), whole.sum())  # the rest is zeros


def settings(stage: int = 0, tp: int = 1, replicas: int = 1, **keys: Any) -> dict[str, Any]:
    section = {"tensor_parallel": {"autotp_size": tp}} if tp > 1 else {}
    return {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 4 // replicas,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        **section,
        **keys,
    }


def steps(engine: Any, count: int = 3) -> list[float]:
    losses = []
    share = engine.context.data
    for number in range(count):
        tokens = prompts(4, seed=number).chunk(share.size)[share.rank]
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        share.all_reduce(total).wait()
        losses.append(float(total) / share.size)
    return losses


def train(model: nn.Module, context: ParallelContext, **keys: Any) -> tuple[list[float], float, Any]:
    engine, *_ = initialize(model=model, config=settings(**keys), mpu=context)
    losses = steps(engine)
    consolidated, state = engine._consolidated_16bit_state_dict(), engine.module_state_dict()
    assert (consolidated is None) == (context.rank > 0)
    if consolidated is not None:
        assert all(torch.equal(value, state[name]) for name, value in consolidated.items())
        assert consolidated.keys() == state.keys()
    return losses, engine.get_global_grad_norm(), state


TRAINED = [("llama", (4, 2), 0), ("qwen3", (6, 3), 1), ("mixtral", (4, 1), 2), ("phi3", (4, 2), 3)]
TRAINED += [("gpt2", (4, 4), 3)]


@pytest.mark.parametrize(("kind", "heads", "stage"), TRAINED, ids=lambda value: str(value))
def test_training_slices_is_training_the_whole(kind, heads, stage):
    model = tiny(kind, *heads)
    copies = [copy.deepcopy(model) for _ in range(4)]
    losses, norm, state = train(copy.deepcopy(model), solo_context(), stage=stage)

    def work(context: ParallelContext) -> Any:
        return train(copies[context.rank], context, stage=stage, tp=2, replicas=2)

    for own_losses, own_norm, own_state in on_ranks(2, work, dp=2):
        assert own_losses == pytest.approx(losses, rel=1e-5)
        assert own_norm == pytest.approx(norm, rel=1e-4)
        assert {name: value.shape for name, value in own_state.items()} == {
            name: value.shape for name, value in state.items()
        }
        for name, value in own_state.items():  # the gradient of a bias of keys is rounding alone
            if "c_attn.bias" not in name:
                torch.testing.assert_close(value, state[name], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(TYPES) - {"bert", "t5", "mt5"}))
def test_every_family_trains(kind):
    if "bert" in kind or kind in ("electra", "falcon"):
        pytest.skip("no causal labels, or many queries of one key, which are not trained")
    model = tiny(kind, 3, 3)
    copies = [copy.deepcopy(model) for _ in range(2)]
    losses, norm, _ = train(copy.deepcopy(model), solo_context(), stage=3)
    for own_losses, own_norm, _ in on_ranks(2, lambda c: train(copies[c.rank], c, stage=3, tp=2)):
        assert own_losses == pytest.approx(losses, rel=1e-5)
        assert own_norm == pytest.approx(norm, rel=1e-4)


def test_a_checkpoint_of_slices_loads_on_another_number_of_ranks(tmp_path):
    model = tiny("llama", 6, 3)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def save(context: ParallelContext) -> Any:
        engine, *_ = initialize(model=copies[context.rank], config=settings(1, 2), mpu=context)
        steps(engine, 1)
        engine.save_checkpoint(tmp_path)
        return steps(engine, 1), module_state(engine, False)

    (losses, state), _ = on_ranks(2, save)
    engine, *_ = initialize(model=tiny("llama", 6, 3, seed=5), config=settings(3), mpu=solo_context())
    engine.load_checkpoint(tmp_path)
    assert steps(engine, 1) == pytest.approx(losses, rel=1e-5)
    for name, value in engine.module_state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-4, atol=1e-5)


def test_two_engines_of_two_ranks_live_in_a_world_of_four():
    """DeepSpeed's inference group is ranks 0 to tp - 1, so that a second replica shared it."""
    from megazero.deepspeed.legacy.inference.initialize import init_inference

    models = [tiny("llama", seed=rank // 2) for rank in range(4)]
    wanted = [tiny("llama", seed=number)(**inputs(models[0])).logits for number in range(2)]

    def work(context: ParallelContext) -> Any:
        engine = init_inference(models[context.rank], dtype="fp32", tensor_parallel={"mpu": context})
        assert engine.mp_world_size == 2
        return engine(**inputs(engine.module)).logits.detach()

    for rank, found in enumerate(on_ranks(2, work, dp=2)):
        torch.testing.assert_close(found, wanted[rank // 2].detach(), rtol=1e-4, atol=1e-4)


def test_a_model_cut_while_it_was_built_is_sliced_too():
    losses, *_ = train(tiny("llama"), solo_context(), stage=3)
    models = [tiny("llama") for _ in range(2)]
    world = ThreadWorld(2, timeout=60.0)

    def work(rank: int) -> list[float]:
        Init(models[rank], mpu=thread_context(world, ProcessGrid(dp=2), rank))
        return train(models[rank], thread_context(world, ProcessGrid(tp=2), rank), stage=3, tp=2)[0]

    for own in world.run(work):
        assert own == pytest.approx(losses, rel=1e-5)


def refused(model: nn.Module, policy: SlicingPolicy = PLAIN, *, trained: bool = False) -> str:
    """What two ranks are told, who cannot slice the model."""
    copies = [copy.deepcopy(model) for _ in range(2)]
    said: list[str] = []

    def work(context: ParallelContext) -> None:
        try:
            slice_model(Cutter(copies[context.rank], context.tp, trained), policy)
        except ConfigError as error:
            said.append(str(error))

    on_ranks(2, work)
    assert len(said) == 2
    return said[0]


def test_an_unknown_family_is_refused_by_name():
    """DeepSpeed takes BLOOM's rule for an unknown fused weight, warns, and computes something else."""
    assert "but is codegen; give `injection_policy`" in refused(tiny("codegen", rotary_dim=4))


def test_a_fused_layer_of_a_stranger_is_refused_by_name():
    model = tiny("codegen", rotary_dim=4)
    policy = SlicingPolicy(injection={type(model.transformer.h[0]): ("out_proj", "fc_out")})
    assert "`transformer.h.0.attn.qkv_proj` must be a layer of one weight" in refused(model, policy)


def test_a_layer_that_no_rule_names_is_refused():
    model = tiny("llama")
    attention = model.model.layers[0].self_attn
    attention.gate = nn.Linear(32, 4)
    assert "`model.layers.0.self_attn.gate` must be a layer of Llama" in refused(model)
    del attention.gate
    attention.sinks = nn.Embedding(3, 4)
    assert "no rule names this Embedding" in refused(model)


def test_a_weight_of_another_layout_is_refused():
    model = tiny("phi3")
    model.model.layers[0].self_attn.qkv_proj = nn.Linear(32, 96, bias=False)
    assert "32 + 16 + 16 features, but has 96" in refused(model)


def test_queries_of_one_fused_key_are_not_trained():
    assert "to be trained" in refused(tiny("falcon"), trained=True)


def test_batches_that_differ_are_refused_once():
    copies = [tiny("llama") for _ in range(2)]

    def work(context: ParallelContext) -> str:
        engine, *_ = initialize(model=copies[context.rank], config=settings(0, 2), mpu=context)
        with pytest.raises(DataError, match="must read the same batch"):
            engine(input_ids=prompts(4, seed=context.rank))
        return "refused"

    assert on_ranks(2, work) == ["refused"] * 2


@over_table(
    ("section", "says"),
    [
        ({"autotp_size": 2, "size": 2}, "but has size"),
        ({"autotp_size": 2, "tp": {"tp_size": 4}}, "but they are 2 and 4"),
        ({"autotp_size": 2, "preset_model": "lama"}, "but is lama"),
        ({"autotp_size": 2, "partition_config": {"specs": []}}, "but has specs"),
        ({"autotp_size": 2, "partition_config": {"layer_specs": [{"pattern": "x"}]}}, "but has pattern"),
        ({"autotp_size": 2, "injection_policy_tuple": ["x"]}, "give `partition_config`"),
        ({"autotp_size": 3}, "`world size` must be a multiple"),
    ],
)
def test_a_section_that_is_refused(section, says):
    config = {**settings(), "tensor_parallel": section}
    with pytest.raises(ConfigError, match=says):
        initialize(model=tiny("llama"), config=config)


def test_specs_that_match_nothing_are_refused():
    policy = SlicingPolicy.read({"partition_config": {"layer_specs": [{"patterns": ["x"]}]}})
    assert "names such as model.layers.0.self_attn.q_proj.weight" in refused(tiny("llama"), policy)


class Fused(nn.Module):
    """A block of a stranger: three weights in one, or three of different widths, and their sum's product."""

    def __init__(self, widths: tuple[int, int, int]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.widths = widths
        self.qkv, self.out = nn.Linear(6, sum(widths)), nn.Linear(widths[0], 6)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ratio = self.qkv.weight.shape[0] / sum(self.widths)
        q, k, v = self.qkv(x).split([int(width * ratio) for width in self.widths], -1)
        return self.out(q * k.sum(-1, keepdim=True) * 0 + torch.tanh(q) + v.mean() * 0)


@over_table(
    ("widths", "shape"), [((4, 4, 4), [3, -1]), ((8, 4, 4), [[8, 4, 4], -1]), ((4, 4, 4), [3, 4, -1])]
)
def test_specs_describe_a_fused_weight(widths, shape):
    specs = [
        {
            "patterns": ["qkv"],
            "partition_type": "column",
            "shape": shape,
            "partition_dim": 1 if len(shape) == 3 else 0,
        },
        {"patterns": "out", "partition_type": "row"},
    ]
    policy = SlicingPolicy.read({"partition_config": {"layer_specs": specs}})
    x, wanted = torch.ones(2, 6), Fused(widths)(torch.ones(2, 6))

    def work(context: ParallelContext) -> torch.Tensor:
        model = Fused(widths)
        slice_model(Cutter(model, context.tp, True), policy)
        return model(x)

    for found in on_ranks(2, work):
        torch.testing.assert_close(found, wanted)


def test_specs_come_before_the_family_and_strict_ones_name_every_layer():
    specs = [{"patterns": [".*mlp"], "partition_type": "skip"}]
    policy = SlicingPolicy.read({"partition_config": {"layer_specs": specs}})
    assert far(tiny("llama"), 2, policy) < 1e-5
    strict = SlicingPolicy.read({"partition_config": {"layer_specs": specs, "strict_mode": True}})
    assert "`model.layers.0.self_attn.q_proj`" in refused(tiny("llama"), strict)


def test_a_models_own_plan_is_followed():
    assert far(tiny("arcee"), 2) < 1e-5


def test_a_plan_that_divides_a_head_is_refused():
    assert "`num_key_value_heads` (3)" in refused(tiny("arcee", 6, 3))


def test_an_unknown_style_of_a_plan_is_refused():
    model = tiny("arcee")
    model._tp_plan = {"model.layers.*.self_attn.q_proj": "spiral"}
    assert "has spiral" in refused(model)


def test_an_injection_policy_for_a_stranger():
    model = tiny("arcee")
    policy = {type(model.model.layers[0]): ("self_attn.o_proj", ".down_proj")}  # DeepSpeed's pages have dots
    assert far(model, 2, SlicingPolicy(injection=policy)) < 1e-5


def test_tp_model_init_records_and_initialize_slices():
    copies = [tiny("llama") for _ in range(2)]
    losses, *_ = train(tiny("llama"), solo_context())

    def work(context: ParallelContext) -> Any:
        model = tp_model_init(copies[context.rank], 2, torch.float32)
        assert model.model.layers[0].self_attn.q_proj.weight.shape == (32, 32)
        found = train(model, context)[0]
        assert model.model.layers[0].self_attn.q_proj.weight.shape == (16, 32)
        return found

    for own in on_ranks(2, work):
        assert own == pytest.approx(losses, rel=1e-5)


def test_tp_model_init_and_the_json_must_agree():
    model = tp_model_init(tiny("llama"), 2, torch.float32)
    with pytest.raises(ConfigError, match="must be called once"):
        tp_model_init(model, 4, torch.float32)
    with pytest.raises(ConfigError, match=r"tp_size` of `tp_model_init` \(2\), but is 4"):
        initialize(model=model, config=settings(0, 4))
    with pytest.raises(ConfigError, match=r"torch.bfloat16"):
        initialize(model=model, config={**settings(), "bf16": {"enabled": True}})


def test_a_group_of_the_scripts_own_is_refused_beside_mpu():
    """It was accepted, and not compared; DeepSpeed refuses it."""
    model = tp_model_init(tiny("llama"), 2, torch.float32, tp_group=object())
    with pytest.raises(ConfigError, match="`tp_group` must be left out beside `mpu`"):
        initialize(model=model, config={"train_batch_size": 1}, mpu=solo_context())


def test_a_batch_counts_all_ranks_unless_mpu_says_otherwise():
    """So does DeepSpeed, and a JSON of transformers' Trainer counts on it."""
    world = ThreadWorld(4)
    context = thread_context(world, ProcessGrid(tp=2, dp=2), 0)
    assert TensorParallelRequest(2).shares(None, context) == 4
    assert TensorParallelRequest(2).shares(context, context) == 2
    assert TensorParallelRequest(0).shares(None, context) == 2


def test_slices_and_a_mesh_without_them_are_refused():
    config = settings(1, 2)
    with pytest.raises(ConfigError, match=r"`mpu` or `mesh_param` must have as many .*\(2\), but has 1"):
        initialize(model=tiny("llama"), config=config, mesh_param=(1, 2))
