"""Fit attributes to scored texts."""
