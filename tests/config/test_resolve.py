"""From command line, file and environment to a configuration, or to every reason against it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import megazero
from megazero.config.compat.foreign import FOREIGN_FLAGS
from megazero.config.document import read_text
from megazero.config.flags import FLAGS
from megazero.config.resolve import parse_config, resolve_or_exit
from megazero.errors import ConfigError
from tests.config.samples import BASE_FLAGS, make_config
from tests.tables import over_table

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def violations(argv: list[str], world_size: int | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(argv, world_size=world_size)
    return caught.value.violations


def test_flags_give_the_tree() -> None:
    resolved = parse_config(BASE_FLAGS)
    assert resolved.config == make_config()
    assert resolved.warnings == ()
    assert resolved.check_only is False


def test_flags_take_precedence_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "optimizer: {lr: 5e-3, min_lr: 1e-4}\nparallel: {sequence_parallel: true}\nmodel: {num_layers: 9}\n"
    )
    argv = [*BASE_FLAGS, "--config", str(file), "--sequence-parallel=false"]
    config = parse_config(argv).config
    assert (config.optimizer.lr, config.optimizer.min_lr) == (1e-3, 1e-4)
    assert config.parallel.sequence_parallel is False
    assert config.model.num_layers == 4
    assert parse_config([*argv[:-1]]).config.parallel.sequence_parallel is True


def test_every_kind_of_problem_in_one_report(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  num_layerz: 3\n  kv_channels: 0\n")
    argv = (
        f"--config {file} --hiden-size 64 --num-attention-heads four --seq-length 32 --lr 1e-3 --fp16 --bf16"
    )
    argv += " --min-lr 1 --deepspeed --mock-data --vocab-size 9 --train-iters 1 --adam-beta1 1"
    assert violations(argv.split()) == [
        f"{file}:2: unknown key `model.num_layerz`; did you mean `model.num_layers`?",
        "unknown flag `--hiden-size`; did you mean `--hidden-size`?",
        "`--num-attention-heads` must be an integer, but is `four`.",
        "`precision.dtype` must be set one way, but `--fp16` says fp16 and `--bf16` says bf16; keep one "
        "of these flags.",
        "`--deepspeed` must go with `--deepspeed_config FILE`, but no file is given; name it, or leave "
        "`--deepspeed` out: the engine is the same.",
        "`--num-layers` must be set (number of transformer layers), but is missing.",
        "`--hidden-size` must be set (width of the residual stream), but is missing.",
        f"{file}:3: `model.kv_channels` must be greater than 0, but is `0`.",
        "`--micro-batch-size` must be set (sequences per forward pass on one replica), but is missing.",
        "`--adam-beta1` must be less than 1, but is `1.0`.",
        "`min_lr` must be at most `lr`, but `min_lr` is 1.0 and `lr` is 0.001; lower `--min-lr` [rule "
        "min_lr_below_lr].",
    ]


def test_a_file_that_cannot_be_read_is_the_only_reason(tmp_path: Path) -> None:
    """Ten settings were said to be missing that the file would have given, had it been readable."""
    contents = {
        "broken.yaml": (b"model:\n  num_layers: [1\nfoo: bar", "broken.yaml:3:4: "),
        "list.yaml": (b"- 1", "list.yaml:1: "),
        "empty.yaml": (b" \n", "empty.yaml is empty."),
        "binary.yaml": (b"\x80\x00", "binary.yaml has invalid start byte at byte 1."),
        "base.yaml": (b"base: broken.yaml", "broken.yaml:3:4: "),
    }
    for name, (content, _) in contents.items():
        (tmp_path / name).write_bytes(content)
    wrong = {name: said for name, (_, said) in contents.items()}
    for name, said in (wrong | {"absent.yaml": "No such file", ".": "Is a directory"}).items():
        problems = violations(["--config", str(tmp_path / name)])
        assert [said in problem for problem in problems] == [True], problems
    assert len(violations(["--config"])) == 1
    assert len(violations(["--config", str(tmp_path / "empty.yaml"), "--lr", "-1", "--nonsense"])) == 3


def test_a_broken_json_says_nothing_of_what_it_would_set(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8 "fp16": {}}')
    line = f"--deepspeed --deepspeed_config {tmp_path / 'ds.json'} --num-layers 2"
    problems = violations(line.split())
    assert "ds.json:1:24: " in problems[0]
    assert not [line for line in problems if "--micro-batch-size" in line or "--lr" in line]


def test_an_empty_command_line_is_told_all_that_is_required() -> None:
    found = violations([])
    for flag in ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size", "lr"):
        assert sum(f"`--{flag}` must be set" in line for line in found) == 1
    assert len(found) == 10  # and both files of the vocabulary, training length, data


@over_table(
    ("argv", "problem"),
    [
        (["--lr", "nan"], "`--lr` must be a finite number, but is `nan`."),
        (["--lr", "inf"], "`--lr` must be a finite number, but is `inf`."),
        (["--hidden-dropout", "1"], "`--hidden-dropout` must be less than 1, but is `1.0`."),
        (
            ["--distributed-timeout-minutes", "1e300"],
            "`--distributed-timeout-minutes` must be less than or equal to 10000000, but is `1e+300`.",
        ),
        (["--rotary-percent", "1.5"], "`--rotary-percent` must be less than or equal to 1, but is `1.5`."),
        (["--num-workers", "-1"], "`--num-workers` must be greater than or equal to 0, but is `-1`."),
        (
            ["--split", "1,2,3,4"],
            "`--split` must be one to three proportions such as 969,30,1, none negative and not all zero, "
            "but is `1,2,3,4`.",
        ),
        (
            ["--rampup-batch-size", "0", "1", "2"],
            "`--rampup-batch-size` must be greater than 0, but is `0 1 2`.",
        ),
    ],
)
def test_values_out_of_range(argv: list[str], problem: str) -> None:
    assert violations([*BASE_FLAGS, *argv]) == [problem]


def test_the_world_size_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [*BASE_FLAGS, "--tensor-model-parallel-size", "2"]
    assert "world_size_factors" in violations(argv)[0]
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert parse_config(argv).config.parallel.tensor_model_parallel_size == 2
    assert "world_size_factors" in violations(argv, world_size=3)[0]
    for wrong in ("many", "0", "-1", "9" * 5000):
        monkeypatch.setenv("WORLD_SIZE", wrong)
        assert violations(argv) == [
            f"the environment's `WORLD_SIZE` must be a positive integer, but is `{wrong[:40]}`; unset it."
        ]
    # of a very large world the layouts that fit are found without trying every number
    assert "can be" in violations([*argv, "--pipeline-model-parallel-size", "3"], world_size=2**29)[0]


def test_ignored_flags_are_named_in_one_warning() -> None:
    argv = [
        *BASE_FLAGS,
        "--no-pipeline-parallel",
        "--data-impl",
        "mmap",
        "--use-flash-attn",
        "--use-flash-attn-v2",
    ]
    assert parse_config(argv).warnings == (
        "flags without effect here: --no-pipeline-parallel (there is one engine, with and without pipeline "
        "stages); --data-impl (datasets are memory-mapped); --use-flash-attn, --use-flash-attn-v2 (the "
        "fastest kernel that is built is used, and all kernels compute the same).",
    )


def test_a_launchers_own_local_rank_is_no_news(monkeypatch) -> None:
    """It was warned about on each node, where the launcher had added it."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    (warning,) = parse_config([*BASE_FLAGS, "--local_rank=3"]).warnings
    assert "--local-rank" in warning
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert parse_config([*BASE_FLAGS, "--local_rank=3", "--local-rank", "3"]).warnings == ()


