"""The text part of a model that also sees or hears: where its configuration and weights are in a
folder of the whole. Texts are answered from it alone; what else is in there is not read."""

from __future__ import annotations

import re
from dataclasses import replace

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.family import Family, Location
from megatron_hybrid.models.families.raw_config import RawConfig

Names = tuple[tuple[str, str], ...]
# What weights of the text are called, and what the text model itself calls them: as transformers
# saves whole models since 4.52, as it did before, and as it saves the text model alone.
USUAL_NAMES: Names = (
    (r"^(?:model\.)?language_model\.lm_head\.", "lm_head."),
    (r"^(?:model\.language_model|language_model\.model)\.", "model."),
    (r"^(model\.(?:layers|embed_tokens|norm|embedding_norm)|lm_head|mtp)\.", r"\1."),
)
# Ends names that are not the text's: so that no pattern for the end of one finds it.
_BESIDE = " beside the text"


class TextPart(Family):
    """One for each kind of whole model; `family` is the text's, which knows the rest."""

    model_types = ()

    def __init__(
        self,
        family: Family,
        wholes: tuple[str, ...],
        *,
        names: Names = USUAL_NAMES,
        tied: bool | None = None,
    ) -> None:
        """`wholes`: the model_types of whole models. `names`: (pattern, replacement), of which the
        first that fits counts; what fits none is not the text's. `tied`: whether the head is the
        embedding where the whole does not say so; None: the text part says it, not the whole."""
        self.family, self.wholes = family, wholes
        self._names, self._tied = names, tied

    def config(self, raw: RawConfig) -> HybridModelConfig:
        """The text part's, with the whole's type, by which its weights are found."""
        text = raw.text_part()
        if text.model_type not in (*self.family.model_types, *self.wholes):
            raise ConfigurationError(
                f"The text part of {raw.where} is of type {text.model_type!r}; in a model of type "
                f"{raw.model_type!r} only {' or '.join(self.family.model_types)} is supported."
            )
        config = replace(self.family.config(text), model_type=raw.model_type)
        if self._tied is None or text is raw:
            return config
        tied = raw.flag("tie_word_embeddings", "tie_embedding", default=self._tied)
        return replace(config, tie_word_embeddings=tied)

    def places(self, config: HybridModelConfig, block: int | None, role: str) -> list[Location]:
        return self.family.places(config, block, role)

    def locate(self, config: HybridModelConfig, block: int, role: str) -> list[Location]:
        return self.family.locate(config, block, role)

    def canonical(self, name: str) -> str:
        for pattern, replacement in self._names:
            own, count = re.subn(pattern, replacement, name)
            if count:
                return self.family.canonical(own)
        return name + _BESIDE

    def ignores(self, config: HybridModelConfig, name: str) -> bool:
        return name.endswith(_BESIDE) or self.family.ignores(config, name)
