"""What offload costs and saves: memory of a training, and rates of a disk, beside what the machine can do.

    python benchmarks/offload.py memory --folder DIR   # peak memory of whole trainings, also under a limit
    python benchmarks/offload.py disk --folder DIR     # reads and writes beside fio's (if it is installed)
    python benchmarks/offload.py steps --folder DIR    # steps beside the larger of computing and moving
    python benchmarks/offload.py slices --folder DIR   # waiting for weights on disk, read ahead or not
    python benchmarks/offload.py updates --folder DIR  # the same of the update alone, in one process
    python benchmarks/offload.py beside --folder DIR   # steps beside DeepSpeed's with the same offloaded

`memory` trains a GPT of about 100 million parameters at ZeRO stage 3 on one rank, with everything on the
device, on the host and on disk, and the last one in a control group that may hold a quarter of its state
(above what an idle process takes). `steps` trains a smaller one, and measures the disk through the same
code between the trainings of a round: `over_larger` is a step from disk, divided by the larger of a step with
everything on the device and of the time that the disk takes for what such a step moves. `beside` lets teams
take turns as `zero.py` does, on one rank, with little to compute for each parameter. JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contenders import Shape
from benchmarks.teams import Contender, present, results, started, take_turns, write
from megazero.mpu.context import solo_context
from megazero.optim.elementwise import Adam
from megazero.zero import gather
from megazero.zero.build import build_store
from megazero.zero.optimizer import Optimizer
from megazero.zero.parallel import DataParallel
from megazero.zero.policy import GatherPolicy, ZeroPolicy
from megazero.zero.store.disk import DiskSettings, DiskTier
from megazero.zero.store.host import HostTier
from megazero.zero.store.offload import OffloadStore, StatePlacement
from megazero.zero.store.tier import Tier
from megazero.zero.unit import module_units

ROOT = Path(__file__).resolve().parent.parent
HIDDEN, LAYERS, VOCABULARY = 512, 32, 8192
PARAMETERS = 12 * LAYERS * HIDDEN**2 + VOCABULARY * HIDDEN
MODEL = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 8 --seq-length 64 "
    f"--vocab-size {VOCABULARY} --position-embedding-type rope --mock-data --micro-batch-size 1 "
    "--global-batch-size 2 --lr 1e-4 --eval-iters 0 --log-interval 1 --check-weights-interval 0 "
    "--on-spike off "
    "--zero-stage 3 --zero-reduce-bucket-size 1000000 --zero-max-live-parameters 0 "
    "--zero-prefetch-bucket-size 1000000 --zero-param-persistence-threshold 10000"
)
STORES = {
    "device": "",
    "cpu": "--offload-optimizer cpu --offload-parameters cpu",
    "nvme": "--offload-optimizer nvme --offload-parameters nvme --offload-path {folder}",
}
FEWER = "--num-layers 6"  # of two flags the last one counts
IDLE = """
import torch, megazero.train.assemble
torch.randn(400, 400) @ torch.randn(400, 400)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def tell(**found: object) -> None:
    """Print a line of JSON."""
    shown = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in found.items()}
    print(json.dumps({"benchmark": "offload", **shown}), flush=True)


def enter_group(limit: int) -> None:
    """Put this process into a control group that may hold so many bytes of memory. Needs to be root.

    Files that it reads through the page cache count too, but the system takes these pages back.
    """
    for root, name in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / "megazero-offload"
        if (Path(root) / "cgroup.procs").exists():
            group.mkdir(exist_ok=True)
            (group / name).write_text(str(limit))
            (group / "cgroup.procs").write_text(str(os.getpid()))
            return
    raise OSError("there are no control groups for memory")


