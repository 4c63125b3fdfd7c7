"""Finite automata that attributes weigh: deterministic ones, substrings, final weights."""
