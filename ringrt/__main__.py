"""`python -m ringrt`: the command line."""

from ringrt.cli import main

main()
