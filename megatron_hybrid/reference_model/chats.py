"""Chats in plain English that state facts and ask for them later.

A chat is a pure function of its seed. Somebody (the system message or the user) states facts:
codes, colours, places, counts, names. Later statements override earlier ones. Other facts of the
same kind, small talk and pages of unrelated text lie between a statement and the question that
needs it. A model answers only if attention's keys and the recurrent states of everything before
are right, which is what makes these chats a test of a prefix cache.

    chat = write_chat(seed=7, characters=4000)
    chat.messages         [{"role": "system", "content": ...}, ...]
    chat.questions[0]     what is asked in it, and where
    held = write_chat(seed=7, characters=16000, split="held_out", open_questions=20)
    held.prompt(held.open_questions[0])      the chat, and the question as its last message

The training split and the held-out split share no seed, and no subject of three or more words:
one in ten of those (by its checksum) is only ever used in held-out chats.
`unseen_phrasings=True` also states and asks in sentences that no training chat contains.
"""

import random
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from megatron_hybrid.reference_model import words as w

Message = dict[str, str]


@dataclass(frozen=True)
class Question:
    """A question of a chat and what a right answer contains."""

    text: str
    answer: str  # the whole sentence that the model was taught to say
    expected: str  # the part that counts: the value, or "don't know"
    others: tuple[str, ...]  # values of this chat that would be wrong here
    asked_in: int  # index of the user message; len(messages) for an open question
    mentioned_in: int  # message that holds the newest mention of the value, -1 if never stated
    mentioned_at: int  # where in that message the mention ends, in characters
    overridden: bool  # an earlier statement gave another value

    def is_answered_by(self, reply: str) -> bool:
        """Whether `reply` holds the expected value and no other candidate."""
        return _holds(reply, self.expected) and not any(_holds(reply, o) for o in self.others)


@dataclass
class Chat:
    """Messages, the questions asked among them, and questions that could come next."""

    messages: list[Message] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    open_questions: list[Question] = field(default_factory=list)

    def prompt(self, question: Question) -> list[Message]:
        """The messages up to and including the one that asks `question`."""
        earlier = self.messages[: question.asked_in]
        if question.asked_in < len(self.messages):
            return [*earlier, self.messages[question.asked_in]]
        return [*earlier, {"role": "user", "content": question.text}]


