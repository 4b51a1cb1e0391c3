"""The toy of policy gradients: words of a vocabulary of 16, rewarded for saying the third."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megazero.config.policy.settings import PolicyConfig
from megazero.config.tree.config import Config
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.post_training.policy.run import policy_on
from tests.layouts.layout import Layout

ANSWER = 8
PROMPTS, GROUP = 2, 4


def threes(prompts, completions, completion_ids, **columns):
    """The share of an answer that is the token 3."""
    return [sum(token == 3 for token in ids) / ANSWER for ids in completion_ids]


def write_prompts(folder: Path, count: int = 16) -> Path:
    path = folder / "prompts.jsonl"
    rows = [{"prompt": f"{i % 16} {7 * i % 16}" + " 5" * (i % 3), "answer": i} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(layout: Layout, folder: Path, steps: int, sections: Mapping[str, Any] | None = None) -> Config:
    """The configuration of a layout's model on the toy; `policy` and others in `sections` change settings."""
    config = layout.config(steps=steps)
    model = {"vocab_size": 16, "seq_length": 16, "mtp_num_layers": None}
    model |= (sections or {}).get("model", {})
    policy = {
        "policy_method": "grpo",
        "prompts": (str(write_prompts(folder)),),
        "reward_functions": (f"{__name__}:threes",),
        "group_size": GROUP,
        "max_answer_tokens": ANSWER,
    }
    changes: dict[str, Mapping[str, Any]] = {
        "data": {"mock_data": False},
        "tokenizer": {"tokenizer_type": "NullTokenizer"},
        "logging": {"metrics_jsonl": str(folder / "metrics.jsonl"), "log_interval": 1},
        **(sections or {}),
        "model": model,
    }
    updates = {name: getattr(config, name).model_copy(update=dict(of)) for name, of in changes.items()
               if name != "policy"}  # fmt: skip
    updates["policy"] = PolicyConfig(**{**policy, **(sections or {}).get("policy", {})})
    return config.model_copy(update=updates)


def train(layout: Layout, folder: Path, steps: int, sections: Mapping[str, Any] | None = None) -> list[dict]:
    """Train the toy on a layout's ranks as threads; return the metrics of the steps."""
    config = config_of(layout, folder, steps, sections)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    if layout.world_size == 1:
        policy_on(config, solo_context())
    else:
        world = ThreadWorld(layout.world_size, timeout=600.0)  # machines are shared
        world.run(lambda rank: policy_on(config, thread_context(world, layout.grid, rank)))
    return curve(folder)


def curve(folder: Path) -> list[dict]:
    """The metrics of the steps in a folder's file."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "policy_loss" in row or "reward" in row]
