"""What differs by replica: saved as a row for each, and read by as many replicas, or by another number."""

from __future__ import annotations

import pytest
import torch

from megazero.checkpoint.box import gaps_or_overlaps
from megazero.checkpoint.part import Key, misfits
from megazero.checkpoint.replica_rows import ReplicaRows
from megazero.checkpoint.shards import parts_to_read, parts_to_write, state_keys
from megazero.mpu.grid import ProcessGrid
from megazero.optim.compressed.onebit_adam import OnebitAdam
from megazero.optim.compressed.onebit_lamb import OnebitLamb
from megazero.optim.compressed.zero_one_adam import ZeroOneAdam, ZeroOneSteps
from megazero.optim.lamb import Lamb
from tests.optim.compressed.training import Run, on_ranks

RULES = {
    "1-bit Adam": OnebitAdam(3, 0.8, 0.95, 1e-2),
    # Step 6 is one that each replica makes alone.
    "0/1 Adam": ZeroOneAdam(ZeroOneSteps(3, 2, 1, 4), beta1=0.8, beta2=0.95, eps=1e-2),
    "1-bit LAMB": OnebitLamb(3, Lamb(0.8, 0.95, 1e-2)),
}
STEPS = 6
EVERY_RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


class Saved:
    """A source: the parts that all ranks write, as whole tensors."""

    def __init__(self, ranks):
        written = {}
        for part in (part for parts in ranks for part in parts):
            written.setdefault(part.key, []).append(part)
        self.tensors = {}
        for key, parts in written.items():
            assert len({part.shape for part in parts}) == 1
            assert gaps_or_overlaps(parts[0].shape, [p.box for p in parts if p.box.numel]) is None, key
            self.tensors[key] = torch.zeros(parts[0].shape)
            for part in parts:
                self.tensors[key][part.box.slices] = part.tensor
        self.shapes = {key: tuple(tensor.shape) for key, tensor in self.tensors.items()}

    def read(self, parts):
        for part in parts:
            assert part.shape == self.shapes[part.key]
            part.tensor.copy_(self.tensors[part.key][part.box.slices])


def save(rule, grid: ProcessGrid, bucket_size: int = 25, steps: int = STEPS) -> Saved:
    def work(context):
        run = Run(rule, context, bucket_size).train(range(1, steps + 1))
        return [*parts_to_write(run.optimizer, context)]

    return Saved(on_ranks(grid, work))


def load(run: Run, saved: Saved) -> None:
    optimizer = run.optimizer
    parts = parts_to_read(optimizer, run.context)
    source = ReplicaRows(saved, parts, optimizer.private_kinds)
    assert misfits(source.shapes, {part.key: part.shape for part in parts}) == []
    assert set(source.shapes) == state_keys(optimizer)
    source.read(parts)
    optimizer.publish()
    optimizer.updates = STEPS


@EVERY_RULE
@pytest.mark.parametrize("grid", [{"dp": 2}, {"dp": 3, "tp": 2}], ids=str)
def test_as_many_replicas_go_on_bit_for_bit(rule, grid):
    saved = save(rule, ProcessGrid(**grid))

    def work(context):
        straight = Run(rule, context).train(range(1, STEPS + 5))
        resumed = Run(rule, context)
        load(resumed, saved)
        resumed.train(range(STEPS + 1, STEPS + 5))
        used = zip(straight.params, resumed.params, strict=True)
        return [a.equal(b) for a, b in zip(straight.flats(), resumed.flats(), strict=True)] + [
            a.equal(b) for a, b in used
        ]

    assert all(map(all, on_ranks(ProcessGrid(**grid), work)))


@EVERY_RULE
def test_buckets_and_slices_of_another_layout_take_the_same_state(rule):
    """A checkpoint knows no buckets, so state comes back bit for bit into other ones."""
    first = save(rule, ProcessGrid(dp=2))

    def work(context):
        run = Run(rule, context, bucket_size=1)
        load(run, first)
        return [*parts_to_write(run.optimizer, context)]

    there = Saved(on_ranks(ProcessGrid(dp=2, tp=2), work))
    assert there.shapes == first.shapes
    assert all(there.tensors[key].equal(tensor) for key, tensor in first.tensors.items())


@EVERY_RULE
@pytest.mark.parametrize("replicas", [1, 3, 4])
def test_another_number_of_replicas_keeps_the_mean(rule, replicas):
    """All begin with the mean of the saved replicas' errors; a server's error is sharded, and re-cut."""
    first = save(rule, ProcessGrid(dp=2))

    def work(context):
        run = Run(rule, context)
        load(run, first)
        return [*parts_to_write(run.optimizer, context)]

    second = Saved(on_ranks(ProcessGrid(dp=replicas), work))
    private = set(rule.needs.private) | {"worker_error"}
    for key, tensor in first.tensors.items():
        found = second.tensors[key]
        if key.kind in private:
            assert found.shape == (replicas, *tensor.shape[1:])
            for row in found:
                torch.testing.assert_close(row, tensor.mean(0))
        else:
            assert found.equal(tensor), key
    assert first.tensors[Key("columns", "worker_error")].any()
    assert first.tensors[Key("columns", "server_error")].any()


def test_a_checkpoint_of_another_shape_is_still_refused():
    first = save(RULES["1-bit Adam"], ProcessGrid(dp=2))
    key = Key("columns", "worker_error")
    first.shapes[key] = (2, 6, 4)

    def work(context):
        run = Run(RULES["1-bit Adam"], context)
        parts = parts_to_read(run.optimizer, context)
        source = ReplicaRows(first, parts, run.optimizer.private_kinds)
        return misfits(source.shapes, {part.key: part.shape for part in parts})

    assert (
        on_ranks(ProcessGrid(dp=3), work) == [["columns/worker_error has shape [2, 6, 4], not [3, 4, 6]"]] * 3
    )
