"""A description by parts: what is folded, what is read of it, and what is refused."""

from __future__ import annotations

import json
import random
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megazero.checkpoint import directory as directory_module
from megazero.checkpoint.box import PRIME, Box
from megazero.checkpoint.by_parts import part_name, read_part
from megazero.checkpoint.directory import ReaderRank
from megazero.checkpoint.disk import Disk
from megazero.checkpoint.folder import iteration_folder, publish
from megazero.checkpoint.manifest import read_manifest
from megazero.checkpoint.part import Key, Part
from megazero.checkpoint.parts_writer import fold, joined, write_contents, write_part
from megazero.checkpoint.reader import CheckpointReader, Verify
from megazero.checkpoint.saver import Saver
from megazero.checkpoint.writer import write_description, write_parts
from megazero.errors import CheckpointError, DamagedCheckpointError
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from tests.checkpoint.forged import edit_manifest, record_of, sealed
from tests.tables import over_table

W, V = Key("w"), Key("v")
SAVE = "0123456789abcdef"


def rows(tensor: Tensor, key: Key, edges: list[int]) -> list[list[Part]]:
    """A part for each rank: the rows of a tensor between two edges."""
    boxes = [Box((a, 0), (b - a, tensor.shape[1])) for a, b in pairwise([0, *edges, len(tensor)])]
    return [[Part(key, tuple(tensor.shape), box, tensor[box.slices])] for box in boxes]


def of_four(whole: Tensor) -> list[list[Part]]:
    """The parts of four ranks: rows of two tensors."""
    pairs = zip(rows(whole, W, [3, 4, 9]), rows(whole[:8] / 2, V, [2, 4, 6]), strict=True)
    return [some + others for some, others in pairs]


def read_everything(folder: Path) -> None:
    reader = CheckpointReader(folder)
    for key in reader.shapes:
        reader.tensor(key)


def write(directory: Path, by_rank: list[list[Part]], iteration: int = 1, save: str = SAVE) -> Path:
    """Write a checkpoint from several ranks."""
    folder, count, tallies = directory / f".iter_{iteration:07d}.partial", len(by_rank), []
    folder.mkdir(parents=True)
    for number, parts in enumerate(by_rank):
        written = write_parts(Disk(), folder, parts, number, count)
        tallies = fold(tallies, write_part(Disk(), folder, written, save, number, count))
    write_contents(Disk(), folder, iteration, tallies, {"a": 1}, save, count)
    return publish(Disk(), directory, iteration)


@pytest.fixture
def whole() -> Tensor:
    return torch.arange(48.0).view(12, 4)


@pytest.fixture
def folder(tmp_path, whole) -> Path:
    """A checkpoint that four ranks wrote, with rows of two tensors each."""
    by_rank = [
        a + b for a, b in zip(rows(whole, W, [3, 4, 9]), rows(whole[:8] / 2, V, [2, 4, 6]), strict=True)
    ]
    return write(tmp_path, by_rank)


@pytest.fixture
def opened(monkeypatch) -> list[int]:
    """The list of the part numbers that are read."""
    numbers: list[int] = []

    def reading(folder, manifest, number):
        numbers.append(number)
        return read_part(folder, manifest, number)

    monkeypatch.setattr(directory_module, "read_part", reading)
    return numbers


def test_a_description_in_full(folder):
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "index.json",
        "manifest.json",
        *(f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)),
        *(f"part-0000{n}-of-00004.json" for n in (1, 2, 3, 4)),
        "state.json",
    ]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["format"], manifest["save"], manifest["parts"]) == (3, SAVE, 4)
    assert list(manifest["files"]) == ["index.json", "state.json"]
    assert json.loads((folder / "index.json").read_text()) == {
        "tensors": [
            {"name": "w", "kind": "weight", "dtype": "F32", "shape": [12, 4], "writers": [[0, 4, 1]]},
            {"name": "v", "kind": "weight", "dtype": "F32", "shape": [8, 4], "writers": [[0, 4, 1]]},
        ]
    }
    part = json.loads((folder / "part-00002-of-00004.json").read_text())
    assert (part["save"], part["number"], list(part["files"])) == (
        SAVE,
        1,
        ["model-00002-of-00004.safetensors"],
    )
    assert part["tensors"][0] == {
        "name": "w",
        "kind": "weight",
        "dtype": "F32",
        "shape": [12, 4],
        "pieces": [{"file": "model-00002-of-00004.safetensors", "offset": [3, 0], "shape": [1, 4]}],
    }


