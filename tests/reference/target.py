# SPDX-License-Identifier: Apache-2.0
"""The target of the reference: a transformers model, its logits and its taps."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class ReferenceTarget:
    """A target in `dtype`, batch 1, without a KV cache: every call runs the whole sequence."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float64) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
        self.model.requires_grad_(False)
        self.dtype = dtype
        self.layers = self.model.model.layers

    @property
    def embedding(self) -> torch.Tensor:
        """[V, Ht]"""
        return self.model.get_input_embeddings().weight

    @property
    def lm_head(self) -> torch.Tensor:
        """[V, Ht]"""
        return self.model.get_output_embeddings().weight

    @torch.no_grad()
    def run(self, token_ids: Sequence[int], layer_ids: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [T, V] and taps [T, F·Ht] of a sequence.

        A tap is the residual stream as its layer leaves it. It is read by hooks, because transformers' own
        `hidden_states` norms the last layer's entry.
        """
        outputs: dict[int, torch.Tensor] = {}

        def keep(index: int):
            def hook(module: torch.nn.Module, args: object, output: torch.Tensor | tuple) -> None:
                outputs[index] = (output[0] if isinstance(output, tuple) else output)[0]

            return hook

        hooks = [self.layers[index].register_forward_hook(keep(index)) for index in set(layer_ids)]
        try:
            logits = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        taps = [outputs[index] for index in layer_ids]
        return logits, torch.cat(taps, dim=-1) if taps else logits.new_empty(len(logits), 0)

    def greedy(self, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        """`max_tokens` tokens of plain greedy decoding; an end-of-text token does not stop it."""
        token_ids = list(prompt_ids)
        for _ in range(max_tokens):
            logits, _ = self.run(token_ids)
            token_ids.append(int(logits[-1].argmax()))
        return token_ids[len(prompt_ids) :]
