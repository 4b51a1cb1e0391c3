"""Approximations: changes that make a model one which transformers has, with outputs that differ slightly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megazero.config.tree.model import ModelConfig
from megazero.errors import ConfigError
from megazero.formats.hf.encoder import with_one_gelu


@dataclass(frozen=True)
class Approximation:
    """One such change, which has to be asked for.

    Attributes:
        flag: the flag of `to-hf` that asks for it.
        help: what the flag does.
        change: the model -> the one that is written in its place; the same if there is nothing to change.
        wanted: the models that it is for, in words.
        lacking: what another model has not, as in "CKPT has no ...".
        remark: what is said after it was written.
    """

    flag: str
    help: str
    change: Callable[[ModelConfig], ModelConfig]
    wanted: str
    lacking: str
    remark: str

    def of(self, model: ModelConfig, where: object) -> ModelConfig:
        """The model that is written in place of this one, which is stored at `where`.

        Raises:
            ConfigError: there is nothing to approximate.
        """
        changed = self.change(model)
        if changed == model:
            raise ConfigError(
                f"`{self.flag}` must be given for {self.wanted}, but {where} has no {self.lacking}; leave it "
                "out"
            )
        return changed


def without_capacity(model: ModelConfig) -> ModelConfig:
    """The model whose experts take all tokens that are sent to them."""
    names = ("moe_expert_capacity_factor", "moe_eval_capacity_factor") if model.num_experts else ()
    return model.model_copy(update=dict.fromkeys(names))


ONE_GELU = Approximation(
    "--approximate-gelu",
    "write a BERT whose masked-LM head and MLPs have two forms of GELU, as Megatron's have by default, with "
    "the MLPs' form in both; its outputs change slightly",
    with_one_gelu,
    "a model with two forms of GELU",
    "masked-LM head whose form differs from the MLPs'",
    "its masked-LM head was trained with the other form of GELU: outputs differ slightly from here",
)
NO_CAPACITY = Approximation(
    "--ignore-capacity",
    "write a mixture of experts without the capacity of its experts, as transformers drops no token; outputs "
    "change where tokens were dropped",
    without_capacity,
    "a model whose experts have a capacity",
    "experts with one",
    "its experts had a capacity: outputs differ from here where that dropped tokens",
)
APPROXIMATIONS = (ONE_GELU, NO_CAPACITY)
