"""`megazero <verb>`: dispatch, help without torch, the nearest match."""

from __future__ import annotations

import subprocess
import sys

import pytest

import megazero
from megazero import cli

SHAPE = ["--num-layers=2", "--hidden-size=8", "--num-attention-heads=2", "--seq-length=8"]
TRAINING = ["--micro-batch-size=1", "--lr=1", "--train-iters=1", "--mock-data", "--vocab-size=64"]


def test_help_names_every_verb_and_exits_0(capsys):
    assert cli.main(["--help"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2 : 2 + len(cli.VERBS)]] == [
        "ablate",
        "analyze-loss",
        "checkpoint",
        "completion",
        "config",
        "data",
        "env",
        "evaluate",
        "fill-mask",
        "finetune",
        "generate",
        "incidents",
        "kernels",
        "launch",
        "lm-eval",
        "memory-report",
        "merge-traces",
        "moe-report",
        "plan",
        "pretrain",
        "profile",
        "quantize",
        "report",
        "run",
        "score",
        "serve",
        "tune",
        "verify",
        "version",
    ]


def test_help_does_not_import_torch():
    code = "import sys; from megazero.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_no_verb_is_an_error(capsys):
    assert cli.main([]) == 2
    assert capsys.readouterr().err.startswith("usage: megazero VERB")


@pytest.mark.parametrize("flag", ["version", "--version"])
def test_version(capsys, flag):
    assert cli.main([flag]) == 0
    assert capsys.readouterr().out == f"megazero {megazero.__version__}\n"


@pytest.mark.parametrize(
    ("word", "answer"),
    [("genrate", "did you mean `generate`?"), ("xyzzy", "see `megazero --help`.")],
)
def test_an_unknown_verb_is_answered_with_the_nearest(capsys, word, answer):
    assert cli.main([word]) == 2
    assert capsys.readouterr().err == (
        "error: the verb must be one of ablate, analyze-loss, checkpoint, completion, config, data, env, "
        "evaluate, fill-mask, finetune, generate, incidents, kernels, launch, lm-eval, memory-report, "
        "merge-traces, moe-report, plan, pretrain, profile, quantize, report, run, score, serve, tune, "
        f"verify, version, but is `{word}`; {answer}\n"
    )


def test_config_prints_the_tree_and_exits_0(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["config", *SHAPE, *TRAINING])
    assert end.value.code == 0
    assert "hidden_size: 8" in capsys.readouterr().out


def test_config_refuses_with_every_reason_and_exits_2(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["config", "--num-layrs", "2"])
    assert end.value.code == 2
    assert "--num-layers" in capsys.readouterr().err
