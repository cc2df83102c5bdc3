"""Data subjects, and the parameters of `subject.*` (AEP spec section 10)."""

from typing import Literal

from espalier_protocol.shapes import Id, Params, Resource, Timestamp


class SubjectRef(Params):
    subject_id: Id


class SubjectErase(Params):
    subject_id: Id
    mode: Literal["hard_delete", "redact"]


class SubjectRecords(Resource):
    """Everything tagged with the subject, in both published dialects; the members arrive with erasure."""

    subject_id: str
    generated_at: Timestamp


class ErasureManifest(Resource):
    subject_id: str
    mode: Literal["hard_delete", "redact"]
    generated_at: Timestamp
    performed_at: Timestamp
