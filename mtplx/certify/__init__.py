"""A certificate of exactness that anyone can run on a live engine.

``run.certify`` makes one: the joint law by enumeration of the shipped functions (``enumeration``,
``engine_play``, over ``cases``), seed replay and drift (``replay``), bets on a running engine
(``eprocess``), chi-square on tuples (``tuples``). ``report`` draws it on one page.
"""
