"""What README and guides tell a reader to type runs as it stands, in their order, and what cannot is listed with its reason.

The Python of pages is in `tests/docs/test_pages.py` and `tests/deepspeed/test_coming.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import (
    Otherwise,
    command_blocks,
    make_checkout,
    plain,
    reading_order,
    run_blocks,
    script_of,
    seconds_by_page,
)
from tests.docs.pages import ROOT, Block, Document, documents

SECONDS = 1200.0
"""The most that a block may take."""

README = (
    Otherwise("bash scripts/quickstart.sh", "minutes", "bash scripts/quickstart.sh --steps 20"),
    Otherwise("bash scripts/test.sh", "it is this suite", "bash scripts/test.sh --help"),
    Otherwise("--config mine.yaml", "a file of the reader's own"),
    Otherwise(" corpus.jsonl", "a file of the reader's own"),
)
"""By commands, which README may have at any place, or no longer."""

GUIDES = (
    Otherwise(
        "megazero launch -H hosts",
        "a cluster",
        "printf 'one slots=8\\ntwo slots=8\\n' > hosts; megazero launch -H hosts --dry-run",
    ),
    Otherwise("SRC OUT", "a checkpoint of Megatron's own"),
    Otherwise(
        "examples_3d/long_context/run.sh",
        "minutes",
        "examples_3d/long_context/run.sh --short-steps 20 --long-steps 4",
    ),
    Otherwise(
        "megazero ablate examples_3d/moe --seeds 3",
        "an hour",
        "megazero ablate examples_3d/moe --steps 4 --only dense",
    ),
    Otherwise("python -m pytest", "tests of this suite", "python -m pytest --collect-only -q"),
    Otherwise(
        "--metrics-jsonl out/guide/jumps.jsonl",
        "the page says that this run ends with status 1",
        "--metrics-jsonl out/guide/jumps.jsonl || test $? = 1",
    ),
)


@pytest.mark.slow
def test_blocks_run(tmp_path: Path) -> None:
    """A stranger's walk: one checkout, every block in the order in which one would read."""
    ran = run_blocks(reading_order(), (*README, *GUIDES), make_checkout(tmp_path / "checkout"), SECONDS)
    for page, (clock, worked) in seconds_by_page(ran).items():
        print(f"{clock:7.1f} s, of processors {worked:6.1f} s  {page}")
    failed = [f"{block.place} {block.how}" for block in ran if block.failed]
    assert not failed, "\n\n".join(failed)
