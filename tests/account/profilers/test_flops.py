"""FLOPs by module: equal to formulas, kernels that are not seen included, and nothing is left behind."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megazero.account.profilers.clock import HostClock
from megazero.account.profilers.flops.attention import AttentionShapes
from megazero.account.profilers.flops.counter import (
    ModuleCounter,
    ModuleProfile,
    fill_containers,
    profiles_of,
)
from megazero.account.profilers.flops.native import FlopsProfile
from megazero.account.profilers.flops.table import ModuleRow, largest_types, module_tree
from megazero.config.tree.config import Config
from megazero.layers.attention import SelfAttention
from megazero.mpu.context import solo_context
from megazero.train.loop import Loop
from tests.account.profilers.runs import train


def profiled(model: nn.Module, run) -> dict[str, ModuleProfile]:
    profiles = profiles_of(model)
    counter = ModuleCounter(profiles, HostClock())
    counter.start(counts=True)
    run()
    counter.stop()
    counter.settle()
    fill_containers(model, profiles)
    return {name: profiles[module] for name, module in model.named_modules()}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 4, bias=False)])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


def test_a_module_counts_what_is_in_it_and_a_list_too() -> None:
    model = Two()
    profiles = profiled(model, lambda: model(torch.ones(3, 8)))
    macs = {"parts.0": 3 * 8 * 16, "parts.1": 3 * 16 * 4, "parts": 3 * 192, "": 3 * 192}
    assert {name: profile.macs for name, profile in profiles.items()} == macs
    assert profiles[""].params == 8 * 16 + 16 + 64
    assert profiles[""].duration >= profiles["parts"].duration > 0
    assert profiles["parts.0"].calls == 1


def test_a_forward_that_a_backward_makes_again_is_not_counted() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    x = torch.ones(3, 8, requires_grad=True)

    def run() -> None:
        checkpoint(model, x, use_reentrant=False).sum().backward()

    profiles = profiled(model, run)
    assert profiles["0"].macs == 3 * 8 * 16
    assert profiles["1"].flops == 3 * 16
    assert profiles[""].calls == 1


def state_of(model: nn.Module) -> list[dict]:
    return [{name: str(value) for name, value in vars(module).items()} for module in model.modules()]


def test_hooks_and_torch_are_as_they_were() -> None:
    """DeepSpeed's profiler leaves `torch.bmm` pointing at matmul."""
    model = Two()
    functions = [(place, name) for place in (torch, torch.Tensor, nn.functional) for name in dir(place)]

    def snapshot() -> tuple:
        return state_of(model), [getattr(place, name, None) for place, name in functions if name[0] != "_"]

    before, outside = snapshot()
    profiled(model, lambda: model(torch.ones(3, 8)))
    after, now = snapshot()
    assert after == before
    assert all(one is other or one == other for one, other in zip(now, outside, strict=True))
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


def lines_of(capsys) -> list[str]:
    lines = capsys.readouterr().out.splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("flops profile"))
    end = next(at for at, line in enumerate(lines) if line.startswith("by formula"))
    return lines[begin : end + 1]


# 2 layers of hidden size 32, 4 heads, 16 tokens, 8 sequences; the vocabulary is padded to 128 on each rank.
TOKENS = 16 * 8
LAYER = TOKENS * (32 * 96 + 32 * 32 + 2 * 32 * 128) + 2 * 8 * 16 * 16 * 32
HEAD = TOKENS * 32 * 128


def summary(lines: list[str], name: str) -> str:
    return next(line for line in lines if line.startswith(f"  {name}:"))[34:]


