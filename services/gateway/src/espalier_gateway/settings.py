"""Every setting of a gateway process."""

from pydantic import Field

from espalier_embeddings import EmbeddingSettings
from espalier_eventlog import RedisSettings
from espalier_protocol import jsonrpc, strict_json
from espalier_protocol.access import ServedCapabilities
from espalier_secrets.sealing import SecretsSettings
from espalier_store.pool import PostgresSettings
from espalier_telemetry import LogSettings

DAY_S = 24 * 3600


class GatewaySettings(PostgresSettings, RedisSettings, LogSettings, SecretsSettings, EmbeddingSettings):
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8787, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    capabilities: ServedCapabilities = "all"
    """Capabilities offered: `all`, `none`, or names with commas; the same for all services."""
    body_bytes_max: int = Field(default=1024 * 1024, ge=1024)
    """Size of a request body."""
    import_bytes_max: int = Field(default=1024 * 1024 * 1024, ge=1024 * 1024)
    """Size of a subject's bundle that is imported; it is spooled to the temporary folder first."""
    batch_max: int = Field(default=jsonrpc.BATCH_MAX, ge=1)
    """Requests in one batch."""
    json_depth_max: int = Field(default=strict_json.DEPTH_MAX, ge=8, le=200)
    """Nesting of arrays and objects in a request body."""
    session_ttl_s: int = Field(default=30 * DAY_S, ge=DAY_S)
    """Idle seconds after which an AEP session expires."""
    cache_s: float = Field(default=5.0, ge=0, le=60)
    """Seconds for which a key or session, once found, is believed: the most that revoking one takes."""
    rpc_rate: float = Field(default=50.0, gt=0)
    """Calls per second that a key may make at one gateway; opening a stream or a download is a call too."""
    rpc_burst: int = Field(default=200, ge=1)
    """Calls that a key may make at once after a rest; a larger batch counts as this many."""
    streams_per_key: int = Field(default=100, ge=1)
    """Streams of events that a key may have open at one gateway."""
    streams_per_run: int = Field(default=2000, ge=1)
    """Streams of events of one run that one gateway keeps open."""
    streams_per_gateway: int = Field(default=4000, ge=1)
    """Streams of events that one gateway keeps open; beyond them the answer is 503."""
    gateway_drain_s: int = Field(default=3, ge=0)
    """How long a stopping gateway waits for answers under way."""
    http_connections_max: int = Field(default=5000, ge=1)
    """Open connections and requests under way; beyond them the answer is 503."""
