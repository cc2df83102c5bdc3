"""Which model thinks in this process: a real one if the settings name one, else the scripted one."""

from contextlib import AbstractAsyncContextManager, nullcontext

from espalier_run_worker.models.endpoint import EndpointInvalid, endpoint
from espalier_run_worker.models.model import OperatorModel
from espalier_run_worker.models.plan import PlanInvalid, load_plan
from espalier_run_worker.models.scripted import ScriptedModel
from espalier_run_worker.settings import WorkerSettings

SETTINGS_ERRORS = (PlanInvalid, EndpointInvalid)
"""What `open_model` raises, each one sentence for the operator."""


def open_model(settings: WorkerSettings) -> AbstractAsyncContextManager[OperatorModel]:
    """The chosen model, to be entered in the event loop that asks it."""
    if not settings.model:
        plan = load_plan(settings.script) if settings.script else None
        return nullcontext(ScriptedModel(plan, plans_from_wire=settings.models_scripted == "on"))
    key = settings.openai_api_key.get_secret_value()
    asked_at = endpoint(settings.model, settings.openai_base_url.strip(), key.strip())
    # Here and not above: the SDK takes about two seconds to load, and the scripted model needs none of it.
    from espalier_run_worker.models.openai_compatible import open_openai_compatible

    return open_openai_compatible(asked_at)
