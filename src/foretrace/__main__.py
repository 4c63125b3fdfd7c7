"""`python -m foretrace`, which is what torchrun starts."""

from foretrace.cli import main

main()
