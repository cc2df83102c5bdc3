"""`espalier conformance`: hold a runtime to AEP. Exits with 1 if it does not do what it must or should.

The kit itself is imported when it runs: no other command needs it.
"""

import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from espalier_client.commands.target import BaseUrl, Key, LocateFolder, ProfileFolder, given
from espalier_client.commands.terminal import Unusable, fail, output, say
from espalier_client.errors import ClientError

if TYPE_CHECKING:
    from espalier_client.conformance.ground import Keys

NOT_CONFORMING = 1
JOBS_DEFAULT = 4
JOBS_MAX = 16


class Profile(StrEnum):
    full = "full"
    minimal = "minimal"


def command(locate_folder: LocateFolder) -> Callable[..., None]:
    def conformance(
        *,
        base_url: BaseUrl = None,
        key: Key = None,
        data_dir: ProfileFolder = None,
        second_key: Annotated[
            str | None, typer.Option(envvar="ESPALIER_SECOND_KEY", help="A key of another owner, all scopes.")
        ] = None,
        limited_key: Annotated[
            list[str] | None,
            typer.Option(help="A key with few scopes, as SCOPE,SCOPE=KEY. Repeatable; several tell more."),
        ] = None,
        mint_keys: Annotated[
            str | None,
            typer.Option(
                help="A command that prints a new key; {owner} and {scope} or {scopes} are filled in."
            ),
        ] = None,
        profile: Annotated[Profile, typer.Option(help="What may be left out.")] = Profile.full,
        only: Annotated[
            list[str] | None, typer.Option(help="A requirement, a group or a capability. Repeatable.")
        ] = None,
        json_file: Annotated[Path | None, typer.Option("--json", help="Write the report as JSON.")] = None,
        junit: Annotated[Path | None, typer.Option(help="Write the report as JUnit XML.")] = None,
        jobs: Annotated[int, typer.Option(min=1, max=JOBS_MAX, help="Checks at a time.")] = JOBS_DEFAULT,
    ) -> None:
        """Hold a runtime to AEP, over its wire. It makes agents and runs there, and leaves them."""
        try:
            target = given(locate_folder, base_url, key, data_dir).target()
            limited = _limited(limited_key or [])
        except ClientError as error:
            fail(error)
        from espalier_client.conformance.ground import Keys

        keys = Keys(target.api_key, second_key, limited, mint_keys)
        _hold(target.base_urls[0], keys, profile, only or [], json_file, junit, jobs)

    return conformance


def _hold(
    base_url: str,
    keys: "Keys",
    profile: Profile,
    only: list[str],
    json_file: Path | None,
    junit: Path | None,
    jobs: int,
) -> None:
    from espalier_client.conformance import expected, report, runner
    from espalier_client.conformance.ground import lay
    from espalier_client.conformance.verdicts import Verdict

    wanted = runner.chosen(expected.requirements(), only)
    if not wanted:
        fail(Unusable(f"No requirement, group or capability is called {', '.join(only)}."))

    async def held() -> tuple[dict[str, object], list[Verdict]]:
        async with lay(base_url, keys) as ground:
            verdicts = await runner.conduct(ground, wanted, profile=profile, jobs=jobs)
            return ground.server, verdicts

    server, verdicts = anyio.run(held)
    if json_file is not None:
        document = report.as_document(base_url, profile, server, verdicts)
        json_file.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    if junit is not None:
        junit.write_text(report.as_junit(verdicts), encoding="utf-8")
    report.show(output(), verdicts)
    if not runner.is_passed(verdicts):
        against = sum(map(runner.counts_against, verdicts))
        say(f"{base_url} does not conform: {against} of {len(verdicts)} requirements count against it.")
        raise typer.Exit(NOT_CONFORMING)


def _limited(given_keys: list[str]) -> Mapping[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for each in given_keys:
        scopes, equals, key = each.partition("=")
        if not equals or not key:
            raise Unusable("--limited-key takes SCOPE,SCOPE=KEY.")
        found[key] = frozenset(scope.strip() for scope in scopes.split(",") if scope.strip())
    return found
