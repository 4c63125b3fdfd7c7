"""Train an HMM on a corpus by mini-batch EM."""
