"""Training of MTP heads: distil, train, measure, publish."""
