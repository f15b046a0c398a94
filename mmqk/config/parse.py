"""Reads YAML files and ``name=value`` words into frozen dataclasses. An error is a sentence that names the field."""

from __future__ import annotations

import dataclasses
import difflib
import re
import textwrap
import types
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from mmqk.model.ranges import default_of, entries, shortened
from mmqk.store import UserError, read_utf8

T = TypeVar("T")
MOST_NAMED = 4  # fields in a suggestion


class Leaf(NamedTuple):
    """A field that is not a group of fields: its type, its default and its text in the docstring."""

    hint: Any
    default: Any
    text: str


@lru_cache
def leaves(kind: type) -> dict[str, Leaf]:
    """Return the fields of a dataclass and of the dataclasses inside it, by dotted name."""
    hints: dict[str, Any] = get_type_hints(kind)
    found: dict[str, Leaf] = {}
    texts = dict(re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", kind.__doc__ or "", re.MULTILINE))
    for f in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[f.name]):
            found |= {f"{f.name}.{name}": leaf for name, leaf in leaves(hints[f.name]).items()}
        else:
            found[f.name] = Leaf(hints[f.name], default_of(f), " ".join(texts.get(f.name, "").split()))
    return found


class Fields:
    """The values that files and words give to the fields of a dataclass; a later value replaces an earlier one.

    Attributes:
        values: the values by dotted name of the field.
        files: the file of each value that a file gives.
        configs: all files, in their order.
    """

    def __init__(self, kind: type):
        self.kind, self.known = kind, leaves(kind)
        self.values: dict[str, Any] = {}
        self.files: dict[str, Path] = {}
        self.configs: list[Path] = []

    def add(self, given: Mapping[str, Any], file: Path | None = None, prefix: str = "") -> None:
        """Add nested or dotted fields.

        Raises:
            UserError: there is no such field, or a group of fields has a value.
        """
        for key, value in given.items():
            name = f"{prefix}{key}"
            inside = [known for known in self.known if known.startswith(f"{name}.")]
            if inside and isinstance(value, Mapping):
                self.add(value, file, f"{name}.")
                continue
            if inside:
                said = "empty" if value is None else shortened(value)
                raise UserError(f"{name} is {said}, but it is a group of fields: set one of them, such as {inside[0]}.")
            field = next((known for known in self.known if _is_or_in(name, known)), None)
            if field is None:
                raise UserError(self.unknown(name))
            if entry := name[len(field) + 1 :]:
                whole = self.values.get(field, self.known[field].default)
                if not isinstance(whole, Mapping):
                    raise UserError(self.unknown(name))
                value = {**whole, entry: value}
            self.values[field] = value
            self.files.pop(field, None)
            if file is not None:
                self.files[field] = file

    def add_file(self, file: Path) -> None:
        """Add the fields of a YAML file.

        Raises:
            UserError: the file cannot be read or has no fields, or a key is unknown or written twice.
        """
        self.configs.append(file)
        given = read_yaml(file, "run", "check the path after --config")
        try:
            self.add(given, file)
        except UserError as error:
            raise UserError(f"{file}: {error}") from error

    def add_words(self, argv: Sequence[str]) -> None:
        """Add the files of ``--config`` from left to right, then ``name=value``, ``--name=value`` and ``--name
        value``: a word replaces the value of a file, wherever it is.

        Raises:
            UserError: an error of `add` or `add_file`, or a word without a value.
        """
        rest, given = iter(argv), []
        for word in rest:
            name, equals, text = word.removeprefix("--").partition("=")
            is_group = word.startswith("--") and any(known.startswith(f"{name}.") for known in self.known)
            if not equals and name not in self.known and name != "config" and not is_group:
                raise UserError(self.unknown(name))
            if not equals:
                following = next(rest, None) if word.startswith("--") and name != "quiet" else None
                if name != "quiet" and (following is None or following.startswith("--")):
                    raise UserError(f"{name} has no value: write {name}=VALUE.")
                text = following or ("true" if name == "quiet" else "")
            if name == "config":
                self.add_file(Path(text))
                continue
            leaf = self.known.get(name)
            is_text = leaf is not None and str in _parts(leaf.hint) and text != "null"
            given.append({name: text if is_text else yaml_value(name, text)})
        for each in given:
            self.add(each)

    def unknown(self, name: str) -> str:
        """Return the sentence about a name that is no field, with the fields that have a similar name."""
        plain = name.lstrip("-").replace("-", "_")
        near = [known for known in self.known if known.endswith(f".{plain}")]
        if not 1 <= len(near) <= MOST_NAMED:
            last = {known.rpartition(".")[2]: known for known in self.known}
            names = {*self.known, *(known.rpartition(".")[0] for known in self.known)}
            names -= {"", plain.rpartition(".")[0]}
            near = difflib.get_close_matches(plain, sorted(names), n=1, cutoff=0.6) or [
                last[leaf] for leaf in difflib.get_close_matches(plain, last, n=1, cutoff=0.75)
            ]
        groups = any("." in known for known in self.known)
        listed = "--help lists the fields." if groups else f"use one of {', '.join(self.known)}."
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else listed
        return f"There is no field '{name}': {hint}"

    def build(self) -> Any:
        """Return the dataclass.

        Raises:
            UserError: a value has the wrong type or is refused by the dataclass; the message names its file.
        """
        nested: dict[str, Any] = {}
        try:
            for name, value in self.values.items():
                inner = nested
                *groups, last = name.split(".")
                for group in groups:
                    inner = inner.setdefault(group, {})
                inner[last] = _fit(name, value, self.known[name].hint)
            return _adapter(self.kind).validate_python(nested)
        except ValidationError as error:
            sentence = _sentence(error, self.known, self.values)
        except ValueError as error:
            sentence = str(error)
        # The values of a conflict may come from a file and a flag: then no file is at fault.
        words = {word.strip(".") for word in re.findall(r"[\w.]+", sentence)}
        files = {self.files.get(name) for name in self.values if any(_is_or_in(word, name) for word in words)}
        file = files.pop() if len(files) == 1 else None
        raise UserError(f"{file}: {sentence}" if file else sentence)


