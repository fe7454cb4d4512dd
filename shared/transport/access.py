"""How a process proves itself to NATS, and whom it trusts."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from shared.config import CommonSettings


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
        """From the settings. Raises OSError or ssl.SSLError for files that cannot be read."""
        tls = None
        if common.nats_tls_ca_file or common.nats_tls_cert_file:
            tls = ssl.create_default_context(cafile=common.nats_tls_ca_file)
            if common.nats_tls_cert_file:
                tls.load_cert_chain(common.nats_tls_cert_file, common.nats_tls_key_file)
        return Access(
            user=common.nats_user,
            password=common.nats_password.get_secret_value() if common.nats_password else None,
            token=common.nats_token.get_secret_value() if common.nats_token else None,
            credentials_file=common.nats_credentials_file,
            tls=tls,
        )
