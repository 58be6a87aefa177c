# SPDX-License-Identifier: Apache-2.0
"""The drafter as vLLM loads it: DFlash and DFlash 2 (arXiv 2602.06036; DFlash 2 announcement)."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import get_draft_quant_config

from vllm_dflash import ops
from vllm_dflash.checkpoint import DraftConfig, canonical_name, load_draft
from vllm_dflash.drafter.candidates import top_tokens
from vllm_dflash.drafter.context import ContextProjection
from vllm_dflash.drafter.layer import DraftAttention, DraftLayer
from vllm_dflash.drafter.loading import load_into
from vllm_dflash.drafter.selector import CandidateSelector
from vllm_dflash.options import server_options


@support_torch_compile
class DraftModel(nn.Module):
    """Embeddings, layers and norms. `embed_tokens` is absent until the target's is shared, unless shipped."""

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        config: DraftConfig,
        vocab_size: int,
        owns_embedding: bool,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.config = config
        dtype = vllm_config.model_config.dtype
        quant_config = get_draft_quant_config(vllm_config)
        # Draft layers are numbered after the target's, so that both find their KV cache by layer name.
        first = vllm_config.model_config.get_total_num_hidden_layers()
        self.block = 1 + vllm_config.speculative_config.num_speculative_tokens
        if owns_embedding:
            self.embed_tokens = VocabParallelEmbedding(vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens")
        self.mask_embedding: torch.Tensor | None
        self.register_buffer("mask_embedding", None, persistent=False)
        self.layers = nn.ModuleList(
            DraftLayer(vllm_config, config, i, quant_config, f"{prefix}.layers.{first + i}")
            for i in range(config.num_hidden_layers)
        )
        if config.use_aux_hidden_state:
            self.fc = ReplicatedLinear(
                config.num_taps * (config.target_hidden_size or config.hidden_size),
                config.hidden_size,
                bias=False,
                params_dtype=dtype,
                quant_config=quant_config,
                prefix=f"{prefix}.fc",
                return_bias=False,
            )
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.is_dflash2:
            assert config.selector_rank is not None
            self.candidate_selector = CandidateSelector(
                config.hidden_size, vocab_size, config.selector_rank, dtype, f"{prefix}.candidate_selector"
            )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[rows] -> [rows, H]: the target's embeddings, the mask token's own where the checkpoint ships one."""
        embeds = self.embed_tokens(input_ids)
        if self.mask_embedding is not None:
            is_mask = (input_ids == self.config.mask_token_id).unsqueeze(-1)
            embeds = torch.where(is_mask, self.mask_embedding, embeds)
        return embeds * self.config.input_embedding_scale if self.config.input_embedding_scale != 1.0 else embeds

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Block rows [request][1+K]: input_ids, positions [rows] -> final-normed hidden [rows, H]."""
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual, self.block)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class DFlashDrafter(nn.Module):
    """What vLLM's loader builds for the architectures DFlashDraftModel and DFlash2DraftModel."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        speculative = vllm_config.speculative_config
        source = speculative.draft_model_config
        layers = vllm_config.model_config.get_total_num_hidden_layers()
        self.checkpoint = load_draft(source.model, source.revision, num_target_layers=layers)
        self.draft_config = self.checkpoint.config
        options = server_options(vllm_config.additional_config)
        self.extended = options.extend_draft_range
        if options.draft_window is not None:
            self.draft_config = self.draft_config.with_window(options.draft_window)
        config = self.draft_config
        self.vocab_size = config.vocab_size or vllm_config.model_config.get_vocab_size()
        tensors = {canonical_name(name) for name in self.checkpoint.tensors}
        self.has_own_embed_tokens = "embed_tokens.weight" in tensors
        self.has_own_lm_head = "lm_head.weight" in tensors
        self.model = DraftModel(
            vllm_config=vllm_config,
            config=config,
            vocab_size=self.vocab_size,
            owns_embedding=self.has_own_embed_tokens,
            prefix=f"{prefix}.model" if prefix else "model",
        )
        vocabulary = config.draft_vocab_size or self.vocab_size
        if self.has_own_lm_head:
            self.lm_head = ParallelLMHead(
                vocabulary,
                config.hidden_size,
                quant_config=get_draft_quant_config(vllm_config),
                prefix=f"{prefix}.lm_head" if prefix else "lm_head",
            )
        self.d2t: torch.Tensor | None = None
        if "d2t" in tensors:
            self.d2t = nn.Parameter(torch.zeros(vocabulary, dtype=torch.int64), requires_grad=False)
        self.logits_processor = LogitsProcessor(
            vocabulary,
            scale=config.logit_multiplier,
            soft_cap=config.softcap,
        )
        if self.checkpoint.mask_embedding is not None:
            self.model.mask_embedding = self.checkpoint.mask_embedding.to(self.model.norm.weight)
        self.started = False
        self.context: ContextProjection | None = None
        self.on_failed_load: Callable[[Exception], None] = lambda error: None
        """Told of what is raised where weights are loaded after the start."""
        self.on_new_weights: Callable[[], None] = lambda: None
        """Told that some were loaded."""
        # Before the target's are shared, and before a CPU packs them out of sight.
        self.own_weights_bytes = sum(parameter.nbytes for parameter in self.parameters())
        # What torch.compile was given as the most rows of a step; a draft step may have more (vllm#53970).
        self.compiled_rows = max(vllm_config.compilation_config.compile_ranges_endpoints or (), default=None)

    @property
    def has_selector(self) -> bool:
        return self.draft_config.is_dflash2

    @property
    def feature_size(self) -> int:
        """F*Ht, the width of a row of taps."""
        config = self.draft_config
        return config.num_taps * (config.target_hidden_size or config.hidden_size)

    @property
    def position_range(self) -> int:
        """Positions that drafts may take: those trained on, or with `extend_draft_range` all that the rotation covers.
        """
        covered: int = self.attention_layers()[0].rotary_emb.cos_sin_cache.shape[0]
        return covered if self.extended else min(covered, self.draft_config.max_position_embeddings)

    def share(self, embed_tokens: Any = None, lm_head: Any = None) -> None:
        """Use the target's, and leave them the target's: no submodules, so that new weights for the drafter, or a
        failure to load them, never touch them."""
        if embed_tokens is not None:
            vars(self.model)["embed_tokens"] = embed_tokens
        if lm_head is not None:
            vars(self)["lm_head"] = lm_head

    def attention_layers(self) -> list[DraftAttention]:
        """The attention of every layer, in order."""
        return [cast(DraftLayer, layer).self_attn for layer in self.model.layers]

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.compiled_rows is not None and positions.shape[0] > self.compiled_rows:
            return self.model.forward(input_ids, positions, inputs_embeds)
        return self.model(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Full draft logits [rows, Vd]: vLLM asks every causal model for it; drafting uses `candidates`."""
        return self.logits_processor(self.lm_head, hidden)

    def combine_hidden_states(self, taps: torch.Tensor) -> torch.Tensor:
        """taps [T, F*Ht] -> W_fc . taps [T, H]; the name is the one that vLLM's V2 runner calls."""
        return self.model.fc(taps) if self.draft_config.use_aux_hidden_state else taps

    def features(self, taps: torch.Tensor) -> torch.Tensor:
        """taps [T, F*Ht] -> c = RMSNorm_hidden_norm(W_fc . taps) [T, H]; computed once for all layers."""
        return self.model.hidden_norm(self.combine_hidden_states(taps))

    def context_projection(self) -> ContextProjection:
        """Made when weights load, or here for weights that never were, as with --load-format dummy."""
        if self.context is None:
            self.context = ContextProjection(self.attention_layers())
        return self.context

    def context_kv(self, taps: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """taps [T, F*Ht], positions [T] int64 -> context K, V of every layer, each [L, T, nkv, hd]."""
        return self.context_projection()(self.features(taps), positions)

    def precompute_and_store_context_kv(self, features: torch.Tensor, positions: torch.Tensor) -> None:
        """What V2's memory profiling calls in place of a context write: features [T, H] after fc, nothing stored."""
        self.context_projection()(self.model.hidden_norm(features), positions)

    def get_draft_kv_cache_layer_names(self) -> list[str]:
        """Names of the attention layers, in order, as V2 asks for them."""
        return [layer.attn.layer_name for layer in self.attention_layers()]

    def get_draft_attn_causal(self) -> list[bool]:
        """Whether each layer's block is causal, in order."""
        return [layer.causal for layer in self.attention_layers()]

    def candidates(self, hidden: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots' hidden [rows, H] -> the `count` best target ids [rows, count] int64 and their logits fp32.

        Logits carry the checkpoint's multiplier and, after it, the soft cap.
        """
        ids, logits = top_tokens(self.logits_processor, self.lm_head, hidden, count)
        if self.d2t is not None:
            # What is not finite may be padding, whose ids are none.
            ids = ids + self.d2t[ids.clamp(max=self.d2t.shape[0] - 1)]
        return ids, logits

    def select(
        self,
        hidden: torch.Tensor,
        candidate_ids: torch.Tensor,
        candidate_logits: torch.Tensor,
        anchors: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        anchor_positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The path through the candidates [B, K, C] of slots hidden [B, K, H] -> (token_ids [B, K], scores [B, K, C]).

        Without a selector (DFlash) the slots are independent: the same walk with a rank of zero.
        """
        if self.has_selector:
            selector = self.model.candidate_selector
            projected = selector(hidden)
            tables: tuple[torch.Tensor, torch.Tensor] = selector.predecessor_codebook, selector.successor_codebook
        else:
            projected = hidden.new_empty(*hidden.shape[:2], 0)
            empty = hidden.new_empty(self.vocab_size, 0)
            tables = empty, empty
        return ops.select_path(
            candidate_ids, candidate_logits, projected, *tables, anchors, temperature, seeds, anchor_positions
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """All of the checkpoint's at the start; later, from a trainer, those of whole modules."""
        if self.started:
            return self._update_weights(weights)
        loaded = load_into(self, weights)
        self.context = ContextProjection(self.attention_layers())
        return loaded

    def process_weights_after_loading(self) -> None:
        """vLLM's word that the start's loading is over, whichever loader it was."""
        self.started = True

    def _update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        if self.context is not None:
            self.context.stale = True
        try:
            loaded = load_into(self, weights, complete=False)
        except Exception as error:
            self.on_failed_load(error)
            raise
        self.on_new_weights()
        return loaded
