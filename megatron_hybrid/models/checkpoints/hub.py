"""A model by its name on the Hugging Face hub: from the cache on this machine, or downloaded into
it."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

# Data alone: no code of a repository is fetched, as none is ever run.
DESCRIPTIONS = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
WEIGHTS = ("*.safetensors",)
# The same weights in other shapes: in folders (original/, onnx/), and Mistral's own.
LEFT_OUT = ("*/*", "consolidated*")
_NAME = r"\w[\w.-]*/[\w.-]+"

logger = logging.getLogger(__name__)


def is_name(text: str) -> bool:
    """Whether a model is named as the hub does (OWNER/NAME), and not by a folder that is here."""
    return re.fullmatch(_NAME, text) is not None and not Path(text).exists()


def fetch(name: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder with a model's files in the cache, after what was missing or has changed has been
    downloaded, where the hub can be reached. A token and whether to ask the hub at all are
    huggingface_hub's business (HF_TOKEN, HF_HUB_OFFLINE).

    revision: a branch, tag or commit; None: main. weights: without them, what describes the model.
    Raises ConfigurationError, with what to do, for a model that can't be had.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if os.environ.get("LOCAL_RANK", "0") != "0":
        disable_progress_bars()  # the first rank shows them; these wait for its files

    def snapshot(*, local_files_only: bool) -> str:
        return snapshot_download(
            name,
            revision=revision,
            allow_patterns=[*DESCRIPTIONS, *(WEIGHTS if weights else ())],
            ignore_patterns=list(LEFT_OUT),
            local_files_only=local_files_only,
        )

    folder = Path(_found(snapshot, name, revision))
    logger.info("%s is read from %s", name, folder)
    return folder


def with_files(config: EngineConfig, revision: str | None = None) -> EngineConfig:
    """With the folder of what --load names as the hub does; the same for a folder that is here.

    Raises ConfigurationError for a model that can't be had, and for a revision of a folder.
    """
    name = config.load
    if name is not None and is_name(name):
        folder = fetch(name, revision, weights=config.load_format == "auto")
        return config.replace(load=str(folder))
    if revision is not None:
        raise ConfigurationError(
            f"--revision is {revision}, which is of a model on the Hugging Face hub; "
            f"{name or 'the model that ships with us'} is a folder here."
        )
    return config


def _found(snapshot: Callable[..., str], name: str, revision: str | None) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    cause: str
    try:
        return snapshot(local_files_only=False)
    except GatedRepoError:
        cause = (
            "its owner asks for consent: give it on its page at huggingface.co, and set HF_TOKEN "
            "to a token of that account"
        )
    except RepositoryNotFoundError:
        cause = (
            "the Hugging Face hub has no such model, or shows it only to some: then set HF_TOKEN "
            "to a token of theirs"
        )
    except RevisionNotFoundError:
        cause = f"the Hugging Face hub has it, but no revision {revision!r} (--revision)"
    except HFValidationError:
        cause = "it is no name on the Hugging Face hub either"
    except Exception as error:  # of the hub, the network, proxies and disks there are many kinds
        # A proxy that is down raises even where all is in the cache.
        try:
            return snapshot(local_files_only=True)
        except Exception:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            cause = (
                "it could not be had from the Hugging Face hub, nor whole from the cache here "
                f"({type(error).__name__}: {reason}). `hf download {name}` on a machine that "
                "reaches the hub fetches it; copy its folder here and name that, or its cache "
                "(HF_HOME)"
            )
    raise ConfigurationError(f"There is no folder {name} here, and {cause}.")
