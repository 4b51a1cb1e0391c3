"""Files of whole weights: those of `torch.save` bit for bit, whole or not at all, one tensor at a time."""

from __future__ import annotations

import os
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megazero.checkpoint.tensor_file import Later
from megazero.deepspeed.engine.weights import module_stream
from megazero.deepspeed.weights_file import write_weights
from megazero.errors import CheckpointError
from megazero.mpu.context import ParallelContext
from tests.deepspeed.user_models import build, on_ranks, settings, start

TENSORS = {
    "table": torch.arange(12.0).view(4, 3),
    "scale": torch.tensor(2.5, dtype=torch.bfloat16),
    "none": torch.empty(0, 3),
    "rows": torch.arange(40.0).view(8, 5)[2:4],
    "turned": torch.arange(6.0).view(2, 3).t(),
    "count": torch.tensor([True, False]),
    "step": torch.tensor(7),
}
NAMES = {**{name: name for name in TENSORS}, "head": "table", "last": "count"}


def laters(tensors: dict[str, Tensor]) -> list[tuple[str, Later]]:
    return [(name, Later(x.dtype, tuple(x.shape), lambda x=x: x)) for name, x in tensors.items()]


def test_it_is_what_torch_saves_bit_for_bit(tmp_path: Path) -> None:
    write_weights(tmp_path / "new" / "weights.bin", laters(TENSORS), NAMES)
    plain = {name: x.clone(memory_format=torch.contiguous_format) for name, x in TENSORS.items()}
    torch.save({name: plain[own] for name, own in NAMES.items()}, tmp_path / "weights.bin")
    assert (tmp_path / "new" / "weights.bin").read_bytes() == (tmp_path / "weights.bin").read_bytes()
    assert os.listdir(tmp_path / "new") == ["weights.bin"]


def test_in_safetensors_each_name_has_a_copy(tmp_path: Path) -> None:
    write_weights(tmp_path / "weights.safetensors", laters(TENSORS), NAMES)
    state = load_file(tmp_path / "weights.safetensors")
    assert state.keys() == NAMES.keys()
    assert all(torch.equal(state[name], TENSORS[own]) for name, own in NAMES.items())


@pytest.mark.parametrize("name", ["weights.bin", "weights.safetensors"])
@pytest.mark.parametrize("error", [OSError("full"), RuntimeError("lost"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file(name: str, error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("old")
    (tmp_path / f".{name}.partial").mkdir()  # of a process that was killed

    def fail() -> Tensor:
        raise error

    last = ("late", Later(torch.float32, (2,), fail))
    kind = CheckpointError if isinstance(error, RuntimeError) else type(error)
    with pytest.raises(kind):
        write_weights(path, [*laters(TENSORS), last], {**NAMES, "late": "late"})
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["weights.bin", "weights.safetensors"])
def test_one_tensor_is_held_at_a_time(name: str, tmp_path: Path) -> None:
    made: list[weakref.ref[Tensor]] = []

    def make(number: int) -> Tensor:
        assert sum(one() is not None for one in made) <= 1  # the last one, until this one replaces it
        tensor = torch.full((100,), float(number))
        made.append(weakref.ref(tensor))
        return tensor

    tensors = [(str(n), Later(torch.float32, (100,), partial(make, n))) for n in range(20)]
    write_weights(tmp_path / name, tensors, {n: n for n, _ in tensors})
    assert len(made) == 20


def test_an_engine_gathers_one_parameter_at_a_time() -> None:
    """At stage 3 each rank has its shards and, while it is written, one whole parameter."""

    def work(context: ParallelContext) -> list[int]:
        engine = start(context, build(Deep), settings(3))
        params = list(engine.module.parameters())
        stream, _ = module_stream(engine._state, keep=context.rank == 0)
        whole = []
        for _ in stream:
            whole.append(sum(any(param.stride()) for param in params))
        return whole

    first, second = on_ranks(2, work)
    assert (first, second) == ([0] * 6, [])


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6))
