"""Sealed values: they open where they belong, with a key that is known, and nowhere else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from espalier_secrets.sealing import (
    HEAD_BYTES,
    KEYS_MAX,
    NONCE_BYTES,
    TAG_BYTES,
    SealBroken,
    Sealer,
    SealingOff,
    SecretsSettings,
    new_sealing_key,
    place_of,
    sealer,
)

OLD, NEW = new_sealing_key(), new_sealing_key()
PLAIN = b"sk-canary-0123456789"
PLACE = place_of("owner", "providers", "row", "key")


def with_keys(*keys: str) -> Sealer:
    return sealer(SecretStr(",".join(keys)))


@given(plain=st.binary(max_size=4096), place=st.text(max_size=200).filter(lambda text: text.isprintable()))
def test_what_was_sealed_opens_where_it_belongs(plain: bytes, place: str) -> None:
    sealed = with_keys(NEW).seal(plain, place)
    assert with_keys(NEW).open(sealed, place) == plain


@pytest.mark.parametrize(
    "elsewhere",
    [
        place_of("another", "providers", "row", "key"),
        place_of("owner", "agent_servers", "row", "key"),
        place_of("owner", "providers", "another", "key"),
        place_of("owner", "providers", "row", "auth"),
        PLACE + "/",
        "",
    ],
)
def test_a_value_that_was_moved_does_not_open(elsewhere: str) -> None:
    sealed = with_keys(NEW).seal(PLAIN, PLACE)
    with pytest.raises(SealBroken):
        with_keys(NEW).open(sealed, elsewhere)


def test_no_byte_of_a_sealed_value_can_be_changed_or_left_out() -> None:
    box = with_keys(NEW)
    sealed = box.seal(PLAIN, PLACE)
    changed = [sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :] for at in range(len(sealed))]
    shortened = [sealed[:length] for length in range(len(sealed))]
    for broken in (*changed, *shortened, sealed + b"\x00", PLAIN):
        with pytest.raises(SealBroken):
            box.open(broken, PLACE)


def test_a_sealed_value_holds_nothing_of_its_text_and_differs_each_time() -> None:
    box = with_keys(NEW)
    first, second = box.seal(PLAIN, PLACE), box.seal(PLAIN, PLACE)
    assert len(first) == HEAD_BYTES + len(PLAIN) + TAG_BYTES
    assert PLAIN[:8] not in first
    assert first[HEAD_BYTES - NONCE_BYTES :] != second[HEAD_BYTES - NONCE_BYTES :]
    assert first[: -len(PLAIN)] != second[: -len(PLAIN)]


def test_the_first_key_seals_and_all_open() -> None:
    before, rotated, after = with_keys(OLD), with_keys(NEW, OLD), with_keys(NEW)
    old, new = before.seal(PLAIN, PLACE), rotated.seal(PLAIN, PLACE)
    assert rotated.open(old, PLACE) == rotated.open(new, PLACE) == after.open(new, PLACE) == PLAIN
    assert [rotated.is_current(old), rotated.is_current(new)] == [False, True]
    with pytest.raises(SealBroken):
        after.open(old, PLACE)
    with pytest.raises(SealBroken):
        before.open(new, PLACE)


def test_without_a_key_nothing_is_sealed_and_nothing_opens() -> None:
    none = with_keys()
    assert not none.can_seal
    with pytest.raises(SealingOff):
        none.seal(PLAIN, PLACE)
    sealed = with_keys(NEW).seal(PLAIN, PLACE)
    with pytest.raises(SealBroken):
        none.open(sealed, PLACE)
    assert not none.is_current(sealed)


@pytest.mark.parametrize("part", ["", "a/b"])
def test_places_cannot_be_made_to_look_alike(part: str) -> None:
    with pytest.raises(ValueError, match="place"):
        place_of("owner", "providers", part, "key")


def test_the_setting_takes_several_keys_and_refuses_short_ones_without_repeating_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ESPALIER_SECRETS_KEY", f"{NEW},{OLD}\n")
    settings = SecretsSettings()
    sealed = with_keys(OLD).seal(PLAIN, PLACE)
    assert sealer(settings.secrets_key).open(sealed, PLACE) == PLAIN
    assert NEW not in repr(settings)
    for bad in (f"{NEW},tooshort-canary", ",".join([NEW] * (KEYS_MAX + 1))):
        monkeypatch.setenv("ESPALIER_SECRETS_KEY", bad)
        with pytest.raises(ValidationError) as refused:
            SecretsSettings()
        assert "tooshort-canary" not in str(refused.value)
        assert NEW not in str(refused.value)
