"""Approximations: changes after which transformers can express a model, with slightly different outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megazero.config.tree.model import ModelConfig
from megazero.errors import ConfigError
from megazero.formats.hf.encoder import with_one_gelu


@dataclass(frozen=True)
class Approximation:
    """A change of a model, made only on request.

    Attributes:
        flag: the flag of `to-hf` that requests it.
        help: the help of the flag.
        change: model -> the model to write instead; the same if there is nothing to change.
        wanted: the models that it applies to, for the message "must be given for ...".
        lacking: the part that other models lack, for the message "CKPT has no ...".
        remark: the line that is printed after the model was written.
    """

    flag: str
    help: str
    change: Callable[[ModelConfig], ModelConfig]
    wanted: str
    lacking: str
    remark: str

    def of(self, model: ModelConfig, where: object) -> ModelConfig:
        """The model to write instead of `model`, which is stored at `where`.

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
    """The model without a limit on the tokens of an expert."""
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
