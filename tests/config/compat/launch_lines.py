"""What becomes of the launch lines of Megatron-DeepSpeed's and Megatron-LM's examples and tests.

The lines are facts, one per row of `corpus/*.tsv`: where it comes from, the program it starts, the number of
ranks, its DeepSpeed JSON (or `-`) and its arguments, with the scripts' variables resolved to their usual
values. Each line is read as `--check-config` reads it. Run `python -m tests.config.compat.launch_lines` for
the table, or with `docs/launch_lines.md` to write it there.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from megazero.commands.evaluate import line_of
from megazero.config.compat.foreign import FOREIGN_FLAGS
from megazero.config.resolve import parse_config
from megazero.errors import ConfigError
from tests.config.compat.features import FEATURES

CORPUS = Path(__file__).with_name("corpus")
PAGE = Path(__file__).parents[3] / "docs" / "launch_lines.md"
_TASKS = "tasks/main.py"
FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "pretrain_gpt.py": (),
        "pretrain_bert.py": ("--model-family", "bert"),
        "pretrain_hybrid.py": ("--is-hybrid-model",),
        "pretrain_mamba.py": ("--is-hybrid-model",),
        # There is no script of this name: pretrain_gpt.py takes it with the flag.
        "pretrain_t5.py": ("--model-family", "t5"),
        # `megazero evaluate` makes a line of finetune.py of it, or one that scores.
        _TASKS: (),
    }
)
"""The programs that exist here or whose lines another takes: what each puts before its arguments."""
JSON_NAME = "ds_config.json"

TITLES: Mapping[str, str] = MappingProxyType(
    {
        "megatron_deepspeed": "Megatron-DeepSpeed, examples",
        "megatron_lm_examples": "Megatron-LM, examples",
        "megatron_lm_tests": "Megatron-LM, functional tests",
        "forks": "Forks, by which the tables were written",
        "forks_held_out": "Forks, by which nothing was changed",
    }
)
"""The corpora: name of the file -> what it holds."""

_KINDS: Mapping[str, str] = MappingProxyType(
    {"feature": "Feature not built", "rewrite": "Said another way here", "other": "Other"}
)
"""Ways in which a line is refused: name -> heading."""
FIRST_SIGHT = CORPUS / "first_sight.tsv"
"""What became of lines of forks when they were first read, before anything was changed by them: where a line
comes from, `accepted` or `refused`, and the number of the reading. The lines are in the corpora of forks."""

_PROGRAMS: Mapping[str, str] = MappingProxyType(
    {
        "analyze_data.py": "analysis of data by another program",
        "examples/inference/gpt/gpt_dynamic_inference.py": "text generation by another program",
        "examples/mimo/train.py": "vision",
        "examples/multimodal/train.py": "vision",
        "finetune_gpt.py": "fine-tuning on two corpora",
        "finetune_llama.py": "fine-tuning on conversations",
        "gpt_dynamic_inference.py": "text generation by another program",
        "gpt_static_inference.py": "text generation by another program",
        "pretrain_ict.py": "retrieval",
        "pretrain_retro.py": "retrieval",
        "tasks/eval_harness/evaluate.py": "evaluation by another program",
        "tools/generate_samples_gpt.py": "text generation by another program",
        "tools/run_hybrid_text_generation_server.py": "text generation by another program",
        "tools/run_text_generation_server.py": "text generation by another program",
        "train_rl.py": "reinforcement learning",
    }
)
"""Programs other than these: the feature that they are."""

_RULES: Mapping[str, str] = MappingProxyType(
    {
        "needs_of_is_hybrid_model": "context parallelism of state-space layers",
    }
)
_JSON_SECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "compression_training": "compression of what is pretrained",
    }
)
_CHOICES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("--position-embedding-type", "yarn"): "model variants",
        ("--dataloader-type", "external"): "data variants",
        ("--tokenizer-type", "SFTTokenizer"): "fine-tuning on conversations",
        ("--recompute-modules", "mhc"): "model variants",
        ("--hybrid-layer-pattern", "G-*-/-"): "variants of multi-token prediction",
        ("--hybrid-layer-pattern", "M-M-MCM-MHM-MDM-MCM-MHM-MDM-"): "linear and learned sparse attention",
        ("--hybrid-layer-pattern", "*-*E*E*E/*E"): "variants of multi-token prediction",
    }
)
"""Refusals that are not of foreign flags: the feature that they ask for."""


@dataclass(frozen=True)
class LaunchLine:
    """One launch line, with the corpus that it is of."""

    corpus: str
    origin: str
    program: str
    world_size: int
    deepspeed: str | None
    argv: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """Why a line is refused; it passes if all three are empty.

    Attributes:
        features: features that do not exist here.
        rewrites: flags whose meaning is said in another way here.
        others: rules and other reasons.
        unknown: flags that are not known at all.
    """

    features: frozenset[str] = frozenset()
    rewrites: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    unknown: frozenset[str] = frozenset()

    @property
    def kind(self) -> str:
        """passes, feature, rewrite or other: the first that fits, from the back."""
        if self.features:
            return "feature"
        if self.others or self.unknown:
            return "other"
        return "rewrite" if self.rewrites else "passes"


def read_lines() -> list[LaunchLine]:
    """All lines of all corpora."""
    return [line for corpus in TITLES for line in _read(corpus)]


def _read(corpus: str) -> Iterator[LaunchLine]:
    for row in (CORPUS / f"{corpus}.tsv").read_text(encoding="utf-8").splitlines():
        origin, program, world_size, document, arguments = row.split("\t")
        deepspeed = None if document == "-" else document
        yield LaunchLine(corpus, origin, program, int(world_size), deepspeed, tuple(arguments.split()))


def judge(line: LaunchLine) -> Outcome:
    """What becomes of a line. That of another program is not judged further, but its flags are known."""
    found: dict[str, set[str]] = {"features": set(), "rewrites": set(), "others": set(), "unknown": set()}
    for problem in _problems(line):
        kind, name = _reason(problem)
        if line.program in FAMILIES or kind == "unknown":
            found[kind].add(name)
    if line.program not in FAMILIES:
        found["features"].add(_PROGRAMS[line.program])
    return Outcome(**{kind: frozenset(names) for kind, names in found.items()})


def first_sight() -> dict[str, dict[str, bool]]:
    """The number of a reading -> where a line comes from -> whether it was accepted at first sight."""
    readings: dict[str, dict[str, bool]] = {}
    for row in FIRST_SIGHT.read_text(encoding="utf-8").splitlines():
        origin, verdict, reading = row.split("\t")
        readings.setdefault(reading, {})[origin] = verdict == "accepted"
    return readings


def _problems(line: LaunchLine) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / JSON_NAME
        file.write_text(line.deepspeed or "", encoding="utf-8")
        argv = [token.replace(JSON_NAME, str(file)) for token in line.argv]
        try:
            argv = line_of(argv) if line.program == _TASKS else [*FAMILIES.get(line.program, ()), *argv]
            parse_config(argv, world_size=line.world_size)
        except ConfigError as error:
            return [problem.replace(f"{folder}/", "") for problem in error.violations]
    return []


def _reason(problem: str) -> tuple[str, str]:
    """What a refusal counts as, and its name."""
    if match := re.match(r"unknown flag `(\S+)`", problem):
        return "unknown", match[1]
    if match := re.match(r"`(--[\w-]+)[^`]*` is not accepted", problem):
        feature = FEATURES.get(match[1]) if match[1] in FOREIGN_FLAGS else "variants of forks"
        return ("features", feature) if feature else ("rewrites", match[1])
    if match := re.match(rf"{JSON_NAME}: `([\w.]+)` is not accepted", problem):
        return ("features", _JSON_SECTIONS[match[1]]) if match[1] in _JSON_SECTIONS else ("others", match[1])
    if match := re.search(r"\[rule (\w+)\]", problem):
        return ("features", _RULES[match[1]]) if match[1] in _RULES else ("others", match[1])
    if match := re.match(r"`(--[\w-]+)` must be .* but is `(\S+?)`", problem):
        feature = _CHOICES.get((match[1], match[2]))
        return ("features", feature) if feature else ("others", f"{match[1]} {match[2]}")
    if match := re.match(rf"{JSON_NAME}: unknown key `([\w.]+)`", problem):
        return "others", f"unknown key {match[1]}"
    if problem.startswith("unknown flags are not those of"):
        return "others", "flags of no known fork"
    if " cannot be read: " in problem:
        return "others", "layers over stages"
    if re.match(r"`--[\w-]+` must be set \(.*\), but is missing", problem):
        return "others", "the model is not given"
    if "must be set one way" in problem or re.match(rf"{JSON_NAME}: `train_batch_size` must", problem):
        return "others", "flags contradict the JSON"
    return "others", problem


def page(judged: Iterable[tuple[LaunchLine, Outcome]]) -> str:
    """The page of docs."""
    pairs = list(judged)
    lines = [
        "<!-- Written by `python -m tests.config.compat.launch_lines docs/launch_lines.md`; do not edit. -->",
        "# Launch lines",
        "",
        "What becomes of the launch lines of Megatron-DeepSpeed's and Megatron-LM's examples and tests, each",
        "read as `--check-config` reads it, unchanged. The lines are kept in `tests/config/compat/corpus/`.",
        "",
        *_table(
            ("Corpus", "Lines", "Accepted", *_KINDS.values(), "Of programs that exist here"),
            [*map(_count_row(pairs), TITLES)],
        ),
        "",
        *_at_first_sight(),
        "",
        "## Features not built",
        "",
        "A line counts for each feature that it asks for. Starting another program is asking for a feature.",
        "",
        *_table(("Feature", "Lines"), _counted(pairs, "features")),
        "",
        "## Said another way here",
        "",
        "The refusal says what to write instead.",
        "",
        *_table(("Flag", "Lines"), _counted(pairs, "rewrites")),
        "",
        "## Other reasons",
        "",
        *_table(("Reason", "Lines", "First of them"), _others(pairs)),
    ]
    return "\n".join(lines) + "\n"


def _at_first_sight() -> list[str]:
    rows = []
    for reading, verdicts in first_sight().items():
        lines, repositories = len(verdicts), len({origin.split()[0] for origin in verdicts})
        accepted = sum(verdicts.values())
        rows.append((reading, str(lines), str(repositories), f"{accepted} ({accepted / lines:.0%})"))
    return [
        "## At first sight",
        "",
        "Lines of forks are first read before anything is changed by them (`first_sight.tsv`). Those by",
        "which something was then changed are counted above with those by which the tables were written, so",
        "the row of the others is no measure of first sight.",
        "",
        *_table(("Reading", "Lines", "Repositories", "Accepted"), rows),
    ]


def _count_row(pairs: list[tuple[LaunchLine, Outcome]]):
    def row(corpus: str) -> tuple[str, ...]:
        kinds = Counter(outcome.kind for line, outcome in pairs if line.corpus == corpus)
        counts = (kinds.total(), kinds["passes"], *(kinds[kind] for kind in _KINDS))
        here = sum(line.corpus == corpus and line.program in FAMILIES for line, _ in pairs)
        return (TITLES[corpus], *map(str, counts), f"{kinds['passes']} of {here}")

    return row


def _counted(pairs: list[tuple[LaunchLine, Outcome]], kind: str) -> list[tuple[str, ...]]:
    counts = Counter(name for _, outcome in pairs for name in getattr(outcome, kind))
    shown = [(f"`{name}`" if kind == "rewrites" else name, str(count)) for name, count in counts.items()]
    return sorted(shown, key=lambda row: (-int(row[1]), row[0]))


def _others(pairs: list[tuple[LaunchLine, Outcome]]) -> list[tuple[str, ...]]:
    origins: dict[str, list[str]] = {}
    for line, outcome in pairs:
        for name in (*outcome.others, *(["unknown flags"] if outcome.unknown else [])):
            origins.setdefault(name, []).append(line.origin)
    return [
        (f"`{name}`", str(len(where)), f"`{where[0]}`")
        for name, where in sorted(origins.items(), key=lambda each: (-len(each[1]), each[0]))
    ]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]


def main() -> None:
    """Print the page, or write it to the file that is named."""
    text = page((line, judge(line)) for line in read_lines())
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
