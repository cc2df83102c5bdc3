"""Every setting of a worker process."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from espalier_eventlog import RedisSettings
from espalier_store.pool import PostgresSettings
from espalier_telemetry import LogSettings


class WorkerSettings(PostgresSettings, RedisSettings, LogSettings):
    worker_slots: int = Field(default=16, ge=1, le=1000)
    """Runs that may live in this process at the same time."""
    worker_drain_s: float = Field(default=2.0, ge=0)
    """How long a stopping worker lets the steps under way finish before it gives their runs back."""
    script: Path | None = None
    """The plan that the scripted model follows; without one it answers "ok"."""
    models_scripted: Literal["on", "off"] = "off"
    """Whether plans may also come over the wire, in a run's inputs or an agent's metadata."""
