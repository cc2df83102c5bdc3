"""The one error of this room: something a person at the terminal can put right.

Not for bugs, which stay tracebacks. `command.main` prints the sentence and exits with 2.
"""


class LocalError(Exception):
    """Carries one sentence that says what is wrong and, where it helps, what to do. Never a secret."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence
