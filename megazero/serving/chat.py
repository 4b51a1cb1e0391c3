"""Chats as tokens, by the chat template that came with the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megazero.data.conversations.answers import load_for_templates
from megazero.data.tokenizers.base import is_failure
from megazero.errors import DataError
from megazero.regular_file import read_regular

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ChatTemplate:
    """The chat template of a tokenizer, which transformers runs in jinja's sandbox.

    Args:
        folder: the tokenizer's folder, or its tokenizer.json.
        chosen: a file with another template; None for the tokenizer's.
    """

    def __init__(self, folder: str, chosen: str | None = None):
        self._folder = folder
        try:
            self._chosen = None if chosen is None else read_regular(Path(chosen)).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"`--chat-template` must be text, but {chosen} is not ({error}).") from error

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        return load_for_templates(self._folder)

    def ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        variables: Mapping[str, Any],
        prompt: bool = True,
        resume: bool = False,
        special: bool = False,
    ) -> list[int]:
        """The tokens of a chat; special tokens are those that the template writes.

        Args:
            messages: the turns.
            template: a template to use instead.
            variables: what else the template is given.
            prompt: begin the assistant's turn.
            resume: leave the last message open instead, to be continued.
            special: let the tokenizer add its special tokens; a first one is not doubled.

        Raises:
            DataError: there is no template, or it refuses the messages.
        """
        template = template or self._chosen
        if template is None and not self._tokenizer.chat_template:
            raise DataError(
                f"the tokenizer {self._folder} must have a chat template to answer chats, but has none; give "
                "one as `--chat-template`, or put it beside the tokenizer as chat_template.jinja"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                **{**variables, **({} if template is None else {"chat_template": template})},
                tokenize=False,
                add_generation_prompt=prompt,
                continue_final_message=resume,
            )
            ids: list[int] = self._tokenizer.encode(str(text), add_special_tokens=special)
        except BaseException as error:
            if not is_failure(error):
                raise
            why = str(error)[:200] or type(error).__name__
            raise DataError(f"the chat template must accept the messages, but refuses them: {why}") from error
        begin = self._tokenizer.bos_token_id
        return ids[1:] if ids[:2] == [begin, begin] else ids
