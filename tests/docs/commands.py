"""Whether the command lines that pages show name programs, files and flags that exist."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megazero.cli import VERBS
from megazero.config.compat.foreign import FOREIGN_FLAGS
from megazero.config.compat.rows import DIALECTS, SYNONYMS
from megazero.config.flags import COMMANDS, FLAGS
from tests.docs.pages import ROOT, Document
from tests.source_tree import Source

ASSIGNMENT = re.compile(r"[A-Z_]+=")
FLAG = re.compile(r"--[\w-]+")
FOLDERS = ("examples_3d/", "scripts/", "data_tools/", "benchmarks/", "proofs/", "tests/")
LANGUAGES = ("", "bash", "console", "sh")
PROGRAMS = ("python", "torchrun", "megazero", "bash", "pretrain_gpt.py", "pretrain_bert.py", "finetune.py")
STARTERS = ("torchrun", "torch.distributed.run")
TRAINERS = ("pretrain_gpt.py", "pretrain_bert.py", "finetune.py", "pretrain", "finetune", "rl")
TRAINERS_TOO = ("analyze-loss", "config", "evaluate", "score", "verify")
"""Verbs with flags of their own that also take a training's."""
OF_OTHERS = ("lm-eval",)
"""Verbs whose flags are those of a program that may not be installed."""
WITH_VERBS = ("checkpoint", "data", "kernels", "plan")
"""Verbs with verbs of their own."""


@dataclass(frozen=True)
class Command:
    """A command line: its words, without variables that are set before it and what comes after a pipe."""

    words: tuple[str, ...]
    place: str


def commands(document: Document) -> Iterator[Command]:
    """The command lines in the blocks of a page that begin with a program of ours or with what starts one."""
    for block in document.blocks():
        if block.language in LANGUAGES:
            text = re.sub(r"\\\n\s*", " ", block.text)
            for line in text.splitlines():
                words = words_of(line.strip().removeprefix("$ "))
                if words and words[0] in PROGRAMS:
                    yield Command(words, f"{document.path}:{block.line}")


