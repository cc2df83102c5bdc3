"""What is generated from the tables of the protocol is what the tables say."""

from pathlib import Path
from typing import get_args

from espalier_local.protocol_pages import pages
from espalier_protocol.events import PAYLOADS, EventType, OwnEventType

FOLDER = Path(__file__).parents[2] / "docs/protocol"


def test_every_type_of_event_has_its_payload() -> None:
    types = [*get_args(EventType), *get_args(OwnEventType)]
    assert sorted(model.type for model in PAYLOADS) == sorted(types)


def test_the_pages_of_the_protocol_are_not_stale() -> None:
    on_disk = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert on_disk == pages(), "docs/protocol is stale: run `make docs`"
