"""Trains the pocket model's byte-level BPE and writes tokenizer.json and tokenizer_config.json.

Digits split singly, so that numbers of any length copy digit by digit. The three control tokens are special (hidden
when decoding); the tool and think marks are plain added tokens, so that a parser sees them in the decoded text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

FOLDER: Final = Path(__file__).parent.parent
VOCABULARY: Final = 4096
CONTROL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def texts(paths: list[Path], limit_chars: int) -> Iterator[str]:
    """Texts of JSON-lines files, at most `limit_chars` of each file."""
    for path in paths:
        left = limit_chars
        for line in path.open():
            text = json.loads(line)["text"]
            left -= len(text)
            if left < 0:
                break
            yield text


def train(paths: list[Path], limit_chars: int) -> Tokenizer:
    """A tokenizer with exactly VOCABULARY ids; control tokens and marks come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in CONTROL]
        + [AddedToken(name, special=False, normalized=False) for name in MARKS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(paths, limit_chars), trainer)
    return tokenizer


def save(tokenizer: Tokenizer) -> None:
    """Writes both files; clears the `special` flag that the trainer puts on every added token."""
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    (FOLDER / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False, indent=None) + "\n")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="JSON-lines files with a `text` field")
    parser.add_argument("--limit-chars", type=int, default=8_000_000)
    arguments = parser.parse_args()
    tokenizer = train(arguments.files, arguments.limit_chars)
    save(tokenizer)
    print("vocabulary", tokenizer.get_vocab_size())


if __name__ == "__main__":
    main()
