#!/usr/bin/env python3
"""Makes a tiny random model of each family with transformers, and what PyTorch in f32 says of it.

    docs/bench/tiny_models.py crates/train/tests/data/families
    docs/bench/tiny_models.py crates/train/tests/data/experts
    docs/bench/tiny_models.py crates/train/tests/data/mxfp4

The last part of the path says which: families with one feed-forward part, mixtures of experts, or mixtures whose files have experts in
MXFP4; names behind the path make these alone. Needs torch and transformers. Writes for each family a folder as save_pretrained() makes it, and `expected.json`: token ids, the mean loss
over all but the first, a greedy continuation of a prompt, and the norm of every stored tensor's gradient. Of a mixture also
the tokens of each expert in each layer and, where the family has one, the load-balancing loss, which the gradients then
are of as well: `loss + router_aux_loss_coef * router_aux_loss`. Tests of `crates/train` compare with these; they need no
Python.
"""

import json
import sys
import tempfile
from pathlib import Path

import safetensors.torch
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

BALANCED = dict(output_router_logits=True, router_aux_loss_coef=0.02)
QWEN2_MOE = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=12, shared_expert_intermediate_size=20)
QWEN3_MOE = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=12, head_dim=8)
GLM4_MOE = dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=12, first_k_dense_replace=1, head_dim=8)
GPT_OSS = dict(num_local_experts=6, num_experts_per_tok=3, intermediate_size=20, head_dim=8, sliding_window=5, output_router_logits=True,
               rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=1.0, truncate=False))
EXPERTS = {
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=20, **BALANCED)),
    "qwen2-moe": ("Qwen2Moe", dict(norm_topk_prob=False, mlp_only_layers=[1], **QWEN2_MOE, **BALANCED)),
    "qwen2-moe-normalised": ("Qwen2Moe", dict(norm_topk_prob=True, decoder_sparse_step=2, **QWEN2_MOE)),
    "qwen3-moe": ("Qwen3Moe", dict(norm_topk_prob=True, **QWEN3_MOE, **BALANCED)),
    # As transformers keeps experts in memory: a tensor for all gates and ups of a layer, and one for all downs.
    "qwen3-moe-stacked": ("Qwen3Moe", dict(norm_topk_prob=False, **QWEN3_MOE)),
    "olmoe": ("Olmoe", dict(num_experts=8, num_experts_per_tok=2, intermediate_size=12, **BALANCED)),
    "glm4-moe": ("Glm4Moe", dict(n_group=4, topk_group=2, n_shared_experts=2, routed_scaling_factor=1.5, **GLM4_MOE)),
    # The limit of the other is out of reach of random weights.
    "gpt-oss": ("GptOss", dict(router_aux_loss_coef=0.02, **GPT_OSS)),
    "gpt-oss-clamped": ("GptOss", dict(swiglu_limit=0.4, swiglu_alpha=1.3, **{**GPT_OSS, "output_router_logits": False})),
    "glm4-moe-biased": ("Glm4Moe", dict(use_qk_norm=True, attention_bias=True, norm_topk_prob=False, **GLM4_MOE)),
}
MXFP4 = {"gpt-oss": ("GptOss", {**GPT_OSS, "hidden_size": 32, "intermediate_size": 64, "output_router_logits": False})}
LATENT = dict(num_key_value_heads=4, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, first_k_dense_replace=1,
              n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=12, n_shared_experts=2)
