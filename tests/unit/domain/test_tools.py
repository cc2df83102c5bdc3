"""Which tools a toolset names, and how results are shown."""

import pytest

from espalier_domain.tool_results import SHOWN_BYTES_MAX, shown
from espalier_domain.tools import canonical, has_tool, is_brokered


@pytest.mark.parametrize(
    ("toolset", "tool", "has"),
    [
        (["mcp.git.git_log"], "mcp.git.git_log", True),
        (["mcp.git.git_log"], "mcp.git.git_show", False),
        (["mcp.git.*"], "mcp.git.git_show", True),
        (["mcp.git.*"], "mcp.git.a.b", True),
        (["mcp.git.*"], "mcp.github.a", False),
        (["mcp.*"], "mcp.git.a", False),
        (["*"], "mcp.git.a", False),
        (["espalier.time"], "helix.time", True),
        (["helix.time"], "espalier.time", True),
        (["espalier.*"], "helix.time", True),
        ([], "espalier.time", False),
    ],
)
def test_a_toolset_names_tools_one_by_one_or_all_of_a_server(
    toolset: list[str], tool: str, has: bool
) -> None:
    assert has_tool(toolset, tool) is has


def test_a_bare_name_is_an_agents_own_tool() -> None:
    assert [is_brokered(name) for name in ("complete", "espalier.time", "mcp.git.git_log")] == [
        False,
        True,
        True,
    ]
    assert canonical("helix.fetch") == "espalier.fetch"


def test_a_result_is_shown_as_its_text_and_what_is_no_text_is_named() -> None:
    parts = [
        {"type": "text", "text": "one"},
        {"type": "image", "data": "AAAA", "mimeType": "image/png"},
        {"type": "resource_link", "uri": "file:///x"},
        {"type": "resource", "resource": {"uri": "u", "text": "two"}},
    ]
    assert shown({"content": parts}) == "one\n[image left out]\n[resource: file:///x]\ntwo"
    assert shown({"content": [], "structuredContent": {"a": 1}}) == '{"a":1}'
    assert shown({}) == ""


@pytest.mark.parametrize("letter", ["x", "é", "\U0001f333"])
def test_a_long_result_is_shown_in_part_at_a_whole_letter(letter: str) -> None:
    text = shown({"content": [{"type": "text", "text": letter * (SHOWN_BYTES_MAX + 1)}]})

    assert len(text.encode()) <= SHOWN_BYTES_MAX
    size = len((letter * (SHOWN_BYTES_MAX + 1)).encode())
    body, _, note = text.rpartition("\n")
    assert note == f"[shortened: the first part of {size} bytes]" and set(body) == {letter}


def test_what_cannot_be_stored_is_replaced_in_what_is_shown() -> None:
    assert shown({"content": [{"type": "text", "text": "a\x00b\ud800"}]}) == "a\ufffdb\ufffd"
