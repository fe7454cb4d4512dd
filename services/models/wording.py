"""The tokenizer of a GGUF file as Hugging Face's tokenizer.json and tokenizer_config.json.

Only byte-level BPE with a pre-tokenizer that is known here by the name that GGUF gives it: a wrong one would tokenise nearly
right, which nobody would notice.
"""

from __future__ import annotations

from typing import Any, Final

from services.models.faults import ModelFault
from services.models.gguf import GgufFile

_BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_PRE_TOKENIZERS: Final[dict[str, dict[str, Any]]] = {
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    },
}
"""`tokenizer.ggml.pre` -> how text is cut before BPE."""
_CONTROL: Final = 3
_TOKENS: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer(file: GgufFile) -> dict[str, Any]:
    """The content of tokenizer.json. Raises ModelFault for another kind of vocabulary, or a field that is missing."""
    kind, pre = file.text("tokenizer.ggml.model"), file.text("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ModelFault(f"{file.path}: a {kind!r} vocabulary cut as {pre!r} is not known here")
    tokens, kinds = file.strings("tokenizer.ggml.tokens"), file.integers("tokenizer.ggml.token_type")
    vocab = {text: token for token, text in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(kinds) != len(tokens):
        raise ModelFault(f"{file.path}: the vocabulary has a token twice, or not as many types as tokens")
    merges = [merge.split(" ") for merge in file.strings("tokenizer.ggml.merges")]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys():
            raise ModelFault(f"{file.path}: the merge {' '.join(merge)!r} is not of this vocabulary")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token, text) for text, token in vocab.items() if kinds[token] == _CONTROL],
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """The content of tokenizer_config.json, the chat template within. Raises ModelFault for a field that is missing or an id
    that no token has."""
    tokens = file.strings("tokenizer.ggml.tokens")
    named: dict[str, str | None] = {}
    for name, field in _TOKENS.items():
        key = f"tokenizer.ggml.{field}_token_id"
        if key not in file.fields:
            named[name] = None
            continue
        token = file.integer(key)
        if not 0 <= token < len(tokens):
            raise ModelFault(f"{file.path}: {key} is {token}, and the vocabulary has {len(tokens)} tokens")
        named[name] = tokens[token]
    return {
        "add_prefix_space": False,
        **named,
        "chat_template": file.text("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.integer("llama.context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _added(token: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, **flags, "special": True}
