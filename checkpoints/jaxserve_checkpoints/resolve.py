"""Resolves a user's name for a model to a local folder with its files."""

from __future__ import annotations

import importlib.resources
import json
import re
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxserve_checkpoints.reader import INDEX_FILE, SINGLE_FILE, CheckpointError

EMBEDDED_NAME = "jaxserve-embedded"
"""The small model that ships inside this package."""

WANTED_FILES = ("*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model")
"""Patterns of the files to download: weights, configuration, tokenizer and chat template."""

EMBEDDED_FILES = ("config.json", SINGLE_FILE, "tokenizer.json")

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_OTHERWISE = (
    "download it elsewhere and pass --model FOLDER, or use --load-format dummy for benchmarks"
)


def resolve_model(
    model: str,
    *,
    names: Mapping[str, str] = MappingProxyType({}),
    download_dir: str | Path | None = None,
    revision: str | None = None,
    tokenizer: bool = True,
) -> Path:
    """Returns the folder of a model.

    A complete copy in the Hub cache is used without network access. Otherwise the files are
    downloaded into that cache, with progress bars if stderr is a terminal.

    Args:
      model: a folder, EMBEDDED_NAME, one of `names` (in any case), or "org/name" on the Hub.
      names: short names, in lower case, and their repositories on the Hub.
      download_dir: the Hub cache; default: that of huggingface_hub.
      revision: branch, tag or commit on the Hub; default: the main branch.
      tokenizer: whether a copy needs tokenizer.json to be complete.

    Raises:
      CheckpointError: no model has that name, the folder is incomplete, or the Hub cannot be
        reached.
    """
    folder = _local_folder(model) if model else None
    if folder is not None:
        return folder
    if model == EMBEDDED_NAME:
        return embedded_model()
    hub_id = names.get(model.lower(), model)
    if not _HUB_ID.fullmatch(hub_id):
        known = (EMBEDDED_NAME, *names)
        near = get_close_matches(model.lower(), known, n=1)
        meant = f" Did you mean {near[0]}?" if near else ""
        raise CheckpointError(
            f"unknown model {model!r}.{meant} Pass a folder, a Hugging Face id such as "
            f"Qwen/Qwen3-8B, or one of {', '.join(known)}"
        )
    cached = _snapshot(hub_id, revision, download_dir, offline=True)
    wanted = "tokenizer.json" if tokenizer else "config.json"
    if cached is not None and _has_weights(cached) and (cached / wanted).is_file():
        return cached
    with _ProgressBars(shown=sys.stderr.isatty()):
        downloaded = _snapshot(hub_id, revision, download_dir, offline=False)
    if downloaded is None or not _has_weights(downloaded):
        raise CheckpointError(
            f"{hub_id} has no config.json with {SINGLE_FILE} or the shards of {INDEX_FILE}, "
            f"looked in {downloaded}"
        )
    return downloaded


def embedded_model() -> Path:
    """Folder of the small model that ships inside this package.

    Raises:
      CheckpointError: one of its files is missing.
    """
    folder = Path(str(importlib.resources.files("jaxserve_checkpoints"))) / "embedded"
    missing = [name for name in EMBEDDED_FILES if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: the embedded model lacks {', '.join(missing)}; install the package again"
        )
    return folder


def _local_folder(model: str) -> Path | None:
    """The folder if `model` is one, None if it can only be a name."""
    try:
        path = Path(model).expanduser()
    except RuntimeError:  # ~name of an unknown user
        raise CheckpointError(f"{model}: no such folder") from None
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path}: the folder holds no config.json")
        return path
    if path.exists():
        raise CheckpointError(f"{path}: a file; pass the folder that holds config.json")
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith("/"):
        raise CheckpointError(f"{model}: no such folder")
    return None


def _snapshot(
    hub_id: str, revision: str | None, download_dir: str | Path | None, *, offline: bool
) -> Path | None:
    """Snapshot folder of the Hub cache, downloaded unless `offline`; None if it is not cached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(
            snapshot_download(
                hub_id,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=list(WANTED_FILES),
                local_files_only=offline,
            )
        )
    except GatedRepoError:
        problem = "access to it must be granted on its page first, then log in with `hf auth login`"
    except RepositoryNotFoundError:
        problem = "no such model, or a private one that needs `hf auth login`"
    except RevisionNotFoundError:
        problem = f"it has no revision {revision!r}"
    except Exception as error:  # transport errors of any kind, full disks: all one line to a user
        if offline:
            return None
        unreachable = isinstance(error, (LocalEntryNotFoundError, ConnectionError))
        problem = f"{'not reachable' if unreachable else 'download failed'} ({_first_line(error)})"
    meant_here = Path(hub_id).parent.is_dir()
    raise CheckpointError(
        f"{f'there is no folder {hub_id}, and ' if meant_here else ''}"
        f"cannot download {hub_id} into {_cache_folder(hub_id, download_dir)}: {problem}; "
        f"{_OTHERWISE}"
    )


def _has_weights(folder: Path) -> bool:
    """Whether config.json and all weights exist. A download may have been interrupted."""
    if not (folder / "config.json").is_file():
        return False
    if (folder / SINGLE_FILE).is_file():
        return True
    try:
        index: Any = json.loads((folder / INDEX_FILE).read_bytes())
        shards = set(index["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
    return all((folder / str(shard)).is_file() for shard in shards)


def _cache_folder(hub_id: str, download_dir: str | Path | None) -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(download_dir or HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"


def _first_line(error: BaseException) -> str:
    """Name and first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


class _ProgressBars:
    """Context manager that turns off huggingface_hub's progress bars unless `shown`."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown

    def __enter__(self) -> None:
        from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars

        self._restore = not self._shown and not are_progress_bars_disabled()
        if self._restore:
            disable_progress_bars()

    def __exit__(self, *_: object) -> None:
        from huggingface_hub.utils import enable_progress_bars

        if self._restore:
            enable_progress_bars()
