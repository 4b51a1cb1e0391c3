"""The variables that are sent, environment files as people write them, and which devices ranks see."""

from __future__ import annotations

import pytest

from megazero.errors import ConfigError
from megazero.launch.environment import (
    assigned,
    environment_files,
    inherited,
    parse_environment,
    read_environment_files,
    shown,
    slots_here,
    visible_devices,
    without_secrets,
)
from tests.tables import over_table

SENT = (
    "CUDA_LAUNCH_BLOCKING HF_HOME LD_LIBRARY_PATH MLFLOW_URI MV2_X NCCL_DEBUG OMP_NUM_THREADS PYTHONPATH "
    "TORCH_HOME UCX_TLS WANDB_MODE"
)
NOT_SENT = "CUDA_VISIBLE_DEVICES TORCHELASTIC_RUN_ID HOME PATH RANK PET_NNODES"


def test_variables_are_sent_by_their_names():
    assert list(inherited(dict.fromkeys([*NOT_SENT.split(), *SENT.split()], "1"))) == SENT.split()


def test_secrets_are_sent_but_neither_shown_nor_put_on_command_lines():
    variables = {"WANDB_API_KEY": "s3", "HF_TOKEN": "s4", "NCCL_DEBUG": "WARN INFO"}
    assert shown(variables) == ["WANDB_API_KEY=(not shown)", "HF_TOKEN=(not shown)", "NCCL_DEBUG='WARN INFO'"]
    assert without_secrets(variables) == ({"NCCL_DEBUG": "WARN INFO"}, ["HF_TOKEN", "WANDB_API_KEY"])


def test_an_environment_file_as_people_write_it():
    text = (
        "# NCCL\r\n\r\nNCCL_DEBUG=INFO\r\nexport NCCL_IB_HCA=mlx5_0,mlx5_1   # rails\n"
        '  export\tA = spaced \nURL=http://x/?a=b#c\nQUOTED="two words # no comment" # one\n'
        "SINGLE='$HOME \"x\"'\n"
        'EMPTY=\nRAW=$HOME\nESCAPED="a\\"b"\n'
    )
    assert parse_environment(text) == {
        "NCCL_DEBUG": "INFO",
        "NCCL_IB_HCA": "mlx5_0,mlx5_1",
        "A": "spaced",
        "URL": "http://x/?a=b#c",
        "QUOTED": "two words # no comment",
        "SINGLE": '$HOME "x"',
        "EMPTY": "",
        "RAW": "$HOME",
        "ESCAPED": 'a"b',
    }


@over_table("line", ["NCCL_DEBUG", "=x", "1A=x", "A B=x", "A='x", "A='x' y", "A=x\0y"])
def test_a_line_that_is_none_is_named(line):
    with pytest.raises(ConfigError, match=r"file, line 2: a line must be NAME=VALUE"):
        parse_environment(f"A=1\n{line}\n", "file")


def test_the_working_folder_has_the_last_word_and_the_name_may_be_another(tmp_path):
    home, folder = tmp_path / "home", tmp_path / "here"
    for path, text in ((home, "A=1\nB=1\n"), (folder, "B=2\n")):
        path.mkdir()
        (path / ".deepspeed_env").write_text(text)
    (folder / "other").write_text("C=3\n")
    assert read_environment_files(environment_files({}, home, folder)) == {"A": "1", "B": "2"}
    assert environment_files({"DS_ENV_FILE": "other"}, home, folder) == [folder / "other"]
    assert environment_files({"DS_ENV_FILE": str(folder / "other")}, home, folder) == [folder / "other"]


def test_variables_by_flag():
    assert assigned(["A=x=y", "B", "C="], {"B": "here"}) == {"A": "x=y", "B": "here", "C": ""}
    for word in ("MISSING", "1=2", "=x"):
        with pytest.raises(ConfigError, match="`--env` must be NAME=VALUE"):
            assigned([word], {})


@over_table(
    ("present", "slots", "value"),
    [
        (None, (0, 1), "0,1"),
        (None, (1, 3), "1,3"),
        ("0,1", (0, 1), "0,1"),
        ("4,5,6,7", (0, 1), "4,5"),  # DeepSpeed would take 0 and 1
        ("4,5,6,7", (1, 3), "5,7"),
        ("GPU-8a, GPU-9b", (1,), "GPU-9b"),
        ("MIG-1/2/0,MIG-1/3/0", (0, 1), "MIG-1/2/0,MIG-1/3/0"),
    ],
)
def test_a_slot_is_one_of_the_devices_that_the_host_shows(present, slots, value):
    devices, note = visible_devices(present, slots)
    assert devices == value
    assert (note is None) == (present in (None, "0,1"))
    assert note is None or value in note


@over_table("hidden", ["", "-1", "NoDevFiles"])
def test_devices_that_are_hidden_stay_hidden(hidden):
    assert visible_devices(hidden, (0, 1)) == (hidden, None)


def test_a_slot_that_the_host_does_not_show_is_refused():
    with pytest.raises(ConfigError, match=r"slot 2 must be one of the 2 devices .*`4,5`"):
        visible_devices("4,5", (0, 2))


def test_the_slots_of_this_machine():
    assert (slots_here(None, 8), slots_here("4,5", 8), slots_here("GPU-8a", 8), slots_here("", 8)) == (
        8,
        2,
        1,
        0,
    )
