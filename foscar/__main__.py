"""``python -m foscar`` is the command line."""

from foscar.cli import app

app()
