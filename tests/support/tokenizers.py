# SPDX-License-Identifier: Apache-2.0
"""Tokenizers for tiny test targets: a token a byte, or numbered words where the vocabulary is smaller."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
PAD_ID, BOS_ID, EOS_ID = range(3)
BYTE_VOCABULARY = len(SPECIAL_TOKENS) + 256
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of exactly `vocab_size` ids, ids 0..2 special.

    From 259 ids on each byte is a token (text round-trips); below that the tokens are the words `t3`, `t4`, ...
    Ids beyond the bytes are words that no text produces.
    """
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    if vocab_size >= BYTE_VOCABULARY:
        for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
            vocabulary[character] = len(vocabulary)
        for index in range(len(vocabulary), vocab_size):
            vocabulary[f"<extra_{index}>"] = index
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        for index in range(len(vocabulary), vocab_size):
            vocabulary[f"t{index}"] = index
        tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=SPECIAL_TOKENS[0]))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[PAD_ID],
        bos_token=SPECIAL_TOKENS[BOS_ID],
        eos_token=SPECIAL_TOKENS[EOS_ID],
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    make_tokenizer(vocab_size).save_pretrained(directory)
