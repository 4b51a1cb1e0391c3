"""Megatron's `PUT /api`: the request of its text generation server and of tools/text_generation_cli.py.

Unlike there, a wrong request has the status 400 and not 200, whole numbers are taken for fractions, several
calls are served at once, and `stop_token` is the tokenizer's own end of a document unless it is given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megazero.serving.http.answering import Answering, Finished
from megazero.serving.http.body import read_body
from megazero.serving.http.fields import COMPLETIONS, Field, Refusal, integers, read
from megazero.serving.http.orders import Prompt, encode, make_orders
from megazero.serving.http.service import Service
from megazero.serving.http.shapes import Scored, echoed

_FIELDS = (
    Field("prompts", "strings", 0, 1 << 31),
    Field("tokens_to_generate", "integer", 0, 1 << 31, 64),
    Field("logprobs", "boolean", default=False),
    Field("top_n_logprobs", "integer", 0, 20, 0),
    Field("temperature", "number", 1e-9, 100, 1.0),
    Field("top_k", "integer", 0, 1000, 0),
    Field("top_p", "number", 0, 1, 0.0),
    Field("top_p_decay", "number", 0, 1, 0.0),
    Field("top_p_bound", "number", 0, 1, 0.0),
    Field("add_BOS", "boolean", default=False),
    Field("stop_on_double_eol", "boolean", default=False),
    Field("stop_on_eol", "boolean", default=False),
    Field("prevent_newline_after_colon", "boolean", default=False),
    Field("random_seed", "integer", -1, (1 << 62) - 1, -1),
    Field("stop_token", "integer", 0, 1 << 31),
    Field("length_penalty", "number", 1, 1, 1.0),
)
_ABSENT = ("max_len", "sentences", "beam_width", "top_p_decay", "top_p_bound", "prevent_newline_after_colon")
_MOST_PROMPTS = 128


async def api(service: Service, request: Request) -> Response:
    """`PUT /api`: continue prompts, and return each with its text."""
    body = await read_body(request, service.settings)
    for name in _ABSENT:
        if body.get(name) not in (None, False, 0):
            raise Refusal(f"`{name}` must be left out: this server has no such thing", name)
    values, _ = read(body, _FIELDS)
    prompts = await asyncio.to_thread(_prompts, service, values)
    logprobs = max(values["top_n_logprobs"], 0) if values["logprobs"] or values["top_n_logprobs"] else None
    new = values["tokens_to_generate"]
    if new == 0 and logprobs is None:
        raise Refusal(
            "`tokens_to_generate` must be at least 1 without `logprobs`, but is 0", "tokens_to_generate"
        )
    fields = _openai_fields(service, values)
    orders = make_orders(
        service, prompts, fields, count=1, max_tokens=new, logprobs=logprobs, prompt_logprobs=logprobs
    )
    done = await Answering(service, orders).finished(request)
    return JSONResponse(_answer(service, prompts, done, logprobs, values["top_n_logprobs"]))


def _prompts(service: Service, values: Mapping[str, Any]) -> list[Prompt]:
    given = values["prompts"] or []
    if not 0 < len(given) <= _MOST_PROMPTS:
        raise Refusal(f"`prompts` must be 1 to {_MOST_PROMPTS} strings, but are {len(given)}", "prompts")
    prompts = []
    for text in given:
        if not text and not values["add_BOS"]:
            raise Refusal(
                "`prompts` must not be empty without `add_BOS`, but one is; write a token", "prompts"
            )
        prompt = encode(service, text, special=False, param="prompts")
        special = service.texts.tokenizer.special_ids
        first = special.get("bos", service.texts.tokenizer.eod)
        if values["add_BOS"] and first is not None and prompt.ids[:1] != (first,):
            prompt = Prompt((first, *prompt.ids), prompt.text)
        prompts.append(prompt)
    return prompts


def _openai_fields(service: Service, values: Mapping[str, Any]) -> dict[str, Any]:
    """The same wishes in the words of `/v1/completions`; neither top_k nor top_p is greedy, as there."""
    if values["top_k"] and values["top_p"]:
        raise Refusal("`top_k` must be left out beside `top_p`, but both are given", "top_k")
    greedy = not values["top_k"] and not values["top_p"]
    stop = ["\n\n"] if values["stop_on_double_eol"] else ["\n"] if values["stop_on_eol"] else []
    own = values["stop_token"]
    if own is not None:
        integers({"stop_token": [own]}, "stop_token", service.texts.tokenizer.vocab_size)
    given = {
        "temperature": 0 if greedy else values["temperature"],
        "top_k": values["top_k"],
        "top_p": values["top_p"] or 1.0,
        "stop": stop or None,
        "include_stop_str_in_output": True,
        "stop_token_ids": None if own is None else [own],
        "seed": values["random_seed"] if values["random_seed"] >= 0 else None,
    }
    return read(given, COMPLETIONS)[0]


def _answer(
    service: Service, prompts: list[Prompt], done: list[Finished], logprobs: int | None, best: int
) -> dict[str, Any]:
    answer: dict[str, Any] = {"text": [], "tokens": [], "segments": [], "logprobs": [], "top_n_logprobs": []}
    scored = Scored(service.texts, best)
    for prompt, choice in zip(prompts, done, strict=True):
        text, before = echoed(service.texts, prompt.ids, choice.scores)
        shown_tokens = [*before, *choice.tokens]
        ids = [*prompt.ids, *(token.id for token in choice.tokens)]
        answer["text"].append((prompt.text or text) + choice.text)
        answer["tokens"].append(ids)
        answer["segments"].append([service.texts.name(i) for i in ids])
        # Like there, a row begins with the second token: nothing predicts the first.
        tokens = [row.token for row in shown_tokens if row.token is not None]
        answer["logprobs"].append([dict(scored.rows(token))[token.id] for token in tokens])
        named = [{service.texts.name(i): p for i, p in scored.rows(token)[:best]} for token in tokens]
        answer["top_n_logprobs"].append(named)
    answer["logprobs"] = answer["logprobs"] if logprobs is not None else None
    answer["top_n_logprobs"] = answer["top_n_logprobs"] if best else None
    return answer
