"""The description of a checkpoint, and the names in a run's folder."""

from __future__ import annotations

import json
import os
import re

import pytest

from megazero.checkpoint.blocks import BLOCK, FileRecord
from megazero.checkpoint.box import Box
from megazero.checkpoint.disk import Disk
from megazero.checkpoint.folder import (
    LATEST,
    Retention,
    candidates,
    hidden_folder,
    iteration_folder,
    latest_iteration,
    leftovers,
    prune,
    recover,
    saved_iterations,
)
from megazero.checkpoint.manifest import (
    Index,
    Logical,
    Piece,
    dump_manifest,
    parse,
    piece_name,
    read_manifest,
)
from megazero.checkpoint.part import Key
from megazero.errors import CheckpointError, DamagedCheckpointError
from tests.checkpoint.forged import sealed
from tests.tables import over_table

SHARD = "model-00001-of-00002.safetensors"
OTHER = "model-00002-of-00002.safetensors"
HASH = "0123456789abcdef"


def test_a_manifest_in_full(tmp_path):
    data = dump_manifest(100, {"b.json": FileRecord(3, (HASH,)), "a.json": FileRecord(0, ())})
    assert data.decode() == (
        '{"checksum": "aa542776643f7a27",\n'
        ' "format": 2,\n'
        ' "iteration": 100,\n'
        ' "block_size": 4194304,\n'
        ' "files": {\n'
        '  "a.json": {\n'
        '   "size": 0,\n'
        '   "blocks": []\n'
        "  },\n"
        '  "b.json": {\n'
        '   "size": 3,\n'
        '   "blocks": [\n'
        '    "0123456789abcdef"\n'
        "   ]\n"
        "  }\n"
        " }\n"
        "}\n"
    )
    (tmp_path / "manifest.json").write_bytes(data)
    assert json.loads(data)["files"].keys() == {"a.json", "b.json"}
    manifest = read_manifest(tmp_path)
    assert manifest.iteration == 100
    assert {name: entry.record for name, entry in manifest.files.items()} == {
        "a.json": FileRecord(0, ()),
        "b.json": FileRecord(3, (HASH,)),
    }


@over_table(("size", "hashes"), [(0, 0), (1, 1), (BLOCK, 1), (BLOCK + 1, 2), (3 * BLOCK, 3)])
def test_a_file_has_a_hash_for_each_block(tmp_path, size, hashes):
    def write(count):
        files = {"a": {"size": size, "blocks": [HASH] * count}}
        rest = {"format": 2, "iteration": 1, "block_size": BLOCK, "files": files}
        (tmp_path / "manifest.json").write_bytes(sealed(json.dumps(rest)))

    write(hashes)
    assert len(read_manifest(tmp_path).files["a"].blocks) == hashes
    for wrong in {hashes - 1, hashes + 1} - {-1}:
        write(wrong)
        with pytest.raises(DamagedCheckpointError, match=r"manifest\.json.*files\.a.*do not fit"):
            read_manifest(tmp_path)


@over_table("found", [0, 1, 4, "2", None, [2]])
def test_another_format_is_not_taken_for_damage(tmp_path, found):
    (tmp_path / "manifest.json").write_bytes(sealed(json.dumps({"format": found})))
    with pytest.raises(
        CheckpointError, match=r"manifest\.json` must be of format 2 or 3, but is of "
    ) as error:
        read_manifest(tmp_path)
    assert not isinstance(error.value, DamagedCheckpointError)


def test_the_name_of_a_piece():
    assert piece_name(Key("a.weight"), (4, 3), Box((0, 0), (4, 3))) == "a.weight"
    assert piece_name(Key("a.weight"), (4, 3), Box((1, 0), (2, 3))) == "a.weight[1:3,0:3]"
    assert piece_name(Key("a.weight", "exp_avg"), (4,), Box((0,), (4,))) == "a.weight/exp_avg"
    assert piece_name(Key("scale"), (), Box((), ())) == "scale"


def logical(*pieces: tuple[str, tuple[int, ...], tuple[int, ...]], shape=(4, 3), **fields) -> Logical:
    made = tuple(Piece(file=file, offset=offset, shape=size) for file, offset, size in pieces)
    return Logical(
        **{"name": "a", "kind": "weight", "dtype": "F32", "shape": shape, "pieces": made, **fields}
    )


