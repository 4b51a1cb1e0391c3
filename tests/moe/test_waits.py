"""A layer of experts on one rank runs without a wait for the device, and in few launches whatever E is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.layers.inputs import LayerInputs
from megazero.layers.placement import Placement
from megazero.layers.rows import Rows
from megazero.moe import experts
from megazero.moe.mlp import MoEMLP, pads
from megazero.mpu.context import solo_context
from megazero.mpu.host_waits import HostWaits
from megazero.mpu.rng import sample_keys
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops import grouped_linear
from megazero.ops.attention import Documents
from megazero.ops.dispatch import everything
from megazero.spec.resolve import model_spec, router_spec
from tests.moe.samples import SEED, built, config, randn
from tests.tables import over_table

S, B, H = 8, 2, 16
DROPPING = {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "position"}
KINDS = {
    "dropless": {},
    "swiglu": {"activation": "swiglu", "moe_shared_expert_intermediate_size": 16},
    "capacity": DROPPING,
    "random": {**DROPPING, "moe_token_drop_policy": "random"},
    "by weight": {**DROPPING, "moe_token_drop_policy": "probs", "moe_capacity_scope": "micro_batch"},
    "padded to capacity": {**DROPPING, "moe_pad_expert_input_to_capacity": True},
}
BALANCED = {
    "moe_router_load_balancing_type": ("seq_aux_loss", "global_aux_loss", "aux_loss"),
    "moe_aux_loss_coeff": (0.5, 0.3, 0.2),
    "moe_z_loss_coeff": 0.1,
}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Products of groups as a GPU with a kernel for them has them: one call, which is given ends there."""
    for name in ("GROUPED_LINEAR", "GROUPED_OUTER"):
        table = getattr(grouped_linear, name)
        batched, grouped, reference = table.implementations
        rows = (
            replace(batched, serves=lambda facts: facts.even),
            replace(grouped, serves=everything),
            reference,
        )
        monkeypatch.setattr(grouped_linear, name, replace(table, implementations=rows))
    add, sums = grouped_linear.add_by_group, grouped_linear.sums_by_group

    def there(groups):
        """The same groups for biases, which on a CPU go by a loop."""
        return replace(groups, sizes=None, on_device=groups.ends)

    monkeypatch.setattr(experts, "add_by_group", lambda y, bias, groups: add(y, bias, there(groups)))
    monkeypatch.setattr(experts, "sums_by_group", lambda grad, groups: sums(grad, there(groups)))


def layer(dtype=torch.bfloat16, count=4, **settings) -> MoEMLP:
    settings = {"num_experts": (count,), "moe_ffn_hidden_size": 16, "hidden_size": H, **settings}
    settings = {"init_method_std": 0.4, "activation": "squared_relu", "moe_layer_freq": (1, 1), **settings}
    placement = Placement.of(solo_context(), dtype)
    return built(MoEMLP(1, model_spec(config(**settings)).layers[1].mlp, placement), placement)


def inputs(padded: bool) -> LayerInputs:
    ids = torch.zeros(B, S, dtype=torch.int64)
    ids[1, 5:] = -1
    return LayerInputs(
        Rows(range(S), Documents(ids) if padded else None, torch.from_numpy(sample_keys(SEED, range(B))))
    )


def passes(mlp: MoEMLP, given: LayerInputs, dtype=torch.bfloat16) -> list:
    """The result, and the gradients of the input and of all parameters."""
    x = randn(1, S, B, H).to(dtype).requires_grad_()
    out, _, sums = mlp(x, given)
    total = out.float().square().sum() + sum(sums.terms.values())
    return [out, *torch.autograd.grad(total, [x, *mlp.parameters()], allow_unused=True)]


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padding"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_wait_forward_or_backward(as_on_a_gpu, kind, padded):
    mlp, given = layer(**KINDS[kind], **BALANCED), inputs(padded)
    with HostWaits() as waits:
        passes(mlp, given)
    assert not waits.unexpected
    copies = [where for where, what in waits.found if where.startswith(("moe/", "ops/"))]
    assert copies == []


@pytest.mark.parametrize("kind", ["dropless", "capacity", "padded to capacity"])
def test_it_computes_what_a_loop_over_experts_does(monkeypatch, request, kind):
    mlp, given = layer(torch.float32, **KINDS[kind]), inputs(True)
    plain = passes(mlp, given, torch.float32)
    request.getfixturevalue("as_on_a_gpu")
    for ours, theirs in zip(passes(mlp, given, torch.float32), plain, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_sizes_that_are_read_are_found():
    """So that the test above can fail: a CPU's loop over experts reads the sizes, once."""
    mlp = layer()
    with HostWaits() as waits:
        passes(mlp, inputs(False))
    (((where, what), count),) = waits.unexpected.items()
    assert (where.partition(",")[0], what, count) == ("moe/dispatch.py:_on_host", "reads numbers", 1)


@over_table(
    ("setting", "device", "ranks", "reads", "padded"),
    [
        (True, "cpu", 1, True, True),
        (False, "cpu", 1, True, False),
        (False, "cuda", 1, True, True),
        (False, "cuda", 1, False, False),
        (False, "cuda", 2, True, False),
    ],
)
def test_a_capacity_is_filled_up_where_sizes_would_be_waited_for(setting, device, ranks, reads, padded):
    model = config(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=setting)
    group = ThreadWorld(ranks, 20.0).group("expert", 0, tuple(range(ranks)))
    assert pads(router_spec(model).capacity, torch.device(device), group, reads) == padded


class Launches(TorchDispatchMode):
    """Counts operators, views and fresh memory left out."""

    VIEWS = (
        "view",
        "t",
        "transpose",
        "select",
        "slice",
        "detach",
        "alias",
        "unsqueeze",
        "expand",
        "as_strided",
    )
    FREE = (*VIEWS, "_unsafe_view", "unbind", "split", "split_with_sizes", "empty", "new_empty", "empty_like")

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in self.FREE:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["dropless", "padded to capacity"])
def test_launches_do_not_grow_with_experts(as_on_a_gpu, kind):
    counts = []
    for count in (4, 16):
        mlp, given = layer(count=count, **KINDS[kind]), inputs(False)
        with Launches() as launches:
            passes(mlp, given)
        counts.append(launches.names)
    assert counts[0] == counts[1]
    assert counts[0]["bmm" if "padded" in kind else "_grouped_mm"] == (6 if "padded" in kind else 8)
