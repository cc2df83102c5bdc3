"""The worker's connection to the tool broker: signed requests, and nothing about runs.

Above: `brokered_calls` and `toolbox`. Whatever keeps an answer away is BrokerAway, and says nothing about
whether a call was sent: only its row does.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import httpx2
from pydantic import BaseModel, ValidationError

from espalier_protocol.broker import (
    CALL_PATH,
    LIST_PATH,
    SIGNATURE_HEADER,
    CallOrder,
    CallStanding,
    ToolsOffered,
    ToolsWanted,
)
from espalier_secrets import signature

CONNECT_WAIT_S: Final = 2.0
LIST_WAIT_S: Final = 20.0
ANSWER_SLACK_S: Final = 15.0
"""How much longer than a call may take its answer is waited for."""

CONNECTIONS_MAX: Final = 200
OK: Final = 200

Answer = TypeVar("Answer", bound=BaseModel)


class BrokerAway(Exception):
    """The broker could not be asked, or gave no answer that makes sense."""


class BrokerLink:
    def __init__(self, http: httpx2.AsyncClient, key: str) -> None:
        self._http, self._key = http, key

    async def call(self, order: CallOrder) -> CallStanding:
        """Have a planned call carried out, or hear how it stands. Raises BrokerAway."""
        return await self._post(CALL_PATH, order, CallStanding, order.seconds_max + ANSWER_SLACK_S)

    async def offered(self, wanted: ToolsWanted) -> ToolsOffered:
        """The tools that a toolset names. Raises BrokerAway."""
        return await self._post(LIST_PATH, wanted, ToolsOffered, LIST_WAIT_S)

    async def _post(self, path: str, words: BaseModel, answer: type[Answer], wait_s: float) -> Answer:
        body = words.model_dump_json().encode()
        headers = {SIGNATURE_HEADER: signature(self._key, path, body), "Content-Type": "application/json"}
        timeout = httpx2.Timeout(wait_s, connect=CONNECT_WAIT_S)
        try:
            response = await self._http.post(path, content=body, headers=headers, timeout=timeout)
            if response.status_code != OK:
                raise BrokerAway(f"the broker answered {response.status_code}")
            return answer.model_validate_json(response.content)
        except (httpx2.HTTPError, ValidationError) as error:
            raise BrokerAway(type(error).__name__) from error


@asynccontextmanager
async def open_broker_link(url: str, key: str) -> AsyncIterator[BrokerLink]:
    limits = httpx2.Limits(max_connections=CONNECTIONS_MAX)
    async with httpx2.AsyncClient(base_url=url, limits=limits, trust_env=False) as http:
        yield BrokerLink(http, key)
