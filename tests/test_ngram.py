"""The n-gram drafter."""

from __future__ import annotations

from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_drafters import COPY, VOCAB, ngram

from mtplx.distribution import SparseDistribution
from mtplx.drafters import NgramDrafter, NoDrafter
from mtplx.drafters.index import NgramIndex

# --- n-grams ------------------------------------------------------------------------------------


def brute_force(tokens, depth, longest=5, shortest=2, per_token=3):
    """Prompt lookup by definition, over the whole history."""
    for n in range(min(longest, len(tokens)), shortest - 1, -1):
        suffix = tokens[-n:]
        places = [i for i in range(len(tokens) - n) if tokens[i : i + n] == suffix]
        if places:
            copy = list(tokens)
            for _ in range(min(depth, per_token * (n - shortest + 1))):
                copy.append(copy[places[-1] + n + len(copy) - len(tokens)])
            return copy[len(tokens) :]
    return []


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=8),
    st.integers(0, 12),
    st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(1, 4)),
)
@settings(max_examples=500, deadline=None)
def test_the_index_equals_a_search_of_the_whole_history(parts, depth, shape):
    shortest, longest, per_token = shape[0], shape[0] + shape[1], shape[2]
    drafter = NgramDrafter(longest=longest, shortest=shortest, per_token=per_token)
    history: list[int] = []
    for part in parts:
        drafter.observe(part, None)
        history += part
        draft = drafter.propose(depth, COPY)
        assert draft.tokens == brute_force(history, depth, longest, shortest, per_token)
        assert len(draft.tokens) <= depth
        assert drafter.propose(depth, COPY) == draft, "asking leaves no trace"


@given(
    st.lists(st.integers(0, 2), max_size=30),
    st.lists(st.integers(0, 2), max_size=4),
    st.integers(0, 6),
    st.integers(1, 3),
    st.integers(1, 6),
)
@settings(max_examples=1000, deadline=None)
def test_a_suffix_with_drafts_is_found_where_it_occurred_last(tokens, drafts, kept, short, long):
    index = NgramIndex(kept)
    for token in tokens:
        index.extend([token])
    both, expected = [*tokens, *drafts], None
    for n in range(short, min(long, kept, len(both)) + 1):
        ends = [at for at in range(n, len(tokens)) if tokens[at - n : at] == both[-n:]]
        expected = (n, ends[-1]) if ends else expected
    assert index.find(drafts, shortest=short, longest=long) == expected


def test_a_drafter_reads_an_index_that_another_one_extends():
    index = NgramIndex(8)
    drafter = NgramDrafter(index)
    for token in [1, 2, 3, 1, 2]:
        drafter.observe([token], None)
        index.extend([token])
    assert index.tokens == [1, 2, 3, 1, 2]
    assert drafter.propose(1, COPY).tokens == [3]
    own = NgramDrafter(NgramIndex(4), longest=5)
    own.observe([1, 2, 3, 1, 2], None)
    assert own.propose(1, COPY).tokens == [3], "n-grams of 4 are too short for it"


def test_an_index_of_a_text_without_repeats_has_an_entry_a_token():
    index = NgramIndex(8)
    index.extend(range(1000))
    assert len(index._next) == 999


def test_the_longest_match_wins_over_a_later_one():
    history = [1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3]
    assert ngram(history).propose(1, COPY).tokens == [40]


def test_of_several_places_the_latest_wins():
    history = [2, 3, 40, 2, 3, 50, 60, 2, 3]
    assert ngram(history).propose(2, COPY).tokens == [50, 60]


def test_a_copy_runs_into_its_own_drafts():
    assert ngram([7, 8, 7, 8]).propose(3, COPY).tokens == [7, 8, 7]
    assert ngram([5, 5, 5]).propose(3, COPY).tokens == [5, 5, 5]


def test_longer_matches_draft_more_and_never_above_the_depth():
    history = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    assert len(ngram([*history, 1, 2]).propose(64, COPY).tokens) == 3
    assert len(ngram([*history, 1, 2, 3]).propose(64, COPY).tokens) == 6
    assert len(ngram([*history, 1, 2, 3, 4, 5]).propose(64, COPY).tokens) == 12
    assert len(ngram([*history, 1, 2, 3, 4, 5]).propose(5, COPY).tokens) == 5
    assert ngram([*history, 1, 2]).propose(0, COPY).tokens == []


@pytest.mark.parametrize("history", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_no_earlier_place_no_draft(history):
    draft = ngram(history).propose(5, COPY)
    assert (draft.tokens, draft.q_rows) == ([], [])


def test_a_copied_token_is_certain():
    draft = ngram([7, 8, 9, 7, 8]).propose(3, COPY)
    assert draft.tokens == [9, 7, 8]
    assert draft.q_rows == [SparseDistribution.one_hot(t, VOCAB) for t in draft.tokens]


def test_no_drafter_drafts_nothing():
    drafter = NoDrafter()
    drafter.observe([1, 1, 1, 1], None)
    assert drafter.propose(5, COPY).tokens == []


def test_the_index_finds_what_followed_with_drafts_in_between():
    index = NgramIndex(3)
    index.extend([5, 6, 7, 8, 6, 7])
    assert index.find() == (2, 3)  # 6 7 was followed by 8
    assert index.find([8]) == (3, 4)  # 6 7 8 by 6
    assert index.find([8, 6]) == (3, 5)  # 7 8 6 by 7
    assert index.find([9]) is None
    assert index.find([9, 5]) == (1, 1)
    assert NgramIndex(3).find() is None
    assert NgramIndex(3).find([4]) is None


def test_an_index_of_no_lengths_finds_nothing_at_once():
    index = NgramIndex(0)
    index.extend(list(range(50_000)))
    begin = perf_counter()
    assert index.find([3]) is None
    assert perf_counter() - begin < 0.05  # every suffix would take minutes
