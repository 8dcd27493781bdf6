"""Structural tags in bodies: xgrammar's formats, as far as they can be followed, and the older
shape of begins, schemas and triggers."""

# mypy: disable-error-code="valid-type"

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from megatron_hybrid.request import MAX_GRAMMAR_LENGTH, MAX_TOKENS
from megatron_hybrid.server.http.protocol.parsing import Body, Unsupported, only

MAX_FORMATS = 1000
MAX_CHARS = 10_000  # of free text that is counted

Text = Annotated[str, Meta(max_length=MAX_GRAMMAR_LENGTH)]
Filled = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]
Triggers = Annotated[list[Filled], Meta(min_length=1, max_length=MAX_FORMATS)]
Excluded = Annotated[list[Filled], Meta(max_length=MAX_FORMATS)]
Schema = dict[str, Any]
_OnlyJson, _OnlyFalse = only("json"), only(False)


class AnyTextFormat(Body, tag_field="type", tag="any_text"):
    """Any text, up to the end of the tag that it stands in, or of the answer.

    excludes: What the text does not hold.
    max_chars: The most characters.
    """

    excludes: Excluded | None = None
    max_chars: Annotated[int, Meta(ge=0, le=MAX_CHARS)] | None = None

    max_tokens: Unsupported | None = None


class ConstStringFormat(Body, tag_field="type", tag="const_string"):
    """This text."""

    value: Text


class JsonValueFormat(Body, tag_field="type", tag="json_schema"):
    """JSON that follows a schema.

    max_whitespace_cnt: Changes nothing: JSON comes without free white space.
    """

    json_schema: Schema
    max_whitespace_cnt: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None

    style: _OnlyJson | None = None
    any_order: _OnlyFalse | None = None


class GrammarTextFormat(Body, tag_field="type", tag="grammar"):
    """Text that follows a grammar, in GBNF or Lark."""

    grammar: Filled


class RegexTextFormat(Body, tag_field="type", tag="regex"):
    """Text that a regular expression matches as a whole."""

    pattern: Filled


class TokenFormat(Body, tag_field="type", tag="token"):
    """A token, by its id or, if it is an added one, by its spelling."""

    token: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | Filled


class SequenceFormat(Body, tag_field="type", tag="sequence"):
    """One after the other."""

    elements: Annotated[list[AnyFormat], Meta(min_length=1, max_length=MAX_FORMATS)]


class OrFormat(Body, tag_field="type", tag="or"):
    """One of these."""

    elements: Annotated[list[AnyFormat], Meta(min_length=1, max_length=MAX_FORMATS)]


class OptionalFormat(Body, tag_field="type", tag="optional"):
    """It, or nothing."""

    content: AnyFormat


class PlusFormat(Body, tag_field="type", tag="plus"):
    """Once or more often."""

    content: AnyFormat


class StarFormat(Body, tag_field="type", tag="star"):
    """As often as wanted, or not at all."""

    content: AnyFormat


class RepeatFormat(Body, tag_field="type", tag="repeat"):
    """So many times.

    max: -1: as often as wanted.
    """

    content: AnyFormat
    min: Annotated[int, Meta(ge=0, le=MAX_FORMATS)]
    max: Annotated[int, Meta(ge=-1, le=MAX_FORMATS)]


class TagFormat(Body, tag_field="type", tag="tag"):
    """What stands between two marks.

    end: One of several, too.
    """

    begin: Text | TokenFormat
    content: AnyFormat
    end: Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_FORMATS)] | TokenFormat


Tags = Annotated[list[TagFormat], Meta(min_length=1, max_length=MAX_FORMATS)]


class TriggeredTagsFormat(Body, tag_field="type", tag="triggered_tags"):
    """Free text, in which a trigger begins one of the tags.

    triggers: Of each tag's begin one of them is the beginning.
    at_least_one: The first tag comes at once.
    stop_after_first: Nothing comes after it.
    excludes: What the free text does not hold.
    """

    triggers: Triggers
    tags: Tags
    at_least_one: bool | None = False
    stop_after_first: bool | None = False
    excludes: Excluded | None = None


class TagsWithSeparatorFormat(Body, tag_field="type", tag="tags_with_separator"):
    """Tags with this text between them, and nothing else."""

    tags: Tags
    separator: Text
    at_least_one: bool | None = False
    stop_after_first: bool | None = False


AnyFormat = (
    AnyTextFormat | ConstStringFormat | JsonValueFormat | GrammarTextFormat | RegexTextFormat
    | TokenFormat | SequenceFormat | OrFormat | OptionalFormat | PlusFormat | StarFormat
    | RepeatFormat | TagFormat | TriggeredTagsFormat | TagsWithSeparatorFormat
)  # fmt: skip


class HasFormat(Body):
    """What a `format` is read as. The description of bodies has any object: of formats in formats
    it would have no end."""

    format: AnyFormat


class Structure(Body):
    """A tag around JSON.

    schema: As an object or as text.
    """

    begin: Filled
    schema: Schema | Filled
    end: Text


class StructuralTag(Body, tag_field="type", tag="structural_tag"):
    """Text in which marks hold what stands between them, in xgrammar's words.

    format: The newer shape: an object with a `type`, which is any_text, const_string, json_schema,
        grammar, regex, token, sequence, or, optional, plus, star, repeat, tag, triggered_tags or
        tags_with_separator, and what else xgrammar's documentation says of that type.
    structures: The older shape: the tags that triggers lead to.
    triggers: Of the older shape: what a tag begins with.
    """

    format: Schema | None = None
    structures: Annotated[list[Structure], Meta(min_length=1, max_length=MAX_FORMATS)] | None = None
    triggers: Triggers | None = None
