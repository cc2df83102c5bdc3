"""Logs: an event name plus fields, one line each, for people or for machines.

Every process calls `set_up_logs` once, in its composition root. Traces and metrics will be set up here too.
"""

import logging
import sys
from typing import Literal

import structlog
from pydantic_settings import BaseSettings, SettingsConfigDict
from structlog.typing import Processor


class LogSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="ESPALIER_", use_attribute_docstrings=True)

    log_format: Literal["console", "json"] = "console"
    """`console` for people, `json` for machines."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important lines that are written."""
    log_colour: Literal["auto", "on", "off"] = "auto"
    """Whether `console` lines are coloured; `auto` means on a terminal."""


def set_up_logs(settings: LogSettings) -> None:
    """Send every log line, also those of libraries, to standard error in one form."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    level = getattr(logging, settings.log_level.upper())
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(settings, shared))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name, least in LIBRARIES.items():
        logging.getLogger(name).setLevel(least)


LIBRARIES = {
    "arq": logging.WARNING,
    "asyncpg": logging.ERROR,  # its pool tells of each lost connection with a traceback; we tell it in a line
    "client": logging.ERROR,  # what the MCP library's session calls itself
    "httpcore2": logging.WARNING,  # at debug it writes addresses and headers down
    "httpx2": logging.WARNING,
    "mcp": logging.WARNING,
    "openai": logging.WARNING,  # at debug it writes prompts down
    "uvicorn": logging.WARNING,
}
"""The least important lines of libraries that are worth a reader's time."""

PLAIN = structlog.dev.plain_traceback
"""The default renderer prints local variables, and with them secrets."""


def _formatter(settings: LogSettings, shared: list[Processor]) -> logging.Formatter:
    colours = settings.log_colour == "on" or (settings.log_colour == "auto" and sys.stderr.isatty())
    as_text: list[Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if settings.log_format == "json"
        else [structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=PLAIN)]
    )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *as_text],
    )
