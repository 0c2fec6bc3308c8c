"""Runs first in every tutorial: `%%bash` prints what commands print, in one piece, without colours or bars."""

import os
import subprocess

from IPython.core.magic import register_cell_magic

for _name in ("FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE"):
    os.environ.pop(_name, None)
os.environ.update(COLUMNS="110", NO_COLOR="1")


@register_cell_magic
def bash(line, cell):
    done = subprocess.run(["bash", "-e", "-o", "pipefail"], input=cell, capture_output=True, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr}")
