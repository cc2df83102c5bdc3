"""Absence 3: SQL only in store; Redis commands only in eventlog and jobs.

Who may import which package is a contract of import-linter (root pyproject.toml). Here is what an import does
not show: statements in strings, commands on an object that was passed in, and names taken from asyncpg.
"""

from collections.abc import Iterator

from tests.architecture.sources import ROOT, SQL, Source, calls, findings, imports, literals, report, source

REDIS_HOMES = ("eventlog/", "jobs/")
REDIS_COMMANDS = frozenset(
    """xadd xread xreadgroup xrange xrevrange xtrim xlen xdel xack xautoclaim blpop brpop blmove lpush rpush
    lrange ltrim zadd zrange zrem hset hget hgetall setex psetex setnx pexpire incrby evalsha
    eval_sha psubscribe execute_command flushall flushdb""".split()
)
STATEMENT_CALLS = frozenset(
    "fetchrow fetchval fetchmany executemany copy_records_to_table copy_to_table".split()
)
# Above the store a connection is only handed on: its type may be named, nothing else of the driver.
ASYNCPG_TYPES = {"Connection", "Pool"}


def sql_outside_store(module: Source) -> Iterator[str]:
    if module.room == "store":
        return
    escape = "move the statement into a function of store and call that"
    for literal, text in literals(module.tree):
        if SQL.search(text):
            yield module.finding(literal, f"SQL in {module.room}", escape)
    for call, name in calls(module.tree):
        if name in STATEMENT_CALLS:
            yield module.finding(call, f"{module.room} runs a statement with .{name}()", escape)


def redis_outside_its_homes(module: Source) -> Iterator[str]:
    if module.name.startswith(REDIS_HOMES):
        return
    for call, name in calls(module.tree):
        if name in REDIS_COMMANDS:
            yield module.finding(
                call, f"{module.name} speaks Redis: {name}", "ask eventlog or jobs for the act"
            )


def driver_outside_store(module: Source) -> Iterator[str]:
    if module.room == "store":
        return
    escape = (
        "from asyncpg import Connection or Pool for annotations; errors and retries of the driver are store's"
    )
    for statement, name, names in imports(module.tree):
        if name.partition(".")[0] == "asyncpg" and not (names and set(names) <= ASYNCPG_TYPES):
            yield module.finding(statement, f"{module.room} uses the Postgres driver", escape)


def test_sql_is_written_in_store_alone() -> None:
    found = findings(sql_outside_store)
    assert not found, report(found)


def test_sql_files_lie_in_store_alone() -> None:
    files = [
        path.relative_to(ROOT).as_posix()
        for top in ("libs", "services", "deploy")
        for path in (ROOT / top).rglob("*.sql")
    ]
    assert [path for path in files if not path.startswith("libs/store/")] == []


def test_redis_is_spoken_in_its_homes_alone() -> None:
    found = findings(redis_outside_its_homes)
    assert not found, report(found)


def test_the_postgres_driver_is_only_a_type_above_store() -> None:
    found = findings(driver_outside_store)
    assert not found, report(found)


def test_the_rules_find_strays() -> None:
    statements = source(
        "acts/bad.py", "a = 'select id from runs'\nb = f'UPDATE {t} SET x = 1 RETURNING id'\nc.fetchrow(q)\n"
    )
    assert len(list(sql_outside_store(statements))) == 3
    assert len(list(redis_outside_its_homes(source("gateway/sse.py", "await redis.xread(streams)\n")))) == 1
    drivers = source(
        "acts/bad.py", "import asyncpg\nfrom asyncpg import PostgresError\nfrom asyncpg import Connection\n"
    )
    assert len(list(driver_outside_store(drivers))) == 2


def test_the_rules_leave_the_homes_and_prose_alone() -> None:
    assert not list(sql_outside_store(source("store/runs.py", "a = 'SELECT id FROM runs'\n")))
    prose = "'''Select one from the list.'''\nhelp = 'Create a key, or begin with one from the list.'\n"
    assert not list(sql_outside_store(source("client/keys.py", prose)))
    assert not list(redis_outside_its_homes(source("eventlog/publish.py", "redis.xadd(key, {})\n")))