@pytest.mark.parametrize(
    ("axes", "flags"),
    [
        ({}, ""),
        ({"pp": 2}, ""),
        ({"tp": 2}, "--sequence-parallel"),
        ({"dp": 2}, "--zero-stage 3 --recompute-granularity full --recompute-method uniform"),
    ],
)
def test_what_all_ranks_count_is_the_formula(capsys, axes: dict[str, int], flags: str) -> None:
    """Attention too, whose kernel on a CPU is not torch's. On two replicas there are twice the samples."""
    train(f"--flops-profiler {flags}", **axes)
    lines = lines_of(capsys)
    ranks, replicas = max([1, *axes.values()]), axes.get("dp", 1)
    slices = axes.get("tp", 1)
    flops = 2 * replicas * (2 * LAYER + slices * HEAD)
    assert summary(lines, "fwd flops of model") == f"{flops / 1e6:.2f} M".replace(".00", "")
    assert summary(lines, "world size") == str(ranks)
    assert summary(lines, "data parallel size") == str(replicas)
    params = 2 * (32 * 96 + 96 + 32 * 32 + 32 + 2 * 32 * 128 + 128 + 32 + 4 * 32) + (64 + 16 + 2) * 32
    assert summary(lines, "params of model") == f"{params / 1e3:.2f} K"
    layers = [line for line in lines if re.match(r" +layers\.\d \(", line)]
    assert [line.strip()[:8] for line in layers] == ["layers.0", "layers.1"]
    macs = f"{round(LAYER / slices / 1e6, 2):g} MMACs" if slices == 1 else "851.97 KMACs"
    assert all(f", {macs} = " in line for line in layers)
    assert sum(line.startswith("stage ") for line in lines) == (2 if "pp" in axes else 0)
    assert "warning" not in lines[-1]
    assert lines[-2] == "* attention counted from its shapes, in full: the counter does not see its kernel"


@pytest.mark.parametrize("tp", [1, 2])
def test_the_gate_of_attention_is_counted(capsys, tp: int) -> None:
    """Its rows are as many as the queries', in the same product."""
    train("--flops-profiler --attention-output-gate", tp=tp)
    flops = 2 * (2 * (LAYER + TOKENS * 32 * 32) + tp * HEAD)
    assert summary(lines_of(capsys), "fwd flops of model") == f"{flops / 1e6:.2f} M".replace(".00", "")


LATENT = (
    "--multi-latent-attention --position-embedding-type rope --kv-lora-rank 12 --qk-head-dim 6 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 5 --q-lora-rank 10"
)


@pytest.mark.parametrize(("axes", "slices"), [({}, 1), ({"tp": 2}, 2), ({"pp": 2}, 1)])
def test_latent_attention_and_further_tokens_are_counted(capsys, axes: dict[str, int], slices: int) -> None:
    """Each rank makes small vectors and joins of its own, and the vocabulary is padded to 128 on each."""
    train(f"--flops-profiler {LATENT} --mtp-num-layers 1", **axes)
    lines = lines_of(capsys)
    small = TOKENS * (32 * 10 + 32 * 16)
    layer = TOKENS * (10 * 40 + 12 * 44 + 20 * 32 + 2 * 32 * 128) + 8 * 16 * 16 * 4 * (10 + 5)
    further = slices * TOKENS * 64 * 32 + slices * HEAD
    flops = 2 * (3 * (layer + slices * small) + further + slices * HEAD)
    assert summary(lines, "fwd flops of model") == f"{flops / 1e6:.2f} M"
    assert "warning" not in "".join(lines)


def test_a_kernel_that_nobody_counts_is_warned_of(capsys, monkeypatch) -> None:
    monkeypatch.setattr(AttentionShapes, "complete", lambda self, model, profiles: set())
    train("--flops-profiler")
    assert "; warning: only 9" in lines_of(capsys)[-1]


def test_a_count_that_differs_from_the_shapes_is_warned_of() -> None:
    attention = SelfAttention.__new__(SelfAttention)
    nn.Module.__init__(attention)
    model = nn.Sequential(attention)
    shapes = AttentionShapes(1)
    shapes._macs[attention] = 1000
    profiles = {attention: ModuleProfile(macs=2000), model: ModuleProfile(macs=2000)}
    assert shapes.complete(model, profiles) == set()
    assert profiles[model].macs == 2000
    assert shapes.warnings == [
        "warning: 0 has 2 KMACs of attention by the counter, and 1 KMACs by its shapes"
    ]


