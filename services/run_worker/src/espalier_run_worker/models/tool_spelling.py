"""Tool names as providers accept them, and back.

Ours hold dots (`mcp.git.git_log`); providers take letters, digits, `_` and `-`, 64 at most. One table per
request says both ways which name is spelled how, so that nothing has to be guessed from a spelling. Pure.
Above: the adapters of models.
"""

import re
from collections.abc import Iterable
from hashlib import sha256
from typing import Final

SPELLING_CHARS_MAX: Final = 64
HASH_CHARS: Final = 8
_ACCEPTED: Final = re.compile(rf"[a-zA-Z0-9_-]{{1,{SPELLING_CHARS_MAX}}}")
_REFUSED: Final = re.compile(r"[^a-zA-Z0-9_-]+")
_STEM_CHARS_MAX: Final = SPELLING_CHARS_MAX - HASH_CHARS - 1


class ToolSpelling:
    """A spelling for every one of `names`, no two alike. Of names that clash the first keeps the plain one.

    Plain is `.` written as `__`. What is then too long, taken, or still not accepted ends in a hash of the
    name, so that the same names in the same order are always spelled alike.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._spelled: dict[str, str] = {}
        self._meant: dict[str, str] = {}
        for name in dict.fromkeys(names):
            spelling = self._free_spelling(name)
            self._spelled[name] = spelling
            self._meant[spelling] = name

    def spelled(self, name: str) -> str:
        return self._spelled[name]

    def meant(self, spelling: str) -> str:
        """The name behind a spelling. One that a model made up is left as it is, and so names no tool."""
        return self._meant.get(spelling, spelling)

    def _free_spelling(self, name: str) -> str:
        plain = name.replace(".", "__")
        if _ACCEPTED.fullmatch(plain) and plain not in self._meant:
            return plain
        stem = _REFUSED.sub("_", plain)[:_STEM_CHARS_MAX]
        hashed = (f"{stem}_{_hash(f'{salt}:{name}')}" for salt in range(len(self._meant) + 1))
        return next(spelling for spelling in hashed if spelling not in self._meant)


def _hash(text: str) -> str:
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:HASH_CHARS]
