"""Memory over the wire: what a tree remembers, how it is found again, and what is refused."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from typing import Any
from uuid import UUID

import anyio
import pytest
from tests.integration.wire import ANSWER_WAIT_S, POLL_S, UNKNOWN_TAIL, Gateway, Wire, request, symbol
from tests.integration.wire_runs import uuid

from espalier_acts import memory as acts
from espalier_acts.memory import RECORDS_MAX, VALUE_BYTES_MAX, write_memory
from espalier_domain.errors import InvalidInput
from espalier_domain.words import terms_of
from espalier_gateway.settings import GatewaySettings
from espalier_protocol.memory import FOUND_MAX, QUERY_CHARS_MAX, TTL_S_MAX, MemoryWrite
from espalier_protocol.shapes import NAME_CHARS_MAX
from espalier_store import memory as store
from espalier_store.fleet import forget_expired
from espalier_store.ids import new_id
from espalier_store.memory import NewRecord, write_record
from espalier_store.pool import STATEMENT_TIMEOUT_S, Connection, Pool, transaction

pytestmark = pytest.mark.anyio

EXPIRE = "update memory_records set ttl_seconds = 1, expires_at = now() where key = $1"
WAITING = """
select count(*) from pg_stat_activity where datname = current_database() and wait_event = 'advisory'
"""


@pytest.fixture
def gateway_settings(gateway_settings: GatewaySettings) -> GatewaySettings:
    """Patient with callers that ask as much as these tests do; memory is searched by its words alone."""
    return gateway_settings.model_copy(update={"rpc_burst": 10_000})


class Tree:
    """A tree of one agent, and the namespace `n` of its memory."""

    def __init__(self, wire: Wire, root: str) -> None:
        self.wire, self.root = wire, root
        self.shelf: dict[str, Any] = {"tree_root_id": root, "namespace": "n"}

    async def write(self, key: str, value: Any = None, **more: Any) -> dict[str, Any]:
        record: dict[str, Any] = await self.wire.call(
            "memory.write", **{**self.shelf, "key": key, "value": value, **more}
        )
        return record

    async def read(self, **params: Any) -> list[dict[str, Any]]:
        """A page that has to be the last."""
        page = await self.wire.call("memory.read", **{**self.shelf, **params})
        assert page == {"items": page["items"], "records": page["items"], "cursor": None, "next_cursor": None}
        return list(page["items"])

    async def keys(self, **params: Any) -> list[str]:
        return [record["key"] for record in await self.read(**params)]

    async def found(self, query: str, **params: Any) -> list[str]:
        """The keys that a search finds, best first."""
        return [record["key"] for record in await self.scored(query, **params)]

    async def scored(self, query: str, **params: Any) -> list[dict[str, Any]]:
        answer = await self.wire.call("memory.search", **{**self.shelf, "query": query, **params})
        assert answer == {"items": answer["items"], "records": answer["items"], "ranking": "text"}
        return list(answer["items"])

    async def delete(self, **params: Any) -> int:
        answer = await self.wire.call("memory.delete", **params)
        assert set(answer) == {"deleted"}
        return int(answer["deleted"])

    async def refusal(self, method: str, **params: Any) -> tuple[str, Any]:
        answer = await self.wire.answer(method, {**self.shelf, **params})
        return symbol(answer), answer["error"]["data"].get("field")


@pytest.fixture
async def tree(wire: Wire) -> Tree:
    return Tree(wire, await wire.agent())


async def owner_of(pool: Pool, agent_id: str) -> UUID:
    owner_id = await pool.fetchval("select owner_id from agents where id = $1", uuid("agt", agent_id))
    assert isinstance(owner_id, UUID)
    return owner_id


async def child_of(gateway: Gateway, wire: Wire, root: str) -> str:
    """An agent below `root`. No agent can spawn one yet, so that it is put there by hand."""
    child = await wire.agent()
    await gateway.pool.execute(
        "update agents set root_id = $1, parent_id = $1 where id = $2", uuid("agt", root), uuid("agt", child)
    )
    return child


# ------------------------------------------------------------------ memory.write


async def test_a_write_answers_the_record_and_a_read_of_the_key_answers_the_same(tree: Tree) -> None:
    record = await tree.write("k", {"v": 1}, subject_id="sub_a", ttl_seconds=60)
    assert record["id"].startswith("mem_") and record["created_at"].endswith("Z")
    assert record == {
        **tree.shelf,
        "id": record["id"],
        "key": "k",
        "value": {"v": 1},
        "created_by_agent_id": tree.root,
        "created_at": record["created_at"],
        "embedding": None,
        "subject_id": "sub_a",
        "ttl_seconds": 60,
    }
    assert await tree.read(key="k") == [record]
    assert await tree.read(key="another") == []


async def test_a_second_write_of_a_key_keeps_id_and_time_and_replaces_value_and_ttl(tree: Tree) -> None:
    first = await tree.write("k", 1, ttl_seconds=60)
    assert await tree.write("k", [2]) == {**first, "value": [2], "ttl_seconds": None}
    assert await tree.write("k", None, ttl_seconds=5) == {**first, "value": None, "ttl_seconds": 5}
    assert len(await tree.read()) == 1


async def test_a_write_without_a_subject_keeps_the_old_one(tree: Tree) -> None:
    told = [
        (await tree.write("k", n, **subject))["subject_id"]
        for n, subject in enumerate([{}, {"subject_id": "sub_a"}, {}, {"subject_id": "sub_b"}, {}])
    ]
    assert told == [None, "sub_a", "sub_a", "sub_b", "sub_b"]


async def test_a_key_is_one_record_in_each_namespace_of_each_tree(tree: Tree, wire: Wire) -> None:
    other = Tree(wire, await wire.agent())
    ids = {
        (await tree.write("k"))["id"],
        (await tree.write("K"))["id"],
        (await tree.write("k", namespace="N"))["id"],
        (await other.write("k"))["id"],
    }
    assert len(ids) == 4
    assert await tree.keys() == ["K", "k"]


VALUES: dict[str, Any] = {
    "null": None,
    "false": False,
    "zero": 0,
    "the largest integer": 2**53 - 1,
    "a large double": 1e308,
    "a small double": 5e-324,
    "a double that is whole": 1.0,
    "no text": "",
    "separators": "\u2028\u2029\x85\r\n\t",
    "an emoji": "🌳",
    "nothing in it": {"a": [], "b": {}},
    "the order of its keys": {"zz": 1, "a": 2, "m": {"y": 3, "b": 4}},
    "magic keys": {"__proto__": {"a": 1}, "constructor": 2, "$ref": "#", "a.b": 3, "": 4},
}


async def test_every_value_comes_back_as_it_was_sent(tree: Tree) -> None:
    for name, value in VALUES.items():
        await tree.write(name, value)
    told = {record["key"]: json.dumps(record["value"]) for record in await tree.read()}
    assert told == {name: json.dumps(value) for name, value in VALUES.items()}


async def test_keys_and_namespaces_are_plain_text(tree: Tree) -> None:
    names = ["' or 1=1 --", "%", "\\", "a\u0301", "á", "🌳" * NAME_CHARS_MAX, " "]
    for name in names:
        await tree.write(name, name, namespace=name)
    told = [await tree.read(namespace=name, key=name) for name in names]
    assert [[record["value"] for record in page] for page in told] == [[name] for name in names]


# ------------------------------------------------------------------ memory.read


async def test_records_are_read_newest_first_and_page_without_gaps(tree: Tree) -> None:
    made = [(await tree.write(f"k{n}", n))["id"] for n in range(5)]
    await tree.write("k1", "again")
    await tree.write("elsewhere", namespace="m")
    pages: list[list[str]] = []
    params: dict[str, Any] = {}
    while not pages or params["cursor"]:  # bounded by the records of the test
        page = await tree.wire.call("memory.read", **tree.shelf, limit=2, **params)
        assert page["items"] == page["records"] and page["cursor"] == page["next_cursor"]
        pages.append([record["id"] for record in page["items"]])
        params = {"cursor": page["cursor"]}
    assert pages == [made[:2:-1], made[2:0:-1], made[:1]], "a later write moves no record"
    assert [record["id"] for record in await tree.read(limit=5)] == made[::-1], "a full page is the last"
    assert [record["id"] for record in await tree.read(limit=10_000)] == made[::-1]
    assert await tree.refusal("memory.read", limit=0) == ("invalid_params", "limit")


async def test_records_of_one_moment_page_without_gaps(tree: Tree, gateway: Gateway) -> None:
    made = [(await tree.write(f"k{n}"))["id"] for n in range(3)]
    await gateway.pool.execute("update memory_records set created_at = now()")
    page = await tree.wire.call("memory.read", **tree.shelf, limit=2)
    rest = await tree.read(cursor=page["cursor"])
    assert [record["id"] for record in [*page["items"], *rest]] == made[::-1]


async def test_a_page_of_large_records_is_shorter_and_says_that_more_follow(tree: Tree) -> None:
    made = [(await tree.write(f"k{n}", "x" * 250_000))["id"] for n in range(6)]
    page = await tree.wire.call("memory.read", **tree.shelf)
    rest = await tree.read(cursor=page["cursor"])
    assert (len(page["items"]), len(rest)) == (5, 1)
    assert [record["id"] for record in [*page["items"], *rest]] == made[::-1]


async def test_a_cursor_that_no_page_of_the_namespace_answered_is_refused(
    tree: Tree, gateway: Gateway, wire: Wire
) -> None:
    other = Tree(wire, await wire.agent())
    deleted, expired = await tree.write("deleted"), await tree.write("expired")
    await tree.delete(id=deleted["id"])
    await gateway.pool.execute(EXPIRE, "expired")
    strange = [
        deleted["id"],
        expired["id"],
        (await tree.write("k", namespace="m"))["id"],
        (await other.write("k"))["id"],
        f"mem_{UNKNOWN_TAIL}",
        tree.root,
        "",
        "x",
    ]
    told = [await tree.refusal("memory.read", cursor=cursor) for cursor in strange]
    assert told == [("invalid_params", "cursor")] * len(strange)


# ------------------------------------------------------------------ memory.search


async def test_any_word_matches_and_records_with_more_of_them_come_first(tree: Tree) -> None:
    await tree.write("one", "apple apple apple apple apple")
    await tree.write("both", "a pear, far far away from an apple")
    await tree.write("near", "apple pear")
    await tree.write("all", {"fruit": ["Plum", "APPLE", {"pear": 1}]})
    await tree.write("none", "bread")
    scored = await tree.scored("apple pear plum")
    assert [record["key"] for record in scored] == ["all", "near", "both", "one"]
    scores = [record["score"] for record in scored]
    assert scores == sorted(set(scores), reverse=True), "each is better than the next"
    assert 0.95 < scores[0] <= 1 and 0 < scores[-1] < 0.5
    assert [{**record, "score": 0} for record in scored] == [
        {**record, "score": 0}
        for key in ("all", "near", "both", "one")
        for record in await tree.read(key=key)
    ]
    assert scored == await tree.scored("pear plum apple")


async def test_words_are_found_in_keys_and_in_all_of_a_value_and_nowhere_else(
    tree: Tree, wire: Wire, gateway: Gateway
) -> None:
    other = Tree(wire, await wire.agent())
    await tree.write("the key", {"a name": ["a text", 4711, True]}, subject_id="sub_subject")
    await tree.write("elsewhere", "text", namespace="m")
    await other.write("foreign", "text")
    await tree.write("expired", "text")
    await gateway.pool.execute(EXPIRE, "expired")
    told = {word: await tree.found(word) for word in ("key", "name", "text", "4711", "true", "TEXT")}
    assert told == {word: ["the key"] for word in told}
    assert await tree.found("n sub_subject null expired foreign") == []


# What is kept, what is asked for, and whether that finds it. Nothing here is of one language or one locale.
FOUND: list[tuple[str, Any, str, bool]] = [
    ("case", "The INVOICE", "invoice", True),
    ("case of other scripts", "ПРИВЕТ ΚΑΛΗΜΈΡΑ", "привет καλημέρα", True),
    ("sharp s", "Hauptstraße", "HAUPTSTRASSE", True),
    ("umlauts", "Käufer aus Zürich", "kaufer", True),
    ("umlauts in the query", "Kaufer", "Käufer", True),
    ("accents as marks of their own", "cafe\u0301", "caf\u00e9", True),
    ("a part", "Rechnungsnummer", "nummer", True),
    ("a beginning", "Donaudampfschiff", "donau", True),
    ("an inflection", "deployments", "deployment", True),
    ("another inflection", "deploying", "deployed", True),
    ("an inflection in Russian", "договор подписан", "договора", True),
    ("a misspelling", "the quarterly report", "qarterly", True),
    ("Chinese, in the middle of a sentence", "明天北京的天气很好", "北京", True),
    ("Japanese, as a sentence", "東京の天気は晴れです", "東京タワーの天気", True),
    ("Korean, with a particle", "서울에서 회의", "서울", True),
    ("Thai", "ฉันชอบกินข้าวผัด", "ข้าวผัด", True),
    ("Arabic without its vowels", "مَرْحَبًا", "مرحبا", True),
    ("Arabic with an article", "بالعالم", "العالم", True),
    ("Hindi", "हिन्दी भाषा", "भाषा", True),
    ("full width", "\uff21\uff22\uff23\uff11\uff12\uff13", "abc123", True),
    ("an emoji", "the 🌳 is green", "🌳", True),
    ("the name of a member", {"shipping_address": 1}, "shipping", True),
    ("a number", {"a": [{"b": 4711.5}]}, "4711.5", True),
    ("a boolean", {"a": True}, "true", True),
    ("deep in it", {"a": [[{"b": {"c": ["needle"]}}]]}, "needle", True),
    ("an id in a longer one", "ORD-2024-00917", "00917", True),
    ("one letter in a word", "banana", "b", False),
    ("two letters within a word", "banana", "na", False),
    ("two letters that begin a word", "banana", "ba", True),
    ("another word", "banana", "apple", False),
    ("dakuten make another letter", "かき", "がぎ", False),
]


async def test_words_are_found_in_every_script_and_by_their_parts(tree: Tree) -> None:
    told = []
    for name, value, query, _ in FOUND:
        await tree.write("k", value)
        told.append((name, await tree.found(query)))
    assert told == [(name, ["k"] if found else []) for name, _, _, found in FOUND]


async def test_a_word_counts_more_than_its_beginning_and_that_more_than_its_part(tree: Tree) -> None:
    for key, text in (
        ("likewise", "reportage"),
        ("part", "unreported"),
        ("begins", "reporter"),
        ("is", "report"),
    ):
        await tree.write(key, text)
    scored = await tree.scored("report")
    assert [record["key"] for record in scored] == ["is", "begins", "likewise", "part"]
    assert [round(record["score"], 1) for record in scored] == [1.0, 0.8, 0.8, 0.6]


async def test_a_rare_word_weighs_more_than_those_that_many_records_have(tree: Tree) -> None:
    for n in range(20):
        await tree.write(f"k{n}", f"how do i get the thing number {n}")
    await tree.write("rare", "the password")
    assert (await tree.found("how do i get the password", k=1)) == ["rare"]


async def test_a_misspelt_word_is_only_guessed_at_when_nobody_has_it(tree: Tree) -> None:
    await tree.write("near", "quarterly")
    assert await tree.found("qarterly") == ["near"]
    await tree.write("exact", "qarterly")
    assert await tree.found("qarterly") == ["exact"]


async def test_a_later_write_is_found_by_its_own_words_only(tree: Tree) -> None:
    await tree.write("k", "apple")
    await tree.write("k", "pear")
    assert (await tree.found("apple"), await tree.found("pear")) == ([], ["k"])


async def test_records_that_match_equally_come_newest_first(tree: Tree, gateway: Gateway) -> None:
    made = [f"k{n}" for n in range(4)]
    for key in made:
        await tree.write(key, "same")
    assert await tree.found("same") == made[::-1]
    assert await tree.found("same", k=2) == made[:1:-1]
    await gateway.pool.execute("update memory_records set created_at = now()")
    assert await tree.found("same") == made[::-1], "of one moment by their ids"
    assert await tree.found("same", k=2) == made[:1:-1]


QUERIES = (
    "",
    " ",
    "!!! -- ???",
    "it's",
    "\\",
    "a\\'b",
    "& | ! <-> :* ()",
    "word & !word",
    "'quoted'",
    "http://x.example/a'b?c=\\d&e=|f",
    "%s $1 {}",
    "🌳",
    "w " * (QUERY_CHARS_MAX // 2),
)


async def test_a_query_is_words_and_no_language(tree: Tree) -> None:
    """Whatever it says, it is answered; a record with that text is found by it if it has a word at all."""
    for query in QUERIES:
        await tree.write("k", query)
        wordless = query in ("", " ", "!!! -- ???", "\\", "& | ! <-> :* ()")
        assert await tree.found(query) == ([] if wordless else ["k"]), query
    await tree.write("k", "word")
    assert await tree.found("word & !word") == ["k"], "nothing is excluded"
    assert await tree.found("!word") == ["k"]


async def test_a_search_answers_ten_records_unless_told_otherwise_and_at_most_fifty(tree: Tree) -> None:
    for n in range(FOUND_MAX + 1):
        await tree.write(f"k{n}", "same")
    assert [len(await tree.found("same", **k)) for k in ({}, {"k": 3}, {"k": FOUND_MAX})] == [
        10,
        3,
        FOUND_MAX,
    ]
    told = [await tree.refusal("memory.search", query="same", k=k) for k in (0, FOUND_MAX + 1)]
    assert told == [("invalid_params", "k")] * 2
    too_long = "w" * (QUERY_CHARS_MAX + 1)
    assert await tree.refusal("memory.search", query=too_long) == ("invalid_params", "query")


async def test_large_records_found_are_fewer(tree: Tree) -> None:
    for n in range(6):
        await tree.write(f"k{n}", ["same", "x" * 250_000])
    assert await tree.found("same") == ["k5", "k4", "k3", "k2", "k1"]


async def test_a_search_that_takes_too_long_is_given_up_and_the_next_one_is_answered(
    tree: Tree, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tree.write("small", "w1", namespace="m")
    for n in range(10):
        await tree.write(f"k{n}", " ".join(f"w{m}" for m in range(20_000)))
    monkeypatch.setattr(store, "SEARCH_MS_MAX", 1)
    answer = await tree.wire.answer("memory.search", {**tree.shelf, "query": "w1 w2 w3"})
    assert answer["error"]["data"]["symbol"] == "unavailable"
    monkeypatch.undo()
    assert await tree.found("w1", namespace="m") == ["small"]


async def test_a_search_leaves_the_rest_of_its_transaction_unhurried(tree: Tree, gateway: Gateway) -> None:
    owner_id = await owner_of(gateway.pool, tree.root)
    shelf = store.Shelf(uuid("agt", tree.root), "n")
    async with transaction(gateway.pool) as connection:
        await store.search_records(connection, owner_id, shelf, store.Query(" w ", terms_of("w")), 1)
        assert await connection.fetchval("show statement_timeout") == f"{STATEMENT_TIMEOUT_S}s"


# ------------------------------------------------------------------ memory.delete


async def test_a_record_is_deleted_by_its_id_once(tree: Tree) -> None:
    gone, kept = await tree.write("gone", "word"), await tree.write("kept", "word")
    assert [await tree.delete(id=gone["id"]) for _ in range(2)] == [1, 0]
    assert (await tree.keys(), await tree.keys(key="gone"), await tree.found("word")) == (
        ["kept"],
        [],
        ["kept"],
    )
    for unknown in (f"mem_{UNKNOWN_TAIL}", tree.root, "", "x", "' or 1=1 --"):
        assert await tree.delete(id=unknown) == 0
    assert await tree.read() == [kept]


async def test_a_deletion_by_tree_takes_what_has_every_member_that_is_given(tree: Tree, wire: Wire) -> None:
    other = Tree(wire, await wire.agent())
    root = {"tree_root_id": tree.root}

    async def filled() -> str:
        made = {
            (shelf, subject): await tree.write(f"{shelf} {subject}", namespace=shelf, subject_id=subject)
            for shelf, subject in product("nm", ("sub_a", "sub_b", None))
        }
        await other.write("theirs")
        return str(made["n", "sub_a"]["id"])

    asked: list[tuple[dict[str, Any], int]] = [
        ({"namespace": "n", "subject_id": "sub_a"}, 1),
        ({"subject_id": "sub_a"}, 2),
        ({"namespace": "n"}, 3),
        ({}, 6),
        ({"namespace": "absent"}, 0),
        ({"subject_id": "sub_absent"}, 0),
    ]
    for members, expected in asked:
        await filled()
        assert (await tree.delete(**root, **members), members) == (expected, members)
        left = [record for shelf in "nm" for record in await tree.read(namespace=shelf)]
        assert len(left) == 6 - expected
        assert not [
            record for record in left if all(record[member] == value for member, value in members.items())
        ]
        await tree.delete(**root)
    record_id = await filled()
    assert await tree.delete(id=record_id, tree_root_id=other.root) == 0
    assert await tree.delete(id=record_id, **root, namespace="m") == 0
    assert await tree.delete(id=record_id, **root, namespace="n", subject_id="sub_a") == 1
    assert await other.keys() == ["theirs"]


async def test_a_deletion_of_nothing_in_particular_is_refused(tree: Tree) -> None:
    await tree.write("k", subject_id="sub_a")
    for params in ({}, {"namespace": "n"}, {"subject_id": "sub_a"}, {"id": None, "tree_root_id": None}):
        error = await tree.wire.refused("memory.delete", **params)
        assert error["data"] == {
            "symbol": "invalid_params",
            "field": "id",
            "reason": "or tree_root_id is required",
        }
    assert await tree.keys() == ["k"]


# ------------------------------------------------------------------ time


@pytest.mark.slow
async def test_a_record_is_gone_when_its_time_is_over_and_not_before(tree: Tree) -> None:
    before = time.monotonic()
    await tree.write("short", "word", ttl_seconds=1)
    await tree.write("long", "word", ttl_seconds=60)
    await tree.write("renewed", "word", ttl_seconds=1)
    await tree.write("renewed", "word")
    with anyio.fail_after(ANSWER_WAIT_S):
        while "short" in await tree.keys():
            await anyio.sleep(POLL_S)
    assert time.monotonic() - before >= 1
    assert (await tree.keys(), await tree.found("word")) == (["renewed", "long"], ["renewed", "long"])


async def test_an_expired_record_is_not_there_for_anything(tree: Tree, gateway: Gateway) -> None:
    expired = await tree.write("k", "word", subject_id="sub_a", ttl_seconds=60)
    await gateway.pool.execute(EXPIRE, "k")
    assert (await tree.read(), await tree.read(key="k"), await tree.found("word")) == ([], [], [])
    assert await tree.delete(id=expired["id"]) == 0
    assert await tree.delete(tree_root_id=tree.root) == 0


async def test_a_write_over_an_expired_record_makes_a_new_one(tree: Tree, gateway: Gateway) -> None:
    expired = await tree.write("k", "old", subject_id="sub_a", ttl_seconds=60)
    between = await tree.write("between")
    await gateway.pool.execute(EXPIRE, "k")
    record = await tree.write("k", "new")
    assert record == {
        **expired,
        "id": record["id"],
        "created_at": record["created_at"],
        "value": "new",
        "subject_id": None,
        "ttl_seconds": None,
    }
    assert record["id"] not in (expired["id"], between["id"])
    assert record["created_at"] >= between["created_at"]
    assert await tree.keys() == ["k", "between"]
    assert await tree.delete(id=expired["id"]) == 0


async def test_expired_rows_are_forgotten_oldest_first_a_few_at_a_time_past_locked_ones(
    tree: Tree, gateway: Gateway
) -> None:
    for n in range(5):
        await tree.write(f"k{n}")
    await tree.write("later", ttl_seconds=60)
    ages = "(9 - right(key, 1)::int) * interval '1 s'"
    await gateway.pool.execute(f"update memory_records set expires_at = now() - {ages} where key ~ 'k'")
    stored = "select array_agg(key order by key) from memory_records"
    async with transaction(gateway.pool) as holder, transaction(gateway.pool) as connection:
        await holder.execute("select from memory_records where key = 'k1' for update")
        await forget_expired(connection, 2)
        assert await connection.fetchval(stored) == ["k1", "k3", "k4", "later"]
        await forget_expired(connection, 100)
        assert await connection.fetchval(stored) == ["k1", "later"]


# ------------------------------------------------------------------ limits


async def test_a_value_has_at_most_its_bytes_of_json(tree: Tree) -> None:
    fits = "x" * (VALUE_BYTES_MAX - 2)
    assert (await tree.write("k", fits))["value"] == fits
    assert (await tree.write("ü", "ü" * (VALUE_BYTES_MAX // 2 - 1)))["key"] == "ü"
    for value in (
        fits + "x",
        "ü" * (VALUE_BYTES_MAX // 2),
        ["x" * (VALUE_BYTES_MAX - 3)],
        "\n" * VALUE_BYTES_MAX,
    ):
        assert await tree.refusal("memory.write", key="k", value=value) == ("invalid_params", "value")
    assert await tree.keys(key="k") == ["k"]


async def test_the_densest_words_that_fit_are_found_again(tree: Tree) -> None:
    """Hyphens make three words of two: the tsvector is several times as large as the value."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(each) for each in product(letters, repeat=3)] + [
        "".join(each) for each in product(letters[:20], repeat=4)
    ]
    pairs = [f"{one}-{two}" for one, two in zip(words[::2], words[1::2], strict=True)]
    text = " ".join(pairs)[: VALUE_BYTES_MAX - 2]
    await tree.write("k", text)
    assert await tree.found("aab") == ["k"]


