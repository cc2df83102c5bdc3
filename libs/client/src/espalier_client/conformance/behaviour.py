"""The behaviour script: how the kit makes an agent of the runtime under test do one thing and no other.

A run whose inputs have the member SCRIPT answers what stands there, one entry for each answer of the model.
The convention is described in docs/conformance.md; a runtime follows it only where its operator allows that.
"""

from typing import Any, Final

SCRIPT: Final = "espalier.script"
AN_HOUR_S: Final = 3600


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"text": text, **more}


def calls(*made: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"calls": list(made), **more}


def tool(name: str, /, **args: Any) -> dict[str, Any]:
    return {"tool": name, "args": args}


def sleeps(seconds: float = AN_HOUR_S) -> dict[str, Any]:
    return calls(tool("sleep", duration_seconds=seconds, reason="as the script says"))


def completes(result: Any = "done") -> dict[str, Any]:
    return calls(tool("complete", result=result))


def thinks(seconds: float = 20.0) -> dict[str, Any]:
    """An answer that takes its time, so that the run is running meanwhile."""
    return says("done", delay_s=seconds)


def as_it_stands(value: Any) -> Any:
    """A part of a script inside another one's arguments: its pointers are left for the inner one."""
    match value:
        case str():
            return value.replace("${", "$${")
        case list():
            return [as_it_stands(each) for each in value]
        case dict():
            return {name: as_it_stands(each) for name, each in value.items()}
        case _:
            return value


NOTHING: Final[dict[str, Any]] = {}
"""Neither text nor calls."""

CONTINUES: Final = calls(tool("continue_now"))
