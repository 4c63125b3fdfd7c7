"""Engines that people run already, and how foretrace steers in them."""
