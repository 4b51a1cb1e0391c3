"""Models as lm-evaluation-harness calls them: `HarnessModel` of any model, `MegazeroLM` of a folder.

This module needs lm_eval; nothing else here does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry

from megazero.errors import CommunicationError, ConfigError
from megazero.harness.answers import Continued, Leading
from megazero.harness.arguments import HarnessArguments
from megazero.harness.loading import Job
from megazero.harness.scoring import rolling
from megazero.mpu.grid import layout_words

_LOG = logging.getLogger(__name__)
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_DRAWN = ("temperature", "top_k", "top_p", "min_p")
_SILENT = ("do_sample", "until", "repetition_penalty", "num_beams", "use_cache", "pad_token_id", "seed")


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A model on the first rank of a job, with all its other ranks behind it.

    Args:
        answers: the job's answers.
        max_gen_toks: the most tokens of an answer, where a task does not say.
        seed: seed of what is drawn.
        name: the model's name in results.
    """

    def __init__(self, answers: Leading, *, max_gen_toks: int = 256, seed: int = 0, name: str = "megazero"):
        super().__init__()
        self.answers, self.max_gen_toks, self.seed, self.name = answers, max_gen_toks, seed, name
        self.text = answers.tokenizer

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self.text.end

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        return self.text.prefix

    @property
    def max_length(self) -> int:
        """The most tokens that the model reads at once."""
        return self.answers.max_length

    @property
    def tokenizer_name(self) -> str:
        """The name by which requests are cached."""
        return self.text.name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The tokenizer's chat template; "" if none is to be applied."""
        template = getattr(self.text.library, "chat_template", None)
        return str(template) if chat_template and template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A chat as a text; the last message is left open unless the next answer is to begin."""
        return self.text.chat(chat_history, answer=add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text (see `HarnessTokenizer.encode`)."""
        return self.text.encode(string, add_special_tokens)

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        return self.text.decode(tokens, special=not skip_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]], **others: Any
    ) -> list[tuple[float, bool]]:
        scores = self.answers.score([(context, continuation) for _, context, continuation in requests])
        for (args, _, _), score in zip(requests, scores, strict=True):
            if args is not None:
                self.cache_hook.add_partial("loglikelihood", args, tuple(score))
        return [(score.logprob, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, in windows that score each token once."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        sums = rolling(self.answers.score, texts, self.prefix_token_id, self.max_length)
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context up to the first of its stop strings, which the text does not have.

        Raises:
            ConfigError: the options of a task are unknown, or leave no room for its context.
        """
        texts = self.answers.texts([self._continued(*request.args) for request in requests])
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _continued(self, context: str, options: Mapping[str, Any]) -> Continued:
        unknown = [key for key in options if key not in (*_LENGTHS, *_DRAWN, *_SILENT)]
        unknown += ["num_beams"] * (options.get("num_beams", 1) != 1)
        if unknown:
            raise ConfigError(
                f"`{unknown[0]}` in the task's generation_kwargs must be left out, as it is not offered; "
                "change the task, or give others by `--gen_kwargs`"
            )
        said = [options[key] for key in _LENGTHS if options.get(key) is not None]
        most = int(said[0]) if said else self.max_gen_toks
        room = self.max_length - most
        if room < 1:
            raise ConfigError(
                f"`max_gen_toks` must be less than the {self.max_length} tokens that the model reads, but is "
                f"{most}; set less by `--gen_kwargs max_gen_toks=N`"
            )
        until, prompt = options.get("until") or [], self.tok_encode(context) or [self.prefix_token_id]
        drawn: dict[str, Any] = {key: options[key] for key in _DRAWN if options.get(key) is not None}
        temperature = float(drawn.get("temperature", 1.0 if options.get("do_sample") else 0.0))
        if not options.get("do_sample", temperature > 0) or temperature == 0:
            drawn = {"greedy": True}
        return Continued(
            prompt[-room:],
            most,
            [until] if isinstance(until, str) else list(until),
            {**drawn, "seed": self.seed},
            float(options.get("repetition_penalty", 1.0)),
        )

    def get_model_info(self) -> dict[str, Any]:
        """Facts about the model, for results."""
        model = self.answers.answers.scorer.model
        return {"model_name": self.name, "model_dtype": str(model.placement.dtype)}


class MegazeroLM(HarnessModel):
    """The model ``megazero`` of the harness: a checkpoint or a folder, on the ranks that were started.

    On all ranks but the first, the constructor computes what the first rank asks for until it has finished,
    and then ends the process by SystemExit.

    Raises:
        MegazeroError: an argument is unknown or wrong, or the model cannot be loaded.
    """

    def __init__(self, **given: Any):
        arguments = HarnessArguments.of(given)
        self.job = Job.of(arguments)
        if not self.job.leads:
            raise SystemExit(1 if self.job.followed() else 0)
        answers = Leading(self.job.answers)
        super().__init__(
            answers, max_gen_toks=arguments.max_gen_toks, seed=arguments.seed, name=arguments.load
        )
        _LOG.info("%s on %s", arguments.load, layout_words(self.job.context.grid))

    def close(self, problem: str = "") -> None:
        """Let the other ranks end, as failed ones if there is a problem, and leave the job."""
        self.answers.close(problem)
        self.job.leave()


def harness_model(**given: Any) -> MegazeroLM | None:
    """Load a model for the harness's `simple_evaluate`, on each of the ranks that were started.

    On the first rank this is the model, which must be closed. On the others the call returns None when the
    first has closed it.

    Args:
        given: the keys of `--model_args`, see `HarnessArguments`.

    Raises:
        MegazeroError: see `MegazeroLM`; or the first rank failed.
    """
    try:
        return MegazeroLM(**given)
    except SystemExit as ended:
        if ended.code:
            raise CommunicationError("the first rank failed; see what it says") from None
        return None


class NotedLM(MegazeroLM):
    """A `MegazeroLM` that the harness makes by its name; `made` lists them, so that a command closes them."""

    made: ClassVar[list[MegazeroLM]]

    def __init__(self, **given: Any):
        super().__init__(**given)
        self.made.append(self)


def register() -> list[MegazeroLM]:
    """Register the model ``megazero`` with the harness; return the list of those that it will make."""
    if "megazero" not in model_registry:
        model_registry.register("megazero", target=NotedLM)
    NotedLM.made = []
    return NotedLM.made
