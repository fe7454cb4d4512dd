"""Every message that crosses a process border. Frozen, keyword-only, versioned; no defaults that decide anything.

The gateway resolves every parameter (C1.7): a worker that reads a `GenerateRequest` chooses nothing. Token lists are
packed little-endian u32 (`pack_tokens`), so that a prompt of 30,000 tokens is 120 kB and not a list of boxed integers.

Units are in the names: `_ns` nanoseconds since the epoch, `_s` seconds, `_bytes` bytes. Positions are absolute token
positions of the sequence; offsets count completion tokens of one choice.

    base       what all stand on          requests   gateway to workers        journal    a request's token stream
    workers    heartbeat and audit        broker     who a key is, all calls   entries    the broker's prefix entries
    keyed      requests told again

Import from here: which module a message stands in is not part of its name.
"""

from shared.protocol.messages.base import (
    Failure,
    Message,
    Part,
    Reply,
    pack_tokens,
    unpack_tokens,
)
from shared.protocol.messages.broker import (
    Authenticate,
    BrokerCall,
    BrokerReply,
    Done,
    Identity,
)
from shared.protocol.messages.entries import (
    Abort,
    Commit,
    EntryRef,
    Freed,
    Lease,
    LeaseReply,
    Lookup,
    LookupReply,
    Release,
    Reserve,
    ReserveReply,
    Withdraw,
    WithdrawReply,
)
from shared.protocol.messages.journal import (
    ChoiceEnd,
    FinishReason,
    Frame,
    PromptScores,
    SpecTelemetry,
    Started,
    StreamMessage,
    Terminal,
    TokenLogprobs,
)
from shared.protocol.messages.keyed import (
    AnswerSheet,
    Find,
    Forget,
    Recall,
    Remember,
    Remembered,
)
from shared.protocol.messages.requests import (
    CachePlan,
    CancelRequest,
    ClaimCheck,
    GenerateRequest,
    NamespaceParts,
    Priority,
    Reuse,
    Sampling,
    Speculation,
)
from shared.protocol.messages.workers import (
    AuditCall,
    AuditReply,
    Heartbeat,
    HeldEntry,
)

__all__ = [
    "Abort",
    "AnswerSheet",
    "AuditCall",
    "AuditReply",
    "Authenticate",
    "BrokerCall",
    "BrokerReply",
    "CachePlan",
    "CancelRequest",
    "ChoiceEnd",
    "ClaimCheck",
    "Commit",
    "Done",
    "EntryRef",
    "Failure",
    "Find",
    "FinishReason",
    "Forget",
    "Frame",
    "Freed",
    "GenerateRequest",
    "Heartbeat",
    "HeldEntry",
    "Identity",
    "Lease",
    "LeaseReply",
    "Lookup",
    "LookupReply",
    "Message",
    "NamespaceParts",
    "Part",
    "Priority",
    "PromptScores",
    "Recall",
    "Release",
    "Remember",
    "Remembered",
    "Reply",
    "Reserve",
    "ReserveReply",
    "Reuse",
    "Sampling",
    "SpecTelemetry",
    "Speculation",
    "Started",
    "StreamMessage",
    "Terminal",
    "TokenLogprobs",
    "Withdraw",
    "WithdrawReply",
    "pack_tokens",
    "unpack_tokens",
]
