#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the tokenizers and goldens of this folder with the Python package `tokenizers` (0.23).

    python3 make_goldens.py [SmolLM2.gguf]

Each <name>.json is a small tokenizer with the pre-tokenisation of a published family, trained on the sentences below. Each
<name>.golden.json holds what the package makes of `TEXTS`: ids with control tokens recognised ("ids"), ids with their text kept as
text ("plain_ids"), and the text that comes back ("decoded"). kjv.golden.json is for ../kjv-llama-2m/tokenizer.json. With a GGUF of
SmolLM2 (and the package `gguf`), smollm2.golden.json is for its own vocabulary.
"""
import json
import pathlib
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).parent
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN35 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

CORPUS = [
    "The river rises in the hills and reaches the sea after three hundred miles of slow brown water.",
    "She said that they'd come, that we'll see, that it's late and I'm tired; don't you think they've gone?",
    "In 1969, 2024 and 31415 there were 27 numbers, 8 of them odd, 100% of them counted, at 12:30 or 3.14 o'clock.",
    "def main(args):\n    for item in args:\n        print(item, end='\\n')\n\n\nreturn {'key': [1, 2, 3]}\r\n\tindented",
    "Der Fluss fließt über Größe und Höhe, für Mädchen und Jungen, naïve café, déjà vu, São Paulo, Ångström.",
    "Река течёт медленно, и люди идут вдоль неё. Η θάλασσα είναι ήσυχη. نهر طويل. नदी धीरे बहती है।",
    "大きな川がゆっくり流れる。河水慢慢地流。강물이 천천히 흐른다. 東京と大阪。",
    "Wow!!! Really?! ... --- *** ((nested)) [[brackets]] <<angle>> 😀😀👩‍👩‍👧‍👦🏳️‍🌈 ✓✓",
] * 3

TEXTS = [
    "", " ", "  ", "\n", "\t", "a", "Hello, world!", " leading space", "trailing space ", "two  spaces   three",
    "\n\n\nlines\r\n\r\n",
    "It's they'll WE'VE I'd don't o'clock 'tis '' 's'S'LL 'ſ",
    "0 1 12 123 1234 12345 3.14 1,000,000 ½ Ⅷ ²³ ٣٤ १२", "x1y22z333 a1 1a",
    "def f(x):\n\treturn  x**2  # comment\n\n    if x:  \n", "!!!??? ...---*** ((())) [[]] {}", "<|endoftext|>",
    "a<|im_start|>user\nb<|im_end|> c",
    "<|im_end|><|im_end|>", "<|im_start", "|im_end|>", "<|tool|> tool <|tool|>x", "naïve café déjà vu",
    "erdő erdo\u030b xerdőx", "nai\u0308ve cafe\u0301 A\u030angstro\u0308m",
    "\u1e9b\u0323 \u212b \u2126 \uac00\u11a8 \u1100\u1161\u11a8 q\u0307\u0323 \u0344 \u0958", "ΑΒΓ αβγ Σσς", "Река течёт",
    "नदी धीरे बहती", "نهر طويل",
    "大きな川がゆっくり流れる。", "强물 강물이 흐른다", "한\u1112\u1161\u11ab글", "😀 😀😀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "e\u0301\u0301\u0301 \u0301", "\u200b\u200d\ufeff\u00ad",
    "\u0000\u0001\u0002\u001f\u007f", "\u0085\u00a0\u1680\u2003\u2028\u2029\u202f\u3000x",
    "\u180e \u180ex", "\u00a0\u00a0x \u00a0 y",
    "\ufffd \ufffe \uffff \U0010ffff", "a\u0300\u0301b \u05d0\u05b0", " \t \n \r \v \f ", "supercalifragilisticexpialidocious" * 3,
    "ab" * 200, " " * 70, "a" + " " * 33 + "b", "\n" * 40 + "x", "1" * 50, "ÿ" * 30, "zß水🍌" * 20, "Hello" * 9 + "!" * 40,
    "user@example.com https://example.org/a?b=c&d=%20#e", "The quick brown fox jumps over the lazy dog. " * 3,
]


def golden(name, tokenizer):
    cases = []
    for text in TEXTS:
        tokenizer.encode_special_tokens = False
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        tokenizer.encode_special_tokens = True
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        cases.append({"text": text, "ids": ids, "plain_ids": plain, "decoded": tokenizer.decode(ids, skip_special_tokens=False)})
    lines = ",\n".join(json.dumps(case) for case in cases)
    (HERE / f"{name}.golden.json").write_text(f'{{"cases": [\n{lines}\n]}}\n')


def trained(name, pre_tokenizer, vocab, normalizer=None, ignore_merges=False, added=(), alphabet=True, unknown=None):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges, unk_token=unknown))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else [])
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(list(added))
    return tokenizer


def save(name, tokenizer):
    (HERE / f"{name}.json").write_text(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=True, separators=(",", ":")) + "\n")
    golden(name, tokenizer)


def byte_level(use_regex, prefix=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=use_regex)


def main():
    golden("kjv", Tokenizer.from_file(str(HERE.parent / "kjv-llama-2m" / "tokenizer.json")))

    save("gpt2_prefix", trained("gpt2_prefix", byte_level(True, prefix=True), 600))
    save("smollm", trained("smollm", pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(True)]),
                           520, alphabet=False))
    tokenizer = trained("qwen2", pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), byte_level(False)]), 640,
                        normalizer=normalizers.NFC(),
                        added=[AddedToken("<|tool|>", special=False, normalized=False),
                               AddedToken("erdő", special=False, normalized=True)])
    save("qwen2", tokenizer)
    save("qwen35", trained("qwen35", pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN35), "isolated"), byte_level(False)]),
                           640, normalizer=normalizers.NFC()))
    tokenizer = trained("llama3", pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), byte_level(False)]),
                        640, ignore_merges=True,
                        added=[AddedToken("<|tool|>", special=True, lstrip=True, rstrip=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", tokenizer.token_to_id("<|im_start|>"))])
    save("llama3", tokenizer)
    for behavior in ["removed", "merged_with_previous", "merged_with_next", "contiguous"]:
        steps = [pre_tokenizers.Split(Regex(r"[\s!]|\p{N}{2}"), behavior), pre_tokenizers.Digits(individual_digits=False),
                 byte_level(False)]
        save(f"split_{behavior}", trained(behavior, pre_tokenizers.Sequence(steps), 330))
    steps = [pre_tokenizers.Split(Regex(r"\p{L}+"), "removed", invert=True), pre_tokenizers.Split("a", "isolated"),
             byte_level(False)]
    save("split_inverted", trained("inverted", pre_tokenizers.Sequence(steps), 330, alphabet=False, unknown="<|endoftext|>"))

    if len(sys.argv) > 1:
        from gguf import GGUFReader
        fields = GGUFReader(sys.argv[1]).fields
        tokens = fields["tokenizer.ggml.tokens"].contents()
        types = fields["tokenizer.ggml.token_type"].contents()
        merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
        tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(True)])
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([token for token, kind in zip(tokens, types) if kind == 3])
        golden("smollm2", tokenizer)


if __name__ == "__main__":
    main()
