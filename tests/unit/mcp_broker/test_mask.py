"""A server that repeats its credential does not get it past the broker."""

import json

from espalier_mcp_broker.mask import MASKED, SECRET_CHARS_MIN, Mask

TOKEN = 'tok"en\\canary'
VALUES = ("Bearer " + TOKEN, "whole value", "x" * (SECRET_CHARS_MIN - 1))


def test_a_secret_is_taken_out_wherever_it_stands() -> None:
    said = {
        f"about {TOKEN}": [f"<{TOKEN}>", {"deep": f"{TOKEN}{TOKEN}"}, 1, None, True, 1.5],
        "header": f"Bearer {TOKEN}",
        "text": json.dumps({"authorization": f"Bearer {TOKEN}", "whole": "whole value"}),
    }
    assert Mask(VALUES).json(said) == {
        f"about {MASKED}": [f"<{MASKED}>", {"deep": MASKED * 2}, 1, None, True, 1.5],
        "header": MASKED,
        "text": json.dumps({"authorization": MASKED, "whole": MASKED}),
    }


def test_a_value_that_is_too_short_to_be_a_secret_stays() -> None:
    assert Mask(VALUES).text("x" * (SECRET_CHARS_MIN - 1) + " whole") == "xxxxx whole"


def test_without_secrets_nothing_is_copied() -> None:
    said = {"a": ["b"]}
    assert Mask().json(said) is said
    assert Mask().text("a") == "a"
