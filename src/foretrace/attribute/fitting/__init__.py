"""Fit an attribute to scored texts."""
