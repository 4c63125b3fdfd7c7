"""Build the HMM that EM starts from."""
