"""DeepSpeed-MII's REST: `POST /mii/NAME`, `GET /healthz`, `POST /terminate`, by its keywords."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megazero.serving.http.answering import Finished
from megazero.serving.http.fields import COMPLETIONS, Field, Refusal, read
from megazero.serving.http.orders import Order, Prompt, fitting, make_orders, read_prompts
from megazero.serving.http.service import Service

KEYWORDS = (
    Field("prompts", "strings", 0, 1 << 31),
    Field("max_length", "integer", 1, 1 << 31, 1024),
    Field("max_new_tokens", "integer", 1, 1 << 31),
    Field("min_new_tokens", "integer", 0, 1 << 31, 0),
    Field("stream", "boolean", default=False),
    Field("ignore_eos", "boolean", default=False),
    Field("return_full_text", "boolean", default=False),
    Field("do_sample", "boolean", default=True),
    Field("top_p", "number", 1e-9, 1, 0.9),
    Field("top_k", "integer", 1, 1 << 31),
    Field("temperature", "number", 1e-9, 100),
    Field("stop", "strings", 1, 1024, []),
    Field("seed", "integer", -(1 << 63), (1 << 63) - 1),
)


def mii_orders(service: Service, body: Mapping[str, Any]) -> tuple[list[Order], dict[str, Any]]:
    """The orders of a request and its keywords. Raises Refusal if they are wrong, or it asks for a stream."""
    values, _ = read(body, KEYWORDS)
    if values["stream"]:
        raise Refusal(
            "`stream` must be false: MII's REST sends whole texts; /v1/completions streams", "stream"
        )
    prompts = read_prompts(service, values["prompts"] or [""])
    fields = read(
        {
            "temperature": (values["temperature"] or 1.0) if values["do_sample"] else 0,
            "top_p": values["top_p"],
            "top_k": values["top_k"],
            "stop": values["stop"] or None,
            "ignore_eos": values["ignore_eos"],
            "min_tokens": values["min_new_tokens"],
            "seed": values["seed"],
        },
        COMPLETIONS,
    )[0]
    orders: list[Order] = []
    for prompt in prompts:
        new = values["max_new_tokens"]
        if new is None:
            longest = min(values["max_length"], service.engine.limits.max_length)
            new = fitting(service, prompt, max(1, longest - len(prompt.ids)))
        orders += make_orders(service, [prompt], fields, count=1, max_tokens=new, logprobs=None)
    return orders, values


def mii_answer(prompts: Sequence[Prompt], done: Sequence[Finished], full: bool) -> list[dict[str, Any]]:
    """MII's responses."""
    return [
        {
            "generated_text": (prompt.text or "" if full else "") + choice.text,
            "prompt_length": len(prompt.ids),
            "generated_length": choice.count,
            "finish_reason": choice.reason,
        }
        for prompt, choice in zip(prompts, done, strict=True)
    ]
