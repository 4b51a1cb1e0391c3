"""The example configurations are accepted on the number of ranks that they name."""

from __future__ import annotations

from pathlib import Path

from megazero.config.resolve import parse_config
from tests.tables import over_table

EXAMPLES = Path(__file__).parents[2] / "examples_3d"
MOE = ("dense", "fine-grained-shared", "moe-top1", "moe-top2", "pr-moe", "pyramid", "residual")


@over_table(
    ("name", "world_size", "extra"),
    [
        ("gpt_tiny_cpu", 1, []),
        ("gpt_tiny_cpu", 2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
        ("gpt2_345m", 8, []),
        ("gpt2_345m_slow_network", 8, []),
        ("gpt_13b_one_gpu", 1, []),
        ("llama_1b_tp2_sp", 8, []),
        ("gpt_pipeline_zero_cpu", 4, []),
        ("hybrid_tiny_cpu", 1, []),
        ("hybrid_tiny_cpu", 4, ["--tensor-model-parallel-size", "2", "--pipeline-partition", "cost"]),
        ("gpt3_175b_3d", 1024, []),
        ("deepseek_v3_tiny_cpu", 1, []),
        (
            "deepseek_v3_tiny_cpu",
            4,
            ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"],
        ),
        ("bert_tiny_cpu", 4, []),
        ("bert_345m", 8, []),
        ("bert_3.9b_tp8_pp2", 64, []),
        ("bert_large_lamb_phase1", 1024, []),
        *((f"moe/{name}", ranks, ["--mock-data"]) for name in MOE for ranks in (1, 2)),
    ],
)
def test_accepted(name: str, world_size: int, extra: list[str]) -> None:
    resolved = parse_config(["--config", str(EXAMPLES / f"{name}.yaml"), *extra], world_size=world_size)
    assert resolved.warnings == ()
    # The members of `moe/` are compared at the same step, and their results are published.
    training = resolved.config.training
    assert training.eval_from_start or training.eval_iters == 0 or name.startswith("moe/")
