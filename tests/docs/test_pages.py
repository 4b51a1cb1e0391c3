"""The pages keep their promises: links lead somewhere, signatures are the code's, command lines exist.

Each check is tried on small offenders first, then on every page.
"""

from __future__ import annotations

from pathlib import Path

from tests.docs.commands import command_violations, commands, prose_violations, words_of
from tests.docs.links import link_violations
from tests.docs.pages import ROOT, Document, anchor_of, documents
from tests.docs.signatures import Index, import_violations, project, signature_violations
from tests.source_tree import Source
from tests.tables import over_table

DOCUMENTS = documents()
EVERY_PAGE = over_table("document", DOCUMENTS, ids=lambda document: document.path)
CODE = """
from dataclasses import KW_ONLY, dataclass, field

@dataclass
class Base:
    name: str
    _: KW_ONLY
    notes: tuple[str, ...] = ()

@dataclass
class Shape(Base):
    size: int = 3
    parts: dict[str, int] = field(default_factory=dict)

class Engine:
    def __init__(self, plan: Shape, rate: float = 1e-3): ...
    def step(self, batch: list[int], *, skip=False) -> int: ...

class Faster(Engine):
    @staticmethod
    def of(plan: Shape) -> "Faster": ...

def build(kind: str, *parts: int, **options: str) -> Engine: ...
"""


@EVERY_PAGE
def test_links_lead_somewhere(document: Document) -> None:
    assert [*link_violations(document)] == []


@EVERY_PAGE
def test_signatures_are_the_codes(document: Document) -> None:
    assert [*signature_violations(document, project())] == []
    assert [*import_violations(document, project())] == []


@EVERY_PAGE
def test_command_lines_exist(document: Document) -> None:
    assert [violation for command in commands(document) for violation in command_violations(command)] == []


@EVERY_PAGE
def test_flags_in_the_text_exist(document: Document) -> None:
    assert [*prose_violations(document)] == []


def test_there_are_many_of_each() -> None:
    """A reader of Markdown that finds nothing would let everything pass."""
    assert sum(len([*document.links()]) for document in DOCUMENTS) > 200
    assert sum(len([*commands(document)]) for document in DOCUMENTS) > 150
    assert sum(block.language == "python" for document in DOCUMENTS for block in document.blocks()) > 20


@over_table(
    ("heading", "anchor"),
    [
        ("On the host and on disk", "on-the-host-and-on-disk"),
        ("BERT's samples", "berts-samples"),
        ("Model shape (`model`)", "model-shape-model"),
        ("`megazero verify`: a layout", "megazero-verify-a-layout"),
        ("[Guides](guides/index.md) and more", "guides-and-more"),
    ],
)
def test_anchors(heading: str, anchor: str) -> None:
    assert anchor_of(heading) == anchor


