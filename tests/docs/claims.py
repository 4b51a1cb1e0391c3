"""What pages say that the code lacks, refuses, lists and counts, found by its words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType

from megazero.cli import VERBS
from megazero.commands.checkpoint.megatron import build_parser
from megazero.config.compat.foreign import FOREIGN_FLAGS
from megazero.config.fields import FIELDS
from megazero.config.flags import COMMANDS, FLAGS
from tests.docs.pages import FENCE, ROOT, Document

HISTORY = ("docs/decisions/", "docs/ablations/")
"""Pages of what was so at a time."""
LACKS = re.compile(
    r"\b(?:not|never|no longer) (?:yet |all )?(?:built|offered|supported|imported|available|implemented|"
    r"converted|computed in|read yet|kept in checkpoints)\b|"
    r"\bneither [\w ]+ nor [\w ]+ (?:is|are) \w+|\bno support for\b"
)
REFUSED = re.compile(
    r"`(--[\w-]+)(?: [^`=]*)?`[^.|;:`]{0,30}\b(?:is|are) (?:refused|not accepted|not taken)\b(?! \w)"
)
FLAG = re.compile(r"`(--[\w-]+)")
SAID = re.compile(r"refus|not accepted|instead|Megatron")
"""What a clause says in which a refused flag stands."""
PARTS = re.compile(r"(?<=[.!?])\s+|;\s|:\s|\n\n|\n(?=[|#-])|[()]")
LIST_OF_LACKS = re.compile(r"^## Features not built\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
OTHER_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "autotuning": "tune",
        "optimizer state": "--with-optimizer",
        "optimizer states": "--with-optimizer",
        "t5": "--model-family",
        "bert": "--model-family",
        "fp8": "--fp8-format",
        "tiles": "--mlp-tiles",
        "multi-token prediction": "--mtp-num-layers",
        "sparse attention": "--sparse-attention",
        "state-space layers": "--is-hybrid-model",
        "packing": "--pack",
        "offload": "--offload-optimizer",
        "tokenizers": "--tokenizer-type",
        "folders of these models": "--load-hf",
        "text generation": "generate",
        "compression": "run",
        "experts": "--num-experts",
    }
)
"""Words of pages for what flags and verbs do -> such a flag or verb, which must exist."""
TRUE = (
    "weights kept in fp8 and recipes of other projects are not offered",
    "experts of a narrower space are not built",
    "checkpoints of T5 not imported",
)
"""What is lacking although the words of a feature are in it."""


@cache
def taken_flags() -> frozenset[str]:
    """The flags of a training that are its own, and those of imports from Megatron."""
    imports = (name for action in build_parser()._actions for name in action.option_strings)
    return frozenset([*FLAGS, *COMMANDS, *imports])


@cache
def refused_flags() -> frozenset[str]:
    """The flags of other trainers that are refused whatever their value, and that no program here has."""
    spelled: set[str] = set()
    for folder in ("megazero/commands", "megazero/launch", "megazero/inference", "megazero/data_tools"):
        for path in (ROOT / folder).rglob("*.py"):
            spelled |= {*re.findall(r'"(--[\w-]+)"', path.read_text(encoding="utf-8"))}
    refused = {name for name, row in FOREIGN_FLAGS.items() if row.accepted is None}
    return frozenset(refused - spelled - taken_flags())


@cache
def features() -> Mapping[str, str]:
    """What there is, in words of small letters -> what says so: a flag, a verb, or the table of features."""
    own = {name.removeprefix("--").replace("-", " "): name for name in FLAGS}
    known = {words: name for words, name in own.items() if " " in words}
    table = (ROOT / "docs/features.md").read_text(encoding="utf-8")
    for name, state in re.findall(r"^\| ([^|]+) \| ([^|]+)", table, re.MULTILINE):
        for part in re.split(r"[,:;()]| and ", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", name)):
            words = part.strip().lower()
            if words.count(" ") in (1, 2, 3) and "`" not in words and state.startswith("yes"):
                known[words] = "the table of features"
    return known | dict(OTHER_WORDS)


@cache
def feature_words() -> re.Pattern[str]:
    """What finds the words of features."""
    longest_first = sorted(map(re.escape, features()), key=len, reverse=True)
    return re.compile(rf"(?<![\w-])(?:{'|'.join(longest_first)})(?![\w-])")


def clauses(text: str) -> Iterator[str]:
    """The clauses of a page's text, blocks of code left out; each cell of a table, behind its row's first."""
    for part in PARTS.split(FENCE.sub("", text)):
        if part.lstrip().startswith("|"):
            first, *cells = [cell.strip() for cell in part.strip().strip("|").split("|")]
            yield from (f"{first} {cell}" for cell in cells)
        else:
            yield " ".join(part.split())


def lacks(document: Document) -> Iterator[str]:
    """What a page says that there is not, although there is."""
    for clause in filter(LACKS.search, clauses(document.text)):
        if not any(true in clause for true in TRUE):
            for words in feature_words().findall(clause.lower()):
                yield f"{document.path}: {clause!r} denies {words}, but {features()[words]} has it"
    for rows in LIST_OF_LACKS.findall(document.text):
        for name in re.findall(r"^\| ([^|]+?) +\| \d", rows, re.MULTILINE):
            if name in features():
                yield f"{document.path}: {name} is listed as not built, but {features()[name]} has it"


def refusals(document: Document) -> Iterator[str]:
    """Flags that a page calls refused although the parser takes them, and the reverse."""
    text = FENCE.sub("", document.text)
    for flag in REFUSED.findall(" ".join(text.split())):
        if flag in taken_flags():
            yield f"{document.path}: `{flag}` is called refused, but is taken"
    for clause in clauses(text):
        shown = () if SAID.search(clause) else FLAG.findall(clause)
        for flag in sorted(refused_flags().intersection(shown)):
            yield f"{document.path}: `{flag}` is shown, but is refused; {clause!r}"


def choices(section: str, name: str) -> tuple[str, ...]:
    """The values that a setting can have."""
    field = next(field for field in FIELDS if (field.section, field.name) == (section, name))
    return tuple(map(str, field.choices))


def verbs() -> tuple[str, ...]:
    """The verbs of `megazero`."""
    return tuple(verb.name for verb in VERBS)
