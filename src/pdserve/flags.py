"""What can be told from the configuration classes: the README's table, keys of files, the command line of a child."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import attrs
from cyclopts import Parameter

from pdserve.config import CommonConfig, DecodeConfig, MasterConfig, PrefillConfig, UpConfig, flag
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ROLES: dict[str, type[CommonConfig]] = {
    "master": MasterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "up": UpConfig,
}
SECRETS = ("cluster_token", "api_key")
"""Fields that travel to a child in its environment: a command line can be read by everybody on the machine."""


@attrs.frozen
class Flag:
    """One field of a configuration class, as a flag."""

    field: str
    aliases: tuple[str, ...]
    variables: tuple[str, ...]
    default: object
    help: str
    shown: bool

    @property
    def name(self) -> str:
        return flag(self.field)


def flags_of(config: type[CommonConfig]) -> list[Flag]:
    """The flags of a role, in the order of `--help`."""
    hints = get_type_hints(config, include_extras=True)
    found = []
    for field in attrs.fields(config):
        parameter = next((item for item in get_args(hints[field.name]) if isinstance(item, Parameter)), Parameter())
        found.append(
            Flag(
                field=field.name,
                aliases=tuple(parameter.alias or ()),
                variables=tuple(parameter.env_var or ()) or (variable(field.name),),
                default=field.default,
                help=parameter.help or "",
                shown=parameter.show is not False,
            )
        )
    return found


def variable(field: str) -> str:
    """The environment variable of a field."""
    return "PDSERVE_" + field.upper()


def variables() -> set[str]:
    """Every environment variable that is a flag of some role."""
    names: set[str] = set()
    for role in ROLES.values():
        for item in flags_of(role):
            names.update(item.variables)
            names.update(variable(alias.lstrip("-").replace("-", "_")) for alias in item.aliases)
    return names


def load_file(path: Path, role: str) -> dict[str, dict[str, Any]]:
    """Read a TOML file for `role`: keys at the top are for every role that has them, a table `[role]` is for that one.

    Raises `ConfigError` for a file that cannot be read and for a key that no role (or, in a table, that role) has.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    known = {name: _keys(config) for name, config in ROLES.items()}
    values: dict[str, Any] = {}
    tables: dict[str, Mapping[str, Any]] = {}
    for key, value in content.items():
        if key in ROLES and isinstance(value, dict):
            tables[key] = value
        elif not any(_key(key) in keys for keys in known.values()):
            raise ConfigError(f"--config {path}: unknown key {key!r}")
        elif _key(key) in known.get(role, ()):
            values[_key(key)] = value
    for name, table in tables.items():
        for key, value in table.items():
            if _key(key) not in known[name]:
                raise ConfigError(f"--config {path}: unknown key {key!r} in [{name}]")
            if name == role:
                values[_key(key)] = value
    for key, value in values.items():
        if value == []:  # would count as not given
            raise ConfigError(f"--config {path}: the list of {flag(key)} is empty")
    return {role: values}


def _key(key: str) -> str:
    return key.replace("-", "_")


def _keys(config: type[CommonConfig]) -> set[str]:
    return {_key(name.lstrip("-")) for item in flags_of(config) for name in (item.name, *item.aliases)}


def arguments(config: CommonConfig) -> list[str]:
    """The command line that gives a child this configuration: only what is not the default, and no secrets."""
    words: list[str] = []
    for field in attrs.fields(type(config)):
        value = getattr(config, field.name)
        if value == field.default or field.name in SECRETS:
            continue
        if isinstance(value, bool):
            words.append(flag(field.name) if value else "--no-" + flag(field.name).removeprefix("--"))
        else:
            words.append(f"{flag(field.name)}={value}")
    return words


def secrets(config: CommonConfig) -> dict[str, str]:
    """The environment variables that carry the secrets of this configuration."""
    found = {}
    for name in SECRETS:
        value = getattr(config, name, None)
        if value:
            found[variable(name)] = value if isinstance(value, str) else ",".join(value)
    return found


def markdown_table() -> str:
    """Every flag of every role as Markdown tables: first what all roles have, then what each adds."""
    common = {field.name for field in attrs.fields(CommonConfig)}
    sections: list[tuple[str, list[Flag]]] = [("All roles", [f for f in flags_of(MasterConfig) if f.field in common])]
    prefill, decode = flags_of(PrefillConfig), flags_of(DecodeConfig)
    shared = {f.field for f in prefill} & {f.field for f in decode}
    sections.append(("`master`", [f for f in flags_of(MasterConfig) if f.field not in common]))
    sections.append(("`prefill` and `decode`", [f for f in prefill if f.field in shared - common]))
    sections.append(("`prefill` only", [f for f in prefill if f.field not in shared]))
    sections.append(("`decode` only", [f for f in decode if f.field not in shared]))
    taken = {f.field for _, flags in sections for f in flags}
    sections.append(("`up` only", [f for f in flags_of(UpConfig) if f.field not in taken]))
    return "\n\n".join(f"**{title}**\n\n{_table(flags)}" for title, flags in sections)


def _table(flags: list[Flag]) -> str:
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for item in flags:
        if item.shown:
            text = item.help
            if item.aliases:
                text += " Also " + ", ".join(f"`{alias}`" for alias in item.aliases) + "."
            foreign = [name for name in item.variables if not name.startswith("PDSERVE_")]
            if foreign:
                text += " Also the variable " + ", ".join(f"`{name}`" for name in foreign) + "."
            rows.append(f"| `{item.name}` | {_default(item.default)} | {text} |")
    return "\n".join(rows)


def _default(value: object) -> str:
    match value:
        case bool():
            return "on" if value else "off"
        case float():
            return f"`{value:g}`"
        case None | "" | ():
            return ""
        case _:
            return f"`{value}`"
