"""Two ranks of one contender, and what became of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import tempfile
import time
from datetime import timedelta
from importlib.metadata import distributions, version
from pathlib import Path

import torch
import torch.distributed as dist

from proofs.fault_contenders import deepspeed_, megatron, plain
from proofs.fault_contenders.faults import AT, STEPS, TIMEOUT, local, put_in, wrong_gradient

PATIENCE = 60  # seconds after which a job hangs
CONTENDERS = {  # the library, and what builds a training from a learning rate and a seed
    "ddp": ("torch", plain.ddp),
    "fsdp2": ("torch", plain.fsdp2),
    "deepspeed": ("deepspeed", deepspeed_.WithDeepSpeed),
    "megatron-core": ("megatron-core", megatron.WithMegatron),
    "megatron-core-no-rerun": ("megatron-core", megatron.without_rerun),
}


def installed() -> list[str]:
    """The contenders whose libraries there are."""
    there = {package.name for package in distributions()}
    return [name for name, (library, _) in CONTENDERS.items() if library in there]


def rank(number: int, port: int, name: str, fault: str, folder: str) -> None:
    """One rank's training."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    output = os.open(f"{folder}/said{number}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    faulty, now = number == 1, [0]
    seed = 8 if faulty and fault == "other_seed" else 7
    torch.manual_seed(seed)
    trainer = CONTENDERS[name][1](2e-2 if faulty and fault == "other_lr" else 1e-2, seed)
    trainer.folder = folder
    hook = wrong_gradient(fault, now) if faulty else None
    draw = torch.Generator().manual_seed(100 + number)
    for step in range(STEPS):
        now[0] = step
        x, y = trainer.batch(draw, noise=faulty and fault == "noise" and step == AT)
        if faulty:
            put_in(trainer, fault, step)
        loss = trainer.step(x, y, hook)
    trainer.save()
    weights = [local(p.data).sum().item() for p in trainer.parameters()]
    Path(f"{folder}/end{number}").write_text(json.dumps({"loss": loss, "weights": weights}))
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _first_naming(said: list[str]) -> str | None:
    """The first line of either rank's log that names the faulty rank."""
    lines = (line for log in said for line in log.splitlines())
    return next((line for line in lines if re.search(r"\brank 1\b", line, re.IGNORECASE)), None)


def _error(said: str) -> str:
    """The last error in a log, or its last line."""
    lines = said.splitlines() or [""]
    starts = [n for n, line in enumerate(lines) if "rror" in line]
    return " ".join(lines[starts[-1] if starts else -1 :])


def _quoted(line: str) -> str:
    return line.strip().replace(f"node {os.uname().nodename}", "node NAME")[:250]


def observe(name: str, fault: str) -> dict:
    """What became of both ranks."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        work = [context.Process(target=rank, args=(n, port, name, fault, folder)) for n in range(2)]
        began = time.monotonic()
        for each in work:
            each.start()
        work[0].join(PATIENCE)
        seconds = time.monotonic() - began
        hung = work[0].is_alive()
        if not hung and fault != "stopped":
            work[1].join(PATIENCE)
        for each in work:
            if each.is_alive():
                os.kill(each.pid, signal.SIGKILL)
            each.join()
        said = [Path(f"{folder}/said{n}").read_text(errors="replace") for n in range(2)]
        ends = [json.loads(p.read_text()) for n in range(2) if (p := Path(f"{folder}/end{n}")).exists()]
        files = [p.name for p in Path(folder).rglob("*") if p.is_file()]
    naming = _first_naming(said)
    line = {
        "contender": name,
        "version": version(CONTENDERS[name][0]),
        "fault": fault,
        "seconds": round(seconds, 1),
        "named": naming is not None,
    }
    if naming is not None:
        line["said"] = _quoted(naming)
    if hung:
        return {**line, "outcome": "hangs"}
    if work[0].exitcode:
        saved = any(not file.startswith(("said", "end")) for file in files)
        outcome = {"outcome": f"ends with status {work[0].exitcode}", "checkpoint": saved}
        return {**line, **outcome, "error": _quoted(_error(said[0]))}
    finite = all(torch.isfinite(torch.tensor([e["loss"], *e["weights"]])).all() for e in ends)
    return {**line, "outcome": "goes on, status 0", "finite at the end": finite}
