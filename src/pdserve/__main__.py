"""`python -m pdserve`."""

from __future__ import annotations

import os
import signal

# The imports take a while, and an exception in the middle of one ends in a traceback or in nothing at all.
_quiet = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _quiet:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from pdserve.cli import main  # noqa: E402

if _quiet:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if __name__ == "__main__":
    main()
