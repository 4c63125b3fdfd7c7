"""Tiny LMs whose heads differ in what follows the matrix."""

from typing import Any

import torch

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "bias": ("Phi", {"tie_word_embeddings": False}),
    "factor": ("Cohere", {"logit_scale": 0.25}),
    "divisor": ("Granite", {"logits_scaling": 8.0}),
    "tanh cap": ("Gemma2", {"final_logit_softcapping": 20.0, "head_dim": 16}),
}


def tiny_lm(kind: str) -> Any:
    """Make an LM with random weights, large enough that its logits differ."""
    import transformers

    family, options = HEADS[kind]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    head = model.get_output_embeddings()
    torch.nn.init.normal_(head.weight, std=0.5)
    if getattr(head, "bias", None) is not None:
        torch.nn.init.normal_(head.bias)
    return model


def run(model: Any, num_tokens: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits (n, V) of a text, and what the head received (n, d)."""
    states: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: states.append(inputs[0][0])
    )
    tokens = torch.arange(1, num_tokens + 1)[None]
    with torch.inference_mode(), hook:
        logits = model(tokens).logits[0]
    return logits.clone(), states[0].clone()
