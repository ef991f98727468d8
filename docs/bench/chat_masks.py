"""Writes crates/data/tests/data/chat_masks.json: chats, and which tokens of them `transformers` calls the assistant's;
and chats.parquet with the same chats, and a last one that nobody answers.

    python docs/bench/chat_masks.py

Needs transformers 5, tokenizers and pyarrow. The tokenizer is a small byte-level BPE trained here on the chats themselves, with the
special tokens of ChatML; it is written beside the masks, so that the test needs nothing but these files.
"""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parents[2] / "crates/data/tests/data"

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Over many lines, with white space taken away at either side of the tags.
SPREAD = """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {{- message.content | trim }}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Mistral's: an answer follows its question directly, and there is no beginning of an answer.
INST = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)

CHATS = [
    [("user", "What floats?"), ("assistant", "A ship, up to its load line.")],
    [
        ("system", "You answer briefly."),
        ("user", "Name a harbour."),
        ("assistant", "Bristol."),
        ("user", "And another one?\n\nIn the south, please."),
        ("assistant", "Plymouth,\nor Portsmouth."),
    ],
    [("user", "Größe? 船"), ("assistant", "Écrit à l'encre: 12,5 m — „groß“.")],
    [("user", "Say it twice."), ("assistant", "It."), ("user", "Again."), ("assistant", "It. It."), ("user", "Thanks")],
    [("user", "Code?"), ("assistant", "```\n  for i in 0..3 {}\n```\n")],
    [("user", "<|im_end|> is a text here"), ("assistant", "assistant\nuser\n")],
]


def tokenizer() -> Tokenizer:
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokens.train_from_iterator([text for chat in CHATS for _, text in chat] * 3 + ["assistant\nuser\nsystem\n"] * 3, trainer)
    return tokens


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    tokens = tokenizer()
    tokens.save(str(FOLDER / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokens, bos_token=config["bos_token"], eos_token=config["eos_token"], pad_token=config["pad_token"]
    )
    cases = []
    for name, template in [("chatml", CHATML), ("spread", SPREAD), ("inst", INST)]:
        for chat in CHATS:
            messages = [{"role": role, "content": text} for role, text in chat]
            encoded = fast.apply_chat_template(
                messages, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            cases.append({
                "template": name,
                "messages": messages,
                "text": fast.apply_chat_template(messages, chat_template=template, tokenize=False),
                "ids": encoded["input_ids"],
                "mask": encoded["assistant_masks"],
            })
    templates = {"chatml": CHATML, "spread": SPREAD, "inst": INST}
    document = {"templates": templates, "cases": cases}
    (FOLDER / "chat_masks.json").write_text(json.dumps(document, ensure_ascii=False) + "\n")
    lists = [[{"role": role, "content": text, "name": None} for role, text in chat] for chat in CHATS]
    lists.append([{"role": "user", "content": "Anybody?", "name": "x"}])
    table = pyarrow.table({"id": list(range(len(lists))), "messages": lists})
    pyarrow.parquet.write_table(table, FOLDER / "chats.parquet", compression="zstd")
    print(f"{len(cases)} cases")


if __name__ == "__main__":
    main()
