"""Small tokenizers of the kinds whose decoding is not token by token."""

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel, WordPiece
from transformers import PreTrainedTokenizerFast

END = "<end>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: a token is a byte, or two that stand in different characters as well."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    end_of_one_start_of_next = ("Ł", "ð")  # bytes 0x9F and 0xF0
    vocabulary["".join(end_of_one_start_of_next)] = len(vocabulary)
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[end_of_one_start_of_next]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def marker_tokenizer() -> PreTrainedTokenizerFast:
    """Words with a marker where a space stands before them, and bytes where no word fits."""
    words = ["▁", "▁▁", "▁one", "▁two", "three", "▁four", ".", "n", "'t", "é"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="▁"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """Pieces of words, and transformers' clean-up of the spaces between them."""
    pieces = ["[UNK]", "one", "two", "##s", "##ish", ".", ",", "'", "s", "n't", "'re", "m", "!"]
    tokenizer = Tokenizer(WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True)
