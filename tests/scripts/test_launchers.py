"""The shell scripts: launchers are accepted by the configuration, bad options are refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import ROOT

PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def bash(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """The finished script."""
    return subprocess.run(
        ["bash", f"scripts/{script}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PATH": PATH, "VIRTUAL_ENV": sys.prefix, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("script", "layout", "shown"),
    [
        ("pretrain_gpt_345m.sh", {}, "num_layers: 24"),
        ("pretrain_gpt_345m.sh", {"GPUS_PER_NODE": "4", "NNODES": "2"}, "num_layers: 24"),
        ("pretrain_bert_345m.sh", {}, "seq_length: 128"),
        ("pretrain_bert_345m.sh", {"PHASE": "2", "NNODES": "4"}, "seq_length: 512"),
        ("pretrain_llama_1b.sh", {}, "tensor_model_parallel_size: 2"),
        (
            "pretrain_gpt_175b.sh",
            {},
            "# world size 1024: tensor 8 x pipeline 16 x context 1 x data parallel 8",
        ),
        (
            "pretrain_gpt_530b.sh",
            {},
            "# world size 2240: tensor 8 x pipeline 35 x context 1 x data parallel 8",
        ),
        ("pretrain_gpt_1t.sh", {}, "# world size 3072: tensor 8 x pipeline 64 x context 1 x data parallel 6"),
        ("pretrain_llama_1b.sh", {"TP": "1", "GPUS_PER_NODE": "1"}, "tensor_model_parallel_size: 1"),
    ],
)
def test_a_launcher_is_accepted(script, layout, shown):
    run = bash(script, CHECK="1", **layout)
    assert run.returncode == 0, run.stderr
    assert shown in run.stdout


def test_losses_of_all_evaluations_of_a_script_compare():
    """Each read other samples: the quickstart's picture showed 4.955 at step 175 and 5.038 at the end."""
    flags = re.compile(r"--eval-iters [1-9]\d*\s+(\S+)")
    evaluating = {path.name: flags.findall(path.read_text()) for path in (ROOT / "scripts").glob("*.sh")}
    assert len(evaluating["quickstart.sh"]) == 1
    assert {flag for following in evaluating.values() for flag in following} == {"--eval-from-start"}


@pytest.mark.slow
def test_a_launcher_says_why_a_layout_is_refused():
    run = bash("pretrain_llama_1b.sh", CHECK="1", TP="3")
    assert run.returncode == 2
    assert "`num_attention_heads` must be a multiple of `tensor_model_parallel_size`" in run.stderr


LAUNCHERS = sorted(path.name for path in (ROOT / "scripts").glob("pretrain_*.sh"))


@pytest.mark.parametrize(
    "script",
    LAUNCHERS,
)
def test_a_launcher_on_the_wrong_machine_says_so_instead_of_waiting(script):
    nodes = {"pretrain_gpt_175b.sh": "8", "pretrain_gpt_530b.sh": "140", "pretrain_gpt_1t.sh": "32"}.get(
        script, "2"
    )
    run = bash(script, "--device", "cuda", NNODES=nodes, GPUS_PER_NODE="16")
    assert run.returncode == 2
    for reason in (
        "the launch is refused for",
        "must have 16 GPUs",
        "`MASTER_ADDR` must be the address of node 0",
    ):
        assert reason in run.stderr


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "scripts").glob("*.sh")))
def test_every_script_answers_help(script):
    if script in ("setup.sh", "launch.sh"):
        pytest.skip("sourced by others")
    run = bash(script, "--help")
    assert run.returncode == 0, run.stderr
    assert script in run.stdout or "usage:" in run.stdout


def test_a_launcher_refuses_a_number_that_is_none():
    run = bash("pretrain_gpt_345m.sh", NNODES="two")
    assert (run.returncode, run.stdout) == (2, "")
    assert "`NNODES` must be a positive integer, but is `two`." in run.stderr


def test_a_launcher_takes_its_place_from_slurm_and_refuses_a_rank_that_is_none(tmp_path):
    """It took one node of two; a rank that is none, and a batch script without SLURM, had no words."""
    run = bash("pretrain_gpt_345m.sh", NODE_RANK="x")
    assert (run.returncode, run.stdout) == (2, "")
    assert "`NODE_RANK` must be this node's number, from 0, but is `x`." in run.stderr
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s " "$@"; echo\n')
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\nprintf 'w-7\\nw-8\\n'\n")
    for program in (python, scontrol):
        program.chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "w-[7-8]"}
    path = f"{tmp_path}:{PATH}"
    check, launch = bash("pretrain_gpt_345m.sh", PATH=path, **slurm).stdout.splitlines()
    assert "--nnodes 2 --node-rank 1 --master-addr w-7 --master-port 6000" in check
    assert "--num-nodes 2 --node-rank 1" in launch
    run = bash("pretrain_gpt_345m.sh", PATH=path, NNODES="1", **slurm)
    assert "this SLURM job has 2 nodes, and NNODES is 1" in run.stderr
    batch = bash("slurm/pretrain_gpt_175b.sbatch", SLURM_SUBMIT_DIR="")
    assert batch.returncode == 2
    assert "must be started with sbatch" in batch.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--steps", "0"], "`--steps` must be a positive integer, but is `0`."),
        (["--pretrained", "d"], "`--vocab-file` must name a vocab.txt, but is ``."),
        (["--seeds"], "`--seeds` must have a value, but is the last word."),
        (["--nproc", "0"], "`--nproc` must be a positive integer, but is `0`."),
        (["--what"], "the option must be one of those that --help lists, but is `--what`."),
    ],
)
def test_the_fine_tuning_example_says_why_it_refuses(arguments, reason):
    run = bash("finetune_wordnet.sh", *arguments)
    assert run.returncode == 2
    assert reason in run.stderr


