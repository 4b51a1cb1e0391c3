"""Engines whose ranks share sequences: groups, batch sizes, and one scale of gradients at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megazero.deepspeed.comm import groups, world
from megazero.deepspeed.comm.adopt import find_context
from megazero.deepspeed.config.settings import read_settings
from megazero.deepspeed.engine.arguments import Mesh
from megazero.deepspeed.initialize import initialize
from megazero.deepspeed.sequence.state import SequenceMpu, for_sequences, initialize_sequence_parallel
from megazero.deepspeed.zero.gathered import GatheredParameters
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from tests.tables import over_table

ROWS = torch.arange(32.0).view(8, 4) / 16


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def step(model: nn.Module, x: Tensor, stage: int, **arguments: Any) -> tuple[Tensor, Any]:
    """What the gradient of a mean over a piece's own rows was, and the engine."""
    more = arguments.pop("json", {})
    engine, *_ = initialize(
        model=model, model_parameters=model.parameters(), config=config(stage, **more), **arguments
    )
    for _ in range(2):
        engine.backward(engine(x).square().mean())
        engine.step()
    with GatheredParameters(model.weight):
        return 0.5 - model.weight.detach().clone(), engine


def layer() -> nn.Module:
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    return model


def _scale(rank: int, size: int, ranks: int, stage: int, way: str) -> None:
    whole = layer()
    whole(ROWS).square().mean().backward()
    mpu = initialize_sequence_parallel(ranks) if way == "mpu" else None
    arguments = {
        "mpu": {"mpu": mpu},
        "mesh_param": {"mesh_param": (size // ranks, ranks)},
        "json": {"json": {"sequence_parallel_size": ranks, "data_parallel_size": size // ranks}},
    }[way]
    change, engine = step(layer(), ROWS.chunk(size)[rank], stage, **arguments)
    torch.testing.assert_close(change, whole.weight.grad)
    replicas = size // ranks
    assert engine.train_batch_size() == 3 * 2 * replicas
    sizes = groups.SEQUENCE.size(), groups.DATA.size(), groups.SEQUENCE_DATA.size()
    assert sizes == (ranks, replicas, size)
    first = rank - rank % ranks
    assert groups.SEQUENCE.ranks() == list(range(first, first + ranks))
    assert world.get_all_ranks_from_group(groups.SEQUENCE.group()) == groups.SEQUENCE.ranks()
    if mpu is not None:
        assert mpu.get_sequence_parallel_rank() == rank % ranks == groups.SEQUENCE.rank()
        assert mpu.get_sequence_data_parallel_rank() == rank
        sizes = mpu.get_sequence_parallel_group(), mpu.get_data_parallel_group()
        assert [world.get_world_size(group) for group in sizes] == [ranks, replicas]
        assert world.get_world_size(mpu.get_sequence_data_parallel_group()) == size


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("way", ["mpu", "mesh_param", "json"])
def test_gradients_are_means_over_all_ranks_at_every_stage(pool, stage, way):
    """At stages 0 to 2 DeepSpeed sums them over the ranks of a sequence, or leaves them apart."""
    pool.run(_scale, 2, 2, stage, way)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_means_over_replicas_too(pool, stage):
    pool.run(_scale, 4, 2, stage, "mpu")


def contexts(ranks: int) -> list[ParallelContext]:
    threads = ThreadWorld(ranks)
    return threads.run(lambda rank: thread_context(threads, ProcessGrid(cp=ranks), rank))


@over_table(
    ("ranks", "stage", "given", "sent", "noted"),
    [
        (2, 1, "bf16", "bf16", True),
        (2, 3, "fp16", "fp16", False),
        (2, 0, None, "fp32", True),
        (1, 1, "bf16", "fp32", False),
    ],
)
def test_gradients_are_sent_as_asked_and_a_note_says_their_scale(ranks, stage, given, sent, noted):
    more = {} if given is None else {"seq_parallel_communication_data_type": given}
    settings = for_sequences(read_settings(config(stage, **more), 1), contexts(ranks)[0])
    assert settings.zero.grad_reduce_dtype == sent
    assert (
        any("multiply a loss that is summed over these ranks by 2" in note for note in settings.notes)
        == noted
    )


class Elsewhere:
    """An mpu whose sequences are shared by ranks far apart."""

    def get_sequence_parallel_world_size(self) -> int:
        return 1

    def get_sequence_parallel_rank(self) -> int:
        return 1


def test_other_layouts_are_refused():
    with pytest.raises(ConfigError, match="has sequence-parallel rank 0, but it says 1"):
        find_context(Elsewhere())
    with pytest.raises(ConfigError, match="must"):
        find_context(Mesh(None, 2))


def test_an_mpu_of_one_rank_knows_its_groups():
    mpu = initialize_sequence_parallel(1)
    assert isinstance(mpu, SequenceMpu)
    assert find_context(mpu) is mpu.context
    assert world.get_world_size(mpu.get_sequence_parallel_group()) == 1
