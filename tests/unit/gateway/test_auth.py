"""What the gatekeeper remembers."""

import anyio
import pytest

from espalier_gateway import auth
from espalier_gateway.auth import Remembered

pytestmark = pytest.mark.anyio

LIFE_S = 60.0


async def test_what_was_found_is_remembered_until_its_life_is_over() -> None:
    kept: Remembered[str, int] = Remembered(LIFE_S)
    kept.put("a", 1)
    assert (kept.get("a"), kept.get("b")) == (1, None)
    gone: Remembered[str, int] = Remembered(1e-6)
    gone.put("a", 1)
    with anyio.fail_after(LIFE_S):
        while gone.get("a") is not None:
            await anyio.lowlevel.checkpoint()


async def test_nothing_is_remembered_when_the_life_is_zero() -> None:
    kept: Remembered[str, int] = Remembered(0)
    kept.put("a", 1)
    assert kept.get("a") is None


async def test_the_oldest_goes_when_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "REMEMBERED_MAX", 2)
    kept: Remembered[str, int] = Remembered(LIFE_S)
    for place, name in enumerate(("a", "b", "a", "c")):
        kept.put(name, place)
    assert [kept.get(name) for name in "abc"] == [2, None, 3]
