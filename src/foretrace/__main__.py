"""`python -m foretrace`, for torchrun."""

from foretrace.cli import main

main()
