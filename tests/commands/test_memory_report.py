"""`megazero memory-report`: sizes to the byte, planned and measured, table, picture, bad input."""

from __future__ import annotations

import json

import pytest
import torch

from megazero.account.memory import MemoryMeter, PeakOfOutputs
from megazero.commands.memory_report import first_step, main, planned_memory
from megazero.commands.memory_report.picture import memory_figure
from megazero.commands.memory_report.table import RankMemory, merge_alike, read_memory, rows, verdict
from megazero.config.resolve import parse_config
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.pictures.style import DARK, styled
from megazero.plan.words import shown
from megazero.train.pretraining import pretrain_on
from megazero.zero.store.store import GRADIENT, WEIGHT
from megazero.zero.store.tier import TierSlot
from tests.zero.harness import Trainer, in_threads
from tests.zero.models import Zoo, zoo_loss
from tests.zero.policies import make_policy
from tests.zero.test_store import STORES, DeviceStore, policy

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 61 --mock-data "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --eval-iters 0 --train-iters 2 "
    "--zero-reduce-bucket-size 4000 --zero-param-persistence-threshold 100"
)
LARGEST = 4096
AT_REST = ("weights", "masters", "moments", "gradients")


def really_held(trainer: Trainer) -> dict[str, dict[str, int]]:
    """Bytes of the storages and slots that a store has, found without asking it."""
    found: dict[str, dict[str, int]] = {}
    seen: set[int] = set()

    def add(kind: str, held, place: str = "device") -> None:
        if isinstance(held, TierSlot):
            key, size = id(held), held.nbytes
        else:
            key, size = held.untyped_storage()._cdata, held.untyped_storage().nbytes()
        if key not in seen and size:
            seen.add(key)
            there = found.setdefault(place, dict.fromkeys(AT_REST, 0))
            there[kind] += size

    store = trainer.store
    for bucket in store.buckets:
        add("weights", bucket.full)
        held = (store._held if isinstance(store, DeviceStore) else store._kept)[bucket]
        placement = getattr(store, "placement", None)
        if bucket.layout.row.shard_params:
            slot = isinstance(held.shard, TierSlot)
            add("weights", held.shard, placement.parameters.name if slot else "device")
        if held.sums is not None:
            add("gradients", held.sums)
        for kind, each in held.state.items():
            what = {WEIGHT: "masters", GRADIENT: "gradients"}.get(kind, "moments")
            tier = None
            if isinstance(each, TierSlot):
                tier = placement.gradients if kind == GRADIENT else placement.state
            add(what, each, "device" if tier is None else tier.name)
    return found