def test_flags_after_a_launcher_take_precedence():
    assert "seq_length: 512" in bash("pretrain_gpt_345m.sh", "--seq-length", "512", CHECK="1").stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--stepz", "3"], "the option must be one of those that --help lists, but is `--stepz`."),
        (["--steps", "0"], "`--steps` must be a positive integer, but is `0`."),
        (["--tp=two"], "`--tp` must be a positive integer, but is `two`."),
        (["--pp", "0"], "`--pp` must be a positive integer, but is `0`."),
        (["--zero-stage", "4"], "`--zero-stage` must be 0, 1, 2 or 3, but is `4`."),
        (["--out"], "`--out` must have a value, but is the last word."),
        (["--out="], "`--out` must be a folder, but is empty."),
        (["--model", "t5"], "`--model` must be gpt or bert, but is `t5`."),
    ],
)
def test_the_quickstart_refuses_bad_options_before_it_does_anything(arguments, reason):
    run = bash("quickstart.sh", *arguments)
    assert (run.returncode, run.stdout) == (2, "")
    assert reason in run.stderr


def test_the_quickstart_has_help():
    run = bash("quickstart.sh", "--help")
    assert run.returncode == 0
    assert all(
        option in run.stdout
        for option in ("--model M", "--steps N", "--tp T", "--pp P", "--dp D", "--zero-stage Z", "--out DIR")
    )


@pytest.mark.parametrize(
    "path", sorted((ROOT / "scripts/slurm").glob("pretrain_*.sbatch")), ids=lambda path: path.stem
)
def test_a_batch_script_asks_for_the_nodes_of_its_job(path):
    """`proofs/slurm_jobs.py` runs them under a real SLURM."""
    batch, job = path.read_text(), (ROOT / f"scripts/{path.stem}.sh").read_text()
    nodes = re.search(r"^#SBATCH --nodes=(\d+)$", batch, re.M)[1]
    assert f"NNODES=${{NNODES:-{nodes}}}" in job
    assert f'train scripts/{path.stem}.sh "$@"' in batch
    for script in (path, path.with_name("job.sh")):
        assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


def test_a_line_of_ones_own_goes_through_the_launcher_and_the_batch_script(tmp_path):
    """`proofs/slurm_jobs.py` runs it under a real SLURM."""
    said = tmp_path / "said"
    srun = '#!/bin/sh\nwhile [ $# -gt 0 ] && [ "$1" != bash ]; do shift; done\nexec "$@"\n'
    programs = {
        "python": f'#!/bin/sh\nprintf "%s " "$@" >> {said}; echo >> {said}\n',
        "scontrol": "#!/bin/sh\n[ $2 = node ] && echo NodeAddr=w-7 || echo w-7\n",
        "srun": srun,
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "12", "SLURM_NNODES": "2", "SLURM_NODEID": "1"}
    variables = {
        "PATH": f"{tmp_path}:{PATH}",
        "SLURM_JOB_NODELIST": "w-[7-8]",
        "SLURM_GPUS_PER_NODE": "h100:4",
    }
    run = bash("slurm/pretrain.sbatch", "pretrain_bert.py", "--seed", "2 3", **job, **variables)
    assert run.returncode == 0, run.stderr
    check, launch = said.read_text().splitlines()
    assert "--gpus-per-node 4 --nnodes 2 --node-rank 1 --master-addr w-7 --master-port 20012" in check
    assert launch.endswith(
        "--num-gpus 4 --master-addr w-7 --master-port 20012 --no-local-rank pretrain_bert.py --seed 2 3 "
    )
    refused = bash("pretrain.sh", "train.py", "--seed", "2")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "the first word must be pretrain_gpt.py or pretrain_bert.py, but is `train.py`" in refused.stderr


def test_a_launcher_plans_when_it_is_told_to(tmp_path):
    """With the planner's own command line, before anything is looked at on this machine."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    run = bash("pretrain_gpt_175b.sh", "--lr", "1", PLAN="1", PATH=f"{tmp_path}:{PATH}")
    words = run.stdout.splitlines()
    assert words[:7] == ["-m", "megazero.cli", "plan", "--nproc", "1024", "--gpus-per-node", "8"]
    assert words[7:10] == ["--device", "a100-80g", "--"]
    assert words[-2:] == ["--lr", "1"]
