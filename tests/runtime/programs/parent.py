"""A supervisor of one: `parent.py STATE` starts wait_for_stop.py with that state, writes its process id, and waits.

`parent.py STATE --wrong` claims to be another process, as if the real parent had died before its child asked for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

program = Path(__file__).with_name("wait_for_stop.py")
parent = os.getppid() if "--wrong" in sys.argv else os.getpid()
command = [sys.executable, str(program), sys.argv[1], "--parent-pid", str(parent)]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
    line = child.stdout.readline().strip()
    sys.stdout.write(f"{child.pid} {line}\n")
    sys.stdout.flush()
    sys.exit(child.wait())
