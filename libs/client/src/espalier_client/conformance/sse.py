"""Server-sent events as they come in, byte for byte: frames, and the envelopes inside them."""

import json
from dataclasses import dataclass, field
from typing import Any, Final

from espalier_client.conformance.verdicts import Failed, brief

LAST_TYPE: Final = "run.ended"
FRAME_BYTES_MAX: Final = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Frame:
    """The fields of one frame that carries data, as they stand there."""

    fields: tuple[tuple[str, str], ...]

    def field(self, name: str) -> str | None:
        return next((value for key, value in self.fields if key == name), None)

    def data_lines(self) -> int:
        return sum(key == "data" for key, _ in self.fields)

    def event(self) -> dict[str, Any]:
        """The envelope. Raises Failed if it is no JSON object."""
        text = "".join(value for key, value in self.fields if key == "data")
        try:
            event = json.loads(text)
        except ValueError as err:
            raise Failed(f"an event's data should be JSON on one line, got {brief(text)}.") from err
        if not isinstance(event, dict):
            raise Failed(f"an event should be an object, got {brief(event)}.")
        return event


@dataclass
class Frames:
    """Takes bytes, gives frames. `ended`: the last event of the run was among them."""

    found: list[Frame] = field(default_factory=list)
    ended: bool = False
    rest: bytes = b""

    def feed(self, piece: bytes) -> None:
        *whole, self.rest = (self.rest + piece).split(b"\n\n")
        if len(self.rest) > FRAME_BYTES_MAX:
            raise Failed("a stream whose frames do not end in two line feeds.")
        for each in whole:
            frame = Frame(tuple(_fields(each)))
            if frame.data_lines():
                self.found.append(frame)
                self.ended = self.ended or frame.event().get("type") == LAST_TYPE


def _fields(frame: bytes) -> list[tuple[str, str]]:
    """Comments are no fields. A blank after the colon belongs to the syntax."""
    pairs = []
    for line in frame.decode(errors="replace").split("\n"):
        name, colon, value = line.partition(":")
        if line and name:
            pairs.append((name, value.removeprefix(" ") if colon else ""))
    return pairs
