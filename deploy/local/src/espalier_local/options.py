"""What a person can choose about a local runtime; apart from `runtime.py` so that the command loads fast."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

WORKERS_MAX = 64


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """What a person can choose. `port=0` takes a free one; a URL means that this server runs already.

    `env` is added to the environment of all services.
    """

    host: str = "127.0.0.1"
    port: int = 8787
    workers: int = 1
    data_dir: Path | None = None
    postgres_url: str | None = None
    redis_url: str | None = None
    script: Path | None = None
    mcp_servers: Path | None = None
    model: str | None = None
    scripted_plans: bool = False
    postgres_options: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    restart: bool = True
