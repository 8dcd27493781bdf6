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
from dataclasses import dataclass, field

from reference_model import filler, values
from reference_model import words as w
from reference_model.kinds import (
    KEEP_CAPITAL,
    KIND_WEIGHTS,
    KINDS,
    NAMES,
    Fact,
    Kind,
    may_use,
    phrases,
)

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
    # A value that began a sentence was stated with a capital, so capitals do not count.
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text, re.IGNORECASE) is not None


@dataclass(frozen=True, order=True)
class _Event:
    at: float  # between 0 and 1 of the chat's length
    order: int  # ties, and the order of statements of one fact
    action: str = field(compare=False)  # "state", "ask" or "talk"
    fact: Fact | None = field(compare=False, default=None)


@dataclass
class _Part:
    """A piece of a user message or of the system message."""

    text: str
    fact: Fact | None = None


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
        self.draws = filler.Draws(rng)
        self.characters = characters
        self.split = split
        self.open = open_questions
        self.unseen = unseen_phrasings
        self.chat = Chat()
        self.written = 0
        self.parts: list[_Part] = []
        self.facts: list[Fact] = []
        self.values: set[str] = set()
        self.echo = rng.random() * 0.5  # how often the assistant repeats a fact

    # Facts

    def new_fact(self, taken: set[tuple[str, str, str]], topics: list[Kind]) -> Fact | None:
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
            if not may_use(subject, self.split) or (
                self.split == "held_out" and subject.count(" ") < 2 and rng.random() < 0.9
            ):
                continue
            extra = kind.extra(rng) if kind.extra else ""
            if kind.name.endswith(":*"):
                extra = rng.choice(
                    (values.noun(rng), values.invented_word(rng), rng.choice(w.ABSTRACT))
                )
            fact = Fact(kind, subject, extra, phrases(kind, subject, extra))
            if fact.key not in taken:
                taken.add(fact.key)
                return fact
        return None

    def new_value(self, fact: Fact) -> None:
        for _ in range(20):
            value = fact.kind.value(self.rng)
            if value != fact.value and not (fact.version < 0 and value in fact.subject.split()):
                break
        fact.old, fact.value = fact.value, value
        fact.version += 1
        self.values.add(value)

    def statement(self, fact: Fact) -> str:
        self.new_value(fact)
        rng, kind = self.rng, fact.kind
        if fact.version == 0 or rng.random() < 0.15:
            templates = kind.states
            if self.unseen and kind.unseen_states:
                templates = kind.unseen_states
        else:
            templates = kind.updates
        text = fact.say(rng.choice(templates), rng)
        return self.decorated(text, filler.OPENERS, filler.CLOSERS) if rng.random() < 0.3 else text

    def decorated(self, text: str, openers: tuple[str, ...], closers: tuple[str, ...]) -> str:
        """`text` with something before or behind it, as people write."""
        rng = self.rng
        style = rng.random()
        if style < 0.5:
            opener = rng.choice(openers).format_map(self.draws)
            first = text.split(" ", 1)[0].removesuffix("'s")
            keep = first in KEEP_CAPITAL or not text[1:2].islower()
            text = f"{opener} {text if keep else values.lower_first(text)}"
        elif style < 0.65:
            text = f"{rng.choice(filler.SENTENCES).format_map(self.draws)} {text}"
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
        joinable: Fact | None = None  # the fact of the last sentence, if another may follow it
        for part in self.parts:
            fact = part.fact
            first = part.text.split(" ", 1)[0]
            begins = first in ("The", "My", "There", "We", "I") or first in NAMES
            if fact and joinable and fact is not joinable and begins and self.rng.random() < 0.4:
                same = first == "I" or first in NAMES
                more = part.text if same else values.lower_first(part.text)
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
            return self.flush(rng.choice(filler.FILLER_READ))
        if last is None:
            return self.flush(rng.choice(filler.MANY_NOTED))
        if last.kind.name == "your name" and len(stated) == 1 and last.version == 0:
            reply = f"Nice to meet you, {last.value}."
        elif len(stated) == 1 and rng.random() < self.echo:
            reply = f"Noted. {last.answer()}"
        else:
            return self.flush(
                rng.choice(filler.ONE_NOTED if len(stated) == 1 else filler.MANY_NOTED)
            )
        self.flush(reply)
        last.mention = (len(self.chat.messages) - 1, len(reply))

    def ask_text(self, fact: Fact) -> str:
        asks = fact.kind.asks
        if self.unseen and fact.kind.unseen_asks:
            asks = fact.kind.unseen_asks
        text = fact.say(self.rng.choice(asks), self.rng)
        if self.rng.random() < 0.3:
            text = self.decorated(text, filler.ASK_OPENERS, filler.ASK_CLOSERS)
        return text.lower() if self.rng.random() < 0.05 else text

    def question(self, fact: Fact, text: str) -> Question:
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

    def ask(self, facts: list[Fact]) -> None:
        rng = self.rng
        if self.parts and rng.random() < 0.5:
            self.flush_statements()
        texts = []
        for fact in facts:
            text = self.ask_text(fact)
            texts.append(text)
            if self.parts:
                text = values.capital(text)
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
        texts, reply = self.rng.choice(filler.SMALL_TALK)
        self.parts.append(_Part(self.rng.choice(texts).format_map(self.draws)))
        self.flush(reply)

    # The whole

    def plan(self) -> tuple[list[_Event], list[Fact]]:
        """Events in the order of time, and the facts that the system message states."""
        rng = self.rng
        density = rng.uniform(100, 600)
        count = max(1, min(80, int(self.characters / density)))
        if rng.random() < 0.12:
            count = min(count, rng.randint(1, 4))
        if self.open:
            count = max(count, self.open)
        # A few kinds many times, so that facts are told apart by subject and not only by kind.
        topics = rng.choices(KINDS, KIND_WEIGHTS, k=max(1, min(count, rng.randint(1, 8))))
        if rng.random() < 0.4:
            topics += rng.choices(KINDS, KIND_WEIGHTS, k=count)
        in_system = rng.choice((0.0, 0.0, 0.3, 0.6, 1.0))
        taken: set[tuple[str, str, str]] = set()
        events: list[_Event] = []
        first: list[Fact] = []
        order = 0

        def at(time: float, action: str, fact: Fact | None = None) -> None:
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

    def system_message(self, facts: list[Fact]) -> None:
        rng = self.rng
        if not facts and rng.random() < 0.35:
            return
        persona = next((f for f in facts if f.kind.name == "my name"), None)
        if persona is not None:
            self.parts.append(_Part(self.statement(persona), persona))
        elif rng.random() < 0.85 or not facts:
            self.parts.append(_Part(rng.choice(filler.PERSONAS).format_map(self.draws)))
        rest = [fact for fact in facts if fact is not persona]
        rng.shuffle(rest)
        if rest and rng.random() < 0.5:
            self.parts.append(_Part(rng.choice(filler.FACT_HEADERS)))
        long = rng.random() < 0.3
        for fact in rest:
            if long and rng.random() < 0.5:
                size = rng.uniform(0.02, 0.5) * self.characters / len(rest)
                self.parts.append(_Part(filler.paragraphs(rng, self.draws, int(size))))
            self.parts.append(_Part(self.statement(fact), fact))
        if long and rng.random() < 0.5:
            size = rng.uniform(0.02, 0.2) * self.characters
            self.parts.append(_Part(filler.paragraphs(rng, self.draws, int(size))))
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
        lead = rng.choice(filler.FILLER_LEADS)
        size = min(missing, rng.choice((150, 300, 600, 1500, 3000)))
        text = filler.paragraphs(rng, self.draws, int(size))
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