def train(flags: str, steps: int, limit: int | None = None) -> tuple[int, int, list[dict]]:
    """Train in a process of its own: its status, the most bytes that were resident, and its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.jsonl"
        words = f"{MODEL} {flags} --train-iters {steps} --metrics-jsonl {path}".split()
        before = None if limit is None else partial(enter_group, limit)
        # Without the second, glibc keeps freed tensors in its heap, in pieces that fit nothing else.
        environment = os.environ | {
            "OMP_NUM_THREADS": "2",
            "MALLOC_MMAP_THRESHOLD_": "262144",
            "PYTHONPATH": str(ROOT),
        }
        work = subprocess.Popen(
            [sys.executable, str(ROOT / "pretrain_gpt.py"), *words],
            preexec_fn=before,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        said = work.stderr.read()
        _, status, used = os.wait4(work.pid, 0)
        if status:
            print(said[-2000:], file=sys.stderr)
        steps_done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return os.waitstatus_to_exitcode(status), used.ru_maxrss << 10, steps_done


def memory(folder: Path) -> int:
    """Whole trainings; 1 if losses differ, or the limit was too small."""
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", IDLE], capture_output=True, text=True, check=True, env=environment
    )
    idle = int(done.stdout) << 10
    state = 20 * PARAMETERS  # weights, masters, two moments and gradient sums in fp32
    limit = idle + state // 4
    losses = {}
    for name, flags, bound in (
        *((n, f, None) for n, f in STORES.items()),
        ("nvme, limited", STORES["nvme"], limit),
    ):
        status, peak, steps = train(flags.format(folder=folder), 3, bound)
        losses[name] = [step["lm_loss"] for step in steps]
        tell(
            measure="memory",
            store=name,
            status=status,
            parameters=PARAMETERS,
            state_gib=state / 2**30,
            limit_gib=None if bound is None else (bound - idle) / 2**30,
            peak_gib_above_idle=(peak - idle) / 2**30,
            losses=losses[name],
            step_seconds=statistics.median(step["seconds"] for step in steps[1:]) if steps[1:] else None,
        )
    return int(len(losses["device"]) != 3 or any(found != losses["device"] for found in losses.values()))


def rate(work: Callable[[], int]) -> float:
    """GB/s of what moves a number of bytes."""
    began = time.perf_counter()
    moved = work()
    return moved / 1e9 / (time.perf_counter() - began)


def through_tier(folder: Path, size: int, count: int, settings: DiskSettings) -> tuple[float, float]:
    """GB/s of reads and writes of slots, one read ahead and one written behind."""
    tier = DiskTier(folder, settings)
    slots = [tier.make(size // 4, torch.float32) for _ in range(count)]

    def write() -> int:
        for slot in slots:
            tier.put(slot, tier.blank(slot))
        tier.settle()
        return size * count

    def read() -> int:
        for number, slot in enumerate(slots):
            for other in slots[number : number + 2]:
                tier.prefetch(other)
            tier.drop(slot, tier.fetch(slot))
        return size * count

    write()
    written = rate(write)
    return rate(read), written


def through_fio(folder: Path, size: int, count: int, settings: DiskSettings) -> tuple[float, float]:
    """The same by fio, with blocks and depth of the same size."""
    found = []
    for way in ("read", "write"):
        command = [
            "fio",
            "--name=x",
            f"--directory={folder}",
            f"--rw={way}",
            f"--bs={settings.block}",
            f"--iodepth={settings.depth}",
            f"--size={size * count}",
            "--direct=1",
            "--ioengine=libaio",
            "--output-format=json",
            "--fallocate=posix",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout)["jobs"][0][way]["bw_bytes"] / 1e9)
    for path in folder.glob("x.*"):
        path.unlink()
    return found[0], found[1]


def disk(folder: Path, rounds: int = 5) -> int:
    """Rates beside fio's, in turns."""
    settings, size, count = DiskSettings(), 48 << 20, 20
    ways = {"tier": through_tier}
    if shutil.which("fio"):
        ways["fio"] = through_fio
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(way(folder, size, count, settings))
    medians = {
        name: [statistics.median(each) for each in zip(*rates, strict=True)] for name, rates in found.items()
    }
    for name, (read, written) in medians.items():
        tell(measure="disk", way=name, read_gb_s=read, written_gb_s=written)
    if "fio" in medians:
        ratios = [mine / other for mine, other in zip(medians["tier"], medians["fio"], strict=True)]
        tell(measure="disk", way="tier / fio", read=ratios[0], written=ratios[1])
    return 0


def steps(folder: Path, rounds: int = 3) -> int:
    """How well moving hides behind computing: steps on disk beside the same ones on the device."""
    ratios = []
    for number in range(rounds):
        found = {}
        for name, flags in STORES.items():
            _, _, done = train(f"{flags.format(folder=folder)} {FEWER}", 5)
            moved = [step.get("offload") or {"read": 0, "written": 0, "waited": 0.0} for step in done[1:]]
            found[name] = {
                "seconds": statistics.median(step["seconds"] for step in done[1:]),
                **{kind: statistics.median(each[kind] for each in moved) for kind in moved[0]},
            }
        read, written = through_tier(folder, 16 << 20, 20, DiskSettings())
        disk = found["nvme"]
        moving = disk["read"] / 1e9 / read + disk["written"] / 1e9 / written
        larger = max(found["device"]["seconds"], moving)
        ratios.append(disk["seconds"] / larger)
        tell(
            measure="steps",
            round=number,
            stores=found,
            read_gb_s=read,
            written_gb_s=written,
            moving_seconds=moving,
            over_larger=ratios[-1],
        )
    tell(measure="steps", over_larger=statistics.median(ratios), rounds=ratios)
    return 0


