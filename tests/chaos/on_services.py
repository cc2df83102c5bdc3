"""Checks of the services themselves: INV-15, INV-16."""

from collections.abc import Iterator
from typing import Final

from tests.chaos.history import Fault, Probe, Usage
from tests.chaos.seen import Seen, Violation, violation

DESCRIPTORS_SLACK: Final = 24
RSS_SLACK_BYTES: Final = 64 * 1024 * 1024
MORE: Final = 1.1
NOTICES_S: Final = 2.0
OK: Final = 200


def let_go(seen: Seen) -> Iterator[Violation]:
    """INV-15: after the storm a service holds no more than before it, give or take a tenth and a little."""
    usages = list(seen.of(Usage))
    before = {usage.service: usage for usage in usages if usage.when == "before"}
    for after in usages:
        first = before.get(after.service)
        if after.when == "before" or first is None:
            continue
        grown = [
            f"{name} grew from {then} to {now}"
            for name, then, now, slack in (
                ("descriptors", first.descriptors, after.descriptors, DESCRIPTORS_SLACK),
                ("children", first.children, after.children, 0),
                ("rss_bytes", first.rss_bytes, after.rss_bytes, RSS_SLACK_BYTES),
            )
            if now > then * MORE + slack
        ]
        for sentence in grown:
            yield violation("INV-15", after.service, sentence, first, after)


def told_the_truth(seen: Seen) -> Iterator[Violation]:
    """INV-16: without Postgres a service is not ready, and it is alive all the same."""
    away = [
        (fault.at + NOTICES_S, fault.at + float(fault.detail.get("seconds", 0.0)), fault)
        for fault in seen.of(Fault)
        if fault.act in ("postgres.crash", "postgres.hang")
    ]
    for probe in seen.of(Probe):
        if probe.path == "/healthz":
            if probe.status not in (OK, None):
                yield violation("INV-16", probe.service, f"its life was answered with {probe.status}", probe)
        elif probe.status == OK:
            for since, until, fault in away:
                if since < probe.at < until:
                    sentence = f"ready {probe.at - fault.at:.1f} s after Postgres went away"
                    yield violation("INV-16", probe.service, sentence, fault, probe)
