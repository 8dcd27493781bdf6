"""The kinds of facts: how each is stated, overridden, asked for and answered."""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from reference_model import values
from reference_model import words as w


@dataclass(frozen=True)
class Kind:
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
    ("code", values.code),
    ("code", values.code),
    ("code", values.code),
    ("access code", values.code),
    ("PIN", lambda rng: values.digits(rng, 4, 4)),
    ("number", values.digits),
    ("serial number", values.code),
    ("phone number", values.digits),
    ("combination", values.digits),
    ("password", values.word),
    ("secret word", values.word),
    ("name", values.word),
    ("nickname", values.word),
    ("value", values.price),
    ("weight", values.measure),
    ("height", values.measure),
    ("length", values.measure),
    ("temperature", values.measure),
    ("keeper", values.person_value),
    ("manager", values.person_value),
    ("material", values.pick(w.MATERIALS)),
    ("age", values.number),
    ("deadline", values.date),
    ("status", values.adjective),
    ("type", values.word),
    ("label", values.word),
    ("symbol", values.word),
)
_PERSON_ATTRIBUTES: tuple[tuple[str, Callable[[random.Random], str]], ...] = (
    ("favourite colour", values.colour),
    ("favourite colour", values.colour),
    ("favourite food", values.pick(w.FOODS)),
    ("favourite city", values.city),
    ("favourite animal", values.pick(w.ANIMALS)),
    ("favourite number", values.number),
    ("favourite day", values.pick(w.WEEKDAYS)),
    ("favourite word", values.word),
    ("phone number", values.digits),
    ("room number", values.digits),
    ("code", values.code),
    ("password", values.word),
    ("PIN", lambda rng: values.digits(rng, 4, 4)),
    ("nickname", values.word),
    ("birthday", values.date),
    ("age", values.number),
    ("home town", values.city),
    ("hobby", values.pick(w.ABSTRACT)),
    ("boss", values.person_value),
    ("teacher", values.person_value),
    ("seat", values.code),
)


def _attribute_kind(
    owner: str,
    attribute: str,
    value: Callable[[random.Random], str],
    subject: Callable[[random.Random], str],
    weight: float,
) -> Kind:
    return Kind(
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
    Kind(
        name="place",
        value=values.place,
        subject=lambda rng: values.thing(rng) if rng.random() < 0.75 else values.person(rng),
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
    Kind(
        name="count in a place",
        value=values.number,
        subject=values.area,
        extra=values.pick(w.COUNTABLES),
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
        weight=10.0,
        unseen_states=("I found {v} {x} in {e}.",),
        unseen_asks=("Please count the {x} in {e} for me.",),
    ),
    Kind(
        name="count of a person",
        value=values.number,
        subject=values.person,
        extra=values.pick(w.COUNTABLES),
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
        weight=10.0,
        unseen_states=("I heard that {e} has {v} {x}.",),
        unseen_asks=("Could you say how many {x} {e} has?",),
    ),
    Kind(
        name="colour",
        value=values.colour,
        subject=values.thing,
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
    Kind(
        name="lives",
        value=values.city,
        subject=values.person,
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
    Kind(
        name="works",
        value=values.pick(w.JOBS),
        subject=values.person,
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
    Kind(
        name="likes",
        value=lambda rng: rng.choice(w.FOODS) if rng.random() < 0.6 else rng.choice(w.ABSTRACT),
        subject=values.person,
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
    Kind(
        name="pet",
        value=values.name,
        subject=values.person,
        extra=values.pick(w.ANIMALS),
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
    Kind(
        name="day",
        value=lambda rng: rng.choice(w.WEEKDAYS) if rng.random() < 0.6 else values.date(rng),
        subject=values.event,
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
    Kind(
        name="time",
        value=values.time,
        subject=values.event,
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
    Kind(
        name="owner",
        value=values.person_value,
        subject=values.thing,
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
    Kind(
        name="price",
        value=values.price,
        subject=values.thing,
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
    Kind(
        name="your name",
        value=values.name,
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
    Kind(
        name="you live",
        value=values.city,
        subject=lambda rng: "your city",
        states=("I live in {v}.", "I live in {v}.", "My home is in {v}.", "I am from {v}."),
        updates=("I moved to {v}.", "Now I live in {v}.", "I no longer live in {old}, but in {v}."),
        asks=("Where do I live?", "where do I live", "In which city do I live?"),
        answer="You live in {v}.",
        unknown="I don't know where you live.",
        weight=2.0,
        in_system=False,
    ),
    Kind(
        name="you work",
        value=values.pick(w.JOBS),
        subject=lambda rng: "your job",
        states=("I work as a {v}.", "I am a {v}.", "I'm a {v}."),
        updates=("Now I work as a {v}.", "I am no longer a {old}, but a {v}."),
        asks=("What do I do for a living?", "What do I work as?", "What is my profession?"),
        answer="You work as a {v}.",
        unknown="I don't know what you work as.",
        weight=1.5,
        in_system=False,
    ),
    Kind(
        name="my name",
        value=values.name,
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


def _all_kinds() -> tuple[Kind, ...]:
    kinds = list(_OTHER_KINDS)
    kinds += [_attribute_kind("thing", a, v, values.thing, 1.0) for a, v in _THING_ATTRIBUTES]
    kinds += [_attribute_kind("person", a, v, values.person, 0.5) for a, v in _PERSON_ATTRIBUTES]
    kinds += [_attribute_kind("self", a, v, lambda rng: "me", 0.35) for a, v in _PERSON_ATTRIBUTES]
    # Attributes nobody thought of: any word can be one.
    kinds.append(_attribute_kind("thing", "*", values.word, values.thing, 3.0))
    kinds.append(_attribute_kind("thing", "*", values.code, values.thing, 3.0))
    return tuple(kinds)


KINDS = _all_kinds()
NAMES = frozenset(w.NAMES)
KEEP_CAPITAL = NAMES | set(w.CITIES) | set(w.WEEKDAYS) | {"Mr", "Mrs", "Ms", "Dr", "I", "I'm"}
KIND_WEIGHTS = tuple(kind.weight for kind in KINDS)


@lru_cache(maxsize=200_000)
def _is_held_out(subject: str) -> bool:
    return zlib.crc32(subject.lower().encode()) % 10 == 0


def may_use(subject: str, split: str) -> bool:
    """Whether a split may state facts about `subject`.

    Subjects of three words and more ("the north gate") belong to one split. Shorter ones ("Anna",
    "the gate", "my sister") are in both: a name that is never a subject in training would be a
    word that the model cannot look up.
    """
    return subject.count(" ") < 2 or _is_held_out(subject) == (split == "held_out")


def phrases(kind: Kind, subject: str, extra: str) -> tuple[str, ...]:
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
class Fact:
    kind: Kind
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
        return self._fill(
            template, values.for_assistant(self.subject), values.for_assistant(phrase)
        )

    def _fill(self, template: str, subject: str, phrase: str) -> str:
        text = template.format(
            v=self.value,
            V=values.capital(self.value),
            old=self.old,
            e=subject,
            E=values.capital(subject),
            x=self.extra,
            a=self.attribute,
            np=phrase,
            Np=values.capital(phrase),
        )
        return text

    def answer(self) -> str:
        return self.reply(self.kind.answer if self.version >= 0 else self.kind.unknown)