def slices(folder: Path, rounds: int = 7) -> int:
    """Waiting for slices of weights on disk, read ahead or not, in turns; 1 if losses differ.

    24 layers of 4 MiB on one rank, forward and backward with as much computing as 256 samples take.
    """
    context, width = solo_context(), 1024
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(24)))
    units = module_units(model)
    policy = ZeroPolicy(3, width**2, GatherPolicy(prefetch=0, max_live=0), shard_alone=True)
    tier = DiskTier(folder)
    store = build_store(
        units, policy, context, kind=lambda p: OffloadStore(p, StatePlacement(parameters=tier))
    )
    sharding, x = DataParallel(units, store, policy, context), torch.ones(256, width)

    def step() -> float:
        sharding.start()
        sharding.gather(0)
        loss = model(x).square().sum()
        sharding.begin_backward(0, reduce=True)
        loss.backward()
        sharding.end_backward()
        sharding.finish()
        return float(loss.detach())

    step()
    waited: dict[int, list[float]] = {0: [], gather.SLICES_AHEAD: []}
    seconds: dict[int, list[float]] = {ahead: [] for ahead in waited}
    losses = set()
    for _ in range(rounds):
        for ahead in waited:
            gather.SLICES_AHEAD = ahead
            before, began = tier.traffic(), time.perf_counter()
            losses.add(step())
            seconds[ahead].append(time.perf_counter() - began)
            waited[ahead].append((tier.traffic() - before).waited)
    without, usual = (statistics.median(found) for found in waited.values())
    for ahead, found in waited.items():
        told = {"waited": statistics.median(found), "seconds": statistics.median(seconds[ahead])}
        tell(measure="slices", read_ahead=ahead, **told)
    tell(measure="slices", way="read ahead / not", waited=usual / without, same_losses=len(losses) == 1)
    return int(len(losses) != 1)


def optimizer_of(tier: Tier) -> Optimizer:
    """AdamW over eight bf16 matrices of four million elements, all of whose state is in a tier."""
    model = nn.ModuleList(nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16) for _ in range(8))
    policy = ZeroPolicy(3, 1 << 22, GatherPolicy(persistence_threshold=0), shard_alone=True)
    placement = StatePlacement(tier, tier, tier)
    store = build_store(
        module_units(model), policy, solo_context(), kind=lambda policy: OffloadStore(policy, placement)
    )
    for bucket in store.buckets:
        store.accumulate(bucket, torch.randn(bucket.layout.padded), first=True)
    return Optimizer(store, Adam(), solo_context(), 0.0)


def updates(folder: Path, rounds: int = 7) -> int:
    """Updates and their norms: from disk beside the larger of the same on the host and of moving."""
    disk = DiskTier(folder, DiskSettings())
    from_disk, on_host = optimizer_of(disk), optimizer_of(HostTier())
    found: dict[str, list[float]] = {"disk": [], "host": [], "moving": [], "over_larger": []}
    for number in range(rounds + 1):
        seconds = {}
        before = disk.traffic()
        for name, optimizer in (("disk", from_disk), ("host", on_host)):
            began = time.perf_counter()
            optimizer.step(1e-4, 0.1)
            disk.settle()
            seconds[name] = time.perf_counter() - began
        moved = disk.traffic() - before
        read, written = through_tier(folder, 16 << 20, 32, DiskSettings())
        seconds["moving"] = moved.read / 1e9 / read + moved.written / 1e9 / written
        seconds["over_larger"] = seconds["disk"] / max(seconds["host"], seconds["moving"])
        for name, value in seconds.items() if number else ():
            found[name].append(value)
    medians = {name: statistics.median(values) for name, values in found.items()}
    tell(measure="updates", **medians, rounds=found["over_larger"], read=moved.read, written=moved.written)
    return 0


def beside(folder: Path) -> int:
    """Steps with the same state offloaded, here and in DeepSpeed, in turns; 1 if a contender failed."""
    shape = replace(Shape(), dtype="bf16", sequence=64, micro_batch=1)
    nvme = {"optimizer": "nvme", "path": str(folder)}
    # DeepSpeed adds up gradients in the host's memory, whatever the device is.
    own = {"cpu": {"": {"optimizer": "cpu"}}, "nvme": {"": nvme, "-sums-cpu": nvme | {"gradients": "cpu"}}}
    failures = []
    for stage, place in ((2, "cpu"), (3, "cpu"), (3, "nvme")):
        theirs = {"stage": stage, "offload": place, "folder": str(folder)}
        mine = {kind: {"zero": {"stage": stage}, "offload": each} for kind, each in own[place].items()}
        contenders = present(
            [
                *(
                    Contender(f"megazero-{stage}-{place}{kind}", "ours", "build", (1,), options=each)
                    for kind, each in mine.items()
                ),
                Contender(f"deepspeed-{stage}-{place}", "deepspeed_", "build", (1,), "deepspeed", 1, theirs),
            ]
        )
        with started(contenders, shape, 1, 2) as (teams, failed):
            take_turns(teams, shape, 5, 3)
            settings = {"measure": "beside", "stage": stage, "place": place, "threads": 2}
            write(results(teams, "offload", settings, f"deepspeed-{stage}-{place}", step_peak=True), None)
        failures += failed
    return int(bool(failures))


def main() -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("memory", "disk", "steps", "slices", "updates", "beside"))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    flags = parser.parse_args()
    work = {
        "memory": memory,
        "disk": disk,
        "steps": steps,
        "slices": slices,
        "updates": updates,
        "beside": beside,
    }
    return work[flags.what](flags.folder)


if __name__ == "__main__":
    sys.exit(main())
