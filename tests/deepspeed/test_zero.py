"""`zero.Init`: a model is cut while it is built, never whole on one rank, and trains as if built whole."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from megazero.deepspeed.zero.gathered import (
    GatheredParameters,
    external_parameters,
    register_external_parameter,
)
from megazero.deepspeed.zero.init import Init
from megazero.deepspeed.zero.parallel import UserParallel
from megazero.deepspeed.zero.partition import partition_of
from megazero.errors import ConfigError, MegazeroError
from megazero.mpu.context import ParallelContext, solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.zero.build import build_store
from megazero.zero.unit import module_units
from tests.tables import over_table
from tests.zero.policies import make_policy

WIDTH, LAYERS = 16, 6


class Stack(nn.Module):
    """Layers, a parameter of its own, a tied weight, and initial values that `apply` writes."""

    def __init__(self, begin: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.layers[0].weight
        self.own = nn.Parameter(torch.arange(3.0) + begin)
        self.seen: list[float] = []
        self.apply(self.fill)

    def fill(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            self.seen.append(float(module.weight.sum()))
            nn.init.constant_(module.weight, 0.5)


def on_ranks(count: int, work) -> list:
    world = ThreadWorld(count, timeout=20.0)
    return world.run(lambda rank: work(thread_context(world, ProcessGrid(dp=count), rank)))


def whole(param: nn.Parameter) -> torch.Tensor:
    with GatheredParameters(param):
        return param.data.clone()


@over_table("ranks", [1, 2, 3])
def test_each_rank_keeps_a_slice_of_the_first_ranks_values(ranks):
    def work(context: ParallelContext):
        with Init(mpu=context):
            model = nn.Sequential(nn.Linear(5, 3), nn.Sequential(nn.Linear(3, 2)))
            with GatheredParameters(model[0].weight, modifier_rank=0):
                model[0].weight.fill_(float(10 + context.rank))
        assert all(map(partition_of, model.parameters()))
        sizes = [param.shard_holder.shard.numel() for param in model.parameters()]
        assert sizes == [-(-param.numel() // ranks) for param in model.parameters()]
        assert all(
            param.isnan().all() and param.untyped_storage().nbytes() == 4 for param in model.parameters()
        )
        return [whole(param) for param in model.parameters()]

    first, *others = on_ranks(ranks, work)
    assert torch.equal(first[0], torch.full((3, 5), 10.0))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_apply_writes_whole_values_and_the_own_parameters_are_cut_at_the_end():
    def work(context: ParallelContext):
        with Init(mpu=context):
            model = Stack(begin=context.rank)
            assert not partition_of(model.own)
            assert partition_of(model.head.weight)
        assert "apply" not in model.layers.__dict__
        assert not any(value != value for value in model.seen)  # NaN: `fill` met a slice
        assert model.head.weight is model.layers[0].weight
        return whole(model.own), whole(model.layers[3].weight), len(list(model.parameters()))

    for own, weight, count in on_ranks(2, work):
        assert own.tolist() == [0.0, 1.0, 2.0]
        assert torch.equal(weight, torch.full((WIDTH, WIDTH), 0.5))
        assert count == 2 * LAYERS + 1


def test_a_copied_layer_is_cut_like_the_original():
    """torch's TransformerEncoder copies its layer; a copy without its slice would be NaN."""

    def work(context: ParallelContext):
        with Init(mpu=context):
            one = nn.Sequential(nn.Linear(4, 4))
            model = nn.Sequential(*[copy.deepcopy(one) for _ in range(2)])
        with GatheredParameters(model[0][0].weight, modifier_rank=1):
            model[0][0].weight.zero_()
        assert partition_of(model[1][0].weight)
        return whole(one[0].weight), whole(model[0][0].weight), whole(model[1][0].weight)

    for original, changed, second in on_ranks(2, work):
        assert torch.equal(original, second)
        assert not second.isnan().any()
        assert not changed.any()


def test_other_threads_build_as_usual():
    context = solo_context()
    found = []
    with Init(mpu=context):
        thread = threading.Thread(target=lambda: found.append(nn.Sequential(nn.Linear(2, 2))))
        thread.start()
        thread.join()
    assert not any(map(partition_of, found[0].parameters()))
    assert not any(map(partition_of, nn.Sequential(nn.Linear(2, 2)).parameters()))


def test_a_failure_while_building_leaves_nothing_behind():
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            built.append(self)
            raise ZeroDivisionError

    built: list[nn.Module] = []
    with pytest.raises(ZeroDivisionError), Init(mpu=solo_context()):
        Failing()
    assert "apply" not in built[0].__dict__
    assert not partition_of(nn.Sequential(nn.Linear(2, 2))[0].weight)


