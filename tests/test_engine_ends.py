"""Where an output ends: exact limits, stops in blocks, and what is counted."""

from __future__ import annotations

import pytest
from doubles import (
    BlockDrafter,
    ExactFamily,
    KnowingDrafter,
    RandomDrafter,
    Spelling,
    hashed_logits,
    new_sequence,
    run,
    scripted_logits,
    text_of,
)

RULES = ("token", "block", "coupled")
DEPTHS = (1, 2, 3, 4, 5)


# --- where an output ends -------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("depth", [0, *DEPTHS])
def test_max_tokens_is_exact(rule, depth):
    family = ExactFamily(scripted_logits(list(range(30)), 2, 40), 40)
    for limit in range(1, 14):
        drafter = KnowingDrafter(2, list(range(30)))
        sequence = new_sequence(family, [35, 36], drafter, rule=rule, depth=depth, max_tokens=limit)
        run(sequence)
        assert sequence.token_ids == list(range(limit))
        assert sequence.finish_reason == "length"
        assert sequence.stats.tokens == limit
        assert sequence.stats.rounds == -(-limit // (depth + 1))


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_that_ignores_the_depth_does_not_pass_max_tokens(rule):
    class Eager(KnowingDrafter):
        def propose(self, depth, proposal):
            return super().propose(depth + 4, proposal)

    family = ExactFamily(scripted_logits(list(range(30)), 2, 40), 40)
    sequence = new_sequence(
        family, [35, 36], Eager(2, list(range(30))), rule=rule, depth=3, max_tokens=5
    )
    run(sequence)
    assert sequence.token_ids == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("depth", [0, *DEPTHS])
@pytest.mark.parametrize("at", range(8))
def test_end_of_sequence_at_each_offset_of_a_block(rule, depth, at):
    script = [5] * at + [2] + [6] * 12
    family = ExactFamily(scripted_logits(script, 2, 10), 10)
    drafter = KnowingDrafter(2, script)
    sequence = new_sequence(
        family, [7, 8], drafter, rule=rule, depth=depth, eos_ids=[2], max_tokens=20
    )
    run(sequence)
    assert sequence.token_ids == script[: at + 1]
    assert sequence.finish_reason == "stop"
    assert text_of(sequence) == "<5>" * at
    assert sequence.stats.tokens == at + 1
    assert sequence.state.length == 2 + at


def test_no_row_after_an_end_of_sequence_is_run():
    """A draft block ends at its first end-of-sequence token, even if more was drafted."""
    family = ExactFamily(scripted_logits([5, 2, 6, 6, 6, 6], 2, 10), 10)
    drafter = KnowingDrafter(2, [5, 2, 6, 6, 6])
    run(new_sequence(family, [7, 8], drafter, depth=5, eos_ids=[2], max_tokens=20))
    assert family.rows == [3]


@pytest.mark.parametrize("rule", RULES)
def test_a_drafted_end_of_sequence_that_is_refused_does_not_end(rule):
    family = ExactFamily(scripted_logits([5, 6, 7, 8, 1, 1], 2, 10), 10)
    sequence = new_sequence(
        family, [7, 8], BlockDrafter([[5, 2, 7]]), rule=rule, depth=3, eos_ids=[2], max_tokens=6
    )
    run(sequence)
    assert sequence.token_ids == [5, 6, 7, 8, 1, 1]


# "abcdefghij", one letter a token, but token 10 is "xyz" and token 11 nothing.
LETTERS = [*"abcdefghij", "xyz", ""]


def spelled(script, stops, depth, *, rule="coupled", max_tokens=30, eos=(), left="", drafts=None):
    family = ExactFamily(scripted_logits(script, 2, 12), 12)
    drafter = KnowingDrafter(2, script) if drafts is None else BlockDrafter(drafts)
    sequence = new_sequence(
        family, [0, 0], drafter, rule=rule, depth=depth, stops=stops, max_tokens=max_tokens,
        eos_ids=eos, detokenizer=Spelling(LETTERS, left),
    )  # fmt: skip
    return run(sequence)


STOP_CASES = {
    # name: (script, stops, text, kept ids, finish reason)
    "inside a token": ([0, 10, 1], ["y"], "ax", [0, 10], "stop"),
    "a whole token": ([0, 10, 1], ["xyz"], "a", [0], "stop"),
    "across tokens": ([0, 1, 2, 3, 4, 5], ["cde"], "ab", [0, 1], "stop"),
    "from inside a token into the next": ([0, 10, 1, 2], ["zb"], "axy", [0, 10], "stop"),
    "at the very start": ([0, 1, 2], ["ab"], "", [], "stop"),
    "two stops, the earlier in the text": ([0, 1, 2, 3], ["d", "bc"], "a", [0], "stop"),
    "two stops in one token": ([0, 10], ["z", "y"], "ax", [0, 10], "stop"),
    "a beginning that comes to nothing": ([0, 1, 2, 0, 3, 9], ["abd", "bce"], None, None, "length"),
    "a beginning inside a beginning": ([0, 0, 1, 2, 3], ["aabd", "abc"], "a", [0], "stop"),
    "tokens without text between": ([0, 11, 1, 11, 2, 3], ["bc"], "a", [0], "stop"),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", STOP_CASES)
def test_stop_strings_cut_text_ids_and_counters_alike(rule, case):
    script, stops, text, kept, reason = STOP_CASES[case]
    if text is None:
        text, kept = "".join(LETTERS[t] for t in script), script
    for depth in range(7):
        sequence = spelled(script, stops, depth, rule=rule, max_tokens=len(script))
        assert text_of(sequence) == text
        assert sequence.token_ids == kept
        assert sequence.finish_reason == reason
        assert sequence.stats.tokens == len(kept)
        if depth >= len(script):  # all in one block
            assert sum(sequence.stats.accepted) == min(len(kept), len(script) - 1)


def test_a_stop_across_draft_blocks():
    for blocks in ([[0], [2], [4]], [[0, 1, 2], [4, 5]], [[0, 1], [3]], [[], [1], [], [4]]):
        sequence = spelled([0, 1, 2, 3, 4, 5], ["bcde"], 3, drafts=blocks)
        assert text_of(sequence) == "a"
        assert sequence.token_ids == [0]
        assert sequence.finish_reason == "stop"


def test_a_stop_that_the_last_token_completes_is_a_stop():
    for depth in range(5):
        sequence = spelled([0, 1, 2, 3], ["cd"], depth, max_tokens=4)
        assert (text_of(sequence), sequence.token_ids) == ("ab", [0, 1])
        assert sequence.finish_reason == "stop"


def test_a_beginning_of_a_stop_is_shown_when_the_output_ends():
    for depth in range(5):
        by_length = spelled([0, 1, 2, 3], ["cdx"], depth, max_tokens=4)
        assert (text_of(by_length), by_length.finish_reason) == ("abcd", "length")
        assert by_length.token_ids == [0, 1, 2, 3]
        by_eos = spelled([0, 1, 2, 3, 9], ["cdx"], depth, eos=[9])
        assert (text_of(by_eos), by_eos.finish_reason) == ("abcd", "stop")
        assert by_eos.token_ids == [0, 1, 2, 3, 9]


def test_a_stop_that_the_flush_completes():
    for depth in range(5):
        sequence = spelled([0, 1, 2, 3], ["d\ufffd"], depth, max_tokens=4, left="\ufffd")
        assert text_of(sequence) == "abc"
        assert sequence.token_ids == [0, 1, 2]
        assert sequence.finish_reason == "stop"


@pytest.mark.parametrize("depth", range(6))
def test_the_earliest_terminator_wins(depth):
    # Stop string and max_tokens by the same token: the stop string ends it.
    assert spelled([0, 1, 2, 3], ["c"], depth, max_tokens=3).finish_reason == "stop"
    # End of sequence and max_tokens by the same token: the end of sequence.
    both = spelled([0, 1, 9, 3], [], depth, max_tokens=3, eos=[9])
    assert (both.finish_reason, both.token_ids) == ("stop", [0, 1, 9])
    # An end of sequence behind a stop string, and the other way round, in one block.
    first = spelled([0, 1, 9, 3], ["b"], depth, eos=[9])
    assert (text_of(first), first.token_ids) == ("a", [0])
    second = spelled([0, 9, 1, 3], ["b"], depth, eos=[9])
    assert (text_of(second), second.token_ids) == ("a", [0, 9])
    # The limit before either.
    third = spelled([0, 1, 9, 3], ["c", "d"], depth, max_tokens=2, eos=[9])
    assert (third.finish_reason, third.token_ids) == ("length", [0, 1])


@pytest.mark.parametrize("depth", DEPTHS)
def test_segments_say_which_characters_were_drafted(depth):
    sequence = spelled([0, 1, 2, 3, 4, 5], [], depth, max_tokens=6, drafts=[[0, 1], [9], [4]])
    flags = "".join(("D" if s.from_draft else "-") * len(s.text) for s in sequence.segments)
    assert text_of(sequence) == "abcdef"
    # Depth 1 cuts the first block to one token, and the third comes a round too early.
    assert flags == {1: "D-----"}.get(depth, "DD--D-")


# --- counters -------------------------------------------------------------------------------------


def test_counters_by_hand():
    """Script 0..9. Blocks: [0,1] kept whole; [7] refused; none; [5,6,0] two kept; [8,9] cut to 1.

    Emitted: 0 1 2 | 3 | 4 | 5 6 7 | 8 9: ten tokens in five rounds.
    """
    family = ExactFamily(scripted_logits(list(range(12)), 2, 12), 12)
    drafter = BlockDrafter([[0, 1], [7], [], [5, 6, 0], [8, 9]])
    sequence = run(new_sequence(family, [10, 11], drafter, depth=3, max_tokens=10))
    stats = sequence.stats
    assert sequence.token_ids == list(range(10))
    assert drafter.asked == [3, 3, 3, 3, 1]
    assert family.rows == [3, 2, 1, 4, 2]
    assert (stats.prompt_tokens, stats.tokens, stats.rounds) == (2, 10, 5)
    assert stats.drafted == [4, 2, 1]
    assert stats.accepted == [3, 2, 0]
    assert stats.acceptance_length == 2.0
    assert stats.acceptance_by_position == [0.75, 1.0, 0.0]
    assert (stats.drafter, stats.rule, stats.depth) == ("blocks", "coupled", 3)
    assert stats.sources == {
        "blocks": {"rounds": 4, "emitted": 9}, "none": {"rounds": 1, "emitted": 1}
    }  # fmt: skip
    assert stats.to_dict()["acceptance_length"] == 2.0


def test_plain_decoding_has_an_acceptance_length_of_one():
    stats = run(new_sequence(ExactFamily(hashed_logits(8), 8), [1], max_tokens=7)).stats
    assert (stats.rounds, stats.tokens, stats.acceptance_length) == (7, 7, 1.0)
    assert stats.drafted == stats.accepted == stats.acceptance_by_position == []


def test_drafts_behind_the_cut_are_not_counted_as_accepted():
    """All five drafts are right, but the output ends with the second."""
    by_stop = spelled([0, 1, 2, 3, 4, 5], ["cd"], 5).stats
    assert (by_stop.tokens, by_stop.drafted, by_stop.accepted) == (2, [1] * 5, [1, 1, 0, 0, 0])
    by_eos = spelled([0, 9, 2, 3, 4, 5], [], 5, eos=[9]).stats
    assert (by_eos.tokens, by_eos.drafted, by_eos.accepted) == (2, [1, 1], [1, 1])


def test_seconds_are_counted():
    stats = run(
        new_sequence(ExactFamily(hashed_logits(8), 8), [1, 2], RandomDrafter(1), depth=2)
    ).stats
    parts = (stats.draft_seconds, stats.forward_seconds, stats.other_seconds)
    assert min(parts) > 0
    assert stats.prefill_seconds > 0
    assert stats.decode_seconds == sum(parts)
    assert stats.tokens_per_second == stats.tokens / stats.decode_seconds
