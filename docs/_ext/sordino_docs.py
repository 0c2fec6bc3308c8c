"""The generated part of the site: API, command line, methods, keys of a run, tables of results.

Everything is written as Markdown before Sphinx reads the sources, into folders that git ignores. Docstrings are
Markdown with Google's sections (Args, Returns, Raises, Attributes, Example, Guarantee); `sections` reads them.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import figures

import sordino
from sordino import cli, methods
from sordino.training import spec as specs

APART = 8  # places between two names that were neighbours, as shares of the list
HEADS = ("Args", "Returns", "Yields", "Raises", "Attributes", "Fields", "Example", "Examples", "Guarantee", "Note")
HEAD = re.compile(rf"^({'|'.join(HEADS)}):\s*(.*)$")
ITEM = re.compile(r"^(\*{0,2}[\w, .*]+?)(?: \(([^)]*)\))?:\s+(.*)$")
MORE = {  # public names outside `sordino` itself, by the reader that they are for
    "Networks": (
        "sordino.models.torch_model:TorchModel",
        "sordino.models.torch_model:group_norm",
        "sordino.models.lora:adapt",
        "sordino.methods.adapters:with_adapters",
    ),
    "Several processes": ("sordino.engines.distributed:join", "sordino.engines.distributed:Team"),
    "Sampling and spending": (
        "sordino.privacy.participation:Sampling",
        "sordino.privacy.spending:epsilon",
        "sordino.privacy.spending:epsilon_after",
    ),
    "Checks": ("sordino.checks:check",),
    "scikit-learn": (
        "sordino.estimators:FederatedClassifier",
        "sordino.estimators:FederatedRegressor",
        "sordino.estimators:FederatedCox",
        "sordino.estimators:certificate_of",
        "sordino.estimators:UnpaidSearchWarning",
        "sordino.estimators:UnpaidStepWarning",
    ),
}


def setup(app: Any) -> dict[str, Any]:
    app.connect("builder-inited", lambda app: write(Path(app.srcdir)))
    app.connect("env-before-read-docs", _deal)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _deal(app: Any, env: Any, names: list[str]) -> None:
    """Tutorials run while their pages are read, and Sphinx gives neighbours here to one process: spread them."""
    names[:] = [name for first in range(APART) for name in names[first::APART]]


def write(docs: Path) -> None:
    """Every generated page; files that did not change keep their time, and those of names that are gone are removed."""
    pages = {
        "_generated/": figures.tables(),
        "reference/api/": dict(api()),
        "reference/cli/": dict(commands()),
        "reference/methods/": dict(method_pages(docs / "_notes")),
        "results/paper/": figures.paper_pages(),
        "reference/": {"spec.md": spec_page()},
    }
    for folder, texts in pages.items():
        (docs / folder).mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            path = docs / folder / name
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")
        if folder != "reference/":
            for path in (docs / folder).iterdir():
                if path.name not in texts:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


# -------------------------------------------------------------------------------------------------------- docstrings


class Section(NamedTuple):
    """One part of a docstring; the first has no head."""

    head: str
    text: str

    def items(self) -> list[tuple[str, str]]:
        """Name and text of each entry of Args, Raises or Attributes."""
        entries: list[tuple[str, str]] = []
        for line in self.text.splitlines():
            match = None if line.startswith(" ") else ITEM.match(line)
            if match:
                entries.append((match[1], match[3]))
            elif entries:
                entries[-1] = (entries[-1][0], f"{entries[-1][1]} {line.strip()}".strip())
        return entries


def sections(doc: str) -> list[Section]:
    """A docstring in its parts."""
    parts: list[tuple[str, list[str]]] = [("", [])]
    for line in inspect.cleandoc(doc).splitlines():
        match = HEAD.match(line)
        if match:
            parts.append((match[1], [match[2]] if match[2] else []))
        elif parts[-1][0] and line.strip() and not line.startswith(" "):
            parts.append(("", [line]))  # a section ends where the indent does
        else:
            parts[-1][1].append(line)
    return [Section(head, textwrap.dedent("\n".join(lines)).strip("\n")) for head, lines in parts]


def markdown(doc: str) -> str:
    """A docstring as a page's text."""
    parts: list[str] = []
    for section in sections(doc):
        if section.head in ("Args", "Raises", "Attributes", "Fields") and section.items():
            listed = "\n".join(f"- {_names(name)}: {text}" for name, text in section.items())
            parts.append(f"**{section.head}**\n\n{listed}")
        elif section.head:
            parts.append(f"**{section.head}**\n\n{_examples(section.text)}")
        else:
            parts.append(_examples(section.text))
    return "\n\n".join(part for part in parts if part.strip())


