"""Finite automata over tokens: DFAs, substring search, and weights of final states."""
