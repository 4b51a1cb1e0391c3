"""Data that change: under a run they end it on all ranks, and before a resume they refuse it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megazero.checkpoint.folder import iteration_folder, saved_iterations
from megazero.checkpoint.manifest import STATE
from megazero.config.resolve import parse_config
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.errors import DataError
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.pretraining import pretrain, pretrain_on
from megazero.train.resume.facts import DataFacts
from megazero.train.resume.fit import compare_data
from megazero.train.step.engine import Engine
from tests.checkpoint.forged import edit, reseal

SMALL = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --lr 1e-2 --vocab-size 50 "
    "--micro-batch-size 1 --global-batch-size 2 --eval-iters 0 --log-interval 1 --split 1,0,0 --keep-last 99 "
    "--lr-decay-iters 9"
)


def write(prefix: Path, tokens: int = 300, first: int = 0) -> str:
    prefix.parent.mkdir(exist_ok=True)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_document((np.arange(tokens) + first) % 50)
    return str(prefix)


def run(*prefixes: str, folder: Path | None = None, extra: str = "", iterations: int = 4) -> None:
    where = f"--save {folder} --load {folder}" if folder is not None else ""
    flags = f"{SMALL} {where} --train-iters {iterations} {extra}".split()
    pretrain(parse_config([*flags, "--data-path", *prefixes]).config)


def after(monkeypatch, iteration: int, change: Callable[[], None]) -> None:
    """Change something in this step, once."""
    whole, done = Engine.attempt, []

    def step(self, batches, progress, *rest):
        if progress.iteration + 1 == iteration and not done:
            done.append(change())
        return whole(self, batches, progress, *rest)

    monkeypatch.setattr(Engine, "attempt", step)


def touch(path: str) -> None:
    os.utime(path, (1, 1))


def test_damage_in_use_ends_the_run_and_can_be_passed(tmp_path):
    prefix = write(tmp_path / "d")
    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    content[100] ^= 1
    Path(f"{prefix}.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"d\.bin` must have CRC-32 .* in bytes 0\.\.600, .*\(document 0\)"):
        run(prefix)
    run(prefix, extra="--no-verify-data")
    run(prefix, extra="--no-verify-data --verify-data=false")


def test_missing_sums_are_told_once(tmp_path, capsys):
    prefix = write(tmp_path / "d", 3000)
    Path(f"{prefix}.sum").unlink()
    # All three splits are of it.
    run(prefix, extra="--split 6,2,2 --eval-iters 1 --eval-interval 2 --log-interval 3")
    out = capsys.readouterr().out
    assert out.count(f"{prefix} has no checksums") == 1
    ends = ("iteration        4/", "validation loss at iteration 4", "test loss at iteration 4")
    places = [out.index(line) for line in ends]
    assert places == sorted(places), "the last step's line came after the evaluations"
    run(prefix, extra="--no-verify-data")
    assert "checksums" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("late", "extra", "saved_before"),
    [
        (2, "--save-interval 1", [1]),
        (4, "--save-interval 1", [1, 2, 3]),
        (2, "--save-interval 1 --log-interval 100", [1]),
        (4, "--log-interval 100", []),
        (2, "--save-interval 4 --log-interval 100 --exit-interval 2", []),
    ],
)
def test_a_change_under_a_run_ends_it_before_it_is_saved(tmp_path, monkeypatch, late, extra, saved_before):
    """At a step in between and at the last one, even if no log line is due."""
    prefix = write(tmp_path / "d")
    after(monkeypatch, late, lambda: touch(f"{prefix}.bin"))
    with pytest.raises(DataError) as caught:
        run(prefix, folder=tmp_path / "run", extra=extra)
    message = str(caught.value)
    assert message.startswith(
        f"`data` must not change during a run, but after iteration {late} rank 0 sees: "
        f"{prefix}.bin was written to at 1970-01-01T00:00:01.000000Z, and before that at "
    )
    assert message.count(".bin") == 1
    assert sorted(saved_iterations(tmp_path / "run")) == saved_before


def test_between_looks_a_change_is_not_seen_and_can_be_passed(tmp_path, monkeypatch):
    prefix = write(tmp_path / "d")
    after(monkeypatch, 2, lambda: touch(f"{prefix}.bin"))
    with pytest.raises(DataError, match="after iteration 3 rank 0 sees"):
        run(prefix, extra="--log-interval 3")
    after(monkeypatch, 2, lambda: touch(f"{prefix}.idx"))
    run(prefix, extra="--no-verify-data")


def refused_on_both(prefixes: list[str], flags: str = "") -> str:
    """What two replicas say that must both end with a DataError, and say the same."""
    world = ThreadWorld(2, timeout=60)

    def rank(number: int) -> str:
        words = [*f"{SMALL} --train-iters 9 {flags}".split(), "--data-path", prefixes[number]]
        config = parse_config(words, world_size=2).config
        with pytest.raises(DataError) as caught:
            pretrain_on(config, thread_context(world, ProcessGrid(dp=2), number))
        return str(caught.value)

    first, second = world.run(rank)
    assert first == second
    return first


def test_all_ranks_end_where_one_sees_a_change(tmp_path, monkeypatch):
    """Each has a copy of its own; only that of the second changes."""
    prefixes = [write(tmp_path / "one/d"), write(tmp_path / "two/d")]
    changed = f"{prefixes[1]}.idx"
    after(monkeypatch, 3, lambda: touch(changed))
    message = refused_on_both(prefixes)
    assert f"rank 1 sees: {changed} was written to" in message
    assert "after iteration 3 " in message or "after iteration 2 " in message


def test_a_resume_goes_on_with_the_same_data(tmp_path, capsys):
    prefix, folder = write(tmp_path / "d"), tmp_path / "run"
    run(prefix, folder=folder, iterations=2)
    (facts,) = json.loads((iteration_folder(folder, 2) / STATE).read_text())["data"]
    assert facts["prefix"] == prefix
    assert set(facts) == {"prefix", "idx", "bin", "mask", "blocks", "named", "order"}
    touch(f"{prefix}.bin")
    capsys.readouterr()
    run(prefix, folder=folder, iterations=40)  # which asks for more samples of them
    assert "d holds" not in capsys.readouterr().out


def saved(tmp_path: Path) -> tuple[str, Path]:
    """A dataset, and the folder of two steps on it."""
    prefix, folder = write(tmp_path / "d"), tmp_path / "run"
    run(prefix, folder=folder, iterations=2)
    return prefix, folder


@pytest.mark.parametrize(("tokens", "first", "files"), [(300, 1, "d.bin"), (301, 0, "d.idx`, `{}d.bin")])
def test_other_content_under_the_same_path_is_refused(tmp_path, capsys, tokens, first, files):
    prefix, folder = saved(tmp_path)
    write(tmp_path / "d", tokens, first)
    named = f"`{tmp_path}/{files.format(f'{tmp_path}/')}`"
    with pytest.raises(DataError) as caught:
        run(prefix, folder=folder)
    assert str(caught.value).startswith(
        f"{named} must hold what the checkpoint was trained on, but was changed"
    )
    capsys.readouterr()
    run(prefix, folder=folder, extra="--no-verify-data")
    assert f"{prefix}.bin is not what the checkpoint was trained on" in capsys.readouterr().out
    run(
        prefix, folder=folder, extra="--no-verify-data", iterations=5
    )  # the checkpoint is of the new data now


def test_sums_show_what_samples_of_a_large_file_do_not(tmp_path):
    prefix, folder = saved(tmp_path)
    sums = Path(f"{prefix}.sum")
    said = json.loads(sums.read_text())
    sums.unlink()
    run(prefix, folder=folder, iterations=3)  # there are none to compare
    sums.write_text(json.dumps(said))
    run(prefix, folder=folder, iterations=4)
    said["bin"]["crc32"] = "00000000"
    sums.write_text(json.dumps(said))
    with pytest.raises(DataError, match=r"^`[^`]*d\.bin` must hold what"):
        run(prefix, folder=folder, iterations=5)


def test_a_new_count_takes_any_data(tmp_path):
    prefix, folder = saved(tmp_path)
    write(tmp_path / "d", 400)
    run(prefix, folder=folder, extra=f"--finetune --save {tmp_path / 'new'}")


def test_other_paths_are_remarked(tmp_path, capsys):
    prefix, folder = saved(tmp_path)
    copy, other = write(tmp_path / "copy"), write(tmp_path / "other", 299)
    capsys.readouterr()
    run(copy, folder=folder, iterations=3)
    out = capsys.readouterr().out
    assert f"{copy} holds the data that were {prefix} before" in out
    assert "was trained on before" not in out
    run(copy, other, folder=folder)
    out = capsys.readouterr().out
    assert f"{other} is trained on from here, and was not before the checkpoint" in out
    assert "holds the data" not in out
    run(other, folder=folder, iterations=5)
    assert f"{copy} was trained on before the checkpoint, and is no longer" in capsys.readouterr().out


def test_a_checkpoint_without_a_record_passes(tmp_path):
    prefix, folder = saved(tmp_path)
    where = iteration_folder(folder, 2)
    edit(where / STATE, lambda facts: {name: facts[name] for name in facts if name != "data"})
    reseal(where)
    write(tmp_path / "d", 299)
    run(prefix, folder=folder)


def test_all_ranks_refuse_by_what_the_first_one_has(tmp_path):
    """The second has a copy elsewhere, which to it would be another path."""
    prefix, folder = saved(tmp_path)
    write(tmp_path / "d", 300, first=7)
    prefixes = [prefix, write(tmp_path / "copy", 300, first=7)]
    message = refused_on_both(prefixes, f"--load {folder}")
    assert message.startswith(f"`{prefix}.bin` must hold what")


def test_a_run_that_mixed_a_dataset_with_itself_is_not_continued_in_another_order():
    """Earlier versions made two entries of a dataset that a blend named twice."""
    facts = DataFacts(prefix="/d/a", idx="1", bin="2", named=2)
    older = facts.model_copy(update={"named": None})
    assert compare_data([facts], [facts], changes_pass=False) == ()
    assert compare_data([older], [facts.model_copy(update={"named": 1})], changes_pass=False) == ()
    with pytest.raises(DataError, match="`/d/a` must be named once in a blend, but is named several times"):
        compare_data([older], [facts], changes_pass=True)
