"""``python -m foscar`` is the command line."""

from foscar.cli import app

if __name__ == "__main__":
    app()
