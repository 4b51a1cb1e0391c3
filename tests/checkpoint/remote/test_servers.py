"""Runs at URLs of a real server, through a proxy that spoils requests; and of one that ignores conditions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from megazero.checkpoint.folder import candidates
from megazero.checkpoint.saver import Saver
from megazero.commands.checkpoint import main
from megazero.errors import CheckpointError
from megazero.mpu.context import solo_context
from tests.checkpoint.remote.uploads import unfinished_uploads
from tests.checkpoint.test_killed import save_all
from tests.source_tree import ROOT
from tests.storage.proxy import Faults, FaultyProxy

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 4 --lr 1e-3 --lr-decay-iters 300 --vocab-size 64 --mock-data --eval-iters 0 "
    "--log-interval 100 --hidden-dropout 0 --attention-dropout 0"
)


def train(folder: str, iterations: int, *flags: str, ranks: int = 1) -> str:
    """Train with a folder to load from and to save to; returns what was said."""
    program = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone")
    command = [*program, "pretrain_gpt.py", *MODEL.split(), "--train-iters", str(iterations)]
    command += ["--save", folder, "--load", folder, *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.gloo
def test_a_training_of_300_steps_under_faults_is_the_one_on_disk(
    seaweed, another_host, monkeypatch, tmp_path, capfd
):
    """Stopped and gone on with on another host and layout; a share of 5% of all requests is spoilt."""
    url, local = f"s3://bucket/{uuid.uuid4().hex}", str(tmp_path / "local")
    with FaultyProxy(seaweed.endpoint, 7, Faults.each(0.05)) as proxy:
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            monkeypatch.setenv(name, proxy.endpoint)
        for folder in (local, url):
            train(folder, 150, "--save-interval", "6", "--keep-last", "3", "--exit-interval", "150")
            another_host()
            flags = ("--save-interval", "10", "--keep-last", "3", "--tensor-model-parallel-size", "2")
            said = train(folder, 300, *flags, "--async-save", ranks=2)
            assert f"loaded {folder}/iter_0000150" in said
            assert "training goes on without saving" not in said
        another_host()
        assert [folder.name[-3:] for folder in candidates(url).folders] == ["300", "290", "280"]
        assert main(["verify", url]) == 0
        main(["diff", local, url])
        said = capfd.readouterr().out
        # The processes' own generators begin anew on another number of ranks, wherever the checkpoint is.
        apart = re.findall(r"^\S+ +(\S+) +(?:uint8|int64|float32) ", said, re.MULTILINE)
        assert set(apart) <= {"rng"}
        assert f"{89 - len(apart)} of 89 tensors that both have are equal bit for bit" in said
        spoilt = sum(count for fault, count in proxy.happened.items() if fault)
        assert spoilt > 50
    assert unfinished_uploads(seaweed.endpoint) == []


@pytest.mark.slow
def test_a_real_server_that_ignores_conditions_is_refused(rclone, another_host):
    with pytest.raises(CheckpointError, match="s3://bucket/bad` must be in a store that obeys conditions"):
        Saver("s3://bucket/bad", solo_context())


def test_commands_take_urls(store, another_host, capsys, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    url, other = "s3://bucket/run", "s3://bucket/other"
    save_all(Saver(url, solo_context()), (10, 20, 30), lambda iteration: None)
    another_host()
    for command, status, says in (
        (["inspect", url], 0, r"iter_0000030 \(latest\)"),
        (["inspect", f"{url}/iter_0000020", "--tensors"], 0, "exp_avg"),
        (["verify", url], 0, rf"whole    {url}/iter_0000010 .*\n.*\n.*\n.*0 of 3 damaged"),
        (["convert", url, other], 0, rf"read   {url}/iter_0000030\nwrote  {other}/iter_0000030"),
        (["convert", url, other], 1, f"`{other}` must not hold iteration 30 yet"),
        (["convert", url, other, "--format", "torch_dist"], 1, f"must be a local folder.* but is {other}"),
        (["diff", url, other], 0, "equal bit for bit"),
        (["prune", url, "--keep-last", "1", "--dry-run"], 0, rf"remove    {url}/iter_0000010"),
        (["prune", url, "--keep-last", "1"], 0, rf"removed   {url}/iter_0000020"),
        (
            ["verify", f"{url}/iter_0000010"],
            1,
            "must be the folder of a run or of a checkpoint, but is missing",
        ),
        (["verify", "s3://none/run"], 1, "must be in a bucket that exists, but none does not"),
        (["verify", "s4://bucket/run"], 1, r"must begin with s3://.*did you mean s3://\?"),
        (["verify", "s3://bucket/empty"], 1, "`s3://bucket/empty` must hold a checkpoint, but has none"),
    ):
        assert main(command) == status, command
        said = capsys.readouterr()
        assert re.search(says, said.out + said.err), (command, said)
        assert "mirror" not in said.out + said.err
    assert [folder.name for folder in candidates(url).folders] == ["iter_0000030"]
    assert list(Path().iterdir()) == []  # no folder called `s3:`
    assert not store.uploads
