"""How well memory is found again, and how long that takes in a tree that is full.

The labelled set is written over the wire as an embedder would, and each query is asked twice: by words and
meaning, and after the vectors were taken from the rows, by words alone. Recall@5 is the share of what should
be found among the first five; MRR is the mean of 1 / place of the first of them (0 beyond ten).
"""

import time
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Final

from benchmarks.load import AGENT
from benchmarks.memory_set import QUERIES, RECORDS
from benchmarks.report import Taken, quantile
from benchmarks.runtime import Runtime

from espalier_client.client import AepClient
from espalier_protocol.agent import AgentCreate
from espalier_protocol.ids import from_wire
from espalier_protocol.memory import MemorySearch, MemoryWrite

NAMESPACE: Final = "bench"
FIRST: Final = 5
KINDS: Final = tuple(dict.fromkeys(kind for kind, _, _ in QUERIES))
FULL: Final = 10_000
TIMED: Final = 5
ASKED: Final = ("when does the support desk open", "INV-00742", "qarterly", "明天北京的天气")

FORGET_VECTORS: Final = """
update memory_records set embedding = null, embedding_model = null, embedding_signs = null
"""
TEXT_BYTES: Final = "select coalesce(avg(length(words)), 0)::bigint from memory_records where root_id = $1"
FILL: Final = """
insert into memory_records (id, owner_id, root_id, namespace, key, value, created_by_id, words, embedding,
    embedding_model, embedding_signs)
select gen_random_uuid(), r.owner_id, $1, r.namespace, r.key || ' ' || n, r.value, $1,
    r.words || n || ' ', r.embedding, r.embedding_model, r.embedding_signs
from memory_records r, generate_series(1, $3::int / $4::int + 1) n where r.root_id = $2
limit $3
"""


async def memory(runtime: Runtime, taken: Taken) -> None:
    async with AepClient(runtime.local.base_url, runtime.local.api_key) as client:
        root, full = [(await client.agent_create(AgentCreate.model_validate(AGENT))).id for _ in range(2)]
        for key, value in RECORDS.items():
            params = MemoryWrite(tree_root_id=root, namespace=NAMESPACE, key=key, value=value)
            await client.memory_write(params)
        ids = [from_wire("agt", agent) for agent in (full, root)]
        await runtime.sql.execute(FILL, *ids, FULL, len(RECORDS))
        await runtime.sql.execute("analyze memory_records")
        for way in ("words and meaning", "words alone"):
            if way == "words alone":
                await runtime.sql.execute(FORGET_VECTORS)
            await _quality(client, root, way, taken)
            await _speed(client, full, way, taken)
        taken.add(f"{FULL:,} records: words of one", await runtime.count(TEXT_BYTES, ids[0]), "characters")


def _asked(root: str, query: str) -> MemorySearch:
    return MemorySearch(tree_root_id=root, namespace=NAMESPACE, query=query)


async def _quality(client: AepClient, root: str, way: str, taken: Taken) -> None:
    """Raises RuntimeError where the runtime ranks by words alone, so that there is nothing to compare."""
    places: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for kind, query, wanted in QUERIES:
        answer = await client.memory_search(_asked(root, query))
        if answer.ranking != "semantic":
            raise RuntimeError(
                "the extra `embeddings` is not installed, so that there is no ranking by meaning"
            )
        places[kind].append(_judged([record.key for record in answer.items], wanted))
    _figures(way, {"all": [each for kind in KINDS for each in places[kind]], **places}, taken)


def _judged(found: Sequence[str], wanted: Sequence[str]) -> tuple[float, float]:
    recalled = sum(key in found[:FIRST] for key in wanted) / len(wanted)
    return recalled, next((1 / place for place, key in enumerate(found, start=1) if key in wanted), 0.0)


def _figures(way: str, places: Mapping[str, Sequence[tuple[float, float]]], taken: Taken) -> None:
    for kind, judged in places.items():
        which = f"{way}, {kind} ({len(judged)} queries)"
        taken.add(f"{which}: recall@{FIRST}", mean(recall for recall, _ in judged), "")
        taken.add(f"{which}: MRR", mean(rank for _, rank in judged), "")


async def _speed(client: AepClient, root: str, way: str, taken: Taken) -> None:
    for query in ASKED:
        took: list[float] = []
        for _ in range(TIMED):
            began = time.perf_counter()
            await client.memory_search(_asked(root, query))
            took.append((time.perf_counter() - began) * 1e3)
        taken.add(f"{FULL:,} records, {way}: {query!r} p50", quantile(took, 0.5), "ms")
