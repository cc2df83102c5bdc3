"""docs/settings.md says what the settings classes say."""

from pathlib import Path

from espalier_local.settings_table import table

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"


def test_the_page_on_disk_is_what_make_docs_writes() -> None:
    assert PAGE.read_text() == table(), "docs/settings.md is stale: run `make docs`"