def words_of(line: str) -> tuple[str, ...]:
    """The words of a line; none if the shell could not read it."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|<>;&")
    lexer.whitespace_split = True
    words: list[str] = []
    with contextlib.suppress(ValueError):  # a line of output, with one apostrophe
        for word in lexer:
            if word[0] in "|<>;&":
                break
            if words or not ASSIGNMENT.match(word):
                words.append(word)
        return tuple(words)
    return ()


@cache
def trainer_flags() -> frozenset[str]:
    """The flags of a training; those of other trainers if they are accepted."""
    accepted = (name for name, row in FOREIGN_FLAGS.items() if row.accepted)
    return frozenset([*FLAGS, *COMMANDS, *accepted, *SYNONYMS])


@cache
def flags_of_verb(words: tuple[str, ...]) -> frozenset[str]:
    """The flags that `megazero VERB --help` names."""
    verb = next(verb for verb in VERBS if verb.name == words[0])
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        verb.run([*words[1:], "--help"])
    return frozenset(FLAG.findall(text.getvalue())) | {"--help"}


@cache
def all_flags() -> frozenset[str]:
    """Every flag that a source of the repository spells out, or that a training knows or refuses by name."""
    folders = ("megazero", "data_tools", "scripts", "benchmarks", "proofs")
    paths = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh")
    ]
    spelled = (
        FLAG.findall(path.read_text(encoding="utf-8")) for path in [*paths, ROOT / "tests/conftest.py"]
    )
    known = frozenset(flag for flags in spelled for flag in flags)
    forks = {name for rows in DIALECTS.values() for name in rows}
    return known | trainer_flags() | starter_flags() | FOREIGN_FLAGS.keys() | forks


def prose_violations(document: Document) -> Iterator[str]:
    """Flags within the text, as `--flag`, that nothing has."""
    for match in re.finditer(r"`(--[a-z][\w-]+)(?![\w*<-])[^`\n]*`", document.text):
        if match[1] not in all_flags():
            yield f"{document.path}: `{match[1]}` must be a flag of something, but is none"


@cache
def starter_flags() -> frozenset[str]:
    """The flags of torchrun, in both spellings."""
    from torch.distributed.run import get_args_parser

    names = [name for name in get_args_parser()._option_string_actions if name.startswith("--")]
    return frozenset([*names, *(f"--{name[2:].replace('_', '-')}" for name in names)])


@cache
def flags_in_sources(path: Path) -> frozenset[str]:
    """The flags that a script spells out, or what it imports from its folder or a package of that name."""
    text = path.read_text(encoding="utf-8")
    flags = set(FLAG.findall(text))
    if path.suffix == ".py":
        for imported in Source.read(path).imports():
            parts = imported.target.split(".")
            for size in (len(parts), len(parts) - 1):
                source = ROOT.joinpath(*parts[:size]).with_suffix(".py")
                ours = path.relative_to(ROOT).parts[0] in (parts[0], *parts[1:2])
                if ours and source.is_file() and source != path:
                    flags |= flags_in_sources(source)
    elif "launch.sh" in text:
        flags |= trainer_flags()
    for verb in re.findall(r'megazero\.cli ([a-z -]+) "\$@"', text):
        flags |= flags_of_verb(tuple(verb.split()))
    return frozenset(flags)


def command_violations(command: Command) -> Iterator[str]:
    """What a command line names that does not exist."""
    for word in command.words:
        if (
            word.startswith(FOLDERS)
            and not re.search(r"[*{}$]", word)
            and not (ROOT / word.split("::")[0]).exists()
        ):
            yield f"{command.place}: `{word}` does not exist"
    yield from (f"{command.place}: {problem}" for problem in problems(command.words))


def problems(words: tuple[str, ...]) -> Iterator[str]:
    """What is wrong with the program that a line starts, and with its flags."""
    program, *arguments = words
    if program in ("python", "bash") and arguments[:1] == ["-m"]:
        program, *arguments = arguments[1:]
    elif program in ("python", "bash") and arguments:
        program, *arguments = arguments
    if program in STARTERS:
        yield from problems_of_starter(arguments, starter_flags(), "torchrun")
    elif program in ("megazero", "megazero.cli"):
        yield from problems_of_verb(tuple(arguments))
    elif program in TRAINERS:
        yield from unknown(arguments, trainer_flags(), program)
    elif program.endswith((".py", ".sh")):
        if (ROOT / program).is_file():
            yield from unknown(arguments, flags_in_sources(ROOT / program), program)
        else:
            yield f"`{program}` does not exist"
    elif (source := ROOT.joinpath(*program.split("."))).with_suffix(".py").is_file():
        yield from unknown(arguments, flags_in_sources(source.with_suffix(".py")), program)
    elif (source / "__main__.py").is_file():
        yield from unknown(arguments, flags_in_sources(source / "__main__.py"), program)


def problems_of_starter(arguments: Sequence[str], known: frozenset[str], program: str) -> Iterator[str]:
    """The same for a program that starts another one, whose flags follow."""
    start = next((i for i, word in enumerate(arguments) if word == "-m" or word.endswith(".py")), None)
    yield from unknown(arguments[:start], known, program)
    if start is not None:
        yield from problems(("python", *arguments[start:]))


def problems_of_verb(words: tuple[str, ...]) -> Iterator[str]:
    """The same for `megazero` and its verbs."""
    names = [verb.name for verb in VERBS]
    if not words or words[0].startswith("-"):
        return
    if words[0] not in names:
        yield f"`megazero {words[0]}` must be one of {', '.join(names)}"
        return
    if words[0] in ("launch", "run"):
        yield from problems_of_starter(words[1:], flags_of_verb(words[:1]), f"megazero {words[0]}")
        return
    if words[0] in OF_OTHERS:
        return
    place = words.index("--") if "--" in words else len(words)
    own, passed_on = words[:place], words[place:]
    yield from unknown(passed_on, trainer_flags(), "a training")
    if own[0] in TRAINERS:
        yield from unknown(own, trainer_flags(), f"megazero {own[0]}")
        return
    size = 2 if own[0] in WITH_VERBS and len(own) > 1 and own[1][0] != "-" else 1
    known = flags_of_verb(own[:size]) | (trainer_flags() if own[0] in TRAINERS_TOO else frozenset())
    yield from unknown(own, known, f"megazero {' '.join(own[:size])}")


def unknown(arguments: Sequence[str], known: frozenset[str], program: str) -> Iterator[str]:
    """The flags among the arguments that a program does not know."""
    for word in arguments:
        flag = word.partition("=")[0]
        if FLAG.fullmatch(flag) and flag not in known:
            yield f"`{flag}` must be a flag of {program}, but is none"
