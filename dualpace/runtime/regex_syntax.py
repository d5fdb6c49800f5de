"""Which regular expressions can be held to: what the compiler would read otherwise than it is
meant, or pass over, is refused by name and place.

An expression is always the whole text, so anchors at its ends say nothing new and others cannot be
kept. Knows nothing about grammars or tokens.
"""

import re
from collections.abc import Iterator

MAX_COUNT = 2**31 - 1  # of repetitions, characters, items
_MAX_DEPTH = 64  # groups in groups
_SHOWN = 20  # characters of a part in a sentence
_LETTERS = frozenset("dDwWsSnrtfveacxu")  # that may follow a backslash
_PUNCTUATION = frozenset("\\\"$'()*+-./?[]^{|}")  # to which the compiler knows a backslash
_TOKEN = re.compile(
    r"""(?s)\\(?:u\{[0-9a-fA-F]*\}|.)?       # an escape
      | (?P<open>\(\?(?:P?<(?=\w)|<?[=!]|[^)])?|\()
      | (?P<class>\[\^?(?:\\.|[^\]\\])*\]?)
      | (?P<times>(?:[*+?]|\{[^}]*\}?)\??)
      | .""",
    re.VERBOSE,
)
_COUNT = re.compile(r"\{(\d{1,10})(?:,(\d{0,10}))?\}\??", re.ASCII)


class UnsupportedRegex(ValueError):
    """The expression asks for what cannot be enforced; the text says what, where and what to do."""


def plain_regex(text: str) -> str:
    """The same expression without needless backslashes, of which the compiler would warn. Raises
    UnsupportedRegex. Whether all of it is closed is left to who compiles it."""
    depth, before, parts = 0, "(", []
    for at, kind, token in _tokens(text):
        fault = ""
        if token[0] == "\\":
            fault, token = _of_escape(token)
        elif kind == "open":
            depth += 1
            fault = _of_group(token, depth)
        elif kind == "class":
            fault, token = _of_class(token)
        elif kind == "times":
            fault = _of_times(token, before)
        elif token in "^$":
            if at != (0 if token == "^" else len(text) - 1):
                fault = f"'{token}' inside cannot be enforced: the expression is the whole text"
                fault += f", so leave it out, or write \\{token} for the character"
        elif token == ")":
            depth -= 1
        if fault:
            raise UnsupportedRegex(f"{fault} (at character {at + 1})")
        before = "times" if kind == "times" else "(" if kind == "open" else token
        parts.append(token)
    return "".join(parts)


def _tokens(text: str) -> Iterator[tuple[int, str | None, str]]:
    for found in _TOKEN.finditer(text):
        yield found.start(), found.lastgroup, found[0]


def _of_escape(token: str) -> tuple[str, str]:
    """What is wrong with it, and how it is written plainly."""
    name = token[1:2]
    if not name or name in _LETTERS or name in _PUNCTUATION:
        return "", token
    if not (name.isascii() and name.isalnum()):
        return "", name
    if name in "AZz":
        what = "leave it out, the expression is the whole text"
    elif name in "123456789k":
        what = "it refers back, write out what may come"
    else:
        what = "write out what may come, a class such as [a-z], or the character by itself"
    return f"'{token}' cannot be enforced: {what}", token


def _of_class(token: str) -> tuple[str, str]:
    inner = token.removeprefix("[").removeprefix("^")
    if inner.startswith("]"):
        return f"'{token[:_SHOWN]}' is an empty class: write \\] for the character", token
    if "[:" in inner:
        return "'[:' cannot be enforced: write out the characters, such as [a-zA-Z]", token
    fault, parts = "", []
    for part in re.findall(r"(?s)\\.?|.", inner):
        if part[0] == "\\" and part != "\\b":  # in a class that is the character backspace
            wrong, part = _of_escape(part)
            fault = fault or wrong
        parts.append(part)
    return fault, token[: -len(inner)] + "".join(parts)


def _of_group(token: str, depth: int) -> str:
    if depth > _MAX_DEPTH:
        return f"groups are nested more than {_MAX_DEPTH} deep: nest them less"
    if token.startswith("(?P"):
        return "'(?P' cannot be enforced: write (?<name>...), or a group without a name"
    if token in ("(?=", "(?!", "(?<=", "(?<!"):
        return f"'{token}' looks around and cannot be enforced: write out what may come"
    if token not in ("(", "(?:", "(?<"):
        return f"'{token}' cannot be enforced: write (...) or (?:...), without flags"
    return ""


def _of_times(token: str, before: str) -> str:
    shown = token[:_SHOWN]
    if before in ("(", "|", "^"):
        return f"'{shown}' repeats nothing: write \\{token[0]} for the character"
    if before == "times":
        return f"'{shown}' repeats what is repeated already: put a group around that"
    if token[0] != "{":
        return ""
    count = _COUNT.fullmatch(token)
    if count is None:
        return f"'{shown}' is no count: write {{2}}, {{2,}} or {{2,5}}, or \\{{ for the character"
    low, high = int(count[1]), int(count[2] or count[1])
    if low > high:
        return f"'{shown}' has a lower bound above the upper one: exchange them"
    return f"'{shown}' is above {MAX_COUNT}: use less" if high > MAX_COUNT else ""
