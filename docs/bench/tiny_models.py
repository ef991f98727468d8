#!/usr/bin/env python3
"""Makes a tiny random model of each family with transformers, and what PyTorch in f32 says of it.

    docs/bench/tiny_models.py crates/train/tests/data/families

Needs torch and transformers. Writes for each family a folder as save_pretrained() makes it, and `expected.json`: token
ids, the mean loss over all but the first, a greedy continuation of a prompt, and the norm of every stored tensor's
gradient. `crates/train/tests/families.rs` compares with these; it needs no Python.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

VOCAB, LENGTH, PROMPT, CONTINUATION = 61, 24, 9, 8
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.2,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


def rope(kind, **rest):
    return {"rope_type": kind, "rope_theta": 500.0, **rest}


LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
FACTORS = dict(short_factor=[1.0, 1.5, 2.0], long_factor=[1.0, 3.0, 5.0])
FAMILIES = {
    "llama": ("Llama", dict(tie_word_embeddings=True)),
    "llama-biases": ("Llama", dict(attention_bias=True, mlp_bias=True, head_dim=8)),
    "llama-linear": ("Llama", dict(rope_parameters=rope("linear", factor=2.0))),
    "llama-dynamic": ("Llama", dict(max_position_embeddings=16, rope_parameters=rope("dynamic", factor=2.0))),
    "llama-llama3": ("Llama", dict(rope_parameters=LLAMA3)),
    "llama-yarn": ("Llama", dict(rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=16))),
    "mistral": ("Mistral", dict(sliding_window=5)),
    "qwen2": ("Qwen2", dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(head_dim=8)),
    "gemma": ("Gemma", dict(head_dim=8)),
    "gemma2": ("Gemma2", dict(head_dim=8, sliding_window=5, query_pre_attn_scalar=12, attn_logit_softcapping=2.0,
                              final_logit_softcapping=3.0)),
    "gemma3": ("Gemma3", dict(head_dim=8, sliding_window=5, query_pre_attn_scalar=16, num_hidden_layers=7)),
    "gpt2": ("GPT2", dict(vocab_size=VOCAB, n_embd=24, n_layer=3, n_head=4, n_positions=64, initializer_range=0.2,
                          bos_token_id=1, eos_token_id=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)),
    "phi3": ("Phi3", dict(sliding_window=7)),
    "phi3-longrope": ("Phi3", dict(original_max_position_embeddings=16, rope_parameters=rope("longrope", **FACTORS))),
    "olmo2": ("Olmo2", {}),
}


def config_of(family, changes):
    names = dict(GPT2="GPT2Config", Gemma3="Gemma3TextConfig")
    config = getattr(transformers, names.get(family, f"{family}Config"))
    return config(**(changes if family == "GPT2" else {**SIZES, **changes}), attn_implementation="eager")


def model_of(family, config):
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return getattr(transformers, name)(config)


def main():
    out = Path(sys.argv[1])
    for name, (family, changes) in FAMILIES.items():
        torch.manual_seed(len(name))
        model = model_of(family, config_of(family, changes)).float().eval()
        # Norms and biases too are random: ones and zeros would hide mistakes.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(3, VOCAB, (LENGTH,), generator=generator)
        logits = model(tokens[None], use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1].float(), tokens[1:])
        loss.backward()
        norms = {key: float(p.grad.double().norm()) for key, p in model.named_parameters()}
        greedy = tokens[:PROMPT].tolist()
        with torch.no_grad():
            for _ in range(CONTINUATION):
                last = model(torch.tensor([greedy]), use_cache=False).logits[0, -1]
                greedy.append(int(last.argmax()))
        folder = out / name
        model.save_pretrained(folder)
        expected = {
            "note": f"transformers {transformers.__version__}, torch {torch.__version__}, f32, eager attention",
            "tokens": tokens.tolist(),
            "loss": float(loss),
            "prompt_tokens": PROMPT,
            "greedy": greedy[PROMPT:],
            "gradient_norms": norms,
        }
        (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        print(name, float(loss), greedy[PROMPT:])


if __name__ == "__main__":
    main()
