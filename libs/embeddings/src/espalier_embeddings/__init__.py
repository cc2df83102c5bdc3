"""What a short text means, as a vector: two texts that say the like have vectors that point alike.

The model is static: a table with a row for each token, and a text's vector is the mean of its tokens' rows.
It is read from the files of an installed wheel, without its code, at the first use and in a thread; without
the optional dependencies there is no embedder, and nothing else of the runtime changes. It was trained on
English and knows little of other languages. Nothing is known here of memory records or of Postgres.
"""

import json
import mmap
import struct
from functools import cached_property
from importlib.util import find_spec
from math import sqrt
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final, Literal

from anyio import to_thread
from pydantic_settings import BaseSettings, SettingsConfigDict

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEXT_CHARS_MAX: Final = 4_000
"""What is read of a text: the mean of more says ever less."""

DIMENSIONS: Final = 64
"""The model was trained so that the first 64 of its 256 numbers are a smaller model of the same kind."""

MODEL: Final = f"l2_supercat_{DIMENSIONS}"
PACKAGE: Final = "wordllama"
NEEDED: Final = (PACKAGE, "tokenizers")
WEIGHTS: Final = Path("weights/l2_supercat_256.safetensors")
TOKENIZER: Final = Path("tokenizers/l2_supercat_tokenizer_config.json")
TABLE: Final = "embedding.weight"
NUMBER_BYTES: Final = 2
ROW: Final = struct.Struct(f"<{DIMENSIONS}e")
"""The beginning of a row: half-precision numbers."""


class EmbeddingSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="ESPALIER_", use_attribute_docstrings=True)

    embeddings: Literal["auto", "off"] = "auto"
    """Whether memory is also searched by meaning, where the extra `embeddings` is installed."""


class Embedder:
    """May be asked by any number of tasks at once."""

    model: Final = MODEL
    """Only vectors of the same model can be compared."""

    def __init__(self, files: Path) -> None:
        self._files = files
        self._loading = Lock()

    async def vector(self, text: str) -> list[float] | None:
        """DIMENSIONS numbers of length 1, or None for a text without tokens.

        The first call of a process takes some 200 ms longer. Raises OSError if the model's files are gone.
        """
        return await to_thread.run_sync(self._vector, text[:TEXT_CHARS_MAX])

    def _vector(self, text: str) -> list[float] | None:
        with self._loading:
            table, tokenizer = self._model
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        sums = [sum(numbers) for numbers in zip(*map(table.row, tokens), strict=True)]
        length = sqrt(sum(number * number for number in sums))
        return [number / length for number in sums] if length else None

    @cached_property
    def _model(self) -> "tuple[_Table, Tokenizer]":
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self._files / TOKENIZER))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return _Table(self._files / WEIGHTS), tokenizer


class _Table:
    """The rows of a safetensors file, mapped and not read: all processes share what is used of it.

    The file is the length of a JSON header in eight bytes, the header, and the numbers. A library that reads
    it would first import numpy, which takes longer than all else here.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        (header_bytes,) = struct.unpack_from("<Q", self._bytes)
        header = json.loads(self._bytes[8 : 8 + header_bytes])[TABLE]
        assert header["dtype"] == "F16", "the pinned version has half-precision numbers"
        self._row_bytes = header["shape"][1] * NUMBER_BYTES
        self._begin = 8 + header_bytes + header["data_offsets"][0]

    def row(self, token: int) -> tuple[float, ...]:
        return ROW.unpack_from(self._bytes, self._begin + token * self._row_bytes)


def find_embedder(settings: EmbeddingSettings) -> Embedder | None:
    """None where the extra is not installed, or is switched off. Nothing is loaded yet."""
    if settings.embeddings == "off" or any(find_spec(name) is None for name in NEEDED):
        return None
    package = find_spec(PACKAGE)
    assert package is not None
    assert package.origin is not None
    return Embedder(Path(package.origin).parent)