def _names(names: str) -> str:
    return ", ".join(f"`{name.strip()}`" for name in names.split(","))


def _examples(text: str) -> str:
    """Doctests and indented blocks become fenced code: their own text is left as it is."""
    lines, out, k = text.splitlines(), [], 0
    while k < len(lines):
        begins = lines[k].lstrip().startswith(">>>") or (
            lines[k].startswith("    ") and (not k or not lines[k - 1].strip())
        )
        if not begins:
            out.append(lines[k])
            k += 1
            continue
        end = k
        tests = lines[k].lstrip().startswith(">>>")
        while end < len(lines) and (
            lines[end].strip() if tests else lines[end].startswith("    ") or not lines[end].strip()
        ):
            end += 1
        block = textwrap.dedent("\n".join(lines[k:end])).rstrip()
        out += ["", f"```{'pycon' if tests else 'text'}", block, "```", ""]
        k = end
    return "\n".join(out).strip("\n")


def summary(thing: Any) -> str:
    """The first sentence of a docstring."""
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) ", text)[0]


# --------------------------------------------------------------------------------------------------------------- API


def public_names() -> Iterator[tuple[str, str, Any]]:
    """Group, dotted name and object of everything that the reference describes."""
    for name in sordino.__all__:
        yield "sordino", f"sordino.{name}", getattr(sordino, name)
    for group, names in MORE.items():
        for name in names:
            module, _, attribute = name.partition(":")
            yield group, name.replace(":", "."), getattr(import_module(module), attribute)


def api() -> Iterator[tuple[str, str]]:
    tables: dict[str, list[str]] = {}
    pages: list[str] = []
    for group, name, thing in public_names():
        short = name.removeprefix("sordino.") if group == "sordino" else name.rpartition(".")[2]
        tables.setdefault(group, []).append(f"| [`{short}`]({short}.md) | {_cell(summary(thing))} |")
        pages.append(short)
        yield f"{short}.md", f"# {short}\n\n{described(name, thing)}\n"
    text = "# Python API\n\n```python\nimport sordino as so\n```\n\nEvery example on these pages is run by the tests.\n"
    for group, rows in tables.items():
        head = "" if group == "sordino" else f"\n## {group}\n"
        text += f"{head}\n| name | what it is |\n|---|---|\n" + "\n".join(rows) + "\n"
    yield "index.md", text + "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"


def described(name: str, thing: Any) -> str:
    """One public name: signature, docstring, and the members of classes and modules."""
    if isinstance(thing, ModuleType):
        functions = [
            (key, value)
            for key, value in vars(thing).items()
            if not key.startswith("_")
            and inspect.isfunction(value)
            and value.__module__ == thing.__name__
            and value.__doc__
        ]
        members = "\n\n".join(_object("function", f"{thing.__name__}.{key}", value) for key, value in functions)
        return f"Module `{thing.__name__}`.\n\n{markdown(thing.__doc__ or '')}\n\n{members}"
    if inspect.isclass(thing):
        return _object("class", name, thing, _members(thing))
    return _object("function", name, thing)


def _object(kind: str, name: str, thing: Any, members: str = "") -> str:
    body = f"{markdown(inspect.getdoc(thing) or '')}\n\n{members}".strip()
    return f"``````{{py:{kind}}} {name}{_signature(thing)}\n{body}\n``````"


def _signature(thing: Any) -> str:
    if inspect.isclass(thing) and issubclass(thing, Enum | BaseException):
        return ""
    try:
        text = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return "()"
    text = text.removesuffix(" -> None")
    text = re.sub(r"(sordino|torch|numpy|np|collections\.abc|typing|pathlib)(\.\w+)*\.(?=[A-Za-z])", "", text)
    return re.sub(r"<function (\w+).*?>|<(\w[\w.]*)[^>]*>", r"\1\2", text).replace("'", "").replace("  ", " ")


