"""How a process proves itself to NATS, and whom it trusts."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from shared.config import CommonSettings
from shared.errors import Unavailable


@dataclass(frozen=True, kw_only=True)
class Access:
    """What the URL says (user, password, token) is used when nothing is given here."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    credentials_file: Path | None = None  # a NATS .creds file; needs the package nkeys
    tls: ssl.SSLContext | None = None

    @staticmethod
    def of(common: CommonSettings) -> Access:
        """From the settings. Raises Unavailable: a TLS file is not what it should be; the variable is named."""
        return Access(
            user=common.nats_user,
            password=common.nats_password.get_secret_value() if common.nats_password else None,
            token=common.nats_token.get_secret_value() if common.nats_token else None,
            credentials_file=common.nats_credentials_file,
            tls=_tls(common),
        )


def _tls(common: CommonSettings) -> ssl.SSLContext | None:
    """Whom to trust and what to show; null = what the URL's scheme brings. Raises Unavailable."""
    if not common.nats_tls_ca_file and not common.nats_tls_cert_file:
        return None
    try:
        context = ssl.create_default_context(cafile=common.nats_tls_ca_file)
    except (ssl.SSLError, OSError) as error:
        raise Unavailable(
            f"BURSTLINE_NATS_TLS_CA_FILE: {common.nats_tls_ca_file} holds no certificates in PEM"
        ) from error
    if common.nats_tls_cert_file:
        try:
            context.load_cert_chain(common.nats_tls_cert_file, common.nats_tls_key_file, _no_password)
        except (ssl.SSLError, OSError) as error:
            raise Unavailable(
                f"BURSTLINE_NATS_TLS_CERT_FILE, BURSTLINE_NATS_TLS_KEY_FILE: no certificate in PEM with its key, without a "
                f"pass phrase, in {common.nats_tls_cert_file}, {common.nats_tls_key_file}"
            ) from error
    return context


def _no_password() -> str:
    """For a key with a pass phrase: fail, rather than ask the terminal of a service."""
    return ""
