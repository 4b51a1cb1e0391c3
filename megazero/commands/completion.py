"""The command `megazero completion SHELL`: print a script by which a shell completes verbs, flags and files.

The script knows all of them, so that no key press waits for megazero to start.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from types import MappingProxyType

from megazero.commands import VERBS
from megazero.config.fields import SECTIONS, Kind
from megazero.config.flags import COMMANDS, FLAGS
from megazero.config.help import meanings
from megazero.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")
_TRAINING = ("pretrain", "finetune", "config", "evaluate", "verify")
_ELSEWHERE = MappingProxyType({"launch": "megazero.launch.flags", "plan": "megazero.commands.plan.job"})


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="megazero completion",
        description="Print a script by which a shell completes the words of `megazero`. It needs shtab.",
        epilog="Write it to a file once. bash reads it by `source FILE` in ~/.bashrc, zsh as `_megazero` on "
        "its fpath, fish as ~/.config/fish/completions/megazero.fish.",
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the script of a shell; returns the exit status."""
    shell = build_parser().parse_args(argv).shell
    try:
        import shtab
    except ImportError as error:
        raise ConfigError(
            "`completion` must have the shtab package, but it is missing; run `pip install shtab`"
        ) from error
    print(shtab.complete(_words(shtab.FILE), shell))
    return 0


def _words(files: object) -> argparse.ArgumentParser:
    """A parser of everything after `megazero`; what may be a path has the attribute `complete`, `files`."""
    parser = argparse.ArgumentParser(prog="megazero", add_help=False)
    verbs, training = parser.add_subparsers(dest="verb"), _training()
    for verb in VERBS:
        place = import_module(_ELSEWHERE.get(verb.name, verb.module))
        own = [place.build_parser()] if hasattr(place, "build_parser") else []
        own += [training] if verb.name in _TRAINING else []
        verbs.add_parser(verb.name, help=verb.help, parents=own, add_help=False, conflict_handler="resolve")
    _complete_files(parser, files)
    return parser


def _training() -> argparse.ArgumentParser:
    """A parser of a training's flags, which reads less than the training does."""
    parser = argparse.ArgumentParser(add_help=False)
    texts = {section: meanings(section) for section in SECTIONS}
    for name, text in COMMANDS.items():
        parser.add_argument(name, help=text.replace("%", "%%"))
    for name, flag in FLAGS.items():
        help_ = texts[flag.spec.section][flag.spec.name].replace("%", "%%")
        if flag.is_switch:
            parser.add_argument(name, action="store_true", help=help_)
        else:
            kind = str if flag.spec.kind in (Kind.TEXT, Kind.TEXTS) else int
            parser.add_argument(name, choices=flag.spec.choices or None, type=kind, help=help_)
    return parser


def _complete_files(parser: argparse.ArgumentParser, files: object) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _complete_files(below, files)
        elif action.nargs != 0 and action.choices is None and action.type not in (int, float):
            action.complete = files  # type: ignore[attr-defined]
