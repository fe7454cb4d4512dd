"""Settings from the environment: parsed once, and a bad or unknown value stops the process with its name.

Each service derives one class from `Settings` with its own prefix (`BURSTLINE_GATEWAY_`, `BURSTLINE_WORKER_`,
`BURSTLINE_BROKER_`, `BURSTLINE_EMBEDDED_`); what all share is `CommonSettings`. Both are read by `load`. Units stand in
the names (`_s`, `_ms`, `_bytes`). Values are never echoed: an environment holds passwords.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

PREFIX: Final = "BURSTLINE_"
SERVICE_PREFIXES: Final = tuple(
    f"{PREFIX}{name}_" for name in ("GATEWAY", "WORKER", "BROKER", "EMBEDDED", "MODELS")
)
POCKET: Final = Path(__file__).resolve().parents[1] / "models" / "pocket"
"""The model that ships, in a checkout: what gateway and worker serve unless they are told otherwise."""

S = TypeVar("S", bound="Settings")


class Settings(BaseSettings):
    """Base of every settings class: frozen, from the environment only, empty variables count as unset."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="ignore",  # `load` names unknown variables itself, with a hint
        env_ignore_empty=True,
        hide_input_in_errors=True,
        validate_default=True,
    )

    @classmethod
    def prefix(cls) -> str:
        """The prefix of this class's variables."""
        return cls.model_config.get("env_prefix", "")

    @classmethod
    def variables(cls) -> tuple[str, ...]:
        """The names of the variables that this class reads."""
        return tuple(f"{cls.prefix()}{name}".upper() for name in cls.model_fields)


class CommonSettings(Settings):
    """What every service reads."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    nats_url: str = Field(default="nats://127.0.0.1:4222", repr=False)
    nats_user: str | None = None
    nats_password: SecretStr | None = None
    nats_token: SecretStr | None = None
    nats_credentials_file: Path | None = None
    nats_tls_ca_file: Path | None = None
    nats_tls_cert_file: Path | None = None
    nats_tls_key_file: Path | None = None
    database_url: SecretStr | None = None  # read by the broker and by administration alone
    data_dir: Path = Path("~/.burstline")
    otlp_endpoint: str | None = None  # base URL of an OTLP/HTTP receiver; None = the local trace store
    trace_sample_ratio: float = Field(default=1.0, ge=0, le=1)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    @field_validator("nats_url")
    @classmethod
    def _nats_scheme(cls, value: str) -> str:
        for server in value.split(","):
            _check_url(server.strip(), ("nats", "tls"))
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _otlp_scheme(cls, value: str | None) -> str | None:
        if value is not None:
            _check_url(value, ("http", "https"))
        return value

    @field_validator("database_url")
    @classmethod
    def _database_scheme(cls, value: SecretStr | None) -> SecretStr | None:
        schemes = ("postgresql://", "postgres://", "postgresql+asyncpg://")
        if value is not None and not value.get_secret_value().startswith(schemes):
            raise ValueError("must begin with postgresql://")
        return value

    @field_validator("nats_credentials_file", "nats_tls_ca_file", "nats_tls_cert_file", "nats_tls_key_file")
    @classmethod
    def _readable(cls, value: Path | None) -> Path | None:
        if value is not None and not (value.is_file() and os.access(value, os.R_OK)):
            raise ValueError("must be a file that this process may read")
        return value

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return Path(os.path.abspath(value.expanduser()))  # noqa: PTH100 - not resolve(): links stay as given


def _check_url(value: str, schemes: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is a URL with a host and one of `schemes`. Never quotes the value."""
    try:
        parts = urlsplit(value)
        _ = parts.port  # raises for a port that is no number or out of range
        good = parts.scheme in schemes and bool(parts.hostname)
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"must be a URL with a host and one of the schemes {', '.join(schemes)}")


def load(cls: type[S]) -> S:
    """Read `cls` from the environment.

    Every fault is one line on standard error: the variable, what it must be, and for an unknown name the nearest
    known one. Variables of other services' prefixes are their affair.

    Raises:
        SystemExit: status 2, after the faults were written.
    """
    faults = list(_unknown(cls, os.environ))
    instance: S | None = None
    try:
        instance = cls()
    except ValidationError as error:
        for fault in error.errors(include_url=False, include_input=False, include_context=False):
            faults.append(f"{_variable(cls, fault['loc'])}: {fault['msg'].removeprefix('Value error, ')}")
    except SettingsError as error:
        faults.append(f"{_unparsed(cls, error)}: must be JSON")
    if faults or instance is None:
        sys.stderr.write("".join(f"settings: {fault}\n" for fault in faults))
        raise SystemExit(2)
    return instance


def _unparsed(cls: type[Settings], error: SettingsError) -> str:
    """The variable whose list or mapping could not be parsed; the library tells it in its message alone."""
    field = re.search(r'field "(\w+)"', str(error))
    return _variable(cls, (field.group(1),) if field else ())


def _variable(cls: type[Settings], location: tuple[int | str, ...]) -> str:
    """The variable that a validation fault speaks of; a fault of the whole class names the prefix."""
    if not location:
        return f"{cls.prefix()}*"
    head, *rest = location
    return f"{cls.prefix()}{head}".upper() + "".join(f"[{part}]" for part in rest)


def _unknown(cls: type[Settings], names: Iterable[str]) -> Iterator[str]:
    """Lines about variables of `cls`'s prefix or of the common prefix that nobody reads."""
    known = {*cls.variables(), *CommonSettings.variables()}
    foreign = tuple(prefix for prefix in SERVICE_PREFIXES if prefix != cls.prefix())
    for name in sorted(map(str.upper, names)):
        if not name.startswith(PREFIX) or name.startswith(foreign) or name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        yield f"{name}: unknown" + (f"; did you mean {near[0]}?" if near else "")
