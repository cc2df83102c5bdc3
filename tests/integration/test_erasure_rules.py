"""Every column of the real database that could hold words has exactly one erasure rule."""

import pytest

from espalier_domain.erasure import RULES
from espalier_store.pool import Pool

pytestmark = pytest.mark.anyio

WORDLESS = (
    "uuid",
    "bigint",
    "integer",
    "smallint",
    "boolean",
    "timestamp with time zone",
    "double precision",
)
"""Types that can hold no words. A type that is not listed here needs a rule."""

COLUMNS = """
select table_name, column_name from information_schema.columns
where table_schema = 'public' and not data_type = any ($1::text[])
order by table_name, column_name
"""


async def test_each_column_that_can_hold_words_has_one_erasure_rule_and_no_rule_is_left_over(
    pool: Pool,
) -> None:
    rows = await pool.fetch(COLUMNS, list(WORDLESS))
    found = {(row["table_name"], row["column_name"]) for row in rows}
    ruled = {(table, column) for table, columns in RULES.items() for column in columns}
    assert sorted(found - ruled) == [], "say in espalier_domain.erasure what becomes of it"
    assert sorted(ruled - found) == [], "a rule for what is not there"
