"""Keys on a person's terminal: what `keys ...` prints. A key itself only once, where it is made.

Results go to standard output, words to the person beside it. Above it stands the command, which did the work.
"""

from collections.abc import Sequence
from pathlib import Path

import typer

from espalier_client.commands.listing import GAP, ID_COLUMNS, TIME_COLUMNS, Listing, moment
from espalier_client.commands.terminal import output, say
from espalier_client.timeline import printable
from espalier_local.first_key import KEYS_MAX
from espalier_local.folder import PROFILE, plainly, read_private
from espalier_local.keys import NewKey
from espalier_protocol.access import SCOPES
from espalier_protocol.ids import to_wire
from espalier_protocol.shapes import timestamp
from espalier_protocol.strict_json import JsonValue, dumps
from espalier_secrets import fingerprint
from espalier_store.keys import KeyRecord, Revoked

STANDING_COLUMNS = len("revoked")


def show_minted(minted: NewKey) -> None:
    typer.echo(minted.key)
    say(f"Its id is {to_wire('key', minted.key_id)}; `espalier keys revoke` takes it.")


def show_keys(found: Sequence[KeyRecord], owner: str | None, as_json: bool) -> None:
    """For a person two lines a key: what it takes to choose one, and the rest below it."""
    listing = Listing(
        output(), [("key", ID_COLUMNS), ("is", STANDING_COLUMNS), ("last seen, UTC", TIME_COLUMNS)], "owner"
    )
    for key in found[:KEYS_MAX]:
        if as_json:
            typer.echo(dumps(_members(key)))
        else:
            standing = "revoked" if key.revoked_at else "valid"
            listing.row(to_wire("key", key.key_id), standing, moment(key.last_seen_at), key.owner_name)
            listing.note(_details(key))
    if not found:
        say("There are no keys." if owner is None else f"There are no keys of an owner called {owner}.")
    if len(found) > KEYS_MAX:
        say(f"There are more than {KEYS_MAX} keys; --owner shows those of one owner.")


def show_revoked(key_id: str, revoked: Revoked, folder: Path) -> None:
    """The profile is looked at afterwards, so that a damaged one cannot save a key from being revoked."""
    again = "had already been" if revoked.already else "is"
    typer.echo(printable(f"{key_id} of {revoked.owner_name} {again} revoked."))
    with plainly(folder):
        kept = read_private(folder / PROFILE).get("api_key", "")
    if fingerprint(kept) == revoked.key_hash:
        say(f"It is the key in {folder / PROFILE}; the next `espalier up` makes a new one.")


def _details(key: KeyRecord) -> str:
    created = f"created {moment(key.created_at)}"
    revoked = f", revoked {moment(key.revoked_at)}" if key.revoked_at else ""
    scopes = "all scopes" if set(key.scopes) == set(SCOPES) else " ".join(key.scopes)
    return f"{GAP}{created}{revoked}{GAP}{scopes}"


def _members(key: KeyRecord) -> dict[str, JsonValue]:
    return {
        "id": to_wire("key", key.key_id),
        "owner": key.owner_name,
        "scopes": [*key.scopes],
        "created_at": timestamp(key.created_at),
        "last_seen_at": timestamp(key.last_seen_at) if key.last_seen_at else None,
        "revoked_at": timestamp(key.revoked_at) if key.revoked_at else None,
    }
