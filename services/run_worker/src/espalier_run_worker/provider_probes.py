"""Testing providers for whoever waits at a gateway: one small question, and what came of it as a kind.

A probe is a row. Any worker takes it by SKIP LOCKED, asks, and writes the outcome; one that dies in between
leaves it, and whoever waits is told that nobody answered. Above: the composition root.
"""

from collections.abc import Mapping
from typing import Final
from uuid import UUID

import anyio
import structlog

from espalier_acts.providers import PROBE_LIFE_S
from espalier_domain.errors import DomainError
from espalier_domain.history import User
from espalier_domain.run import BoundProvider
from espalier_protocol.provider import FaultKind
from espalier_run_worker.models.bound import Providers
from espalier_run_worker.models.model import ModelFault, Question
from espalier_store.fleet import forget_probes, take_probes
from espalier_store.pool import Pool, transaction
from espalier_store.providers import ProbeOutcome, TestedProvider, settle_probe

LOOK_EVERY_S: Final = 0.5
PROBES_MAX: Final = 4
"""Probes under way in one worker; others wait for it or are taken by another one."""

ASK_WAIT_S: Final = 15.0
"""Within the life of a probe, so that whoever waits gets to know it."""

FORGET_AFTER_S: Final = 600.0
ROWS_MAX: Final = 100
MESSAGE_CHARS_MAX: Final = 300
QUESTION: Final = Question((User("Reply with the word ok."),), (), tokens_max=64)

KINDS: Final[Mapping[str, FaultKind]] = {
    "unauthorized": "auth_failed",
    "rate_limited": "rate_limited",
    "quota_exhausted": "rate_limited",
    "overloaded": "upstream_error",
    "unavailable": "upstream_error",
    "provider_error": "upstream_error",
    "conflict": "upstream_error",
    "too_early": "upstream_error",
    "refused": "upstream_error",
    "prompt_too_long": "upstream_error",
    "unreachable": "unreachable",
    "timeout": "unreachable",
    "redirected": "unreachable",
    "address_refused": "unreachable",
    "not_found": "model_invalid",
    "unreadable_answer": "parse_error",
    "answer_too_large": "parse_error",
    "malformed_tool_call": "parse_error",
    "decrypt_failed": "decrypt_failed",
}
"""What a fault's first word is for those who test. Any other is `other`."""

ANSWERED: Final = frozenset(("answer_cut", "content_filter"))
"""No use to a run, but a provider that says so knows key and model."""

log = structlog.get_logger(__name__)


async def answer_probes(pool: Pool, providers: Providers) -> None:
    """Take probes and answer them, for ever."""
    free = anyio.Semaphore(PROBES_MAX, max_value=PROBES_MAX)
    async with anyio.create_task_group() as group:
        while True:  # bounded: one look every LOOK_EVERY_S, for as many as may be under way
            await anyio.sleep(LOOK_EVERY_S)
            try:
                taken = await _take(pool, free.value)
            except (DomainError, TimeoutError) as error:
                log.warning("probes.put_off", error=type(error).__name__)
                continue
            for probe_id, tested in taken.items():
                await free.acquire()
                group.start_soon(_answer, pool, providers, probe_id, tested, free)


async def _take(pool: Pool, most: int) -> dict[UUID, TestedProvider]:
    if not most:
        return {}
    async with transaction(pool) as connection:
        taken = await take_probes(connection, PROBE_LIFE_S, most)
        if taken:
            await forget_probes(connection, FORGET_AFTER_S, ROWS_MAX)
    return taken


async def _answer(
    pool: Pool, providers: Providers, probe_id: UUID, tested: TestedProvider, free: anyio.Semaphore
) -> None:
    """An outcome that cannot be written is lost; whoever waits is told that none came."""
    try:
        outcome = await _probed(providers, tested)
        async with transaction(pool) as connection:
            await settle_probe(connection, tested, probe_id, outcome)
    except (DomainError, TimeoutError) as error:
        log.warning("probe.lost", error=type(error).__name__)
    finally:
        free.release()


async def _probed(providers: Providers, tested: TestedProvider) -> ProbeOutcome:
    """What nobody thought of must not end the worker, which has runs of others to live."""
    try:
        return await probe(providers, tested)
    except Exception:
        log.exception("probe.failed", provider_id=str(tested.provider_id))
        return ProbeOutcome("other", "The test itself failed; the runtime's log knows why.")


async def probe(providers: Providers, tested: TestedProvider) -> ProbeOutcome:
    """Ask the provider's default model one thing, and say what that showed."""
    if tested.default_model is None:
        return ProbeOutcome("model_invalid", "The provider has no default model, so there is nothing to ask.")
    bound = BoundProvider(
        tested.owner_id, tested.provider_id, tested.kind, tested.base_url, tested.sealed_key
    )
    with anyio.move_on_after(ASK_WAIT_S):
        try:
            async with providers.open(bound, tested.default_model) as model:
                await model.ask(QUESTION)
        except ModelFault as fault:
            return _outcome(fault)
        return ProbeOutcome("ok", "")
    return ProbeOutcome("unreachable", f"The provider did not answer within {ASK_WAIT_S:g} seconds.")


def _outcome(fault: ModelFault) -> ProbeOutcome:
    word = fault.reason.partition(":")[0]
    if word in ANSWERED:
        return ProbeOutcome("ok", "")
    return ProbeOutcome(KINDS.get(word, "other"), fault.reason[:MESSAGE_CHARS_MAX])
