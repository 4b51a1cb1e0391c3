"""Do two checkouts train the same? Losses, gradient norms, weights and moments, bit for bit.

    python proofs/same_losses.py 5c89bc2 .          # a commit against the working tree
    python proofs/same_losses.py OLD NEW -k zb-     # some of the configurations

Each side is a folder that holds a checkout, or a commit, which is then checked out and compiled elsewhere.
Both run the same fixed configurations (layouts, schedules, dtypes, dropout, masks, resumes) through
`pretrain_gpt.py` on mock data, with ranks as processes. Every float in the metrics of every step and
evaluation is compared, and so are all tensors of the last checkpoint (weights, masters, moments), with the
newer side's `megazero checkpoint diff`.

A configuration whose global batches have masked positions may be declared to agree to rounding only. Prints a
line per configuration and exits 1 if any differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPARED = ("lm_loss", "grad_norm", "params_norm", "num_zeros", "learning_rate", "loss_scale", "skipped")
STEPS = 4
PATIENCE = 600.0  # seconds; products in fp16 are slow on a CPU
# The largest relative difference of a float, and of a tensor's elements as a share of its largest one: the
# effect on fp32 of dividing by the counted positions before backward instead of after it, and then Adam's.
ROUNDING = 3e-5

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--make-vocab-size-divisible-by 4 --tokenizer-type NullTokenizer --vocab-size 61 --mock-data "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-2 --clip-grad 0.7 "
    "--hidden-dropout 0 --attention-dropout 0 --seed 7 --eval-iters 1 "
    "--eval-interval 2 --num-workers 1 --log-params-norm --log-num-zeros-in-grad --bucket-size 6000 "
    "--zero-param-persistence-threshold 40 --device cpu --distributed-backend gloo"
)
LLAMA = (
    "--swiglu --normalization RMSNorm --use-rotary-position-embeddings --disable-bias-linear "
    "--num-query-groups 2 --group-query-attention --untie-embeddings-and-output-weights"
)
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
MASKED = "--vocab-size 15 --eod-mask-loss"
DOCUMENTS = "--vocab-size 15 --reset-position-ids --reset-attention-mask"


@dataclass(frozen=True)
class Case:
    """One configuration: runs of one folder of checkpoints, each continuing the one before.

    Attributes:
        name: what `-k` matches.
        runs: (ranks, flags) of each run.
        rounding: whether they agree to rounding only.
    """

    name: str
    runs: tuple[tuple[int, str], ...]
    rounding: bool = False


def case(name: str, ranks: int, flags: str = "", *, rounding: bool = False) -> Case:
    """A configuration of one run."""
    return Case(name, ((ranks, flags),), rounding)


def layout(tp: int = 1, pp: int = 1, stage: int = 0, more: str = "") -> str:
    """The flags of a layout."""
    return (
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --zero-stage {stage} {more}"
    )


SP = "--sequence-parallel"
CASES = (
    case("alone", 1),
    case("alone-dropout", 1, DROPOUT),
    case("alone-bf16", 1, f"--bf16 {DROPOUT}"),
    case("alone-fp16", 1, "--fp16 --initial-loss-scale 65536"),
    case("alone-llama", 1, LLAMA),
    case("alone-llama-bf16", 1, f"{LLAMA} --bf16"),
    case("alone-sgd", 1, "--optimizer sgd --lr 0.1"),
    case("alone-lion-bf16", 1, "--optimizer lion --lr 1e-3 --bf16"),
    case("alone-adagrad", 1, "--optimizer adagrad"),
    case("alone-lamb-bf16", 1, "--optimizer lamb --bf16"),
    case("alone-muon", 1, "--optimizer muon --muon-scalar-optimizer lion"),
    case("alone-documents", 1, DOCUMENTS),
    case("alone-documents-dropout", 1, f"{DOCUMENTS} {DROPOUT}"),
    case("alone-masked", 1, MASKED, rounding=True),
    case("alone-recompute", 1, f"{DROPOUT} --recompute-granularity full"),
    case("alone-selective", 1, f"{DROPOUT} --recompute-granularity selective"),
    case("alone-fp32-residual", 1, f"--bf16 --fp32-residual-connection {DROPOUT}"),
    case("alone-ramp", 1, "--rampup-batch-size 2 2 12"),
    case("alone-tokens", 1, "--lr-decay-style cosine --lr-warmup-fraction 0.3 --min-lr 1e-3"),
    case("d2-zero0", 2, layout()),
    case("d2-zero1", 2, layout(stage=1)),
    case("d2-zero2", 2, layout(stage=2)),
    case("d2-zero3", 2, layout(stage=3)),
    case("d2-zero3-dropout-recompute", 2, layout(stage=3, more=f"{DROPOUT} --recompute-granularity full")),
    case("d2-zero2-bf16", 2, layout(stage=2, more=f"--bf16 {DROPOUT}")),
    case("d2-zero3-bf16-sums", 2, layout(stage=3, more="--bf16 --grad-reduce-dtype bf16")),
    case("d2-zero1-fp16", 2, layout(stage=1, more="--fp16 --initial-loss-scale 65536")),
    case("d2-zero2-late", 2, layout(stage=2, more="--no-overlap-grad-reduce")),
    case("d2-zero3-llama", 2, layout(stage=3, more=f"{LLAMA} --no-overlap-param-gather")),
    case("d2-zero1-masked", 2, layout(stage=1, more=MASKED), rounding=True),
    case("d2-zero2-sgd", 2, layout(stage=2, more="--optimizer sgd --lr 0.1")),
    case("d2-offload-bf16", 2, layout(stage=2, more="--bf16 --offload-optimizer cpu")),
    case(
        "d2-delayed",
        2,
        layout(stage=2, more="--offload-optimizer cpu --delayed-param-update --delayed-param-update-start 2"),
    ),
    case("d2-onebit-lamb", 2, layout(more="--optimizer onebit-lamb --onebit-freeze-step 2")),
    case("d4-zero3-hpz", 4, layout(stage=3, more="--zero-hpz-partition-size 2")),
    case("t2", 2, layout(tp=2)),
    case("t2-dropout", 2, layout(tp=2, more=DROPOUT)),
    case("t2-sp-dropout", 2, layout(tp=2, more=f"{SP} {DROPOUT}")),
    case("t2-sp-bf16", 2, layout(tp=2, more=f"{SP} --bf16")),
    case("t2-llama-sp", 2, layout(tp=2, more=f"{SP} {LLAMA}")),
    case(
        "t2-partition-activations",
        2,
        layout(tp=2, more="--recompute-granularity full --partition-activations"),
    ),
    case("p2-1f1b", 2, layout(pp=2)),
    case("p2-gpipe-dropout", 2, layout(pp=2, more=f"--pipeline-schedule gpipe {DROPOUT}")),
    case("p2-interleaved", 2, layout(pp=2, more="--num-virtual-stages-per-pipeline-rank 2")),
    case("p2-zb-h1", 2, layout(pp=2, more="--pipeline-schedule zb-h1")),
    case("p2-zb-v-dropout", 2, layout(pp=2, more=f"--pipeline-schedule zb-v {DROPOUT}")),
    case("p2-untied-bf16", 2, layout(pp=2, more="--untie-embeddings-and-output-weights --bf16")),
    case("p4-zb-h1", 4, layout(pp=4, more="--pipeline-schedule zb-h1")),
    case("t2-p2-sp", 4, layout(tp=2, pp=2, more=f"{SP} {DROPOUT}")),
    case("t2-d2-zero3", 4, layout(tp=2, stage=3, more=DROPOUT)),
    case("t2-d2-sp-zero2", 4, layout(tp=2, stage=2, more=f"{SP} --bf16")),
    case("p2-d2-zero1", 4, layout(pp=2, stage=1)),
    case("p2-d2-zero2-zb-h1", 4, layout(pp=2, stage=2, more="--pipeline-schedule zb-h1")),
    case("p2-d2-zero3-zb-v", 4, layout(pp=2, stage=3, more="--pipeline-schedule zb-v")),
    case(
        "p2-d2-zero3-interleaved", 4, layout(pp=2, stage=3, more="--num-virtual-stages-per-pipeline-rank 2")
    ),
    case("p2-d2-zero2-1f1b-bf16", 4, layout(pp=2, stage=2, more=f"--bf16 {DROPOUT}")),
    case("p2-d2-masked", 4, layout(pp=2, stage=2, more=MASKED), rounding=True),
    Case("resume-d2-zero2", ((2, layout(stage=2, more=DROPOUT)),) * 2),
    Case("resume-fp16", ((1, "--fp16 --initial-loss-scale 65536"),) * 2),
    Case("resume-d2-to-t2", ((2, layout(stage=3)), (2, layout(tp=2)))),
    Case("resume-ramp-p2", ((2, layout(pp=2, more="--rampup-batch-size 2 2 12")),) * 2),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="a checkout's folder, or a commit")
    parser.add_argument("new", help="another")
    parser.add_argument("-k", metavar="REGEX", default="", help="only configurations whose name it matches")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    chosen = [each for each in CASES if re.search(args.k, each.name)]
    if args.serve:
        return serve(Path(args.old), Path(args.new), chosen)
    if not chosen:
        print(f"error: `-k` must match a configuration, but {args.k!r} matches none", file=sys.stderr)
        return 2
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, checkout(args.old) as old, checkout(args.new) as new:
        folders = [Path(scratch) / side for side in ("old", "new")]
        servers = [start(where, folder, args.k) for where, folder in zip((old, new), folders, strict=True)]
        try:
            bad = sum(report(each, servers) for each in chosen)
        finally:
            for server in servers:
                server.stdin.close()
                server.wait()
    exact = sum(not each.rounding for each in chosen)
    print(
        f"{len(chosen) - bad} of {len(chosen)} configurations agree, {exact} of them asked bit for bit; "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if bad else 0


@contextmanager
def checkout(name: str):
    """The folder of a checkout; for a commit, a temporary one."""
    if (Path(name) / "pretrain_gpt.py").is_file():
        yield Path(name).resolve()
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "checkout"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder), name], check=True)
        try:
            build = [sys.executable, "setup.py", "build_ext", "--inplace"]
            subprocess.run(
                build, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def start(where: Path, folder: Path, pattern: str) -> subprocess.Popen:
    """A process of the checkout `where` that runs configurations into `folder` as it is told."""
    folder.mkdir()
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        str(where),
        str(folder),
        "--serve",
        "-k",
        pattern,
    ]
    environment = {**os.environ, "PYTHONPATH": str(where), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=where, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def ask(servers: list[subprocess.Popen], words: str) -> list[str]:
    """The answer of each process to a line; they work at the same time."""
    for server in servers:
        server.stdin.write(words + "\n")
        server.stdin.flush()
    answers = [server.stdout.readline().strip() for server in servers]
    if not all(answers):
        raise SystemExit(f"error: a process that was told `{words}` has ended")
    return answers


def report(each: Case, servers: list[subprocess.Popen]) -> bool:
    """Print how a configuration fared on both sides. Returns whether they differ."""
    tolerance = ROUNDING if each.rounding else 0.0
    old, new = (Path(answer) for answer in ask(servers, f"train {each.name}"))
    faults = [
        f"{side} failed: {(at / 'failed').read_text()[-2000:]}"
        for side, at in (("old", old), ("new", new))
        if (at / "failed").exists()
    ]
    if not faults:
        faults = list(metric_faults(old, new, tolerance))[:3]
        (log,) = ask(servers[1:], f"diff {old} {new} {tolerance}")
        text = Path(log).read_text()
        # Settings come first, and are the two folders' names.
        faults += [] if "equal bit for bit, settings apart" in text or _within(text, each) else [text[-700:]]
    kind = "to rounding" if each.rounding else "bit for bit"
    print(f"{'DIFFERS' if faults else 'same'}  {each.name:<30} {kind}", *faults, sep="\n    ", flush=True)
    for folder in (old, new):
        shutil.rmtree(folder)
    return bool(faults)


def _within(text: str, each: Case) -> bool:
    return each.rounding and "the same to" in text


def metric_faults(old: Path, new: Path, tolerance: float):
    """What differs in the metrics of steps and evaluations."""
    for name in ("metrics.jsonl", "metrics.eval.jsonl"):
        rows = [[json.loads(line) for line in (at / name).read_text().splitlines()] for at in (old, new)]
        if len(rows[0]) != len(rows[1]) or not rows[0]:
            yield f"{name}: {len(rows[0])} lines and {len(rows[1])}"
        for a, b in zip(*rows, strict=False):
            for key in COMPARED:
                x, y = a.get(key), b.get(key)
                if x != y and not (tolerance and _near(x, y, tolerance)):
                    yield f"{name}, iteration {a['iteration']}: {key} {x!r} and {y!r}"


def _near(x: object, y: object, tolerance: float) -> bool:
    return isinstance(x, float) and isinstance(y, float) and abs(x - y) <= tolerance * max(abs(x), abs(y))


def serve(where: Path, folder: Path, chosen: list[Case]) -> int:
    """Run the configurations named on standard input in the checkout `where`, and print their folders."""
    sys.path.insert(0, str(where))
    import sympy  # noqa: F401  (torch loads it late: here once instead of in every rank)
    import torch

    import megazero.cli
    import megazero.train.assemble

    assert Path(megazero.__file__).is_relative_to(where), megazero.__file__
    torch.set_num_threads(1)
    by_name = {each.name: each for each in chosen}
    for line in sys.stdin:
        verb, *words = line.split()
        if verb == "train":
            run(by_name[words[0]], folder / words[0])
            print(folder / words[0], flush=True)
        else:
            print(diff(folder / "diff.log", *words), flush=True)
    return 0


def run(each: Case, out: Path) -> None:
    """Train a configuration; errors are left in the file `failed`."""
    out.mkdir()
    try:
        for number, (ranks, flags) in enumerate(each.runs):
            train(out, ranks, flags, last=STEPS if len(each.runs) == 1 else STEPS // 2 * (number + 1))
    except RuntimeError as error:
        (out / "failed").write_text(str(error))


def diff(log: Path, old: str, new: str, tolerance: str) -> Path:
    """What `megazero checkpoint diff` says about two runs' last checkpoints."""
    from megazero.cli import main

    # Adam's first steps turn any gradient that is not zero into a step of full size.
    loose = ["--tolerance", "1e-3"] if float(tolerance) else []
    argv = ["checkpoint", "diff", f"{old}/checkpoints", f"{new}/checkpoints", "--top", "5", *loose]
    os.waitpid(forked(log, lambda: main(argv)), 0)
    return log


