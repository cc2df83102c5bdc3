"""JSON as this runtime accepts and writes it: bytes to plain values and back, and nothing lenient in between.

Two parsers that read one body differently are a hole (a proxy sees the first `method`, we run the last), so
everything that parsers are known to disagree about is refused here: duplicate keys, encodings other than
UTF-8, numbers that do not survive a double, text that Postgres or an encoder would choke on later. The caller
answers every `JsonError` with -32700.

Not here: what a message means (`jsonrpc`), and the size of the body, which whoever reads the socket has
already bounded. All work is linear in that size. Above: every process that reads JSON from outside.
"""

import json
import math
import re
from collections.abc import Callable
from itertools import accumulate
from typing import TypeAlias

# Fields of pydantic models say `pydantic.JsonValue` instead: the same type to mypy, but pydantic cannot
# follow a plain recursive alias at run time.
JsonValue: TypeAlias = bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"] | None

INTEGER_MAX = 2**53 - 1
"""The largest integer that every JSON reader keeps exact."""

DEPTH_MAX = 64
KEYS_MAX = 10_000
STRING_BYTES_MAX = 512 * 1024

_INTEGER_CHARS_MAX = len(str(-INTEGER_MAX))
_STEP_BY_BRACKET = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NOT_A_BRACKET = bytes(byte for byte in range(256) if byte not in _STEP_BY_BRACKET)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_LINE_SEPARATORS = {
    b"\xc2\x85": b"\\u0085",
    b"\xe2\x80\xa8": b"\\u2028",
    b"\xe2\x80\xa9": b"\\u2029",
}


class JsonError(ValueError):
    """Not JSON that we accept. `reason` is one sentence for the client that repeats nothing of its input."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def loads(
    body: bytes,
    *,
    depth_max: int = DEPTH_MAX,
    keys_max: int = KEYS_MAX,
    string_bytes_max: int = STRING_BYTES_MAX,
) -> JsonValue:
    """Read exactly one JSON value; raises `JsonError` and nothing else.

    `depth_max` counts containers (`[[]]` is 2) and has to stay well below the interpreter's recursion limit,
    `keys_max` counts the members of all objects together, `string_bytes_max` is per string or key, as sent.
    """
    text = _decode(body)
    _refuse_depth(body, depth_max)
    value = _parse(text, keys_max)
    # Only now, because these two read the bytes and may take it for granted that they are JSON. Walking the
    # value instead costs more than parsing it.
    _refuse_characters(body)
    _refuse_long_strings(body, string_bytes_max)
    return value


def dumps(value: JsonValue) -> bytes:
    """Write compact UTF-8 on one line. Raises ValueError for what JSON cannot say (NaN, a lone surrogate)."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return one_line(text.encode())


def one_line(json_bytes: bytes) -> bytes:
    """Escape the line separators that JSON allows inside strings, whoever serialised them.

    An SSE `data:` line must be one line for lenient readers too, and some (Python's `splitlines`) also break
    at U+0085. The bytes can be replaced without parsing: they occur only in strings, and UTF-8 sequences do
    not overlap.
    """
    for separator, escape in _LINE_SEPARATORS.items():
        json_bytes = json_bytes.replace(separator, escape)
    return json_bytes


def _decode(body: bytes) -> str:
    if not body.strip(b" \t\r\n"):
        raise JsonError("Expected one JSON value, but the body is empty.")
    if body.startswith(b"\xef\xbb\xbf"):
        raise JsonError("Expected JSON without a byte order mark.")
    # UTF-16 of ASCII text is valid UTF-8 full of NULs; JSON has no raw NUL anywhere.
    if b"\x00" in body:
        raise JsonError("Expected UTF-8 text without NUL bytes (UTF-16 and UTF-32 are not accepted).")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        # `from None`, here and below: the cause carries the whole body, and its repr prints it.
        raise JsonError("Expected the body to be valid UTF-8.") from None


def _refuse_depth(body: bytes, depth_max: int) -> None:
    """Bound the parser's recursion before it starts. Most bodies are settled by the first two counts."""
    if body.count(b"[") + body.count(b"{") <= depth_max:
        return
    if _deepest(body) > depth_max:
        raise JsonError(f"Expected arrays and objects nested at most {depth_max} deep.")


def _deepest(body: bytes) -> int:
    """The deepest nesting that a parser can reach, also in text that it will refuse.

    Up to the first syntax error a parser takes the same pieces for strings, and it never goes beyond.
    """
    outside = b"".join(_split_at_quotes(body)[::2])
    brackets = outside.translate(None, _NOT_A_BRACKET)
    return max(accumulate(map(_STEP_BY_BRACKET.__getitem__, brackets)), default=0)


def _split_at_quotes(body: bytes) -> list[bytes]:
    """Pieces by turns outside and inside strings, lengths kept. Unlike a pattern, this cannot backtrack."""
    return _blank_backslashes(body).replace(b'\\"', b"__").split(b'"')


def _blank_backslashes(body: bytes) -> bytes:
    """Without escaped backslashes, each backslash that is left begins an escape."""
    return body.replace(b"\\\\", b"__")


def _parse(text: str, keys_max: int) -> JsonValue:
    decoder = json.JSONDecoder(
        object_pairs_hook=_object_builder(keys_max),
        parse_int=_integer,
        parse_float=_finite,
        parse_constant=_refuse_constant,
    )
    try:
        value: JsonValue = decoder.decode(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise JsonError(f"Expected exactly one JSON value; the syntax breaks at {place}.") from None
    return value


def _object_builder(keys_max: int) -> Callable[[list[tuple[str, JsonValue]]], dict[str, JsonValue]]:
    keys = 0

    def build(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
        nonlocal keys
        keys += len(pairs)
        if keys > keys_max:
            raise JsonError(f"Expected at most {keys_max} object keys in one body.")
        members = dict(pairs)
        if len(members) < len(pairs):
            raise JsonError("Expected every key of an object to be unique.")
        return members

    return build


def _integer(digits: str) -> int:
    # The length comes first: int() itself raises a plain ValueError beyond 4,300 digits.
    if len(digits) <= _INTEGER_CHARS_MAX:
        number = int(digits)
        if abs(number) <= INTEGER_MAX:
            return number
    raise JsonError("Expected integers between -(2^53 - 1) and 2^53 - 1.")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise JsonError("Expected numbers that fit a double; this one overflows.")
    return number


def _refuse_constant(_name: str) -> JsonValue:
    raise JsonError("Expected a JSON value; NaN and Infinity are not JSON.")


def _refuse_characters(body: bytes) -> None:
    """Raw NULs, control characters and surrogates are gone already; an escape can still say them."""
    if b"\\u" not in body:
        return
    escapes = _blank_backslashes(body)
    if b"\\u0000" in escapes:
        raise JsonError("Expected strings and keys without U+0000.")
    if _SURROGATE.search(_SURROGATE_PAIR.sub(b"", escapes)):
        raise JsonError("Expected strings and keys without unpaired surrogates.")


def _refuse_long_strings(body: bytes, string_bytes_max: int) -> None:
    if len(body) <= string_bytes_max:
        return
    if max(map(len, _split_at_quotes(body)[1::2]), default=0) > string_bytes_max:
        raise JsonError(f"Expected strings and keys of at most {string_bytes_max} bytes.")
