"""The hold-back of stop strings against an oracle that sees the text character by character."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dualpace.runtime.generation import StopMatcher

LETTERS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def oracle(text: str, stops: list[str], exempt: int = 0, include: bool = False) -> tuple[str, bool]:
    """Cut where, reading on letter by letter, some stop string is complete for the first time after
    `exempt` letters."""
    for end in range(exempt + 1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end if include else end - max(map(len, done))], True
    return text, False


@st.composite
def pieces(draw: st.DrawFn) -> list[str]:
    text = draw(LETTERS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=200, deadline=None)
@given(pieces(), STOPS)
def test_any_cutting_into_pieces_shows_the_same_text(pieces: list[str], stops: list[str]) -> None:
    expected, stops_there = oracle("".join(pieces), stops)
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown += text
        assert expected.startswith(shown)  # nothing leaks that would have to be taken back
        if stopped:
            break
    else:
        stopped = False
        shown += matcher.flush()
    assert (shown, stopped) == (expected, stops_there)


@settings(max_examples=200, deadline=None)
@given(pieces(), STOPS, st.integers(0, 8), st.booleans())
def test_stop_strings_that_end_too_early_are_text(
    pieces: list[str], stops: list[str], exempt: int, include: bool
) -> None:
    early = len("".join(pieces[:exempt]))
    expected = oracle("".join(pieces), stops, early, include)
    matcher, shown, stopped = StopMatcher(stops, include), "", False
    for number, piece in enumerate(pieces):
        text, stopped = matcher.push(piece, number >= exempt)
        shown += text
        if stopped:
            break
    else:
        shown += matcher.flush()
    assert (shown, stopped) == expected


@settings(max_examples=100, deadline=None)
@given(pieces(), STOPS)
def test_only_what_may_become_a_stop_string_is_held(pieces: list[str], stops: list[str]) -> None:
    matcher, shown, seen = StopMatcher(stops), "", ""
    for piece in pieces:
        seen += piece
        text, stopped = matcher.push(piece)
        shown += text
        if stopped:
            return
        held = seen[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopMatcher([]).push("abc") == ("abc", False)
