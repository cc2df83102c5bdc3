"""Foreign clients meet the same runtime as the published one: fixtures of tests/contract."""

from tests.contract.conftest import embedder, runtime

__all__ = ["embedder", "runtime"]
