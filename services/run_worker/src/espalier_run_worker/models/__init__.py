"""Models behind one normalised form: `model` is the seam, every other module is one way to answer.

Only this folder may import a model SDK. Nothing here decides anything about a run.
"""

from typing import Final

SCRIPT_KEY: Final = "espalier.script"
"""The member of a run's inputs or an agent's metadata that holds a plan."""