UPPER, LOWER = (SHARD, (0, 0), (2, 3)), (OTHER, (2, 0), (2, 3))
TROUBLES = {
    "whole": ([logical(UPPER, LOWER)], None),
    "in any order": ([logical(LOWER, UPPER)], None),
    "empty": ([logical(shape=(0, 3))], None),
    "scalar": ([logical((SHARD, (), ()), shape=())], None),
    "of two kinds": ([logical(UPPER, LOWER), logical(UPPER, LOWER, kind="exp_avg")], None),
    "twice": ([logical(UPPER, LOWER)] * 2, "`a` occurs twice"),
    "a gap": ([logical(UPPER)], "the pieces of `a` do not cover it: 6 of 12 elements are there"),
    "nothing": ([logical()], "the pieces of `a` do not cover it: 0 of 12 elements are there"),
    "overlap": (
        [logical(UPPER, (OTHER, (1, 0), (3, 3)))],
        "the pieces of `a` do not cover it: [0:2,0:3] and [1:4,0:3] overlap",
    ),
    "a gap and an overlap": (
        [logical(UPPER, (OTHER, (0, 0), (2, 3)))],
        "the pieces of `a` do not cover it: [0:2,0:3] and [0:2,0:3] overlap",
    ),
    "out of range": (
        [logical(UPPER, (OTHER, (3, 0), (2, 3)))],
        "the pieces of `a` do not cover it: [2, 3] at [3, 0] is not within the shape [4, 3]",
    ),
    "other dims": ([logical((SHARD, (0,), (12,)))], "a piece of `a` has a different number of dims"),
    "a corner of other dims": (
        [logical((SHARD, (0,), (4, 3)))],
        "a piece of `a` has a different number of dims",
    ),
    "an empty piece of other dims": (
        [logical(UPPER, LOWER, (SHARD, (0,), (0,)))],
        "a piece of `a` has a different number of dims",
    ),
    "unlisted": (
        [logical(UPPER, ("x.safetensors", (2, 0), (2, 3)))],
        "`a` lies in 'x.safetensors', which the manifest does not list",
    ),
    "no tensor file": (
        [logical(("index.json", (0, 0), (4, 3)))],
        "`a` lies in 'index.json', which the manifest does not list",
    ),
    "dtype": ([logical(UPPER, LOWER, dtype="F128")], "`a` has the unknown dtype 'F128'"),
    "a large piece": (
        [logical((SHARD, (0, 0), (4, 1 << 40)), shape=(4, 1 << 40))],
        "a piece of `a` is larger than its file",
    ),
    "beyond memory": ([logical(shape=(1 << 61, 0))], "`a` has a shape beyond all memory"),
    "beyond memory together": ([logical(shape=(1 << 31, 1 << 31, 0))], "`a` has a shape beyond all memory"),
}


@over_table("case", TROUBLES)
def test_what_is_wrong_with_an_index(case):
    tensors, trouble = TROUBLES[case]
    assert Index(tensors=tuple(tensors)).trouble({SHARD: 48, OTHER: 48, "index.json": 99}) == trouble


def test_an_index_comes_back_from_its_text(tmp_path):
    index = Index(tensors=(logical(UPPER, LOWER), logical(kind="exp_avg", shape=(0,))))
    assert parse(Index, index.model_dump_json().encode(), tmp_path) == index
    assert index.tensors[0].key == Key("a")
    assert index.tensors[0].pieces[1].box == Box((2, 0), (2, 3))


def test_the_names_of_folders(tmp_path):
    assert iteration_folder("x", 100).as_posix() == "x/iter_0000100"
    assert iteration_folder("x", 12345678).as_posix() == "x/iter_12345678"
    assert hidden_folder("x", 100, "partial").as_posix() == "x/.iter_0000100.partial"
    for name in ("iter_0000100", "iter_12345678", "iter_0000020"):
        (tmp_path / name).mkdir()
    # Of none of these would the number alone find the folder again.
    others = ("iter_100", "iter_00000100", "iter_0000100.bak", "iter_٠٠٠٠٣٠٠", ".iter_0000300.partial")
    for name in (*others, "iter_-000001", "iter_0000100\n", "xiter_0000100", "release", "iter_" + "9" * 19):
        (tmp_path / name).mkdir()
    assert saved_iterations(tmp_path) == [20, 100, 12345678]
    assert saved_iterations(tmp_path / "missing") == []


@over_table(
    ("content", "iteration"),
    [(b"100\n", 100), (b"100", 100), (b" 7\r\n", 7), (b"0000007", 7), (b"9" * 18, int("9" * 18))],
)
def test_the_file_that_names_the_newest(tmp_path, content, iteration):
    assert latest_iteration(tmp_path) is None
    (tmp_path / LATEST).write_bytes(content)
    assert latest_iteration(tmp_path) == iteration


BAD_NAMES = [
    b"",
    b"\n",
    b"-1",
    b"1.0",
    b"1e3",
    b"0x10",
    b"1 2",
    b"iter_0000100",
    b"9" * 19,
    b"\xff\xfe",
    b"\0",
]


