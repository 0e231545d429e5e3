"""python -m holdfast.cli: the holdfast command where no script is installed."""

from holdfast.cli import main

main()