def _holds(text: str, value: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None


# ---------------------------------------------------------------------------------------------
# Words


def invented_word(rng: random.Random, syllables: int = 2) -> str:
    """A pronounceable word that is in no dictionary."""
    return "".join(
        rng.choice(w.ONSETS_LIST) + rng.choice(w.VOWELS) + rng.choice(w.CODAS)
        for _ in range(syllables)
    )


def _digits(rng: random.Random, low: int = 3, high: int = 6) -> str:
    return "".join(rng.choice("0123456789") for _ in range(rng.randint(low, high)))


def _code(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.65:
        return _digits(rng, 4, 4) if rng.random() < 0.6 else _digits(rng)
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
    if style < 0.8:
        return f"{letters}{_digits(rng, 2, 4)}"
    if style < 0.9:
        return f"{letters}-{_digits(rng, 2, 4)}"
    return f"{_digits(rng, 2, 3)}-{_digits(rng, 2, 4)}"


def _word(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.4:
        return invented_word(rng, rng.randint(2, 3))
    if style < 0.6:
        return invented_word(rng).capitalize()
    return rng.choice(rng.choice((w.THINGS, w.ANIMALS, w.FOODS, w.CITIES, w.ADJECTIVES, w.NAMES)))


def _name(rng: random.Random) -> str:
    return invented_word(rng).capitalize() if rng.random() < 0.15 else rng.choice(w.NAMES)


def _person_value(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return f"{rng.choice(('Mr', 'Mrs', 'Ms', 'Dr'))} {rng.choice(w.SURNAMES)}"
    return _name(rng) if rng.random() < 0.7 else f"{_name(rng)} {rng.choice(w.SURNAMES)}"


def _colour(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.85:
        return rng.choice(w.COLOURS)
    return f"{rng.choice(('light', 'dark', 'bright', 'pale'))} {rng.choice(w.COLOURS)}"


def _city(rng: random.Random) -> str:
    return invented_word(rng).capitalize() if rng.random() < 0.1 else rng.choice(w.CITIES)


def _number(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.2:
        return rng.choice(w.NUMBER_WORDS)
    return str(rng.randint(2, (20, 99, 999)[rng.randrange(3)]))


def _price(rng: random.Random) -> str:
    return f"{rng.randint(2, 950)} {rng.choice(('euros', 'dollars', 'pounds', 'francs'))}"


def _measure(rng: random.Random) -> str:
    unit = rng.choice(("metres", "kilos", "litres", "degrees", "miles", "hours", "minutes"))
    return f"{rng.randint(2, 400)} {unit}"


def _time(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return f"{rng.randint(1, 12)} {rng.choice(('am', 'pm'))}"
    return f"{rng.randint(0, 23)}:{rng.choice(('00', '15', '30', '45', '10', '20', '50'))}"


def _date(rng: random.Random) -> str:
    return f"{rng.randint(1, 28)} {rng.choice(w.MONTHS)}"


def _adjective(rng: random.Random) -> str:
    return rng.choice(w.ADJECTIVES)


def _noun(rng: random.Random) -> str:
    return rng.choice(w.THINGS)


def _pick(items: list[str]) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(items)


def _place(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.35:
        return f"in the {rng.choice(w.ROOMS)}"
    if style < 0.45:
        return f"in the {_adjective(rng)} {rng.choice(w.ROOMS)}"
    if style < 0.65:
        return f"in the {_adjective(rng)} {rng.choice(w.CONTAINERS)}"
    if style < 0.75:
        return f"in {_city(rng)}"
    preposition = rng.choice(("under", "on", "behind", "near", "next to", "inside"))
    adjective = f"{_adjective(rng)} " if rng.random() < 0.4 else ""
    return f"{preposition} the {adjective}{_noun(rng)}"


def _thing(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.2:
        return f"the {_noun(rng)}"
    if style < 0.6:
        return f"the {_adjective(rng)} {_noun(rng)}"
    if style < 0.75:
        return f"the {rng.choice(w.ROOMS)} {_noun(rng)}"
    if style < 0.82:
        return f"the {rng.choice(w.SURNAMES)} {_noun(rng)}"
    if style < 0.9:
        noun = rng.choice(("room", "gate", "locker", "box", "floor", "platform", "unit", "desk"))
        return f"{noun} {rng.randint(1, 60)}"
    if style < 0.95:
        return f"project {invented_word(rng).capitalize()}"
    return f"the {invented_word(rng)} {_noun(rng)}"


def _area(rng: random.Random) -> str:
    adjective = f"{_adjective(rng)} " if rng.random() < 0.25 else ""
    return f"the {adjective}{rng.choice(w.ROOMS)}"


def _person(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.65:
        return _name(rng)
    if style < 0.85:
        return f"{rng.choice(('Mr', 'Mrs', 'Ms', 'Dr'))} {rng.choice(w.SURNAMES)}"
    return f"my {rng.choice(w.RELATIONS)}"


def _event(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.4:
        return f"the {rng.choice(w.EVENTS)}"
    if style < 0.7:
        return f"the {rng.choice(w.ABSTRACT)} {rng.choice(w.EVENTS)}"
    return f"the {rng.choice(w.EVENTS)} with {_name(rng)}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _for_assistant(text: str) -> str:
    """`text` as the assistant says it: my sister is your sister."""
    return re.sub(r"^my\b", "your", text)


# ---------------------------------------------------------------------------------------------
# Kinds of facts


@dataclass(frozen=True)
class _Kind:
    """How one kind of fact is stated, overridden, asked for and answered.

    Slots: {v} value, {old} the value before, {e} the subject, {x} a second part of it, {np} a
    phrase such as "the code of the north gate", {a} the attribute in it; a capital letter
    capitalises the slot.
    """

    name: str
    value: Callable[[random.Random], str]
    subject: Callable[[random.Random], str]
    states: tuple[str, ...]
    updates: tuple[str, ...]
    asks: tuple[str, ...]
    answer: str
    unknown: str
    extra: Callable[[random.Random], str] | None = None  # draws {x}
    weight: float = 1.0
    in_system: bool = True  # whether a system message may state it
    unseen_states: tuple[str, ...] = ()
    unseen_asks: tuple[str, ...] = ()


# Sentences about a noun phrase, shared by all attributes.
_NP_STATES = (
    "{Np} is {v}.",
    "{Np} is {v}.",
    "{Np} is {v}.",
    "{Np}: {v}",
    "{Np} = {v}",
    "Remember that {np} is {v}.",
    "Please remember that {np} is {v}.",
    "Please remember: {np} is {v}.",
    "Please note that {np} is {v}.",
    "Note that {np} is {v}.",
    "Note: {np} is {v}.",
    "Just so you know, {np} is {v}.",
    "By the way, {np} is {v}.",
    "You should know that {np} is {v}.",
    "For your information, {np} is {v}.",
    "Keep in mind that {np} is {v}.",
    "They told me that {np} is {v}.",
    "I was told that {np} is {v}.",
    "I just learned that {np} is {v}.",
    "We set {np} to {v}.",
    "We chose {v} as {np}.",
    "Let me tell you {np}: it is {v}.",
    "Do not forget {np}, which is {v}.",
    "As {np} we use {v}.",
    "{V} is {np}.",
    "It is important that {np} is {v}.",
    "Here is {np}: {v}.",
    "Write this down: {np} is {v}.",
    "You will need this later: {np} is {v}.",
    "According to the manager, {np} is {v}.",
    "Good news, {np} is finally {v}.",
    "Save this: {np} is {v}.",
    "I can tell you that {np} is {v}.",
    "Everybody knows that {np} is {v}.",
    "Someone said {np} is {v}.",
    "{V} is used as {np}.",
    "I checked, and {np} is {v}.",
    "{Np} will be {v}.",
)
_NP_UPDATES = (
    "{Np} is now {v}.",
    "{Np} is now {v}.",
    "{Np} is {v} now.",
    "{Np} has changed to {v}.",
    "{Np} changed to {v}.",
    "{Np} has changed. It is {v} now.",
    "{Np} was changed to {v}.",
    "Correction: {np} is {v}.",
    "Update: {np} is {v}.",
    "Update: {np} is now {v}.",
    "Actually, {np} is {v}.",
    "Sorry, I was wrong: {np} is {v}.",
    "Forget what I said about {np}. It is {v}.",
    "From now on, {np} is {v}.",
    "As of today, {np} is {v}.",
    "Since this morning {np} is {v}.",
    "We changed {np} to {v}.",
    "We changed {np} from {old} to {v}.",
    "Somebody changed {np} to {v}.",
    "{Np} is no longer {old}. It is {v}.",
    "{Np} is not {old} any more, it is {v}.",
    "{Np} was {old}, but now it is {v}.",
    "{Np} used to be {old}, now it is {v}.",
    "Instead of {old}, {np} is now {v}.",
    "Please change {np} to {v}.",
    "The new value of {np} is {v}.",
)
_NP_ASKS = (
    "What is {np}?",
    "What is {np}?",
    "What is {np}?",
    "What's {np}?",
    "what is {np}",
    "What was {np}?",
    "What was {np} again?",
    "What is {np} now?",
    "What is {np} at the moment?",
    "Tell me {np}.",
    "Please tell me {np}.",
    "Can you tell me {np}?",
    "Could you tell me {np}, please?",
    "Could you remind me of {np}?",
    "Remind me of {np}, please.",
    "Do you remember {np}?",
    "Do you know {np}?",
    "Do you still know {np}?",
    "I forgot {np}. What is it?",
    "I cannot remember {np}. Can you help me?",
    "I need {np}.",
    "Give me {np}.",
    "{Np}?",
    "So what is {np}?",
    "Quick question: what is {np}?",
    "And what is {np}?",
    "One more thing: what is {np}?",
    "Let me check: what is {np}?",
    "I would like to know {np}.",
    "Someone asked me for {np}. What is it?",
    "Would you mind telling me {np}?",
    "Hmm, what might {np} be?",
    "My memory is bad today. What is {np}?",
    "Before I go, please say {np} once more.",
    "Say {np}.",
    "Repeat {np}, please.",
    "I want to know {np}.",
    "What did I say about {np}?",
    "What do you know about {np}?",
    "Can I have {np}?",
    "Could I get {np} from you?",
    "Please give me {np}.",
    "Which is {np}?",
    "Do you have {np}?",
    "What would {np} be?",
    "{Np}, please.",
    "What is the current value of {np}?",
    "Is there {np} in your notes?",
    "Help me with {np}.",
)
_NP_UNSEEN_STATES = (
    "If anyone asks, {np} is {v}.",
    "My notes say that {np} is {v}.",
    "As far as I know, {np} is {v}.",
    "We agreed that {np} is {v}.",
)
_NP_UNSEEN_ASKS = (
    "I really have to know {np} now.",
    "May I ask what {np} is?",
    "Let me hear {np} again.",
    "Look up {np} for me.",
)
# Sentences about a subject and its attribute, for attributes of things and of other people.
_OWNED_STATES = (
    "{E} has the {a} {v}.",
    "For {e} the {a} is {v}.",
    "For {e}, the {a} is {v}.",
    "{E}: {a} {v}",
    "{E}, {a}: {v}",
    "About {e}: the {a} is {v}.",
)
_OWNED_UPDATES = (
    "{E} now has the {a} {v}.",
    "{E} has a new {a}. It is {v}.",
    "{E} has a new {a}: {v}.",
    "For {e} the {a} is now {v}.",
)
_OWNED_ASKS = (
    "Which {a} does {e} have?",
    "What {a} does {e} have?",
    "{E} has which {a}?",
    "For {e}, what is the {a}?",
    "Do you know which {a} {e} has?",
)

# Attribute name, its values, what may have it.
_THING_ATTRIBUTES: tuple[tuple[str, Callable[[random.Random], str]], ...] = (
    ("code", _code),
    ("code", _code),
    ("code", _code),
    ("access code", _code),
    ("PIN", lambda rng: _digits(rng, 4, 4)),
    ("number", _digits),
    ("serial number", _code),
    ("phone number", _digits),
    ("combination", _digits),
    ("password", _word),
    ("secret word", _word),
    ("name", _word),
    ("nickname", _word),
    ("value", _price),
    ("weight", _measure),
    ("height", _measure),
    ("length", _measure),
    ("temperature", _measure),
    ("keeper", _person_value),
    ("manager", _person_value),
    ("material", _pick(w.MATERIALS)),
    ("age", _number),
    ("deadline", _date),
    ("status", _adjective),
    ("type", _word),
    ("label", _word),
    ("symbol", _word),
)
_PERSON_ATTRIBUTES: tuple[tuple[str, Callable[[random.Random], str]], ...] = (
    ("favourite colour", _colour),
    ("favourite colour", _colour),
    ("favourite food", _pick(w.FOODS)),
    ("favourite city", _city),
    ("favourite animal", _pick(w.ANIMALS)),
    ("favourite number", _number),
    ("favourite day", _pick(w.WEEKDAYS)),
    ("favourite word", _word),
    ("phone number", _digits),
    ("room number", _digits),
    ("code", _code),
    ("password", _word),
    ("PIN", lambda rng: _digits(rng, 4, 4)),
    ("nickname", _word),
    ("birthday", _date),
    ("age", _number),
    ("home town", _city),
    ("hobby", _pick(w.ABSTRACT)),
    ("boss", _person_value),
    ("teacher", _person_value),
    ("seat", _code),
)


def _attribute_kind(
    owner: str,
    attribute: str,
    value: Callable[[random.Random], str],
    subject: Callable[[random.Random], str],
    weight: float,
) -> _Kind:
    return _Kind(
        name=f"{owner}:{attribute}",
        value=value,
        subject=subject,
        states=_NP_STATES + (() if owner == "self" else _OWNED_STATES),
        updates=_NP_UPDATES + (() if owner == "self" else _OWNED_UPDATES),
        asks=_NP_ASKS + (() if owner == "self" else _OWNED_ASKS),
        answer="{Np} is {v}.",
        unknown="I don't know {np}.",
        weight=weight,
        in_system=owner != "self",
        unseen_states=_NP_UNSEEN_STATES,
        unseen_asks=_NP_UNSEEN_ASKS,
    )


_OTHER_KINDS = (
    _Kind(
        name="place",
        value=_place,
        subject=lambda rng: _thing(rng) if rng.random() < 0.75 else _person(rng),
        states=(
            "{E} is {v}.",
            "{E} is {v}.",
            "They keep {e} {v}.",
            "Look, {e} is {v}!",
            "{E} was found {v}.",
            "Remember that {e} is {v}.",
            "Please note that {e} is {v}.",
            "By the way, {e} is {v}.",
            "You can find {e} {v}.",
            "You will find {e} {v}.",
            "I saw {e} {v}.",
            "We left {e} {v}.",
            "Somebody put {e} {v}.",
            "{E} can be found {v}.",
            "Just so you know, {e} is {v}.",
            "The location of {e} is {v}.",
            "{E}: {v}",
        ),
        updates=(
            "{E} is now {v}.",
            "{E} is {v} now.",
            "{E} has moved and is now {v}.",
            "Correction: {e} is {v}.",
            "Update: {e} is now {v}.",
            "Actually, {e} is {v}.",
            "Sorry, I was wrong: {e} is {v}.",
            "{E} is no longer {old}. Now it is {v}.",
            "{E} was {old}, but now it is {v}.",
            "We moved {e}. You will find it {v} now.",
        ),
        asks=(
            "Where is {e}?",
            "Any idea where {e} is?",
            "In which place should I look for {e}?",
            "Where did I put {e}?",
            "Where do I find {e}?",
            "Show me where {e} is.",
            "Where is {e}?",
            "Where's {e}?",
            "where is {e}",
            "Where is {e} now?",
            "Where can I find {e}?",
            "Where could {e} be?",
            "Do you know where {e} is?",
            "Do you remember where {e} is?",
            "Can you tell me where {e} is?",
            "Tell me where {e} is.",
            "I am looking for {e}. Where is it?",
            "I cannot find {e}.",
            "What is the location of {e}?",
            "And where is {e}?",
        ),
        answer="{E} is {v}.",
        unknown="I don't know where {e} is.",
        weight=9.0,
        unseen_states=("I noticed that {e} is {v}.",),
        unseen_asks=("Where should I look for {e}?", "I wonder where {e} is."),
    ),
    _Kind(
        name="count in a place",
        value=_number,
        subject=_area,
        extra=_pick(w.COUNTABLES),
        states=(
            "There are {v} {x} in {e}.",
            "There are {v} {x} in {e}.",
            "Inside {e} you can see {v} {x}.",
            "You can see {v} {x} in {e}.",
            "{V} {x} are in {e}.",
            "Remember that there are {v} {x} in {e}.",
            "In {e} there are {v} {x}.",
            "We have {v} {x} in {e}.",
            "I counted {v} {x} in {e}.",
            "{E} has {v} {x}.",
            "{E} holds {v} {x}.",
            "Note: there are {v} {x} in {e}.",
            "Number of {x} in {e}: {v}",
        ),
        updates=(
            "There are now {v} {x} in {e}.",
            "Now there are {v} {x} in {e}.",
            "Correction: there are {v} {x} in {e}.",
            "Update: there are {v} {x} in {e}.",
            "Actually, there are {v} {x} in {e}.",
            "There are no longer {old} {x} in {e}, but {v}.",
            "The number of {x} in {e} is now {v}.",
            "I counted again: there are {v} {x} in {e}.",
        ),
        asks=(
            "How many {x} are there in {e}?",
            "If I count the {x} in {e}, what do I get?",
            "Count the {x} in {e}.",
            "{E} has how many {x}?",
            "How many {x} can I find in {e}?",
            "How many {x} are there in {e}?",
            "How many {x} are in {e}?",
            "how many {x} are in {e}",
            "How many {x} does {e} have?",
            "How many {x} do we have in {e}?",
            "What is the number of {x} in {e}?",
            "Do you know how many {x} are in {e}?",
            "Tell me how many {x} are in {e}.",
            "Can you tell me how many {x} there are in {e}?",
        ),
        answer="There are {v} {x} in {e}.",
        unknown="I don't know how many {x} are in {e}.",
        weight=6.0,
        unseen_states=("I found {v} {x} in {e}.",),
        unseen_asks=("Please count the {x} in {e} for me.",),
    ),
    _Kind(
        name="count of a person",
        value=_number,
        subject=_person,
        extra=_pick(w.COUNTABLES),
        states=(
            "{E} has {v} {x}.",
            "{E} has {v} {x}.",
            "It turns out that {e} has {v} {x}.",
            "{E} got {v} {x}.",
            "{V} {x} belong to {e}.",
            "{E} owns {v} {x}.",
            "{E} bought {v} {x}.",
            "Remember that {e} has {v} {x}.",
            "By the way, {e} has {v} {x}.",
        ),
        updates=(
            "{E} now has {v} {x}.",
            "{E} has {v} {x} now.",
            "Correction: {e} has {v} {x}.",
            "Actually, {e} has {v} {x}.",
            "{E} no longer has {old} {x}, but {v}.",
            "Update: {e} now has {v} {x}.",
        ),
        asks=(
            "How many {x} does {e} have?",
            "{E} has how many {x}?",
            "What number of {x} does {e} have?",
            "How many {x} does {e} have?",
            "how many {x} does {e} have",
            "How many {x} does {e} have now?",
            "How many {x} does {e} own?",
            "Do you know how many {x} {e} has?",
            "Tell me how many {x} {e} has.",
        ),
        answer="{E} has {v} {x}.",
        unknown="I don't know how many {x} {e} has.",
        weight=4.0,
        unseen_states=("I heard that {e} has {v} {x}.",),
        unseen_asks=("Could you say how many {x} {e} has?",),
    ),
    _Kind(
        name="colour",
        value=_colour,
        subject=_thing,
        states=(
            "{E} is {v}.",
            "{E} is {v}.",
            "As you can see, {e} is {v}.",
            "{E} has the colour {v}.",
            "{E} looks {v}.",
            "Remember that {e} is {v}.",
            "{E} is painted {v}.",
            "We painted {e} {v}.",
            "The colour of {e} is {v}.",
            "The color of {e} is {v}.",
            "Note: {e} is {v}.",
        ),
        updates=(
            "{E} is now {v}.",
            "{E} is {v} now.",
            "We painted {e} {v}, so it is no longer {old}.",
            "Correction: {e} is {v}.",
            "The colour of {e} is now {v}.",
            "The colour of {e} has changed from {old} to {v}.",
            "Actually, {e} is {v}.",
        ),
        asks=(
            "What colour is {e}?",
            "In what colour was {e} painted?",
            "Is {e} red or another colour?",
            "What colour does {e} have?",
            "{E} is what colour?",
            "What colour is {e}?",
            "What color is {e}?",
            "what colour is {e}",
            "What is the colour of {e}?",
            "What's the color of {e}?",
            "Which colour does {e} have?",
            "Do you remember what colour {e} is?",
            "Tell me the colour of {e}.",
        ),
        answer="{E} is {v}.",
        unknown="I don't know what colour {e} is.",
        weight=7.0,
        unseen_states=("They say that {e} is {v}.",),
        unseen_asks=("Can you describe the colour of {e}?",),
    ),
    _Kind(
        name="lives",
        value=_city,
        subject=_person,
        states=(
            "{E} lives in {v}.",
            "{E} lives in {v}.",
            "{E} found a flat in {v} and lives there.",
            "The home of {e} is in {v}.",
            "Remember that {e} lives in {v}.",
        ),
        updates=(
            "{E} now lives in {v}.",
            "{E} has moved to {v}.",
            "{E} moved from {old} to {v}.",
            "{E} lives in {v} now.",
            "Correction: {e} lives in {v}.",
        ),
        asks=(
            "Where does {e} live?",
            "Which city is the home of {e}?",
            "What city does {e} live in?",
            "where does {e} live",
            "In which city does {e} live?",
            "Where does {e} live now?",
            "Do you know where {e} lives?",
            "Tell me where {e} lives.",
        ),
        answer="{E} lives in {v}.",
        unknown="I don't know where {e} lives.",
        weight=3.0,
        unseen_states=("I know that {e} lives in {v}.",),
        unseen_asks=("Can you tell me where {e} lives?",),
    ),
    _Kind(
        name="works",
        value=_pick(w.JOBS),
        subject=_person,
        states=(
            "{E} works as a {v}.",
            "{E} is a {v}.",
            "{E} is working as a {v}.",
            "Remember that {e} works as a {v}.",
        ),
        updates=(
            "{E} now works as a {v}.",
            "{E} is a {v} now.",
            "{E} is no longer a {old}, but a {v}.",
            "Correction: {e} works as a {v}.",
        ),
        asks=(
            "What does {e} do?",
            "How does {e} earn money?",
            "Which job does {e} have?",
            "What does {e} do for a living?",
            "What does {e} work as?",
            "Do you know what {e} works as?",
            "What is {e}'s job?",
        ),
        answer="{E} works as a {v}.",
        unknown="I don't know what {e} works as.",
        weight=2.0,
        unseen_asks=("Can you tell me what {e} works as?",),
    ),
    _Kind(
        name="likes",
        value=lambda rng: rng.choice(w.FOODS) if rng.random() < 0.6 else rng.choice(w.ABSTRACT),
        subject=_person,
        states=("{E} likes {v}.", "{E} likes {v}.", "{E} loves {v}.", "You know, {e} likes {v}."),
        updates=(
            "{E} now likes {v}.",
            "{E} no longer likes {old}, but {v}.",
            "Correction: {e} likes {v}.",
            "These days {e} likes {v}.",
        ),
        asks=(
            "What does {e} like?",
            "What would make {e} happy?",
            "Which thing does {e} like?",
            "what does {e} like",
            "Do you remember what {e} likes?",
            "Tell me what {e} likes.",
        ),
        answer="{E} likes {v}.",
        unknown="I don't know what {e} likes.",
        weight=2.0,
        unseen_asks=("Can you tell me what {e} likes?",),
    ),
    _Kind(
        name="pet",
        value=_name,
        subject=_person,
        extra=_pick(w.ANIMALS),
        states=(
            "{E} has a {x} called {v}.",
            "{E} has a {x} named {v}.",
            "{E}'s {x} is called {v}.",
            "The name of {e}'s {x} is {v}.",
        ),
        updates=(
            "{E} now has a {x} called {v}.",
            "{E}'s {x} is now called {v}.",
            "Correction: {e}'s {x} is called {v}.",
            "{E}'s {x} is not called {old}, but {v}.",
        ),
        asks=(
            "What is {e}'s {x} called?",
            "By which name does {e} call the {x}?",
            "How is {e}'s {x} called?",
            "What is the name of {e}'s {x}?",
            "What's {e}'s {x}'s name?",
            "Do you know the name of {e}'s {x}?",
        ),
        answer="{E}'s {x} is called {v}.",
        unknown="I don't know what {e}'s {x} is called.",
        weight=2.0,
        unseen_asks=("Can you tell me what {e}'s {x} is called?",),
    ),
    _Kind(
        name="day",
        value=lambda rng: rng.choice(w.WEEKDAYS) if rng.random() < 0.6 else _date(rng),
        subject=_event,
        states=(
            "{E} is on {v}.",
            "{E} is on {v}.",
            "{E} will be on {v}.",
            "{E} takes place on {v}.",
            "Remember that {e} is on {v}.",
        ),
        updates=(
            "{E} is now on {v}.",
            "{E} has been moved to {v}.",
            "{E} was moved from {old} to {v}.",
            "Correction: {e} is on {v}.",
            "{E} is not on {old}, but on {v}.",
        ),
        asks=(
            "When is {e}?",
            "For which day is {e} planned?",
            "Which day is {e} on?",
            "when is {e}",
            "On which day is {e}?",
            "What day is {e}?",
            "Do you know when {e} is?",
            "Tell me when {e} is.",
        ),
        answer="{E} is on {v}.",
        unknown="I don't know when {e} is.",
        weight=3.0,
        unseen_asks=("Can you tell me when {e} is?",),
    ),
    _Kind(
        name="time",
        value=_time,
        subject=_event,
        states=(
            "{E} starts at {v}.",
            "{E} begins at {v}.",
            "{E} will start at {v}.",
            "Remember that {e} starts at {v}.",
        ),
        updates=(
            "{E} now starts at {v}.",
            "{E} starts at {v} now.",
            "{E} does not start at {old}, but at {v}.",
            "Correction: {e} starts at {v}.",
        ),
        asks=(
            "When does {e} start?",
            "At which hour does {e} begin?",
            "When will {e} start?",
            "At what time does {e} start?",
            "What time does {e} begin?",
            "Tell me when {e} starts.",
            "Do you know when {e} starts?",
        ),
        answer="{E} starts at {v}.",
        unknown="I don't know when {e} starts.",
        weight=3.0,
        unseen_asks=("Can you tell me when {e} starts?",),
    ),
    _Kind(
        name="owner",
        value=_person_value,
        subject=_thing,
        states=(
            "{E} belongs to {v}.",
            "{E} belongs to {v}.",
            "{V} owns {e}.",
            "Remember that {e} belongs to {v}.",
            "The owner of {e} is {v}.",
        ),
        updates=(
            "{E} now belongs to {v}.",
            "{E} belongs to {v} now.",
            "{E} no longer belongs to {old}, but to {v}.",
            "Correction: {e} belongs to {v}.",
            "The owner of {e} is now {v}.",
            "{V} bought {e}, so it belongs to {v} now.",
        ),
        asks=(
            "Who owns {e}?",
            "Whose is {e}?",
            "Who has {e}?",
            "Who does {e} belong to?",
            "To whom does {e} belong?",
            "who owns {e}",
            "Who is the owner of {e}?",
            "Do you know who owns {e}?",
            "Tell me who owns {e}.",
        ),
        answer="{E} belongs to {v}.",
        unknown="I don't know who owns {e}.",
        weight=3.0,
        unseen_asks=("Can you tell me who owns {e}?",),
    ),
    _Kind(
        name="price",
        value=_price,
        subject=_thing,
        states=(
            "{E} costs {v}.",
            "{E} costs {v}.",
            "I paid {v} for {e}.",
            "Note: {e} costs {v}.",
            "The price of {e} is {v}.",
        ),
        updates=(
            "{E} now costs {v}.",
            "{E} costs {v} now.",
            "The price of {e} is now {v}.",
            "{E} no longer costs {old}, but {v}.",
            "Correction: {e} costs {v}.",
        ),
        asks=(
            "How much does {e} cost?",
            "How much money do I need for {e}?",
            "What is the cost of {e}?",
            "What do I pay for {e}?",
            "What does {e} cost?",
            "how much is {e}",
            "How much is {e}?",
            "What is the price of {e}?",
            "Do you know how much {e} costs?",
        ),
        answer="{E} costs {v}.",
        unknown="I don't know how much {e} costs.",
        weight=3.0,
        unseen_asks=("Can you tell me how much {e} costs?",),
    ),
    _Kind(
        name="your name",
        value=_name,
        subject=lambda rng: "your name",
        states=(
            "My name is {v}.",
            "My name is {v}.",
            "I am {v}.",
            "I'm {v}.",
            "I am called {v}.",
            "You can call me {v}.",
        ),
        updates=(
            "Please call me {v} from now on.",
            "Actually, my name is {v}.",
            "Sorry, my name is not {old}, it is {v}.",
            "Correction: my name is {v}.",
        ),
        asks=(
            "What is my name?",
            "By what name do I go?",
            "Tell me my name.",
            "Say my name.",
            "What is my name?",
            "What's my name?",
            "what is my name",
            "Who am I?",
            "Do you remember my name?",
            "Do you know my name?",
            "How am I called?",
            "Can you tell me my name?",
        ),
        answer="Your name is {v}.",
        unknown="I don't know your name.",
        weight=6.0,
        in_system=False,
        unseen_asks=("Could you tell me what my name is?",),
    ),
    _Kind(
        name="you live",
        value=_city,
        subject=lambda rng: "your city",
        states=("I live in {v}.", "I live in {v}.", "My home is in {v}.", "I am from {v}."),
        updates=("I moved to {v}.", "Now I live in {v}.", "I no longer live in {old}, but in {v}."),
        asks=("Where do I live?", "where do I live", "In which city do I live?"),
        answer="You live in {v}.",
        unknown="I don't know where you live.",
        weight=2.0,
        in_system=False,
    ),
    _Kind(
        name="you work",
        value=_pick(w.JOBS),
        subject=lambda rng: "your job",
        states=("I work as a {v}.", "I am a {v}.", "I'm a {v}."),
        updates=("Now I work as a {v}.", "I am no longer a {old}, but a {v}."),
        asks=("What do I do for a living?", "What do I work as?", "What is my profession?"),
        answer="You work as a {v}.",
        unknown="I don't know what you work as.",
        weight=1.5,
        in_system=False,
    ),
    _Kind(
        name="my name",
        value=_name,
        subject=lambda rng: "my own name",
        states=(
            "You are {v}, a friendly assistant.",
            "You are {v}, a helpful assistant.",
            "You are {v}.",
            "Your name is {v}.",
            "You are an assistant called {v}.",
            "You are an assistant. Your name is {v}.",
        ),
        updates=("From now on your name is {v}.", "Your name is now {v}.", "I will call you {v}."),
        asks=(
            "What is your name?",
            "What's your name?",
            "Who are you?",
            "what is your name",
            "How are you called?",
        ),
        answer="My name is {v}.",
        unknown="I don't have a name.",
        weight=4.0,
    ),
)


def _all_kinds() -> tuple[_Kind, ...]:
    kinds = list(_OTHER_KINDS)
    kinds += [_attribute_kind("thing", a, v, _thing, 1.0) for a, v in _THING_ATTRIBUTES]
    kinds += [_attribute_kind("person", a, v, _person, 0.5) for a, v in _PERSON_ATTRIBUTES]
    kinds += [_attribute_kind("self", a, v, lambda rng: "me", 0.35) for a, v in _PERSON_ATTRIBUTES]
    # Attributes nobody thought of: any word can be one.
    kinds.append(_attribute_kind("thing", "*", _word, _thing, 3.0))
    kinds.append(_attribute_kind("thing", "*", _code, _thing, 3.0))
    return tuple(kinds)


KINDS = _all_kinds()
_NAMES = frozenset(w.NAMES)
_KEEP_CAPITAL = _NAMES | set(w.CITIES) | set(w.WEEKDAYS) | {"Mr", "Mrs", "Ms", "Dr", "I", "I'm"}
_KIND_WEIGHTS = tuple(kind.weight for kind in KINDS)


@lru_cache(maxsize=200_000)
def _is_held_out(subject: str) -> bool:
    return zlib.crc32(subject.lower().encode()) % 10 == 0


def _may_use(subject: str, split: str) -> bool:
    """Whether a split may state facts about `subject`.

    Subjects of three words and more ("the north gate") belong to one split. Shorter ones ("Anna",
    "the gate", "my sister") are in both: a name that is never a subject in training would be a
    word that the model cannot look up.
    """
    return subject.count(" ") < 2 or _is_held_out(subject) == (split == "held_out")


def _phrases(kind: _Kind, subject: str, extra: str) -> tuple[str, ...]:
    """Ways to say what is asked about, for an attribute; the first is the assistant's."""
    owner, colon, attribute = kind.name.partition(":")
    if not colon:
        return ()
    if attribute == "*":
        attribute = extra
    american = attribute.replace("favourite", "favorite").replace("colour", "color")
    if owner == "self":
        return (f"my {attribute}", f"my {attribute}", f"my {american}")
    if owner == "person":
        own = f"{subject}'s {attribute}"
        return (own, own, own, f"{subject}'s {american}", f"the {attribute} of {subject}")
    of = f"the {attribute} of {subject}"
    ways = [of, of, of, f"the {attribute} for {subject}", f"{subject}'s {attribute}"]
    if subject.startswith("the "):
        ways.append(f"{subject} {attribute}")
    return tuple(ways)


@dataclass
class _Fact:
    kind: _Kind
    subject: str
    extra: str
    phrases: tuple[str, ...]
    value: str = ""
    old: str = ""
    version: int = -1  # -1: never stated
    mention: tuple[int, int] = (-1, 0)

    @property
    def attribute(self) -> str:
        attribute = self.kind.name.partition(":")[2]
        return self.extra if attribute == "*" else attribute

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.kind.name, self.subject, self.extra)

    def say(self, template: str, rng: random.Random) -> str:
        """A sentence of the user or of the system message."""
        phrase = rng.choice(self.phrases) if self.phrases else ""
        return self._fill(template, self.subject, phrase)

    def reply(self, template: str) -> str:
        """A sentence of the assistant: always in the same words."""
        phrase = self.phrases[0] if self.phrases else ""
        return self._fill(template, _for_assistant(self.subject), _for_assistant(phrase))

    def _fill(self, template: str, subject: str, phrase: str) -> str:
        text = template.format(
            v=self.value,
            V=_capital(self.value),
            old=self.old,
            e=subject,
            E=_capital(subject),
            x=self.extra,
            a=self.attribute,
            np=phrase,
            Np=_capital(phrase),
        )
        return text

    def answer(self) -> str:
        return self.reply(self.kind.answer if self.version >= 0 else self.kind.unknown)


# ---------------------------------------------------------------------------------------------
# Filler and small talk


class _Draws(Mapping[str, str]):
    """A mapping for `str.format_map` that draws a new word at each access."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._draws: dict[str, Callable[[], str]] = {
            "adj": lambda: rng.choice(w.ADJECTIVES),
            "thing": lambda: rng.choice(w.THINGS),
            "room": lambda: rng.choice(w.ROOMS),
            "name": lambda: _name(rng),
            "surname": lambda: rng.choice(w.SURNAMES),
            "city": lambda: _city(rng),
            "food": lambda: rng.choice(w.FOODS),
            "many": lambda: rng.choice(w.COUNTABLES),
            "animal": lambda: rng.choice(w.ANIMALS),
            "job": lambda: rng.choice(w.JOBS),
            "verb": lambda: rng.choice(w.VERBS),
            "adv": lambda: rng.choice(w.ADVERBS),
            "moment": lambda: rng.choice(w.MOMENTS),
            "weather": lambda: rng.choice(w.WEATHER),
            "topic": lambda: rng.choice(w.ABSTRACT),
            "event": lambda: rng.choice(w.EVENTS),
            "day": lambda: rng.choice(w.WEEKDAYS),
            "material": lambda: rng.choice(w.MATERIALS),
            "number": lambda: str(rng.randint(2, 400)),
            "year": lambda: str(rng.randint(1700, 2020)),
            "colour": lambda: rng.choice(w.COLOURS),
            "odd": lambda: invented_word(rng, rng.randint(1, 3)),
        }

    def __getitem__(self, key: str) -> str:
        word = self._draws[key.lower()]()
        return _capital(word) if key[0].isupper() else word

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._draws)

    def __len__(self) -> int:
        return len(self._draws)


_FILLER = (
    "{Name} {verb} the {adj} {thing} {moment}.",
    "{Moment}, {name} {verb} a {adj} {thing} near the {room}.",
    "The {weather} weather lasted for {number} days.",
    "It was a {weather} {day}, and the {room} was {adj}.",
    "{Name} and {name} walked {adv} to the {room}.",
    "Nobody {verb} the {thing} because the {room} was {adj}.",
    "The people of {city} are proud of their {topic}.",
    "In {year} a {job} from {city} built a {adj} {room}.",
    "Many {many} were sold at the market {moment}.",
    "{Name} talked about {topic} and {topic} for a long time.",
    "The {animal} slept {adv} under the {thing}.",
    "A {job} needs a {adj} {thing} and a lot of patience.",
    "They cooked {food} with {food} {moment}.",
    "The road to {city} is {adj} and {adj}.",
    "Some visitors {verb} the {thing}, others {verb} the {thing}.",
    "{Name} {adv} {verb} the {thing} and went back to the {room}.",
    "We had {food} for lunch, and the {animal} got the rest.",
    "The {event} was {adj}, but the {event} after it was {adj}.",
    "There was a {thing} of {material} beside the {room}.",
    "Old {thing}s of {material} are hard to repair.",
    "{Name} wrote a letter to {name} about the {event}.",
    "The {surname} family {verb} the {room} in {year}.",
    "When the {weather} season came, everybody {verb} the {many}.",
    "It took {number} minutes to reach the {room}.",
    "Mr {surname} asked whether the {thing} was {adj}.",
    "The {job} laughed, and the {job} {verb} the {thing}.",
    "A {adj} {animal} ran {adv} through the {room}.",
    "The book about {topic} has {number} pages.",
    "Children in {city} learn {topic} at school.",
    "{Name} dreamed of a {adj} {room} by the sea.",
    "The wind blew {adv} over the {room}.",
    "I think that {topic} is more useful than {topic}.",
    "My {thing} looks {adj}, and I {verb} it {moment}.",
    "We should talk about {topic} some other time.",
    "The {colour} sky over {city} was {adj} {moment}.",
    "{Name} sang an {adj} song about a {animal} and a {thing}.",
    "Page {number} tells the story of a {job} in {city}.",
    "The {odd} is a {adj} {animal} that lives near {city}.",
    "Few people have heard of {Odd}, where {topic} began.",
    "First {name} {verb} the {many}, then {name} {verb} the {thing}.",
    "It is said that the {room} of {city} has a {adj} {thing}.",
    "The train from {city} to {city} was {number} minutes late.",
    "For {food} you need water, salt and a {adj} oven.",
    "The {thing} broke {moment}, so {name} {verb} another one.",
    "Everyone at the {event} {verb} the {adj} {many}.",
)

_SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hello!", "Hello", "Hi!", "Hi", "Hi there!", "Hey!", "hello", "hi", "Good morning!"),
        "Hello! How can I help you?",
    ),
    (("Good evening!", "Good afternoon!", "Greetings!"), "Hello! How can I help you?"),
    (
        ("How are you?", "Hello, how are you?", "Hi, how are you?", "How are you today?"),
        "I am fine, thank you. How can I help you?",
    ),
    (
        ("Thank you!", "Thanks!", "Thanks a lot!", "Thank you very much.", "thanks"),
        "You are welcome.",
    ),
    (
        ("Great!", "Good.", "Okay.", "OK", "Perfect.", "Nice!", "That is right.", "I see."),
        "Is there anything else?",
    ),
    (("Goodbye!", "Bye!", "See you later!", "Good night!", "bye"), "Goodbye!"),
    (
        (
            "What can you do?",
            "How can you help me?",
            "What are you?",
            "Are you a robot?",
            "What do you know?",
            "Help!",
        ),
        "I am a small model. Tell me facts and ask me about them later.",
    ),
    (
        (
            "Please remember what I tell you.",
            "I will tell you some facts.",
            "Listen carefully.",
            "Can you remember something for me?",
            "I want to tell you something.",
            "Let us begin.",
        ),
        "Of course. I will remember what you tell me.",
    ),
    (
        (
            "Tell me a joke.",
            "Tell me a story about a {adj} {animal}.",
            "Write a poem about {topic}.",
            "Write a story about {name}.",
            "What is the capital of {city}?",
            "What is {number} plus {number}?",
            "What do you think about {topic}?",
            "How do I repair a {thing}?",
            "How do I cook {food}?",
            "What is the weather like?",
            "Who invented the {thing}?",
            "Explain {topic} to me.",
            "What is the meaning of {topic}?",
            "Translate this into another language.",
            "Why is the sky {colour}?",
            "Sing a song about {food}.",
            "What is a {thing}?",
            "Can you recommend a {room} in {city}?",
        ),
        "Sorry, I only know what is said in this chat.",
    ),
)

# What people put before and behind a sentence that matters.
_OPENERS = (
    "Hey,",
    "Listen,",
    "Okay,",
    "So,",
    "Well,",
    "Look,",
    "One thing:",
    "Another thing:",
    "Hello,",
    "Sorry,",
    "Ah yes,",
    "{Name} says that",
    "{Name} told me that",
    "According to {name},",
    "It turns out that",
    "I heard that",
    "It seems that",
    "For the {event}:",
)
_ASK_OPENERS = (
    "Hey,",
    "Hmm,",
    "Okay,",
    "So,",
    "Well,",
    "Sorry,",
    "Hello,",
    "And",
    "Now,",
    "Listen,",
    "{Name} asks:",
    "{Name} wants to know:",
    "I have a question:",
    "One more question:",
    "Before I go to the {room}:",
    "For the {event}:",
    "If you remember,",
)
_CLOSERS = (
    "Thanks.",
    "Thank you!",
    "Please keep that in mind.",
    "That is important.",
    "I hope that helps.",
    "Do not forget it.",
    "{Name} told me so.",
    "I read it in the {room}.",
    "You may need it for the {event}.",
)
_ASK_CLOSERS = (
    "Thanks!",
    "Please.",
    "Please answer.",
    "I need it for the {event}.",
    "{Name} asked me.",
    "I have forgotten it.",
    "Answer in one sentence.",
    "It is important.",
)

_PERSONAS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are a careful assistant that remembers every fact.",
    "You are an assistant. Answer in one short sentence.",
    "Answer the questions of the user.",
    "Answer briefly and only with what you know.",
    "You help the visitors of the {room} in {city}.",
    "You work at the {room} and answer questions.",
    "You are the assistant of the {surname} family.",
    "You are a {job}'s assistant. Be polite.",
    "You answer questions about the {room}.",
    "Use the facts below. Later facts replace earlier ones.",
    "If you do not know something, say so.",
)
_FACT_HEADERS = (
    "Facts:",
    "Here are some facts:",
    "Known facts:",
    "You know the following:",
    "Here is what you know:",
    "Notes:",
    "Important information:",
    "Remember these facts:",
    "Background:",
    "Facts you must remember:",
)
_ONE_NOTED = ("Noted.", "Noted.", "Noted.", "Okay, I will remember that.", "Got it.")
_MANY_NOTED = ("Noted.", "Noted.", "Okay, I will remember all of that.")
_FILLER_READ = ("I see.", "I see.", "Thank you for telling me.", "Okay, I have read it.")
_FILLER_LEADS = (
    "",
    "",
    "",
    "Here is a text for you.",
    "Let me tell you a story.",
    "Please read this:",
    "Now something else.",
    "I read this in the newspaper:",
    "Here is an old report:",
)


def _noise(rng: random.Random, draws: _Draws) -> str:
    """A sentence without grammar, so that text of other people surprises the model less."""
    kinds = ("odd",) if rng.random() < 0.4 else tuple(draws)
    words = [draws[rng.choice(kinds)] for _ in range(rng.randint(4, 16))]
    return _capital(rng.choice((" ", " ", ", ", " and ", "-", "/")).join(words)) + "."


def _filler(rng: random.Random, draws: _Draws, characters: int) -> str:
    """Paragraphs of unrelated sentences, about `characters` long."""
    noise = rng.choice((0.0, 0.0, 0.02, 0.3))
    sentences: list[str] = []
    size = 0
    left = rng.randint(3, 9)
    while size < characters:
        if rng.random() < noise:
            sentence = _noise(rng, draws)
        else:
            sentence = rng.choice(_FILLER).format_map(draws)
        size += len(sentence) + 1
        left -= 1
        if left == 0:
            sentence += "\n\n" if rng.random() < 0.7 else "\n"
            left = rng.randint(3, 9)
        else:
            sentence += " "
        sentences.append(sentence)
    return "".join(sentences).strip()


# ---------------------------------------------------------------------------------------------
# Writing a chat


@dataclass(frozen=True, order=True)
class _Event:
    at: float  # between 0 and 1 of the chat's length
    order: int  # ties, and the order of statements of one fact
    action: str = field(compare=False)  # "state", "ask" or "talk"
    fact: _Fact | None = field(compare=False, default=None)


@dataclass
class _Part:
    """A piece of a user message or of the system message."""

    text: str
    fact: _Fact | None = None


class _Writer:
    def __init__(
        self,
        rng: random.Random,
        characters: int,
        split: str,
        open_questions: int,
        unseen_phrasings: bool,
    ):
        self.rng = rng
        self.draws = _Draws(rng)
        self.characters = characters
        self.split = split
        self.open = open_questions
        self.unseen = unseen_phrasings
        self.chat = Chat()
        self.written = 0
        self.parts: list[_Part] = []
        self.facts: list[_Fact] = []
        self.values: set[str] = set()
        self.echo = rng.random() * 0.5  # how often the assistant repeats a fact

    # Facts

    def new_fact(self, taken: set[tuple[str, str, str]], topics: list[_Kind]) -> _Fact | None:
        rng = self.rng
        for _ in range(20 if self.split == "train" else 200):
            kind = rng.choice(topics)
            subject = kind.subject(rng)
            if self.facts and rng.random() < 0.25:  # one subject with several facts
                other = rng.choice(self.facts)
                if other.kind.subject is kind.subject:
                    subject = other.subject
            # A held-out chat rejects nine of ten long subjects, so as many of the short ones too:
            # the mixture stays that of training.
            if not _may_use(subject, self.split) or (
                self.split == "held_out" and subject.count(" ") < 2 and rng.random() < 0.9
            ):
                continue
            extra = kind.extra(rng) if kind.extra else ""
            if kind.name.endswith(":*"):
                extra = rng.choice((_noun(rng), invented_word(rng), rng.choice(w.ABSTRACT)))
            fact = _Fact(kind, subject, extra, _phrases(kind, subject, extra))
            if fact.key not in taken:
                taken.add(fact.key)
                return fact
        return None

    def new_value(self, fact: _Fact) -> None:
        for _ in range(20):
            value = fact.kind.value(self.rng)
            if value != fact.value and not (fact.version < 0 and value in fact.subject.split()):
                break
        fact.old, fact.value = fact.value, value
        fact.version += 1
        self.values.add(value)

    def statement(self, fact: _Fact) -> str:
        self.new_value(fact)
        rng, kind = self.rng, fact.kind
        if fact.version == 0 or rng.random() < 0.15:
            templates = kind.states
            if self.unseen and kind.unseen_states:
                templates = kind.unseen_states
        else:
            templates = kind.updates
        text = fact.say(rng.choice(templates), rng)
        return self.decorated(text, _OPENERS, _CLOSERS) if rng.random() < 0.3 else text

    def decorated(self, text: str, openers: tuple[str, ...], closers: tuple[str, ...]) -> str:
        """`text` with something before or behind it, as people write."""
        rng = self.rng
        style = rng.random()
        if style < 0.5:
            opener = rng.choice(openers).format_map(self.draws)
            first = text.split(" ", 1)[0].removesuffix("'s")
            keep = first in _KEEP_CAPITAL or not text[1:2].islower()
            text = f"{opener} {text if keep else _lower_first(text)}"
        elif style < 0.65:
            text = f"{rng.choice(_FILLER).format_map(self.draws)} {text}"
        if style > 0.4 and text[-1] in ".?":
            text += " " + rng.choice(closers).format_map(self.draws)
        return text

    # Messages

    def size(self) -> int:
        """Characters so far, the pending parts too."""
        return self.written + sum(len(part.text) + 1 for part in self.parts)

    def add(self, role: str, content: str) -> None:
        self.chat.messages.append({"role": role, "content": content})
        self.written += len(content) + 4

    def join_parts(self) -> str:
        """The pending parts as one text; each fact's newest mention is noted."""
        index = len(self.chat.messages)
        separator = self.rng.choice((" ", " ", " ", "\n", "\n\n"))
        bullets = separator == "\n" and self.rng.random() < 0.5
        text = ""
        joinable: _Fact | None = None  # the fact of the last sentence, if another may follow it
        for part in self.parts:
            fact = part.fact
            first = part.text.split(" ", 1)[0]
            begins = first in ("The", "My", "There", "We", "I") or first in _NAMES
            if fact and joinable and fact is not joinable and begins and self.rng.random() < 0.4:
                same = first == "I" or first in _NAMES
                more = part.text if same else _lower_first(part.text)
                text = f"{text[:-1]}{self.rng.choice((' and', ' and', ', and'))} {more}"
                joinable = None
            else:
                text += separator if text else ""
                text += f"- {part.text}" if bullets and fact else part.text
                joinable = fact if part.text.endswith(".") and not bullets else None
            if fact:
                fact.mention = (index, len(text))
        self.parts = []
        return text

    def flush(self, reply: str) -> None:
        """Ends the user's message and adds the assistant's."""
        self.add("user", self.join_parts())
        self.add("assistant", reply)

    def flush_statements(self) -> None:
        if not self.parts:
            return
        rng = self.rng
        stated = [part.fact for part in self.parts if part.fact]
        last = self.parts[-1].fact
        if not stated:
            return self.flush(rng.choice(_FILLER_READ))
        if last is None:
            return self.flush(rng.choice(_MANY_NOTED))
        if last.kind.name == "your name" and len(stated) == 1 and last.version == 0:
            reply = f"Nice to meet you, {last.value}."
        elif len(stated) == 1 and rng.random() < self.echo:
            reply = f"Noted. {last.answer()}"
        else:
            return self.flush(rng.choice(_ONE_NOTED if len(stated) == 1 else _MANY_NOTED))
        self.flush(reply)
        last.mention = (len(self.chat.messages) - 1, len(reply))

    def ask_text(self, fact: _Fact) -> str:
        asks = fact.kind.asks
        if self.unseen and fact.kind.unseen_asks:
            asks = fact.kind.unseen_asks
        text = fact.say(self.rng.choice(asks), self.rng)
        if self.rng.random() < 0.3:
            text = self.decorated(text, _ASK_OPENERS, _ASK_CLOSERS)
        return text.lower() if self.rng.random() < 0.05 else text

    def question(self, fact: _Fact, text: str) -> Question:
        """The question about `fact` that the next user message asks with `text`."""
        answer = fact.answer()
        known = fact.version >= 0
        others = sorted(v for v in self.values if v != fact.value and not _holds(answer, v))
        return Question(
            text=text,
            answer=answer,
            expected=fact.value if known else "don't",
            others=tuple(others),
            asked_in=len(self.chat.messages),
            mentioned_in=fact.mention[0],
            mentioned_at=fact.mention[1],
            overridden=fact.version > 0,
        )

    def ask(self, facts: list[_Fact]) -> None:
        rng = self.rng
        if self.parts and rng.random() < 0.5:
            self.flush_statements()
        texts = []
        for fact in facts:
            text = self.ask_text(fact)
            texts.append(text)
            if self.parts:
                text = _capital(text)
                if rng.random() < 0.1:
                    text = f"Question: {text}"
            self.parts.append(_Part(text))
        content = self.join_parts()  # notes the mentions of facts stated in this very message
        questions = [self.question(f, text) for f, text in zip(facts, texts, strict=True)]
        self.add("user", content)
        self.add("assistant", " ".join(question.answer for question in questions))
        self.chat.questions += questions
        end = 0
        for fact, question in zip(facts, questions, strict=True):
            end += len(question.answer)
            if fact.version >= 0:
                fact.mention = (len(self.chat.messages) - 1, end)
            end += 1

    def talk(self) -> None:
        texts, reply = self.rng.choice(_SMALL_TALK)
        self.parts.append(_Part(self.rng.choice(texts).format_map(self.draws)))
        self.flush(reply)

    # The whole

    def plan(self) -> tuple[list[_Event], list[_Fact]]:
        """Events in the order of time, and the facts that the system message states."""
        rng = self.rng
        density = rng.uniform(100, 600)
        count = max(1, min(80, int(self.characters / density)))
        if rng.random() < 0.12:
            count = min(count, rng.randint(1, 4))
        if self.open:
            count = max(count, self.open)
        # A few kinds many times, so that facts are told apart by subject and not only by kind.
        topics = rng.choices(KINDS, _KIND_WEIGHTS, k=max(1, min(count, rng.randint(1, 8))))
        if rng.random() < 0.4:
            topics += rng.choices(KINDS, _KIND_WEIGHTS, k=count)
        in_system = rng.choice((0.0, 0.0, 0.3, 0.6, 1.0))
        taken: set[tuple[str, str, str]] = set()
        events: list[_Event] = []
        first: list[_Fact] = []
        order = 0

        def at(time: float, action: str, fact: _Fact | None = None) -> None:
            nonlocal order
            order += 1
            events.append(_Event(min(time, 0.999), order, action, fact))

        for _ in range(count):
            fact = self.new_fact(taken, topics)
            if fact is None:
                continue
            self.facts.append(fact)
            if fact.kind.name == "my name" or (fact.kind.in_system and rng.random() < in_system):
                first.append(fact)
                time = 0.0
            else:
                time = rng.random() * rng.choice((0.3, 0.95))
                at(time, "state", fact)
            asked = not self.open or rng.random() < 0.3
            for _ in range(rng.choices((0, 1, 2, 3), (60, 22, 12, 6))[0]):
                if asked and rng.random() < 0.4:
                    at(rng.uniform(time, min(1.0, time + 0.2)), "ask", fact)
                time = rng.uniform(time, 0.98)
                at(time, "state", fact)
            if asked:
                for _ in range(rng.choices((1, 2, 3), (50, 35, 15))[0]):
                    style = rng.random()
                    if style < 0.35:
                        at(rng.uniform(time, 1.0), "ask", fact)
                    elif style < 0.7:
                        at(max(time, rng.uniform(0.9, 1.0)), "ask", fact)
                    else:
                        at(time + rng.expovariate(1.0) * 0.03, "ask", fact)
            if rng.random() < 0.1:
                never = self.new_fact(taken, topics)
                if never is not None:
                    at(rng.random(), "ask", never)
        if rng.random() < 0.35:
            at(0.0, "talk")
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 4))):
            at(rng.random(), "talk")
        return sorted(events), first

    def system_message(self, facts: list[_Fact]) -> None:
        rng = self.rng
        if not facts and rng.random() < 0.35:
            return
        persona = next((f for f in facts if f.kind.name == "my name"), None)
        if persona is not None:
            self.parts.append(_Part(self.statement(persona), persona))
        elif rng.random() < 0.85 or not facts:
            self.parts.append(_Part(rng.choice(_PERSONAS).format_map(self.draws)))
        rest = [fact for fact in facts if fact is not persona]
        rng.shuffle(rest)
        if rest and rng.random() < 0.5:
            self.parts.append(_Part(rng.choice(_FACT_HEADERS)))
        long = rng.random() < 0.3
        for fact in rest:
            if long and rng.random() < 0.5:
                size = rng.uniform(0.02, 0.5) * self.characters / len(rest)
                self.parts.append(_Part(_filler(rng, self.draws, int(size))))
            self.parts.append(_Part(self.statement(fact), fact))
        if long and rng.random() < 0.5:
            size = rng.uniform(0.02, 0.2) * self.characters
            self.parts.append(_Part(_filler(rng, self.draws, int(size))))
        self.add("system", self.join_parts())

    def write(self) -> Chat:
        rng = self.rng
        events, first = self.plan()
        self.system_message(first)
        together = rng.choice((0.0, 0.3, 0.7))  # how often several statements share a message
        for index, event in enumerate(events):
            target = event.at * self.characters
            while self.size() < target - 60:
                self.fill(target - self.size())
            if event.action == "state":
                assert event.fact is not None
                self.parts.append(_Part(self.statement(event.fact), event.fact))
                if rng.random() >= together:
                    self.flush_statements()
            elif event.action == "ask":
                assert event.fact is not None
                facts = [event.fact]
                if index + 1 < len(events) and rng.random() < 0.1:
                    following = events[index + 1]
                    if following.action == "ask" and following.fact not in (None, event.fact):
                        # The pair is asked here; the second is asked again in its turn.
                        assert following.fact is not None
                        facts.append(following.fact)
                self.ask(facts)
            else:
                self.flush_statements()
                self.talk()
        while self.open and self.size() < self.characters:
            self.fill(self.characters - self.size())
        self.flush_statements()
        if self.open:
            stated = [fact for fact in self.facts if fact.version >= 0]
            rng.shuffle(stated)
            for fact in stated[: self.open]:
                self.chat.open_questions.append(self.question(fact, self.ask_text(fact)))
            taken = {fact.key for fact in self.facts}
            kinds = [fact.kind for fact in self.facts]
            for _ in range(max(1, self.open // 8)):
                never = self.new_fact(taken, kinds)
                if never is not None:
                    text = self.ask_text(never)
                    self.chat.open_questions.append(self.question(never, text))
        return self.chat

    def fill(self, missing: float) -> None:
        """Adds filler to the user's message, and often ends the message."""
        rng = self.rng
        lead = rng.choice(_FILLER_LEADS)
        size = min(missing, rng.choice((150, 300, 600, 1500, 3000)))
        text = _filler(rng, self.draws, int(size))
        self.parts.append(_Part(f"{lead} {text}" if lead else text))
        if rng.random() < 0.6:
            self.flush_statements()


def write_chat(
    seed: int | str,
    characters: int,
    *,
    split: str = "train",
    open_questions: int = 0,
    unseen_phrasings: bool = False,
) -> Chat:
    """The chat of `seed`, about `characters` long (roughly four to a token).

    `open_questions`: asks that many questions fewer inside the chat and offers them as questions
    that could each come next; the chat then ends with an assistant's message.
    """
    if split not in ("train", "held_out"):
        raise ValueError(f"split is {split!r}; it can be 'train' or 'held_out'")
    if characters < 1:
        raise ValueError(f"characters is {characters}; a chat needs at least 1")
    rng = random.Random(f"{split}/{seed}/{characters}")
    return _Writer(rng, characters, split, open_questions, unseen_phrasings).write()