def parse_fields(kind: type[T], record: Mapping[str, Any]) -> T:
    """Return a frozen dataclass from plain data. ``mmqk ablate`` uses it for parts of a grid.

    Raises:
        UserError: an unknown field, a wrong type, or a value that the dataclass refuses.
    """
    fields = Fields(kind)
    fields.add(record)
    built: T = fields.build()
    return built


def help_of(kind: type) -> str:
    """Return a line with type and default for every field of a dataclass, and its text."""
    lines = []
    for name, leaf in leaves(kind).items():
        default = yaml.safe_dump(leaf.default, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
        choices = [", ".join(get_args(part)) for part in _parts(leaf.hint) if get_origin(part) is Literal]
        kinds = [getattr(part, "__name__", "") for part in _parts(leaf.hint) if get_origin(part) is not Literal]
        said = " | ".join([*choices, *kinds]).replace("NoneType", "null")
        lines.append(f"  {name}={default}  ({said})")
        lines += textwrap.wrap(leaf.text, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _is_or_in(name: str, field: str) -> bool:
    return name == field or name.startswith(f"{field}.")


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


_adapter = lru_cache(TypeAdapter)


def _fit(name: str, value: Any, hint: Any) -> Any:
    """Return a number as text for a field of text, and refuse true and false for a field of numbers, where pydantic
    would read them as 1 and 0."""
    each = {name: value, **{f"{name}{suffix}": entry for suffix, entry in entries(value).values()}}
    wrong = [entry for entry, inner in each.items() if isinstance(inner, bool)]
    if wrong and not {bool, Any} & _inside(hint):
        raise ValueError(f"{wrong[0]} is {shortened(each[wrong[0]])}: true and false are of the wrong type.")
    return str(value) if hint is str and isinstance(value, int | float) else value


def _inside(hint: Any) -> set[Any]:
    """Return a type and the types inside it."""
    return {hint}.union(*(_inside(part) for part in get_args(hint) if get_origin(hint) is not Literal))


def _sentence(error: ValidationError, known: Mapping[str, Leaf], values: Mapping[str, Any]) -> str:
    """Return the first error as a sentence that names the field, and the entry inside it."""
    errors = error.errors(include_url=False)
    if "error" in errors[0].get("ctx", {}):  # raised by the dataclass itself
        return str(errors[0]["ctx"]["error"])
    place = errors[0]["loc"]
    path = ".".join(map(str, place))
    name = next((field for field in known if _is_or_in(path, field)), path)
    if errors[0]["type"] == "missing":
        return f"{name} is missing."
    depth, value = name.count(".") + 1, values.get(name)
    while depth < len(place) and place[depth] in (inside := entries(value)):
        suffix, value = inside[place[depth]]
        name, depth = name + suffix, depth + 1
    # A field of several types has one error for each of them.
    wrong = [each["msg"].replace("tuple", "list") for each in errors if each["loc"][:depth] == place[:depth]]
    messages = [message.removeprefix("Input should be ").partition(", unable to parse")[0] for message in wrong]
    given = "empty" if errors[0]["input"] is None else shortened(errors[0]["input"])
    return f"{name} is {given}: it must be {' or '.join(dict.fromkeys(messages))}."


def read_yaml(file: Path, kind: str, advice: str) -> dict[str, Any]:
    """Return the content of the YAML of a run or a grid (``kind``); ``advice`` ends the error of a file that is
    missing.

    Raises:
        UserError: the file cannot be read, is not a mapping, or has a key twice.
    """
    try:
        content = yaml.load(read_utf8(file, advice), Loader=Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
            reason = f"line {error.problem_mark.line + 1}: {error.problem}"
        raise UserError(f"{file} is not the YAML of a {kind} ({reason}): check it.") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} sets no field: give a YAML mapping of fields to values.")
    return content


def yaml_value(name: str, text: str) -> Any:
    """Return the value of a word, read as YAML.

    Raises:
        UserError: the text is no YAML.
    """
    try:
        return yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UserError(f"{name} is {shortened(text)}, which is not the YAML of a value.") from None


class Loader(yaml.SafeLoader):
    """YAML loader for runs and grids.

    Only decimal numbers are numbers, 1e-3 among them. YAML 1.1 also reads 0x10 (16), 010 (8) and 1:30 (90) as numbers,
    and does not read 1e-3. They are text here, and so are dates and integers of 19 digits or more. A key that is
    written twice is refused, and so is one that is not text, such as on, which YAML reads as true.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # These are the written keys. A merge key (``<<``) later adds others, which the written keys override.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"):
            problem = f"the key {key.value!r} is written twice: remove one" if key.value in seen else ""
            if key.tag != yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG:
                problem = f"the key {key.value} is not text in YAML: put it in quotes"
            if problem:
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return node


_REFUSED = {
    "tag:yaml.org,2002:int": r"(?![-+]?0[0-9a-zA-Z_]|[^:]*:|[-+]?[0-9_]{19})",
    "tag:yaml.org,2002:float": r"(?![^:]*:)",
    "tag:yaml.org,2002:timestamp": r"(?!)",
}
Loader.yaml_implicit_resolvers = {
    first: [(tag, re.compile(f"{_REFUSED.get(tag, '')}(?:{known.pattern})", known.flags)) for tag, known in each]
    for first, each in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
