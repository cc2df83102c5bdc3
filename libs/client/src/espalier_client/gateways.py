"""The gateways of one runtime, and which of them is asked.

Any of them will do, because sessions, runs and logs are the runtime's and not a gateway's. So the one that
answered last is asked until it gives no answer, then the next one, and after the last one the first: a
gateway that came back is found again by itself. Whether a request may be sent once more is said in `errors`,
how long that waits in `backoff`; here is only where it goes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from espalier_client.errors import Cause, ClientError, TransportError, is_no_answer, is_passing
from espalier_client.transport import Transport

BASE_URLS_MAX: Final = 16


class Gateways:
    """An open transport to each. Made and closed by `AepClient`; calls and streams share it.

    Raises TransportError if there are none or too many, or if one is no address.
    """

    def __init__(self, base_urls: str | Sequence[str], api_key: str, version: str) -> None:
        given = [base_urls] if isinstance(base_urls, str) else base_urls
        self.base_urls = tuple(dict.fromkeys(url.rstrip("/") for url in given))
        if not 1 <= len(self.base_urls) <= BASE_URLS_MAX:
            sentence = f"A runtime has 1 to {BASE_URLS_MAX} base URLs, not {len(self.base_urls)}."
            raise TransportError(sentence, Cause.senseless)
        self._transports = [Transport(url, api_key, version) for url in self.base_urls]
        self._place = 0

    async def aclose(self) -> None:
        for transport in self._transports:
            await transport.aclose()

    @contextmanager
    def asking(self) -> Iterator[Transport]:
        """The gateway to ask now. If nothing comes of it, whoever asks next asks the next one."""
        place = self._place
        try:
            yield self._transports[place]
        except ClientError as error:
            if is_no_answer(error) and self._place == place:  # the others who asked it must not skip one
                self._place = (place + 1) % len(self._transports)
            raise

    def after_all(self, last: ClientError) -> ClientError:
        """What to tell when every gateway was tried often enough and `last` is how that ended."""
        if len(self.base_urls) == 1 or not (isinstance(last, TransportError) and is_passing(last)):
            return last
        return TransportError(f"None of the gateways {', '.join(self.base_urls)} answers: {last}", last.cause)
