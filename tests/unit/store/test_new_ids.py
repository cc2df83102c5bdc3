"""New ids: of this moment, and in the order in which they were made."""

import time
from itertools import pairwise
from uuid import RFC_4122, UUID

from espalier_protocol.ids import to_wire
from espalier_store.ids import new_id


def unix_ms_of(uuid: UUID) -> int:
    return uuid.int >> 80


def test_a_new_id_is_a_uuid_v7_of_this_moment() -> None:
    before = time.time_ns() // 1_000_000
    uuid = new_id()
    after = time.time_ns() // 1_000_000
    assert (uuid.version, uuid.variant) == (7, RFC_4122)
    # A burst of ids just before may have carried the sequence into the next millisecond.
    assert before <= unix_ms_of(uuid) <= after + 1


def test_ids_of_one_process_rise_strictly_as_uuids_and_as_text() -> None:
    uuids = [new_id() for _ in range(20_000)]
    wires = [to_wire("run", uuid) for uuid in uuids]
    assert all(left < right for left, right in pairwise(uuids))
    assert all(left < right for left, right in pairwise(wires))
