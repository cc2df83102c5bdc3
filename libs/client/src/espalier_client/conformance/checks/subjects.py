"""Data subjects: what is known of them, and how they are forgotten."""

import base64
from dataclasses import dataclass
from typing import Any, Final

from espalier_client.conformance.behaviour import calls, completes, sleeps, tool
from espalier_client.conformance.expected import nobody, require_shape
from espalier_client.conformance.ground import SUBJECTS_PATH, Trial, agent_params
from espalier_client.conformance.verdicts import Skipped, expect, same

REDACTED: Final = "[REDACTED]"
SPACE: Final = "kit.gdpr"
METHODS: Final = ("subject.read", "subject.export", "subject.erase")


@dataclass(frozen=True, slots=True)
class Person:
    """A subject, its one agent, and a word that stands in everything about it."""

    subject: str
    word: str
    agent: dict[str, Any]


async def _person(trial: Trial, *others: str) -> Person:
    """`others` are subjects that share the agent."""
    subject, word = trial.subject(), trial.word()
    changes: dict[str, Any] = {"name": word, "constitution__mutable_prompt": word}
    agent = await trial.agent(subject_ids=[subject, *others], **changes)
    person = Person(subject, word, agent)
    if trial.has("self.learning_memory"):
        await _remember(trial, person, "k")
    return person


async def _remember(trial: Trial, person: Person, key: str) -> dict[str, Any]:
    where = {"tree_root_id": person.agent["id"], "namespace": SPACE}
    record = await trial.me.call(
        "memory.write", **where, key=key, value=person.word, subject_id=person.subject
    )
    assert isinstance(record, dict)
    return record


async def _remembered(trial: Trial, person: Person) -> list[dict[str, Any]]:
    page = await trial.me.call("memory.read", tree_root_id=person.agent["id"], namespace=SPACE)
    found = page["items"]
    assert isinstance(found, list)
    return found


async def _erase(trial: Trial, person: Person, mode: str) -> dict[str, Any]:
    manifest = await trial.me.call("subject.erase", subject_id=person.subject, mode=mode)
    require_shape(manifest, "Manifest", "the manifest")
    same(
        (manifest["subject_id"], manifest["mode"]), (person.subject, mode), "subject and mode of the manifest"
    )
    assert isinstance(manifest, dict)
    return manifest


def _kinds(manifest: dict[str, Any], verb: str) -> set[tuple[str, str]]:
    return {(entry["kind"], entry["id"]) for entry in manifest[verb]}


async def subject_01_unknown(trial: Trial) -> None:
    for subject in (nobody("sub"), trial.subject(), "nonsense"):
        for method in METHODS:
            more = {"mode": "redact"} if method == "subject.erase" else {}
            await trial.me.refused("subject_not_found", method, subject_id=subject, **more)


async def subject_02_first_tag(trial: Trial) -> None:
    subject = trial.subject()
    await trial.me.refused("subject_not_found", "subject.read", subject_id=subject)
    await trial.agent(subject_ids=[subject])
    await trial.me.call("subject.read", subject_id=subject)


async def subject_03_read(trial: Trial) -> None:
    person = await _person(trial)
    run, _ = await trial.ended(agent=person.agent)
    for method in ("subject.read", "subject.export"):
        found = await trial.me.call(method, subject_id=person.subject)
        require_shape(found, "SubjectRecords", f"the result of {method}")
        same(found["subject_id"], person.subject, "subject_id")
        memory = int(trial.has("self.learning_memory"))
        counts = {"agents": 1, "runs": 1, "memory": memory}
        same({name: found["counts"][name] for name in counts}, counts, f"counts of {method}")
        for part in (found["records"]["agents"], found["agents"]):
            same([(each["id"], each["name"]) for each in part], [(person.agent["id"], person.word)], "agents")
        same([each["id"] for each in found["runs"]], [run["id"]], "runs")
        same(found["records"]["runs"], found["runs"], "the runs in both shapes")
        same(found["records"]["memory"], found["memory_records"], "the memory in both shapes")


