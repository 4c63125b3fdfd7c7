"""Steering row by row, in its plainest form: what the slot tensors are compared with."""
