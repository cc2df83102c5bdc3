"""`/api/me/subjects`: data subjects made, changed, erased, exported and imported (AEP spec section 12).

The protocol itself has no method that makes a subject, and none whose answer may be as large as a person's
data. Below: `rest` for what these endpoints share, `erasing` and `bundles` for the work.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from starlette.responses import Response
from starlette.routing import Route

from espalier_acts.subject_records import read_subject
from espalier_acts.subjects import create_subject, find_subject, forget_subject, update_subject
from espalier_gateway.auth import require_scope
from espalier_gateway.bundles import NDJSON, exported, imported
from espalier_gateway.erasing import erase_subject
from espalier_gateway.http import NO_STORE
from espalier_gateway.methods.call import Desk
from espalier_gateway.rest import RestCall, Verb, rest_route, shown
from espalier_gateway.streaming import PiecewiseResponse
from espalier_protocol.access import Scope
from espalier_protocol.shapes import PAGE_MAX
from espalier_protocol.subject import (
    SubjectChange,
    SubjectCreate,
    SubjectEraseMode,
    Subjects,
)
from espalier_store.pool import reading, transaction
from espalier_store.subjects import list_subjects

PATH: Final = "/api/me/subjects"
ERASE_WAIT_S: Final = 60.0
IMPORT_WAIT_S: Final = 600.0
IMPORT_NEEDS: Final[tuple[Scope, ...]] = ("agent.write", "run.create", "memory.write")

Endpoint = Callable[[Desk, RestCall, Any], Awaitable[Response]]


def subject_routes(desk: Desk) -> list[Route]:
    def verb(scope: Scope, endpoint: Endpoint, takes: Any = None, **more: float) -> Verb:
        return Verb(scope, partial(endpoint, desk), takes, **more)

    one = f"{PATH}/{{subject_id}}"
    return [
        rest_route(
            PATH, {"GET": verb("subject.read", list_), "POST": verb("agent.write", create, SubjectCreate)}
        ),
        # Before the route of one subject, which would take the word for an id.
        rest_route(f"{PATH}/import", {"POST": verb("agent.write", import_, wait_s=IMPORT_WAIT_S)}),
        rest_route(
            one,
            {
                "GET": verb("subject.read", get),
                "PATCH": verb("agent.write", change, SubjectChange),
                "DELETE": verb("subject.erase", delete),
            },
        ),
        rest_route(
            f"{one}/erase",
            {"POST": verb("subject.erase", erase, SubjectEraseMode, wait_s=ERASE_WAIT_S)},
        ),
        rest_route(f"{one}/export", {"GET": verb("subject.export", export)}),
    ]


async def create(desk: Desk, call: RestCall, wanted: SubjectCreate) -> Response:
    async with transaction(desk.pool) as connection:
        return shown(await create_subject(connection, call.caller.owner_id, wanted))


async def list_(desk: Desk, call: RestCall, _: None) -> Response:
    """`?cursor=` is the last id of the page before."""
    after = call.request.query_params.get("cursor")
    async with reading(desk.pool) as connection:
        page = await list_subjects(connection, call.caller.owner_id, after, PAGE_MAX)
    cursor = page.items[-1].id if page.more else None
    return shown(Subjects(subjects=page.items, next_cursor=cursor))


async def get(desk: Desk, call: RestCall, _: None) -> Response:
    """Everything, as `subject.read` answers it."""
    async with reading(desk.pool) as connection:
        return shown(
            await read_subject(connection, call.caller.owner_id, _subject_id(call), whole_contents=False)
        )


async def change(desk: Desk, call: RestCall, wanted: SubjectChange) -> Response:
    async with transaction(desk.pool) as connection:
        return shown(await update_subject(connection, call.caller.owner_id, _subject_id(call), wanted))


async def delete(desk: Desk, call: RestCall, _: None) -> Response:
    async with transaction(desk.pool) as connection:
        await forget_subject(connection, call.caller.owner_id, _subject_id(call))
    return Response(status_code=204, headers=NO_STORE)


async def erase(desk: Desk, call: RestCall, wanted: SubjectEraseMode) -> Response:
    return shown(await erase_subject(desk, call.caller.owner_id, _subject_id(call), wanted.mode))


async def export(desk: Desk, call: RestCall, _: None) -> Response:
    """All of it, line by line, however much it is."""
    owner_id, subject_id = call.caller.owner_id, _subject_id(call)
    async with reading(desk.pool) as connection:
        subject = await find_subject(connection, owner_id, subject_id)
    name = quote(f"{subject_id}.jsonl", safe="")
    headers = {
        **NO_STORE,
        "Content-Type": NDJSON,
        "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
    }
    return PiecewiseResponse(exported(desk.pool, owner_id, subject), headers)


async def import_(desk: Desk, call: RestCall, _: None) -> Response:
    for scope in IMPORT_NEEDS:
        require_scope(call.caller, scope)
    bytes_max = call.state.settings.import_bytes_max
    return shown(await imported(desk.pool, call.caller.owner_id, call.request, bytes_max))


def _subject_id(call: RestCall) -> str:
    return str(call.request.path_params["subject_id"])
