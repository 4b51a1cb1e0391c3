"""Run the batch scripts of scripts/slurm under a real SLURM on this machine, and end them in every way.

    python proofs/slurm_jobs.py

Needs root and Debian's packages slurmctld, slurmd, slurm-client and munge. Two slurmd are two nodes of one
"GPU"; each script trains a tiny model by its own flags and layout, scaled down through variables and flags.
What is tried:

- each of the three scripts trains to its end, and so does a command line of one's own (pretrain.sbatch);
- a job is preempted, with and without a grace: it saves, is queued again, goes on from there;
- a job's time is over soon: SLURM's SIGUSR1 reaches the ranks, they save, the job queues itself again;
- a job is cancelled: it saves, and stays cancelled;
- a rank is killed: the job ends with status 137, and nothing of it runs on any node;
- `megazero launch --launcher srun` within an allocation, with signals.

Every job that was interrupted must have trained each iteration once, with the losses of one that was not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.launch.cluster import is_alive, processes_of  # noqa: E402

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
ITERATIONS = 250
ASKED = "SIGTERM|SIGUSR1|another rank was asked to stop"
TINY = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --device cpu --eval-iters 0 "
    "--lr-warmup-samples 8 --lr-decay-samples 4000 --log-interval 1 --num-workers 0 --split 1,0,0"
)
OWN = (
    "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 8 --lr 1e-4 "
    "--data-path {data}/text_text_document --tokenizer-type GPT2BPETokenizer --vocab-file {data}/vocab.json "
    "--merge-file {data}/merges.txt --save {folder} --load {folder} --metrics-jsonl {folder}/metrics.jsonl"
)
"""What the launchers of `scripts/` say, and pretrain.sbatch is told."""
CONFIG = """
ClusterName=proof
SlurmctldHost={host}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmctldPort=17101
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
OverTimeLimit=0
GresTypes=gpu
NodeName=n[1-2] NodeHostname={host} NodeAddr={address} Port=[17111-17112] CPUs=2 Gres=gpu:1
PartitionName=patient Nodes=n[1-2] Default=YES PriorityTier=1 GraceTime=60
PartitionName=hasty Nodes=n[1-2] PriorityTier=1 GraceTime=0
PartitionName=urgent Nodes=n[1-2] PriorityTier=2 PreemptMode=OFF
"""


def run(*words: str, **variables: str) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **variables})
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with status {done.returncode}: {done.stderr}")
    return done.stdout.strip()


class Slurm:
    """A cluster of two nodes on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        address = run("hostname", "-I").split()[0]
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        host = run("hostname")
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=host, address=address))
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o600)
        folder.chmod(0o755)
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        files = [f"--{name}-file={folder}/{name}" for name in ("key", "pid", "log", "seed")]
        run("munged", "--force", f"--socket={folder}/munge.sock", *files)
        run("slurmctld", "-c")
        for node in ("n1", "n2"):
            run("slurmd", "-N", node)
        wait(lambda: run("sinfo", "-h", "-p", "patient", "-o", "%T %D") == "idle 2", 30, "idle nodes")

    def submit(self, *words: str, **variables: str) -> str:
        """Submit a job; returns its number."""
        return run("sbatch", "--parsable", "--nodes=2", *words, **variables)

    def fact(self, job: str, name: str) -> str:
        """A field of `scontrol show job`."""
        match = re.search(rf"\b{name}=(\S+)", run("scontrol", "show", "job", "--oneliner", job))
        return match[1] if match else ""

    def close(self) -> None:
        """End all daemons."""
        run("scancel", "--user=root")
        for name in ("n1.pid", "n2.pid", "ctld.pid", "pid"):
            path = self.folder / name
            if path.exists():
                os.kill(int(path.read_text()), signal.SIGTERM)


def wait(done: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.2)


