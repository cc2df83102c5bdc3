"""Which runtime a command talks to, and with which key.

What was given on the command line or in the environment comes first; what is missing comes from the profile
that `espalier up` leaves in its data folder. The profile's key is only ever sent to the profile's runtime.
A runtime with several gateways is named by their addresses with commas between them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from espalier_client.errors import ClientError

PROFILE = "profile.json"
PROFILE_BYTES_MAX = 64 * 1024
DATA_FOLDER = ".espalier"

LocateFolder = Callable[[Path | None], Path]


class NoTarget(ClientError):
    """Nothing says where the runtime is, or how to be let in."""


@dataclass(frozen=True, slots=True)
class Target:
    base_urls: tuple[str, ...]
    api_key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Given:
    """What the person gave. The profile is looked at only when a command really calls."""

    base_url: str | None
    api_key: str | None = field(repr=False)
    profile: Callable[[], Path]

    def target(self) -> Target:
        base_urls = split(self.base_url)
        if base_urls and self.api_key:
            return Target(base_urls, self.api_key)
        kept = _read(self.profile())
        known = split(kept.get("base_url"))
        strange = [base_url for base_url in base_urls if base_url not in known]
        if strange:
            raise NoTarget(f"No key is known for {strange[0]}; pass --key or set ESPALIER_API_KEY.")
        base_urls, api_key = base_urls or known, self.api_key or kept.get("api_key")
        if not base_urls or not api_key:
            raise NoTarget("No runtime is known; start one with `espalier up`, or pass --base-url and --key.")
        return Target(base_urls, api_key)


def split(base_url: str | None) -> tuple[str, ...]:
    """The addresses in a setting."""
    return tuple(part.strip().rstrip("/") for part in (base_url or "").split(",") if part.strip())


def beside_here(chosen: Path | None) -> Path:
    return chosen or Path(DATA_FOLDER)


BaseUrl = Annotated[
    str | None,
    typer.Option(
        envvar="ESPALIER_BASE_URL", help="Where the runtime is; several gateways with commas between them."
    ),
]
Key = Annotated[
    str | None,
    typer.Option(envvar="ESPALIER_API_KEY", help="The key to call with; others see a command line."),
]
ProfileFolder = Annotated[
    Path | None,
    typer.Option(envvar="ESPALIER_DATA_DIR", help="Whose profile names runtime and key. [./.espalier]"),
]


def given(locate_folder: LocateFolder, base_url: str | None, key: str | None, data_dir: Path | None) -> Given:
    return Given(base_url, key, lambda: locate_folder(data_dir) / PROFILE)


def target_options(locate_folder: LocateFolder) -> Callable[..., None]:
    """The options that every group takes before its command's name."""

    def options(
        context: typer.Context, *, base_url: BaseUrl = None, key: Key = None, data_dir: ProfileFolder = None
    ) -> None:
        context.obj = given(locate_folder, base_url, key, data_dir)

    return options


def _read(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            members = json.loads(file.read(PROFILE_BYTES_MAX))
    except FileNotFoundError:
        return {}
    except OSError as err:
        raise NoTarget(f"The profile {path} cannot be read: {err.strerror}.") from err
    except ValueError as err:
        raise NoTarget(f"The profile {path} is damaged.") from err
    if not isinstance(members, dict):
        raise NoTarget(f"The profile {path} is damaged.")
    return {str(name): str(value) for name, value in members.items()}
