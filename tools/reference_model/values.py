"""Draws of words: the values of facts and the subjects that they are about."""

import random
import re
from collections.abc import Callable

from reference_model import words as w


def invented_word(rng: random.Random, syllables: int = 2) -> str:
    """A pronounceable word that is in no dictionary."""
    return "".join(
        rng.choice(w.ONSETS_LIST) + rng.choice(w.VOWELS) + rng.choice(w.CODAS)
        for _ in range(syllables)
    )


def digits(rng: random.Random, low: int = 3, high: int = 6) -> str:
    return "".join(rng.choice("0123456789") for _ in range(rng.randint(low, high)))


def code(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.65:
        return digits(rng, 4, 4) if rng.random() < 0.6 else digits(rng)
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
    if style < 0.8:
        return f"{letters}{digits(rng, 2, 4)}"
    if style < 0.9:
        return f"{letters}-{digits(rng, 2, 4)}"
    return f"{digits(rng, 2, 3)}-{digits(rng, 2, 4)}"


def word(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.4:
        return invented_word(rng, rng.randint(2, 3))
    if style < 0.6:
        return invented_word(rng).capitalize()
    return rng.choice(rng.choice((w.THINGS, w.ANIMALS, w.FOODS, w.CITIES, w.ADJECTIVES, w.NAMES)))


def name(rng: random.Random) -> str:
    return invented_word(rng).capitalize() if rng.random() < 0.15 else rng.choice(w.NAMES)


def person_value(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return f"{rng.choice(('Mr', 'Mrs', 'Ms', 'Dr'))} {rng.choice(w.SURNAMES)}"
    return name(rng) if rng.random() < 0.7 else f"{name(rng)} {rng.choice(w.SURNAMES)}"


def colour(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.85:
        return rng.choice(w.COLOURS)
    return f"{rng.choice(('light', 'dark', 'bright', 'pale'))} {rng.choice(w.COLOURS)}"


def city(rng: random.Random) -> str:
    return invented_word(rng).capitalize() if rng.random() < 0.1 else rng.choice(w.CITIES)


def number(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.2:
        return rng.choice(w.NUMBER_WORDS)
    return str(rng.randint(2, (20, 99, 999)[rng.randrange(3)]))


def price(rng: random.Random) -> str:
    return f"{rng.randint(2, 950)} {rng.choice(('euros', 'dollars', 'pounds', 'francs'))}"


def measure(rng: random.Random) -> str:
    unit = rng.choice(("metres", "kilos", "litres", "degrees", "miles", "hours", "minutes"))
    return f"{rng.randint(2, 400)} {unit}"


def time(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return f"{rng.randint(1, 12)} {rng.choice(('am', 'pm'))}"
    return f"{rng.randint(0, 23)}:{rng.choice(('00', '15', '30', '45', '10', '20', '50'))}"


def date(rng: random.Random) -> str:
    return f"{rng.randint(1, 28)} {rng.choice(w.MONTHS)}"


def adjective(rng: random.Random) -> str:
    return rng.choice(w.ADJECTIVES)


def noun(rng: random.Random) -> str:
    return rng.choice(w.THINGS)


def pick(items: list[str]) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(items)


def place(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.35:
        return f"in the {rng.choice(w.ROOMS)}"
    if style < 0.45:
        return f"in the {adjective(rng)} {rng.choice(w.ROOMS)}"
    if style < 0.65:
        return f"in the {adjective(rng)} {rng.choice(w.CONTAINERS)}"
    if style < 0.75:
        return f"in {city(rng)}"
    preposition = rng.choice(("under", "on", "behind", "near", "next to", "inside"))
    before = f"{adjective(rng)} " if rng.random() < 0.4 else ""
    return f"{preposition} the {before}{noun(rng)}"


def thing(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.2:
        return f"the {noun(rng)}"
    if style < 0.6:
        return f"the {adjective(rng)} {noun(rng)}"
    if style < 0.75:
        return f"the {rng.choice(w.ROOMS)} {noun(rng)}"
    if style < 0.82:
        return f"the {rng.choice(w.SURNAMES)} {noun(rng)}"
    if style < 0.9:
        numbered = ("room", "gate", "locker", "box", "floor", "platform", "unit", "desk")
        return f"{rng.choice(numbered)} {rng.randint(1, 60)}"
    if style < 0.95:
        return f"project {invented_word(rng).capitalize()}"
    return f"the {invented_word(rng)} {noun(rng)}"


def area(rng: random.Random) -> str:
    before = f"{adjective(rng)} " if rng.random() < 0.25 else ""
    return f"the {before}{rng.choice(w.ROOMS)}"


def person(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.65:
        return name(rng)
    if style < 0.85:
        return f"{rng.choice(('Mr', 'Mrs', 'Ms', 'Dr'))} {rng.choice(w.SURNAMES)}"
    return f"my {rng.choice(w.RELATIONS)}"


def event(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.4:
        return f"the {rng.choice(w.EVENTS)}"
    if style < 0.7:
        return f"the {rng.choice(w.ABSTRACT)} {rng.choice(w.EVENTS)}"
    return f"the {rng.choice(w.EVENTS)} with {name(rng)}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def for_assistant(text: str) -> str:
    """`text` as the assistant says it: my sister is your sister."""
    return re.sub(r"^my\b", "your", text)
