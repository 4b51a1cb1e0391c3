"""A world of one rank over a real backend: every collective is the identity, on NCCL with one GPU too."""

from __future__ import annotations

import pytest

from tests.forks import run

CODE = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from megazero.mpu.torch_group import TorchGroup, start_world

backend, device, store = sys.argv[1:]
start_world(backend, 0, 1, timedelta(seconds=60), init_method=f"file://{store}")
group = TorchGroup("world", 0, (0,), dist.group.WORLD)
x = torch.arange(6.0, device=device).view(3, 2)
for op in ("sum", "max", "min"):
    y = x.clone()
    group.all_reduce(y, op, async_op=True).wait()
    assert torch.equal(x, y), op
for call in (group.all_gather, group.reduce_scatter, group.all_to_all):
    y = torch.zeros_like(x)
    call(y, x).wait()
    assert torch.equal(x, y), call
y = x.clone()
group.broadcast(y, 0).wait()
group.barrier()
assert torch.equal(x, y)
dist.destroy_process_group()
print("done")
"""


@pytest.mark.parametrize(
    ("backend", "device"), [("gloo", "cpu"), pytest.param("nccl", "cuda", marks=pytest.mark.gpu)]
)
def test_collectives_of_one_rank_are_the_identity(tmp_path, backend, device):
    done = run("-c", CODE, backend, device, tmp_path / "store")
    assert done.stdout == "done\n", done.stderr
