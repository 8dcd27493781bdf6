"""What a model's folder has to hold, and one sentence that says what is missing. No torch here."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_hybrid import reference_model
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError, WeightsError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
    "spiece.model", "*.tiktoken",
)  # fmt: skip
_OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
# Of Megatron's checkpoints: see models/checkpoints/megatron_folder.py.
_MEGATRON = ("latest_checkpointed_iteration.txt", "metadata.json")


def find_model_folder(config: EngineConfig) -> Path:
    """--load's folder, or the reference model's. Raises ConfigurationError for one that is no
    model's."""
    if config.load is None:
        return reference_model.path()
    folder = Path(config.load)
    if not folder.is_dir():
        raise ConfigurationError(_not_a_folder(config.load))
    if (folder / "config.json").is_file() or _is_megatron(folder):
        return folder
    if not any(folder.iterdir()):
        raise ConfigurationError(f"--load names {folder}, which is empty.")
    raise ConfigurationError(
        f"--load names {folder}, which holds no config.json; "
        "it must be a Hugging Face model folder or a Megatron checkpoint (torch_dist)."
    )


def check_model_files(config: EngineConfig) -> None:
    """Raise ConfigurationError or WeightsError for what loading would find missing, much later."""
    folder = find_model_folder(config)
    if config.load_format == "auto" and not _is_megatron(folder):
        check_weights(folder)


def check_weights(folder: Path) -> None:
    """Raise WeightsError for a Hugging Face folder without weights."""
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return
    others = sorted({path.name for glob in _OTHER_WEIGHTS for path in folder.glob(glob)})
    hint = f"; what is there ({', '.join(others[:3])}) is not read" if others else ""
    raise WeightsError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}.")


def check_tokenizer(folder: Path) -> None:
    """Raise ConfigurationError for a folder without a tokenizer."""
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder} is to hold the tokenizer (--tokenizer-model, or else --load), and is not a "
            "folder."
        )
    if not any(path.is_file() for name in _TOKENIZERS for path in folder.glob(name)):
        raise ConfigurationError(
            f"{folder} has no tokenizer (tokenizer.json); --tokenizer-model can name another "
            "folder that has one."
        )


def _is_megatron(folder: Path) -> bool:
    if not any((folder / name).is_file() for name in _MEGATRON):
        return False
    from megatron_hybrid.models.checkpoints.megatron_folder import (
        is_megatron_folder,  # imports torch
    )

    return is_megatron_folder(folder)


def _not_a_folder(name: str) -> str:
    path = Path(name)
    if path.exists():
        return f"--load names {name}, which is a file; name the folder that it is in."
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        return (
            f"--load names {name}, and there is no such folder here. If it is a model's name on "
            f"huggingface.co: `hf download {name} --local-dir {path.name}` fetches it for "
            f"--load {path.name}."
        )
    return f"--load names {name}, and there is no such folder."