async def test_more_words_than_can_be_indexed_are_refused_by_name(tree: Tree, gateway: Gateway) -> None:
    """No value within its limit has that many; should one be found, it must not be an error of ours."""
    owner_id, root_id = await owner_of(gateway.pool, tree.root), uuid("agt", tree.root)
    words = " ".join(f"word{n}" for n in range(200_000))
    record = NewRecord(new_id(), root_id, "n", "k", "0", root_id, None, None, words)
    with pytest.raises(InvalidInput) as caught:
        async with transaction(gateway.pool) as connection:
            await write_record(connection, owner_id, record, RECORDS_MAX)
    assert caught.value.field == "value"
    assert await tree.keys() == []


FILL = """
insert into memory_records (id, owner_id, root_id, namespace, key, value, created_by_id)
select gen_random_uuid(), owner_id, id, 'n', 'k' || n, '0', id
from agents, generate_series(1, $2) n where id = $1
"""


@pytest.mark.slow
async def test_a_tree_has_at_most_its_number_of_records(tree: Tree, wire: Wire, gateway: Gateway) -> None:
    await gateway.pool.execute(FILL, uuid("agt", tree.root), RECORDS_MAX - 1)
    last = await tree.write("last", namespace="m")
    told = [
        await tree.wire.answer("memory.write", {**tree.shelf, "namespace": name, "key": "more", "value": 0})
        for name in ("n", "m", "new")
    ]
    assert [(symbol(each), each["error"]["message"]) for each in told] == [
        ("lifecycle_conflict", "The tree has 10000 memory records, which is the most it may have.")
    ] * 3
    assert await tree.write("last", "again", namespace="m") == {**last, "value": "again"}
    assert (await Tree(wire, await wire.agent()).write("k"))["key"] == "k", "another tree has its own"
    await gateway.pool.execute(EXPIRE, "k1")
    assert (await tree.write("more"))["key"] == "more", "an expired record takes no place"
    assert await tree.refusal("memory.write", key="k1", value=0) == ("lifecycle_conflict", None)
    await tree.delete(id=last["id"])
    assert (await tree.write("k1"))["key"] == "k1"