def exit_code(argv: list[str]) -> object:
    with pytest.raises(SystemExit) as caught:
        resolve_or_exit(argv)
    return caught.value.code


def test_check_config_prints_the_tree(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code([*BASE_FLAGS, "--check-config"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    values = {s.spec.path: s.value for s in read_text(printed.out).settings}
    assert values["model.hidden_size"] == 64
    assert values["optimizer.lr"] == 1e-3


def test_a_check_names_a_package_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megazero.config.resolve.find_spec", lambda name: None)
    assert exit_code([*BASE_FLAGS, "--wandb-project", "p", "--tensorboard-dir", "t", "--check-config"]) == 2
    said = capsys.readouterr().err
    assert "`--wandb-project` must be left out where the package wandb is not installed" in said
    assert "refused for 2 reasons" in said


def test_refused_prints_every_reason_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code([*BASE_FLAGS, "--check-config", "--min-lr", "1", "--hiden-size", "3"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert lines[0] == "pretrain_gpt.py: the configuration is refused for 2 reasons:"
    assert len(lines) == 3


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["--help"]) == exit_code(["-h", "--nonsense"]) == exit_code(["--version"]) == 0
    assert capsys.readouterr().out.endswith(f"\nmegazero {megazero.__version__}\n")


def test_one_rank_of_a_node_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert exit_code(["--nonsense"]) == 2
    assert capsys.readouterr() == ("", "")


def test_an_accepted_run_returns_its_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert resolve_or_exit([*BASE_FLAGS, "--no-pipeline-parallel"]) == make_config()
    assert capsys.readouterr().err.count("\n") == 1


def test_the_tree_is_frozen() -> None:
    config = parse_config(BASE_FLAGS).config
    with pytest.raises(ValueError, match="frozen"):
        config.model.num_layers = 3  # type: ignore[misc]


def test_neither_help_nor_check_imports_torch() -> None:
    code = (
        "import sys\n"
        "from megazero.config import resolve_or_exit\n"
        "try:\n    resolve_or_exit(sys.argv[1:])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'imported'\n"
    )
    for argv in (["--help"], [*BASE_FLAGS, "--check-config"]):
        environment = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"}
        done = subprocess.run(
            [sys.executable, "-c", code, *argv], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_no_command_line_raises_anything_but_config_error() -> None:
    """Values of every kind at every flag: each line is accepted or refused in sentences."""
    rng = random.Random(7)
    values = [
        "0",
        "1",
        "-1",
        "3",
        "8",
        "1e3",
        "0.5",
        "1e400",
        "nan",
        "",
        "x",
        "é",
        "none",
        "RoPE",
        "a=b",
        "1,1,1",
    ]
    names = [*FLAGS, *FOREIGN_FLAGS, "--nonsense", "-x", "-", "--"]
    refused = 0
    for _ in range(400):
        argv = list(BASE_FLAGS)
        for _ in range(rng.randrange(1, 9)):
            argv += [rng.choice(names), *rng.choices(values, k=rng.randrange(3))]
        sentences = []
        try:
            parse_config(argv, world_size=rng.choice([1, 2, 6]))
        except ConfigError as error:
            sentences = error.violations
            refused += 1
        assert all(line.endswith((".", "?")) for line in sentences)
    assert 200 < refused < 400


def test_a_reader_that_stops_early_is_no_error() -> None:
    code = "import sys; from megazero.config import resolve_or_exit; resolve_or_exit(sys.argv[1:])"
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, "--help"],
            cwd=ROOT,
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("method", ["uniform", "every"])
def test_a_unit_of_recompute_has_a_layer(method: str) -> None:
    flags = [*BASE_FLAGS, "--recompute-granularity", "full", "--recompute-num-layers", "0"]
    assert (
        parse_config([*flags, "--recompute-method", "block"], world_size=1).config.recompute.num_layers == 0
    )
    with pytest.raises(ConfigError, match="at least 1 unless `recompute.method` is block, but"):
        parse_config([*flags, "--recompute-method", method], world_size=1)
