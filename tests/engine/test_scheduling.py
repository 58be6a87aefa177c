# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler, without a model: the 1+K rows of a draft never touch a block that anyone else has or shares.

vllm#42971, vllm#43733: the look-ahead was one slot short, and a draft's first pass wrote into shared blocks.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.checkpoints import DrafterShape, Pair
from vllm_dflash import plugin
from vllm_dflash.engine import activation

BLOCK, K, LONGEST, SEQUENCES = 16, 7, 128, 6
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=24
)
GROUPS = {"full": (FULL,), "full and sliding": (FULL, WINDOW)}


@pytest.fixture(scope="module")
def config(make: Callable[..., Pair]):
    """The VllmConfig that `vllm serve` builds for a drafter of ours."""
    plugin.register()
    pair = make(DrafterShape(architecture="dflash2"))
    yield EngineArgs(
        model=str(pair.target),
        dtype="float32",
        max_model_len=LONGEST,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=96,
        block_size=BLOCK,
        async_scheduling=False,
        speculative_config={"method": "dflash", "model": str(pair.drafter), "num_speculative_tokens": K},
    ).create_engine_config()
    activation.deactivate()


def scheduler_for(config, specs, blocks: int) -> Scheduler:
    config.cache_config.num_gpu_blocks = blocks
    groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    return Scheduler(config, cache, StructuredOutputManager(config), BLOCK)


def owners(scheduler: Scheduler) -> dict[int, set[str]]:
    """Who holds each block."""
    found: dict[int, set[str]] = {}
    for request_id in [request.request_id for request in scheduler.running]:
        for group in scheduler.kv_cache_manager.get_block_ids(request_id):
            for block in group:
                found.setdefault(block, set()).add(request_id)
    return found


def check_lookahead(scheduler: Scheduler, output) -> int:
    """Every position that a draft of this step may write is in a block of the request's own; returns their number."""
    held, pool = owners(scheduler), scheduler.kv_cache_manager.block_pool.blocks
    checked = 0
    for request_id in output.num_scheduled_tokens:
        request = scheduler.requests[request_id]
        end = request.num_computed_tokens
        if end < request.num_prompt_tokens:
            continue  # in the midst of its prompt: nobody drafts
        drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        # The anchor stands behind what the step verifies: the least with no draft accepted, the most with all.
        first, last = end - drafts, min(end + K, LONGEST - 1)
        for group in scheduler.kv_cache_manager.get_block_ids(request_id):
            for position in range(first, last + 1):
                assert position // BLOCK < len(group), f"position {position} of {request_id} has no block"
                block = group[position // BLOCK]
                assert held[block] == {request_id}, f"position {position} of {request_id} is shared"
                assert block and pool[block].ref_cnt == 1 and pool[block].block_hash is None
                checked += 1
    return checked


@pytest.mark.parametrize("groups", GROUPS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_lookahead_slots_belong_to_the_request_alone(config, groups, data) -> None:
    """Random arrivals with shared beginnings, random acceptance, aborts, a pool small enough to preempt."""
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    hasher = get_request_block_hasher(BLOCK, hash_fn)
    scheduler = scheduler_for(config, GROUPS[groups], data.draw(st.integers(24, 60), label="blocks"))
    arrived = checked = 0
    for _ in range(data.draw(st.integers(5, 40), label="steps")):
        if arrived < 12 and data.draw(st.booleans(), label="arrives"):
            shared = data.draw(st.sampled_from([0, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]), label="shared")
            own = data.draw(st.integers(1, 30), label="own")
            tokens = [*range(10, 10 + shared), *range(1000 * (arrived + 1), 1000 * (arrived + 1) + own)]
            sampling = SamplingParams(max_tokens=data.draw(st.integers(1, 60), label="max_tokens"), ignore_eos=True)
            sampling.update_from_generation_config({}, 2)
            scheduler.add_request(Request(f"r{arrived}", tokens, sampling, None, block_hasher=hasher))
            arrived += 1
        if scheduler.running and data.draw(st.integers(0, 9), label="aborts") == 0:
            from vllm.v1.request import RequestStatus

            scheduler.finish_requests(scheduler.running[0].request_id, RequestStatus.FINISHED_ABORTED)
        output = scheduler.schedule()
        if not output.num_scheduled_tokens:
            continue
        checked += check_lookahead(scheduler, output)
        ids = list(output.num_scheduled_tokens)
        sampled, drafts = [], []
        for request_id in ids:
            request = scheduler.requests[request_id]
            finished_prompt = request.num_computed_tokens >= request.num_tokens
            given = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            accepted = data.draw(st.integers(0, given), label="accepted") if given else 0
            sampled.append([7] * (1 + accepted) if finished_prompt else [])
            drafts.append([7] * data.draw(st.sampled_from([K, K, 0, 3]), label="drafts") if finished_prompt else [])
        scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)}, sampled_token_ids=sampled
            ),
        )
        scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))
    if arrived:
        assert checked or arrived < 3


def test_a_lookahead_of_k_would_be_noticed(config) -> None:
    """One slot less, as it once was in stock, and the check fails."""
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    failed = 0
    for length in range(1, 2 * BLOCK):
        scheduler = scheduler_for(config, GROUPS["full"], 60)
        scheduler.num_lookahead_tokens -= 1
        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        hasher = get_request_block_hasher(BLOCK, hash_fn)
        scheduler.add_request(Request("r", [5] * length, sampling, None, block_hasher=hasher))
        try:
            check_lookahead(scheduler, scheduler.schedule())
        except AssertionError:
            failed += 1
    assert failed