@pytest.mark.slow
async def test_writers_at_once_do_not_exceed_the_number_together(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acts, "RECORDS_MAX", 5)
    told: list[str] = []

    async def write(n: int) -> None:
        told.append(symbol(await tree.wire.answer("memory.write", {**tree.shelf, "key": f"{n}", "value": n})))

    async with anyio.create_task_group() as group:
        for n in range(20):
            group.start_soon(write, n)
    assert sorted(told) == ["lifecycle_conflict"] * 15 + ["result"] * 5
    assert len(await tree.read()) == 5


WRONG_PARAMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no namespace": ("memory.write", {"namespace": ""}, "namespace"),
    "a namespace too long": ("memory.write", {"namespace": "n" * (NAME_CHARS_MAX + 1)}, "namespace"),
    "no key": ("memory.write", {"key": ""}, "key"),
    "a key too long": ("memory.write", {"key": "k" * (NAME_CHARS_MAX + 1)}, "key"),
    "a key that is a number": ("memory.write", {"key": 1}, "key"),
    "a subject too long": ("memory.write", {"subject_id": "s" * 65}, "subject_id"),
    "no time": ("memory.write", {"ttl_seconds": 0}, "ttl_seconds"),
    "half a second": ("memory.write", {"ttl_seconds": 0.5}, "ttl_seconds"),
    "more than a century": ("memory.write", {"ttl_seconds": TTL_S_MAX + 1}, "ttl_seconds"),
    "an embedding": ("memory.write", {"embedding": [0.5]}, "embedding"),
    "a key too long to read": ("memory.read", {"key": "k" * (NAME_CHARS_MAX + 1)}, "key"),
    "a query that is a list": ("memory.search", {"query": ["a"]}, "query"),
}


