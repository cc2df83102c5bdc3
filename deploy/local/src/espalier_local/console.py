"""One readable log out of many processes: a coloured name before each line, on the person's terminal.

Plain ANSI and nothing else, so that lines of children pass through with their own colours. Above it stands
`up.py`; `children.py` hands it the lines.
"""

import re
import sys
from collections.abc import Callable
from typing import TextIO

OnLine = Callable[[str, str], None]
"""Takes a process's name and one line of its output, without the line's end."""

NAME_COLUMNS = 10
COLOURS = {"espalier": "1", "gateway": "36", "postgres": "34", "redis": "31"}
WORKER_COLOURS = ("32", "33", "35", "92", "93", "95")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# What a tenant's text could smuggle into a log line to move the cursor or retitle the window.
_CONTROL = re.compile(r"\x1b(?!\[[0-9;]*m)|[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f-\x9f]")


def harmless(line: str) -> str:
    """The line without what could take over a terminal; colours stay."""
    return _CONTROL.sub("", line)


def quiet(_name: str, _line: str) -> None:
    """For callers that do not want to see the log (tests)."""


class Terminal:
    """Prints lines with their process's name; colourless where nobody looks or `NO_COLOR` is set."""

    def __init__(self, stream: TextIO | None = None, *, no_color: bool = False) -> None:
        self._stream = stream or sys.stdout
        self.colour = self._stream.isatty() and not no_color
        self._gone = False

    def __call__(self, name: str, line: str) -> None:
        if self._gone:
            return
        try:
            self._stream.write(self._dressed(name, harmless(line)) + "\n")
            self._stream.flush()
        except BrokenPipeError:
            self._gone = True  # the reader left (`espalier up | head`); that is no reason to stop the runtime

    def _dressed(self, name: str, line: str) -> str:
        padded = name.ljust(NAME_COLUMNS)
        if not self.colour:
            return f"{padded} | {_COLOUR.sub('', line)}"
        return f"\x1b[{_colour_of(name)}m{padded} |\x1b[0m {line}\x1b[0m"


def _colour_of(name: str) -> str:
    if name in COLOURS:
        return COLOURS[name]
    number = int("0" + "".join(filter(str.isdigit, name)))
    return WORKER_COLOURS[(number - 1) % len(WORKER_COLOURS)]