async def subject_04_export(trial: Trial) -> None:
    person = await _person(trial)
    file = tool("artifact_create", name="f.txt", mime_type="text/plain", content=person.word)
    await trial.ended(calls(file), completes(), agent=person.agent)
    found = await trial.me.call("subject.export", subject_id=person.subject)
    same(found.get("portable_format_version"), "1", "portable_format_version")
    expect(found["artifacts"], "a file of a run that has one subject is not in the export.")
    (artifact,) = found["artifacts"]
    held = artifact.get("content") or base64.b64decode(artifact.get("bytes_base64") or "").decode()
    same(held, person.word, "the content of the artifact")


async def subject_05_manifest(trial: Trial) -> None:
    person = await _person(trial)
    wanted = {("agent", person.agent["id"])}
    if trial.has("self.learning_memory"):
        wanted.add(("memory", (await _remember(trial, person, "other"))["id"]))
    manifest = await _erase(trial, person, "redact")
    same(sorted(wanted - _kinds(manifest, "redacted")), [], "what the manifest lacks under redacted")
    for entry in manifest["redacted"]:
        expect(entry["kind"] and entry["resource"], f"an entry without kind or resource: {entry}")


async def subject_06_redacted(trial: Trial) -> None:
    person = await _person(trial)
    await _erase(trial, person, "redact")
    agent = await trial.me.call("agent.get", agent_id=person.agent["id"])
    told = (agent["name"], agent["constitution"]["mutable_prompt"])
    same(told, (REDACTED, REDACTED), "name and prompt of a redacted agent")
    expect(person.word not in str(agent), "the agent still holds the person's word.")
    if trial.has("self.learning_memory"):
        expect(person.word not in str(await _remembered(trial, person)), "memory still holds the word.")


async def subject_07_shared(trial: Trial) -> None:
    other = trial.subject()
    person = await _person(trial, other)
    manifest = await _erase(trial, person, "hard_delete")
    agent = await trial.me.call("agent.get", agent_id=person.agent["id"])
    same((agent["name"], agent["subject_ids"]), (person.word, [other]), "name and subjects of a shared agent")
    expect(("agent", agent["id"]) in _kinds(manifest, "stripped"), "the manifest does not say stripped.")
    left = await trial.me.call("subject.read", subject_id=other)
    same(left["counts"]["agents"], 1, "agents of the other subject")


async def subject_08_hard_delete(trial: Trial) -> None:
    person = await _person(trial)
    run, _ = await trial.ended(agent=person.agent)
    manifest = await _erase(trial, person, "hard_delete")
    await trial.me.refused("tool_not_found", "run.get", run_id=run["id"])
    expect(
        ("run", run["id"]) in _kinds(manifest, "deleted"),
        "the manifest does not say that the run is deleted.",
    )
    if trial.has("self.learning_memory"):
        same(await _remembered(trial, person), [], "what is remembered")


async def subject_09_mode(trial: Trial) -> None:
    person = await _person(trial)
    for params in ({"mode": "shred"}, {}):
        await trial.me.refused("invalid_params", "subject.erase", subject_id=person.subject, **params)
    agent = await trial.me.call("agent.get", agent_id=person.agent["id"])
    same(agent["name"], person.word, "the name afterwards")


async def subject_10_after(trial: Trial) -> None:
    for mode in ("redact", "hard_delete"):
        person = await _person(trial)
        await _erase(trial, person, mode)
        for method in ("subject.read", "subject.export"):
            found = await trial.me.call(method, subject_id=person.subject)
            expect(person.word not in str(found), f"{method} still shows the word after {mode}.")


async def _made_subject(trial: Trial, **body: Any) -> dict[str, Any]:
    answer = await trial.me.send("POST", SUBJECTS_PATH, body)
    same(answer.status, 200, f"the status of POST {SUBJECTS_PATH}")
    made = answer.json()
    assert isinstance(made, dict)
    return made


