"""The section `fim`: fill-in-the-middle (Bavarian et al. 2022). The names are Megatron-LM's."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megazero.config.condition import config, here
from megazero.config.tree.option import Section, option

_FILLS = here.fim_data.because("documents stay as they are")

Share = Annotated[float, Field(ge=0, le=1)]


class FimConfig(Section):
    """Fill-in-the-middle"""

    fim_data: bool = option(
        False,
        needs=(
            (config.model.family == "gpt").because("only a model that reads from left to right learns by it"),
            config.data.mock_data.is_off.because("random tokens have no documents"),
            config.finetune.task.is_none.because("its samples are not cut"),
        ),
    )
    """fill-in-the-middle: cut documents in three and put the middle last, behind marks (Bavarian et al.
    2022); a document keeps its length and gives its last three tokens for the marks"""
    fim_rate: Share = option(0.5, idle_without=_FILLS)
    """share of the documents that are rearranged; with --fim-split-sample, of those that are looked at"""
    fim_spm_rate: Share = option(0.5, idle_without=_FILLS)
    """of these, the share whose suffix comes before the prefix"""
    fim_split_sample: str | None = option(None, idle_without=_FILLS)
    """rearrange the fragments between these tokens instead of the whole document"""
    fim_fragment_rate: Share | None = option(None, idle_without=_FILLS)
    """share of the fragments that are rearranged; default: --fim-rate"""
    fim_no_prefix: str | None = option(None, idle_without=_FILLS)
    """leave alone what begins with this text"""
    fim_prefix_token: str = option("<fim_prefix>", idle_without=_FILLS)
    """the token before the prefix; without a tokenizer, its number"""
    fim_middle_token: str = option("<fim_middle>", idle_without=_FILLS)
    """the token before the middle"""
    fim_suffix_token: str = option("<fim_suffix>", idle_without=_FILLS)
    """the token before the suffix"""
    fim_eod_token: str | None = option(None, idle_without=_FILLS)
    """the token between documents, which stays where it is; default: the tokenizer's"""
