"""A worker that writes down which runs it takes, so that a test knows whose run a dead worker held.

A lease's row has a token and no name. Each line of the file is one JSON object, appended with a single write:
`{"run": "<uuid>", "token": 3, "pid": 4711, "at": 12.5}`, `at` on the machine's monotonic clock.
"""

import json
import os
import time
from pathlib import Path
from uuid import UUID

from espalier_eventlog.publisher import Publisher
from espalier_run_worker import main
from espalier_run_worker.held import Held
from espalier_store.pool import Pool


def note_claims(path: Path) -> None:
    """From now on every claim that this process makes is noted, right after its commit."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    real = main.claim  # type: ignore[attr-defined]

    async def noted(pool: Pool, publisher: Publisher, lease_ttl_s: float, run_id: UUID) -> Held | None:
        held = await real(pool, publisher, lease_ttl_s, run_id)
        if held is not None:
            line = {
                "run": str(held.run_id),
                "token": held.lease_token,
                "pid": os.getpid(),
                "at": time.monotonic(),
            }
            os.write(file, json.dumps(line).encode() + b"\n")
        return held

    main.claim = noted  # type: ignore[attr-defined]
