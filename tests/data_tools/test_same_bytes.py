"""The same bytes from the same documents: kinds of input x workers, parts, shards, stops."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megazero.data.tokenizers.build import TokenizerSpec
from megazero.data_tools.cli import Shard, expand_inputs
from megazero.data_tools.preprocessing import pipeline
from megazero.data_tools.preprocessing.encode import EncodeJob
from megazero.data_tools.preprocessing.pipeline import PreprocessRun, Workers, preprocess
from megazero.data_tools.preprocessing.shards import make_units
from megazero.data_tools.preprocessing.units import UnitFolder, UnitPlan

ROOT = Path(__file__).resolve().parents[2]
JOB = EncodeJob(TokenizerSpec("ByteLevelTokenizer"), ("meta.text", "title"), append_eod=True)
COUNT = 160
UNIT = 4000  # bytes, so that a corpus has many units
ENDS = (".bin", ".idx", ".sum")


def rows(count: int = COUNT) -> list[dict]:
    """Documents of many sizes, some empty and some of several sequences or none."""
    made = []
    for i in range(count):
        text: object = f"naïve 私は猫 {i} " * (i % 5)
        if i % 11 == 0:
            text = [f"first {i}", "", "second"][: i % 4]
        made.append({"meta": {"text": text, "n": i}, "title": f"title {i}"})
    return made


def lines(part: Sequence[dict]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in part)


def thirds(part: Sequence[dict]) -> list[bytes]:
    """Three members, frames or streams."""
    step = -(-len(part) // 3)
    return [lines(part[start : start + step]) for start in range(0, len(part), step)]


def plain(path: Path, part: Sequence[dict]) -> list[str]:
    path.write_bytes(lines(part))
    return [str(path)]


def packed(pack: Callable[[bytes], bytes]) -> Callable[[Path, Sequence[dict]], list[str]]:
    def write(path: Path, part: Sequence[dict]) -> list[str]:
        path.write_bytes(b"".join(map(pack, thirds(part))))
        return [str(path)]

    return write


def zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    long = zstandard.ZstdCompressionParameters.from_level(3, window_log=28, enable_ldm=True)
    frame = zstandard.ZstdCompressor(compression_params=long).compressobj()
    return frame.compress(data) + frame.flush()


def table_of(part: Sequence[dict]):
    """Texts as lists, nested in a struct, and titles as a dictionary: types that must not matter."""
    pa = pytest.importorskip("pyarrow")
    texts = [row["meta"]["text"] for row in part]
    lists = [text if isinstance(text, list) else [text] for text in texts]
    meta = pa.StructArray.from_arrays(
        [pa.array(lists, pa.list_(pa.large_string())), pa.array(range(len(part)))], ["text", "n"]
    )
    return pa.table({"meta": meta, "title": pa.array([row["title"] for row in part]).dictionary_encode()})


def parquet(path: Path, part: Sequence[dict]) -> list[str]:
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(table_of(part), path, row_group_size=17, compression="zstd")
    return [str(path)]


def arrow_folder(path: Path, part: Sequence[dict]) -> list[str]:
    """Two files, listed in another order than that of their names."""
    pa = pytest.importorskip("pyarrow")
    path.mkdir()
    half = len(part) // 2
    for name, some in (("data-00001.arrow", part[:half]), ("data-00000.arrow", part[half:])):
        with pa.OSFile(str(path / name), "wb") as file, pa.ipc.new_stream(file, table_of(some).schema) as out:
            out.write_table(table_of(some), max_chunksize=13)
    files = [{"filename": "data-00001.arrow"}, {"filename": "data-00000.arrow"}]
    (path / "state.json").write_text(json.dumps({"_data_files": files}))
    return expand_inputs([str(path)])


def arrow_file(path: Path, part: Sequence[dict]) -> list[str]:
    pa = pytest.importorskip("pyarrow")
    table = table_of(part).unify_dictionaries()
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
        out.write_table(table, max_chunksize=11)
    return [str(path)]


KINDS = {
    "plain": plain,
    "gzip": packed(gzip.compress),
    "zstd": packed(zstd),
    "bzip2": packed(bz2.compress),
    "xz": packed(lzma.compress),
    "parquet": parquet,
    "arrow folder": arrow_folder,
    "arrow file": arrow_file,
}


def inputs_of(kind: str, folder: Path) -> tuple[str, ...]:
    """The same documents as files of a kind; "mixed" is a piece of each."""
    if kind != "mixed":
        return tuple(KINDS[kind](folder / kind, rows()))
    step, paths = -(-COUNT // len(KINDS)), []
    for number, (name, write) in enumerate(KINDS.items()):
        paths += write(folder / f"mixed {name}", rows()[number * step : (number + 1) * step])
    return tuple(paths)


def read(prefix: str) -> list[bytes]:
    return [Path(f"{prefix}_{key}_document{end}").read_bytes() for key in JOB.keys for end in ENDS]


def by_workers(run: PreprocessRun, workers: int, partitions: int) -> None:
    preprocess(PreprocessRun(run.paths, run.prefix, run.job, Workers(workers, partitions), chunk_bytes=900))


def by_shards(run: PreprocessRun, shards: int, workers: int, ray: str | None = None) -> None:
    """Each shard knows nothing of the others; the last goes first."""
    run = PreprocessRun(run.paths, run.prefix, run.job, Workers(workers), chunk_bytes=900)
    for number in reversed(range(shards)):
        plan = UnitPlan.of(run, UNIT)
        folder = UnitFolder(f"{run.prefix}.units", plan)
        make_units(run, folder, plan.share(Shard(number, shards)), ray)
    UnitFolder.existing(f"{run.prefix}.units").merge(run.prefix, None)


def stopped_often(run: PreprocessRun, workers: int) -> None:
    """Stopped after a few chunks, later each time, with other workers, until nothing is left to do."""
    plan = UnitPlan.of(run, UNIT)
    real, stops = pipeline.cut, 0

    def cut(*args, **settings):
        for chunk in real(*args, **settings):
            if next(left) == 0:
                raise KeyboardInterrupt
            yield chunk

    pipeline.cut = cut
    try:
        for stops in itertools.count():
            left = itertools.count(2 * stops + 4, -1)
            some = PreprocessRun(
                run.paths, run.prefix, run.job, Workers(workers + stops % 2), chunk_bytes=1200
            )
            try:
                make_units(some, UnitFolder(f"{run.prefix}.units", plan), plan.units)
                break
            except KeyboardInterrupt:
                continue
    finally:
        pipeline.cut = real
    assert stops > 0
    UnitFolder.existing(f"{run.prefix}.units").merge(run.prefix, None)


WAYS: dict[str, Callable[[PreprocessRun], None]] = {
    "1 worker": lambda run: by_workers(run, 1, 1),
    "3 workers": lambda run: by_workers(run, 3, 1),
    "2 parts": lambda run: by_workers(run, 2, 2),
    "3 parts of 2": lambda run: by_workers(run, 6, 3),
    "1 shard": lambda run: by_shards(run, 1, 1),
    "3 shards of 2": lambda run: by_shards(run, 3, 2),
    "50 shards": lambda run: by_shards(run, 50, 1),
    "stopped often": lambda run: stopped_often(run, 1),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("expected")
    preprocess(PreprocessRun(inputs_of("plain", folder), str(folder / "p"), JOB))
    return read(str(folder / "p"))


def check(kind: str, way: str, folder: Path, expected: list[bytes]) -> None:
    run = PreprocessRun(inputs_of(kind, folder), str(folder / "out"), JOB)
    WAYS[way](run)
    assert read(run.prefix) == expected


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("plain", "3 workers"),
        ("mixed", "2 parts"),
        ("mixed", "3 shards of 2"),
        ("plain", "stopped often"),
    ],
)
def test_a_few_ways_give_the_same_bytes(tmp_path, expected, kind, way):
    check(kind, way, tmp_path, expected)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_any_kind_and_way_give_the_same_bytes(tmp_path, expected, kind, way):
    """72 combinations."""
    check(kind, way, tmp_path, expected)


def command(paths: Sequence[str], prefix: Path, *flags: str) -> list[str]:
    start = [sys.executable, str(ROOT / "data_tools/preprocess_data.py"), "--input", *paths]
    words = ["--output-prefix", str(prefix), "--json-keys", *JOB.keys, "--append-eod"]
    return [*start, *words, "--tokenizer-type", "ByteLevelTokenizer", *flags]


@pytest.mark.parametrize("kind", ["plain", pytest.param("zstd", marks=pytest.mark.slow)])
def test_standard_input_gives_the_same_bytes(tmp_path, expected, kind, monkeypatch):
    from megazero.data_tools.preprocess_data import main

    (path,) = inputs_of(kind, tmp_path)
    waiting = io.BufferedReader(io.BytesIO(Path(path).read_bytes()))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(waiting))
    assert main(command(["-"], tmp_path / "out", "--workers", "2")[2:]) == 0
    assert read(str(tmp_path / "out")) == expected


@pytest.mark.slow
def test_shards_that_are_killed_at_any_time_go_on_to_the_same_bytes(tmp_path):
    """SIGKILL, later and later, until a run ends by itself; what was whole is never made again."""
    paths = [str(tmp_path / f"{number}.jsonl") for number in range(2)]
    for path in paths:
        Path(path).write_bytes(lines(rows(24_000)))
    assert subprocess.run(command(paths, tmp_path / "whole"), capture_output=True).returncode == 0
    part = command(paths, tmp_path / "out", "--unit-mib", "1", "--workers", "2", "--shard", "0/1")
    made: dict[Path, float] = {}
    kills, seconds = 0, 0.2
    while True:
        run = subprocess.Popen(part, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            assert run.wait(seconds) == 0
            break
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGKILL)
            run.wait()
            kills, seconds = kills + 1, seconds + 0.15
        marks = {path: os.stat(path).st_mtime_ns for path in tmp_path.glob("out.units/??/*.json")}
        assert made.items() <= marks.items()
        made = marks
    assert kills > 2
    assert subprocess.run([*part[:-2], "--merge"], capture_output=True).returncode == 0
    assert read(str(tmp_path / "out")) == read(str(tmp_path / "whole"))


@pytest.mark.slow
def test_a_cluster_of_ray_gives_the_same_bytes_though_a_process_of_it_is_killed(tmp_path, expected):
    pytest.importorskip("ray")
    run = PreprocessRun(inputs_of("mixed", tmp_path), str(tmp_path / "out"), JOB, Workers(2))
    plan = UnitPlan.of(run, UNIT)
    watch = subprocess.Popen([sys.executable, "-c", _KILLER, str(tmp_path / "out.units")])
    try:
        make_units(run, UnitFolder(f"{run.prefix}.units", plan), plan.units, "local")
    finally:
        killed = watch.wait(60)
    UnitFolder.existing(f"{run.prefix}.units").merge(run.prefix, None)
    assert read(run.prefix) == expected
    assert killed == 0, "no process was there to be killed"


# Kills the first process that holds the lock of a unit: the lock file says who that is.
_KILLER = """
import glob, os, re, signal, sys, time
for _ in range(30000):
    for path in glob.glob(sys.argv[1] + "/??/.*.lock"):
        try:
            words = open(path).read()
        except OSError:
            continue
        if number := re.search(r"\\d+", words):
            os.kill(int(number[0]), signal.SIGKILL)
            sys.exit(0)
    time.sleep(0.001)
sys.exit(1)
"""
