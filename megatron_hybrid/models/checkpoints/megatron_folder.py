"""Which folders are Megatron's, and where in them things are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_hybrid.errors import ConfigurationError

TRACKER = "latest_checkpointed_iteration.txt"


def is_megatron_folder(folder: Path) -> bool:
    """Whether Megatron wrote it: a distributed checkpoint, or a folder with one an iteration."""
    return (folder / TRACKER).is_file() or _is_checkpoint(folder)


def checkpoint_folder(folder: Path) -> Path:
    """The distributed checkpoint in `folder`: itself, or that of the latest iteration.

    Raises ConfigurationError where there is none.
    """
    tracker = folder / TRACKER
    if _is_checkpoint(folder) or not tracker.is_file():
        return folder
    latest = tracker.read_text().strip()
    if latest != "release" and not latest.isdecimal():
        raise ConfigurationError(f"{tracker} holds {latest!r}, which is no iteration.")
    found = folder / ("release" if latest == "release" else f"iter_{int(latest):07d}")
    if not found.is_dir():
        raise ConfigurationError(f"{tracker} names {found.name}, which is not in {folder}.")
    return found


def described_in(folder: Path) -> Path | None:
    """The folder with the config.json of a checkpoint: it, or the one around or inside it that
    goes with it. None where there is none."""
    folders = [folder]
    if is_megatron_folder(folder):
        inner = checkpoint_folder(folder)
        folders += [folder.parent] if inner == folder else [inner]
        if inner == folder and not (folder.parent / TRACKER).is_file():
            folders.pop()
    return next((one for one in folders if (one / "config.json").is_file()), None)


def end_tokens(folder: Path) -> tuple[int, ...]:
    """What ends an answer, as a Hugging Face folder's generation_config.json, config.json or
    tokenizer says. Raises ConfigurationError for a folder that is not there."""
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is no folder.")
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    path = folder / "tokenizer.json"
    if token is None or not path.is_file():
        return ()
    from tokenizers import Tokenizer

    number = Tokenizer.from_file(str(path)).token_to_id(str(token))
    return () if number is None else (int(number),)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one where there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}.") from error
    return found if isinstance(found, dict) else {}


def _is_checkpoint(folder: Path) -> bool:
    """metadata.json says so; a file of that name may also be something else's."""
    try:
        return "sharded_backend" in json.loads((folder / "metadata.json").read_text())
    except (OSError, ValueError, TypeError):
        return False
