"""The bucket of a key, on a clock that only the test moves."""

import random
from dataclasses import dataclass
from uuid import UUID, uuid4

import pytest
from structlog.testing import capture_logs

from espalier_gateway import rate_limits
from espalier_gateway.errors import WireError
from espalier_gateway.rate_limits import LOG_EVERY_S, RateLimit, RefusalLog
from espalier_protocol.errors import ErrorCode

RATE, BURST = 50.0, 200


@dataclass
class Clock:
    """Far from zero, as a machine's clock is after months: there float seconds are coarse."""

    now: float = 31_536_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limit(clock: Clock) -> RateLimit:
    return limit_of(clock, RATE, BURST)


def limit_of(clock: Clock, rate: float, burst: int) -> RateLimit:
    return RateLimit(rate, burst, RefusalLog(clock), clock)


def wait_ms(limit: RateLimit, key: UUID, calls: int = 1) -> int:
    """How long the refused caller is asked to wait; 0 if it passed."""
    try:
        limit.take(key, calls)
    except WireError as error:
        return error.fault.retry_after_ms or -1
    return 0


def passed(limit: RateLimit, key: UUID, tries: int) -> int:
    return sum(wait_ms(limit, key) == 0 for _ in range(tries))


def test_a_rested_key_has_its_burst_and_then_its_rate(limit: RateLimit, clock: Clock) -> None:
    key = uuid4()
    told = [passed(limit, key, 1000)]
    for seconds in (1.0, 0.5, 3600.0):
        clock.now += seconds
        told.append(passed(limit, key, 1000))
    assert told == [BURST, RATE * 1.0, RATE * 0.5, BURST]


def test_the_refusal_names_the_limit_and_when_to_come_again(limit: RateLimit) -> None:
    key = uuid4()
    limit.take(key, BURST)
    with pytest.raises(WireError) as caught:
        limit.take(key)
    told = caught.value.fault
    assert (told.code, told.data) == (
        ErrorCode.internal_error,
        {"symbol": "rate_limited", "limit": "rpc_rate", "retry_after_ms": 20},
    )
    assert "50 per second and 200 at once" in told.message and "20 ms" in told.message


def test_whoever_waits_as_long_as_told_passes_and_not_much_sooner() -> None:
    chance = random.Random(1)
    refused = 0
    for _ in range(100):
        clock, key = Clock(chance.uniform(0, 1e8)), uuid4()
        limit = limit_of(clock, chance.choice((0.3, 7.0, 50.0, 3333.3)), chance.randint(1, 300))
        for _ in range(50):
            clock.now += chance.expovariate(20)
            calls = chance.randint(1, 20)
            if after_ms := wait_ms(limit, key, calls):
                refused += 1
                sooner_ms = max(0, after_ms - 2)
                clock.now += sooner_ms / 1000
                assert sooner_ms == 0 or wait_ms(limit, key, calls) > 0
                clock.now += (after_ms - sooner_ms) / 1000
                assert wait_ms(limit, key, calls) == 0
    assert refused > 500


def test_several_calls_count_all_together_or_not_at_all(limit: RateLimit) -> None:
    key = uuid4()
    limit.take(key, BURST - 5)
    assert wait_ms(limit, key, 6) == 20
    assert wait_ms(limit, key, 5) == 0
    assert wait_ms(limit, key, 1) == 20


def test_more_calls_than_a_bucket_holds_pass_once_it_is_full(clock: Clock) -> None:
    limit, key = limit_of(clock, rate=1.0, burst=3), uuid4()
    assert wait_ms(limit, key, 20) == 0
    assert wait_ms(limit, key, 20) == 3000
    clock.now += 3.0
    assert wait_ms(limit, key, 20) == 0


def test_a_key_at_its_limit_takes_nothing_from_another(limit: RateLimit) -> None:
    greedy, other = uuid4(), uuid4()
    assert passed(limit, greedy, 1000) == BURST
    assert passed(limit, other, 1000) == BURST


def test_memory_is_bounded_and_a_full_bucket_is_forgotten_before_one_in_use(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limits, "BUCKETS_MAX", 10)
    limit, busy = limit_of(clock, RATE, BURST), uuid4()
    limit.take(busy, BURST)
    clock.now += 1.0
    rested = [uuid4() for _ in range(9)]
    for key in rested:
        limit.take(key)
    clock.now += 0.1  # now those nine are full again, and the busy one has 55 calls
    for _ in range(9):
        limit.take(uuid4(), BURST)
    assert len(limit) == 10
    assert passed(limit, busy, 1000) == 55, "although it was unused for longest"
    for _ in range(100):
        limit.take(uuid4(), BURST)
    assert len(limit) == 10, "and where none is full, the longest unused one goes"


def test_a_flood_is_one_line_per_second_and_key(clock: Clock) -> None:
    limit, key, other = limit_of(clock, RATE, BURST), uuid4(), uuid4()
    with capture_logs() as lines:
        for second in range(3):
            for each in (key, other):
                passed(limit, each, 500)
            clock.now += LOG_EVERY_S
            assert len(lines) == 2 * (second + 1)
    assert {line["key_id"] for line in lines} == {str(key), str(other)}
    assert lines[0] == {
        "event": "limit.reached",
        "log_level": "warning",
        "key_id": str(key),
        "limit": "rpc_rate",
    }


def test_the_log_keeps_few_keys_in_mind(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "BUCKETS_MAX", 2)
    refusals, keys = RefusalLog(clock), [uuid4() for _ in range(3)]
    with capture_logs() as lines:
        for key in (*keys, keys[2], keys[0]):
            refusals.note(key, "rpc_rate")
    assert [line["key_id"] for line in lines] == [str(key) for key in (*keys, keys[0])]
