"""From a request's fields to what the engine is asked for."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megazero.errors import DataError, MegazeroError
from megazero.inference.sampling import Sampling
from megazero.serving.http.fields import Refusal, integers, shown
from megazero.serving.http.service import Service
from megazero.serving.text import StopRule
from megazero.serving.wanted import Penalties, Wanted

_MOST_STOPS = 64


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, and its text if it was one."""

    ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True)
class Order:
    """One choice: what the engine is asked for, and how its tokens become a text."""

    prompt: Prompt
    wanted: Wanted
    rule: StopRule
    skip_special: bool


def read_prompts(service: Service, given: object, *, special: bool = True) -> list[Prompt]:
    """The prompts of a field: a string, strings, ids, or lists of ids; an empty one begins a new document.

    Args:
        special: put the tokens before a text that the model's prompts begin with.

    Raises:
        Refusal: it is something else.
    """
    rows = given if isinstance(given, list) and given and isinstance(given[0], (str, list)) else [given]
    prompts = []
    for row in rows:
        if isinstance(row, str):
            prompts.append(encode(service, row, special=special))
        elif isinstance(row, list):
            ids = integers({"prompt": row}, "prompt", service.texts.tokenizer.vocab_size)
            prompts.append(_begun(service, Prompt(tuple(ids))))
        else:
            kinds = "a string, a list of strings, a list of token ids, or a list of such lists"
            raise Refusal(f"`prompt` must be {kinds}, but is {shown(given)}", "prompt")
    return prompts


def encode(service: Service, text: str, *, special: bool = True, param: str = "prompt") -> Prompt:
    """A text as a prompt. Raises Refusal if it has no tokens."""
    try:
        ids = tuple(service.texts.tokenizer.encode(text))
    except DataError as error:
        raise Refusal(f"`{param}` must be text for this tokenizer, but {error}", param) from error
    first = service.first_ids if special and ids[: len(service.first_ids)] != service.first_ids else ()
    return _begun(service, Prompt((*first, *ids), text), param)


def _begun(service: Service, prompt: Prompt, param: str = "prompt") -> Prompt:
    if prompt.ids:
        return prompt
    if service.texts.tokenizer.eod is None:
        raise Refusal(f"`{param}` must have a token, but is empty; write at least one", param)
    return Prompt((service.texts.tokenizer.eod,), prompt.text)


def make_orders(
    service: Service,
    prompts: Sequence[Prompt],
    values: Mapping[str, Any],
    *,
    count: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> list[Order]:
    """The orders of a request, those of a prompt behind each other.

    Args:
        values: the request's fields, as `fields.read` gives them.
        count: choices of each prompt.
        max_tokens: the most tokens of a choice; None for all that fit.
        logprobs, prompt_logprobs: as in `Wanted`.

    Raises:
        Refusal: a value does not fit this model, or a prompt is too long.
    """
    limits, vocabulary = service.engine.limits, service.texts.tokenizer.vocab_size
    if len(values["stop"]) > _MOST_STOPS:
        raise Refusal(f"`stop` must be at most {_MOST_STOPS} strings, but is {len(values['stop'])}", "stop")
    if len(prompts) * count > limits.max_waiting + limits.max_running:
        raise Refusal(f"a request must have fewer choices, but asks for {len(prompts) * count} at once", "n")
    stops = integers(values, "stop_token_ids", vocabulary)
    end = frozenset(stops) | (frozenset() if values["ignore_eos"] else service.end_ids)
    sampling = read_sampling(values, vocabulary)
    penalties = Penalties(
        repetition=float(values["repetition_penalty"]),
        frequency=float(values["frequency_penalty"]),
        presence=float(values["presence_penalty"]),
        logit_bias=_biases(values["logit_bias"], vocabulary),
    )
    rule = StopRule(tuple(values["stop"]), values["include_stop_str_in_output"], values["min_tokens"])
    orders: list[Order] = []
    for prompt in prompts:
        most = fitting(service, prompt, max_tokens)
        for _ in range(count):
            wanted = Wanted(
                prompt=prompt.ids,
                max_tokens=most,
                sampling=sampling,
                number=len(orders),
                stop_ids=end,
                min_tokens=min(values["min_tokens"], most),
                penalties=penalties,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                salt=values["cache_salt"],
            )
            orders.append(Order(prompt, wanted, rule, values["skip_special_tokens"]))
    return orders


def fitting(service: Service, prompt: Prompt, max_tokens: int | None) -> int:
    """The most tokens of a choice. Raises Refusal if the prompt and they are longer than the context."""
    limits, size = service.engine.limits, len(prompt.ids)
    longest = min(limits.max_length, limits.pages * limits.page)
    new = max(1, longest - size) if max_tokens is None else max_tokens
    if size + new > longest:
        raise Refusal(
            f"the prompt and `max_tokens` must be at most {longest} tokens together, but the prompt has "
            f"{size} and `max_tokens` is {new}; shorten one of them",
            "max_tokens" if size < longest else "prompt",
            code="context_length_exceeded",
        )
    return new


def read_sampling(values: Mapping[str, Any], vocabulary: int) -> Sampling:
    """How tokens are drawn: at temperature 0 the likeliest, without a seed by a new one.

    Raises Refusal if a value is out of range.
    """
    seed = values["seed"]
    try:
        return Sampling(
            temperature=float(values["temperature"]) or 1.0,
            top_k=max(0, values["top_k"]),
            top_p=float(values["top_p"]),
            min_p=float(values["min_p"]),
            greedy=values["temperature"] == 0,
            seed=secrets.randbits(62) if seed is None else seed,
            vocab_size=vocabulary,
        )
    except MegazeroError as error:
        raise Refusal(str(error)) from error


def _biases(given: Mapping[str, Any], vocabulary: int) -> dict[int, float]:
    biases = {}
    for name, value in given.items():
        known = name.isascii() and name.isdigit() and len(name) < 12 and int(name) < vocabulary
        if (
            not known
            or isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not abs(value) <= 100
        ):
            raise Refusal(
                f"`logit_bias` must map ids from 0 to {vocabulary - 1} to numbers from -100 to 100, but maps "
                f"{shown(name)} to {shown(value)}",
                "logit_bias",
            )
        biases[int(name)] = float(value)
    return biases
