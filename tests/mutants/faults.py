"""Known ways to get it wrong, and the checks that are to catch each.

Checks that begin with "law", "engine", "replay" or "bets" are the certificate's own: a joint law
by enumeration of the rule's functions, or of the running engine, seed replay, and the sequential
test. Faults that touch the law or the text have at least one of these; the others are caught by a
check of their own (``checks``).
"""

from __future__ import annotations

from patcher import Mutant

TOKEN = "mtplx.verify.token:verify_token"
BLOCK = "mtplx.verify.block:verify_block"
COUPLED = "mtplx.verify.coupled:verify_coupled"
RESIDUAL = "mtplx.sampling:scaled_residual"
ROUND = "mtplx.engine:Engine._round"
LAWS = "mtplx.sequence:History._laws"
MTP = "mtplx.drafters.mtp:MTPDrafter.propose"

NOT_ACCEPTED = "not accepts(draws.accept(start, i), p, q)"
SPARSE_RESIDUAL = (
    "SparseDistribution.unchecked(ids, mass / mass.sum(), size) if ids.size else target_p"
)
BF16 = "(q.probs.astype('f4').view('u4') & 0xFFFF0000).view('f4')"

MUTANTS = [
    # --- the token rule
    Mutant(
        "every possible draft is kept", TOKEN, NOT_ACCEPTED, "not p > 0",
        ("law token three tokens, K = 2", "bets token"),
    ),
    Mutant(
        "a draft is kept if u < p", TOKEN, NOT_ACCEPTED,
        "not draws.accept(start, i) < p", ("law token three tokens, K = 2",),
    ),
    Mutant(
        "recovered from p", TOKEN, "residual_distribution(p_rows[i], q_rows[i]))", "p_rows[i])",
        ("law token three tokens, K = 2", "bets token"),
    ),
    Mutant(
        "bonus after a rejection", TOKEN,
        "draws.residual(start + i, residual_distribution(p_rows[i], q_rows[i]))",
        "draws.bonus(start + i, p_rows[i])", ("law token three tokens, K = 2",),
    ),
    Mutant(
        "bonus from the row before", TOKEN, "p_rows[len(draft)]", "p_rows[len(draft) - 1]",
        ("law token three tokens, K = 2",),
    ),
    Mutant(
        "an end inside the block is missed", TOKEN, "if token in eos_ids:", "if i < 0:",
        ("law token drafts go on past EOS",),
    ),
    Mutant(
        "<= instead of <", "mtplx.sampling:accepts", "uniform * q < p", "uniform * q <= p",
        ("a draft of p = 0 is refused at u = 0",),
    ),
    Mutant(
        "residual floored by an epsilon", RESIDUAL, SPARSE_RESIDUAL,
        "SparseDistribution(np.arange(size),"
        " np.maximum(as_dense(target_p) - as_dense(draft_q), 1e-6), size)",
        ("law token zeros, sparse", "engine token plain"),
    ),
    Mutant(
        "residual softmaxed", RESIDUAL, SPARSE_RESIDUAL,
        "SparseDistribution(ids, np.exp(mass), size) if ids.size else target_p",
        ("engine token plain",),
    ),
    Mutant(
        "residual of q", RESIDUAL, "excess(target_p, draft_q, scale)",
        "excess(draft_q, target_p, scale)",
        ("engine token plain", "bets token"),
    ),
    # --- the block rule
    Mutant(
        "the token rule's residual in the block rule", BLOCK,
        "scaled_residual(p_rows[tau], q_rows[tau], kept[tau])",
        "scaled_residual(p_rows[tau], q_rows[tau], 1.0)",
        ("law block three tokens, K = 2", "engine block plain"),
    ),
    Mutant(
        "h_i = P_i", BLOCK,
        "[_chance(kept[i], p_rows[i], q_rows[i]) for i in range(1, length)] + kept[length:]",
        "kept[1:]", ("law block three tokens, K = 2", "engine block plain"),
    ),
    Mutant(
        "the block rule stops at the first failure", BLOCK,
        "tau = length\n    while tau and not draws.accept(start, tau - 1) < chances[tau - 1]:\n"
        "        tau -= 1",
        "tau = 0\n    while tau < length and draws.accept(start, tau) < chances[tau]:\n"
        "        tau += 1",
        ("law block three tokens, K = 2",),
    ),
    Mutant(
        "P_i is not capped at 1", BLOCK, "chance(kept[-1] * p, q)", "kept[-1] * p / q",
        ("law block three tokens, K = 2",),
    ),
    Mutant(
        "an end inside the block is missed, block rule", BLOCK,
        "next((i for i, token in enumerate(draft, 1) if token in eos_ids), len(draft))",
        "len(draft)", ("law block drafts go on past EOS",),
    ),
    # --- the coupled rule
    Mutant(
        "the coupled rule keeps every possible draft", COUPLED, "if target != token:",
        "if not chances[-1] > 0:", ("law coupled three tokens, K = 2", "replay"),
    ),
    Mutant(
        "the coupled rule's last token by other noise", COUPLED,
        "draws.race(start + len(draft), p_rows[len(draft)])",
        "draws.bonus(start + len(draft), p_rows[len(draft)])", ("replay",),
    ),
    Mutant(
        "the coupled rule races one position on", COUPLED, "draws.race(start + i, p_rows[i])",
        "draws.race(start + i + 1, p_rows[i])", ("replay", "law coupled three tokens, K = 2"),
    ),
    # --- randomness
    Mutant(
        "one coin for all drafts", "mtplx.rng:Draws.accept", "self.stream, offset)", "self.stream)",
        ("law token three tokens, K = 2", "engine token plain"),
    ),
    Mutant(
        "one draft noise for the block", "mtplx.rng:Draws.draft", "self.stream, offset)",
        "self.stream)", ("law token three tokens, K = 2",),
    ),
    Mutant(
        "keys by position alone", "mtplx.rng:Draws.draft", "self.stream, offset), start, q",
        "self.stream), start + offset, q",
        ("law block three tokens, K = 2", "engine block plain"),
    ),
    Mutant(
        "the draft's noise reused for the residual", "mtplx.rng:Draws.residual",
        "Domain.RESIDUAL", "Domain.DRAFT", ("law token three tokens, K = 2", "engine token plain"),
    ),
    Mutant(
        "one race for all positions", "mtplx.rng:Draws.race", "position, law", "0, law",
        ("law coupled three tokens, K = 2",),
    ),
    # --- the round and its drafts
    Mutant(
        "drafts that look unlikely are dropped", "mtplx.engine:Engine._draft",
        "length = len(draft.tokens)",
        "rows = zip(draft.tokens, draft.q_rows)\n"
        "    length = next((i for i, (t, q) in enumerate(rows) if q.probability(t) < 0.5),"
        " len(draft.tokens))",
        ("engine token plain", "engine block plain"),
    ),
    Mutant(
        "the first draft is kept unverified", ROUND, "draft.tokens[: verdict.accepted]",
        "draft.tokens[: max(1, verdict.accepted)]", ("engine token plain", "bets token"),
    ),
    Mutant(
        "rejected drafts stay in the cache", ROUND, "[sequence.tokens[-1], *emitted[:-1]]",
        "[sequence.tokens[-1], *draft.tokens]", ("engine coupled plain",),
    ),
    Mutant(
        "raw q for a truncated draft", MTP, "proposal.draw(len(tokens), q)",
        "proposal.draw(len(tokens), SparseDistribution(q.token_ids,"
        " q.probs * (q.probs > 0.5 * q.probs.max()), q.vocab_size))",
        ("engine token plain", "engine block plain"),
    ),
    Mutant(
        "q rounded to bf16", MTP, "q_rows.append(q)",
        f"q_rows.append(SparseDistribution(q.token_ids, {BF16}, q.vocab_size))",
        ("engine token plain", "engine block plain"),
    ),
    # --- the law of drafted positions
    Mutant(
        "penalties as at the block's start", LAWS, "self.counts + Counter(p) for",
        "self.counts for", ("engine token penalties", "engine coupled penalties"),
    ),
    Mutant(
        "counters miss kept drafts", "mtplx.sequence:Sequence._append",
        "self.history.append(token)", "from_draft or self.history.append(token)",
        ("engine token penalties, two tokens",),
    ),
    Mutant(
        "the repetition penalty does not see the prompt", LAWS, "prompt_ids=self.prompt",
        "prompt_ids=None", ("engine token penalties",),
    ),
    Mutant(
        "a mask on the first row only", LAWS, "self.constraints.mask(p, logits.shape[-1]) for",
        "None if p else self.constraints.mask(p, logits.shape[-1]) for",
        ("engine token grammar", "engine block grammar"),
    ),
    Mutant(
        "no filters where drafts are judged", LAWS, "logits, self.config, token_counts",
        "logits, self.config if len(prefixes) == 1 else replace(self.config, top_p=1.0, min_p=0.0),"
        " token_counts", ("engine token filters",),
    ),
    Mutant(
        "temperature ignored where drafts are judged", LAWS, "logits, self.config, token_counts",
        "logits, self.config if len(prefixes) == 1 else replace(self.config, temperature=1.0),"
        " token_counts", ("engine token filters",),
    ),
    # --- ends and reports
    Mutant(
        "max_tokens is overshot", "mtplx.sequence:Sequence._append", "self.remaining == 0",
        "self.remaining < 0",
        ("an output ends at max_tokens",),
    ),
    Mutant(
        "max_tokens is undershot", "mtplx.sequence:Sequence._append", "self.remaining == 0",
        "self.remaining <= 1",
        ("an output ends at max_tokens",),
    ),
    Mutant(
        "an end does not end the output", "mtplx.sequence:Sequence._append",
        "if token in self.eos_ids:", "if token < 0:",
        ("engine token an end, not at once",),
    ),
    Mutant(
        "ids are not cut at a stop string", "mtplx.text:TextOutput.kept_tokens",
        "self.shown_tokens() if self.stopped else len(self._ends)", "len(self._ends)",
        ("ids end where the text does",),
    ),
    Mutant(
        "logprobs of the block's first row", "mtplx.sequence:Sequence.note",
        "token_logprob(laws[i]", "token_logprob(laws[0]",
        ("logprobs are plain decoding's",),
    ),
    Mutant(
        "a row of NaN becomes a token", "mtplx.sampling:require_finite_row", "if nan or inf:",
        "if False:", ("a row of NaN is an error",),
    ),
]  # fmt: skip