class Job:
    """A training under SLURM."""

    def __init__(
        self, slurm: Slurm, script: str, name: str, *options: str, iterations: int = ITERATIONS
    ) -> None:
        data, self.folder = slurm.folder / "data", slurm.folder / name
        self.slurm, self.name = slurm, name
        layout = {"175b": {"LAYERS_PER_CHUNK": "1"}}.get(script, {})
        variables = {
            **{"GPUS_PER_NODE": "1", "TP": "1", "PP": "2", "GLOBAL_BATCH_SIZE": "8", "OMP_NUM_THREADS": "1"},
            **{"DATA_PATH": f"{data}/text_text_document", "VOCAB_FILE": f"{data}/vocab.json"},
            **{"MERGE_FILE": f"{data}/merges.txt", "CHECKPOINT_PATH": str(self.folder)},
            **{"TRAIN_SAMPLES": str(8 * iterations), **layout},
        }
        flags = TINY.split()
        if script == "530b":
            flags += ["--rampup-batch-size", "4", "4", "40"]
        batch = f"pretrain_gpt_{script}.sbatch"
        if script == "own":
            batch = "pretrain.sbatch"
            flags = ["pretrain_gpt.py", *flags, *OWN.format(data=data, folder=self.folder).split()]
            flags += ["--train-samples", variables["TRAIN_SAMPLES"]]
            variables = {"OMP_NUM_THREADS": "1"}
        self.id = slurm.submit(
            *("--gpus-per-node=1", f"--output={slurm.folder}/{name}.out", *options),
            *(f"scripts/slurm/{batch}", *flags),
            **variables,
        )

    @property
    def text(self) -> str:
        """What the job has printed so far."""
        path = self.slurm.folder / f"{self.name}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def losses(self) -> list[tuple[int, float]]:
        """Iterations and losses in the order in which they were made."""
        path = self.folder / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [(row["iteration"], row["lm_loss"]) for row in rows if "lm_loss" in row]

    def await_iteration(self, number: int) -> None:
        """Wait until so many iterations have been made."""
        wait(
            lambda: len(self.losses()) >= number,
            120,
            f"{number} iterations of {self.name}: {self.text[-2000:]}",
        )

    def await_state(self, *states: str) -> str:
        """Wait until the job is in one of these states; a requeued one need not wait its 2 minutes."""

        def there() -> bool:
            if self.slurm.fact(self.id, "Reason") == "BeginTime":
                time.sleep(4)  # slurmd refuses a job that it has ended in the same second
                run("scontrol", "update", f"JobId={self.id}", "StartTime=now")
            return self.slurm.fact(self.id, "JobState") in states

        wait(there, 900, f"{states} of {self.name}: {self.text[-2000:]}")
        return self.slurm.fact(self.id, "JobState")


def say(*words: object) -> None:
    print(time.strftime("%H:%M:%S"), *words, flush=True)


def check(what: str, holds: bool, *details: object) -> None:
    """Print what was seen, and end if it is not what it should be."""
    say(f"{'yes' if holds else 'NO '}  {what}", *details)
    if not holds:
        raise SystemExit(1)


