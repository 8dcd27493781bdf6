"""What a model's generation_config.json says of requests that leave their sampling open."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from megatron_hybrid.errors import ConfigurationError, InvalidRequestError
from megatron_hybrid.models.checkpoints.folder import GENERATION, ModelFolder
from megatron_hybrid.request import SamplingParams
from megatron_hybrid.server.options import SamplingDefaults

# By the file's names, which are the requests' but for one. As vLLM has it, `do_sample` changes
# nothing: files that leave it out, or say false, often have a temperature all the same.
_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_sampling_defaults(folder: ModelFolder) -> SamplingDefaults:
    """What the model's file sets, by the names of requests' fields; nothing where there is no file.

    Raises ConfigurationError for a file that can't be read, or a value that no request could have.
    """
    for place in (folder.described, folder.path, folder.tokenizer_model):
        if place is not None and (place / GENERATION).is_file():
            return _read(place / GENERATION)
    return ()


def describe(defaults: SamplingDefaults) -> str:
    """For the log."""
    values = ", ".join(f"{name} {value:g}" for name, value in defaults)
    return (
        f"requests that leave it open are sampled with {values}, as the model's {GENERATION} says; "
        "--generation-config none leaves that out"
    )


def _read(path: Path) -> SamplingDefaults:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} can't be read: {error}.") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} must hold a JSON object.")
    found = []
    for theirs, ours in _NAMES.items():
        value = values.get(theirs)
        if value is None:
            continue
        try:
            replace(SamplingParams(), **{ours: value}).validate()
            if ours == "max_tokens" and value < 1:
                # A request may ask for none, to have its prompt scored; not every one can.
                raise InvalidRequestError(ours, f"It must be at least 1, got {value}.")
        except InvalidRequestError as error:
            raise ConfigurationError(
                f"{theirs} in {path} can't be taken: {error} Mend it, or leave the file's values "
                "out with --generation-config none."
            ) from error
        found.append((ours, value))
    return tuple(found)
