"""Everything in a chat that is no fact: unrelated text, small talk, what frames a sentence."""

import random
from collections.abc import Callable, Iterator, Mapping

from reference_model import values
from reference_model import words as w


class Draws(Mapping[str, str]):
    """A mapping for `str.format_map` that draws a new word at each access."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._draws: dict[str, Callable[[], str]] = {
            "adj": lambda: rng.choice(w.ADJECTIVES),
            "thing": lambda: rng.choice(w.THINGS),
            "room": lambda: rng.choice(w.ROOMS),
            "name": lambda: values.name(rng),
            "surname": lambda: rng.choice(w.SURNAMES),
            "city": lambda: values.city(rng),
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
            "odd": lambda: values.invented_word(rng, rng.randint(1, 3)),
        }

    def __getitem__(self, key: str) -> str:
        word = self._draws[key.lower()]()
        return values.capital(word) if key[0].isupper() else word

    def __iter__(self) -> Iterator[str]:
        return iter(self._draws)

    def __len__(self) -> int:
        return len(self._draws)


SENTENCES = (
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

SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
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
OPENERS = (
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
ASK_OPENERS = (
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
CLOSERS = (
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
ASK_CLOSERS = (
    "Thanks!",
    "Please.",
    "Please answer.",
    "I need it for the {event}.",
    "{Name} asked me.",
    "I have forgotten it.",
    "Answer in one sentence.",
    "It is important.",
)

PERSONAS = (
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
FACT_HEADERS = (
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
ONE_NOTED = ("Noted.", "Noted.", "Noted.", "Okay, I will remember that.", "Got it.")
MANY_NOTED = ("Noted.", "Noted.", "Okay, I will remember all of that.")
FILLER_READ = ("I see.", "I see.", "Thank you for telling me.", "Okay, I have read it.")
FILLER_LEADS = (
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


def _noise(rng: random.Random, draws: Draws) -> str:
    """A sentence without grammar, so that text of other people surprises the model less."""
    kinds = ("odd",) if rng.random() < 0.4 else tuple(draws)
    words = [draws[rng.choice(kinds)] for _ in range(rng.randint(4, 16))]
    return values.capital(rng.choice((" ", " ", ", ", " and ", "-", "/")).join(words)) + "."


def paragraphs(rng: random.Random, draws: Draws, characters: int) -> str:
    """Paragraphs of unrelated sentences, about `characters` long."""
    noise = rng.choice((0.0, 0.0, 0.02, 0.3))
    sentences: list[str] = []
    size = 0
    left = rng.randint(3, 9)
    while size < characters:
        if rng.random() < noise:
            sentence = _noise(rng, draws)
        else:
            sentence = rng.choice(SENTENCES).format_map(draws)
        size += len(sentence) + 1
        left -= 1
        if left == 0:
            sentence += "\n\n" if rng.random() < 0.7 else "\n"
            left = rng.randint(3, 9)
        else:
            sentence += " "
        sentences.append(sentence)
    return "".join(sentences).strip()