def make_data(folder: Path) -> None:
    """A tiny corpus, and GPT-2's vocabulary of bytes without merges."""
    folder.mkdir()
    (folder / "text.jsonl").write_text('{"text": "the quick brown fox jumps over the lazy dog"}\n' * 400)
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    letters = [chr(byte) if byte in kept else chr(256 + others.index(byte)) for byte in range(256)]
    words = {letter: number for number, letter in enumerate([*letters, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(words))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", f"{folder}/vocab.json"]
    tokenizer += ["--merge-file", f"{folder}/merges.txt", "--append-eod"]
    names = ["--input", f"{folder}/text.jsonl", "--output-prefix", f"{folder}/text"]
    run(sys.executable, "data_tools/preprocess_data.py", *names, *tokenizer)


def preempt(slurm: Slurm, partition: str, whole: list[tuple[int, float]]) -> None:
    """Preempt a job of a partition, and let it end."""
    job = Job(slurm, "175b", f"preempted-{partition}", f"--partition={partition}")
    job.await_iteration(20)
    urgent = slurm.submit("--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=sleep 3")
    wait(lambda: slurm.fact(urgent, "JobState") == "COMPLETED", 400, "the urgent job")
    job.await_state("RUNNING")
    job.await_state("COMPLETED", "FAILED")
    saved = re.findall(rf"stopping after iteration (\d+): ({ASKED})", job.text)
    check(f"preempted in `{partition}`: saved at SIGTERM, queued again", len(saved) == 1, *saved)
    check(
        "it went on from there",
        f"iter_{int(saved[0][0]):07d}" in job.text and slurm.fact(job.id, "Restarts") == "1",
    )
    check("every iteration once, with the losses of a job that was not interrupted", job.losses() == whole)


def scenarios(slurm: Slurm) -> None:
    """All that the module's docstring lists."""
    counts = {"530b": 20, "1t": 20, "own": 20, "175b": ITERATIONS}
    jobs = [Job(slurm, script, f"whole-{script}", iterations=count) for script, count in counts.items()]
    for job in jobs:
        state = job.await_state("COMPLETED", "FAILED")
        check(f"{job.name} trains to its end", state == "COMPLETED", len(job.losses()) or job.text)
    whole = jobs[-1].losses()
    preempt(slurm, "patient", whole)
    preempt(slurm, "hasty", whole)

    late = Job(slurm, "175b", "late", "--time=2", "--signal=B:USR1@95", iterations=1500)
    wait(
        lambda: slurm.fact(late.id, "Restarts") == "1",
        240,
        f"the late job to queue itself: {late.text[-2000:]}",
    )
    saved = re.findall(rf"stopping after iteration (\d+): ({ASKED})", late.text)
    check("time nearly over: saved at SIGUSR1, queued again by itself", len(saved) == 1, *saved)
    late.await_state("RUNNING")
    wait(lambda: f"iter_{int(saved[0][0]):07d}" in late.text, 400, "the second part")
    check("it went on from there", slurm.fact(late.id, "Restarts") == "1")
    late.await_iteration(int(saved[0][0]) + 20)
    run("scancel", late.id)
    late.await_state("CANCELLED")
    wait(lambda: late.text.count("saved a checkpoint") == 2, 60, "the save of a cancelled job")
    time.sleep(5)
    check("cancelled: saved, and stays cancelled", slurm.fact(late.id, "JobState") == "CANCELLED")
    check("every iteration once", [i for i, _ in late.losses()] == list(range(1, len(late.losses()) + 1)))

    killed = Job(slurm, "175b", "killed")
    killed.await_iteration(10)
    ranks = [pid for pid in processes_of(str(killed.folder)) if "torch" in maps(pid)]
    os.kill(ranks[-1], signal.SIGKILL)
    killed.await_state("FAILED", "COMPLETED")
    failed = slurm.fact(killed.id, "ExitCode") == "137:0"
    check("a killed rank: the job fails with status 137", failed, killed.text.splitlines()[-4:])
    check("nothing of it runs any more", not any(map(is_alive, ranks)))
    through_srun(slurm)


def maps(pid: int) -> str:
    """The files that a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text()


def through_srun(slurm: Slurm) -> None:
    """`megazero launch --launcher srun`, whose ranks get SLURM's signals."""
    script, out = slurm.folder / "wait.py", slurm.folder / "srun.out"
    script.write_text(
        "import os, signal, sys, time\n"
        "def save(number, frame): print('saved', os.environ['RANK'], flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGUSR1, save)\n"
        "print('waits', os.environ['RANK'], sys.argv[1:], flush=True)\ntime.sleep(60)\n"
    )
    address = run("hostname", "-I").split()[0]
    words = f"-m megazero.cli launch --launcher srun --num-gpus 2 --master-addr {address} {script} 'a  b'"
    job = slurm.submit(f"--output={out}", "--exclusive", f"--wrap={sys.executable} {words}")
    wait(lambda: out.exists() and out.read_text().count("waits") == 4, 60, "four ranks through srun")
    check("ranks through srun, words whole", out.read_text().count("['--local_rank=0', 'a  b']") == 2)
    run("scancel", "--signal=USR1", job)
    wait(lambda: slurm.fact(job, "JobState") in ("COMPLETED", "FAILED"), 60, "the end of the step")
    text = out.read_text()
    well = slurm.fact(job, "ExitCode") == "0:0"
    check("SIGUSR1 reaches all four, and all end well", text.count("saved") == 4 and well)


def main() -> int:
    """Run all; returns the exit status."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.getuid() != 0:
        print(f"error: {', '.join(missing) or 'root'} must be there for this proof", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that daemons are ended
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    make_data(folder / "data")
    slurm = Slurm(folder)
    try:
        scenarios(slurm)
    finally:
        slurm.close()
    shutil.rmtree(folder, ignore_errors=True)  # a daemon may still write
    say("all as it should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
