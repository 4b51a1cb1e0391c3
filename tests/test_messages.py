"""A law about messages: one names only flags that the command which prints it has, or says whose they are."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache

import megazero.commands
from megazero.config.flags import COMMANDS, FLAGS
from megazero.config.rules.table import RULES
from tests.source_tree import Source, sources

FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*[a-z0-9]")
# A line with a flag in a string of several words, but for what declares flags.
SPOKEN = re.compile(r"""^(?!.*(?:_argument|option)\()[^\n]*["'][^\n]*--[a-z]""", re.MULTILINE)
# A program, and the flags of it that follow.
PROGRAM = re.compile(
    r"(?<![\w-])(?:megazero [a-z-]+|[\w/]+\.(?:py|sh)|torchrun|docker run|nvidia-smi|torchfrtrace|hf |"
    r"Megatron-LM's)"
    r"[^;`]*"
)
TRAINING = frozenset({*FLAGS, *COMMANDS, "--deepspeed-config"})
DECLARES = {"add_argument", "option", "of_model", "of_training", "add_parser", "ArgumentParser", "_add"}
TAKES_A_TRAINING = re.compile(r"parse_config|resolve_or_exit|training_words")


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """The long flags of a parser and of its verbs."""
    flags = {name for action in parser._actions for name in action.option_strings if name.startswith("--")}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            flags |= {flag for verb in action.choices.values() for flag in flags_of(verb)}
    return flags


def declared_in(module: str) -> set[str] | None:
    """The flags of the parsers that a module makes; None if it makes none."""
    loaded = importlib.import_module(module)
    own = [f for f in vars(loaded).values() if inspect.isfunction(f) and f.__module__ == module]
    parsers = [
        function() for function in own if function.__name__.endswith("parser") and can_be_called(function)
    ]
    for add in (function for function in own if function.__name__ == "add_verb"):
        parsers.append(argparse.ArgumentParser())
        add(parsers[-1].add_subparsers())
    return {flag for parser in parsers for flag in flags_of(parser)} if parsers else None


def can_be_called(function: Callable[..., object]) -> bool:
    """Whether a function needs no argument."""
    empty = inspect.Parameter.empty
    return all(
        parameter.default is not empty for parameter in inspect.signature(function).parameters.values()
    )


def spelled_in(folder: str) -> set[str]:
    """The flags that stand alone in a string of a folder's files, as where they are declared."""
    values = [
        node.value for s in sources(folder) for node in ast.walk(s.tree) if isinstance(node, ast.Constant)
    ]
    return {value for value in values if isinstance(value, str) and FLAG.fullmatch(value)}


@cache
def commands() -> Mapping[str, set[str] | None]:
    """The flags that each module of the commands declares."""
    modules = pkgutil.walk_packages(megazero.commands.__path__, "megazero.commands.")
    return {info.name: declared_in(info.name) for info in modules}


def of(*modules: str) -> set[str]:
    return set().union(*(commands()[f"megazero.commands.{module}"] or () for module in modules))


def allowed_by_room() -> dict[str, set[str] | frozenset[str] | None]:
    """The flags that the programs have which run a room; None for a room that is not held to it.

    What programs run that share no flag names settings, without dashes.
    """
    texts = of("generate") & of("fill_mask")
    launch = declared_in("megazero.launch.flags") or set()
    return {
        "megazero": TRAINING,
        "megazero.ablate": of("ablate"),
        "megazero.checkpoint": set(),
        "megazero.formats": set(),
        "megazero.formats.hf": of("checkpoint.hf"),
        "megazero.formats.megatron": of("checkpoint.megatron", "checkpoint.convert"),
        "megazero.formats.pickles": of("checkpoint.megatron"),
        "megazero.commands": set(),
        "megazero.commands.config": {"--schema", *TRAINING},
        "megazero.commands.launch": launch,
        "megazero.commands.training_words": TRAINING,
        "megazero.data.conversations": declared_in("megazero.data_tools.conversations"),
        "megazero.data.tokenizers": set(),
        "megazero.data_tools": spelled_in("megazero/data_tools"),
        "megazero.data_efficiency.map": declared_in("megazero.data_tools.analyze_dataset"),
        "megazero.deepspeed": None,  # its users have scripts of their own
        "megazero.env": of("env"),
        "megazero.env.launch_check": TRAINING,
        "megazero.harness": {"--apply_chat_template", "--gen_kwargs", "--model_args"},  # of lm_eval
        "megazero.harness.in_training": TRAINING,
        "megazero.harness.megatron": of("evaluate"),
        "megazero.inference": texts,
        "megazero.inference.position_loss": of("analyze_loss") | TRAINING,
        "megazero.inference.sample_loss": of("analyze_loss") | TRAINING,
        "megazero.kernels": of("kernels"),
        "megazero.launch": launch,
        "megazero.pictures": {"--output"},
        "megazero.plan": of("plan", "plan.job", "tune") | TRAINING,
        "megazero.post_training": TRAINING,
        "megazero.quantize": of("quantize"),
        "megazero.report": of("report") | {"--load", "--metrics-jsonl", "--save"},
        "megazero.serving": of("serve"),
        "megazero.train.parts.vocabulary": set(),
        "megazero.train.resume.saved": set(),
        "megazero.train.resume.trained": texts,
        "megazero.verify": of("verify") | TRAINING,
    }


def allowed(source: Source, rooms: dict[str, set[str] | frozenset[str] | None]) -> set[str] | None:
    """The flags that messages of a file may name; None if any."""
    place = source.module
    while place not in rooms and commands().get(place) is None:
        place = place.rpartition(".")[0]
    flags = rooms[place] if place in rooms else commands()[place]
    takes = source.module.startswith("megazero.commands") and TAKES_A_TRAINING.search(source.text)
    return None if flags is None else {*flags, *(TRAINING if takes else ())}


def sentences(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each string of several words with a flag, docstrings and declarations left out."""
    passed: set[int] = set()
    for node in ast.walk(tree):
        name = isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", ""))
        text = ""
        if name in DECLARES or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            passed |= {id(part) for part in ast.walk(node)}
        elif isinstance(node, ast.JoinedStr) and id(node) not in passed:
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
            passed |= {id(part) for part in ast.walk(node)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed:
            text = node.value
        if " " in text and FLAG.search(text):
            yield node.lineno, text


def strangers(text: str, flags: set[str]) -> set[str]:
    """The flags that a message names and nobody has."""
    return set(FLAG.findall(PROGRAM.sub("", text))) - flags


def test_the_law_sees_an_offender() -> None:
    offender = ast.parse('raise Error(f"`x` must be {y}; set `--lr`, or run `megazero plan --nproc 2`")')
    ((_, text),) = sentences(offender)
    assert strangers(text, of("generate")) == {"--lr"}
    assert not strangers(text, {*TRAINING})


def test_a_message_names_only_flags_that_its_command_has() -> None:
    rooms = allowed_by_room()
    wrong = [
        f"{source.module}:{line} names {', '.join(sorted(unknown))}"
        for source in sources("megazero")
        if SPOKEN.search(source.text) and (flags := allowed(source, rooms)) is not None
        for line, text in sentences(source.tree)
        if (unknown := strangers(text, flags))
    ]
    assert wrong == []


def test_rules_name_flags_that_there_are_in_whole_sentences() -> None:
    for rule in RULES:
        for text in (rule.message, rule.remedy):
            assert not strangers(text, {*TRAINING}), rule.name
        assert not re.search(r"\b(?:is|are|that|such|than|of|to)$", rule.remedy), rule.name
