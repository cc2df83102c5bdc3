"""`python -m tests.simulation COUNT [SEED [MOOD]]`: run so many schedules; tell what breaks, and end with 1.

`python -m tests.simulation HEX` tells the story of one schedule. The mutants run this on their own sources.
"""

import sys

from tests.simulation.hunting import hunted
from tests.simulation.machine import simulator


def main(args: list[str]) -> int:
    with simulator() as machine:
        if args and not args[0].isdecimal():
            found = machine.breaks(bytes.fromhex(args[0]))
        else:
            numbers = [int(each) for each in args] or [1_000]
            count, seed, mood = (*numbers, None, None)[:3]
            hit = hunted(machine, seed=seed or 0, schedules_max=count or 1, mood=mood)
            found = f"{hit[1]}\nschedule {hit[0].hex()}" if hit else ""
        story = "\n".join(machine.story) if found or not (args and args[0].isdecimal()) else ""
    sys.stdout.write(f"{story}\n{found or f'{machine.ran} schedules, and everything holds'}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
