"""What was found, for a person, for a program (JSON) and for a CI server (JUnit XML)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

from espalier_client.conformance.runner import counts_against, is_passed
from espalier_client.conformance.verdicts import Verdict
from espalier_client.timeline import printable


@dataclass(frozen=True, slots=True)
class Score:
    """Of one capability's requirements; `score` is the share of those tried that passed, None without any."""

    capability: str
    passed: int
    failed: int
    skipped: int

    @property
    def score(self) -> float | None:
        tried = self.passed + self.failed
        return round(self.passed / tried, 4) if tried else None


def scores(verdicts: Sequence[Verdict]) -> list[Score]:
    """One of each capability, in the order of the manifest."""
    names = dict.fromkeys(verdict.requirement.capability for verdict in verdicts)
    return [
        _score(name, [each for each in verdicts if each.requirement.capability == name]) for name in names
    ]


def _score(name: str, verdicts: Sequence[Verdict]) -> Score:
    count = dict.fromkeys(("passed", "failed", "skipped"), 0)
    for verdict in verdicts:
        count[verdict.outcome] += 1
    return Score(name, count["passed"], count["failed"], count["skipped"])


def as_document(
    base_url: str, profile: str, server: dict[str, Any], verdicts: Sequence[Verdict]
) -> dict[str, Any]:
    return {
        "base_url": base_url,
        "server": server,
        "profile": profile,
        "passed": is_passed(verdicts),
        "scores": [
            {
                "capability": each.capability,
                "passed": each.passed,
                "failed": each.failed,
                "skipped": each.skipped,
                "score": each.score,
            }
            for each in scores(verdicts)
        ],
        "requirements": [
            {
                "id": each.requirement.id,
                "level": each.requirement.level,
                "capability": each.requirement.capability,
                "source": each.requirement.source,
                "sentence": each.requirement.sentence,
                "outcome": each.outcome,
                "reason": each.reason,
                "excused": each.excused,
                "seconds": round(each.seconds, 3),
            }
            for each in verdicts
        ],
    }


def as_junit(verdicts: Sequence[Verdict]) -> str:
    """A suite for each capability. A failed MAY and an excused skip are `skipped` there, others count."""
    root = ElementTree.Element("testsuites", name="aep-conformance")
    for score in scores(verdicts):
        own = [each for each in verdicts if each.requirement.capability == score.capability]
        against = sum(map(counts_against, own))
        skipped = sum(each.outcome != "passed" for each in own) - against
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=score.capability,
            tests=str(len(own)),
            failures=str(against),
            errors="0",
            skipped=str(skipped),
            time=f"{sum(each.seconds for each in own):.3f}",
        )
        for each in own:
            _case(suite, each)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, verdict: Verdict) -> None:
    wanted = verdict.requirement
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=f"aep.{wanted.capability}",
        name=f"{wanted.id} {wanted.level} {wanted.sentence}",
        time=f"{verdict.seconds:.3f}",
    )
    if verdict.outcome != "passed":
        kind = "failure" if counts_against(verdict) else "skipped"
        ElementTree.SubElement(case, kind, message=_xml_text(verdict.reason))


def _xml_text(text: str) -> str:
    """Without the characters that XML cannot hold: a runtime may have sent anything."""
    return "".join(each if each.isprintable() else " " for each in text)


def show(console: Console, verdicts: Sequence[Verdict]) -> None:
    """What did not pass, with its reason, and a table of scores."""
    for verdict in verdicts:
        if verdict.outcome == "failed" or counts_against(verdict):
            wanted = verdict.requirement
            word = "FAILED" if verdict.outcome == "failed" else "SKIPPED, and nothing excuses it"
            console.print(f"{wanted.id} {wanted.level} {word}: {wanted.sentence}", soft_wrap=True)
            console.print(
                f"    {printable(verdict.reason)}  [AEP {wanted.source}]", soft_wrap=True, markup=False
            )
    _show_skips(console, [each for each in verdicts if each.outcome == "skipped" and each.excused])
    console.print(_table(verdicts))


def _show_skips(console: Console, skipped: Sequence[Verdict]) -> None:
    by_reason: dict[str, list[str]] = {}
    for each in skipped:
        by_reason.setdefault(each.reason, []).append(each.requirement.id)
    for reason, ids in by_reason.items():
        console.print(
            f"skipped {len(ids)} ({', '.join(ids)}): {printable(reason)}", soft_wrap=True, markup=False
        )


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = Table("capability", title="Conformance to AEP", title_justify="left")
    for name in ("passed", "failed", "skipped", "score"):
        table.add_column(name, justify="right")
    for each in scores(verdicts):
        share = "" if each.score is None else f"{each.score:.0%}"
        table.add_row(each.capability, str(each.passed), str(each.failed), str(each.skipped), share)
    total = _score("all", verdicts)
    share = "" if total.score is None else f"{total.score:.0%}"
    table.add_section()
    table.add_row("all", str(total.passed), str(total.failed), str(total.skipped), share)
    return table
