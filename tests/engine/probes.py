# SPDX-License-Identifier: Apache-2.0
"""Functions that run inside an engine's process, with its `LLM` as first argument (`EngineProcess.probe`)."""

from typing import Any

import torch

from tests.support.engine_process import drafter, engine_core, model_runner


def attention_layers(llm: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attention layers by name: the target's, and all others (the drafter's)."""
    from vllm.model_executor.layers.attention import Attention

    target = {module.layer_name for module in model_runner(llm).model.modules() if isinstance(module, Attention)}
    layers = engine_core(llm).vllm_config.compilation_config.static_forward_context
    return (
        {name: layer for name, layer in layers.items() if name in target},
        {name: layer for name, layer in layers.items() if name not in target},
    )


_COUNTS: list[dict[str, Any]] = []


def count_forwards(llm: Any) -> None:
    """From now on, notes a step: how many requests were in it, and how often each attention layer ran."""
    _COUNTS.clear()
    target, drafter = attention_layers(llm)
    runs: dict[str, int] = {}
    for name, layer in (target | drafter).items():
        layer.register_forward_pre_hook(lambda module, args, name=name: runs.__setitem__(name, runs.get(name, 0) + 1))
    scheduler = engine_core(llm).scheduler
    stock = scheduler.update_from_output

    def update(scheduler_output: Any, model_runner_output: Any) -> Any:
        sampled = [len(ids) > 0 for ids in model_runner_output.sampled_token_ids]
        _COUNTS.append(
            {
                "requests": len(scheduler_output.num_scheduled_tokens),
                "drafting": sum(sampled),
                "target": [runs.get(name, 0) for name in target],
                "drafter": [runs.get(name, 0) for name in drafter],
            }
        )
        runs.clear()
        return stock(scheduler_output, model_runner_output)

    scheduler.update_from_output = update


def forward_counts(llm: Any) -> list[dict[str, Any]]:
    return list(_COUNTS)


def draft_kv(llm: Any, prompt: list[int], chunk: int) -> tuple[int, dict[str, dict[int, torch.Tensor]]]:
    """Serves one prompt in chunks of at most `chunk` tokens.

    Returns the number of chunks and, a draft layer, the raw KV blocks by their index in the sequence: those that
    hold prompt rows only, as they are when the request ends. Raw, because the layout inside a block is the attention
    backend's own.
    """
    from vllm import SamplingParams, TokensPrompt

    scheduler = engine_core(llm).scheduler
    manager = scheduler.kv_cache_manager
    manager.reset_prefix_cache()
    found: dict[str, dict[int, torch.Tensor]] = {}
    chunks = 0
    stock_free, stock_update = manager.free, scheduler.update_from_output

    def update(scheduler_output: Any, model_runner_output: Any) -> Any:
        nonlocal chunks
        chunks += 1
        return stock_update(scheduler_output, model_runner_output)

    def free(request: Any) -> Any:
        groups = manager.get_block_ids(request.request_id)
        _, drafter = attention_layers(llm)
        for group, block_ids in zip(engine_core(llm).scheduler.kv_cache_config.kv_cache_groups, groups, strict=True):
            full = len(prompt) // group.kv_cache_spec.block_size
            # Block 0 stands for blocks that have left a sliding window.
            kept = {index: block for index, block in enumerate(block_ids[:full]) if block != 0}
            for name in set(group.layer_names) & drafter.keys():
                cache = drafter[name].kv_cache
                found[name] = {index: cache[block].clone() for index, block in kept.items()}
        return stock_free(request)

    stock_budget = scheduler.max_num_scheduled_tokens
    manager.free, scheduler.update_from_output = free, update
    scheduler.max_num_scheduled_tokens = chunk
    try:
        llm.generate(TokensPrompt(prompt_token_ids=prompt), SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    finally:
        del manager.free
        scheduler.update_from_output = stock_update
        scheduler.max_num_scheduled_tokens = stock_budget
    return chunks, found


def write_draft_kv_layer_by_layer(llm: Any) -> bool:
    """Lets the attention backend write the draft KV from now on; whether one operation wrote it all before."""
    writer = model_runner(llm).drafter.attention.writer
    straight, writer.caches = writer.caches is not None, None
    return straight


def replace_rejection(llm: Any, q_scale: float) -> None:
    """Puts the reference's verification in the place of the product's operation, for this process."""
    from tests.reference.rejection import reject
    from vllm_dflash import ops

    generator = torch.Generator().manual_seed(0)
    if not hasattr(ops, "_replaced"):
        ops._replaced = ops.reject_sparse

    def replacement(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return reject(*arguments, q_scale=q_scale, generator=generator)

    ops.reject_sparse = replacement


def restore_rejection(llm: Any) -> None:
    from vllm_dflash import ops

    if hasattr(ops, "_replaced"):
        ops.reject_sparse = ops._replaced
        del ops._replaced


def abort_midway(llm: Any, prompts: list[list[int]], sampling: dict[str, Any], aborted: int) -> list[list[int]]:
    """Serves the prompts together, aborts one of them after some tokens, returns every request's tokens so far."""
    from vllm import SamplingParams, TokensPrompt

    engine = llm.llm_engine
    names = [f"abort-{index}" for index in range(len(prompts))]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), SamplingParams(**sampling))
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        if aborted >= 0 and 6 <= len(tokens[names[aborted]]):
            engine.abort_request([names[aborted]])
            aborted = -1
    return [tokens[name] for name in names]


