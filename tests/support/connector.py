# SPDX-License-Identifier: Apache-2.0
"""A KV connector that stores whole blocks of the target's layers and knows nothing of the drafter's.

What it restores therefore has no draft KV: it fills the draft's blocks with `draft_fill`, as if that had stood there.
Both roles live in one process (an in-process engine) and share STORE.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

# Tokens up to a block's end -> that block of every target layer.
STORE: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
DRAFT_FILL = [0.0]


@dataclass
class Blocks(KVConnectorMetadata):
    """Pairs of a block's tokens (all before it among them) and its number in the cache."""

    load: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    save: list[tuple[tuple[int, ...], int]] = field(default_factory=list)


class TargetOnlyConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.block_size = vllm_config.cache_config.block_size
        self.num_target_layers = vllm_config.model_config.get_total_num_hidden_layers()
        self.to_load: dict[str, tuple[int, int]] = {}
        self.caches: dict[str, torch.Tensor] = {}

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = tuple(request.all_token_ids)
        found = num_computed_tokens
        # At least one token is left to compute.
        while found + self.block_size < len(tokens) and tokens[: found + self.block_size] in STORE:
            found += self.block_size
        return found - num_computed_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.to_load[request.request_id] = (request.num_tokens, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Blocks:
        meta = Blocks()
        for new in scheduler_output.scheduled_new_reqs:
            tokens, ids, computed = new.prompt_token_ids, new.block_ids[0], new.num_computed_tokens
            _, external = self.to_load.pop(new.req_id, (0, 0))
            end = computed + scheduler_output.num_scheduled_tokens[new.req_id]
            for index in range(min(end, len(tokens)) // self.block_size):
                first, last = index * self.block_size, (index + 1) * self.block_size
                if computed - external <= first < computed:
                    meta.load.append((tuple(tokens[:last]), ids[index]))
                elif first >= computed:
                    meta.save.append((tuple(tokens[:last]), ids[index]))
        return meta

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def targets_own(self, name: str) -> bool:
        """Draft layers are numbered after the target's."""
        return int(name.split(".layers.")[1].split(".")[0]) < self.num_target_layers

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for tokens, block in self._get_connector_metadata().load:
            for name, cache in self.caches.items():
                if self.targets_own(name):
                    cache[block] = STORE[tokens][name]
                else:
                    cache[block] = DRAFT_FILL[0]

    def wait_for_save(self) -> None:
        for tokens, block in self._get_connector_metadata().save:
            STORE[tokens] = {
                name: cache[block].clone() for name, cache in self.caches.items() if self.targets_own(name)
            }

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass


def settings() -> dict[str, str]:
    """LLM's kv_transfer_config for it."""
    return {
        "kv_connector": TargetOnlyConnector.__name__,
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
    }
