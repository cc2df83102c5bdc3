"""One scripted runtime per test, and a client of it."""

from collections.abc import AsyncIterator

import pytest
from tests.unit.client.loopback import Loopback, open_loopback

from espalier_client import AepClient

KEY = "esp_a_made_up_key"


@pytest.fixture
async def runtime() -> AsyncIterator[Loopback]:
    async with open_loopback() as server:
        yield server


@pytest.fixture
async def client(runtime: Loopback) -> AsyncIterator[AepClient]:
    async with AepClient(runtime.url, KEY) as opened:
        yield opened
