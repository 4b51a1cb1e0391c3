"""`HarnessArguments`: the keys of `--model_args`, those of the harness's own `megatron_lm` model and ours."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from megazero.config.compat.foreign import FOREIGN_FLAGS
from megazero.errors import ConfigError

# What the harness passes to each model, and what a line may have: rows are packed, the device is the job's.
_PASSED = ("batch_size", "max_batch_size", "device")
_OTHER_NAMES = MappingProxyType({"pretrained": "load", "max_length": "seq_length"})


class HarnessArguments(BaseModel):
    """How to load a model and to score with it.

    Attributes:
        load: a run's folder, or one of Hugging Face or Megatron.
        ckpt_step: the iteration to load; None for the newest.
        tokenizer_type, tokenizer_model, vocab_file, merge_file: the tokenizer, where the folder has none.
        devices: the number of ranks; None for those that were started.
        tensor_model_parallel_size, pipeline_model_parallel_size: None for those of the training.
        context_parallel_size, expert_model_parallel_size: the other sizes.
        seq_length: the most tokens that the model reads at once; None for its positions.
        micro_batch_size: sequences of that length that fit a row of packed ones; None for a row of 2,048.
        max_gen_toks: the most tokens of an answer, where a task does not say.
        use_dist_ckpt: accepted; the form of a checkpoint is known by its files.
        extra_args: further flags, as on a command line.
        trust_pickle: whether files of Megatron may be read, which are pickles.
        vocab_size: entries of a Megatron checkpoint's vocabulary.
        add_bos_token: whether texts begin with a special token; None for as the tokenizer says.
        seed: seed of what is drawn.
        kv_cache_dtype: how keys and values are kept where texts are generated: ``auto`` or ``int8``. Scores
            keep none.
    """

    model_config = ConfigDict(frozen=True)

    load: str
    ckpt_step: int | None = None
    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    devices: int | None = None
    tensor_model_parallel_size: int | None = None
    pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    seq_length: int | None = None
    micro_batch_size: int | None = None
    max_gen_toks: int = 256
    use_dist_ckpt: bool | None = None
    extra_args: str | None = None
    trust_pickle: bool = False
    vocab_size: int | None = None
    add_bos_token: bool | None = None
    seed: int = 0
    kv_cache_dtype: Literal["auto", "int8"] = "auto"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> HarnessArguments:
        """The arguments in a mapping, with the flags in `extra_args`.

        Raises ConfigError if a key is unknown, a value has a wrong type, or `load` is missing.
        """
        values = {_OTHER_NAMES.get(key, key): value for key, value in given.items() if key not in _PASSED}
        known = list(cls.model_fields)
        if unknown := [key for key in values if key not in known]:
            near = difflib.get_close_matches(unknown[0], known, n=1)
            remedy = f"did you mean `{near[0]}`?" if near else f"choose among {', '.join(known)}"
            raise ConfigError(f"`--model_args` must have known keys, but has `{unknown[0]}`; {remedy}")
        if not values.get("load"):
            raise ConfigError("`--model_args` must name the model's folder, but does not; write load=FOLDER")
        try:
            made = cls.model_validate({**values, "load": str(values["load"])})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ConfigError(
                f"`{first['loc'][0]}` in `--model_args` must be of its kind, but is {first['input']!r:.60}: "
                f"{first['msg']}; correct it"
            ) from None
        return made if made.extra_args is None else made._with(made.extra_args)

    def _with(self, line: str) -> HarnessArguments:
        """The arguments with those of a line of flags; those that need no effect here are left out."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise ConfigError(f"`extra_args` must be flags, but is {line!r:.80} ({error})") from None
        added: dict[str, Any] = {}
        while words:
            name, equals, value = words.pop(0).partition("=")
            key = name.removeprefix("--").replace("-", "_")
            taken = [value] if equals else []
            while not equals and words and not words[0].startswith("--"):
                taken.append(words.pop(0))
            if key in vars(self) and key not in ("extra_args", "load"):
                added[key] = taken[0] if taken else True
            elif not name.startswith("--") or getattr(FOREIGN_FLAGS.get(name), "accepted", None) is None:
                raise ConfigError(
                    f"`extra_args` must have keys of `--model_args` as flags, but has {name}; leave it "
                    "out, as the checkpoint says what its model is"
                )
        return HarnessArguments.of({**vars(self), "extra_args": None, **added})
