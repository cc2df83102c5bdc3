"""Normalising text into words, and queries into terms: the same for what is kept and what is looked for."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier_domain.words import (
    PASSAGE_CHARS_MAX,
    TERMS_MAX,
    WORDS_BYTES_MAX,
    normalise,
    passage,
    searchable,
    terms_of,
    texts_of,
)

NORMALISED = {
    "": "",
    " \t!?-- ": "",
    "The INVOICE": " the invoice ",
    "Hauptstraße": " hauptstrasse ",
    "Zürich, Käufer": " zurich kaufer ",
    "cafe\u0301": " cafe ",
    "ΣΊΣΥΦΟΣ": " σισυφοσ ",
    "Ёлка": " елка ",
    "\uff21\uff22\uff23\uff11": " abc1 ",
    "ﬁle": " file ",
    "مَرْحَبًا": " مرحبا ",
    "が": " が ",
    "हिन्दी": " हिन्दी ",
    "서울": " 서울 ",
    "foo_bar-baz@x.de": " foo bar baz x de ",
    "soft\u00adhyphen zero\u200bwidth": " softhyphen zerowidth ",
    "🌳": " 🌳 ",
}


@pytest.mark.parametrize("text", NORMALISED)
def test_text_is_folded_into_words_with_one_space_around_each(text: str) -> None:
    assert normalise(text) == NORMALISED[text]


@given(st.text())
def test_folding_what_is_folded_changes_nothing(text: str) -> None:
    normalised = normalise(text)
    assert normalise(normalised) == normalised
    assert normalise(unicodedata.normalize("NFD", text)) == normalised


@given(st.text(), st.text())
def test_what_is_asked_for_as_it_was_kept_is_in_its_words(before: str, text: str) -> None:
    words = searchable(before, [text])
    assert [term.text for term in terms_of(text) if term.text not in words] == []


VALUE = {"zz": 1, "a": [True, None, {"x": "y"}, 2.5, []], "b": {}}


def test_the_words_of_a_value_are_its_names_and_texts_and_numbers_in_order() -> None:
    assert list(texts_of("k", VALUE)) == ["k", "zz", "1", "a", "true", "x", "y", "2.5", "b"]
    assert searchable("Key", VALUE) == " key zz 1 a true x y 2 5 b "
    assert searchable("k", None) == " k "


def test_the_deepest_value_there_can_be_has_words() -> None:
    assert searchable("k", json.loads("[" * 900 + '"needle"' + "]" * 900)) == " k needle "


@pytest.mark.parametrize("letter", ["a ", "ü ", "語", "🌳 ", "\ufdfa"])
def test_words_have_at_most_their_bytes(letter: str) -> None:
    words = searchable("k", letter * 262_000)
    assert 0 < len(words.encode()) <= WORDS_BYTES_MAX + 1
    assert words[0] == words[-1] == " "


def test_a_word_has_a_stem_and_a_sentence_without_spaces_is_pairs() -> None:
    told = [
        (term.text, term.stem, term.spaced) for term in terms_of("Ort: deployments in 東京タワー, A-Z 語")
    ]
    assert told == [
        ("ort", "ort", True),
        ("deployments", "deploym", True),
        ("in", "in", True),
        ("東京", "東京", False),
        ("京タ", "京タ", False),
        ("タワ", "タワ", False),
        ("ワー", "ワー", False),
        ("a", "a", True),
        ("z", "z", True),
        ("語", "語", False),
    ]


def test_a_query_has_each_term_once_and_a_bounded_number() -> None:
    assert [term.text for term in terms_of("to be or not to be")] == ["to", "be", "or", "not"]
    assert len(terms_of(" ".join(f"w{n}" for n in range(500)))) == TERMS_MAX
    assert terms_of("?!") == []


def test_a_passage_is_the_plain_beginning_of_a_record() -> None:
    assert passage("user_login-Note", {"Text": "Käufer"}) == "user login Note Text Käufer"
    assert len(passage("k", ["x" * 1_000] * 1_000)) <= PASSAGE_CHARS_MAX
