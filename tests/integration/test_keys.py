"""Keys as an operator handles them: made, listed, revoked, and what a gateway answers to them then."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.integration.conftest import Stores
from tests.integration.person import Done, Espalier, at_the_terminal
from tests.integration.wire import ANSWER_WAIT_S, Gateway, Wire, symbol

from espalier_gateway import following
from espalier_local.first_key import ensure_profile
from espalier_local.folder import throwaway_folder
from espalier_local.servers import LocalServers, local_servers
from espalier_protocol.access import SCOPES
from espalier_protocol.ids import from_wire, to_wire
from espalier_protocol.shapes import timestamp
from espalier_secrets import fingerprint
from espalier_store.ids import new_id
from espalier_store.pool import Pool

pytestmark = pytest.mark.anyio

RECHECK_S = 0.05
KEY_ID = re.compile(r"key_[0-9A-Z]{26}")


@pytest.fixture
def espalier(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Espalier:
    """The command, on the test's database and an empty data folder."""
    monkeypatch.setenv("ESPALIER_POSTGRES_URL", stores.postgres_url)
    monkeypatch.setenv("ESPALIER_DATA_DIR", str(tmp_path / "data"))
    return at_the_terminal(monkeypatch, capsys)


async def make(espalier: Espalier, owner: str, *scopes: str) -> tuple[str, str]:
    """A key and its id."""
    done = await espalier("keys", "create", "--owner", owner, *(f"--scope={scope}" for scope in scopes))
    (key_id,) = KEY_ID.findall(done.stderr)
    assert done == Done(0, done.stdout, f"Its id is {key_id}; `espalier keys revoke` takes it.\n")
    return done.stdout.removesuffix("\n"), key_id


async def facts(pool: Pool, key_id: str) -> dict[str, Any]:
    row = await pool.fetchrow("select * from keys where id = $1", from_wire("key", key_id))
    assert row is not None
    return dict(row)


async def test_keys_are_listed_by_owner_without_the_key_or_its_hash(
    espalier: Espalier, gateway: Gateway, pool: Pool
) -> None:
    used, used_id = await make(espalier, "zoe")
    narrow, narrow_id = await make(espalier, "acme", "run.read", "run.create")
    await Wire(gateway.http, used).begin()

    plain, lines = await espalier("keys", "list"), await espalier("keys", "list", "--json")
    acme, nobody = (
        await espalier("keys", "list", "--owner", "acme"),
        await espalier("keys", "list", "--owner", "nobody"),
    )

    of_acme, of_zoe = await facts(pool, narrow_id), await facts(pool, used_id)
    assert [json.loads(line) for line in lines.stdout.splitlines()] == [
        {
            "id": narrow_id,
            "owner": "acme",
            "scopes": ["run.read", "run.create"],
            "created_at": timestamp(of_acme["created_at"]),
            "last_seen_at": None,
            "revoked_at": None,
        },
        {
            "id": used_id,
            "owner": "zoe",
            "scopes": list(SCOPES),
            "created_at": timestamp(of_zoe["created_at"]),
            "last_seen_at": timestamp(of_zoe["last_seen_at"]),
            "revoked_at": None,
        },
    ]
    heading = "key                             is       last seen, UTC    owner\n"
    first = (
        f"{narrow_id}  valid                      acme\n"
        f"  created {of_acme['created_at']:%Y-%m-%d %H:%M}  run.read run.create\n"
    )
    second = (
        f"{used_id}  valid    {of_zoe['last_seen_at']:%Y-%m-%d %H:%M}  zoe\n"
        f"  created {of_zoe['created_at']:%Y-%m-%d %H:%M}  all scopes\n"
    )
    assert (plain, acme) == (Done(0, heading + first + second), Done(0, heading + first))
    assert nobody == Done(0, "", "There are no keys of an owner called nobody.\n")
    shown = plain.stdout + lines.stdout
    assert not [key for key in (used, narrow) if key in shown or fingerprint(key).hex() in shown]


async def test_a_name_with_control_characters_cannot_take_over_the_terminal(espalier: Espalier) -> None:
    _, key_id = await make(espalier, "a\x1b[2Jb\r\nc\u202e")

    listed = await espalier("keys", "list")
    revoked = await espalier("keys", "revoke", key_id)

    assert listed.stdout.splitlines()[1].endswith("  a [2Jb c ")
    assert revoked == Done(0, f"{key_id} of a [2Jb c  is revoked.\n")


async def test_a_revoked_key_is_refused_and_the_others_are_not(
    espalier: Espalier, gateway: Gateway, pool: Pool
) -> None:
    leaked, leaked_id = await make(espalier, "acme")
    sister, sister_id = await make(espalier, "acme")
    foreign, _ = await make(espalier, "zoe")
    callers = [Wire(gateway.http, key) for key in (leaked, sister, foreign)]
    for caller in callers:
        await caller.begin()

    revoked = await espalier("keys", "revoke", leaked_id)

    assert revoked == Done(0, f"{leaked_id} of acme is revoked.\n")
    answers = [symbol(await caller.answer("agent.list")) for caller in callers]
    assert answers == ["authn_failed", "result", "result"]
    assert [(await facts(pool, each))["revoked_at"] is None for each in (leaked_id, sister_id)] == [
        False,
        True,
    ]
    listed = await espalier("keys", "list", "--owner", "acme")
    assert [line.split()[:2] for line in listed.stdout.splitlines()[1::2]] == [
        [leaked_id, "revoked"],
        [sister_id, "valid"],
    ]


