"""Sample a corpus of token sequences from a language model."""
