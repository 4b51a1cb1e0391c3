"""Buckets: what shares one, and that weights live in them."""

from __future__ import annotations

import torch
from torch import nn

from megazero.mpu import Init, ParamSpec, new_parameter, solo_context
from megazero.zero import GradientReducer, build_buckets, plan_buckets

F32 = torch.float32


def spec(name: str, **changes) -> ParamSpec:
    return ParamSpec(name, (4,), Init("zeros"), **changes)


def test_plan_drawn_by_hand():
    specs = [spec("a"), spec("b", weight_decay=False), spec("c"), spec("d", shard_dim=0), spec("e")]
    plan = plan_buckets(specs, [4, 4, 4, 4, 100], [F32] * 5, limit=8)
    # From the last parameter on; the big one fills a bucket alone; kinds do not mix.
    assert [members for _, members in plan] == [[4], [3], [2, 0], [1]]
    assert plan[3][0].weight_decay is False
    assert plan[1][0].sharded is True


def test_partial_gradients_and_dtypes_do_not_mix():
    specs = [spec("a"), spec("b", partial_grad=True), spec("c", expert=True), spec("d")]
    plan = plan_buckets(specs, [4] * 4, [F32, F32, F32, torch.bfloat16], limit=100)
    assert [members for _, members in plan] == [[3], [2], [1], [0]]


def gradients(bucket) -> dict[str, list[float]]:
    return {s.name: g.tolist() for s, g in bucket.named(bucket.grads)}


class Two(nn.Module):
    """y = used * x; the other parameter gets no gradient."""

    def __init__(self, dtype=F32):
        super().__init__()
        self.used = new_parameter(spec("used"), 1, dtype, "cpu")
        self.unused = new_parameter(spec("unused"), 1, dtype, "cpu")
        with torch.no_grad():
            self.used.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
            self.unused.fill_(7.0)


def test_parameters_are_views_of_the_bucket():
    model = Two()
    (bucket,) = build_buckets(model, 100)
    assert bucket.weights.tolist() == [7.0] * 4 + [1.0, 2.0, 3.0, 4.0]
    bucket.weights.fill_(5.0)
    assert model.used.tolist() == [5.0] * 4


def test_an_unused_parameter_has_gradient_zero_every_step():
    model = Two()
    buckets = build_buckets(model, 100)
    reducer = GradientReducer(buckets, solo_context())
    for step in range(2):
        buckets[0].grads.fill_(99.0)  # what an earlier step might have left
        reducer.start()
        for last in (False, True):
            if last:
                reducer.last_backward()
            (model.used * (step + 1.0)).sum().backward()
        reducer.finish()
        grads = gradients(buckets[0])
        assert grads == {"used": [2.0 * (step + 1)] * 4, "unused": [0.0] * 4}


def test_bf16_gradients_are_summed_in_fp32():
    # 1000 micro-batches of a gradient of 1.0: a bf16 sum would stick at 256.
    model = Two(torch.bfloat16)
    buckets = build_buckets(model, 100)
    reducer = GradientReducer(buckets, solo_context())
    reducer.start()
    for i in range(1000):
        if i == 999:
            reducer.last_backward()
        model.used.sum().backward()
    reducer.finish()
    grads = gradients(buckets[0])
    assert grads["used"] == [1000.0] * 4


def test_a_parameter_used_twice_is_collected_once_with_both_uses():
    model = Two()
    buckets = build_buckets(model, 100)
    reducer = GradientReducer(buckets, solo_context())
    reducer.start()
    reducer.last_backward()
    (model.used * 2.0 + model.used * 3.0).sum().backward()
    reducer.finish()
    assert gradients(buckets[0])["used"] == [5.0] * 4