async def test_an_open_stream_ends_when_its_key_is_looked_at_again(
    espalier: Espalier, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "Pace", partial(following.Pace, recheck_s=RECHECK_S))
    leaked, leaked_id = await make(espalier, "acme")
    sister, _ = await make(espalier, "acme")
    one, other = Wire(gateway.http, leaked), Wire(gateway.http, sister)
    await one.begin()
    await other.begin()
    run_id = await one.run()
    heard: dict[str, list[str]] = {"one": [], "other": []}

    async def listen(name: str, caller: Wire) -> None:
        path = f"/aep/v1/runs/{run_id}/events"
        async with caller.http.stream("GET", path, headers=caller.headers()) as response:
            async for line in response.aiter_lines():
                heard[name] += [line] if line.startswith(("event: ", ": no longer")) else []
        heard[name].append("over")

    with anyio.fail_after(ANSWER_WAIT_S):
        async with anyio.create_task_group() as listeners:
            listeners.start_soon(listen, "one", one)
            listeners.start_soon(listen, "other", other)
            while not all(heard.values()):
                await anyio.sleep(RECHECK_S)
            await espalier("keys", "revoke", leaked_id)
            while "over" not in heard["one"]:
                await anyio.sleep(RECHECK_S)
            await other.call("run.cancel", run_id=run_id)

    assert heard == {
        "one": ["event: run.started", ": no longer allowed", "over"],
        "other": ["event: run.started", "event: run.ended", "over"],
    }


async def test_revoking_again_changes_nothing_and_says_so(espalier: Espalier, pool: Pool) -> None:
    _, key_id = await make(espalier, "acme")
    await espalier("keys", "revoke", key_id)
    before = await facts(pool, key_id)

    again = await espalier("keys", "revoke", key_id)

    assert again == Done(0, f"{key_id} of acme had already been revoked.\n")
    assert await facts(pool, key_id) == before


async def test_a_key_that_there_is_not_is_one_sentence(espalier: Espalier, pool: Pool) -> None:
    key, key_id = await make(espalier, "acme")
    run_id, unknown = key_id.replace("key_", "run_"), to_wire("key", new_id())

    refused = {text: await espalier("keys", "revoke", text) for text in (unknown, run_id, key, "\x1b[2J")}

    sentence = "espalier: There is no key {}; `espalier keys list` shows those that there are.\n"
    said = {**{text: text for text in (unknown, run_id, key)}, "\x1b[2J": "[2J"}
    assert refused == {text: Done(2, "", sentence.format(said[text])) for text in said}
    assert (await facts(pool, key_id))["revoked_at"] is None


async def test_revoking_the_profiles_own_key_warns_and_the_next_start_makes_another(
    espalier: Espalier, gateway: Gateway, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ESPALIER_POSTGRES_URL")
    with throwaway_folder() as folder:
        monkeypatch.setenv("ESPALIER_DATA_DIR", str(folder))
        async with local_servers(
            folder, postgres_url=stores.postgres_url, redis_url=stores.redis_url
        ) as servers:
            first = await ensure_profile(servers, gateway.base_url)
            (first_id,) = KEY_ID.findall((await espalier("keys", "list")).stdout)

            revoked = await espalier("keys", "revoke", first_id)
            refused = await espalier("agent", "list")
            second = await ensure_profile(servers, gateway.base_url)
            admitted = await espalier("agent", "list")

    profile = folder / "profile.json"
    assert revoked == Done(
        0,
        f"{first_id} of local is revoked.\n",
        f"It is the key in {profile}; the next `espalier up` makes a new one.\n",
    )
    assert (refused.code, admitted.code) == (2, 0)
    assert refused.stderr.endswith("[authn_failed]\n")
    assert second != first


async def test_a_damaged_profile_does_not_save_a_key(espalier: Espalier, tmp_path: Path, pool: Pool) -> None:
    _, key_id = await make(espalier, "acme")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/profile.json").write_text("{")

    done = await espalier("keys", "revoke", key_id)

    assert done.stdout == f"{key_id} of acme is revoked.\n"
    assert (done.code, done.stderr.count("\n")) == (2, 1)
    assert (await facts(pool, key_id))["revoked_at"] is not None


async def test_a_database_without_the_schema_is_one_sentence(
    espalier: Espalier, servers: LocalServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPALIER_POSTGRES_URL", servers.postgres_url)

    done = await espalier("keys", "list")

    sentence = "espalier: The database does not have this build's schema; `espalier migrate` makes it.\n"
    assert done == Done(2, "", sentence)
