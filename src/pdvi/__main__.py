"""Run the command line with `python -m pdvi`."""

from pdvi.cli.app import main

main()