def held_for_q(llm: Any) -> dict[str, Any]:
    """On V2: bytes of the sparse q, and shapes of tensors in the process that hold a row of V for every draft."""
    import gc

    runner = model_runner(llm)
    speculator = runner.speculator
    dense = [
        tuple(one.shape)
        for one in gc.get_objects()
        if isinstance(one, torch.Tensor)
        and one.dim() == 3
        and tuple(one.shape[1:]) == (speculator.num_speculative_steps, runner.vocab_size)
    ]
    return {"bytes": speculator.draft_logits.nbytes, "dense": dense}


def script_lengths(llm: Any, pattern: list[int]) -> None:
    """From now on the i-th request of the n-th step gets pattern[n + i] drafts, and so on from its beginning."""
    controller = drafter(llm).lengths.planner.controller
    steps = iter(range(1 << 60))

    def plan(request_ids: list[str], context: float, requests: int | None = None) -> list[int]:
        step = next(steps)
        return [pattern[(step + i) % len(pattern)] for i in range(len(request_ids))]

    controller.plan = plan


def tick(llm: Any) -> None:
    """From now on the drafter's clocks go on by a millisecond whenever they are read."""
    worker = drafter(llm).worker
    reads = iter(range(1 << 60))
    worker.clock.now = drafter(llm).lengths.planner.now = lambda: next(reads) * 1e-3


def let_a_cpu_take_custom_attention(llm: Any) -> None:
    """vLLM's CPU platform takes its own backend whatever is named; from now on a custom one that is named."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    stock = CpuPlatform.get_attn_backend_cls.__func__

    def chosen(cls: Any, selected_backend: Any, *rest: Any, **named: Any) -> str:
        if selected_backend is AttentionBackendEnum.CUSTOM:
            return selected_backend.get_path()
        return stock(cls, selected_backend, *rest, **named)

    CpuPlatform.get_attn_backend_cls = classmethod(chosen)


def attention_classes(llm: Any) -> tuple[set[str], set[str]]:
    """Names of the target's attention implementations, and of the drafter's."""
    target, drafter = attention_layers(llm)
    return tuple({type(layer.impl).__name__ for layer in layers.values()} for layers in (target, drafter))


def beside_others(
    llm: Any, others: list[list[int]], their_sampling: dict[str, Any], prompt: list[int], sampling: dict[str, Any]
) -> list[int]:
    """Tokens of a request that comes when the others already draft."""
    from vllm import SamplingParams, TokensPrompt

    engine = llm.llm_engine
    for index, other in enumerate(others):
        engine.add_request(f"other-{index}", TokensPrompt(prompt_token_ids=other), SamplingParams(**their_sampling))
    for _ in range(3):
        engine.step()
    engine.add_request("late", TokensPrompt(prompt_token_ids=prompt), SamplingParams(**sampling))
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == "late":
                tokens = list(output.outputs[0].token_ids)
    return tokens


def is_asynchronous(llm: Any) -> bool:
    return engine_core(llm).async_scheduling


def estimated_acceptance(
    llm: Any, prompts: list[list[int]], sampling: dict[str, Any]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """On V2, with stock's estimator for adaptive verification in place: the candidates' scores [B, K, C] of each draft
    step and the chances [B, K] that it made of them. (The option itself wants full CUDA graphs.)"""
    from vllm import SamplingParams, TokensPrompt
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    speculator = model_runner(llm).speculator
    drafts = speculator.num_speculative_steps
    estimator = OnlineAcceptanceEstimator(speculator.max_num_reqs, drafts, speculator.device)
    predict, noted = estimator.predict, []

    def noting(scores: torch.Tensor, slots: Any, step: Any, chances: torch.Tensor, *rest: Any) -> None:
        predict(scores, slots, step, chances, *rest)
        requests = scores.shape[0] // drafts
        noted.append((scores.view(requests, drafts, -1).clone(), chances[:requests].clone()))

    estimator.predict = noting
    speculator.acceptance_estimator = estimator
    try:
        texts = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        llm.generate(texts, SamplingParams(**sampling), use_tqdm=False)
    finally:
        speculator.acceptance_estimator = None
    return noted
