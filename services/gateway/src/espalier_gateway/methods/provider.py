"""`provider.list`. All else that can be done with providers has REST endpoints (`providers_rest`)."""

from espalier_gateway.methods.call import Call
from espalier_protocol.provider import Providers
from espalier_protocol.shapes import NoParams
from espalier_store.pool import reading
from espalier_store.providers import list_providers


async def list_(call: Call, _: NoParams) -> Providers:
    async with reading(call.pool) as connection:
        return Providers(providers=await list_providers(connection, call.owner_id))
