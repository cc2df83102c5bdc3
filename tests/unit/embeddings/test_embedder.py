"""The model from the wheel: vectors of length 1, alike for texts that say the like; and its absence."""

import subprocess
import sys
from math import isclose

import anyio
import pytest

from espalier_embeddings import (
    DIMENSIONS,
    MODEL,
    TEXT_CHARS_MAX,
    Embedder,
    EmbeddingSettings,
    find_embedder,
)

pytestmark = pytest.mark.anyio

HIDES_THE_MODEL = """
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "wordllama":
            return None
        return super().find_spec(name, path, target)

sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
from espalier_embeddings import EmbeddingSettings, find_embedder
print(find_embedder(EmbeddingSettings()))
"""
LOADS_NOTHING = """
import sys
from espalier_embeddings import EmbeddingSettings, find_embedder
assert find_embedder(EmbeddingSettings())
print(sorted({"numpy", "tokenizers", "safetensors", "wordllama"} & sys.modules.keys()))
"""


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    found = find_embedder(EmbeddingSettings(embeddings="auto"))
    assert found is not None, "the extra is part of the developers' environment"
    return found


def likeness(one: list[float] | None, other: list[float] | None) -> float:
    assert one is not None and other is not None
    return sum(a * b for a, b in zip(one, other, strict=True))


def said(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return done.stdout.strip()


async def test_a_text_has_one_vector_of_length_one(embedder: Embedder) -> None:
    vector = await embedder.vector("a note about the customer's address")
    assert vector is not None and len(vector) == DIMENSIONS and embedder.model == MODEL
    assert isclose(likeness(vector, vector), 1, rel_tol=1e-6)
    assert vector == await embedder.vector("a note about the customer's address")


async def test_texts_that_say_the_like_are_nearer_than_others(embedder: Embedder) -> None:
    car, automobile, banana = [await embedder.vector(text) for text in ("car", "automobile", "banana")]
    assert likeness(car, automobile) > 0.5 > likeness(car, banana)


async def test_many_may_ask_at_once_before_it_is_loaded() -> None:
    fresh = find_embedder(EmbeddingSettings())
    assert fresh is not None
    told: list[list[float] | None] = []

    async def ask() -> None:
        told.append(await fresh.vector("the same words"))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(ask)
    assert told == [told[0]] * 8 and told[0] is not None


async def test_only_the_beginning_of_a_long_text_counts(embedder: Embedder) -> None:
    text = "word " * (TEXT_CHARS_MAX // 5)
    assert await embedder.vector(text + "banana " * 10_000) == await embedder.vector(text)


async def test_a_text_of_nothing_has_no_vector(embedder: Embedder) -> None:
    assert await embedder.vector("") is None


def test_there_is_no_embedder_where_it_is_off_or_not_installed() -> None:
    assert find_embedder(EmbeddingSettings(embeddings="off")) is None
    assert said(HIDES_THE_MODEL) == "None"


def test_finding_the_embedder_loads_nothing() -> None:
    assert said(LOADS_NOTHING) == "[]"
