"""The examples of the guide for those who come from DeepSpeed, in their order."""

from __future__ import annotations

import re
from importlib.util import find_spec

from tests.docs.pages import ROOT, Document
from tests.forks import run

GUIDE = Document.read(ROOT / "docs/guides/coming_from_deepspeed.md")


def test_the_examples_run():
    blocks = [block.text for block in GUIDE.blocks() if block.language == "python"]
    assert len(blocks) == 3
    if find_spec("accelerate") is None:
        assert "HfDeepSpeedConfig" in blocks.pop()  # it asks for accelerate
    done = run("-c", "\n".join([*blocks, "print('trained', engine.global_steps, float(loss))"]))
    assert done.returncode == 0, done.stderr
    refusal, trained = done.stdout.splitlines()[-2:]
    assert refusal.startswith("`deepspeed.sequence.auto_sp.auto_wrap_model_for_sp")
    assert trained.startswith("trained 1 ")


def test_each_script_is_listed():
    folder = ROOT / "examples_3d/deepspeed"
    assert set(re.findall(r"`(\w+\.py)`", GUIDE.text)) >= {path.name for path in folder.glob("*.py")}