async def subject_11_legal_hold(trial: Trial) -> None:
    subject = (await _made_subject(trial, legalHold=True))["subject_id"]
    word = trial.word()
    agent = await trial.agent(subject_ids=[subject], name=word)
    for mode in ("redact", "hard_delete"):
        manifest = await _erase(trial, Person(subject, word, agent), mode)
        same(
            (manifest["redacted"], manifest["deleted"], manifest["stripped"]),
            ([], [], []),
            "what was touched",
        )
        (kept,) = manifest["retained"]
        same(
            (kept["kind"], kept.get("reason")),
            ("subject", "legal_hold"),
            "what the manifest says was retained",
        )
    same((await trial.me.call("agent.get", agent_id=agent["id"]))["name"], word, "the name under legal hold")


async def subject_12_events(trial: Trial) -> None:
    trial.require("streaming.sse")
    person = await _person(trial)
    file = tool("artifact_create", name=person.word, mime_type="text/plain", content=person.word)
    run, events = await trial.ended(calls(file), completes(person.word), agent=person.agent)
    expect(person.word in str(events), "the script did not do what it should.")
    await _erase(trial, person, "redact")
    answer = await trial.me.get(f"/aep/v1/runs/{run['id']}/events")
    expect(person.word.encode() not in answer.body, "the events still hold the word.")
    expect(
        person.word not in str(await trial.me.call("run.get", run_id=run["id"])), "the run still holds it."
    )


async def subject_13_spreads(trial: Trial) -> None:
    if not trial.has("self.learning_memory"):
        raise Skipped("The runtime does not offer self.learning_memory.")
    agent, subject, word = await trial.agent(), trial.subject(), trial.word()
    await _remember(trial, Person(subject, word, agent), "k")
    run, _ = await trial.ended(calls(tool("learning_memory_read", namespace=SPACE)), completes(), agent=agent)
    same(run["subject_ids"], [subject], "the subjects of a run that read about one")


async def subject_14_live_run(trial: Trial) -> None:
    person = await _person(trial)
    run = await trial.run(sleeps(), agent=person.agent)
    await trial.until(run["id"], "sleeping")
    await _erase(trial, person, "redact")
    ended = await trial.until(run["id"], "cancelled", "error", "complete")
    expect(ended["ended_at"], "the run of an erased subject lives on.")


async def subject_15_of_another(trial: Trial) -> None:
    person = await _person(trial)
    for method in METHODS:
        more = {"mode": "hard_delete"} if method == "subject.erase" else {}
        await trial.they.refused("subject_not_found", method, subject_id=person.subject, **more)
    # The same name is another subject for another owner.
    theirs = await trial.they.call("agent.create", **agent_params(subject_ids=[person.subject]))
    await trial.they.call("subject.erase", subject_id=person.subject, mode="redact")
    agent = await trial.me.call("agent.get", agent_id=person.agent["id"])
    same((agent["name"], agent["subject_ids"]), (person.word, [person.subject]), "the first owner's agent")
    read = await trial.me.call("subject.read", subject_id=person.subject)
    expect(theirs["id"] not in str(read), "the other owner's agent is shown.")


async def subject_16_made(trial: Trial) -> None:
    wanted = trial.subject()
    made = await _made_subject(trial, aepId=wanted, metadata={"a": 1})
    told = {name: made.get(name) for name in ("subject_id", "metadata", "legal_hold")}
    same(told, {"subject_id": wanted, "metadata": {"a": 1}, "legal_hold": False}, "the subject")
    read = await trial.me.call("subject.read", subject_id=wanted)
    same(read["counts"]["agents"], 0, "its agents")
    named = await _made_subject(trial)
    expect(named["subject_id"].startswith("sub_"), f"a subject got the id {named['subject_id']!r}.")
