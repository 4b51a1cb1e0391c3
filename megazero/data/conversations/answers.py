"""Conversations as token ids, and the mask of the answers among them.

Answers are what the chat template marks by `{% generation %}`. A template without such blocks is rendered
turn by turn: an answer is what a turn of the assistant adds to the header that asks for it, up to the special
token that ends it (and not the whitespace behind that). So each rendering must begin with the one before,
which is checked. Templates are run by transformers, in the sandbox of jinja.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megazero.config.compat.hub import fetched
from megazero.data.conversations.rows import BadRow, Conversation
from megazero.data.tokenizers.base import is_failure
from megazero.data.tokenizers.library import load_tokenizer_json
from megazero.errors import DataError
from megazero.regular_file import read_regular

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ConversationEncoder:
    """Turns conversations into tokens.

    model: a tokenizer.json, its folder, or a name on the hub; chosen: the file of a template to use instead
    of the tokenizer's; allow_special: whether the text of a message may name special tokens, and then means
    them. Raises DataError if one of the files is missing or unsuitable, or without transformers.
    """

    def __init__(self, model: str, chosen: str | None = None, *, allow_special: bool = False):
        self.vocab_size = load_tokenizer_json(model, "HFTokenizer").vocab_size
        self._tokenizer, self._where = load_for_templates(model), chosen or model
        if chosen is not None:
            try:
                self._tokenizer.chat_template = read_regular(Path(chosen)).decode("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"`--chat-template` must be text, but {chosen} is not ({error}).") from error
        self._special = {i: t.content for i, t in self._tokenizer.added_tokens_decoder.items() if t.special}
        self._allow_special = allow_special

    def encode(self, row: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """The token ids of a conversation, int64 [n], and which count in the loss as labels, bool [n].

        Raises BadRow if the template refuses it, DataError if there is no usable template.
        """
        end = self._tokenizer.eos_token
        if row.texts is None:
            tokens, mask = self._answered(row)
        elif end is None:
            raise DataError(f"`eos_token` of {self._where} must be set to end plain completions, but is not.")
        else:
            text = f"{row.texts[0]}{row.texts[1]}{end}"
            tokens = self._tokenizer(text, return_offsets_mapping=True)
            mask = _within(np.array(tokens["offset_mapping"]), len(row.texts[0]), len(text))
        ids = np.array(tokens["input_ids"], dtype=np.int64)
        if ids.size and int(ids.max()) >= self.vocab_size:
            raise DataError(f"`{self._where}` must have its tokens in tokenizer.json, but lacks {ids.max()}.")
        if not self._allow_special:
            said = json.dumps([row.messages, row.texts, row.variables], ensure_ascii=False)
            if forged := [i for i in set(ids.tolist()) & self._special.keys() if self._special[i] in said]:
                raise BadRow(f"its text names {self._special[forged[0]]} (see `--allow-special-tokens`)")
        mask[:1] = False  # the first token is nobody's label
        return ids, mask

    def _answered(self, row: Conversation) -> tuple[Any, np.ndarray]:
        try:
            template = self._tokenizer.get_chat_template(tools=row.variables["tools"])
            marks = _MARK.search(template) is not None
        except (ValueError, TypeError) as error:
            raise DataError(
                f"the tokenizer {self._where} must come with a chat template, in chat_template.jinja or in "
                "tokenizer_config.json, but has none that can be used; give one with `--chat-template FILE`."
            ) from error
        wanted: dict[str, Any] = {"return_dict": True, "return_assistant_tokens_mask": marks}
        tokens = self._apply(row, None, **wanted, tokenizer_kwargs={"return_offsets_mapping": True})
        mask = np.array(tokens["assistant_masks"] if marks else [0] * len(tokens["input_ids"]), dtype=bool)
        offsets = np.array(tokens["offset_mapping"]).reshape(-1, 2)
        # Until version 5.24, transformers counts the first token alone of a block's last character.
        goes_on = (offsets[1:] == offsets[:-1]).all(axis=1) & (offsets[1:, 0] < offsets[1:, 1])
        while (more := goes_on & mask[:-1] & ~mask[1:]).any():
            mask[1:] |= more
        # Blocks that do not count, or answers that no block marks.
        if turns := [turn for turn, counts in row.answers.items() if counts != marks]:
            whole = self._apply(row, None, tokenize=False)
            for turn in turns:
                mask[_within(offsets, *self._place(row, turn, whole))] = not marks
        return tokens, mask

    def _place(self, row: Conversation, turn: int, whole: str) -> tuple[int, int]:
        """Where the answer of a turn is in the whole text, by the prefix rule."""
        head = self._apply(row, turn, tokenize=False, add_generation_prompt=True)
        through = self._apply(row, turn + 1, tokenize=False)
        if not (through.startswith(head) and whole.startswith(through)):
            raise BadRow(
                f"the template renders message {turn + 1} in another way once others follow, so its answer "
                "cannot be told apart; give a template with {% generation %} blocks"
            )
        bare = through[len(head) :].rstrip()
        ended = bare.endswith(tuple(self._special.values()))
        return len(head), len(head) + len(bare) if ended else len(through)

    def _apply(self, row: Conversation, turns: int | None, **options: Any) -> Any:
        """The first turns, rendered."""
        try:
            return self._tokenizer.apply_chat_template(row.messages[:turns], **row.variables, **options)
        except BaseException as error:
            if not is_failure(error):
                raise
            if type(error).__name__ in ("TemplateSyntaxError", "TemplateAssertionError"):
                raise DataError(f"the chat template of {self._where} must be jinja ({error}).") from error
            raise BadRow(f"the template refuses it: {str(error)[:200] or type(error).__name__}") from error


def load_for_templates(model: str) -> PreTrainedTokenizerFast:
    """Load a tokenizer with its chat template by transformers: a tokenizer.json, its folder, a hub's name.

    Raises DataError without transformers, or if the files do not suit it.
    """
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise DataError(
            "`transformers` must be installed to apply chat templates, but is not; pip install transformers."
        ) from error
    path = Path(fetched(model) or model)
    options: dict[str, Any] = {"local_files_only": True, "model_max_length": 1 << 62}
    try:
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            path if path.is_dir() else path.parent, **options
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"`tokenizer_model` must suit transformers, but {model} does not ({error})."
        ) from error
    return tokenizer


def _within(offsets: np.ndarray, start: int, end: int) -> np.ndarray:
    """Which tokens have characters in start..end: bool [n]; offsets: those of each token, int64 [n, 2]."""
    begins, ends = offsets.reshape(-1, 2).T
    # Some tokenizers leave whitespace out of offsets, so that a token of whitespace begins where it ends.
    begins = np.where(begins == ends, np.concatenate([[0], ends])[: ends.size], begins)
    inside: np.ndarray = (begins < end) & (ends > start)
    return inside
