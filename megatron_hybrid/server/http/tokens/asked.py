"""What bodies with token ids ask for, in whichever server's words."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import SamplingParams
from megatron_hybrid.server.http.protocol.generation_request import GenerationRequest

# Of what we know by these names, in SamplingParams or as a form of the answer.
_SAMPLING = {*SamplingParams.__dataclass_fields__, "json_schema", "regex", "ebnf"}
_FORMS = "structured_outputs"
_WORD = re.compile(r"\w+(\.\w+)*")


class Words(NamedTuple):
    """How a client calls what SamplingParams has. path: of the object that holds its sampling, with
    a full stop behind it. inside: its names there, where they differ from ours; outside: those of
    fields beside that object."""

    path: str
    inside: Mapping[str, str] = {}
    outside: Mapping[str, str] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """An InvalidRequestError that is raised in here speaks to the client in its words."""
        try:
            yield
        except InvalidRequestError as error:
            known = {error.field, *self.inside, *self.outside}
            said = _WORD.sub(
                lambda found: self.name(found[0]) if found[0] in known else found[0], str(error)
            )
            name = self.name(error.field)
            raise InvalidRequestError(name, said, error.status, error.code or "") from error

    def name(self, field: str) -> str:
        """What the client calls a field; others keep their name."""
        if field in self.outside:
            return self.outside[field]
        for ours, theirs in self.inside.items():
            if field == ours or field.startswith(f"{ours}."):
                return self.path + theirs + field.removeprefix(ours)
        is_sampling = field in _SAMPLING or field.startswith(_FORMS)
        return self.path + field if is_sampling else field


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """One prompt, what is asked for behind it, and where both stand in the body."""

    field: str
    prompt: str | list[int]
    generation: GenerationRequest
    words: Words


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """The same in tokens."""

    generation: GenerationRequest
    token_ids: array[int]


@dataclass(frozen=True, slots=True)
class PreparedTokens:
    """A request for answers behind these prompts, at least one, with the same n."""

    prompts: list[PreparedPrompt]
