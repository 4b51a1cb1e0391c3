"""Settings that are accepted without the effect that their name promises: what a run says about them."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.rules.rule import display_name, value_at
from megazero.config.tree import Config

_SAVING = tuple(
    f"checkpoint.{name}"
    for name in (
        "save_interval",
        "save_retain_interval",
        "keep_last",
        "async_save",
        "no_save_optim",
        "no_save_rng",
    )
)
_LOADING = tuple(
    f"checkpoint.{name}"
    for name in ("finetune", "no_load_optim", "no_load_rng", "exit_on_missing_checkpoint", "ckpt_step")
)
_TENSORBOARD = ("logging.log_validation_ppl_to_tensorboard", "logging.log_timers_to_tensorboard")
_WANDB = tuple(f"logging.wandb_{name}" for name in ("exp_name", "save_dir", "entity", "group"))


@dataclass(frozen=True)
class Note:
    """Settings without effect: both Megatrons accept them in silence, and here the run says so.

    Attributes:
        fields: paths of the settings.
        without: path of the setting that is missing.
        effect: what does not happen, as a clause.
    """

    fields: tuple[str, ...]
    without: str
    effect: str

    def sentence(self, config: Config) -> str | None:
        """What a run says; None if none of the settings is given or they have their effect."""
        values = {path: value_at(config, path) for path in self.fields}
        given = [path for path, value in values.items() if value is not None and value is not False]
        if not given or value_at(config, self.without):
            return None
        names = " and ".join(f"`{display_name(path)}`" for path in given)
        has = "has" if len(given) == 1 else "have"
        return f"{names} {has} no effect without `{display_name(self.without)}`: {self.effect}."


NOTES: tuple[Note, ...] = (
    Note(_SAVING, "checkpoint.save", "nothing is saved"),
    Note(_LOADING, "checkpoint.load", "no checkpoint is read"),
    Note(_TENSORBOARD, "logging.tensorboard_dir", "there are no TensorBoard events"),
    Note(_WANDB, "logging.wandb_project", "nothing goes to Weights & Biases"),
)


def notes_on(config: Config) -> list[str]:
    """What a run says about its settings without effect."""
    return [line for each in NOTES if (line := each.sentence(config))]
