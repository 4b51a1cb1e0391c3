"""What README and guides tell a reader to type runs as it stands; what cannot is listed with its reason.

The Python of pages is in `tests/docs/test_pages.py` and `tests/deepspeed/test_coming.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import (
    Otherwise,
    command_blocks,
    make_checkout,
    reading_order,
    run_blocks,
    run_script,
    script_of,
    seconds_by_page,
)
from tests.docs.pages import ROOT, Block, Document, documents
from tests.tables import over_table

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
    Otherwise(
        "megazero env --check",
        "it ends with status 1 where the machine has problems, such as other work",
        "megazero env --check || test $? = 1",
    ),
    Otherwise("SRC OUT", "a checkpoint of Megatron's own"),
    Otherwise(
        "examples_3d/long_context/run.sh",
        "minutes; its warmups take 50 and 10 steps",
        "examples_3d/long_context/run.sh --short-steps 60 --long-steps 12",
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

RUN_BLOCK = """# page

```bash
echo made > {out}/made
test -f \\
    {out}/made
```

```python
no shell
```

Then

    megazero env
"""


def test_blocks_are_those_that_a_reader_types() -> None:
    page = Document(
        "docs/page.md", RUN_BLOCK + "\nprints\n\n    what there is\n\nand\n\n```console\n$ ls one\none\n```\n"
    )
    assert [block.text.strip() for block in command_blocks(page)] == [
        "echo made > {out}/made\ntest -f \\\n    {out}/made",
        "megazero env",
        "ls one",
    ]


def test_every_guide_is_read_after_readme() -> None:
    order = [page.path for page in reading_order()]
    guides = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/guides").glob("*.md")}
    assert order[0] == "README.md"
    assert {*order[1:]} == guides - {"docs/guides/index.md"}
    assert order.index("docs/guides/pretrain.md") < order.index("docs/guides/convert.md")
    assert sum(len(command_blocks(page)) for page in reading_order()) > 40


def test_what_is_not_run_as_it_stands_is_there_and_no_more() -> None:
    """A row for no block is one too many; README's may stand in any page, as README changes."""
    blocks = [block for page in reading_order()[1:] for block in command_blocks(page)]
    anywhere = [block for page in documents() for block in command_blocks(page)]
    assert [row.text for row in GUIDES if not any(map(row.applies_to, blocks))] == []
    assert [row.text for row in README if not any(map(row.applies_to, anywhere))] == []
    assert all(row.reason for row in (*README, *GUIDES))


@over_table(
    ("text", "rows", "script", "how"),
    [
        ("a \\\n  b\n", (), "a b\n", "as it stands"),
        (
            "run -H hosts\n",
            (Otherwise("-H hosts", "a cluster", "-H two"),),
            "run -H two\n",
            "changed: a cluster",
        ),
        ("run mine.yaml\n", (Otherwise("mine.yaml", "the reader's"),), None, "left out: the reader's"),
        ("run\n", (Otherwise("mine.yaml", "the reader's"),), "run\n", "as it stands"),
    ],
)
def test_what_is_run_of_a_block(text: str, rows: tuple[Otherwise, ...], script: str | None, how: str) -> None:
    assert script_of(Block("bash", text, 1), rows) == (script, how)


def test_a_block_that_fails_is_named_with_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Document(
        "docs/page.md",
        "```bash\necho first > made\n```\n```bash\ncat made\nfalse\necho never\n```\n"
        "```bash\n(exit 3) &\nsleep 0.2\n```\n```bash\necho $((1 + 1)) > sum\n```\n",
    )
    ran = run_blocks([page], (), tmp_path, seconds=60)
    assert [block.failed for block in ran] == [False, True, True, False]
    assert ran[1].place == "docs/page.md:5"
    assert "FAILED with status 1" in ran[1].how
    assert "first" in ran[1].how.split("echo never")[1]
    assert "FAILED with status 3" in ran[2].how
    assert (tmp_path / "sum").read_text() == "2\n"
    assert capsys.readouterr().out.count("docs/page.md:") == 4
    assert seconds_by_page(ran)["docs/page.md"][0] > 0


def test_a_block_that_hangs_is_ended(tmp_path: Path) -> None:
    assert run_script("sleep 600 & echo $! > pid; sleep 600", tmp_path, seconds=0.3)[0] == 124


@pytest.mark.slow
def test_blocks_run(tmp_path: Path) -> None:
    """A stranger's walk: one checkout, every block in the order in which one would read."""
    ran = run_blocks(reading_order(), (*README, *GUIDES), make_checkout(tmp_path / "checkout"), SECONDS)
    for page, (clock, worked) in seconds_by_page(ran).items():
        print(f"{clock:7.1f} s, of processors {worked:6.1f} s  {page}")
    failed = [f"{block.place} {block.how}" for block in ran if block.failed]
    assert not failed, "\n\n".join(failed)
