"""The table of experts by ids, and what a router makes of it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megazero.config.resolve import parse_config
from megazero.errors import ConfigError
from megazero.layers.inputs import LayerInputs
from megazero.layers.placement import Placement
from megazero.layers.rows import Rows
from megazero.moe.hashed import HashedRouter, expert_table
from megazero.moe.loads import RouterLoads
from megazero.moe.router import router_weight
from megazero.mpu.context import solo_context
from megazero.spec.resolve import model_spec, router_spec
from tests.moe.samples import config, tokens
from tests.tables import over_table

CPU = torch.device("cpu")
ARGV = [
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "3", "--mock-data", "--vocab-size", "61"),
    *("--num-experts", "8", "--moe-n-hash-layers", "2"),
]


@over_table(("experts", "choices", "ids"), [(4, 1, 12), (8, 3, 64), (6, 6, 60), (5, 2, 1000)])
def test_each_run_of_ids_has_each_expert_equally_often(experts, choices, ids):
    table = expert_table(0, experts, choices, ids, CPU)
    assert table.shape == (ids, choices)
    assert all(len(set(row)) == choices for row in table.tolist())
    for run in table.view(-1, experts * choices).tolist():
        assert Counter(run) == dict.fromkeys(range(experts), choices)


def test_the_table_is_that_of_the_layer_and_of_no_layout():
    """Literal, so that no change of the code moves a trained model's tokens to other experts."""
    assert expert_table(0, 4, 2, 8, CPU).tolist() == [
        [0, 2],
        [2, 1],
        [1, 3],
        [3, 0],
        [0, 1],
        [3, 2],
        [1, 3],
        [2, 0],
    ]
    assert not expert_table(1, 4, 2, 8, CPU).equal(expert_table(0, 4, 2, 8, CPU))
    longer = expert_table(0, 4, 2, 10, CPU)  # padding of the vocabulary moves nothing
    assert longer.shape == (12, 2)
    assert longer[:8].equal(expert_table(0, 4, 2, 8, CPU))
    firsts = expert_table(3, 64, 2, 64 * 500, CPU)[:, 0].view(500, 64)
    assert len(set(firsts[:, 0].tolist())) == 64
    neighbours = Counter(((firsts[:, 1] - firsts[:, 0]) % 64).tolist())
    assert max(neighbours.values()) < 25  # 500 / 63 are expected of each


def test_scores_weigh_what_the_table_names():
    model = config(hidden_size=4, num_experts=(4,), moe_router_score_function="sigmoid", moe_n_hash_layers=1)
    weight = router_weight(0, 4, model_spec(model).stream, Placement.of(solo_context(), torch.float32))
    router = HashedRouter(0, weight, router_spec(model), None, 10)
    with torch.no_grad():
        weight.copy_(torch.eye(4))
    logits = torch.tensor([[5.0, 0.0, 0.0, 0.0], [0.0, 5.0, 1.0, 0.0], [5.0, 0.0, 0.0, 0.0]])
    given = LayerInputs(Rows(range(3), ids=torch.tensor([[7, 2, 7]])))
    routing = router(logits, tokens([3]), given)
    named = expert_table(0, 4, 2, 10, CPU)[[7, 2, 7]]
    assert routing.experts.equal(named)
    scores = logits.sigmoid().gather(1, named)
    torch.testing.assert_close(routing.weights, scores / scores.sum(1, keepdim=True))


def test_which_layers_have_a_table():
    model = config(num_layers=3, num_experts=(4,), moe_n_hash_layers=9, mtp_num_layers=2)
    assert [layer.mlp.router.hashed for layer in model_spec(model).every_layer] == [True] * 3 + [False] * 2
    settings = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    model = config(num_layers=3, num_experts=(4,), moe_n_hash_layers=1, moe_aux_loss_coeff=(0.1,), **settings)
    weight = router_weight(0, 4, model_spec(model).stream, Placement.of(solo_context(), torch.float32))
    router = HashedRouter(0, weight, model_spec(model).layers[0].mlp.router, None, 10)
    RouterLoads([router], solo_context(), experts=True)
    assert (router.bias, router.spec.balance) == (None, ())


@over_table(
    ("flags", "says"),
    [
        ("--moe-layer-freq ([0]*2+[1]*2)", "the first `moe_n_hash_layers` layers must have experts"),
        ("--moe-router-load-balancing-type sinkhorn", "a capacity or routing by ids"),
        ("--model-family t5", "`family` must be gpt or bert with `moe_n_hash_layers` 2"),
        ("--hybrid-layer-pattern E*E*", "`is_hybrid_model` must be off with `moe_n_hash_layers` 2"),
    ],
)
def test_what_it_does_not_go_with_is_refused(flags, says):
    with pytest.raises(ConfigError) as error:
        parse_config([*ARGV, *flags.split()], world_size=1)
    assert says in str(error.value)


def test_random_ltd_keeps_ids_but_not_over_ranks_that_share_sequences():
    ltd = "--random-ltd --random-ltd-min-value 16 --random-ltd-require-steps 9 --random-ltd-layer-num 2"
    parse_config([*ARGV, *ltd.split()], world_size=2)
    with pytest.raises(ConfigError, match="ranks know their own ids"):
        parse_config([*ARGV, *ltd.split(), "--context-parallel-size", "2"], world_size=2)
