"""The secret that nodes share which are not reached over ssh: its file, and proofs that do not reveal it."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from megazero.errors import ConfigError
from megazero.launch.job import MARK

SECRET = f"{MARK}_SECRET"
"""The environment variable that holds the secret; it is not sent to hosts, and ranks do not get it."""
_LEAST = 16  # characters
_MOST = 4096  # bytes that are read


def secret_file() -> Path:
    """The file with the secret, if the variable is not set; nodes often share the home folder."""
    return Path.home() / ".megazero" / "launch_secret"


def made_secret(variables: Mapping[str, str]) -> tuple[bytes, bool]:
    """The secret on node 0, and whether its file was made now.

    Raises:
        ConfigError: the secret is too short, or its file cannot be read or made, or is accessible to others.
    """
    known = known_secret(variables)
    if known is not None:
        return known, False
    path, made = secret_file(), secrets.token_hex(32)
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(f"{made}\n")
            os.link(beside, path)  # whole, and never replaces the file of another launch
        finally:
            beside.unlink()
    except FileExistsError:
        return made_secret(variables)
    except OSError as error:
        raise ConfigError(
            f"`{path}` must take the launch's secret, but cannot be written ({error.strerror}); set {SECRET} "
            "to the same value on all nodes"
        ) from error
    return made.encode(), True


def known_secret(variables: Mapping[str, str]) -> bytes | None:
    """The secret in the variable, else in the file; None if there is neither.

    Raises ConfigError if the secret is too short, the file cannot be read, or others can read or write it.
    """
    text, place = variables.get(SECRET), SECRET
    if text is None:
        path = secret_file()
        place = str(path)
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                facts = os.fstat(file.fileno())
                if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
                    raise ConfigError(
                        f"`{path}` must be a file that its owner alone can read and write; say `chmod 600 "
                        f"{path}`, or remove it, and node 0 makes another"
                    )
                text = file.read(_MOST).decode("utf-8", "surrogateescape")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(
                f"`{path}` must hold the launch's secret, but cannot be read: {error.strerror}"
            ) from error
    if len(text.strip()) < _LEAST:
        raise ConfigError(
            f"`{place}` must hold a secret of at least {_LEAST} characters; make one with `openssl rand -hex "
            "16`"
        )
    return text.strip().encode("utf-8", "surrogateescape")


def proof_of(secret: bytes, *words: object) -> str:
    """A proof that the sender knows the secret: the HMAC of some words."""
    return hmac.new(secret, json.dumps(words).encode(), hashlib.sha256).hexdigest()


def is_proof(secret: bytes, proof: str, *words: object) -> bool:
    """Whether `proof` is right for these words; the comparison takes constant time."""
    return hmac.compare_digest(proof_of(secret, *words).encode(), proof.encode("utf-8", "replace"))
