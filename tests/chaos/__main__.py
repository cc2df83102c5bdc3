"""`make chaos`: a storm over real processes, judged by the checker. What it does and tells: docs/reliability.

    python -m tests.chaos [--seed N] [--profile short|long | --minutes M] [--out FOLDER]

The exit code is 1 if anything was violated, or if a run did not end. Each service that is forked imports this
file under another name: so nothing is imported before it is known that this is the bench.
"""

import argparse
import os
import sys
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "support"
SEED = 20260301
MINUTES = {"short": 3.5, "long": 25.0}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--seed", type=int, default=SEED)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--profile", choices=sorted(MINUTES), default="short")
    length.add_argument("--minutes", type=float, help="how long faults happen; start and end come on top")
    parser.add_argument("--out", type=Path, default=Path("chaos-report"))
    return parser.parse_args()


def main() -> int:
    import anyio
    from tests.chaos.storm import Plan, storm

    given = parsed()
    minutes = given.minutes or MINUTES[given.profile]
    sys.stdout.write(f"a storm of {minutes:g} minutes, seed {given.seed}; all of it goes to {given.out}\n")
    sys.stdout.flush()
    given.out.mkdir(parents=True, exist_ok=True)
    outcome = anyio.run(
        storm, Plan(given.seed, minutes * 60), given.out, backend_options={"use_uvloop": True}
    )
    for violation in outcome.violations:
        sys.stdout.write(f"{violation.invariant}: {violation.subject}: {violation.sentence}\n")
    for sentence in outcome.open_runs:
        sys.stdout.write(f"not ended: {sentence}\n")
    told = outcome.report
    sys.stdout.write(
        f"{told['n']} faults, {len(outcome.violations)} violations; runs {told['runs']}; "
        f"recovery {told['recovery_s']['after_sigkill']}; seed {given.seed}\n"
    )
    return 1 if outcome.violations or outcome.open_runs else 0


if __name__ == "__main__":
    sys.path.insert(0, str(SUPPORT))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    sys.exit(main())
