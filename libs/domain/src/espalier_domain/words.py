"""What of a memory record can be searched, and what a query asks for: normalised alike.

Normalised text has no case, no accents and no compatibility forms: `STRASSE` finds `Straße` and `muller`
finds `Müller`, in every script. It is words with one space around each, and nothing else, so that a database
whose locale knows no letters beyond ASCII can still look for a whole word, a beginning or a part. No language
is known here: there is no list of stop words and no stemmer; how rare a term is weighs instead.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

WORDS_BYTES_MAX: Final = 300_000
"""Of a record's normalised words; what is beyond is not searched."""

PASSAGE_CHARS_MAX: Final = 2_000
"""How much of a record, or a query, its meaning is taken from."""

TERMS_MAX: Final = 24
PART_CHARS_MIN: Final = 3
STEM_CHARS_MIN: Final = 5
STEM_SHARE: Final = 0.7
"""Of a word's letters, how many are its beginning that most of its inflections share."""

# Scripts that put no space between words, or (Hangul) none before a particle: their terms are pairs.
UNSPACED: Final = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
    "\U00020000-\U000323af]+"
)


@dataclass(frozen=True, slots=True)
class Term:
    """`text` is normalised; `stem` is its beginning, or the text itself where it is too short to have one.

    `spaced` says that it is a word of a script which puts spaces around words; others are found anywhere.
    """

    text: str
    stem: str
    spaced: bool


def normalise(text: str) -> str:
    """The words of the text, normalised, with one space around each; empty when it has none."""
    plain = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    words = unicodedata.normalize("NFC", plain.translate(_LETTERS)).split()
    return f" {' '.join(words)} " if words else ""


def searchable(key: str, value: object) -> str:
    """The normalised words of a record: its key, and all names, texts, numbers and booleans of its value."""
    normalised = normalise("\n".join(texts_of(key, value)))
    if len(normalised) * 4 > WORDS_BYTES_MAX:
        cut = normalised.encode()[:WORDS_BYTES_MAX].decode(errors="ignore")
        return cut.rstrip() + " "
    return normalised


def passage(key: str, value: object) -> str:
    """The beginning of the record as plain text, of which a meaning can be taken."""
    parts: list[str] = []
    chars_left = PASSAGE_CHARS_MAX
    for text in texts_of(re.sub(r"[\W_]+", " ", key), value):
        parts.append(text[:chars_left])
        chars_left -= len(parts[-1]) + 1
        if chars_left <= 0:
            break
    return " ".join(parts)


def texts_of(key: str, value: object) -> Iterator[str]:
    """The key and whatever words stand in the value, in order. JSON has at most `json_depth_max` levels."""
    yield key
    waiting: list[object] = [value]
    while waiting:  # bounded by the parts of one value
        part = waiting.pop()
        match part:
            case None:
                pass
            case str():
                yield part
            case bool():
                yield "true" if part else "false"
            case int() | float():
                yield str(part)
            case dict():
                waiting.extend(each for name, inner in reversed(part.items()) for each in (inner, name))
            case list():
                waiting.extend(reversed(part))
            case _:
                raise AssertionError(f"{type(part).__name__} is no JSON")


def terms_of(query: str) -> list[Term]:
    """The different terms of the query, in order; at most TERMS_MAX."""
    terms: dict[str, Term] = {}
    for word in normalise(query).split():
        for term in _terms(word):
            terms.setdefault(term.text, term)
            if len(terms) == TERMS_MAX:
                return list(terms.values())
    return list(terms.values())


def _terms(word: str) -> Iterator[Term]:
    end = 0
    for run in UNSPACED.finditer(word):
        yield from _spaced(word[end : run.start()])
        text, end = run.group(), run.end()
        for at in range(max(1, len(text) - 1)):
            pair = text[at : at + 2]
            yield Term(pair, pair, spaced=False)
    yield from _spaced(word[end:])


def _spaced(text: str) -> Iterator[Term]:
    if not text:
        return
    stem = text[: max(STEM_CHARS_MIN - 1, int(len(text) * STEM_SHARE))]
    yield Term(text, stem if len(text) >= STEM_CHARS_MIN else text, spaced=True)


class _Letters(dict[int, str | None]):
    """What becomes of a character of decomposed text; remembers what it was asked, at most all of Unicode.

    Accents of Latin, Greek and Cyrillic and the points of Hebrew and Arabic go; marks that make another
    letter (those of kana and of Indic scripts) stay. Symbols stay, so that an emoji can be looked for.
    """

    def __missing__(self, code: int) -> str | None:
        character = chr(code)
        kind, rank = unicodedata.category(character), unicodedata.combining(character)
        if rank >= 200 or 10 <= rank <= 36 or kind == "Cf":
            told = None
        else:
            told = character if kind[0] in "LNM" or kind == "So" else " "
        self[code] = told
        return told


_LETTERS: Final = _Letters()
