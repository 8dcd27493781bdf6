"""Which folders are Megatron's, and where in them things are."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_hybrid.errors import WeightsError

TRACKER = "latest_checkpointed_iteration.txt"


def is_megatron_folder(folder: Path) -> bool:
    """Whether Megatron wrote it: a distributed checkpoint, or a folder with one an iteration."""
    return (folder / TRACKER).is_file() or _is_checkpoint(folder)


def checkpoint_folder(folder: Path) -> Path:
    """The distributed checkpoint in `folder`: itself, or that of the latest iteration.

    Raises WeightsError where there is none.
    """
    tracker = folder / TRACKER
    if _is_checkpoint(folder) or not tracker.is_file():
        return folder
    latest = tracker.read_text().strip()
    if latest != "release" and not latest.isdecimal():
        raise WeightsError(f"{tracker} holds {latest!r}, which is no iteration.")
    found = folder / ("release" if latest == "release" else f"iter_{int(latest):07d}")
    if not found.is_dir():
        raise WeightsError(f"{tracker} names {found.name}, which is not in {folder}.")
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


def _is_checkpoint(folder: Path) -> bool:
    """metadata.json says so; a file of that name may also be something else's."""
    try:
        return "sharded_backend" in json.loads((folder / "metadata.json").read_text())
    except (OSError, ValueError, TypeError):
        return False
