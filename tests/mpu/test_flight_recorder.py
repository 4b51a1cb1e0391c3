"""NCCL's flight recorder: written where torch would write it, and how to have one."""

from __future__ import annotations

import pytest
import torch

from megazero.mpu.watch.flight_recorder import write_flight_record


@pytest.fixture
def a_recorder(monkeypatch):
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", lambda: b"record", raising=False)


def test_it_is_written_where_torch_would_write_it(a_recorder, tmp_path):
    said = write_flight_record(3, {"HOME": str(tmp_path)})
    prefix = tmp_path / ".cache/torch/comm_lib_trace_rank_"
    assert (tmp_path / ".cache/torch/comm_lib_trace_rank_3").read_bytes() == b"record"
    assert said == (
        f"NCCL's flight recorder of each rank, on its host: {prefix}RANK (`torchfrtrace {prefix.parent} "
        "--prefix comm_lib_trace_rank_` compares them)"
    )
    assert write_flight_record(0, {"HOME": str(tmp_path)}) == said  # one line for all ranks


@pytest.mark.parametrize("name", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
def test_it_is_written_where_torch_is_told_to(a_recorder, tmp_path, name):
    said = write_flight_record(12, {name: f"{tmp_path}/new/nccl_"})
    assert (tmp_path / "new/nccl_12").read_bytes() == b"record"
    assert f"{tmp_path}/new/nccl_RANK (`torchfrtrace {tmp_path}/new --prefix nccl_`" in said


@pytest.mark.parametrize(
    "environment",
    [
        {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
        {"TORCH_NCCL_DUMP_ON_TIMEOUT": "false"},
        {"TORCH_FR_BUFFER_SIZE": "0"},
        {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"},
    ],
)
def test_one_that_is_off_is_not_written_and_can_be_had(a_recorder, tmp_path, environment):
    said = write_flight_record(0, {"HOME": str(tmp_path), **environment})
    assert said.startswith("NCCL's flight recorder is off: set TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_FR_BUF")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_to_is_told(a_recorder, tmp_path, capfd):
    (tmp_path / "file").write_text("")
    prefix = f"{tmp_path}/file/nccl_"
    write_flight_record(0, {"TORCH_FR_DUMP_TEMP_FILE": prefix})
    said = capfd.readouterr().err
    assert said.startswith(f"NCCL's flight recorder of rank 0 could not be written to {prefix}0: ")
