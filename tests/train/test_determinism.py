"""`--deterministic-mode`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.config.resolve import parse_config
from megazero.errors import ConfigError
from megazero.inference.sampling import Sampling, draw_tokens
from megazero.mpu.launch import Launch
from megazero.train.build import check_device
from megazero.train.pretraining import pretrain
from megazero.train.process import choose_products, compute_deterministically
from megazero.verify.run import run_alone
from tests.layouts.layout import Layout
from tests.tables import over_table

FLAGS = """--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8
    --max-position-embeddings 8
    --micro-batch-size 1 --global-batch-size 2 --lr 1e-2 --train-iters 3 --eval-iters 1 --eval-interval 2
    --vocab-size 32 --mock-data --attention-dropout 0.1 --hidden-dropout 0.1"""


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


def test_torch_and_cublas_are_told() -> None:
    compute_deterministically()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_setting_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    compute_deterministically()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_training_on_the_cpu_is_the_same(tmp_path: Path) -> None:
    """Each of its operators has a deterministic kernel, or it would raise; on the CPU it is the only one."""
    losses = []
    for more in ([], ["--deterministic-mode"]):
        file = tmp_path / f"{len(more)}.jsonl"
        pretrain(parse_config([*FLAGS.split(), "--metrics-jsonl", str(file), *more]).config, Launch())
        losses.append([json.loads(line)["lm_loss"] for line in file.read_text().splitlines()])
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]


def test_products_of_16_bits_add_in_fp32_and_tf32_is_asked_for() -> None:
    products = torch.backends.cuda.matmul
    for tf32, name in ((True, "tf32"), (False, "ieee")):
        choose_products(tf32=tf32)
        assert products.fp32_precision == name
        assert not products.allow_bf16_reduced_precision_reduction
        assert not products.allow_fp16_reduced_precision_reduction


@over_table(
    ("device", "flags", "message"),
    [
        ("cpu", ["--tf32"], "`tf32` must be off on a CPU, but is on; leave it out"),
        ("cpu", ["--rerun-on-fault"], None),
        ("cuda", ["--rerun-on-fault"], "`deterministic_mode` must be on with `rerun_on_fault` on CUDA"),
        ("cuda", ["--rerun-on-fault", "--deterministic-mode", "--tf32"], None),
    ],
)
def test_settings_that_a_device_cannot_follow_are_refused(device, flags, message) -> None:
    config = parse_config([*FLAGS.split(), *flags]).config
    if message is None:
        check_device(config, torch.device(device))
    else:
        with pytest.raises(ConfigError, match=message):
            check_device(config, torch.device(device))


class Refusing(TorchDispatchMode):
    """Refuses what raises on CUDA in this mode, by torch's page on `use_deterministic_algorithms`."""

    FLOATS = ("cumsum", "cumprod", "bincount")  # of integers they are deterministic
    ALL = (
        "put_",
        "histc",
        "kthvalue",
        "median",
        "nanmedian",
        "grid_sampler",
        "adaptive_",
        "avg_pool",
        "upsample",
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        floats = any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in args)
        if (name.startswith(self.FLOATS) and floats) or name.startswith(self.ALL):
            raise RuntimeError(f"{func} does not have a deterministic implementation")
        return func(*args, **(kwargs or {}))


FAMILIES = (
    *(Layout(shape=shape) for shape in ("gpt2", "llama", "bert", "t5", "deepseek")),
    Layout(experts="top2"),
    Layout(experts="biased", shape="llama"),
    Layout(letters="M-*", layers=3, documents=True),
    Layout(attends="window", documents=True, dropout=0.1),
)


def test_no_family_needs_an_operator_that_raises_on_cuda() -> None:
    """The scan of Mamba-2 had a cumulative sum of floats, so that every hybrid ended at its first step."""
    for layout in FAMILIES:
        assert not layout.broken_rules()
        with Refusing():
            run_alone(layout.config(), steps=1)
    with pytest.raises(RuntimeError, match="cumsum"), Refusing():
        torch.ones(2).cumsum(0)


def test_nor_does_drawing_tokens() -> None:
    """Cumulative sums of probabilities ended every rollout in this mode; those of integers are exact."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    settings = [Sampling(), Sampling(0.8, top_p=0.9, top_k=20), Sampling(min_p=0.1)]
    with Refusing():
        drawn = draw_tokens(logits, settings, [0, 1, 2], [4, 5, 6])
    assert drawn.shape == (3,)
