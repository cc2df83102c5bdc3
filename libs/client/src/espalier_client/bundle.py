"""A subject's bundle in a folder: `records.jsonl`, and the artifacts' bytes as files named for their hash.

On the wire a bundle is one stream of JSON lines in which bytes stand between the records; here they are files
that a person can open. Checked on the way out: that the last line came, and that bytes have the hash for
which they are named. What the lines mean is the runtime's business.
"""

import hashlib
import json
import re
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

from espalier_client.errors import Cause, ClientError, TransportError

RECORDS: Final = "records.jsonl"
ARTIFACTS: Final = "artifacts"
CHUNK_BYTES: Final = 256 * 1024
LINE_BYTES_MAX: Final = 4 * 1024 * 1024
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class BadBundle(ClientError):
    """The folder holds no bundle, or a damaged one."""


class BundleWriter:
    """Makes the folder when it is entered; `take` the lines of a stream, and `finish` when it has ended.

    Without `finish` the folder holds no whole bundle. Raises BadBundle if the folder is there already, or
    cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = ExitStack()
        self._records: BinaryIO
        self._artifact: BinaryIO | None = None
        self._sha256, self._digest = "", hashlib.sha256()
        self._counts: dict[str, int] | None = None

    def __enter__(self) -> Self:
        try:
            (self._folder / ARTIFACTS).mkdir(parents=True)
            self._records = self._files.enter_context((self._folder / RECORDS).open("xb"))
        except OSError as err:
            raise BadBundle(f"{self._folder} cannot be made, or is there already: {err.strerror}.") from err
        return self

    def __exit__(self, *_: object) -> None:
        if self._artifact is not None:
            self._artifact.close()
        self._files.close()

    def take(self, line: bytes) -> None:
        """Raises TransportError for what is no line of a bundle."""
        try:
            self._take(line, json.loads(line))
        except (ValueError, TypeError, AttributeError, KeyError) as err:
            raise TransportError("The runtime sent a line that is damaged.", Cause.senseless) from err

    def _take(self, line: bytes, value: Any) -> None:
        if value.get("kind") == "bytes":
            self._take_bytes(b64decode(value["base64"], validate=True))
            return
        self._close_artifact()
        self._records.write(line + b"\n")
        if value.get("kind") == "artifacts":
            self._open_artifact(value["record"])
        if value.get("kind") == "end":
            self._counts = value["counts"]

    def finish(self) -> dict[str, int]:
        """How many records of each kind there are."""
        self._close_artifact()
        if self._counts is None:
            raise TransportError("The bundle ended in the middle; export it again.")
        return self._counts

    def _open_artifact(self, record: dict[str, Any]) -> None:
        self._sha256, self._digest = record["sha256"], hashlib.sha256()
        if not _SHA256.fullmatch(self._sha256):  # it becomes the name of a file
            raise TransportError("The runtime names an artifact's bytes strangely.", Cause.senseless)
        self._artifact = (self._folder / ARTIFACTS / self._sha256).open("wb")

    def _take_bytes(self, piece: bytes) -> None:
        if self._artifact is None:
            raise TransportError("The runtime sent bytes of no artifact.", Cause.senseless)
        self._artifact.write(piece)
        self._digest.update(piece)

    def _close_artifact(self) -> None:
        if self._artifact is None:
            return
        self._artifact.close()
        self._artifact = None
        if self._digest.hexdigest() != self._sha256:
            raise TransportError("An artifact's bytes arrived damaged.", Cause.senseless)


async def stream_of(folder: Path) -> AsyncIterator[bytes]:
    """The bundle as the wire has it. Raises BadBundle."""
    for piece in lines_of(folder):
        yield piece


def lines_of(folder: Path) -> Iterator[bytes]:
    """The lines of `stream_of`."""
    try:
        with (folder / RECORDS).open("rb") as records:
            while line := records.readline(LINE_BYTES_MAX):  # bounded by the file
                yield line
                sha256 = _artifact_of(line)
                if sha256 is not None:
                    yield from _bytes_of(folder / ARTIFACTS / sha256)
    except OSError as err:
        raise BadBundle(f"{folder} holds no whole bundle: {err.strerror}.") from err


def _artifact_of(line: bytes) -> str | None:
    try:
        value = json.loads(line)
        if value.get("kind") != "artifacts":
            return None
        sha256 = value["record"]["sha256"]
    except (ValueError, TypeError, AttributeError, KeyError) as err:
        raise BadBundle(f"{RECORDS} has a line that is damaged.") from err
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise BadBundle(f"{RECORDS} has an artifact without a hash.")
    return sha256


def _bytes_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):  # bounded by the file
            yield json.dumps({"kind": "bytes", "base64": b64encode(piece).decode()}).encode() + b"\n"