def test_every_box_comes_back(folder, whole):
    reader = CheckpointReader(folder)
    assert dict(reader.shapes) == {W: (12, 4), V: (8, 4)}
    assert reader.facts == {"a": 1}
    assert reader.tensor(W).equal(whole)
    assert reader.tensor(V).equal(whole[:8] / 2)
    for first in range(12):
        for last in range(first + 1, 13):
            memory = torch.zeros(last - first, 2)
            reader.read([Part(W, (12, 4), Box((first, 1), (last - first, 2)), memory)])
            assert memory.equal(whole[first:last, 1:3])


def test_whole_or_by_parts_it_is_the_same_checkpoint(tmp_path, folder, whole):
    """Earlier versions described the files of several ranks in one index; such checkpoints stay readable."""
    older = tmp_path / "older" / ".iter_0000001.partial"
    older.mkdir(parents=True)
    written = [write_parts(Disk(), older, parts, number, 4) for number, parts in enumerate(of_four(whole))]
    write_description(Disk(), older, 1, written, {"a": 1})
    before = CheckpointReader(publish(Disk(), tmp_path / "older", 1))
    after = CheckpointReader(folder)
    assert before.manifest.format == 2
    assert before.tensor(W).equal(after.tensor(W))
    assert before.directory.whole() == after.directory.whole()
    data = {name: entry for name, entry in after.directory.files().items() if name.endswith(".safetensors")}
    assert {name: entry for name, entry in before.directory.files().items() if name in data} == data


def test_a_rank_of_the_same_layout_reads_its_own_part(folder, opened, whole):
    for rank in range(4):
        opened.clear()
        reader = CheckpointReader(folder, rank=ReaderRank(rank, 4, rank / 4))
        (mine,) = rows(whole, W, [3, 4, 9])[rank]
        reader.read([mine])
        assert opened == [rank]


def test_a_rank_of_another_layout_reads_until_it_has_all(folder, opened, whole):
    reader = CheckpointReader(folder, rank=ReaderRank(1, 2, 0.5))
    opened.clear()
    memory = torch.zeros(2, 4)
    reader.read([Part(W, (12, 4), Box((10, 0), (2, 4)), memory)])
    assert memory.equal(whole[10:])
    assert opened == [2], "part 3 was looked at before"
    opened.clear()
    reader.read([Part(W, (12, 4), Box((3, 0), (8, 4)), torch.zeros(8, 4))])
    assert opened == [], "parts are kept"


def test_readers_together_look_at_every_part_once(folder, opened):
    for ranks in (1, 3, 4, 9):
        opened.clear()
        for rank in range(ranks):
            CheckpointReader(folder, rank=ReaderRank(rank, ranks))
        assert sorted(opened) == [0, 1, 2, 3]


def test_only_parts_that_may_hold_a_tensor_are_read(tmp_path, opened, whole):
    first, second = rows(whole, W, [6])
    by_rank = [[], first, [], second, []]
    reader = CheckpointReader(write(tmp_path, by_rank), rank=ReaderRank(4, 5, 0.8))
    opened.clear()
    assert reader.tensor(W).equal(whole)
    assert sorted(opened) == [1, 3]


# What does not make a checkpoint.


@pytest.mark.parametrize(
    ("by_rank", "why"),
    [
        ([[(W, 0, 2)], [(W, 3, 12)]], "44 of 48 elements are there"),
        ([[(W, 0, 6)], [(W, 5, 11)]], "some elements are there twice, and others are not"),
        ([[(W, 0, 12)], [(W, 0, 12)]], "96 of 48 elements"),
        ([[(W, 0, 6)], [(W, 6, 12, torch.float16)]], r"`w` must be the same on all ranks.*F32.*F16"),
    ],
    ids=["gap", "gap and overlap", "twice", "dtypes"],
)
def test_what_ranks_wrote_must_make_whole_tensors(tmp_path, whole, by_rank, why):
    def made(key: Key, first: int, last: int, dtype: torch.dtype = torch.float32) -> Part:
        return Part(key, (12, 4), Box((first, 0), (last - first, 4)), whole[first:last].to(dtype))

    with pytest.raises(CheckpointError, match=why):
        write(tmp_path, [[made(*each) for each in of_rank] for of_rank in by_rank])
    assert not list(tmp_path.glob("*/manifest.json"))


@pytest.mark.parametrize("verify", Verify)
def test_a_part_that_is_missing_or_damaged_is_named(folder, verify):
    path = folder / part_name(2, 4)
    good = path.read_bytes()
    for bad in (None, b"", good[:-1], good + b"\n", good.replace(b'"shape":[5,4]', b'"shape":[4,4]')):
        path.unlink()
        if bad is not None:
            path.write_bytes(bad)
        with pytest.raises(DamagedCheckpointError, match=path.name):
            CheckpointReader(folder, verify=verify)
        CheckpointReader(folder, verify=verify, rank=ReaderRank(0, 4))  # another looks at that part
        path.write_bytes(good)
    CheckpointReader(folder, verify=verify)


