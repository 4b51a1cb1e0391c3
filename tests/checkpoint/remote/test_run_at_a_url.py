"""A run's folder at a URL, as jobs and readers of several hosts see it."""

from __future__ import annotations

import os
import re
import shutil
from collections import namedtuple

import pytest

from megazero.checkpoint.folder import candidates, iteration_folder
from megazero.checkpoint.locate import one_checkpoint
from megazero.checkpoint.lock import saved_elsewhere
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.remote import disk, mirror
from megazero.checkpoint.remote.disk import put_file
from megazero.checkpoint.remote.mirror import in_mirror, local_folder, local_path
from megazero.checkpoint.saver import Saver
from megazero.commands.checkpoint.verify import check
from megazero.errors import CheckpointError, DamagedCheckpointError, LostFolderError, StorageError
from megazero.mpu.context import solo_context
from tests.checkpoint.test_killed import holds, parts_of, save_all

pytestmark = pytest.mark.fast

URL = "s3://bucket/run"


def save(*iterations: int, url: str = URL) -> None:
    save_all(Saver(url, solo_context()), iterations, lambda iteration: None)


def fetched(folder) -> list[str]:
    """The names of the files of a mirrored checkpoint that this host has."""
    return sorted(path.name for path in folder.iterdir() if path.stat().st_mode & 0o400)


def test_a_url_has_one_mirror(memory, another_host):
    cache = another_host()
    assert local_path(URL) == cache / "megazero/mirror/s3/bucket/run"
    assert str(mirror.open_objects(local_path(URL) / "iter_0000010").url) == f"{URL}/iter_0000010"
    assert in_mirror(local_path(URL))
    assert not in_mirror("/data/run")
    with pytest.raises(StorageError, match="did you mean s3"):
        local_path("s4://bucket/run")


@pytest.mark.parametrize("chunk", [1, 64, 176, 1 << 20])
def test_large_files_are_several_objects(memory, another_host, monkeypatch, chunk):
    monkeypatch.setattr(disk, "CHUNK", chunk)
    save(10)
    sizes = [len(content) for content, _ in memory.objects.values()]
    assert (max(sizes) <= 600) or chunk == 1 << 20
    pieces = [key for key in memory.objects if ".safetensors." in key]
    assert bool(pieces) == (chunk <= 176)  # the files have 224 and 176 bytes
    another_host()
    holds(candidates(URL).folders[0], 10)


def test_files_are_fetched_when_they_are_opened_and_once_per_host(memory, another_host):
    save(10)
    another_host()
    folder = one_checkpoint(URL)
    asked: list[str] = []
    memory.before = asked.append
    first, second = CheckpointReader(folder), CheckpointReader(folder)
    assert fetched(folder) == ["index.json", "manifest.json", "state.json"]
    for reader in (first, second):
        for key in reader.shapes:
            reader.tensor(key)
    large = [request for request in asked if ".safetensors" in request]
    assert sorted(request.rpartition("/")[2] for request in large) == [
        "model-00001-of-00001.safetensors",
        "optimizer-00001-of-00001.safetensors",
    ]


def test_a_job_keeps_nothing_of_what_it_has_sent(memory, another_host):
    save(10, 20)
    assert [fetched(iteration_folder(local_path(URL), number)) for number in (10, 20)] == [[], []]


def test_fetched_files_go_where_the_disk_is_full(memory, another_host, monkeypatch):
    save(10, 20)
    another_host()
    for folder in candidates(URL).folders:
        holds(folder, int(folder.name[5:]))
    older = iteration_folder(local_path(URL), 10)
    assert len(fetched(older)) == 5
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(mirror.shutil, "disk_usage", lambda path: usage(0))
    for name in os.listdir(older):
        os.utime(older / name, (0, 0))
    mirror._show_file(replaced := local_path(URL) / "new", 224)
    replaced.rename(iteration_folder(local_path(URL), 20) / "model-00001-of-00001.safetensors")
    holds(iteration_folder(local_path(URL), 20), 20)
    assert fetched(older) == []
    holds(older, 10)


