# SPDX-License-Identifier: Apache-2.0
"""What must hold after every step of an engine, checked from the outside: memory, ids and bookkeeping."""

from typing import Any

import torch

from tests.engine.probes import attention_layers
from tests.support.engine_process import engine_core, model_runner


class Invariants:
    """Follows one in-process engine. A broken invariant raises AssertionError out of the step that broke it.

    After a step, a block of the draft KV may differ from before only where it belongs to a request of that step which
    had not filled it before, and is shared with another only where the step filled it with known tokens (a request
    that is scheduled later in the same step may reuse it at once): that is what "every written slot is inside the
    request's own blocks" means in memory.
    """

    def __init__(self, llm: Any, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.runner = model_runner(llm)
        self.scheduler = engine_core(llm).scheduler
        self.manager = self.scheduler.kv_cache_manager
        _, drafter = attention_layers(llm)
        self.caches = {
            gid: [drafter[name].kv_cache for name in group.layer_names if name in drafter]
            for gid, group in enumerate(self.scheduler.kv_cache_config.kv_cache_groups)
        }
        self.caches = {gid: caches for gid, caches in self.caches.items() if caches}
        self.block_sizes = {
            gid: self.scheduler.kv_cache_config.kv_cache_groups[gid].kv_cache_spec.block_size for gid in self.caches
        }
        self.before = self._snapshot()
        self.kept: dict[int, set[int]] = {gid: set() for gid in self.caches}
        self.steps = self.drafts = self.blocks_written = self.preemptions = self.chunks = 0
        self._wrap("update_from_output", self._after_step)
        self._wrap("update_draft_token_ids", self._after_drafts)
        self._wrap("_preempt_request", self._preempted)

    def _wrap(self, name: str, before: Any) -> None:
        stock = getattr(self.scheduler, name)

        def wrapper(*arguments: Any, **options: Any) -> Any:
            before(*arguments, **options)
            return stock(*arguments, **options)

        setattr(self.scheduler, name, wrapper)

    def _snapshot(self) -> dict[int, list[torch.Tensor]]:
        return {gid: [cache.clone() for cache in caches] for gid, caches in self.caches.items()}

    def _after_step(self, scheduler_output: Any, model_runner_output: Any) -> None:
        self.steps += 1
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id in scheduled:
            self.chunks += self.scheduler.requests[request_id].is_prefill_chunk
        pool = self.manager.block_pool.blocks
        for gid, caches in self.caches.items():
            writable: set[int] = set()
            for request_id, count in scheduled.items():
                request, size = self.scheduler.requests[request_id], self.block_sizes[gid]
                filled = (request.num_computed_tokens - count) // size
                for index, block in enumerate(self.manager.get_block_ids(request_id)[gid]):
                    known = (index + 1) * size <= request.num_tokens
                    if index >= filled and (known or pool[block].ref_cnt == 1):
                        writable.add(block)
            changed: set[int] = set()
            for old, new in zip(self.before[gid], caches, strict=True):
                differs = (old.view(torch.int32) != new.view(torch.int32)).flatten(1).any(dim=1)
                changed.update(torch.nonzero(differs).flatten().tolist())
                old.copy_(new)
            # Context of steps without drafts is written by a later one, before a block of it has another owner.
            strays = changed - writable - self.kept[gid]
            self.kept[gid] = self.kept[gid] | writable if self.keeps_context() else set()
            assert not strays, (
                f"step {self.steps}: draft KV was written in blocks {sorted(strays)}, which no request of this step "
                f"may write; requests {list(scheduled)}"
            )
            self.blocks_written += len(changed)

    def keeps_context(self) -> bool:
        """Whether the runner holds context rows whose draft KV it has not written yet."""
        pending = getattr(getattr(self.runner, "drafter", None), "pending", None)
        return pending is not None and pending.rows > 0

    def _after_drafts(self, draft_token_ids: Any) -> None:
        for request_id, drafts in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            self.drafts += len(drafts)
            outside = [token for token in drafts if not -1 <= token < self.vocabulary]
            assert not outside, f"step {self.steps}: {request_id} was drafted {outside}, of {self.vocabulary} tokens"

    def _preempted(self, request: Any, *arguments: Any, **options: Any) -> None:
        self.preemptions += 1


def remembered(llm: Any, prefix: str) -> list[str]:
    """Where the engine's process still holds a request's id that begins so: "Class.attribute", empty when it is clean.

    Looks into containers of objects of the package, from the runner's drafter on, and into the engine's own tables.
    """
    found: list[str] = []
    seen: set[int] = set()

    def is_name(value: Any) -> bool:
        return isinstance(value, str) and value.startswith(prefix)

    def look(owner: str, value: Any, depth: int) -> None:
        if id(value) in seen or depth > 8:
            return
        seen.add(id(value))
        if is_name(value):
            found.append(owner)
        elif isinstance(value, dict):
            for key, entry in value.items():
                if is_name(key):
                    found.append(owner)
                    return
                look(owner, entry, depth + 1)
        elif isinstance(value, list | tuple | set | frozenset):
            for entry in value:
                look(owner, entry, depth + 1)
        elif type(value).__module__.startswith("vllm_dflash.") and hasattr(value, "__dict__"):
            for name, entry in vars(value).items():
                if name != "runner":
                    look(f"{type(value).__name__}.{name}", entry, depth + 1)

    runner = model_runner(llm)
    look("drafter", getattr(runner, "speculator", None) or runner.drafter, 0)
    look("requests", getattr(runner, "requests", {}), 0)
    look("scheduler", engine_core(llm).scheduler.requests, 0)
    return found
