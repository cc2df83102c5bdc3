"""The merged log: names in front, colours only for eyes, and no line that can take over the terminal."""

import io

from espalier_local.console import Terminal


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class Closed(io.StringIO):
    def write(self, _text: str) -> int:
        raise BrokenPipeError


def shown(line: str, *, screen: io.StringIO, name: str = "gateway", no_color: bool = False) -> str:
    Terminal(screen, no_color=no_color)(name, line)
    return screen.getvalue()


def test_a_file_gets_plain_lines_even_from_a_colourful_child() -> None:
    assert shown("\x1b[32mready\x1b[0m", screen=io.StringIO()) == "gateway    | ready\n"


def test_a_screen_gets_a_coloured_name_and_the_childs_own_colours() -> None:
    expected = "\x1b[36mgateway    |\x1b[0m \x1b[32mready\x1b[0m\x1b[0m\n"
    assert shown("\x1b[32mready\x1b[0m", screen=Screen()) == expected


def test_a_screen_stays_plain_when_the_person_wants_no_colour() -> None:
    assert shown("ready", screen=Screen(), no_color=True) == "gateway    | ready\n"


def test_control_characters_of_a_line_do_not_reach_the_terminal() -> None:
    hostile = "a\x1b]0;title\x07b\x1b[2Jc\rd\x9be\x7f"
    assert shown(hostile, screen=io.StringIO()) == "gateway    | a]0;titleb[2Jcde\n"


def test_workers_can_be_told_apart() -> None:
    colours = {shown("", screen=Screen(), name=f"worker-{n}").partition("m")[0] for n in (1, 2, 3)}
    assert len(colours) == 3


def test_a_reader_that_left_does_not_stop_the_log() -> None:
    terminal = Terminal(Closed())
    terminal("gateway", "one")
    terminal("gateway", "two")
