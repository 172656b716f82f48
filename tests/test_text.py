"""Text as it is released: all of it up to the first stop, and nothing too early."""

from __future__ import annotations

import pytest
from doubles import Spelling
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtplx.text import Segment, TextOutput

# Few letters and short stops, so that stops begin, overlap and fail to complete all the time.
LETTERS = "ab\u00e9"
PIECES = st.lists(st.text(LETTERS, max_size=4), max_size=14)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3)


def feed(pieces, stops, left="", flags=None):
    """Everything a TextOutput says: released segments a token, how many tokens it took, itself."""
    output = TextOutput(Spelling(pieces, left), stops)
    flags = flags or [False] * len(pieces)
    released = []
    for i in range(len(pieces)):
        released.append(output.add(i, flags[i]))
        if output.stopped:
            break
    taken = len(released)
    released.append(output.finish())
    return released, taken, output


def text(segments):
    return "".join(segment.text for segment in segments)


def flat(released):
    return [segment for segments in released for segment in segments]


def cut(pieces, stops, left=""):
    """By definition: (text, tokens taken, stopped). The first token that completes a stop ends the
    output, just before the leftmost stop in it; the flush counts as a last token."""
    whole = ""
    for taken, piece in enumerate([*pieces, left], 1):
        whole += piece
        found = [whole.find(stop) for stop in stops if stop in whole]
        if found:
            return whole[: min(found)], min(taken, len(pieces)), True
    return whole, len(pieces), False


@given(PIECES, STOPS, st.text(LETTERS, max_size=3))
@example(["ab", "", "c"], ["bc"], "")
@example(["a"], ["ab"], "b")
@settings(max_examples=300, deadline=None)
def test_released_text_is_the_text_up_to_the_earliest_stop(pieces, stops, left):
    released, taken, output = feed(pieces, stops, left)
    want, tokens, stopped = cut(pieces, stops, left)
    assert text(flat(released)) == want
    assert (taken, output.stopped) == (tokens, stopped)


@given(PIECES, STOPS)
@settings(max_examples=300, deadline=None)
def test_what_could_still_become_a_stop_is_held_and_nothing_else(pieces, stops):
    output = TextOutput(Spelling(pieces), stops)
    shown = whole = ""
    for i, piece in enumerate(pieces):
        shown += text(output.add(i, False))
        whole += piece
        if output.stopped:
            return
        starts = [n for n in range(len(whole)) if any(s.startswith(whole[n:]) for s in stops)]
        assert shown == whole[: min(starts, default=len(whole))]


@given(PIECES, STOPS, st.text(LETTERS, max_size=3))
@settings(max_examples=300, deadline=None)
def test_kept_tokens_are_the_fewest_that_hold_the_text(pieces, stops, left):
    released, taken, output = feed(pieces, stops, left)
    want = text(flat(released))
    kept = output.kept_tokens()
    if not output.stopped:
        assert kept == taken == len(pieces)
        return
    enough = [n for n in range(taken + 1) if len("".join(pieces[:n])) >= len(want)]
    assert kept == (enough[0] if enough else taken)
    assert ("".join(pieces[:kept]) + left).startswith(want)


@given(st.lists(st.tuples(st.text(LETTERS, max_size=4), st.booleans()), max_size=14), STOPS)
@settings(max_examples=300, deadline=None)
def test_every_character_keeps_its_flag(tokens, stops):
    pieces, flags = [t for t, _ in tokens], [f for _, f in tokens]
    released, _, _ = feed(pieces, stops, flags=flags)
    want = [flag for piece, flag in tokens for _ in piece]
    got = [segment.from_draft for segment in flat(released) for _ in segment.text]
    assert got == want[: len(got)]
    assert all(segment.text for segment in flat(released))


@pytest.mark.parametrize("flag", [True, False])
def test_the_flush_takes_the_flag_of_the_last_token_with_text(flag):
    released, _, output = feed(["a", ""], [], left="\ufffd", flags=[not flag, flag])
    assert released[-1] == [Segment("\ufffd", flag)]
    assert output.finish() == []


def test_a_stop_in_text_that_only_the_flush_brings():
    """A detokenizer may hold everything back to the end; the tokens are then all needed."""
    released, _, output = feed(["", "", ""], ["cd"], left="abcde")
    assert text(flat(released)) == "ab"
    assert output.stopped
    assert output.kept_tokens() == 3


def test_a_stop_at_the_very_start_keeps_nothing():
    released, _, output = feed(["", "ab"], ["a"])
    assert text(flat(released)) == ""
    assert output.kept_tokens() == 0


def test_tokens_without_text_count_where_the_text_goes_on_after_them():
    output = TextOutput(Spelling(["a", "", "b", "", "XY"]), ["X"])
    for i in range(5):
        output.add(i, False)
    assert output.kept_tokens() == 3


def test_end_of_sequence_is_a_token_without_text():
    output = TextOutput(Spelling(["ab"]), ["bc"])
    assert text(output.add(0, False)) == "a"
    output.skip()
    assert text(output.finish()) == "b"
    assert output.kept_tokens() == 2


def test_empty_stop_strings_are_no_stop_strings():
    released, _, output = feed(["a", "b"], ["", "x"])
    assert text(flat(released)) == "ab"
    assert not output.stopped
