"""The attention heads of a model and of one tensor-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.errors import ConfigError


@dataclass(frozen=True)
class Heads:
    """A model's heads, divided over ranks by whole groups: a key-value head with its query heads.

    If the groups do not divide by the ranks, the last ranks are padded by heads of zeros, which contribute
    nothing and get no gradients. If there are fewer key-value heads than ranks, several ranks share one: each
    stores the whole key-value weight and uses its part.

    Attributes:
        query: the number of query heads in the model.
        key_value: the number of key-value heads in the model.
        width: the number of features in a head.
        ranks: the number of tensor-parallel ranks.
        rank: this tensor-parallel rank.
        may_share: whether ranks may share a key-value head; False if a fused weight interleaves keys and
            queries.
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
        """The number of indivisible parts of the query heads."""
        return self.query if self.shared else self.key_value

    @property
    def local_query(self) -> int:
        """The number of query heads on one rank, padding included."""
        return -(-self.units // self.ranks) * (self.query // self.units)

    @property
    def local_key_value(self) -> int:
        """The number of key-value heads on one rank, padding included."""
        return 1 if self.shared else -(-self.key_value // self.ranks)

    @property
    def used(self) -> tuple[int, int]:
        """The first feature and the width of this rank's key-value head, if heads are shared."""
        return self.rank * self.key_value // self.ranks * self.width, self.width

    def value(self, name: str) -> int:
        """Return the value of an attention module's attribute on one rank, by its meaning in the table."""
        values = {
            "query": self.local_query,
            "key_value": self.local_key_value,
            "groups": self.local_query // self.local_key_value,
            "features": self.local_query * self.width,
        }
        return values[name]


def heads_of(config: object, ranks: int, rank: int) -> Heads:
    """Read the heads from a Hugging Face configuration.

    Raises:
        ConfigError: the number of heads is missing, or heads do not form equal groups.
    """
    query = _first(config, "num_attention_heads", "num_heads", "n_heads", "n_head")
    hidden = _first(config, "hidden_size", "d_model", "n_embd", "dim")
    if query is None or hidden is None:
        raise ConfigError(
            f"`model.config` must say how many heads there are, but {type(config).__name__} does not; set "
            "`num_attention_heads` and `hidden_size`"
        )
    key_value = _first(config, "num_key_value_heads", "num_kv_heads") or query
    if is_multi_query(config):
        key_value = 1
    if query % key_value:
        raise ConfigError(
            f"`num_attention_heads` must be a multiple of `num_key_value_heads` ({key_value}), but is {query}"
        )
    width = _first(config, "head_dim", "d_kv") or hidden // query
    return Heads(query, key_value, width, ranks, rank)


def is_multi_query(config: object) -> bool:
    """Whether a Hugging Face configuration (Falcon, GPT-BigCode) has one key-value head for all queries."""
    newer = getattr(config, "new_decoder_architecture", False)  # Falcon's grouped queries override the flag
    return bool(getattr(config, "multi_query", False)) and not newer


def _first(config: object, *names: str) -> int | None:
    """Return the first of these attributes that is a whole number."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)
