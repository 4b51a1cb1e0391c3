"""Tokenizers as lm-evaluation-harness uses them: with special tokens in texts, and chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megazero.data.conversations.answers import load_for_templates
from megazero.data.tokenizers.base import Tokenizer
from megazero.data.tokenizers.library import LibraryTokenizer
from megazero.errors import DataError


class HarnessTokenizer:
    """A model's tokenizer.

    Where it is a tokenizer.json, transformers encodes texts: then special tokens may be written in them, and
    one is added at the beginning where the tokenizer says so. Other kinds have neither.

    Args:
        tokenizer: the tokenizer that the model was trained with.
        add_bos: whether texts begin with a special token; None for what the tokenizer says.

    Raises:
        DataError: a special token is to be added to a tokenizer without one.
    """

    def __init__(self, tokenizer: Tokenizer, add_bos: bool | None = None):
        self.plain, self.add_bos = tokenizer, add_bos
        source = tokenizer.source if isinstance(tokenizer, LibraryTokenizer) else None
        self.library: Any = None
        if source is not None and source.name.endswith(".json") and source.name != "vocab.json":
            self.library = load_for_templates(str(source))
        self.bos = tokenizer.special_ids.get("bos")
        if add_bos and self.library is None and self.bos is None:
            raise DataError(
                f"`add_bos_token` must be off for this {tokenizer.name}, which has no such token, but is on"
            )
        self._special = {*tokenizer.special_ids.values(), tokenizer.eod}

    @property
    def end(self) -> int:
        """The token that ends a document. Raises DataError without one."""
        if self.plain.eod is None:
            raise DataError(
                f"the tokenizer must have an end of documents to be scored with, but this {self.plain.name} "
                "has none; name it as `eos_token` in tokenizer_config.json"
            )
        return self.plain.eod

    @property
    def prefix(self) -> int:
        """The token before texts without a context: that of the beginning if there is one, else `end`."""
        if self.library is not None and self.library.bos_token_id is not None:
            return int(self.library.bos_token_id)
        return self.end if self.bos is None else self.bos

    @property
    def name(self) -> str:
        """A name by which built requests are cached."""
        source = self.plain.source if isinstance(self.plain, LibraryTokenizer) else self.plain.name
        return f"{self.plain.name}__{source}".replace("/", "__")

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """The ids of a text.

        Args:
            special: whether special tokens are added; None for as `add_bos`, unless the text begins with one.
        """
        if special is None and text.startswith(self.decode([self.prefix], special=True)):
            special = False
        if special is None:
            special = self.add_bos
        if self.library is None:
            before = [self.bos] if special and self.bos is not None else []
            return [*before, *self.plain.encode(text)]
        options = {} if special is None else {"add_special_tokens": special}
        ids: list[int] = self.library.encode(text, **options)
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ids; `special`: with special tokens by name."""
        if self.library is not None:
            return str(self.library.decode(ids, skip_special_tokens=not special))
        return self.plain.decode(ids if special else [i for i in ids if i not in self._special])

    def chat(self, history: list[dict[str, str]], *, answer: bool) -> str:
        """A chat as a text, by the tokenizer's template; `answer`: with the beginning of the next answer.

        Raises DataError if there is no template.
        """
        if self.library is None or not self.library.chat_template:
            raise DataError(
                f"the tokenizer must have a chat template for `--apply_chat_template`, but this {self.name} "
                "has none; leave the flag out, or add chat_template.jinja beside it"
            )
        return str(
            self.library.apply_chat_template(
                history, tokenize=False, add_generation_prompt=answer, continue_final_message=not answer
            )
        )