def test_a_part_of_another_save_or_number_is_none(tmp_path, folder, whole):
    other = write(tmp_path / "other", rows(whole, W, [3, 4, 9]), save="f" * 16)
    path = folder / part_name(1, 4)
    shutil.copyfile(other / path.name, path)
    with pytest.raises(
        DamagedCheckpointError, match=f"{path.name}` must be part 1 of save {SAVE}, but is part 1 of f"
    ):
        CheckpointReader(folder)
    shutil.copyfile(folder / part_name(0, 4), path)
    with pytest.raises(DamagedCheckpointError, match="must be part 1 of save .*, but is part 0 of"):
        CheckpointReader(folder)


def forge(path: Path, change) -> None:
    """Replace a part by another one with a right checksum."""
    part = json.loads(path.read_text())
    del part["checksum"]
    change(part)
    path.write_bytes(sealed(json.dumps(part)))


def piece(**fields):
    return lambda part: part["tensors"][0]["pieces"][0].update(fields)


def tensor(**fields):
    return lambda part: part["tensors"][0].update(fields)


def file_of(name: str):
    """Rename the file of a part in its description."""

    def change(part) -> None:
        part["files"][name] = part["files"].pop("model-00002-of-00004.safetensors")
        for each in part["tensors"]:
            each["pieces"][0]["file"] = name

    return change


FORGED = {
    "another tensor": tensor(name="x"),
    "another shape": tensor(shape=[13, 4]),
    "another dtype": tensor(dtype="F16"),
    "an unknown dtype": tensor(dtype="F128"),
    "twice": lambda part: part.update(tensors=part["tensors"] * 2),
    "out of range": piece(offset=[12, 0]),
    "far out of range": piece(offset=[1 << 61, 0]),
    "other dims": piece(offset=[3], shape=[1]),
    "negative": piece(offset=[-3, 0]),
    "a larger piece": piece(shape=[2, 4]),
    "another place": piece(offset=[4, 0]),
    "the file of another part": piece(file="model-00001-of-00004.safetensors"),
    "a name of another part": file_of("model-00003-of-00004.safetensors"),
    "the file beside": file_of("../secret.safetensors"),
    "no tensor file": file_of("state.json"),
    "more of it": lambda part: part.update(mode=1),
    "no files": lambda part: part.update(files={}),
    "no pieces": tensor(pieces=[]),
    "another number": lambda part: part.update(number=2),
    "a huge file": lambda part: part["files"]["model-00002-of-00004.safetensors"].update(size=1 << 50),
}


@pytest.mark.parametrize("case", FORGED)
def test_hostile_parts(folder, case):
    forge(folder / part_name(1, 4), FORGED[case])
    with pytest.raises(DamagedCheckpointError) as error:
        read_everything(folder)
    assert str(folder) in str(error.value)


INDEXES = {
    "no writers": {"writers": []},
    "another writer": {"writers": [[7, 9, 1]]},
    "a step of none": {"writers": [[0, 4, 0]]},
    "backwards": {"writers": [[4, 0, 1]]},
    "negative": {"writers": [[-1, 4, 1]]},
    "two numbers": {"writers": [[0, 4]]},
    "only some": {"writers": [[0, 2, 1]]},
    "more of it": {"pieces": []},
    "another shape": {"shape": [12, 5]},
    "beyond all memory": {"shape": [1 << 61, 1 << 61]},
}


@pytest.mark.parametrize("case", INDEXES)
def test_hostile_indexes(folder, case):
    index = json.loads((folder / "index.json").read_text())
    index["tensors"][0].update(INDEXES[case])
    (folder / "index.json").write_text(json.dumps(index))
    record = record_of(folder / "index.json")
    entry = {"size": record.size, "blocks": list(record.blocks)}
    edit_manifest(folder, lambda manifest: manifest["files"].update({"index.json": entry}))
    with pytest.raises(DamagedCheckpointError) as error:
        read_everything(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    "facts", [{"parts": 0}, {"parts": 5}, {"parts": 1 << 60}, {"save": None}, {"format": 2}]
)
def test_hostile_manifests(folder, facts):
    edit_manifest(folder, lambda manifest: manifest.update(facts))
    with pytest.raises(DamagedCheckpointError, match=folder.name):
        CheckpointReader(folder)


def test_pieces_that_overlap_are_refused_where_they_are_read(folder):
    """A genuine checkpoint cannot have them, as fingerprints are checked, but a forged part can."""
    forge(folder / part_name(0, 4), piece(offset=[2, 0], shape=[3, 4]))
    with pytest.raises(DamagedCheckpointError, match="do not cover"):
        CheckpointReader(folder).directory.whole()
    with pytest.raises(DamagedCheckpointError, match=r"the pieces of `w` do not cover \[0:12,0:4\]"):
        CheckpointReader(folder).tensor(W)


