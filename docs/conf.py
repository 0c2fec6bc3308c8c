"""Sphinx: `make docs` builds the site into docs/_build/html, without a network."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE), str(HERE.parent)]

import sordino  # noqa: E402

project = "Sordino"
author = "The Sordino authors"
copyright = "The Sordino authors, Apache-2.0"
release = version = sordino.__version__

extensions = ["myst_nb", "sordino_docs"]
exclude_patterns = ["_build", "_notes", "_generated", "_tables", "_ext"]
suppress_warnings = ["misc.highlighting_failure"]
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
# Tutorials run at every build, each in an empty folder. SORDINO_DOCS_CACHE=1 runs only what changed, to write faster.
nb_execution_mode = "cache" if os.environ.get("SORDINO_DOCS_CACHE") else "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600  # seconds per cell; a busy machine needs many times what a quiet one does
nb_merge_streams = True
nb_output_stderr = "remove"
startup = HERE / "_build" / "ipython" / "profile_default" / "startup"
startup.mkdir(parents=True, exist_ok=True)
shutil.copy(HERE / "_ext" / "notebook.py", startup)
os.environ["IPYTHONDIR"] = str(HERE / "_build" / "ipython")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # tutorials call sordino

html_theme = "furo"
html_title = "Sordino"
html_static_path = ["_static"]
html_css_files = ["sordino.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5d6b", "color-brand-content": "#0b5d6b"},
    "dark_css_variables": {"color-brand-primary": "#6fc3d0", "color-brand-content": "#6fc3d0"},
}