def test_the_time_is_that_of_a_step_that_is_not_counted(capsys, monkeypatch) -> None:
    counted = []
    start = ModuleCounter.start

    def noted(self: ModuleCounter, *, counts: bool) -> None:
        counted.append(counts)
        start(self, counts=counts)

    monkeypatch.setattr(ModuleCounter, "start", noted)
    train(
        "--flops-profiler --flops-profiler-step 2 --no-flops-profiler-detailed "
        "--flops-profiler-module-depth 0"
    )
    assert counted == [True, False]
    lines = lines_of(capsys)
    assert lines[0] == "flops profile at step 2, of all its micro-batches"
    assert [line for line in lines if line.startswith("depth")] == ["depth 0:"]
    assert not any("layers.0" in line for line in lines)


def test_at_the_end_of_a_training_the_counted_step_is_reported(capsys, tmp_path) -> None:
    path = tmp_path / "folder" / "flops.txt"
    train(f"--flops-profiler --flops-profiler-step 4 --flops-profiler-output-file {path}")
    text = path.read_text().splitlines()
    assert text[0].startswith("flops profile at step 4")
    assert text[-1] == "the training ended with the step that was counted, which counting made slower"
    assert f"flops profile: wrote {path}" in capsys.readouterr().out


def test_afterwards_nothing_is_called(monkeypatch) -> None:
    """In the steps that are not profiled modules have no hooks."""
    hooks = {}
    step = Loop._next

    def noted(self: Loop, state):
        modules = [m for chunk in self.meters.engine.executor.chunks.values() for m in chunk.modules()]
        hooks[state.iteration + 1] = sum(len(m._forward_hooks) for m in modules)
        return step(self, state)

    def observed(flags: str) -> dict[int, int]:
        hooks.clear()
        train(flags)
        return dict(hooks)

    monkeypatch.setattr(Loop, "_next", noted)
    own = observed("")
    profiled = observed("--flops-profiler --flops-profiler-step 2")
    assert profiled[1] == own[1]
    assert profiled[4] == own[4]
    assert profiled[2] > own[2]
    assert profiled[3] > own[3]


@pytest.mark.fast
def test_tables() -> None:
    rows = [
        ModuleRow("", "GPT", ModuleProfile(4000, 2000, 30, 0.002)),
        ModuleRow("a", "Linear", ModuleProfile(3000, 1500, 20, 0.0005)),
        ModuleRow("b", "Norm", ModuleProfile(1000, 500, 10, 0.0015), marked=True),
        ModuleRow("b.c", "Linear", ModuleProfile(0, 0, 0, 0.0)),
    ]
    assert [ModuleRow.from_json(row.as_json()) for row in rows] == rows
    assert largest_types(rows, 1, 2) == [
        "the 2 largest types of modules at each depth",
        "depth 0:",
        "    params      {'GPT': '30'}",
        "    macs        {'GPT': '2 KMACs'}",
        "    duration    {'GPT': '2 ms'}",
        "depth 1:",
        "    params      {'Linear': '20', 'Norm': '10'}",
        "    macs        {'Linear': '1.5 KMACs', 'Norm': '500 MACs'}",
        "    duration    {'Norm': '1.5 ms', 'Linear': '500 us'}",
    ]
    assert module_tree(rows, rows[0].profile, 1) == [
        "each module: parameters, MACs, time, FLOPS",
        "model (GPT): 30 = 100%, 2 KMACs = 100%, 2 ms = 100%, 2 MFLOPS",
        "  a (Linear): 20 = 66.7%, 1.5 KMACs = 75%, 500 us = 25%, 6 MFLOPS",
        "  b (Norm): 10 = 33.3%, 500 MACs = 25%, 1.5 ms = 75%, 666.67 KFLOPS *",
    ]


def test_no_profile_is_made_of_what_is_compiled() -> None:
    """Hooks of the modules within a compiled layer do not run."""
    from megazero.config.rules.table import check
    from tests.config.samples import make_config

    config: Config = make_config({"profiling.flops_profiler": True, "acceleration.compile": True})
    assert any("flops_profiler" in problem for problem in check(config, None))
    assert FlopsProfile(make_config({"profiling.flops_profiler": True}), solo_context()).step == 1
