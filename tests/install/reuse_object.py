"""A compiler launcher: copies an object of another build of the same sources, or compiles where it has none.

``reuse_object.py BUILD COMPILER ARGUMENTS…``: an object csrc/… of the current build, at any depth, is that of BUILD.
"""

import shutil
import subprocess
import sys
from pathlib import Path

build, *command = sys.argv[1:]
output = Path(command[command.index("-o") + 1]) if "-o" in command else Path()
if "csrc" in output.parts:
    known = Path(build, *output.parts[output.parts.index("csrc") :])
    if known.exists():
        shutil.copy(known, output)
        if "-MF" in command:
            Path(command[command.index("-MF") + 1]).write_text(f"{output}:\n")
        sys.exit(0)
sys.exit(subprocess.run(command).returncode)
