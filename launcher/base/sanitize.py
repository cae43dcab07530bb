"""Escapes control sequences in text from a machine or a model before a terminal shows it.

Text of every language is kept, with its newlines and tabs. A log (`LogStream`) also keeps colours: whole
SGR sequences (`ESC [ 31 m`), except those that conceal text. A single text loses its colours. Everything
else that could act is shown as Python writes it (`\\x1b]52;`, `\\x9b`, `\\u202e`): the other control
characters, C0 and C1, so that no cursor moves and no title, clipboard or mode is set; the marks that
reverse the direction of text; the halves of characters that no terminal can be given. A carriage return
becomes a new line, because it could overwrite the line.
Neighbours: `console/output.py` and all that prints ask here; a user's own program, and `launch ssh`, write
for themselves.
"""

from __future__ import annotations

import re

_CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_CONTROL_CHARACTER = re.compile(f"[{_CONTROL}]")
_CONTROL_OR_NEWLINE = re.compile(f"[\t\n{_CONTROL}]")
_COLOUR = re.compile(r"\x1b\[([0-9;:]{0,64})m")
_LINE_END = re.compile(r"\r+\n?")
# The possible beginning of a colour or of a line's end.
_UNFINISHED = re.compile(r"(\r+|\x1b(\[[0-9;:]{0,64})?)\Z")
_RESET = "\x1b[0m"
_CONCEAL = 8
# `38;5;8` and `38;2;8;8;8` are colours: so many numbers follow.
_EXTENDED_COLOUR = {38, 48, 58}
_EXTENDED_PARAMETERS = {5: 1, 2: 3}


def plain_text(given: str) -> str:
    """Lines, without colours."""
    return _CONTROL_CHARACTER.sub(_escaped, _LINE_END.sub("\n", _COLOUR.sub("", given)))


def one_line(given: str) -> str:
    """One line, without colours, whatever it holds; a line's end inside it is shown as well."""
    return _CONTROL_OR_NEWLINE.sub(_escaped, _COLOUR.sub("", given))


def json_text(given: str) -> str:
    """JSON with the same meaning, for a program or for a terminal: it escapes C0 alone by itself."""
    return _CONTROL_CHARACTER.sub(lambda found: f"\\u{ord(found[0]):04x}", given)


class LogStream:
    """A log that comes in pieces, with its colours."""

    def __init__(self) -> None:
        self._rest = ""
        self._coloured = False

    def feed(self, piece: str) -> str:
        """The text that can be shown now; a possible beginning of a sequence waits for its end."""
        given = self._rest + piece
        begun = _UNFINISHED.search(given)
        cut = begun.start() if begun else len(given)
        self._rest = given[cut:]
        return self._sanitized(given[:cut])

    def end(self) -> str:
        """The text held back; colours go no further."""
        given, self._rest = self._rest, ""
        return self._sanitized(given) + (_RESET if self._coloured else "")

    def _sanitized(self, given: str) -> str:
        made, at = [], 0
        for found in _COLOUR.finditer(given):
            if _conceals(found[1]):
                continue
            made += [_strip_colours(given[at : found.start()]), found[0]]
            self._coloured = found[1].strip("0;") != ""
            at = found.end()
        return "".join([*made, _strip_colours(given[at:])])


def _strip_colours(given: str) -> str:
    return _CONTROL_CHARACTER.sub(_escaped, _LINE_END.sub("\n", given))


def _conceals(parameters: str) -> bool:
    numbers = [int(number or "0") for number in re.split("[;:]", parameters)]
    at = 0
    while at < len(numbers):
        if numbers[at] == _CONCEAL:
            return True
        wide = numbers[at] in _EXTENDED_COLOUR and at + 1 < len(numbers)
        at += 2 + _EXTENDED_PARAMETERS.get(numbers[at + 1], 0) if wide else 1
    return False


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
