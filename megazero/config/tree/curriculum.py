"""The section `curriculum`: curriculum learning over the sequence length."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt, PrivateAttr

from megazero.config.condition import config, here, when
from megazero.config.custom_pacing import custom_pacing
from megazero.config.pacing import MOST_CHANGES, Pacing, levels_of, root_of
from megazero.config.tree.option import Section, option
from megazero.config.tree.roles import Role
from megazero.errors import ConfigError


class CurriculumConfig(Section):
    """Curriculum"""

    roles = Role.SCHEDULE

    seqlen_schedule: Literal["none", "fixed_linear", "fixed_root", "fixed_discrete", "custom"] = option(
        "none",
        needs=(
            when(("fixed_linear", "fixed_root"), here.seqlen_min_difficulty),
            when(("fixed_linear", "fixed_root"), here.seqlen_total_curriculum_step),
            when("fixed_root", here.seqlen_root_degree),
            when("custom", here.seqlen_custom_schedule),
            config.finetune.task.is_none,
        ),
    )
    """how sequences grow: by a straight line, by a root of the training done, by given levels, or by a
    function of your own; training cuts each sample to the length of its step, evaluations do not"""
    seqlen_kind: Literal["truncate", "reshape"] = option(
        "truncate",
        needs=(
            here.seqlen_schedule.because("otherwise nothing is cut"),
            (config.model.family == "gpt").because(
                "further rows of a pair of sentences would have none of BERT's marks"
            ),
        ),
    )
    """what becomes of the rest of a sample: truncate drops it; reshape cuts it into further rows of that
    length, and drops what does not fill one"""
    seqlen_unit: Literal["iters", "tokens"] = option("iters")
    """what the schedule counts; tokens are those before the step"""
    seqlen_min_difficulty: PositiveInt | None = option(
        None, unit="tokens", needs=here.seqlen_schedule.among("fixed_linear", "fixed_root")
    )
    """length at the beginning"""
    seqlen_max_difficulty: PositiveInt | None = option(
        None, unit="tokens", needs=here.seqlen_schedule.among("fixed_linear", "fixed_root", "custom")
    )
    """length at the end; default: the sequence length"""
    seqlen_total_curriculum_step: PositiveInt | None = option(
        None, roles=Role.LENGTH, needs=here.seqlen_schedule.among("fixed_linear", "fixed_root")
    )
    """fixed_linear, fixed_root: steps or tokens until the length reaches its end"""
    seqlen_difficulty_step: PositiveInt = option(8, unit="tokens")
    """lengths are rounded down to multiples of this"""
    seqlen_root_degree: PositiveFloat | None = option(None, needs=here.seqlen_schedule == "fixed_root")
    """fixed_root: which root; 2 is the square root"""
    seqlen_difficulty: tuple[PositiveInt, ...] = option((), needs=here.seqlen_schedule == "fixed_discrete")
    """fixed_discrete: the lengths, one after the other"""
    seqlen_max_step: tuple[PositiveInt, ...] = option(
        (), roles=Role.LENGTH, needs=here.seqlen_schedule == "fixed_discrete"
    )
    """fixed_discrete: the last step, or number of tokens, of each length but the last"""

    seqlen_custom_schedule: str | None = option(None, needs=here.seqlen_schedule == "custom")
    """custom: the function from steps or tokens, counted from 1, to a length, as module:function or
    path.py:function; the same on every host"""

    _runs_code: bool = PrivateAttr(True)

    def without_code(self) -> CurriculumConfig:
        """Return the settings without the user's function: it is not run, and no sequence is cut."""
        quiet = self.model_copy()
        quiet._runs_code = False
        return quiet

    def seqlen(self, sequence_length: int) -> Pacing | None:
        """The length as a function of steps or tokens.

        None if it is always the same, or if the settings contradict each other, which rules refuse.
        """
        last = self.seqlen_max_difficulty or sequence_length
        if self.seqlen_schedule == "custom":
            pacing = self._custom(last)
            return None if isinstance(pacing, str) else pacing
        if self.seqlen_schedule == "fixed_discrete":
            return levels_of(self.seqlen_difficulty, self.seqlen_max_step)
        if self.too_many_changes(sequence_length):
            return None
        degrees = {"fixed_linear": 1.0, "fixed_root": self.seqlen_root_degree}
        return root_of(
            self.seqlen_min_difficulty,
            last,
            self.seqlen_total_curriculum_step,
            self.seqlen_difficulty_step,
            degrees.get(self.seqlen_schedule),
        )

    def too_many_changes(self, sequence_length: int) -> bool:
        """Whether the length of a ramp changes more often than `MOST_CHANGES`."""
        grown = (self.seqlen_max_difficulty or sequence_length) - (self.seqlen_min_difficulty or 1)
        ramp = self.seqlen_schedule in ("fixed_linear", "fixed_root")
        return ramp and grown // self.seqlen_difficulty_step > MOST_CHANGES

    def fault_of_custom(self, sequence_length: int) -> str | None:
        """Return a sentence on the fault of the user's function; None if it is sound, or there is none."""
        if self.seqlen_schedule != "custom":
            return None
        pacing = self._custom(self.seqlen_max_difficulty or sequence_length)
        return pacing if isinstance(pacing, str) else None

    def _custom(self, last: int) -> Pacing | str | None:
        """Make the user's pacing up to `last`, or a sentence on its fault; None without a function."""
        if self.seqlen_custom_schedule is None or not self._runs_code:
            return None
        try:
            return custom_pacing(self.seqlen_custom_schedule, last)
        except ConfigError as error:
            return str(error)