def test_links(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text(
        "# A title\n\n## Twice\n\n## Twice\n\n## Two -- hyphens\n", encoding="utf-8"
    )
    text = (
        "# Here\n\n[a](other.md) [b](other.md#a-title) [c](#here) [d](other.md#twice) [e](https://example.org)\n"
        "`[no](link.md)`\n\n    [no](link.md)\n\n```\n[no](link.md)\n```\n"
        "[f](missing.md)\n[g](other.md#missing)\n[j](other.md#two-hyphens) ![h](missing.png) [i](#missing)\n"
    )
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    assert [*link_violations(Document("page.md", text), tmp_path)] == [
        "page.md:11 links to `missing.md`, which does not exist",
        "page.md:12 links to `other.md#missing`, where no heading has that anchor",
        "page.md:13 links to `other.md#two-hyphens`, where no heading has that anchor",
        "page.md:13 links to `missing.png`, which does not exist",
        "page.md:13 links to `#missing`, where no heading has that anchor",
    ]


@over_table(
    ("line", "right"),
    [
        ("Shape(name, size=3, parts={}, *, notes=())", None),
        ("Shape(name: str, size: int = 3, ...)  # the rest is as it is", None),
        ("Shape(name, size=..., parts=..., *, notes=())", None),
        ("Engine(plan: Shape, rate=0.001).step(batch, *, skip=False) -> int", None),
        ("Faster(plan, rate=1e-3); Faster.of(plan) -> Faster; Faster.step(batch, *, skip=False)", None),
        ("class Engine:\n    def step(self, batch, *, skip=False) -> int", None),
        ("build(kind, *parts, **options) -> Engine(plan, rate=0.001)", None),
        ("from megazero import build\nbuild(1, 2, colour=3)", None),
        (
            "Shape(name, size, parts, *, notes)",
            "Shape(name: str, size: int = 3, parts: dict[str, int] = {}, *, ",
        ),
        ("Shape(size=3, ...)", "Shape(name: str"),
        ("Engine(plan, rate=0.01)", "Engine(plan: Shape, rate: float = 0.001)"),
        ("Engine(plan: Base, rate=1e-3)", "Engine(plan: Shape, rate: float = 0.001)"),
        ("Engine.step(batch, skip=False)", "Engine.step(batch: list[int], *, skip=False) -> int"),
        ("Engine:\n  step(batch)", "Engine.step(batch: list[int], *, skip=False) -> int"),
        ("build(kind, parts, options) -> Engine", "build(kind: str, *parts: int, **options: str) -> Engine"),
        ("f() -> Engine(plan)", "Engine(plan: Shape, rate: float = 0.001)"),
        ("Gone(a)", "which the code does not have"),
        ("Engine.gone()", "which the code does not have"),
        ("build(kind, *parts, **options) / Shape(name)", "put `;` between two"),
    ],
)
def test_signatures(line: str, right: str | None) -> None:
    index = Index([Source("megazero.page.code", CODE + "\ndef f(): ...\n")])
    violations = [
        *signature_violations(Document("docs/page.md", f"# page\n\n```python\n{line}\n```\n"), index)
    ]
    assert (violations == []) if right is None else (len(violations) == 1 and right in violations[0]), (
        violations
    )


def test_imports() -> None:
    index = Index([Source("megazero.page.code", CODE)])
    program = "from megazero.page import Engine, Gone\nfrom megazero.other import Shape\nimport torch\n"
    assert [*import_violations(Document("p.md", f"```python\n{program}```\n"), index)] == [
        "p.md:2 imports `megazero.page.Gone`, which the code does not have",
        "p.md:2 imports `megazero.other.Shape`, which the code does not have",
    ]


@over_table(
    ("line", "problem"),
    [
        ("python pretrain_gpt.py --config mine.yaml --lr 1e-3 --switch-off ...", "--switch-off"),
        ("python pretrain_gpt.py --config mine.yaml --mock-data=false ...", None),
        ("CHECK=1 torchrun --nproc-per-node 2 pretrain_gpt.py --lr 1 | tee log", None),
        ("torchrun --ranks 2 pretrain_gpt.py --lr 1", "--ranks"),
        ("torchrun --nproc-per-node 2 -m megazero.cli pretrain --learning 1", "--learning"),
        ("torchrun --nproc-per-node 2 -m megazero.cli finetune --task SST-2 --learn 1", "--learn"),
        ("python -m megazero.cli plan schedule --nproc 4 -- --config x.yaml", None),
        ("$ megazero plan schedule --nproc 4 -- --ranks 3", "--ranks"),
        ("megazero verify --processes --lr 1", None),
        ("megazero checkpoint prune out --keep-last 3", None),
        ("megazero checkpoint inspect out --keep-last 3", "--keep-last"),
        ("megazero trian", "megazero trian"),
        ("python data_tools/preprocess_data.py --input a --append-eod", None),
        ("python data_tools/preprocess_data.py --input a --append-eos", "--append-eos"),
        ("python data_tools/analyze_dataset.py --metric seqlen --seq-length 8", None),
        ("bash scripts/convert_to_hf.sh a b --dtype bfloat16", None),
        ("bash scripts/convert_to_hf.sh a b --type bfloat16", "--type"),
        ("bash scripts/pretrain_gpt_345m.sh --lr 1", None),
        ("bash scripts/gone.sh", "scripts/gone.sh"),
        ("python gone.py", "gone.py"),
        ("python pretrain_gpt.py --config examples_3d/gone.yaml", "examples_3d/gone.yaml"),
        ("python -m pytest --whatever", None),
    ],
)
def test_commands(line: str, problem: str | None) -> None:
    page = Document("docs/page.md", f"# page\n\n```bash\n{line}\n```\n")
    violations = [violation for command in commands(page) for violation in command_violations(command)]
    assert (
        (violations == [])
        if problem is None
        else (violations and all(problem in violation for violation in violations))
    )


def test_what_a_line_starts() -> None:
    assert words_of("A=1 B='x y' megazero env --nproc 2 > out # why") == ("megazero", "env", "--nproc", "2")
    assert words_of("it's no command") == ()
    page = Document(
        "p.md", "# p\n\n    megazero env \\\n        --check\n\n```\nmegazero plan\n```\n\nmegazero no\n"
    )
    assert {command.words for command in commands(page)} == {
        ("megazero", "env", "--check"),
        ("megazero", "plan"),
    }


def test_flags_in_the_text() -> None:
    page = Document(
        "p.md", "`--lr 1`, `--zero-stage`, `--swin-backbone-type`, `--slow`, `--never-heard-of 2`"
    )
    assert [*prose_violations(page)] == ["p.md: `--never-heard-of` must be a flag of something, but is none"]


def test_every_guide_is_listed() -> None:
    listed = (ROOT / "docs/guides/index.md").read_text(encoding="utf-8")
    guides = {path.name for path in (ROOT / "docs/guides").glob("*.md")} - {"index.md"}
    assert {name for name in guides if f"({name})" not in listed} == set()


def test_every_decision_has_a_number_of_its_own_and_is_listed() -> None:
    page = (ROOT / "docs/packages.md").read_text(encoding="utf-8")
    records = sorted((ROOT / "docs/decisions").glob("*.md"))
    assert [int(path.name[:4]) for path in records] == list(range(1, len(records) + 1))
    for number, path in enumerate(records, 1):
        title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix(f"# {number}. ")
        assert f"\n{number}. [{title}](decisions/{path.name})\n" in page
