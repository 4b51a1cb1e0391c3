"""What a start costs a rank has a bound, however many ranks there are: proofs/scale.py on a small model."""

from __future__ import annotations

import pytest

from proofs.scale import Job, World, groups, notes, resuming, saving, slow_ranks, table

SMALL, LARGE = 1024, 16384
JOB = Job(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --zero-stage 1 --mock-data "
    "--micro-batch-size 1 --lr 1e-3 --train-iters 10 --vocab-size 500 --ddp-bucket-size 20000",
    tensor=4,
    stages=4,
    micro_batches=4,
)
# The growth from SMALL to LARGE for each rank more, in the row's unit; docs/scale.md says what each is for.
GROWTH = {
    "groups: bytes": 0.1,
    "groups: communicators": 0.0,
    "groups: members listed to torch": 1.0,
    "groups: connections on the host": 0.01,
    "groups: bytes of a failed rank's report": 0.01,
    "store: calls to name the attempt": 0.01,
    "store: calls to agree on the settings": 0.0,
    "store: calls per second, all ranks": 0.4,
    "store: bytes of what a rank has heard": 0.1,
    "slow ranks: bytes of a comparison": 160.0,
}


@pytest.fixture(scope="module")
def measured() -> dict[int, dict[str, float]]:
    """The rows that need no checkpoint, for two sizes."""
    facts: dict[int, dict[str, float]] = {}
    for ranks in (SMALL, LARGE):
        of_ranks = [
            {**groups(JOB, ranks, rank), **notes(JOB, ranks, rank), **slow_ranks(JOB, ranks, rank)}
            for rank in (0, ranks - 1)
        ]
        facts[ranks] = {row: max(of_rank[row] for of_rank in of_ranks) for row in of_ranks[0]}
    return facts


@pytest.mark.parametrize("row", GROWTH)
def test_nothing_grows_by_more_than_was_said_for_each_rank(measured, row):
    growth = (measured[LARGE][row] - measured[SMALL][row]) / (LARGE - SMALL)
    assert growth <= GROWTH[row], (
        f"{row}: {measured[SMALL][row]:g} of {SMALL}, {measured[LARGE][row]:g} of {LARGE}"
    )


def test_a_rank_of_a_large_job_asks_little_of_the_store(measured):
    assert measured[LARGE]["store: calls to agree on the settings"] == 66
    assert measured[LARGE]["store: calls to name the attempt"] <= 5 * 64 + 4
    assert measured[LARGE]["store: calls per second, all ranks"] < 8000


def test_opening_groups_and_comparing_times_takes_no_longer_than_said(measured):
    assert measured[LARGE]["groups: seconds"] < 0.1
    assert measured[LARGE]["slow ranks: seconds of a comparison"] < 2.0


def test_a_description_is_as_large_as_the_model(tmp_path):
    """Of 256 ranks as of 64, but for the digits of their numbers and where slices are cut."""
    facts = {}
    for ranks in (64, 256):
        world, folder = World(JOB, ranks), tmp_path / str(ranks)
        folder.mkdir()
        facts[ranks] = {**saving(world, folder), **resuming(world, folder)}
    for row, most in (
        ("save: bytes of the index", 30.0),
        ("save: bytes the first rank receives", 60.0),
        ("save: bytes of a rank's part", 0.0),
        ("save: pieces of a rank", 0.0),
        ("save: bytes of the manifest", 0.1),
    ):
        assert (facts[256][row] - facts[64][row]) / (256 - 64) <= most, row
    assert facts[256]["resume: parts read, same layout"] <= 8
    others = {row: reads for row, reads in facts[256].items() if row.startswith("resume: parts")}
    # Where buckets hold other parameters than before, a rank looks through a stage at most.
    assert others.pop("resume: parts read, half the stages") <= 256 / JOB.stages
    assert all(reads <= 16 for reads in others.values()), others


def test_the_table():
    measured = {256: {"bytes": 1000.0, "seconds": 0.25}, 1024: {"bytes": 1768.0, "seconds": 0.25}}
    assert list(table(measured)) == [
        "| | 256 | 1,024 | per rank |",
        "|---|---:|---:|---:|",
        "| bytes | 1,000 | 1,768 | 1 |",
        "| seconds | 0.25 | 0.25 | - |",
    ]
