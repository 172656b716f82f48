"""``python -m mtplx``: the same as the command."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
