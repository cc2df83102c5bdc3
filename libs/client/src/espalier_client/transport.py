"""HTTP for one runtime: headers, sizes, time limits, and every failure of the network as a `TransportError`.

Knows endpoints and headers, but neither sessions (`client`) nor what an answer means (`replies`). It never
follows a redirect, which would carry the key elsewhere, and takes no proxy from the environment.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx2

from espalier_client.errors import Cause, TransportError
from espalier_client.replies import read_json, read_refusal

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0
STREAM_SILENCE_S_MAX = 45.0
"""Three heartbeats. A stream that is silent for longer is dead, whatever TCP believes."""

UPLOAD_ANSWER_S = 660.0
"""How long the answer to an upload may take, which is worked on as a whole."""

CONNECTIONS_MAX = 256
ANSWER_BYTES_MAX = 64 * 1024 * 1024
REFUSAL_BYTES_MAX = 64 * 1024
RPC_PATH = "/aep/v1/rpc"
SESSION_HEADER = "X-AEP-Session-Id"
KEY_HEADER = "Idempotency-Key"
OK = 200
PARTIAL = 206


class Transport:
    """An open connection pool to one runtime. Made and closed by `AepClient`."""

    def __init__(self, base_url: str, api_key: str, version: str) -> None:
        self.base_url = base_url.rstrip("/")
        with self._translated():
            self._http = httpx2.AsyncClient(
                base_url=self.base_url,
                headers={"Authorization": f"Bearer {api_key}", "Agent-Protocol-Version": version},
                timeout=httpx2.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
                limits=httpx2.Limits(max_connections=CONNECTIONS_MAX),
                trust_env=False,
            )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def post(
        self, body: bytes, session_id: str | None, idempotency_key: str | None = None
    ) -> tuple[int, bytes]:
        """Status and body of one RPC."""
        headers = {"Content-Type": "application/json", "Accept": "application/json", **_session(session_id)}
        if idempotency_key is not None:
            headers[KEY_HEADER] = idempotency_key
        with self._translated():
            async with self._http.stream("POST", RPC_PATH, content=body, headers=headers) as response:
                return response.status_code, await _read(response, ANSWER_BYTES_MAX)

    @asynccontextmanager
    async def get(
        self,
        path: str,
        session_id: str,
        *,
        accept: str,
        query: Mapping[str, str],
        part: Mapping[str, str],
    ) -> AsyncIterator[httpx2.Response]:
        """A successful response whose body is still to be read. Failures while reading are translated too.

        `part` are the headers that ask for a part; only whoever gives some may be answered one.
        """
        headers = {"Accept": accept, "Accept-Encoding": "identity", **part, **_session(session_id)}
        timeout = httpx2.Timeout(STREAM_SILENCE_S_MAX, connect=CONNECT_TIMEOUT_S)
        with self._translated():
            async with self._http.stream(
                "GET", path, params=dict(query), headers=headers, timeout=timeout
            ) as response:
                if response.status_code not in ((OK, PARTIAL) if part else (OK,)):
                    refusal = await _read(response, REFUSAL_BYTES_MAX)
                    raise read_refusal(response.status_code, refusal)
                yield response

    async def send(self, path: str, pieces: AsyncIterator[bytes], content_type: str) -> Any:
        """The JSON that answers a body which is sent piece by piece, once. Raises what was said instead."""
        timeout = httpx2.Timeout(UPLOAD_ANSWER_S, connect=CONNECT_TIMEOUT_S)
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        with self._translated():
            async with self._http.stream(
                "POST", path, content=pieces, headers=headers, timeout=timeout
            ) as response:
                body = await _read(response, ANSWER_BYTES_MAX)
                if response.status_code != OK:
                    raise read_refusal(response.status_code, body)
                return read_json(body)

    async def ask(self, verb: str, path: str, body: bytes | None) -> Any:
        """The JSON that a small endpoint beside RPC answers, None if nothing. Raises what was said."""
        headers = {"Accept": "application/json"} | ({"Content-Type": "application/json"} if body else {})
        with self._translated():
            async with self._http.stream(verb, path, content=body, headers=headers) as response:
                answer = await _read(response, ANSWER_BYTES_MAX)
                if not response.is_success:
                    raise read_refusal(response.status_code, answer)
                return read_json(answer) if answer else None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as err:
            sentence = f"{self.base_url!r} is not the address of a runtime; it looks like http://host:port."
            raise TransportError(sentence, Cause.senseless) from err
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as err:
            raise TransportError(f"The runtime at {self.base_url} cannot be reached.", Cause.unsent) from err
        except httpx2.ReadTimeout as err:
            sentence = f"The runtime at {self.base_url} fell silent."
            raise TransportError(sentence, Cause.silent) from err
        except httpx2.HTTPError as err:
            raise TransportError(f"The connection to {self.base_url} broke.") from err


def _session(session_id: str | None) -> dict[str, str]:
    return {} if session_id is None else {SESSION_HEADER: session_id}


async def _read(response: httpx2.Response, bytes_max: int) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > bytes_max:
            raise TransportError(f"The runtime answered more than {bytes_max} bytes.", Cause.senseless)
    return bytes(body)
