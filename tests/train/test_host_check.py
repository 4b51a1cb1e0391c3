"""What a run says about the host that it runs on."""

from __future__ import annotations

import torch

from megazero.train.observe import host
from megazero.train.observe.host import (
    crowding_remarks,
    host_remarks,
    nominal_matmul_rate,
    precision_remark,
    rate_remark,
)
from tests.tables import over_table

CPU = torch.device("cpu")


def test_a_precision_that_costs_time_is_said():
    said = precision_remark(torch.bfloat16, 75e9, 150e9)
    assert said == (
        "warning: products in bf16 run at 0.50 of fp32's rate on this CPU (75 and 150 GFLOP/s); training is "
        "faster without --bf16"
    )
    assert precision_remark(torch.bfloat16, 130e9, 150e9) is None
    assert precision_remark(torch.bfloat16, 900e9, 150e9) is None


@over_table(
    ("ranks", "threads", "cores", "others", "words"),
    [
        (2, 1, 2, 1, []),
        (1, 8, 8, None, []),
        (2, 2, 2, 0, ["2 ranks with 2 threads each share 2 cores; set OMP_NUM_THREADS to 1"]),
        (4, 1, 2, 0, ["4 ranks share 2 cores, so they take turns; start at most 2"]),
        (1, 2, 2, 2, ["other processes keep this machine busy (2 run on 2 cores)"]),
        (2, 4, 2, 9, ["set OMP_NUM_THREADS to 1", "9 run"]),
    ],
)
def test_shared_cores_are_said(ranks, threads, cores, others, words):
    said = list(crowding_remarks(ranks, threads, cores, others))
    assert len(said) == len(words)
    assert all(word in sentence for word, sentence in zip(words, said, strict=True))


def test_a_run_measures_fp32_only_beside_another_precision(monkeypatch):
    measured = []
    monkeypatch.setattr(host, "measure_matmul_rate", lambda dtype, device: measured.append(dtype) or 4e9)
    monkeypatch.setattr(host, "usable_cores", torch.get_num_threads)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert host_remarks(torch.float32, 1e9, CPU, None) == []
    assert measured == []
    (said,) = host_remarks(torch.bfloat16, 1e9, CPU, None)
    assert measured == [torch.float32]
    assert "0.25 of fp32's rate" in said


def test_a_gpu_run_says_its_nominal_rate_beside_the_measured_one(monkeypatch):
    """With the measured one alone, nobody can compare a share with what others report."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert host_remarks(torch.bfloat16, 791.6e12, torch.device("cuda", 0), 7) == [
        "products in bf16 run at 792 TFLOP/s on this NVIDIA H200, 80% of the nominal 989.5; `matmul_share` "
        "is of the former"
    ]
    assert rate_remark(torch.float32, 51e12, "NVIDIA H200") == (
        "products in fp32 run at 51 TFLOP/s on this NVIDIA H200"
    )


@over_table(
    ("name", "rate"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 NVL", None),
        ("Quadro K620", None),
    ],
)
def test_rates_of_devices_that_are_known(name, rate):
    assert nominal_matmul_rate(name) == rate
    assert ("nominal" in rate_remark(torch.bfloat16, 1e12, name)) == (rate is not None)