def test_writing_outside_of_a_gather_fails():
    with Init(mpu=solo_context()):
        model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(MegazeroError, match=r"shape \[2, 2\] must be whole"), torch.no_grad():
        model[0].weight.add_(1.0)


def test_it_can_be_switched_off_and_told_a_type(tmp_path):
    with Init(enabled=False):
        assert not partition_of(nn.Sequential(nn.Linear(2, 2))[0].weight)
    config = {"train_batch_size": 1, "bf16": {"enabled": True}}
    with Init(config_dict_or_path=config, mpu=solo_context()):
        model = nn.Sequential(nn.Linear(2, 2))
    assert model[0].weight.dtype == torch.bfloat16
    assert Init(mpu=solo_context(), dtype=torch.float16).dtype == torch.float16
    finished = nn.Sequential(nn.Linear(2, 2))
    Init(module=finished, mpu=solo_context())
    assert all(map(partition_of, finished.parameters()))
    with pytest.raises(ConfigError, match="unknown key `zero_optimization.stages`"):
        Init(config_dict_or_path={"zero_optimization": {"stages": 3}}, mpu=solo_context())


def storages(roots: list[object]) -> int:
    """Bytes of distinct memory that parameters and their slices hold."""
    found = {}
    for param in roots:
        with torch._C.DisableTorchFunctionSubclass():  # looking would make it whole while it is built
            data = param.data
        tensors = [data, *([param.shard_holder.shard] if partition_of(param) else [])]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def test_the_whole_model_is_on_no_rank_while_it_is_built():
    ranks, layer = 4, 4 * (WIDTH * WIDTH + WIDTH)

    def work(context: ParallelContext):
        params: list[nn.Parameter] = []
        peak = 0

        class Watched(nn.Module):
            def __init__(self) -> None:
                nonlocal peak
                super().__init__()
                self.parts = nn.ModuleList()
                for _ in range(LAYERS):
                    self.parts.append(nn.Linear(WIDTH, WIDTH))
                    params.extend(self.parts[-1].parameters())
                    peak = max(peak, storages(params))

        with Init(mpu=context):
            Watched()
        return peak

    slack = 4 * 4 * LAYERS  # a placeholder and a rounded slice of each parameter
    assert all(peak <= LAYERS * layer / ranks + slack for peak in on_ranks(ranks, work))


def test_modifications_of_whole_and_of_sharded_parameters_reach_the_masters():
    """After an engine has taken the parameters over, at a stage that cuts them and at one that does not."""

    def work(context: ParallelContext):
        results = []
        for stage in (1, 3):
            model = nn.Linear(3, 2)
            policy = make_policy(stage=stage, persistence_threshold=0)
            units = module_units(model)
            store = build_store(units, policy, context)
            UserParallel(model, units, store, policy, context)
            with GatheredParameters(model.parameters(), modifier_rank=1):
                model.weight.fill_(float(context.rank))
            with GatheredParameters(model.weight):
                seen = model.weight.clone()
            masters = torch.cat(
                [
                    piece.float()
                    for bucket in store.buckets
                    for _, _, piece in bucket.layout.member_pieces(store.at_rest(bucket)["weight"])
                ]
            )
            results.append((seen.unique().tolist(), masters.numel()))
        return results

    assert on_ranks(2, work) == [[([1.0], 4), ([1.0], 4)]] * 2


def test_the_modifying_rank_must_hold_the_parameters():
    with Init(mpu=solo_context()):
        model = nn.Sequential(nn.Linear(2, 2))
    with (
        pytest.raises(ConfigError, match="`modifier_rank` must be one of the ranks"),
        GatheredParameters(model.parameters(), modifier_rank=3),
    ):
        pass
    assert model[0].weight.isnan().all()


def _zero_and_fail(param: nn.Parameter) -> None:
    param.zero_()
    raise ZeroDivisionError


def test_a_failing_block_changes_nothing():
    def work(context: ParallelContext):
        with Init(mpu=context):
            model = nn.Sequential(nn.Linear(2, 2))
        before = whole(model[0].weight)
        with pytest.raises(ZeroDivisionError), GatheredParameters(model.parameters(), modifier_rank=0):
            _zero_and_fail(model[0].weight)
        return torch.equal(before, whole(model[0].weight))

    assert on_ranks(2, work) == [True, True]


def test_reads_of_other_modules_parameters_are_noted():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    register_external_parameter(model, model[0].weight)
    with GatheredParameters(model[1].bias, fwd_module=model):
        pass
    noted = external_parameters(model)
    assert noted[0] is model[0].weight
    assert noted[1] is model[1].bias
    assert len(noted) == 2
    with pytest.raises(ConfigError, match="must be a torch.nn.Parameter, but is a str"):
        register_external_parameter(model, "weight")
