"""The settings that a folder of weights states: they complete a command line, and are compared with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from megazero.config.derive import Difference
from megazero.config.fields import FIELD_BY_PATH, FIELDS, INSTEAD_OF, spoken
from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import ConfigError


@dataclass(frozen=True)
class Stated:
    """A folder's own account of the model in it.

    Attributes:
        place: the file that says so.
        model: the model's settings, with the size of its vocabulary if the tokenizer does not say it.
        tokenizer: the tokenizer's settings.
        silent: fields of the model that the folder does not determine, so that the command line does.
        differences: returns each difference of a configuration's model: field, folder's value, its own value.
    """

    place: str
    model: ModelConfig
    tokenizer: TokenizerConfig
    silent: Set[str]
    differences: Callable[[ModelConfig], list[Difference]]

    def values(self, given: Set[str]) -> dict[str, object]:
        """Return path -> value of the folder's settings that the paths `given` do not set in some way.

        A tokenizer is taken whole or not at all. `activation` and `moe_router_topk` are stated even at their
        defaults, because these depend on the other flags of the line.
        """
        always = {"activation", *(["moe_router_topk"] if self.model.num_experts else [])}
        unsaid = given | {f"model.{name}" for name in self.silent} | _said_otherwise(given)
        sections = ("model",) if any(p.startswith("tokenizer.") for p in given) else ("model", "tokenizer")
        values = {}
        for spec in (spec for spec in FIELDS if spec.section in sections):
            value = getattr(getattr(self, spec.section), spec.name)
            if spec.path not in unsaid and (value != spec.default or spec.name in always):
                values[spec.path] = value
        return values

    def other_tokenizer(self, given: Mapping[str, object]) -> str | None:
        """The first tokenizer setting that differs from the given ones (path -> value); None if none does."""
        launch = TokenizerConfig.model_construct(None, **{p.partition(".")[2]: x for p, x in given.items()})
        ours, theirs = (dict(section.located()) for section in (launch, self.tokenizer))
        differing = (f"{name} {spoken(value)}" for name, value in theirs.items() if value != ours[name])
        return None if self.tokenizer.tokenizer_type is None else next(differing, None)

    def check(self, config: Config) -> None:
        """Refuse the model of a configuration that differs from the folder's.

        Raises:
            ConfigError: a sentence for each field that differs.
        """
        problems, rows = [], self.differences(config.model)
        # Fields that express the same are one difference: the layers of one stack, and so of both.
        same = {path for field, _, _ in rows for path in INSTEAD_OF.get(f"model.{field}", ())}
        for field, theirs, ours in (row for row in rows if f"model.{row[0]}" not in same):
            flag = FIELD_BY_PATH[f"model.{field}"].flag
            problems.append(
                f"`{flag}` must be what {self.place} says, {_shown(theirs)}, but is {_shown(ours)}; leave it "
                "out, or name another folder."
            )
        if problems:
            raise ConfigError(problems)


Reader = Callable[[Mapping[str, object]], Stated | None]
"""Reads the folder of weights that settings (path -> value) name; returns None if they name none."""


def _said_otherwise(given: Set[str]) -> set[str]:
    """The paths of fields that express in another way what the paths `given` express."""
    pairs = [(path, other) for path, others in INSTEAD_OF.items() for other in others]
    return {b for a, b in pairs if a in given} | {a for a, b in pairs if b in given}


def _shown(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else spoken(value)
