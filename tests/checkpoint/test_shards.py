"""What each rank writes and reads: over all ranks everything once, on every layout of a small grid."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import product
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from megazero.checkpoint.box import gaps_or_overlaps
from megazero.checkpoint.part import Key, Part
from megazero.checkpoint.shards import parts_of_parameters, parts_to_read, parts_to_write, state_keys
from megazero.layers.placement import Placement
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.mpu.traffic import TrafficLog, recording_context
from megazero.optim.elementwise import Adam
from megazero.zero.build import build_store
from megazero.zero.optimizer import Optimizer
from megazero.zero.unit import Unit
from tests.tables import over_table
from tests.zero.policies import make_policy

F32, BF16 = torch.float32, torch.bfloat16
ANY = InitialValues("zeros")
COLUMNS, ROWS = (Cut(0, "tp"),), (Cut(1, "tp"),)


def vocabulary(tp: int, name: str = "words", tied_with: str | None = None) -> ParamSpec:
    """Five entries, padded to equally many for each rank: 8 on four ranks; the last has only padding."""
    cut = Cut(0, "tp", padded_size=-(-5 // (2 * tp)) * 2 * tp)
    return ParamSpec(name, (5, 3), ANY, (cut,), tied_with=tied_with)


def specs(tp: int) -> list[ParamSpec]:
    return [
        vocabulary(tp),
        ParamSpec("scalar", (), ANY),
        ParamSpec("nothing", (0, 3), ANY),
        ParamSpec("no columns", (4, 0), ANY, COLUMNS),
        ParamSpec("column", (8, 5), ANY, COLUMNS),
        ParamSpec("row", (3, 8), ANY, ROWS),
        ParamSpec("groups", (2, 4, 3), ANY, ROWS),
        ParamSpec("experts", (4, 8, 3), ANY, (Cut(0, "ep"), Cut(1, "etp"))),
        ParamSpec("experts' bias", (4, 3), ANY, (Cut(0, "ep"),)),
        ParamSpec("norm", (7,), ANY, weight_decay=False),
        ParamSpec("bias", (4, 3), ANY),
        ParamSpec("frozen", (9,), ANY),
        vocabulary(tp, "head", tied_with="words"),
    ]


def whole(key: Key, shape: tuple[int, ...]) -> Tensor:
    """Tensors in which every value occurs once."""
    number = sum(ord(c) * 31**i for i, c in enumerate(f"{key}")) % 997
    return (torch.arange(math.prod(shape), dtype=torch.float64) + 1000 * number + 1).float().view(shape)


class Whole:
    """A source of `whole` tensors."""

    def __init__(self, shapes: Mapping[Key, tuple[int, ...]]):
        self.shapes = shapes

    def read(self, parts: Iterable[Part]) -> None:
        for part in parts:
            part.tensor.copy_(whole(part.key, self.shapes[part.key])[part.box.slices])


def build(grid: ProcessGrid, rank: int, stage: int, bucket_size: int = 20, dtype=F32, fill=math.nan):
    """Build the optimizer of one rank, with every value `fill`."""
    context = recording_context(grid, rank, TrafficLog(), "cpu")
    params = [Placement.of(context, dtype).parameter(spec) for spec in specs(grid.tp)]
    for param in params:
        param.requires_grad_(param.spec.name != "frozen")
    units = [Unit(0, nn.Module(), (param,)) for param in params]
    policy = make_policy(stage=stage, bucket_size=bucket_size, persistence_threshold=4)
    optimizer = Optimizer(build_store(units, policy, context), Adam(), context, 0.0)
    for bucket in optimizer.store.buckets:
        for flat in optimizer.store.at_rest(bucket).values():
            flat.fill_(fill)
    return optimizer, context


def expected_shapes(tp: int) -> dict[Key, tuple[int, ...]]:
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    return {
        Key(spec.name, kind): spec.shape
        for spec in specs(tp)
        if spec.tied_with is None
        for kind in (kinds if spec.name != "frozen" else kinds[:1])
    }


def local(optimizer: Optimizer) -> Iterable[tuple[ParamSpec, str, slice, Tensor]]:
    for bucket in optimizer.store.buckets:
        for kind, flat in optimizer.store.at_rest(bucket).items():
            for number, span, piece in bucket.layout.member_pieces(flat):
                yield bucket.layout.specs[number], kind, span, piece


LAYOUTS = [
    SimpleNamespace(grid=ProcessGrid(tp=tp, dp=dp * ep, ep=ep), stage=stage, bucket_size=bucket_size)
    for ep, tps, dps, sizes in ((1, (1, 2, 4), (1, 2, 4), (1, 20, 1000)), (2, (1, 2), (1, 2), (20,)))
    for tp, dp, stage, bucket_size in product(tps, dps, (0, 1, 3), sizes)
    if (dp * ep > 1 or stage == 0) and (bucket_size == 20 or (tp != 2 and dp == 4))
]


def title(layout: SimpleNamespace) -> str:
    grid = layout.grid
    return f"T{grid.tp}E{grid.ep}D{grid.edp}Z{layout.stage}b{layout.bucket_size}"


@over_table("layout", LAYOUTS, ids=title)
def test_what_is_read_is_held_and_what_is_written_is_whole(layout):
    grid = layout.grid
    shapes = expected_shapes(grid.tp)
    written: dict[Key, list[Part]] = defaultdict(list)
    for rank in range(grid.world_size):
        optimizer, context = build(grid, rank, layout.stage, layout.bucket_size)
        Whole(shapes).read(parts_to_read(optimizer, context))
        for spec, kind, span, piece in local(optimizer):
            key = Key(spec.tied_with or spec.name, kind)
            # `shard` zeroes padding, where memory was NaN.
            want = spec.shard(whole(key, spec.shape), context.place)
            assert piece.equal(want.reshape(-1)[span]), (key, rank)
        assert set(state_keys(optimizer)) == set(shapes)
        for part in parts_to_write(optimizer, context):
            written[part.key].append(part)
    assert {key: parts[0].shape for key, parts in written.items()} == shapes
    for key, parts in written.items():
        assert gaps_or_overlaps(shapes[key], [part.box for part in parts]) is None
        for part in parts:
            assert part.tensor.equal(whole(key, part.shape)[part.box.slices])
    assert len(written[Key("nothing")]) == 1, "the name of an empty tensor is kept, once"


@over_table(("tp", "dp"), [(1, 2), (1, 4), (2, 4), (4, 2)])
def test_replicas_write_about_as_much_each(tp, dp):
    grid = ProcessGrid(tp=tp, dp=dp)
    loads = defaultdict(list)
    for rank in range(grid.world_size):
        optimizer, context = build(grid, rank, stage=0)
        # Dealt with its padding, a vocabulary is counted with it here.
        mine = {part.key.name for part in parts_to_write(optimizer, context, moments=False)}
        numel = {p.spec.name: p.numel() for bucket in optimizer.store.buckets for p in bucket.params}
        loads[context.tp.rank].append(sum(numel[name] for name in mine))
    for each in loads.values():
        assert max(each) - min(each) <= max(numel.values()), "one parameter"
        assert min(each) > 0


def test_tensor_parallel_ranks_share_what_all_hold():
    grid = ProcessGrid(tp=2)
    names = []
    for rank in range(2):
        optimizer, context = build(grid, rank, stage=0, bucket_size=1000)
        names.append({part.key.name for part in parts_to_write(optimizer, context)})
    replicated = {spec.name for spec in specs(2) if not {"tp", "etp"} & set(spec.axes)}
    assert names[0] & names[1] & replicated == set()
    assert all(each & replicated for each in names)
    assert "head" not in names[0] | names[1], "a tied copy is its original"


@over_table("stage", [0, 1, 3])
def test_parts_are_the_live_memory_and_no_more(stage):
    optimizer, context = build(ProcessGrid(dp=2), 1, stage, dtype=BF16, fill=1.0)
    parts = parts_to_read(optimizer, context)
    for part in parts:
        assert part.tensor.dtype == (BF16 if part.key.name == "frozen" else F32), "masters are fp32"
        part.tensor.fill_(2.0)
    store = optimizer.store
    flats = [flat for bucket in store.buckets for flat in store.at_rest(bucket).values()]
    changed = sum(int((flat == 2.0).sum()) for flat in flats)
    assert changed == sum(part.box.numel for part in parts) > 0
    # What evens out the buckets is in no part.
    assert sum(int((flat == 1.0).sum()) for flat in flats) > 0 or stage == 0


def test_without_moments_there_are_weights_alone():
    optimizer, context = build(ProcessGrid(tp=2, dp=2), 0, stage=1)
    for parts in (parts_to_write, parts_to_read):
        assert {part.key.kind for part in parts(optimizer, context, moments=False)} == {"weight"}
        kinds = {part.key.kind for part in parts(optimizer, context)}
        assert kinds == {"weight", "exp_avg", "exp_avg_sq"}


@over_table("tp", [1, 2, 4])
def test_weights_of_a_model_without_an_optimizer(tp):
    for rank in range(tp):
        context = recording_context(ProcessGrid(tp=tp), rank, TrafficLog(), "cpu")
        params = [Placement.of(context, BF16).parameter(spec) for spec in specs(tp)]
        for param in params:
            param.data.fill_(math.nan)
        parts = parts_of_parameters(params, context)
        assert {part.key.kind for part in parts} == {"weight"}
        Whole(expected_shapes(tp)).read(parts)
        for param in params:
            key = Key(param.spec.tied_with or param.spec.name)
            want = param.spec.shard(whole(key, param.spec.shape), context.place).to(BF16)
            assert param.data.equal(want), (key, rank)