@over_table("content", [*BAD_NAMES, b"100\x0b", "٣".encode(), b"1" * 2000])
def test_a_name_that_is_no_number_is_damage(tmp_path, content):
    (tmp_path / LATEST).write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=LATEST):
        latest_iteration(tmp_path)


def folders(tmp_path, *iterations: int, latest: str | None = None) -> None:
    for iteration in iterations:
        iteration_folder(tmp_path, iteration).mkdir()
        (iteration_folder(tmp_path, iteration) / "manifest.json").touch()
    if latest is not None:
        (tmp_path / LATEST).write_text(latest)


@over_table(
    ("saved", "latest", "order", "remark"),
    [
        ([], None, [], None),
        ([10, 20, 30], "30\n", [30, 20, 10], None),
        ([10, 20, 30], None, [30, 20, 10], None),
        ([10, 20, 30], "20", [20, 30, 10], "names iteration 20, although 30 is there"),
        ([10, 20], "30", [20, 10], r"names .*iter_0000030, which is missing"),
        ([], "30", [], r"names .*iter_0000030, which is missing"),
        ([9, 10], "x", [10, 9], "must hold an iteration number, but holds 'x'"),
        ([], "", [], "must hold an iteration number, but holds ''"),
    ],
)
def test_the_order_in_which_checkpoints_are_tried(tmp_path, saved, latest, order, remark):
    folders(tmp_path, *saved, latest=latest)
    found = candidates(tmp_path)
    assert found.folders == tuple(iteration_folder(tmp_path, each) for each in order)
    if remark is None:
        assert found.remarks == ()
    else:
        (said,) = found.remarks
        assert LATEST in said
        assert re.search(remark, said)


def test_one_iteration_alone(tmp_path):
    folders(tmp_path, 10, 20, latest="20")
    assert candidates(tmp_path, 10).folders == (iteration_folder(tmp_path, 10),)
    with pytest.raises(CheckpointError, match=r"`ckpt_step` must be .*\(10, 20\), but is 15"):
        candidates(tmp_path, 15)


@over_table(
    ("retention", "iterations", "latest", "expected"),
    [
        (Retention(), [1, 2, 3], 3, []),
        (Retention(every=2), [1, 2, 3], 3, []),
        (Retention(last=1), [], None, []),
        (Retention(last=1), [3], 3, []),
        (Retention(last=1), [1, 2, 3], 3, [1, 2]),
        (Retention(last=2), [3, 1, 2], 3, [1]),
        (Retention(last=5), [1, 2, 3], 3, []),
        (Retention(last=1, every=10), [5, 10, 15, 20, 25], 25, [5, 15]),
        (Retention(last=2, every=10), [5, 10, 15, 20, 25], 25, [5, 15]),
        (Retention(last=1), [10, 20, 30], 20, [10]),  # after 30 was found damaged
        (Retention(last=1), [10, 20, 30], None, [10, 20]),
        (Retention(last=1, every=1), [1, 2, 3], 3, []),
    ],
)
def test_what_is_superseded(retention, iterations, latest, expected):
    assert list(retention.superseded(iterations, latest)) == expected


def test_prune_removes_what_is_superseded_and_says_so(tmp_path):
    folders(tmp_path, 1, 2, 3, 4, latest="4")
    removed = []
    prune(Disk(), tmp_path, Retention(last=1, every=2), removed.append)
    assert [path.name for path in removed] == ["iter_0000001", "iter_0000003"]
    assert sorted(os.listdir(tmp_path)) == ["iter_0000002", "iter_0000004", LATEST]


def test_recover_clears_what_is_hidden_and_nothing_else(tmp_path):
    folders(tmp_path, 10, 20)
    (tmp_path / "iter_0000010" / "new").touch()
    gone = [".iter_0000010.replaced", ".iter_0000020.removed", ".iter_0000040.partial"]
    gone.append(f".{LATEST}.0123456789abcdef")
    kept = [".iter_30.partial", ".iter_0000030.other", ".hidden", "x.iter_0000030.partial", ".iter_0000030"]
    for name in (*gone, ".iter_0000030.replaced", *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").touch()
    assert {each.path.name: each.restored and each.restored.name for each in leftovers(tmp_path)} == {
        **dict.fromkeys(gone, None),
        ".iter_0000030.replaced": "iter_0000030",
    }
    recover(Disk(), tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(["iter_0000010", "iter_0000020", "iter_0000030", *kept])
    assert os.listdir(tmp_path / "iter_0000030") == ["old"]
    assert sorted(os.listdir(tmp_path / "iter_0000010")) == ["manifest.json", "new"]
