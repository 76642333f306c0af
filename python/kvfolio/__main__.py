"""`python -m kvfolio` is the command `kvfolio`."""

from kvfolio.cli import main

main()
