"""The long description: README.md, with links that work where only the README is shown.

Everything else is in pyproject.toml. A link to a file of the repository becomes absolute where [project.urls] names the
repository, and plain text where it does not; pictures of the repository are left out.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<to>(?!https?:|mailto:|#)[^)\s]+)\)")


def long_description(readme: str, repository: str = "") -> str:
    def rewritten(link: re.Match[str]) -> str:
        if repository:
            return f"{link['picture']}[{link['text']}]({repository.rstrip('/')}/blob/main/{link['to']})"
        return "" if link["picture"] else link["text"]

    return LINK.sub(rewritten, re.sub(r"<!--.*?-->", "", readme, flags=re.DOTALL))


if __name__ == "__main__":
    urls = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    text = long_description((HERE / "README.md").read_text(encoding="utf-8"), urls.get("Repository", ""))
    setup(long_description=text, long_description_content_type="text/markdown")
