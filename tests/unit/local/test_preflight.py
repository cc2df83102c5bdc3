"""What is wrong with a start is said before anything is started."""

from pathlib import Path

import pytest

from espalier_local.errors import LocalError
from espalier_local.preflight import read_settings, require_plan, require_settings
from espalier_store.pool import PostgresSettings


def test_a_wrong_plan_is_named_with_the_place_in_it(tmp_path: Path) -> None:
    script = tmp_path / "plan.yaml"
    script.write_text("answers: [{txt: a}]")
    with pytest.raises(LocalError, match=r"plan\.yaml: .*answers\[0\]\.txt: is not known here\.$"):
        require_plan(script)


OURS = {"ESPALIER_INTERNAL_KEY": "made up by the launcher"}


@pytest.mark.parametrize("name", ["LEASE_TTL_S", "WORKER_SLOTS", "BATCH_MAX", "CALL_S_MAX", "LOG_FORMAT"])
def test_a_wrong_setting_of_either_process_is_named_and_not_shown(name: str) -> None:
    with pytest.raises(LocalError) as caught:
        require_settings({**OURS, f"ESPALIER_{name}": "hidden"})
    assert caught.value.sentence.startswith(f"The setting ESPALIER_{name} cannot be used: ")
    assert "hidden" not in caught.value.sentence


def test_a_wrong_setting_in_the_environment_is_named_beside_one_that_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ESPALIER_LEASE_TTL_S", "abc")
    with pytest.raises(LocalError, match="ESPALIER_LEASE_TTL_S"):
        read_settings(PostgresSettings, postgres_url="postgresql://localhost/x")


def test_an_environment_without_ours_is_right() -> None:
    require_settings({**OURS, "PATH": "/bin"})