LATENT_YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.9, mscale_all_dim=0.7)
EXPERTS |= {
    "deepseek-v2": ("DeepseekV2", dict(q_lora_rank=None, topk_method="greedy", norm_topk_prob=False, **LATENT)),
    "deepseek-v2-groups": ("DeepseekV2", dict(q_lora_rank=14, topk_method="group_limited_greedy", n_group=4, topk_group=2,
                                              routed_scaling_factor=1.5, rope_parameters=LATENT_YARN, **LATENT)),
    "deepseek-v3": ("DeepseekV3", dict(q_lora_rank=14, n_group=4, topk_group=2, routed_scaling_factor=1.5, num_mtp_layers=0, **LATENT)),
    # Values as wide as keys; a longer context.
    "deepseek-v3-yarn": ("DeepseekV3", dict(q_lora_rank=None, n_group=1, topk_group=1, num_mtp_layers=0, rope_parameters=LATENT_YARN,
                                            **{**LATENT, "v_head_dim": 10})),
    "glm-4.7-flash": ("Glm4MoeLite", dict(q_lora_rank=14, n_group=1, topk_group=1, routed_scaling_factor=1.8,
                                          mlp_layer_types=["dense", "sparse", "sparse"],
                                          **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"})),
}
# Far more than what another order of sums changes.
ROUNDING = 1e-4


def config_of(family, changes):
    names = dict(GPT2="GPT2Config", Gemma3="Gemma3TextConfig")
    config = getattr(transformers, names.get(family, f"{family}Config"))
    return config(**(changes if family == "GPT2" else {**SIZES, **changes}), attn_implementation="eager")


def model_of(family, config):
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return getattr(transformers, name)(config)


def saved(model, folder, name, tensors=None):
    model.save_pretrained(folder, state_dict=tensors, save_original_format=not name.endswith("-stacked"))


def stored_norms(model, name):
    """The norms of gradients by the names of stored tensors: gradients are saved as weights are."""
    gradients = {key: p.grad for key, p in model.named_parameters()}
    buffers = {key: value for key, value in model.named_buffers() if key in model.state_dict()}
    with tempfile.TemporaryDirectory() as folder:
        saved(model, folder, name, {**buffers, **gradients})
        stored = safetensors.torch.load_file(Path(folder) / "model.safetensors")
    return {key: float(grad.double().norm()) for key, grad in stored.items() if key not in buffers}


def packed_experts(model):
    """Gives experts the values of random blocks of MXFP4, as transformers reads them, and returns the tensors of a file with them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = {key: value.detach().to(torch.bfloat16).clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(tensors[key].float())
            if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
                count, inputs, outputs = parameter.shape
                blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
                scales = torch.randint(121, 125, (count, outputs, inputs // 32), dtype=torch.uint8)
                parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).reshape(parameter.shape))
                del tensors[key]
                tensors.update({f"{key}_blocks": blocks, f"{key}_scales": scales})
    return tensors


def save_packed(model, folder, tensors):
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def watch_routers(model):
    """Notes the tokens of each expert at every call of a router, and refuses choices that another order of sums may change."""
    counts = []

    def note(router, arguments, result):
        (hidden,), (logits, _, chosen) = arguments, result
        for _ in range(20):
            near = router.forward(hidden * (1 + ROUNDING * torch.randn_like(hidden)))[2]
            assert torch.equal(near.sort(-1).values, chosen.sort(-1).values), "a choice hangs by a thread: another seed"
        counts.append(torch.bincount(chosen.flatten(), minlength=logits.shape[-1]).tolist())

    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(note)
    return counts


def main():
    out = Path(sys.argv[1])
    families = dict(families=FAMILIES, experts=EXPERTS, mxfp4=MXFP4)[out.name]
    for name in sys.argv[2:] or families:
        family, changes = families[name]
        torch.manual_seed(len(name))
        model = model_of(family, config_of(family, changes)).float().eval()
        # Norms and biases too are random: ones and zeros would hide mistakes.
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.dim() == 1 or key.endswith("_bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            for key, buffer in model.named_buffers():
                if key.endswith("e_score_correction_bias"):
                    buffer.add_(torch.randn_like(buffer) * 0.2)
        packed = packed_experts(model) if out.name == "mxfp4" else None
        expert_tokens = watch_routers(model)
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(3, VOCAB, (LENGTH,), generator=generator)
        result = model(tokens[None], use_cache=False)
        counted = list(expert_tokens)
        logits = result.logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1].float(), tokens[1:])
        of_experts = {}
        if counted:
            of_experts["expert_tokens"] = counted
        balance = getattr(result, "aux_loss", None)
        total = loss
        if balance is not None:
            coefficient = model.config.router_aux_loss_coef
            of_experts.update(router_aux_loss=float(balance.detach()), router_aux_loss_coef=coefficient)
            total = loss + coefficient * balance
        total.backward()
        norms = {} if packed else stored_norms(model, name)
        greedy = tokens[:PROMPT].tolist()
        with torch.no_grad():
            for _ in range(CONTINUATION):
                last = model(torch.tensor([greedy]), use_cache=False).logits[0, -1]
                greedy.append(int(last.argmax()))
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        if packed:
            save_packed(model, folder, packed)
        else:
            saved(model, folder, name)
        expected = {
            "note": f"transformers {transformers.__version__}, torch {torch.__version__}, f32, eager attention",
            "tokens": tokens.tolist(),
            "loss": float(loss.detach()),
            **of_experts,
            "prompt_tokens": PROMPT,
            "greedy": greedy[PROMPT:],
            "gradient_norms": norms,
        }
        (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        print(name, float(loss.detach()), greedy[PROMPT:])


if __name__ == "__main__":
    main()
