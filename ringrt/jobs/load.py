"""From a YAML file and `--set` overrides to a `Job`, or to one clear line for each mistake."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from ringrt.errors import ConfigError, ConfigErrors
from ringrt.jobs.schema import FileInput, Job, RandomInput

_TAGS = {"file": FileInput, "random": RandomInput}


@dataclass(frozen=True, slots=True)
class LoadedJob:
    """A job, and the folder that its paths are relative to."""

    job: Job
    folder: Path


def load_job(path: Path, overrides: Sequence[str] = ()) -> LoadedJob:
    """Read a job file. `overrides` are `dotted.key=value`, the value in YAML. Raises
    `ConfigError`, or `ConfigErrors` for several mistakes."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), "a readable job file", _reason(error)) from None
    values = _parse(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(str(path), "a mapping of keys", _kind(values))
    for override in overrides:
        _apply(values, override)
    return LoadedJob(validate(values), path.parent)


def validate(values: Mapping[str, Any]) -> Job:
    """The job that the values describe."""
    try:
        return Job.model_validate(values)
    except ValidationError as error:
        found = [_as_config_error(item) for item in error.errors()]
        raise (found[0] if len(found) == 1 else ConfigErrors(found)) from None


def job_schema() -> dict[str, Any]:
    """The JSON Schema of job files, for editors."""
    schema = TypeAdapter(Job).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


class _StrictLoader(yaml.SafeLoader):
    """YAML, but a key that is given twice is a mistake (YAML's own loader takes the last one),
    and 1e-3 is a number (YAML 1.1 wants 1.0e-3)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # Before merge keys (<<) are resolved, which keys may override.
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            line = node.start_mark.line + 1
            raise ConfigError(twice[0], "each key once", f"it twice in the block at line {line}")
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(where, "YAML", f"{line}{problem}") from None


def _apply(values: dict[str, Any], override: str) -> None:
    """Set one dotted key, making the sections on its way."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError("--set", "key=value", repr(override))
    *sections, name = key.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {key}", f"{section} to be a section", _kind(inner))
        values = inner
    values[name] = _parse(text, f"--set {key}")


#: pydantic's error types, as what was expected. Others keep pydantic's own words.
_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a section of keys",
    "model_type": "a section of keys",
    "model_attributes_type": "a section of keys",
    "finite_number": "a finite number",
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le}",
    "greater_than": "more than {gt:g}",
    "literal_error": "{expected}",
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
    "union_tag_invalid": "{expected_tags}",
    "union_tag_not_found": "a key source: 'file' or 'random'",
}


def _as_config_error(item: Mapping[str, Any]) -> ConfigError:
    # Within `input` pydantic names the kind of source, which is no key of the file.
    location = list(item["loc"])
    if location[:1] == ["input"] and location[1:2] and location[1] in _TAGS:
        del location[1]
    key = ".".join(str(part) for part in location) or "job"
    kind, context = item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        return ConfigError(key, f"one of {', '.join(_siblings(item['loc']))}", "an unknown key")
    if kind == "missing":
        return ConfigError(key, "a value", "nothing")
    if kind == "union_tag_invalid":
        key += ".source"
        return ConfigError(key, str(context["expected_tags"]), repr(context["tag"]))
    expected = _EXPECTED[kind].format(**context) if kind in _EXPECTED else item["msg"]
    return ConfigError(key, expected, _kind(item["input"]))


def _siblings(location: Iterable[str | int]) -> list[str]:
    """The keys that are known where an unknown one was found."""
    model: Any = Job
    for part in list(location)[:-1]:
        known = part in model.model_fields
        model = _section(model, str(part)) if known else _TAGS[str(part)]
    return list(model.model_fields)


def _section(model: type[BaseModel], name: str) -> Any:
    annotation: Any = model.model_fields[name].annotation
    options = getattr(annotation, "__args__", (annotation,))
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), model)


def _kind(value: Any) -> str:
    """A value for an error message: short ones themselves, long ones by their kind."""
    if isinstance(value, dict):
        return "a section of keys"
    if isinstance(value, list) and len(value) > 3:
        return f"a list of {len(value)}"
    return "nothing" if value is None else repr(value)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