async def test_params_that_do_not_fit_are_refused_with_the_member_that_is_wrong(
    tree: Tree, gateway: Gateway
) -> None:
    told = {}
    for name, (method, change, _) in WRONG_PARAMS.items():
        usual = {"key": "k", "value": 0} if method == "memory.write" else {}
        told[name] = await tree.refusal(method, **{**usual, **change})
    assert told == {name: ("invalid_params", member) for name, (_, _, member) in WRONG_PARAMS.items()}
    assert await gateway.pool.fetchval("select count(*) from memory_records") == 0
    assert (await tree.write("k", ttl_seconds=TTL_S_MAX))["ttl_seconds"] == TTL_S_MAX


@pytest.mark.parametrize("text", ["\\u0000", "\\ud800", "\\udc00\\ud800"])
async def test_what_postgres_cannot_store_does_not_get_in(tree: Tree, gateway: Gateway, text: str) -> None:
    members = {"tree_root_id": tree.root, "namespace": "n", "key": "k", "value": "v", "subject_id": "s"}
    for method, name in [("memory.write", name) for name in members] + [("memory.search", "query")]:
        body = json.dumps(request(method, {**members, name: "CANARY"})).replace("CANARY", text)
        assert symbol((await tree.wire.post(body.encode())).json()) == "parse_error"
    nested = json.dumps(request("memory.write", {**members, "value": {"CANARY": 1}})).replace("CANARY", text)
    assert symbol((await tree.wire.post(nested.encode())).json()) == "parse_error"
    assert await gateway.pool.fetchval("select count(*) from memory_records") == 0


