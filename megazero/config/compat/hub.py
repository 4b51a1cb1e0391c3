"""Tokenizers by the name that they have on the Hugging Face hub: found in the local cache, or fetched."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from megazero.errors import DataError

_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_ENDINGS = (".json", ".model", ".txt", ".bin")
_JSON = "tokenizer.json"
_FILES = (
    _JSON,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def is_name(model: str) -> bool:
    """Whether `--tokenizer-model` is a name on the hub: no path here, and of the form NAME or OWNER/NAME."""
    if _NAME.fullmatch(model) is None or model.endswith(_ENDINGS) or Path(model).exists():
        return False
    return "/" not in model or not Path(model).parent.exists()


def command(name: str) -> str:
    """The command that fetches the files of a tokenizer."""
    return f"hf download {name} {' '.join(_FILES)}"


def cached(name: str) -> Path | None:
    """The folder of the cache with this name's tokenizer.json; None if there is none.

    Without the commit that the name stands for, the one of any other revision that was fetched will do.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name

    with suppress(ValueError):  # the hub has no such names
        if isinstance(path := try_to_load_from_cache(name, _JSON), str):
            return Path(path).parent
        folder = repo_folder_name(repo_id=name, repo_type="model")
        fetched = sorted(Path(constants.HF_HUB_CACHE, folder, "snapshots").glob(f"*/{_JSON}"))
        return fetched[0].parent if fetched else None
    return None


def local(model: str | None) -> str | None:
    """`--tokenizer-model` as a path: the cache's folder for a name that is there, anything else unchanged."""
    if model is None or not is_name(model):
        return model
    folder = cached(model)
    return model if folder is None else str(folder)


def fetched(model: str | None) -> str | None:
    """`local`, but a name that is not in the cache is fetched. DataError if it cannot be."""
    path = local(model)
    if path is None or not is_name(path):
        return path
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(path, allow_patterns=list(_FILES)))
    except Exception as error:  # of several libraries, and all mean that it is not to be had
        raise _missing(path, f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    if not (folder / _JSON).is_file():
        raise DataError(
            f"`tokenizer_model` must have a {_JSON}, but {path} on the hub has none; save one with "
            "`AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)`, and give that folder."
        )
    return str(folder)


def _missing(name: str, why: str) -> DataError:
    return DataError(
        f"`tokenizer_model` must name a tokenizer.json or a directory holding one, but {name} is not "
        f"there, and as a name on a hub it is neither in the cache nor could it be fetched ({why}); run "
        f"`{command(name)}` where there is a network."
    )


def notice(model: str | None) -> str | None:
    """The line of `--check-config` on a name that is not in the cache; None if nothing is to be said."""
    if model is None or local(model) != model or not is_name(model):
        return None
    return (
        f"`--tokenizer-model {model}` is not here, so it is taken for a name on a hub. It is not in the "
        "local cache: a run fetches it if there is a network, and is refused otherwise; "
        f"`{command(model)}` fetches it beforehand."
    )
