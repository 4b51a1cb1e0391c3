"""The flags of `megazero launch`: both spellings, what is refused, and a dry run that touches nothing."""

from __future__ import annotations

import os

import pytest

from megazero.commands import launch
from megazero.errors import ConfigError
from megazero.launch import assemble
from megazero.launch.flags import cores_of, parse
from tests.tables import over_table


@over_table(
    ("words", "reason"),
    [
        ([], "a script must follow the flags"),
        (["--launcher", "mvapich", "x.py"], "but is mvapich, which is not built; use ssh"),
        (
            ["--launcher", "rsh", "x.py"],
            "`--launcher` must be one of ssh, pdsh, srun, mpirun, torchrun, but is rsh",
        ),
        (["-i", "a", "-e", "b", "x.py"], "`--include` must not be given with `--exclude`"),
        (["-i", "a", "--num_gpus", "2", "x.py"], "must not be given with `--include`"),
        (["--module", "--no_python", "x"], "`--module` must not be given with `--no-python`"),
        (["--no_ssh", "x.py"], "`--node-rank` must be given with `--no-ssh`"),
        (["--node_rank", "1", "x.py"], "`--no-ssh` must be given with `--node-rank`"),
        (["--min_elastic_nodes", "1", "x.py"], "`--elastic-training` must be given with"),
        (["--launcher", "pdsh", "--elastic_training", "x.py"], "must go through ssh or torchrun"),
        (["--rdzv-backend", "c10d", "x.py"], "must be given with `--launcher torchrun`"),
        (["--launcher", "torchrun", "--bind_cores_to_rank", "x.py"], "`torchrun --numa-binding`"),
        (["--grace", "-1", "x.py"], "--grace must be at least 0"),
        (["--master_port", "65536", "x.py"], "0 to 65535, but is 65536"),
        (["--master_port", "0", "--launcher", "srun", "x.py"], "must name a port"),
        (["--fan-out", "0", "x.py"], "`--fan-out` must be at least 1"),
        (["--num-gpus", "99999999999", "x.py"], "`--num-gpus` must be at most 4096"),
        (["--no-ssh", "--node-rank", "1", "--num-nodes", "2", "x.py"], "`--master-addr` must be the address"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(words, reason):
    with pytest.raises(ConfigError) as refusal:
        parse(words)
    assert any(reason in line for line in refusal.value.violations)


def test_deepspeeds_spellings_and_the_scripts_own_flags():
    words = (
        "--num_nodes 2 --num_gpus 4 --master_addr a --master_port 1 --launcher slurm --launcher_args --x "
        "--no_local_rank --save_pid --enable_each_rank_log logs --bind_core_list 0-3,8 --ssh_port 22 "
        "--venv_script v --force_multi -q train.py --deepspeed --deepspeed_config f.json --num_gpus 9"
    )
    flags = parse(words.replace("--launcher_args --x", "--launcher_args=--x").split())
    assert (flags.num_nodes, flags.num_gpus, flags.launcher, flags.launcher_args) == (2, 4, "srun", "--x")
    assert flags.arguments == ["--deepspeed", "--deepspeed_config", "f.json", "--num_gpus", "9"]
    assert (flags.save_pid, flags.force_multi, flags.no_local_rank, flags.quiet) == (True,) * 4


def test_cores_by_number_and_range():
    assert cores_of("0-3,8") == (0, 1, 2, 3, 8)
    for text in ("", "a", "0-", "1,1", "-3", "²", "0-99999999999"):
        with pytest.raises(ConfigError, match="`--bind-core-list`"):
            cores_of(text)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(assemble, "gpus_here", lambda: 0)
    monkeypatch.setattr(assemble, "_HOSTFILE", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "hosts").write_text("w-0 slots=4\nw-1 slots=2\n")
    return tmp_path


@pytest.mark.parametrize("launcher", ["ssh", "pdsh", "mpirun", "torchrun"])
def test_a_dry_run_prints_the_commands_and_touches_nothing(folder, capsys, monkeypatch, launcher):
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")

    def touched(*words: object, **options: object) -> None:
        raise AssertionError(f"a dry run must not start {words}")

    monkeypatch.setattr(os, "execvp", touched)
    monkeypatch.setattr("asyncio.run", touched)
    words = [
        "-H",
        "hosts",
        "--include",
        "w-0:1,3@w-1",
        "--launcher",
        launcher,
        "--dry-run",
        "train.py",
        "--lr",
        "a b",
    ]
    assert launch.main(words) == 0
    text = capsys.readouterr().out
    assert "  w-0: ranks 0-1 on slots 1,3\n  w-1: ranks 2-3 on slots 0,1\n" in text
    assert "  NCCL_DEBUG=INFO\n" in text
    assert "s3cr3t" not in text
    assert "train.py" in text
    assert "'a b'" in text
    first = {"ssh": "  ssh -T", "pdsh": "  pdsh -S", "mpirun": "  mpirun -np 2", "torchrun": "  ssh -T"}[
        launcher
    ]
    assert text.partition("commands\n")[2].startswith(first)
    assert sorted(path.name for path in folder.iterdir()) == ["hosts"]


def test_slots_that_a_launch_wants_and_nobody_has_are_refused(folder, capsys):
    assert launch.main(["-H", "hosts", "--num_gpus", "3", "--dry-run", "x.py"]) == 2
    assert "`--num-gpus` must be at most 2 on w-1 (hosts, line 2), but is 3" in capsys.readouterr().err
    assert launch.main(["-H", "missing", "--dry-run", "x.py"]) == 2
    assert launch.main(["--dry-run", "x.py"]) == 2
    assert "`--num-gpus` must say how many ranks" in capsys.readouterr().err
    assert launch.main(["--num_nodes", "2", "--num_gpus", "1", "--dry-run", "x.py"]) == 2
    assert "must be 1 without a hostfile" in capsys.readouterr().err
    assert launch.main(["-H", "hosts", "--launcher", "srun", "--dry-run", "x.py"]) == 2
    assert (
        "must have equally many slots for `--launcher srun`, but have w-0 4, w-1 2" in capsys.readouterr().err
    )


def test_devices_that_are_visible_here_are_the_slots(folder, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert launch.main(["--dry-run", "x.py"]) == 0
    assert "  localhost: ranks 0-2 on slots 0,1,2\n" in capsys.readouterr().out


@over_table(
    ("text", "needs"),
    [
        ("import deepspeed\n", True),
        ("def f():\n    from deepspeed.ops.adam import FusedAdam\n", True),
        ("import deepspeedy\n", False),
        ("from .deepspeed import x\n", False),
        ("# import deepspeed\n", False),
        ("not python at all", False),
    ],
)
def test_a_script_that_imports_deepspeed_is_known(tmp_path, text, needs):
    path = tmp_path / "train.py"
    path.write_text(text)
    assert assemble.imports_deepspeed(path) is needs


def test_megazero_is_in_deepspeeds_place_where_that_is_not_installed(folder, monkeypatch):
    (folder / "train.py").write_text("import deepspeed\n")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    as_deepspeed, notice = assemble.replaces_deepspeed(parse(["--num_gpus", "1", "train.py"]))
    assert as_deepspeed
    assert notice == "train.py imports deepspeed, which is not installed: megazero is in its place"
    flags = parse(["--num_gpus", "1", "train.py", "--deepspeed", "--deepspeed_config", "f.json"])
    program = assemble.script_of(flags, {}, ".", as_deepspeed)
    assert program.filled(["--local_rank=0"])[2:] == (
        *(
            "-m",
            "megazero.deepspeed",
            "train.py",
            "--local_rank=0",
            "--deepspeed",
            "--deepspeed_config",
            "f.json",
        ),
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert not assemble.replaces_deepspeed(parse(["--num_gpus", "1", "train.py"]))[0]
    assert assemble.replaces_deepspeed(
        parse(["--import-deepspeed", "megazero", "--num_gpus", "1", "train.py"])
    )[0]