def _members(cls: type) -> str:
    parts: list[str] = []
    if issubclass(cls, Enum):
        values = "\n".join(f"- `{member.value}`" for member in cls)
        return f"**Values**\n\n{values}"
    fields = getattr(cls, "_fields", None) or (
        [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    )
    if fields and not any(s.head in ("Attributes", "Fields", "Args") for s in sections(inspect.getdoc(cls) or "")):
        comments = source_comments(cls)
        listed = "\n".join(f"- `{name}`" + (f": {comments[name]}" if comments.get(name) else "") for name in fields)
        parts.append(f"**Fields**\n\n{listed}")
    for key, value in vars(cls).items():
        thing = getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value)))
        if key.startswith("_") or key in fields or not inspect.isfunction(thing) or not inspect.getdoc(thing):
            continue
        kind = "method" if inspect.isfunction(value) or isinstance(value, staticmethod | classmethod) else "property"
        title = f"{key}{_signature(thing).replace('(self, ', '(').replace('(self)', '()')}" if kind == "method" else key
        parts.append(f"`````{{py:{kind}}} {title}\n{markdown(inspect.getdoc(thing) or '')}\n`````")
    return "\n\n".join(parts)


def source_comments(cls: type) -> dict[str, str]:
    """What the source says beside or above each field."""
    try:
        lines = inspect.getsource(cls).splitlines()
    except (OSError, TypeError):
        return {}
    comments: dict[str, str] = {}
    for line in lines:
        match = re.match(r"^    (\w+): [^#]*?(?:  # (.*))?$", line)
        if match:
            comments[match[1]] = match[2] or ""
    return comments


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# ------------------------------------------------------------------------------------------------------ command line


def commands() -> Iterator[tuple[str, str]]:
    """One page per command, from the parsers."""
    parser = cli._parser(cli.COMMANDS)
    actions = _commands(parser)
    rows = [f"| [`sordino {name}`]({name}.md) | {_cell(_help(parser, name))} |" for name in actions]
    for name, each in actions.items():
        yield f"{name}.md", f"# sordino {name}\n\n{_command(each, 2)}\n"
    text = "# Command line\n\n| command | what it does |\n|---|---|\n" + "\n".join(rows)
    text += (
        f"\n\n```text\n{(parser.epilog or '').strip()}\n```\n\n```{{toctree}}\n:hidden:\n\n"
        + "\n".join(actions)
        + "\n```\n"
    )
    yield "index.md", text


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _help(parser: argparse.ArgumentParser, name: str) -> str:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action._choices_actions:
                if each.dest == name:
                    return each.help or ""
    return ""


def _command(parser: argparse.ArgumentParser, level: int) -> str:
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=88)
    usage = parser.format_usage().removeprefix("usage: ").strip()
    parts = [_description(parser.description or ""), f"```text\n{usage}\n```"]
    inner = _commands(parser)
    rows = [
        f"| {_invocation(action)} | {_flags(_cell(_expanded(parser, action)))} |"
        for action in sorted(parser._actions, key=lambda action: bool(action.option_strings))  # positional ones first
        if action.help is not argparse.SUPPRESS
        and not isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
    ]
    if rows:
        parts.append("| argument | meaning |\n|---|---|\n" + "\n".join(rows))
    if parser.epilog:
        parts.append(f"```text\n{parser.epilog.strip()}\n```")
    for name, each in inner.items():
        parts.append(f"{'#' * level} {parser.prog} {name}\n\n{_command(each, level + 1)}")
    return "\n\n".join(part for part in parts if part)


def _description(text: str) -> str:
    """Help text as Markdown: indented lines `  term   meaning`, with deeper indented continuations, become a list."""
    lines: list[str] = []
    for line in text.strip().splitlines():
        indent = len(line) - len(line.lstrip())
        if indent == 2:
            term, _, meaning = line.strip().partition("  ")
            if lines and lines[-1] and not lines[-1].startswith("-"):
                lines.append("")
            lines.append(f"- **{term}**: {meaning.strip()}" if meaning.strip() else f"- **{term}**:")
        elif indent and lines:
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return _flags("\n".join(lines))


def _flags(text: str) -> str:
    """Flags as code, because the typesetting of pages turns two hyphens into a dash."""
    return re.sub(r"(?<![`\w-])(--[a-z][a-z-]*)", r"`\1`", text)


