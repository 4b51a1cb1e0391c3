"""The attention heads of a model, and those of one tensor-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megazero.errors import ConfigError


@dataclass(frozen=True)
class Heads:
    """A model's heads, divided over ranks so that each rank holds whole groups of query heads.

    A group is a key-value head with its query heads. If the groups do not divide by the ranks, the last ranks
    get heads of zeros, which add nothing to a product with zero columns and have no gradients. If there are
    fewer key-value heads than ranks, several ranks share one: each has all of that weight and uses its part.

    Attributes:
        query: query heads of the whole model.
        key_value: its key-value heads.
        width: features of a head.
        ranks: number of tensor-parallel ranks.
        rank: this one's number.
        may_share: whether ranks may share a key-value head; not where a weight holds it between its queries.
    """

    query: int
    key_value: int
    width: int
    ranks: int
    rank: int
    may_share: bool = True

    @property
    def shared(self) -> bool:
        """Whether several ranks share a key-value head."""
        fewer = self.may_share and self.key_value < self.ranks and self.ranks % self.key_value == 0
        return fewer and self.query % self.ranks == 0

    @property
    def units(self) -> int:
        """The number of parts of the query heads that must not be divided further."""
        return self.query if self.shared else self.key_value

    @property
    def local_query(self) -> int:
        """Query heads of one rank, heads of zeros included."""
        return -(-self.units // self.ranks) * (self.query // self.units)

    @property
    def local_key_value(self) -> int:
        """Key-value heads of one rank, heads of zeros included."""
        return 1 if self.shared else -(-self.key_value // self.ranks)

    @property
    def used(self) -> tuple[int, int]:
        """Where this rank's key-value head starts among the features, and its width, if heads are shared."""
        return self.rank * self.key_value // self.ranks * self.width, self.width

    def value(self, name: str) -> int:
        """The number that an attribute of an attention module must be on one rank."""
        values = {
            "query": self.local_query,
            "key_value": self.local_key_value,
            "groups": self.local_query // self.local_key_value,
            "features": self.local_query * self.width,
        }
        return values[name]


def heads_of(config: Any, ranks: int, rank: int) -> Heads:
    """The heads that a Hugging Face configuration describes.

    Raises:
        ConfigError: it does not say how many there are, or they do not form equal groups.
    """
    query = _first(config, "num_attention_heads", "num_heads", "n_heads", "n_head")
    hidden = _first(config, "hidden_size", "d_model", "n_embd", "dim")
    if query is None or hidden is None:
        raise ConfigError(
            f"`model.config` must say how many heads there are, but {type(config).__name__} does not; set "
            "`num_attention_heads` and `hidden_size`"
        )
    key_value = _first(config, "num_key_value_heads", "num_kv_heads") or query
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        key_value = 1
    if query % key_value:
        raise ConfigError(
            f"`num_attention_heads` must be a multiple of `num_key_value_heads` ({key_value}), but is {query}"
        )
    width = _first(config, "head_dim", "d_kv") or hidden // query
    return Heads(query, key_value, width, ranks, rank)


def _first(config: Any, *names: str) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)
