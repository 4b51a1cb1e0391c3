"""The command `megazero serve`: answer requests over HTTP with a trained model, on one rank or several."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megazero.commands.generate import as_staged
from megazero.errors import ConfigError, exit_status
from megazero.inference.job import add_cache, add_sizes, loaded_model
from megazero.inference.staged import StagedModel
from megazero.models.language_model import LanguageModel
from megazero.mpu.launch import Launch
from megazero.serving.engine import Engine, EngineLimits
from megazero.serving.http.run import bound, first_signal_ignored, require_http, serve

if TYPE_CHECKING:
    from megazero.serving.http.service import HttpSettings

_KEY = "MEGAZERO_API_KEY"
_LEVELS = ("debug", "info", "warning", "error")


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the flags, which have the names of vLLM's."""
    parser = argparse.ArgumentParser(
        prog="megazero serve",
        description="Answer OpenAI's, Megatron's and MII's requests with a trained model.",
    )
    parser.add_argument("load", metavar="FOLDER", help="a checkpoint, or one of Hugging Face or Megatron")
    add_sizes(parser)
    where = parser.add_argument_group("where, and who may ask")
    where.add_argument("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1)")
    where.add_argument("--port", type=int, default=8000, help="port there (default 8000; 0: a free one)")
    where.add_argument("--api-key", help=f"token that requests must bring (default: the variable {_KEY})")
    names = "names of the model (default: the folder's)"
    where.add_argument("--served-model-name", nargs="+", metavar="NAME", help=names)
    where.add_argument("--max-body-mb", type=float, default=8.0, help="megabytes of a request (default 8)")
    where.add_argument("--log-level", choices=_LEVELS, default="info", help="what is logged (default info)")
    silence = "/health fails if a rank has not answered for so long (default 15)"
    where.add_argument("--health-timeout", type=float, default=15.0, metavar="SECONDS", help=silence)
    what = parser.add_argument_group("how much at once")
    what.add_argument("--max-model-len", type=int, help="tokens of a request (default: its positions)")
    memory = what.add_mutually_exclusive_group()
    memory.add_argument("--kv-pages", type=int, help="pages of keys and values")
    memory.add_argument(
        "--kv-cache-memory", type=float, metavar="GIB", help="or the GiB of a rank that they may take (0.5)"
    )
    add_cache(what)
    what.add_argument("--page-size", type=int, default=32, help="positions of a page (default 32)")
    what.add_argument("--max-num-seqs", type=int, default=64, help="requests in a step (default 64)")
    what.add_argument(
        "--max-num-batched-tokens", type=int, default=512, help="tokens in a step (default 512)"
    )
    what.add_argument("--max-queue", type=int, default=1024, help="requests that may wait (default 1024)")
    what.add_argument(
        "--batch-invariant",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a request's numbers do not depend on those beside it, to the last bit (default on, on a CPU)",
    )
    parser.add_argument("--chat-template", metavar="FILE", help="a chat template instead of the tokenizer's")
    parser.add_argument("--mii-deployment", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command with its flags; returns the exit status."""
    flags = build_parser().parse_args(argv)
    return exit_status(lambda: _run(flags))


def _run(flags: argparse.Namespace) -> None:
    require_http()
    from megazero.serving.http.app import make_app
    from megazero.serving.http.service import make_service

    if flags.mii_deployment is not None and flags.host not in ("127.0.0.1", "localhost"):
        raise ConfigError(f"`--host` must be this machine's own for MII's door, but is {flags.host}")
    settings, launch = _settings(flags), Launch.from_environment()
    listening = bound(flags.host, flags.port) if launch.rank == 0 else None
    logging.basicConfig(format="%(asctime)s %(message)s", level=flags.log_level.upper(), stream=sys.stderr)
    with loaded_model(flags, launch, "generate", as_staged) as (loaded, model):
        if not isinstance(model.any_part, LanguageModel):
            raise ConfigError("`FOLDER` must hold a model that continues texts, but holds a T5; serve a GPT")
        if flags.batch_invariant and model.device.type == "cpu":
            from megazero.inference.invariant import make_invariant

            make_invariant(model)
        engine = Engine(model, _limits(flags, model))
        if listening is None:
            with first_signal_ignored():
                engine.run()
            return
        service = make_service(flags.load, loaded.tokenizer, engine, settings, flags.chat_template)

        def end() -> None:
            service.draining = True

        app = make_app(service, None if flags.mii_deployment is None else end)
        serve(app, service, engine, listening, flags.log_level)


def _settings(flags: argparse.Namespace) -> HttpSettings:
    from megazero.serving.http.service import HttpSettings

    key = flags.api_key or os.environ.get(_KEY) or None
    if key is not None and not key.isascii():
        raise ConfigError("`--api-key` must be ASCII, as headers are, but is not; choose another")
    names = tuple(flags.served_model_name or [Path(flags.load).resolve().name or "megazero"])
    if flags.mii_deployment is not None:
        names = (flags.mii_deployment, *names)
    return HttpSettings(names, key, int(flags.max_body_mb * 1e6), flags.health_timeout)


def _limits(flags: argparse.Namespace, model: StagedModel[Any]) -> EngineLimits:
    """The engine's limits. Raises ConfigError if a flag is out of range."""
    memory = {} if flags.kv_cache_memory is None else {"memory": int(flags.kv_cache_memory * (1 << 30))}
    limits = EngineLimits.of(model, max_length=flags.max_model_len, page=max(1, flags.page_size), **memory)
    return replace(
        limits,
        pages=limits.pages if flags.kv_pages is None else flags.kv_pages,
        tokens_per_step=flags.max_num_batched_tokens,
        max_running=flags.max_num_seqs,
        max_waiting=flags.max_queue,
    )
