"""kill -9 at any moment of jobs that save to object storage: what is visible is whole, the next one goes on.

    python proofs/remote_kills.py --kills 100 [--server seaweed|small] [--faults 0.05] [--seed 0]

Every job saves checkpoints of some MB in objects of 256 KiB to one URL, in line or in the background, keeping
the last two, and is killed at a random moment. Then, from a host that has no mirror: the newest checkpoint is
the last one whose save had returned, or a later one; all that are visible are read, and are bit for bit what
was saved. At the end a job that is not killed saves once more, and the bucket has only what is visible, and
no multipart upload that was begun. With `--faults`, a proxy spoils that share of all requests. Prints a
line of what happened, and exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from megazero.checkpoint.box import Box
from megazero.checkpoint.folder import Retention, candidates
from megazero.checkpoint.part import Key, Part
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.remote import disk
from megazero.checkpoint.remote.index import INDEX, LATEST, read_index
from megazero.checkpoint.saver import Saver
from megazero.mpu.context import solo_context
from megazero.storage.objects import Objects
from megazero.storage.urls import Url
from tests.checkpoint.remote.uploads import unfinished_uploads
from tests.storage.proxy import Faults, FaultyProxy
from tests.storage.small_server import SmallServer, environment

URL = "s3://bucket/killed"
KEYS = (Key("a"), Key("a", "exp_avg"), Key("b"))


def value(key: Key, iteration: int) -> torch.Tensor:
    """The content of a tensor of a checkpoint."""
    return torch.arange(300_000.0).add_(iteration * 7 + len(str(key)))


def save(report: Path, first: int, count: int, in_flight: int) -> None:
    """Save some checkpoints, and write down each that became visible."""
    saver = Saver(URL, solo_context(), None, Retention(last=2), in_flight)
    with report.open("a", buffering=1) as file:
        for iteration in range(first, first + count):
            tensors = {key: value(key, iteration) for key in KEYS}
            parts = [Part(k, tuple(x.shape), Box.whole(x.shape), x) for k, x in tensors.items()]
            for visible in saver.save(iteration, parts, {"of": iteration}):
                file.write(f"{visible}\n")
        while saver.unsettled:
            file.write(f"{saver.settle()}\n")
    saver.close()


def check(newest: int) -> int:
    """Read all that is visible; returns the newest iteration.

    Raises:
        AssertionError: something is lost, or not what was saved.
    """
    there = []
    for folder in candidates(URL).folders:
        reader = CheckpointReader(folder)
        there.append(iteration := reader.manifest.iteration)
        assert reader.facts["of"] == iteration
        for key in KEYS:
            assert torch.equal(reader.tensor(key), value(key, iteration)), f"{key} of {iteration} differs"
    best = there[0] if there else 0
    assert best >= newest, f"{newest} was saved, but {best} is the newest"
    return best


def check_left() -> None:
    """Raise unless the bucket has only what is visible."""
    objects = Objects(Url.parse(URL))
    index, _ = read_index(objects)
    assert index is not None
    kept = (INDEX, LATEST, *(f"{data}/" for data in index.checkpoints.values()))
    left = [item.name for item in objects.names() if not item.name.startswith(kept)]
    assert not left, f"{left} were left"


@contextlib.contextmanager
def seaweed() -> Iterator[str]:
    """SeaweedFS, started by another process: nothing of obstore works in a child if its parent used it."""
    text = (
        "from tests.storage import servers\n"
        "with servers.seaweed() as server:\n    print(server.endpoint, flush=True)\n    input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", text], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate("\n")


def in_child(work: Callable[[], object], limit: float | None = None) -> int:
    """Do work in a forked process on a host of its own; kill it after `limit` seconds. Returns its status."""
    cache = tempfile.mkdtemp(prefix="host-")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.environ["XDG_CACHE_HOME"] = cache
            warnings.simplefilter("ignore")
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    if limit is not None:
        time.sleep(limit)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    shutil.rmtree(cache, ignore_errors=True)
    return status


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--server", choices=["seaweed", "small"], default="seaweed")
    parser.add_argument("--faults", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    disk.CHUNK = 256 << 10
    stack, chance = contextlib.ExitStack(), random.Random(flags.seed)
    report = Path(tempfile.mkdtemp()) / "visible"
    report.touch()
    with stack:
        small = stack.enter_context(SmallServer()) if flags.server == "small" else None
        server = small.endpoint if small else stack.enter_context(seaweed())
        endpoint = server
        if flags.faults:
            faults = Faults.each(flags.faults)
            endpoint = stack.enter_context(FaultyProxy(endpoint, flags.seed, faults)).endpoint
        os.environ.update(environment(endpoint))
        begun = time.monotonic()
        assert in_child(lambda: save(report, 1, 3, 0)) == 0
        whole, wrong, ended = time.monotonic() - begun, 0, 0
        print(f"a job of three saves takes {whole:.2f} s", flush=True)
        for number in range(flags.kills):
            newest = max(map(int, report.read_text().split()))
            in_flight, limit = chance.choice([0, 1]), chance.random() * 2 * whole
            ended += in_child(lambda: save(report, newest + 1, 3, in_flight), limit) != signal.SIGKILL  # noqa: B023
            newest = max(map(int, report.read_text().split()))
            wrong += in_child(lambda: check(newest)) != 0  # noqa: B023
            if number % 10 == 9:
                print(f"{number + 1} kills, {wrong} wrong, iteration {newest}", flush=True)
        newest = max(map(int, report.read_text().split()))
        wrong += in_child(lambda: (save(report, newest + 1, 1, 0), check(newest + 1), check_left())) != 0
        begun_uploads = list(small.uploads) if small else unfinished_uploads(server)
        wrong += len(begun_uploads)
    print(
        f"{flags.kills} kills ({ended} jobs had ended by themselves), iteration {newest + 1}, "
        f"{len(begun_uploads)} multipart uploads left: {wrong} wrong"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
