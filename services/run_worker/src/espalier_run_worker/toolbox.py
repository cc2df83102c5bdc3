"""Which tools a run's model is offered: its self-tools, and what the broker has of its toolset."""

from typing import Final
from uuid import UUID

import anyio
import structlog

from espalier_domain.run import RunFacts
from espalier_domain.tools import is_brokered, servers_of
from espalier_protocol.broker import ToolsWanted
from espalier_protocol.ids import from_wire
from espalier_run_worker.broker_link import BrokerAway, BrokerLink
from espalier_run_worker.models.model import Offer, ToolDefinition
from espalier_run_worker.self_tools import SelfTools

BELIEVED_S: Final = 5.0
"""For so long a list from the broker is offered again without asking."""

LISTS_MAX: Final = 256
TOOLS_MAX: Final = 128
"""What providers accept in one request."""


log = structlog.get_logger(__name__)


class Toolbox:
    def __init__(self, tools: SelfTools, link: BrokerLink) -> None:
        self._tools, self._link = tools, link
        self._lists: dict[ToolsWanted, tuple[float, Offer]] = {}

    async def offer(self, owner_id: UUID, facts: RunFacts) -> Offer | None:
        """What the model may call. None while the broker is away and the toolset needs it."""
        own = self._tools.definitions()
        brokered = tuple(entry for entry in facts.toolset if is_brokered(entry))
        if not brokered:
            return Offer(own)
        # Who has no server's tools shares its list with everybody of the same toolset.
        agent_id = from_wire("agt", facts.agent_id) if servers_of(brokered) else None
        try:
            listed = await self._listed(ToolsWanted(owner_id=owner_id, agent_id=agent_id, toolset=brokered))
        except BrokerAway as away:
            log.warning("toolbox.broker_away", why=str(away))
            return None
        room = TOOLS_MAX - len(own)
        left_out = len(listed.definitions) - room
        troubles = listed.troubles
        if left_out > 0:
            troubles += (f"{left_out} tools are not offered: a model takes {TOOLS_MAX} in all.",)
        return Offer((*own, *listed.definitions[:room]), troubles)

    async def _listed(self, wanted: ToolsWanted) -> Offer:
        known = self._lists.get(wanted)
        if known and anyio.current_time() < known[0] + BELIEVED_S:
            return known[1]
        offered = await self._link.offered(wanted)
        definitions = (ToolDefinition(t.name, t.description, t.input_schema) for t in offered.tools)
        offer = Offer(tuple(definitions), offered.troubles)
        if len(self._lists) >= LISTS_MAX:
            self._lists.clear()
        self._lists[wanted] = (anyio.current_time(), offer)
        return offer