@pytest.mark.parametrize("kind", [DeviceStore, *STORES[1:]], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("stage", range(4))
def test_sizes_are_those_of_the_storages_and_slots_to_the_byte(stage, kind):
    for settings in ({}, {"main_dtype": torch.bfloat16, "accumulation_dtype": torch.bfloat16}):

        def work(context, settings=settings):
            trainer = Trainer(Zoo(), zoo_loss, policy(stage, **settings), context, kind=kind)
            trainer.train(1)
            told = {
                place: {kind: size for kind, size in kinds.items() if kind != "buffers" and size}
                for place, kinds in trainer.store.sizes().items()
            }
            held = really_held(trainer)
            return {p: k for p, k in told.items() if k}, {
                p: {k: n for k, n in kinds.items() if n} for p, kinds in held.items()
            }

        for told, held in in_threads(2, work):
            assert told == held


def test_operators_outputs_are_counted_while_they_are_alive():
    x = torch.ones(1000)
    for device in ("cpu", "meta"):
        with PeakOfOutputs() as found:
            a = x.to(device, copy=True) + 1
            a[10:].view(-1, 10).add_(1)
            b = a * 2
            del a
            c = b * 3
        assert found.most == 2 * 4000
        assert c.numel() == b.numel()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_a_step_takes_is_gathers_gradient_buffers_and_the_rest(stage):
    """Buffers are literal: two buckets of 4 x 4 fp32 weights at a time, beside what the loss makes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(5)))
    settings = make_policy(
        stage, bucket_size=16, prefetch=0, max_live=0, persistence_threshold=0, shard_alone=stage > 0
    )
    trainer = Trainer(model, lambda m, step, sample: m(torch.ones(3, 4)).sum(), settings, solo_context())
    meter = MemoryMeter(trainer.store, trainer.parallel, torch.device("cpu"))
    with meter.over_a_step():
        trainer.accumulate(0, 12)
    sizes = meter.sizes()["device"]
    assert sizes["weights"] == sizes["gradients"] == 5 * 64
    assert sizes["moments"] == 2 * 5 * 64
    assert "masters" not in sizes
    gathered, transient = trainer.parallel.most_buffer_bytes
    assert (gathered > 0) == (stage == 3)
    assert transient == (0 if stage == 0 else 2 * 64)
    assert gathered == (64 if stage == 3 else 0)
    assert sizes.get("buffers", 0) == gathered + transient
    assert sizes["activations"] >= 5 * 48


def run(flags: str, path, size: int = 1) -> list[RankMemory]:
    config = parse_config(f"{SMALL} {flags} --metrics-jsonl {path}".split(), world_size=size).config
    if size == 1:
        pretrain_on(config, solo_context())
    else:
        world, pp = ThreadWorld(size, timeout=30.0), config.parallel.pipeline_model_parallel_size
        grid = ProcessGrid(pp=pp, dp=size // pp)
        world.run(lambda rank: pretrain_on(config, thread_context(world, grid, rank)))
    return read_memory(path)


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("", 1),
        ("--zero-stage 2 --pipeline-model-parallel-size 2 --bf16", 4),
        ("--zero-stage 3 --offload-optimizer nvme --offload-parameters cpu --offload-path {}", 2),
    ],
)
def test_what_is_planned_is_what_a_run_holds(tmp_path, flags, size):
    flags = flags.format(tmp_path)
    found = run(flags, tmp_path / "m.jsonl", size)
    assert [each.ranks for each in found] == [(rank,) for rank in range(size)]
    planned = planned_memory(
        first_step(parse_config(f"{SMALL} {flags}".split(), world_size=size).config, size)
    )
    by_rank = {rank: each.places for each in planned for rank in each.ranks}
    for each in found:
        wanted = by_rank[each.ranks[0]]
        for place, kinds in each.places.items():
            for kind in AT_REST:
                assert kinds.get(kind) == wanted[place].get(kind), (place, kind)
        assert each.places["device"].get("buffers") == wanted["device"].get("buffers")
        taken = each.places["device"]["activations"] / wanted["device"]["activations"]
        # Of 16 tokens: what is no token's is no small part. For long ones: test_planned_activations.py.
        assert 0.7 < taken < 1.5
    assert "memory" not in json.loads((tmp_path / "m.jsonl").read_text().splitlines()[1])


@pytest.mark.parametrize(
    ("flags", "device", "host"),
    [
        # The largest slice has 128 x 32 elements of fp32: once on the device, four times on the host.
        ("--zero-stage 2 --offload-optimizer cpu", 4 * LARGEST, 4 * 4 * LARGEST),
        ("--zero-stage 2 --offload-optimizer cpu --bf16", 4 * LARGEST, 4 * 4 * LARGEST),
        ("--offload-optimizer cpu --offload-gradients none --bf16", 0, 4 * 4 * LARGEST),
        ("--zero-stage 1", 0, 0),
    ],
)
def test_buffers_of_copies_are_planned_for_a_device_whose_memory_is_apart(flags, device, host):
    def planned(where: str) -> dict:
        words = f"{SMALL} {flags} --device {where}".split()
        return dict(planned_memory(first_step(parse_config(words, world_size=1).config, 1))[0].places)

    here, apart = planned("cpu"), planned("cuda")
    buffers = [each.get(place, {}).get("buffers", 0) for each in (here, apart) for place in ("device", "cpu")]
    assert buffers == [buffers[0], 0, buffers[0] + device, host]
    for place, kinds in here.items():
        assert {kind: kinds.get(kind) for kind in AT_REST} == {k: apart[place].get(k) for k in AT_REST}


def test_without_a_file_of_metrics_nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(MemoryMeter, "of", None)
    pretrain_on(parse_config(SMALL.split(), world_size=1).config, solo_context())


def metrics(path, *ranks: dict) -> str:
    lines = [{"iteration": 1, "memory": list(ranks)}, {"iteration": 2}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


A = {
    "device": {"weights": 1 << 20, "gradients": 2 << 20, "activations": 5 << 20},
    "nvme": {"moments": 3 << 30},
}
B = {"device": {"weights": 100, "activations": 28}}


def test_the_table_puts_ranks_together_that_hold_the_same(tmp_path, capsys):
    path = metrics(tmp_path / "m.jsonl", A, A, B, A)
    assert main([path]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rank    where   weights  masters  moments  gradients  buffers  activations      sum",
        "0-1, 3  device  1.0 MiB        -        -    2.0 MiB        -      5.0 MiB  8.0 MiB",
        "        nvme          -        -  3.0 GiB          -        -            -  3.0 GiB",
        "2       device    100 B        -        -          -        -         28 B    128 B",
        "the fullest device is that of rank 0: 8.0 MiB, of which 62% are activations",
    ]


def test_words_for_sizes_and_for_nothing():
    assert [shown(n) for n in (0, 1023, 1024, 1536 << 20, 5000 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
        "5,000.0 TiB",
    ]
    assert verdict([RankMemory((0,), {"nvme": {"weights": 1}})]) == "no rank holds anything on the device"
    assert rows([RankMemory((4,), {})]) == []
    assert merge_alike([RankMemory((n,), B) for n in (0, 1, 2, 5)])[0].name == "0-2, 5"


def test_the_picture_has_a_panel_per_place_and_a_bar_per_rank():
    pytest.importorskip("matplotlib")
    from tests.pictures.checks import complaints

    with styled(DARK):
        figure = memory_figure([RankMemory((0,), A), RankMemory((1, 2), B)], "of mine", DARK)
        assert complaints(figure, DARK) == []
    device, disk = figure.axes
    assert [panel.get_title(loc="left") for panel in (device, disk)] == ["device", "disk"]
    assert [label.get_text() for label in device.get_yticklabels()] == ["rank 0", "ranks 1-2"]
    assert disk.get_xlabel() == "memory (GiB)"
    ends = {round(bar.get_x() + bar.get_width(), 6) for bar in disk.patches if bar.get_width()}
    assert ends == {3.0}
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "weights",
        "moments",
        "gradients",
        "activations",
    ]


def test_the_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = metrics(tmp_path / "m.jsonl", A, B)
    assert main([path, "--output", str(tmp_path / "m.png")]) == 0
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "`METRICS` must be a file of --metrics-jsonl, but is left out"),
        (["nowhere.jsonl"], "`METRICS` must be a file that can be read, but nowhere.jsonl"),
        (["{}", "--nproc", "2"], "`--nproc` must be given with flags of a training after `--`, and only"),
        (["--", "--lr", "1"], "`--nproc` must be given with flags of a training after `--`, and only"),
        (["{}", "--nproc", "2", "--", "--lr", "1"], "`METRICS` must be left out with flags of a training"),
    ],
)
def test_what_cannot_be_shown_is_refused(tmp_path, capsys, arguments, said):
    path = metrics(tmp_path / "m.jsonl", A)
    assert main([each.replace("{}", path) for each in arguments]) != 0
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ['{"iteration": 1}\n', '{"iteration": 1, "memory": 3}\n', '{"memory": []}\n']
)
def test_files_without_memory_are_refused(tmp_path, capsys, text):
    (tmp_path / "m.jsonl").write_text(text)
    assert main([str(tmp_path / "m.jsonl")]) != 0
    assert "must be a file of metrics" in (said := capsys.readouterr().err) or "must have a step" in said