def train(out: Path, ranks: int, flags: str, last: int) -> None:
    """Train to step `last` on `ranks` forked ranks, starting from the newest checkpoint in `out`.

    Raises:
        RuntimeError: a rank failed; with what it printed.
    """
    checkpoints = out / "checkpoints"
    argv = [
        "pretrain_gpt.py",
        *MODEL.split(),
        *flags.split(),
        *(
            "--train-iters",
            str(STEPS),
            "--exit-interval",
            str(last),
            "--metrics-jsonl",
            str(out / "metrics.jsonl"),
        ),
        *("--save", str(checkpoints), "--save-interval", str(STEPS)),
        *(("--load", str(checkpoints)) if checkpoints.exists() else ()),
    ]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    logs = [out / f"rank{rank}.log" for rank in range(ranks)]
    children = [forked(log, partial(be_rank, argv, rank, ranks, port)) for rank, log in enumerate(logs)]
    deadline = time.monotonic() + PATIENCE
    waiting, failed = set(children), False
    while waiting:
        for child in list(waiting):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                waiting.discard(child)
                failed |= status != 0
        if (failed or time.monotonic() > deadline) and waiting:
            failed = True
            time.sleep(2.0)
            for child in waiting:
                os.kill(child, 9)
        time.sleep(0.01)
    if failed:
        late = "" if time.monotonic() < deadline else f"not done after {PATIENCE:.0f} s\n"
        raise RuntimeError(late + "\n".join(log.read_text()[-1500:] for log in logs))


def forked(log: Path, work: Callable[[], int]) -> int:
    """A process that does `work`; a fork of a process that has torch loaded starts in milliseconds."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, 1)
        os.dup2(target, 2)
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0)


def be_rank(argv: list[str], rank: int, ranks: int, port: int) -> int:
    """Run `pretrain_gpt.py` as a launcher would."""
    import numpy as np
    import torch

    import pretrain_gpt

    # Nothing depends on these, but they are saved.
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    sys.argv = argv
    return pretrain_gpt.main()


if __name__ == "__main__":
    sys.exit(main())
