"""The first schema.

Revision ID: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("disabled", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_table(
        "usage",
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("api_key", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("finish", sa.Text(), nullable=False),
        sa.Column("cancel_reason", sa.Text(), nullable=True),
        sa.Column("failure_code", sa.Text(), nullable=True),
        sa.Column("cache_decision", sa.Text(), nullable=False),
        sa.Column("exact", sa.Boolean(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("request", name=op.f("pk_usage")),
    )
    op.create_index("ix_usage_tenant", "usage", ["tenant", "at"], unique=False)
    op.create_table(
        "workers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("last_seen", sa.DateTime(timezone=True), nullable=False),
        sa.Column("beat_ns", sa.BigInteger(), nullable=False),
        sa.Column("reaped", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant"], ["tenants.id"], name=op.f("fk_api_keys_tenant"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("digest", name=op.f("uq_api_keys_digest")),
    )
    op.create_index(op.f("ix_api_keys_tenant"), "api_keys", ["tenant"], unique=False)
    op.create_table(
        "entries",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("root", sa.LargeBinary(), nullable=False),
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.Column("layout_version", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("parent", sa.LargeBinary(), nullable=True),
        sa.Column("splits", sa.LargeBinary(), nullable=True),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("parent_position", sa.Integer(), nullable=False),
        sa.Column("state_bytes", sa.BigInteger(), nullable=False),
        sa.Column("kv_bytes", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reservation", sa.Text(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("reserved_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_used", sa.DateTime(timezone=True), nullable=False),
        sa.Column("hits", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "(state = 'reserved') = (reserved_until IS NOT NULL)", name=op.f("ck_entries_reserved_until")
        ),
        sa.CheckConstraint(
            "state IN ('reserved', 'live', 'evicting', 'rows')", name=op.f("ck_entries_state")
        ),
        sa.CheckConstraint(
            "parent_position >= 0 AND parent_position < position", name=op.f("ck_entries_positions")
        ),
        sa.CheckConstraint("state_bytes >= 0 AND kv_bytes >= 0", name=op.f("ck_entries_bytes")),
        sa.ForeignKeyConstraint(
            ["tenant"], ["tenants.id"], name=op.f("fk_entries_tenant"), ondelete="RESTRICT"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_entries")),
        sa.UniqueConstraint("reservation", name=op.f("uq_entries_reservation")),
        sa.UniqueConstraint("root", "key", "layout_version", name=op.f("uq_entries_root_key_layout_version")),
    )
    op.create_index("ix_entries_children", "entries", ["root", "parent", "layout_version"], unique=False)
    op.create_index("ix_entries_key", "entries", ["key"], unique=False)
    op.create_index("ix_entries_lru", "entries", ["tenant", "last_used"], unique=False)
    op.create_index("ix_entries_reserved_until", "entries", ["reserved_until"], unique=False)
    op.create_table(
        "ledger",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("entry", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("kind IN ('reserve', 'settle', 'refund', 'evict')", name=op.f("ck_ledger_kind")),
        sa.ForeignKeyConstraint(
            ["tenant"], ["tenants.id"], name=op.f("fk_ledger_tenant"), ondelete="RESTRICT"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger")),
    )
    op.create_index("ix_ledger_entry", "ledger", ["entry"], unique=False)
    op.create_index(op.f("ix_ledger_tenant"), "ledger", ["tenant"], unique=False)
    op.create_table(
        "quotas",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("cache_bytes", sa.BigInteger(), nullable=False),
        sa.Column("used_bytes", sa.BigInteger(), nullable=False),
        sa.Column("max_concurrent", sa.Integer(), nullable=True),
        sa.CheckConstraint("cache_bytes >= 0", name=op.f("ck_quotas_cache_bytes")),
        sa.CheckConstraint("max_concurrent > 0", name=op.f("ck_quotas_max_concurrent")),
        sa.CheckConstraint("used_bytes >= 0", name=op.f("ck_quotas_used_bytes")),
        sa.ForeignKeyConstraint(
            ["tenant"], ["tenants.id"], name=op.f("fk_quotas_tenant"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("tenant", name=op.f("pk_quotas")),
    )
    op.create_table(
        "leases",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("entry", sa.BigInteger(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("expires", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["entry"], ["entries.id"], name=op.f("fk_leases_entry"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_leases")),
        sa.UniqueConstraint("entry", "worker", "request", name=op.f("uq_leases_entry_worker_request")),
    )
    op.create_index(op.f("ix_leases_expires"), "leases", ["expires"], unique=False)
    op.create_table(
        "replicas",
        sa.Column("entry", sa.BigInteger(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.CheckConstraint("tier IN ('worker')", name=op.f("ck_replicas_tier")),
        sa.ForeignKeyConstraint(
            ["entry"], ["entries.id"], name=op.f("fk_replicas_entry"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("entry", "worker", name=op.f("pk_replicas")),
    )
    op.create_index("ix_replicas_holder", "replicas", ["worker", "epoch"], unique=False)
    op.create_table(
        "idempotency",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("sheet", sa.LargeBinary(), nullable=False),
        sa.Column("expires", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "key", name=op.f("pk_idempotency")),
        sa.UniqueConstraint("request", name=op.f("uq_idempotency_request")),
    )
    op.create_index(op.f("ix_idempotency_expires"), "idempotency", ["expires"], unique=False)


def downgrade() -> None:
    op.drop_index(op.f("ix_idempotency_expires"), table_name="idempotency")
    op.drop_table("idempotency")
    op.drop_index("ix_replicas_holder", table_name="replicas")
    op.drop_table("replicas")
    op.drop_index(op.f("ix_leases_expires"), table_name="leases")
    op.drop_table("leases")
    op.drop_table("quotas")
    op.drop_index(op.f("ix_ledger_tenant"), table_name="ledger")
    op.drop_index("ix_ledger_entry", table_name="ledger")
    op.drop_table("ledger")
    op.drop_index("ix_entries_reserved_until", table_name="entries")
    op.drop_index("ix_entries_lru", table_name="entries")
    op.drop_index("ix_entries_key", table_name="entries")
    op.drop_index("ix_entries_children", table_name="entries")
    op.drop_table("entries")
    op.drop_index(op.f("ix_api_keys_tenant"), table_name="api_keys")
    op.drop_table("api_keys")
    op.drop_table("workers")
    op.drop_index("ix_usage_tenant", table_name="usage")
    op.drop_table("usage")
    op.drop_table("tenants")
