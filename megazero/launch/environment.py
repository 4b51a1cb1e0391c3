"""The environment variables that a launch sends to its hosts: chosen by name, or from environment files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megazero.errors import ConfigError
from megazero.regular_file import read_regular, why_unreadable

SENT_PREFIXES = (
    *("NCCL", "PYTHON", "MV2", "UCX", "MLFLOW"),  # the prefixes that DeepSpeed sends
    *("CUDA_", "FI_", "GLOO_", "HF_", "HUGGING_FACE_", "LD_LIBRARY_PATH", "MEGAZERO_", "OMP_", "TORCH"),
    *("TRANSFORMERS_", "TRITON_", "WANDB_"),
)
NEVER_SENT = ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_", "MEGAZERO_LAUNCH", "PYTHONUNBUFFERED")
"""Variables of this machine or of an enclosing launch."""
NOT_SHOWN = "(not shown)"
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS", re.I)
_NO_DEVICES = ("", "-1", "NoDevFiles")  # NoDevFiles is SLURM's
_NAME = re.compile(r"[A-Za-z_]\w*")


def inherited(variables: Mapping[str, str]) -> dict[str, str]:
    """The part of `variables` that is sent to all hosts."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(SENT_PREFIXES) and not name.startswith(NEVER_SENT)
    }


def is_secret(name: str) -> bool:
    """Whether a variable's name suggests that its value is secret."""
    return _SECRET.search(name) is not None


def without_secrets(variables: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The variables that are not secret, and the names of the others."""
    public = {name: value for name, value in variables.items() if not is_secret(name)}
    return public, sorted(variables.keys() - public.keys())


def shown(variables: Mapping[str, str]) -> list[str]:
    """Lines ``NAME=VALUE`` for display; values of secret variables are hidden."""
    return [f"{name}={NOT_SHOWN if is_secret(name) else shlex.quote(v)}" for name, v in variables.items()]


def environment_files(variables: Mapping[str, str], home: Path, folder: Path) -> list[Path]:
    """The existing environment files: in the home folder, then in the working folder, which takes precedence.

    Their name is ``.deepspeed_env``, or the value of DS_ENV_FILE; a value with a folder names a single file.
    """
    name = variables.get("DS_ENV_FILE", ".deepspeed_env")
    paths = [Path(name)] if "/" in name else [home / name, folder / name]
    return [path for path in dict.fromkeys(paths) if path.exists()]


def read_environment_files(paths: Iterable[Path]) -> dict[str, str]:
    """The variables of some files; later files take precedence.

    Raises ConfigError if a file cannot be read, or has malformed lines; every such line is listed.
    """
    variables: dict[str, str] = {}
    for path in paths:
        try:
            text = read_regular(path).decode("utf-8-sig", errors="surrogateescape")
        except OSError as error:
            raise ConfigError(
                f"`{path}` must be a file of lines NAME=VALUE: {why_unreadable(error)}"
            ) from error
        variables |= parse_environment(text, str(path))
    return variables


def parse_environment(text: str, path: str = "environment file") -> dict[str, str]:
    """Parse lines ``NAME=VALUE``.

    A line may be blank, a comment, or begin with ``export``. Quotes around a value are removed as in a shell;
    without quotes, the value is everything after the first ``=``, except for a comment after a space. Nothing
    is expanded, neither here nor on the hosts.

    Raises:
        ConfigError: lines are malformed; the number and text of each are listed.
    """
    variables, problems = {}, []
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), 1):
        words = re.sub(r"^export\s+", "", line.strip())
        if not words or words[0] == "#":
            continue
        name, equals, value = words.partition("=")
        try:
            if not equals or not _NAME.fullmatch(name.strip()):
                raise ValueError("it is not NAME=VALUE")
            if "\0" in value:
                raise ValueError("a variable cannot hold a NUL")
            variables[name.strip()] = _unquoted(value.strip())
        except ValueError as error:
            problems.append(f"{path}, line {number}: a line must be NAME=VALUE, but is `{line}` ({error})")
    if problems:
        raise ConfigError(problems)
    return variables


def _unquoted(value: str) -> str:
    if value[:1] in ("'", '"'):
        words = shlex.split(value, comments=True)
        if len(words) != 1:
            raise ValueError("more follows the quotes")
        return words[0]
    return re.sub(r"\s+#.*$", "", value)


def assigned(words: Sequence[str], variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``--env NAME=VALUE``, and of ``--env NAME``, which sends this process's value.

    Raises ConfigError if a name is malformed, or has no value here.
    """
    result = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not _NAME.fullmatch(name) or (not equals and name not in variables):
            raise ConfigError(
                f"`--env` must be NAME=VALUE, or the NAME of a variable that is set, but is `{word}`"
            )
        result[name] = value if equals else variables[name]
    return result


def visible_devices(present: str | None, slots: Sequence[int]) -> tuple[str, str | None]:
    """CUDA_VISIBLE_DEVICES for the ranks of a host, and a notice if slots and devices differ.

    Slot k is the host's k-th visible device: the k-th of all devices, or of those in the host's own
    CUDA_VISIBLE_DEVICES, where a scheduler may list indices, UUIDs or names of MIG slices.

    Args:
        present: the host's own CUDA_VISIBLE_DEVICES; None if it is not set.
        slots: the slots that the launch takes.

    Raises:
        ConfigError: a slot is not among the host's visible devices.
    """
    if present is None:
        return ",".join(map(str, slots)), None
    devices = _devices(present)
    if not devices:  # hidden on purpose: the ranks run on the CPU
        return present, None
    for slot in slots:
        if slot >= len(devices):
            raise ConfigError(
                f"slot {slot} must be one of the {len(devices)} devices that CUDA_VISIBLE_DEVICES shows "
                f"there (`{present}`); take fewer slots, or unset it"
            )
    value = ",".join(devices[slot] for slot in slots)
    named = ",".join(map(str, slots))
    if value == named:
        return value, None
    return value, f"CUDA_VISIBLE_DEVICES is {present} there, so slots {named} are the devices {value}"


def slots_here(visible: str | None, gpus: int) -> int:
    """The number of visible GPUs of this machine. visible: CUDA_VISIBLE_DEVICES; gpus: all GPUs."""
    return gpus if visible is None else len(_devices(visible))


def _devices(visible: str) -> list[str]:
    return [device.strip() for device in visible.split(",") if device.strip() not in _NO_DEVICES]
