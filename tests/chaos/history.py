"""What a chaotic run of the bench leaves behind: a history of what outsiders saw, and a dump of the database.

Both are all that the checker gets. A history is JSON lines, one record each, in the order in which they were
noticed; `at` is seconds since the bench began, on one monotonic clock. A dump is one JSON object: names of
tables, and for each its rows as Postgres prints them (`row_to_json`). Both are kept compressed.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class Began:
    """The first record: what a history means depends on these."""

    at: float
    seed: int
    settings: dict[str, Any]
    """`lease_ttl_s`, `sweep_s`, counts of services, versions: whatever a check has to know."""


@dataclass(frozen=True, slots=True)
class Call:
    """One RPC of a client, written when it was over. `began` and `at` are its two ends.

    `unknown`: no answer came, so it may or may not have been carried out.
    """

    at: float
    began: float
    client: str
    owner: str
    gateway: str
    method: str
    params: dict[str, Any]
    outcome: Literal["ok", "error", "unknown"]
    answer: Any = None
    """The result, or the error object."""
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True)
class Connection:
    """A follower opened a stream, `since` an id, or it ended. `number` counts one follower's connections."""

    at: float
    follower: str
    run_id: str
    number: int
    act: Literal["opened", "ended"]
    since: str | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    """One event that a follower was sent. `digest` is the SHA-256 (hex) of the frame's data as it came."""

    at: float
    follower: str
    run_id: str
    connection: int
    event_id: str
    type: str
    digest: str


@dataclass(frozen=True, slots=True)
class ModelAsked:
    """A request that reached the model server, and its bill. `run_id` is None where it cannot be told."""

    at: float
    run_id: str | None
    tokens: int
    ended: Literal["answered", "cut", "refused"]


@dataclass(frozen=True, slots=True)
class ToolRan:
    """A line of a tool server's ledger, written before the tool does anything. `call` names the one call."""

    at: float
    server: str
    tool: str
    run_id: str
    call: str


@dataclass(frozen=True, slots=True)
class Fault:
    """What the nemesis did, and to whom. `row` is the line of the failure matrix, `F1` to `F32`."""

    at: float
    row: str
    act: str
    target: str
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Process:
    """Something that happened to a service's process."""

    at: float
    service: str
    pid: int
    act: Literal["started", "ready", "exited"]
    code: int | None = None


@dataclass(frozen=True, slots=True)
class Orphaned:
    """Runs (wire ids) that a worker held when it was killed or told to stop, and that waited for no tool.

    `clock` is the database's time at that moment, in seconds since 1970.
    """

    at: float
    clock: float
    worker: str
    act: Literal["killed", "stopped"]
    run_ids: list[str]


@dataclass(frozen=True, slots=True)
class Probe:
    """One answer of `/healthz` or `/readyz`; status None if none came within its second."""

    at: float
    service: str
    path: str
    status: int | None


@dataclass(frozen=True, slots=True)
class Usage:
    """What a service held open: taken before the storm and after it."""

    at: float
    service: str
    when: Literal["before", "after"]
    descriptors: int
    children: int
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The last record: the storm is over, all runs that could end have ended, and the dump was taken.

    `clock` is the database's time in seconds since 1970 at `at`: it ties the bench's clock to the rows'.
    """

    at: float
    clock: float


Record: TypeAlias = (
    Began
    | Call
    | Connection
    | Frame
    | ModelAsked
    | ToolRan
    | Fault
    | Process
    | Orphaned
    | Probe
    | Usage
    | Ended
)
Dump: TypeAlias = Mapping[str, list[dict[str, Any]]]

KINDS: Final[dict[str, type[Any]]] = {
    kind.__name__: kind
    for kind in (
        *(Began, Call, Connection, Frame, ModelAsked, ToolRan),
        *(Fault, Process, Orphaned, Probe, Usage, Ended),
    )
}


def line_of(record: Record) -> str:
    return json.dumps({"kind": type(record).__name__, **asdict(record)}, separators=(",", ":"))


def record_of(line: str) -> Record:
    fields = json.loads(line)
    record: Record = KINDS[fields.pop("kind")](**fields)
    return record


def write_history(path: Path, records: Iterable[Record]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(line_of(record) + "\n" for record in records)


def read_history(path: Path) -> Iterator[Record]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(record_of, file)


def write_dump(path: Path, dump: Dump) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(dump, file, separators=(",", ":"))


def read_dump(path: Path) -> Dump:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        dump: Dump = json.load(file)
    return dump
