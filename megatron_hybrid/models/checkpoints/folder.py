"""A model's folder: whether it is Hugging Face's or Megatron's, what it describes, and one sentence
for what it lacks. Imports no torch until its configuration is asked for."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_hybrid import reference_model
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError, WeightsError

if TYPE_CHECKING:
    from megatron_hybrid.models.checkpoints.quantization import Quantization
    from megatron_hybrid.models.config import HybridModelConfig

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's
_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
    "spiece.model", "*.tiktoken",
)  # fmt: skip
_OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


@dataclass(frozen=True)
class ModelFolder:
    """What was found in a folder; everybody who reads a model goes through it.

    `checkpoint` is the folder with the weights: of a Megatron folder with one for each iteration,
    that of the latest. `described`: the folder with config.json, which may be the one around or
    inside a Megatron checkpoint; None where there is none. `tokenizer_model`: --tokenizer-model.
    """

    path: Path
    is_megatron: bool
    checkpoint: Path
    described: Path | None
    tokenizer_model: Path | None = None

    @classmethod
    def open(cls, path: str | Path, tokenizer_model: str | Path | None = None) -> ModelFolder:
        """Look at a folder, which need not be a model's. `tokenizer_model`: the folder with the
        tokenizer and, where `path` names none, the end tokens; None: `path` has them. Raises
        ConfigurationError for a Megatron folder without the iteration that it names as its
        latest."""
        path = Path(path)
        is_checkpoint = _is_checkpoint(path)
        checkpoint = path if is_checkpoint else _latest_iteration(path)
        places = [path, checkpoint]
        if is_checkpoint and (path.parent / TRACKER).is_file():
            places.append(path.parent)
        described = next((one for one in places if (one / CONFIG).is_file()), None)
        return cls(
            path,
            is_checkpoint or (path / TRACKER).is_file(),
            checkpoint,
            described,
            None if tokenizer_model is None else Path(tokenizer_model),
        )

    @classmethod
    def of(cls, config: EngineConfig) -> ModelFolder:
        """--load's folder, or the reference model's. Raises ConfigurationError for one that is no
        model's."""
        folder = Path(reference_model.path() if config.load is None else config.load)
        if config.load is not None and not folder.is_dir():
            raise ConfigurationError(_not_a_folder(config.load))
        found = cls.open(folder, config.tokenizer_model)
        if found.described is not None or found.is_megatron:
            return found
        if not any(folder.iterdir()):
            raise ConfigurationError(f"--load names {folder}, which is empty.")
        raise ConfigurationError(
            f"--load names {folder}, which holds no config.json; "
            "it must be a Hugging Face model folder or a Megatron checkpoint (torch_dist)."
        )

    @property
    def tokenizer(self) -> Path:
        """The folder with the tokenizer: --tokenizer-model's, or where the model is described."""
        return self.tokenizer_model or self.described or self.path

    def check_weights(self) -> None:
        """Raise WeightsError for what is no folder, or one of Hugging Face's without weights."""
        folder = self.path
        if not folder.is_dir():
            raise WeightsError(f"{folder} is no folder.")
        if self.is_megatron or (folder / SINGLE).is_file() or (folder / INDEX).is_file():
            return
        others = sorted({path.name for glob in _OTHER_WEIGHTS for path in folder.glob(glob)})
        hint = f"; what is there ({', '.join(others[:3])}) is not read" if others else ""
        raise WeightsError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}.")

    @cached_property
    def config(self) -> HybridModelConfig:
        """What the model is, as config.json says, or a Megatron checkpoint's arguments where there
        is none; the end tokens of generation_config.json too.

        Raises ConfigurationError for an architecture or an option that is not supported.
        """
        if self.described is None and self.is_megatron:
            config = self._of_arguments()
        else:
            from megatron_hybrid.models.families.raw_config import RawConfig
            from megatron_hybrid.models.families.registry import family_of

            raw = RawConfig.from_folder(self.described or self.path)
            raw.refuse_other_heads()
            config = family_of(raw.model_type).config(raw)
        if not config.eos_token_ids and self.tokenizer_model is not None:
            config = replace(config, eos_token_ids=end_tokens(self.tokenizer_model))
        return config

    @cached_property
    def quantization(self) -> Quantization | None:
        """How the weights are quantised; None: they are not. Raises ConfigurationError for a way
        that is not supported."""
        from megatron_hybrid.models.checkpoints.quantization import Quantization

        folder = self.described
        if folder is None or self.is_megatron:
            return None
        other = _read_json(folder / "hf_quant_config.json")
        return Quantization.of(_read_json(folder / CONFIG), str(folder / CONFIG), other or None)

    def _of_arguments(self) -> HybridModelConfig:
        """From the training job's arguments, and the end tokens of what else is in the folder."""
        # torch.distributed.checkpoint takes a while, and few folders need it.
        from megatron_hybrid.models.checkpoints.megatron_arguments import (
            MegatronArguments,
            with_family,
        )
        from megatron_hybrid.models.checkpoints.megatron_checkpoint import MegatronCheckpoint

        try:
            arguments = MegatronCheckpoint(self.checkpoint).arguments
        except WeightsError as error:
            raise ConfigurationError(str(error)) from error
        if arguments is None:
            raise ConfigurationError(
                f"The Megatron checkpoint in {self.path} does not say what the model is: it holds "
                "no arguments, and there is no config.json of Hugging Face's beside it; put one "
                "there."
            )
        config = MegatronArguments(arguments, str(self.checkpoint)).config()
        return with_family(replace(config, eos_token_ids=end_tokens(self.path)))


def check_model_files(config: EngineConfig) -> ModelFolder:
    """The model's folder. Raises ConfigurationError or WeightsError for what loading would find
    missing, much later."""
    folder = ModelFolder.of(config)
    if config.load_format == "auto":
        folder.check_weights()
    return folder


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


def end_tokens(folder: Path) -> tuple[int, ...]:
    """What ends an answer, as a Hugging Face folder's generation_config.json, config.json or
    tokenizer says. Raises ConfigurationError for a folder that is not there."""
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is no folder.")
    for name in (GENERATION, CONFIG):
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


def _is_checkpoint(folder: Path) -> bool:
    """metadata.json says so; a file of that name may also be something else's."""
    try:
        return "sharded_backend" in json.loads((folder / "metadata.json").read_text())
    except (OSError, ValueError, TypeError):
        return False


def _latest_iteration(folder: Path) -> Path:
    """Its folder inside one that Megatron's --save named; any other folder itself."""
    tracker = folder / TRACKER
    if not tracker.is_file():
        return folder
    latest = tracker.read_text().strip()
    if latest != "release" and not latest.isdecimal():
        raise ConfigurationError(f"{tracker} holds {latest!r}, which is no iteration.")
    found = folder / ("release" if latest == "release" else f"iter_{int(latest):07d}")
    if not found.is_dir():
        raise ConfigurationError(f"{tracker} names {found.name}, which is not in {folder}.")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one where there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}.") from error
    return found if isinstance(found, dict) else {}


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
