"""`artifact_create`: leaving a file behind."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Final

import orjson

from espalier_acts.artifacts import Content, create_artifact
from espalier_acts.subjects import subject_of_writing
from espalier_domain.errors import LifecycleConflict
from espalier_run_worker.models.model import ToolDefinition
from espalier_run_worker.self_tools.tool import NAME_CHARS_MAX, SelfTool, ToolRefused, Under, object_schema

ARTIFACT_CHARS_MAX: Final = 5_000_000
PIECE_CHARS: Final = 64 * 1024


async def _artifact_create(under: Under, args: dict[str, Any]) -> str:
    wanted = _read_content(args)
    run, connection = under.draft.run, under.draft.connection
    try:
        wanted = replace(wanted, subject_id=await subject_of_writing(connection, run, None))
        entry = await create_artifact(connection, run.owner_id, run.agent_id, run.run_id, wanted)
    except LifecycleConflict as error:
        raise ToolRefused(f"lifecycle_conflict: {error.reason}") from error
    under.entries.append(entry)
    return orjson.dumps({"artifact_id": entry.artifact_id, "size_bytes": entry.size_bytes}).decode()


def _read_content(args: dict[str, Any]) -> Content:
    match args:
        case {"name": str(name), "content": str(content), **rest} if set(rest) <= {"mime_type"}:
            mime_type = rest.get("mime_type", "text/markdown")
            if (
                0 < len(name) <= NAME_CHARS_MAX
                and len(content) <= ARTIFACT_CHARS_MAX
                and _is_mime_type(mime_type)
            ):
                return Content(name, mime_type, _encoded(content))
    raise ToolRefused(
        f"artifact_create takes name (1 to {NAME_CHARS_MAX} characters), content (text of at most "
        f"{ARTIFACT_CHARS_MAX} characters) and mime_type (such as text/markdown)."
    )


async def _encoded(text: str) -> AsyncIterator[bytes]:
    """A piece at a time, so that a long text is not held twice."""
    for start in range(0, len(text), PIECE_CHARS):
        yield text[start : start + PIECE_CHARS].encode()


def _is_mime_type(text: object) -> bool:
    if (
        not isinstance(text, str)
        or len(text) > NAME_CHARS_MAX
        or not text.isascii()
        or not text.isprintable()
    ):
        return False
    kind, slash, rest = text.partition("/")
    return bool(kind.strip() and slash and rest.strip())


TOOLS: Final = (
    SelfTool(
        ToolDefinition(
            "artifact_create",
            "Leave a file behind. Returns its artifact_id.",
            object_schema(
                ["name", "content"],
                name={"type": "string", "minLength": 1, "maxLength": NAME_CHARS_MAX},
                content={"type": "string", "maxLength": ARTIFACT_CHARS_MAX},
                mime_type={"type": "string", "default": "text/markdown"},
            ),
        ),
        _artifact_create,
    ),
)