def test_a_mirror_follows_its_url(memory, another_host, monkeypatch):
    first = another_host()
    save(10)
    holds(candidates(URL).folders[0], 10)
    another_host()
    save(10, 20)
    save_all(Saver(URL, solo_context()), (10,), lambda iteration: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(first))
    asked: list[str] = []
    memory.before = asked.append
    holds(iteration_folder(local_path(URL), 10), 10)  # as a rank opens it whose host did not list the folder
    assert [folder.name for folder in candidates(URL).folders] == ["iter_0000010", "iter_0000020"]
    assert [request for request in asked if "model" in request]  # the file of that name is another one now
    memory.objects.clear()
    assert not candidates(URL).folders
    assert not local_path(URL).joinpath("iter_0000010").exists()


def test_one_checkpoint_has_a_url_too(memory, another_host):
    save(10, 20)
    another_host()
    holds(one_checkpoint(f"{URL}/iter_0000010"), 10)
    with pytest.raises(CheckpointError, match="but is missing"):
        one_checkpoint(f"{URL}/iter_0000030")


def test_a_copy_of_a_local_folder_is_read_and_gone_on_with(memory, another_host, tmp_path):
    save(10, 20, url=str(tmp_path / "local"))
    for path in (tmp_path / "local").rglob("*"):
        if path.is_file():
            memory.write(f"run/{path.relative_to(tmp_path / 'local')}", path.read_bytes())
    for folder in candidates(URL).folders:
        holds(folder, int(folder.name[5:]))
    save(30)
    another_host()
    assert [folder.name[-2:] for folder in candidates(URL).folders] == ["30", "20", "10"]
    holds(candidates(URL).folders[-1], 10)


def test_a_checkpoint_that_lacks_an_object_is_passed_over(memory, another_host):
    save(10, 20)
    (gone,) = (key for key in memory.objects if "iter_0000020." in key and "model-" in key)
    del memory.objects[gone]
    another_host()
    newest, older = candidates(URL).folders
    with pytest.raises(DamagedCheckpointError, match="model-00001"):
        holds(newest, 20)
    holds(older, 10)


def test_a_store_that_does_not_answer_is_no_damage(memory, another_host):
    """Else an older checkpoint would be taken, and a run would lose work for a moment's fault."""
    save(10)
    folder = one_checkpoint(URL)

    def refuse(request: str) -> None:
        raise StorageError("`s3://bucket/run` must be within reach, but is not")

    memory.before = refuse
    with pytest.raises(CheckpointError, match="within reach") as error:
        CheckpointReader(folder)
    assert not isinstance(error.value, DamagedCheckpointError)
    with pytest.raises(CheckpointError, match="within reach"):
        Saver(URL, solo_context())


@pytest.mark.parametrize("condition", ["create", "swap"])
def test_a_store_that_ignores_conditions_is_refused(memory, another_host, monkeypatch, condition):
    write = disk.open_objects(local_path(URL)).put
    monkeypatch.setattr(
        f"tests.checkpoint.remote.memory.MemoryObjects.{condition}",
        lambda self, name, data, *tag: write(name, data),
    )
    with pytest.raises(CheckpointError, match="obeys conditions of writes, but this one ignores"):
        Saver(URL, solo_context())
    assert not memory.objects


