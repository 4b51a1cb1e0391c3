"""Named loss terms, which training minimizes and reports."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.errors import ConfigError

PADDING = "padding"
"""Name of the term that models report as the share of positions that hold no token."""


@dataclass(frozen=True)
class LossTerm:
    """One term of the training loss: coefficient x sum / count, both over the whole global batch.

    A model names its terms. Any part of the model, on any pipeline stage, may add to the sum of a term; the
    batches give the count.

    Attributes:
        name: a word or words_like_these; with ``_loss`` appended it is the key in metrics.
        over: key of the count among the batches' counts; by default the term's name.
        coefficient: weight in the total. A term with 0, such as an accuracy, is reported but not
            differentiated.
        evaluated: whether evaluations report the term too.

    Raises:
        ConfigError: the name is not an identifier, or is ``total``, which names the sum of all terms.
    """

    name: str
    coefficient: float = 1.0
    over: str = ""
    evaluated: bool = True

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name == "total":
            raise ConfigError(
                f"`name` of a loss term must be an identifier other than total, but is {self.name!r}; "
                "rename it"
            )
        if not self.over:
            object.__setattr__(self, "over", self.name)

    @property
    def trained(self) -> bool:
        """Whether the term is differentiated."""
        return self.coefficient != 0

    @property
    def label(self) -> str:
        """The name in logs and charts: ``lm loss``, or the bare name if the term is only reported."""
        return f"{self.name} loss" if self.trained else self.name