# What adds up.


def cuts(draw: random.Random, box: Box) -> list[Box]:
    """A box, cut into random boxes."""
    dims = [dim for dim, size in enumerate(box.shape) if size > 1]
    if not dims or draw.random() < 0.2:
        return [box]
    dim = draw.choice(dims)
    at = draw.randrange(1, box.shape[dim])
    shape, offset = list(box.shape), list(box.offset)
    shape[dim], rest = at, box.shape[dim] - at
    first = Box(tuple(offset), tuple(shape))
    offset[dim], shape[dim] = offset[dim] + at, rest
    return [*cuts(draw, first), *cuts(draw, Box(tuple(offset), tuple(shape)))]


@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 20))]
)
def test_fingerprints_add_up_over_boxes_that_cover_once_and_no_others(seed):
    draw = random.Random(seed)
    whole = Box.whole([draw.randrange(1, 9) for _ in range(draw.randrange(1, 4))])
    boxes = cuts(draw, whole)
    assert sum(box.fingerprint for box in boxes) % PRIME == whole.fingerprint
    for box in boxes if len(boxes) > 1 else ():
        others = [other for other in boxes if other != box]
        assert sum(other.fingerprint for other in others) % PRIME != whole.fingerprint
        for other in others:
            twice = [*others, Box(other.offset, box.shape)]
            if Box(other.offset, box.shape) not in boxes:
                assert sum(each.fingerprint for each in twice) % PRIME != whole.fingerprint


def test_the_fingerprint_of_a_large_box():
    whole, half = Box.whole((1 << 20, 12288)), 1 << 19
    parts = [Box((0, 0), (half, 12288)), Box((half, 0), (half, 12288))]
    assert sum(part.fingerprint for part in parts) % PRIME == whole.fingerprint
    assert Box.whole(()).fingerprint == 1


@over_table(
    ("numbers", "runs"),
    [
        ([3], [[3, 4, 1]]),
        (range(8), [[0, 8, 1]]),
        (range(3, 1024, 8), [[3, 1027, 8]]),
        ([*range(8), *range(100, 108)], [[0, 8, 1], [100, 108, 1]]),
        ([0, 1, 5], [[0, 2, 1], [5, 6, 1]]),
        (
            [n for n in range(400) if n % 8 in (0, 3)],
            [[0, 396, 1]],
        ),  # too many runs: others may be among them
    ],
)
def test_numbers_in_few_ranges(numbers, runs):
    found = joined([[number, number + 1, 1] for number in numbers])
    assert found == runs
    assert set(numbers) <= {number for run in found for number in range(*run)}


@pytest.mark.parametrize("fan", [2, 3, 8])
def test_tallies_are_the_same_in_whatever_order_blocks_are_folded(fan):
    def tally(number: int) -> list[dict]:
        box = Box((number,), (1,))
        facts = {"name": "w", "kind": "weight", "dtype": "F32", "shape": [27]}
        return [
            {**facts, "elements": 1, "fingerprint": box.fingerprint, "writers": [[number, number + 1, 1]]}
        ]

    blocks = [tally(number) for number in range(27)]
    while len(blocks) > 1:
        folded = []
        for start in range(0, len(blocks), fan):
            first, *rest = blocks[start : start + fan]
            for other in rest:
                first = fold(first, other)
            folded.append(first)
        blocks = folded
    ((whole,),) = blocks
    assert (whole["elements"], whole["fingerprint"]) == (27, Box.whole((27,)).fingerprint)
    assert whole["writers"] == [[0, 27, 1]]


@pytest.mark.parametrize("ranks", [2, 9])
def test_ranks_save_by_parts(tmp_path, ranks):
    """Nine ranks are more than one rank folds at a time, which is eight."""
    world = ThreadWorld(ranks, timeout=30)

    def work(rank: int) -> None:
        saver = Saver(tmp_path, thread_context(world, ProcessGrid(dp=ranks), rank))
        tensor = torch.full((1, 3), float(rank))
        saver.save(5, [Part(W, (ranks, 3), Box((rank, 0), (1, 3)), tensor)], {"rank": rank})
        saver.close()

    world.run(work)
    reader = CheckpointReader(iteration_folder(tmp_path, 5))
    assert reader.manifest.parts == ranks
    assert reader.facts == {"rank": 0}
    assert reader.tensor(W).tolist() == [[float(rank)] * 3 for rank in range(ranks)]
    assert read_manifest(reader.folder).save == reader.manifest.save != SAVE
