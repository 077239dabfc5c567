from __future__ import annotations

import subprocess
import sys


def test_a_serving_process_may_open_what_the_system_lets_it() -> None:
    program = (
        "import resource\n"
        "from pdserve.descriptors import raise_limit\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "raise_limit()\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard) != (64, hard)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