# ------------------------------------------------------------------ whose tree


async def test_a_tree_is_named_by_its_root_and_has_to_be_an_own_one(
    tree: Tree, wire: Wire, gateway: Gateway
) -> None:
    stranger = await gateway.caller("two")
    theirs = Tree(stranger, await stranger.agent())
    kept = await theirs.write("k", "word")
    child = await child_of(gateway, wire, tree.root)
    for other in (theirs.root, child, f"agt_{UNKNOWN_TAIL}", "agt_", "", "x", "' or 1=1 --"):
        for method, params in (
            ("memory.write", {"namespace": "n", "key": "k", "value": 1}),
            ("memory.read", {"namespace": "n"}),
            ("memory.search", {"namespace": "n", "query": "word"}),
            ("memory.delete", {}),
            ("memory.delete", {"id": kept["id"]}),
        ):
            answer = await wire.answer(method, {"tree_root_id": other, **params})
            assert (symbol(answer), answer["error"]["data"]) == (
                "tree_boundary_violation",
                {"symbol": "tree_boundary_violation", "id": other},
            )
    assert await theirs.read() == [kept]
    assert await tree.read() == []


async def test_two_owners_with_the_same_keys_see_nothing_of_each_other(gateway: Gateway) -> None:
    trees = []
    for owner in ("one", "two"):
        wire = await gateway.caller(owner)
        trees.append(Tree(wire, await wire.agent()))
        for n in range(3):
            await trees[-1].write(f"k{n}", f"same word of {owner}", subject_id="sub_same")
    one, two = trees
    for mine, owner, theirs in ((one, "one", "two"), (two, "two", "one")):
        records = [*await mine.read(), *await mine.read(key="k0"), *await mine.scored("same word")]
        assert {record["value"] for record in records} == {f"same word of {owner}"}
        assert await mine.found(theirs) == []
    kept = await two.read()
    assert await one.delete(id=kept[0]["id"]) == 0
    assert await one.delete(tree_root_id=one.root, subject_id="sub_same") == 3
    assert (await one.read(), await two.read()) == ([], kept)