def _invocation(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if action.option_strings and action.nargs != 0 else action.dest)
    value = " ".join(value) if isinstance(value, tuple) else str(value)
    if action.choices is not None and action.metavar is None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if not action.option_strings:
        return f"`{_cell(value)}`"
    words = action.option_strings if action.nargs == 0 else [f"{flag} {value}" for flag in action.option_strings]
    return ", ".join(f"`{_cell(word)}`" for word in words)


def _expanded(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = action.help or ""
    return parser._get_formatter()._expand_help(action) if "%" in text else text


# ----------------------------------------------------------------------------------------------------------- methods


def method_pages(notes: Path) -> Iterator[tuple[str, str]]:
    """One page per method: formula, guarantee and options from the docstring; notes by hand where there are any."""
    families: dict[str, list[str]] = {}
    for name, entry in methods.REGISTRY.items():
        families.setdefault(entry.family, []).append(f"| [`{name}`]({name}.md) | {_cell(entry.summary)} |")
        yield f"{name}.md", method_page(name, entry, notes / f"{name}.md")
    text = "# Methods\n\nEach page states what the method releases, what is proved, and its options. "
    text += "[Choosing a method](../../methods.md) compares them.\n"
    for family, rows in families.items():
        text += (
            f"\n## {family[0].upper()}{family[1:]}\n\n| method | what it does |\n|---|---|\n" + "\n".join(rows) + "\n"
        )
    yield "index.md", text + "\n```{toctree}\n:hidden:\n\n" + "\n".join(methods.REGISTRY) + "\n```\n"


def _items(text: str) -> str:
    """Lines "Name: text", each with its indented continuation, as a list."""
    lines = [
        line if line.startswith(" ") else re.sub(r"^([A-Z][a-z ]+):", r"- **\1**:", line) for line in text.splitlines()
    ]
    return "\n".join(f"  {line.strip()}" if line.startswith(" ") else line for line in lines)


def method_page(name: str, entry: Any, note: Path) -> str:
    doc = sections(inspect.getdoc(entry.factory) or "")
    meanings = {
        key: text for s in doc if s.head == "Args" for names, text in s.items() for key in re.split(r",\s*", names)
    }
    rows = [f"| `{key}` | `{value}` | {_cell(meanings.get(key, ''))} |" for key, value in entry.options.items()]
    text = "\n\n".join(markdown(_rejoined(s)) for s in doc if not s.head)
    python = "\n\n".join(markdown(_rejoined(s)) for s in doc if s.head in ("Raises", "Example"))
    parts = [f"# {name}", text]
    releases, remarks = noted(note)
    guarantee = "\n\n".join(_items(section.text) for section in doc if section.head == "Guarantee") or releases
    if guarantee:
        parts.append(f"## Guarantee\n\n{guarantee}")
    parts.append("## Certified for\n\n" + certified(name, entry))
    parts.append(
        f"## Facts\n\n- Family: {entry.family}\n- Source: {entry.paper}\n- Default number of rounds: {entry.rounds}"
    )
    if rows:
        parts.append("## Options\n\n| option | default | meaning |\n|---|---|---|\n" + "\n".join(rows))
    if remarks:
        parts.append(f"## Notes\n\n{remarks}")
    if python:
        parts.append(f"## In Python\n\n{python}")
    return "\n\n".join(parts) + "\n"


def noted(note: Path) -> tuple[str, str]:
    """Notes by hand: what is released and why it is private, which a docstring's Guarantee replaces; and the rest."""
    text = note.read_text(encoding="utf-8").strip() if note.exists() else ""
    start = text.find("**What it releases.**")
    end = min((at for at in map(text.find, ("**Every default", "**When to use it.**")) if at >= 0), default=len(text))
    return text[max(start, 0) : end].strip(), text[end:].strip()


def _rejoined(section: Section) -> str:
    return f"{section.head}:\n{textwrap.indent(section.text, '    ')}" if section.head else section.text


def certified(name: str, entry: Any) -> str:
    """The (unit, trust) pairs that the method proves with its default options."""
    lines = []
    for unit in entry.units:
        try:
            method = methods.build(name, unit)
        except sordino.SordinoError as error:
            lines.append(f"- {unit} level: {error}")
            continue
        proved = [trust.value for u, trust in sorted(method.proves) if u is unit]
        trusts = ", ".join(f"`{trust}`" for trust in proved) if proved else "nothing"
        lines.append(f"- {unit} level, default options: {trusts}")
        if method.caveat and len(proved) < len(sordino.Trust):
            lines.append(f"  ({method.caveat})")
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------------- spec


def spec_page() -> str:
    """Every key of a run: its type and default from the code, its meaning from the flag's help or the comment."""
    from sordino.cli.run import RUN_FLAGS

    help_of: dict[str, tuple[str, str]] = {row[1]: (row[0], row[2]) for row in RUN_FLAGS}
    comments = source_comments(specs.Spec)
    rows = []
    for field in dataclasses.fields(specs.Spec):
        if field.name == "options":
            continue
        _, meaning = help_of.get(field.name, ("", ""))
        meaning = meaning or MEANINGS.get(field.name, "") or comments.get(field.name, "")
        default = (
            "" if field.default is dataclasses.MISSING or field.default in (None, "") else f"`{_toml(field.default)}`"
        )
        rows.append(
            f"| `{field.name}` | {_cell(str(field.type)).replace(' | None', '')} | {default} | {_cell(meaning)} |"
        )
    return (
        "# Keys of a run\n\n"
        "`sordino run SPEC.toml` reads a flat TOML file. `--set KEY=VALUE` sets any key; the most frequent ones have a "
        "flag of their own ([sordino run](cli/run.md)). The options of a method stand beside these keys in the same "
        "file ([methods](methods/index.md)). A run writes the complete list, with every default resolved, into "
        "`public/spec.toml`.\n\n| key | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n\n"
        "## Options of models\n\nThey stand beside the keys above ([networks](../deep.md)).\n\n"
        "| key | models | default | meaning |\n|---|---|---|---|\n" + "\n".join(_model_options()) + "\n"
    )


def _model_options() -> Iterator[str]:
    """One row per option of a registered model."""
    from sordino.models import registry

    owners: dict[str, list[str]] = {}
    defaults: dict[str, Any] = {}
    for name, entry in registry.REGISTRY.items():
        for option, declared in entry.options.items():
            owners.setdefault(option, []).append(f"`{name}`")
            defaults[option] = declared.default
    for option, names in owners.items():
        default = "" if defaults[option] is None else f"`{_toml(defaults[option])}`"
        yield f"| `{option}` | {', '.join(names)} | {default} | {_cell(MEANINGS[option])} |"


MEANINGS = {
    "normalize": "transformation of each record by itself: `none`, `l2` or `record` (default: the method's own)",
    "test_fraction": "part of the records that is held out for testing; it lies outside the guarantee",
    "sizes": "sizes of the clients: `equal`, or a law of the partition",
    "split_seed": "seed of the partition and of the first parameters; public",
    "divisor": "`pooled` weighs clients by their records, `client-mean` weighs them equally",
    "class_weights": "one weight per class, in the order of the labels, or `balanced`",
    "prevalence": "public share of each class, for `class_weights = balanced`; a schema gives it under `[target]`",
    "lora_rank": "rank of the adapters of a transformer",
    "lora_alpha": "scale of the adapters",
    "lora_dropout": "dropout of the adapters",
    "lora_targets": "last parts of the names of the layers that get adapters, as in `query,value` (default: Q, K, V)",
    "lora_variant": "what a round trains of the adapters: lora, freeze-a, alternating or fedsvd",
    "edges": "edges of the intervals of time; a schema gives them",
    "trees": "number of trees",
    "depth": "splits from the root of a tree to a leaf",
    "columns": "columns of the table that one tree divides",
    "loss": "loss of the trees, by default that of the labels",
    "widths": "numbers per column of the table; a schema gives them",
    "image": "layout of the images in rows, such as `32x32x3` or `3x32x32`",
    "side": "pixels that images are resized to",
    "mean": "of the pixels of each channel; it is subtracted",
    "std": "of the pixels of each channel; images are divided by it",
    "weights": "folder of the weights of a transformer, as `save_pretrained` writes it",
    "lora_every": "rounds per turn of A and of B, for lora_variant = alternating",
    "dtype": "`float32`, `float64`, or `bfloat16` for the passes through a network",
    "noise": "noise multiplier instead of `epsilon`: standard deviation of the summed noise over the clip",
    "client_epsilon": "a stricter epsilon for some clients, by name",
    "uncertified": '`true` runs what no proof covers; the certificate then says "not certified"',
    "schedule_seed": "seed of who takes part in which round",
}


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