def test_two_jobs(memory, another_host, monkeypatch):
    """One host's second job is refused; another host's takes the folder over, and the first one says so."""
    first_host = another_host()
    first = Saver(URL, solo_context())
    with pytest.raises(CheckpointError, match="written by one job at a time, but process"):
        Saver(URL, solo_context())
    assert first.save(10, parts_of(first.context, 10), {"of": 10}) == [10]
    another_host()
    monkeypatch.setattr(disk, "this_process", lambda: "process 7 on elsewhere")
    with pytest.warns(UserWarning, match="s3://bucket/run was last written by process .*has not let go"):
        second = Saver(URL, solo_context())
    monkeypatch.setenv("XDG_CACHE_HOME", str(first_host))
    with pytest.raises(LostFolderError, match="now belongs to process 7 on elsewhere"):
        first.save(20, parts_of(first.context, 20), {"of": 20})
    first.close()
    another_host()
    assert second.save(30, parts_of(second.context, 30), {"of": 30}) == [30]
    second.close()
    assert not [key for key in memory.objects if "0000020" in key]


def test_other_files_of_a_run_go_along(memory, another_host):
    saver = Saver(URL, solo_context())
    folder = local_path(URL)
    (folder / "metrics.jsonl").write_text("1\n")
    (folder / "incidents").mkdir()
    (folder / "incidents" / "1.json").write_text("{}")
    saver.save(10, parts_of(saver.context, 10), {"of": 10})
    assert memory.objects["run/metrics.jsonl"][0] == b"1\n"
    here = os.environ["XDG_CACHE_HOME"]
    elsewhere = local_folder_elsewhere(another_host)
    assert (elsewhere / "incidents/1.json").read_text() == "{}"
    (elsewhere / "report.html").write_text("page")
    put_file(elsewhere / "report.html")
    os.environ["XDG_CACHE_HOME"] = here
    (folder / "metrics.jsonl").write_text("1\n2\n")
    saver.save(20, parts_of(saver.context, 20), {"of": 20})  # the index has changed, but not its owner
    (folder / "metrics.jsonl").write_text("1\n2\n3\n")
    saver.close()
    elsewhere = local_folder_elsewhere(another_host)
    assert (elsewhere / "metrics.jsonl").read_text() == "1\n2\n3\n"
    assert (elsewhere / "report.html").read_text() == "page"
    assert saved_elsewhere(one_checkpoint(URL), CheckpointReader(one_checkpoint(URL)).saved_into) is None


def local_folder_elsewhere(another_host):
    another_host()
    return local_folder(URL)


def test_another_run_at_the_url_begins_anew(memory, another_host):
    saver = Saver(URL, solo_context())
    (local_path(URL) / "metrics.jsonl").write_text("1\n")
    saver.close()
    memory.objects.clear()
    another = local_folder(URL)
    assert [path.name for path in another.iterdir() if not path.name.startswith(".")] == []


def test_a_damaged_index_is_named(memory, another_host):
    save(10)
    memory.write("run/checkpoints.json", b"{}")
    with pytest.raises(CheckpointError, match="checkpoints.json` must be an index of checkpoints"):
        candidates(URL)


def test_a_mirror_that_is_gone_is_made_again(memory, another_host):
    save(10)
    folder = one_checkpoint(URL)
    shutil.rmtree(local_path(URL))
    holds(folder, 10)


def test_sizes_are_compared_with_a_listing_and_nothing_large_is_fetched(memory, another_host, monkeypatch):
    monkeypatch.setattr(disk, "CHUNK", 64)
    save(10)
    another_host()
    folder, asked = one_checkpoint(URL), []
    memory.before = asked.append
    assert check(folder, size_only=True).damage == ()
    assert not [request for request in asked if request.startswith("read") and "model" in request]
    (piece,) = (key for key in memory.objects if "model-00001-of-00001.safetensors.000001" in key)
    memory.objects[piece] = memory.objects[piece][0][:-1], "2"
    assert re.search(
        r"safetensors` must be as it was written, but has 223 bytes instead of 224", _damage(folder)
    )
    for key in [key for key in memory.objects if "/model-" in key]:
        del memory.objects[key]
    assert re.search("safetensors` must be as it was written, but is not in the store", _damage(folder))


def _damage(folder) -> str:
    return " ".join(check(folder, size_only=True).damage)
