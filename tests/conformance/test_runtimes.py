"""What `make conformance` does, as tests: the command against each runtime, fresh, with what it has to be."""

import json
import os
from pathlib import Path
from xml.etree import ElementTree

import anyio
import pytest
from tests.conformance.runtimes import COMMAND, RUNTIMES

from espalier_client.conformance.expected import allowed_skips, expected, requirements

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]

OFFERED = {
    "full": {*expected().capabilities, "espalier.approvals"} - {"auth.oauth2"},
    "minimal": {"streaming.sse"},
    "independent": {"streaming.sse"},
}


@pytest.mark.parametrize("name", RUNTIMES)
async def test_a_runtime_conforms(name: str, tmp_path: Path) -> None:
    opened, profile = RUNTIMES[name]
    report, junit = tmp_path / "report.json", tmp_path / "junit.xml"
    async with opened() as runtime:
        process = await anyio.run_process(
            [*COMMAND, *runtime.arguments(), "--profile", profile, "--json", report, "--junit", junit],
            check=False,
            stderr=None,
            env={**os.environ, "COLUMNS": "200"},
        )
    assert process.returncode == 0, process.stdout.decode()
    document = json.loads(report.read_text())
    assert [each["id"] for each in document["requirements"]] == [each.id for each in requirements()]
    offered = {each["capability"] for each in document["scores"] if each["passed"]} - {"core"}
    assert offered == OFFERED[name]
    skipped = {each["id"] for each in document["requirements"] if each["outcome"] == "skipped"}
    if name == "full":
        assert skipped == set(allowed_skips("full")), "a list that only grows explains nothing"
    suites = ElementTree.parse(junit).getroot()  # noqa: S314 - the command wrote it
    assert sum(int(suite.attrib["tests"]) for suite in suites) == len(requirements())
    assert sum(int(suite.attrib["failures"]) for suite in suites) == 0