# ------------------------------------------------------------------ at the same time


@asynccontextmanager
async def writing(pool: Pool, tree: Tree, key: str) -> AsyncIterator[Connection]:
    """A step under way that has written the key."""
    owner_id = await owner_of(pool, tree.root)
    wanted = MemoryWrite(tree_root_id=tree.root, namespace="n", key=key, value="step")
    async with transaction(pool) as connection:
        await write_memory(connection, owner_id, wanted)
        yield connection


async def test_a_writer_waits_for_the_one_before_and_sees_what_it_wrote(tree: Tree, gateway: Gateway) -> None:
    told: list[dict[str, Any]] = []

    async def write() -> None:
        told.append(await tree.write("k", "wire"))

    async with anyio.create_task_group() as group, writing(gateway.pool, tree, "k"):
        group.start_soon(write)
        with anyio.fail_after(ANSWER_WAIT_S):
            while not await gateway.pool.fetchval(WAITING):
                await anyio.sleep(POLL_S)
        assert await tree.keys() == [], "nothing is seen before its commit"
    assert await tree.read() == told


async def test_steps_that_write_the_same_keys_in_opposite_orders_are_both_written(
    tree: Tree, gateway: Gateway
) -> None:
    owner_id = await owner_of(gateway.pool, tree.root)

    async def step(keys: list[str], value: str) -> None:
        for _ in range(10):
            async with transaction(gateway.pool) as connection:
                for key in keys:
                    wanted = MemoryWrite(tree_root_id=tree.root, namespace="n", key=key, value=value)
                    await write_memory(connection, owner_id, wanted)

    keys = [f"k{n}" for n in range(10)]
    async with anyio.create_task_group() as group:
        group.start_soon(step, keys, "one")
        group.start_soon(step, keys[::-1], "two")
    assert len({record["value"] for record in await tree.read()}) == 1, "one step's records, all of them"
