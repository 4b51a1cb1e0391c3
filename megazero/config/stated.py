"""The model that a folder says is in it, as settings: for what a line leaves out, and to compare with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from megazero.config.fields import FIELD_BY_PATH, FIELDS, INSTEAD_OF, spoken
from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import ConfigError

Difference = tuple[str, Any, Any]
"""A field of the model, the folder's value, and the configuration's."""


@dataclass(frozen=True)
class Stated:
    """A folder's own account of the model in it.

    Attributes:
        place: the file that says so.
        model: the model's settings, with the size of its vocabulary if the tokenizer does not say it.
        tokenizer: the tokenizer's settings.
        silent: fields of the model that are the launch's all the same.
        differences: where a configuration has another model than the folder's weights are of.
    """

    place: str
    model: ModelConfig
    tokenizer: TokenizerConfig
    silent: Set[str]
    differences: Callable[[ModelConfig], list[Difference]]

    def values(self, given: Set[str]) -> dict[str, Any]:
        """Return path -> value of what the folder says and `given` paths do not, directly or in another way.

        A tokenizer is taken whole or not at all. The default of the activation depends on whether there are
        biases, and that of how many experts a token goes to on whose flags a line has: these are always said.
        """
        always = {"activation", *(["moe_router_topk"] if self.model.num_experts else [])}
        unsaid = given | {f"model.{name}" for name in self.silent} | _said_otherwise(given)
        values = {}
        for spec in (spec for spec in FIELDS if spec.section in ("model", "tokenizer")):
            value = getattr(getattr(self, spec.section), spec.name)
            if spec.path not in unsaid and (value != spec.default or spec.name in always):
                values[spec.path] = value
        if any(path.startswith("tokenizer.") for path in given):
            values = {path: value for path, value in values.items() if path.startswith("model.")}
        return values

    def other_tokenizer(self, given: Mapping[str, Any]) -> str | None:
        """The first setting of the tokenizer that settings (path -> value) give otherwise; or None."""
        launch = TokenizerConfig.model_construct(**{path.partition(".")[2]: x for path, x in given.items()})
        ours, theirs = (dict(section.located()) for section in (launch, self.tokenizer))
        names = [] if self.tokenizer.tokenizer_type is None else [n for n in theirs if theirs[n] != ours[n]]
        return f"{names[0]} {spoken(theirs[names[0]])}" if names else None

    def check(self, config: Config) -> None:
        """Refuse the model of a configuration that differs from the folder's.

        Raises:
            ConfigError: a sentence for each field that differs.
        """
        problems, rows = [], self.differences(config.model)
        # What several fields say is one difference: the layers of a stack, and so those of both.
        same = {path for field, _, _ in rows for path in INSTEAD_OF.get(f"model.{field}", ())}
        for field, theirs, ours in (row for row in rows if f"model.{row[0]}" not in same):
            flag = FIELD_BY_PATH[f"model.{field}"].flag
            problems.append(
                f"`{flag}` must be what {self.place} says, {_shown(theirs)}, but is {_shown(ours)}; leave it "
                "out, or name another folder."
            )
        if problems:
            raise ConfigError(problems)


Reader = Callable[[Mapping[str, Any]], Stated | None]
"""Reads what the folder says that settings (path -> value) name for the weights; None if none has any."""


def _said_otherwise(given: Set[str]) -> set[str]:
    """The paths of fields that say in another way what the paths `given` say."""
    pairs = [(path, other) for path, others in INSTEAD_OF.items() for other in others]
    return {b for a, b in pairs if a in given} | {a for a, b in pairs if b in given}


def _shown(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else spoken(value)
