# SPDX-License-Identifier: Apache-2.0
"""Several ranks on vLLM's own executors: the target's tokens, and ranks that agree on every draft and every verdict."""

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from examples.demo.server import Server
from tests.engine import probes, ranks
from tests.engine.prompts import tiny_prompts
from tests.reference.target import ReferenceTarget
from tests.support.engine import close_all, of_runner
from tests.support.experts import as_mixture

pytestmark = pytest.mark.engine

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
BY_RUNNER = [
    pytest.param("v1", "dflash2", id="v1-dflash2"),
    pytest.param("v1", "dflash", id="v1-dflash", marks=pytest.mark.slow),
    pytest.param("v2", "dflash2", id="v2-dflash2", marks=pytest.mark.slow),
    pytest.param("v2", "dflash", id="v2-dflash", marks=pytest.mark.slow),
]
INFO = re.compile(r"^vllm_dflash:info\{(.*)\} 1\.0$", re.MULTILINE)
ON_CPU = {
    # One core a rank; without it vLLM looks for a NUMA node each.
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    # The ranks are asked by functions.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}


def several(processes, plugin, runner: str, **variables: str):
    if not plugin:
        pytest.skip("the plug-in under several ranks")
    return processes(runner=runner, plugin=True, in_process=False, environment=tuple((ON_CPU | variables).items()))


@pytest.mark.parametrize(("runner", "architecture"), BY_RUNNER)
def test_tensor_parallel(processes, plugin, trained, runner, architecture):
    """TP=2: exact, and both ranks hold the same candidates, q and accepted lengths, sampled requests among them."""
    pair = trained(architecture)
    engine = several(processes, plugin, runner)
    prompts = tiny_prompts(pair.target_shape.vocab_size, longest=50)[:6]
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 7}, tensor_parallel_size=2)
    runners = engine.probe(ranks.everywhere, ranks.watch)
    assert len(runners) == 2 and all((".worker.cpu.model_runner." in name) == (runner == "v2") for name in runners)
    sampled = GREEDY | {"temperature": 1.0}
    sampling = [GREEDY, GREEDY, GREEDY, GREEDY, sampled, sampled | {"seed": 5}]
    outputs = engine.generate(prompts, sampling)
    target = ReferenceTarget(pair.target)
    for prompt, output in zip(prompts[:4], outputs, strict=False):
        assert output.token_ids == target.greedy(prompt, GREEDY["max_tokens"])
    first, second = engine.probe(ranks.everywhere, ranks.noted)
    verdicts = [entry for entry in first if entry[0] == "reject_sparse"]
    assert first == second and len(verdicts) > 10
    assert max(accepted for _, _, counts in verdicts for accepted in counts) >= 2
    counters = engine.counters()
    assert counters["spec_decode_num_accepted_tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runner", "architecture", "length"),
    [("v1", "dflash", 7), ("v1", "dflash2", 7), ("v2", "dflash", 7), ("v2", "dflash2", 7), ("v2", "dflash2", "auto")],
)
def test_data_parallel(plugin, trained, tmp_path, runner, architecture, length):
    """`vllm serve --data-parallel-size 2`: both engines serve, draft and accept, and every token is the target's.

    The target is dense, so vLLM lets the engines run on their own.
    """
    if not plugin:
        pytest.skip("the plug-in under several ranks")
    pair = trained(architecture)
    arguments = ["--data-parallel-size", "2", "--api-server-count", "1"]
    arguments += ["--dtype", "float32", "--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--block-size", "32"]
    arguments += ["--speculative-config", f'{{"method": "dflash", "model": "{pair.drafter}"}}']
    arguments += ["--additional-config", json.dumps({"dflash": {"block_length": length}})]
    server = Server(pair.target, "two engines", tmp_path / "server.log", arguments)
    server.command[server.command.index("--max-model-len") + 1] = "512"
    server.environment |= ON_CPU | {"VLLM_PLUGINS": "dflash", "OMP_NUM_THREADS": "1"} | of_runner(runner)
    prompts = tiny_prompts(pair.target_shape.vocab_size, longest=50)[:12]
    with server, httpx.Client(trust_env=False, timeout=600, base_url=server.url) as client:

        def complete(prompt: list[int]) -> list[int]:
            body = GREEDY | {"model": str(pair.target), "prompt": prompt, "return_token_ids": True}
            answer = client.post("/v1/completions", json=body).raise_for_status().json()
            return answer["choices"][0]["token_ids"]

        with ThreadPoolExecutor(12) as pool:
            tokens = list(pool.map(complete, prompts))
        metrics = client.get("/metrics").text
    target = ReferenceTarget(pair.target)
    assert tokens == [target.greedy(prompt, GREEDY["max_tokens"]) for prompt in prompts]
    info = {labels["engine"]: labels["runner"] for labels in map(labels_of, INFO.findall(metrics))}
    assert info == {"0": runner, "1": runner}
    # What pays on a busy machine is another matter; that is looked for is certain.
    counters = [r'vllm_dflash:skipped_drafts_total{engine="%s",.*reason="unprofitable".*}']
    if length != "auto":
        names = ("num_draft_tokens", "num_accepted_tokens")
        counters = [rf'vllm:spec_decode_{name}_total{{engine="%s".*}}' for name in names]
    for counter in counters:
        for engine in ("0", "1"):
            found = re.search(f"{counter % engine} (\\S+)", metrics)
            assert found and float(found[1]) > 0, f"{counter} of engine {engine}"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def labels_of(text: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+)="([^"]*)"', text))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["dflash", "dflash2"])
def test_pipeline_parallel(processes, plugin, trained, architecture):
    """PP=2 on V2: the last stage drafts, from taps of both; the first gets drafts and verdicts from it.

    Scheduling is asynchronous, as on a GPU.
    """
    pair = trained(architecture)
    prompts = tiny_prompts(pair.target_shape.vocab_size, longest=50)[:6]
    target = ReferenceTarget(pair.target)
    expected = [target.greedy(prompt, GREEDY["max_tokens"]) for prompt in prompts]
    accepted = []
    for engine, stages in (
        (several(processes, plugin, "v2", V2_ON_CPU_ASYNCHRONOUS="1"), {"pipeline_parallel_size": 2}),
        (processes(runner="v1", plugin=True), {}),
    ):
        engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 3}, **stages)
        outputs = engine.generate(prompts, GREEDY)
        assert [output.token_ids for output in outputs] == expected
        counters = engine.counters()
        accepted.append(counters["spec_decode_num_accepted_tokens"] / counters["spec_decode_num_draft_tokens"])
    # The drafts are as good as on one rank: had the taps been mixed up, hardly one would be right.
    assert accepted[0] == pytest.approx(accepted[1], rel=0.2)


AUTO = {"additional_config": {"dflash": {"block_length": "auto"}}}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["tensor", "pipeline"])
def test_ranks_take_the_same_lengths(processes, plugin, trained, parallel):
    """`"auto"` on V2 over two ranks, scheduled asynchronously: each finds other lengths best, one rank's are taken."""
    pair = trained("dflash2")
    engine = several(processes, plugin, "v2", V2_ON_CPU_ASYNCHRONOUS="1")
    prompts = tiny_prompts(pair.target_shape.vocab_size, longest=50)[:6]
    target = ReferenceTarget(pair.target)
    longer = GREEDY | {"max_tokens": 40}
    expected = [target.greedy(prompt, 40) for prompt in prompts]
    ranked = {f"{parallel}_parallel_size": 2}

    def start(*following) -> None:
        engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 7}, **AUTO, **ranked)
        engine.probe(ranks.everywhere, ranks.follow, *following)

    def lengths_and_forwards() -> tuple[list[list[int]], list[int]]:
        first, second = engine.probe(ranks.everywhere, ranks.followed)
        assert [step["lengths"] for step in first] == [step["lengths"] for step in second]
        forwards = [step["forwards"] for step in second]
        # Of the pipeline's stages only the last one drafts.
        assert [step["forwards"] for step in first] == (forwards if parallel == "tensor" else [0] * len(first))
        lengths = [list(step["lengths"].values()) for step in second]
        assert forwards == [int(any(planned)) for planned in lengths]
        return lengths, forwards

    # The rank that answers the scheduler is the first of the last stage.
    patterns = [[0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 2, 5], [0, 0, 0, 0, 0, 0, 0, 0, 6, 3, 4]]
    start(patterns)
    assert [output.token_ids for output in engine.generate(prompts, longer)] == expected
    lengths, forwards = lengths_and_forwards()
    assert {length for planned in lengths for length in planned} == set(patterns[parallel == "pipeline"])
    assert 3 <= sum(forwards) <= len(forwards) - 3
    assert engine.counters()["spec_decode_num_accepted_tokens"] > 0

    # By the ranks' own clocks, where a forward of the drafter takes far too long.
    start(None, 0.4)
    assert [output.token_ids for output in engine.generate(prompts, longer)] == expected
    _, forwards = lengths_and_forwards()
    print(forwards)
    assert len(forwards) >= 40 and sum(forwards) <= len(forwards) / 4


@pytest.mark.slow
@pytest.mark.parametrize("late", [(0, 2), (2, 0)], ids=["second-late", "first-late"])
def test_ranks_leave_the_same_context_behind(processes, plugin, trained, late):
    """A request's context became NaN, and one of two tensor-parallel ranks hears of it later than the other."""
    pair = trained("dflash2")
    engine = several(processes, plugin, "v2", V2_ON_CPU_ASYNCHRONOUS="1")
    prompts = [prompt[:61] for prompt in tiny_prompts(pair.target_shape.vocab_size) if len(prompt) >= 61][:3]
    greedy = GREEDY | {"max_tokens": 60}
    # Metrics would empty the tally.
    options = {"additional_config": {"dflash": {"metrics": False, "block_length": 7}}, "tensor_parallel_size": 2}
    engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 7}, **options)
    engine.probe(ranks.everywhere, ranks.watch)
    engine.probe(ranks.everywhere, ranks.follow)
    engine.probe(ranks.everywhere, ranks.spoil_context, 0, late)
    outputs = engine.generate(prompts, greedy)
    target = ReferenceTarget(pair.target)
    assert [output.token_ids for output in outputs] == [target.greedy(prompt, 60) for prompt in prompts]
    first, second = engine.probe(ranks.everywhere, ranks.noted)
    verdicts = [entry for entry in first if entry[0] == "reject_sparse"]
    assert verdicts == [entry for entry in second if entry[0] == "reject_sparse"]
    # One that hears of it after the context began anew has nothing to count.
    first_rank, (found, enabled) = engine.probe(ranks.everywhere, ranks.faults)
    assert first_rank == ({"non_finite": 1}, True) and enabled and found.get("non_finite", 0) <= 1
    # The requests draft to their end.
    *_, last = engine.probe(ranks.everywhere, ranks.followed)[0]
    assert set(last["lengths"].values()) == {7}


NAN = [
    pytest.param(["context"], (0, 2), 7, id="context-second-late"),
    pytest.param(["context"], (2, 0), [7, 0, 3, 0, 0], id="context-first-late", marks=pytest.mark.slow),
    pytest.param([0, 1], (0, 2), [7, 0, 3, 0, 0], id="everything-second-late", marks=pytest.mark.slow),
    pytest.param([1], (2, 0), 7, id="everything-of-one-rank", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("spoiled", "late", "length"), NAN)
def test_v1_ranks_hear_of_nan_in_the_same_step(processes, plugin, trained, spoiled, late, length):
    """Each reads its own device. Were each to go on without drafts on its own, their forwards would not fit."""
    pair = trained("dflash2")
    engine = several(processes, plugin, "v1")
    prompts = [prompt[:61] for prompt in tiny_prompts(pair.target_shape.vocab_size) if len(prompt) >= 61][:3]
    fixed = length == 7
    options = {"dflash": {"metrics": False, "block_length": 7 if fixed else "auto"}}
    engine.start(
        pair.target,
        pair.drafter,
        speculative={"num_speculative_tokens": 7},
        additional_config=options,
        tensor_parallel_size=2,
        enable_prefix_caching=False,
    )
    engine.probe(ranks.everywhere, ranks.watch)
    if not fixed:
        engine.probe(ranks.everywhere, ranks.script_lengths, [length, length[::-1]])
    spoil = (ranks.spoil_context, 0) if spoiled == ["context"] else (ranks.spoil_forward, spoiled)
    engine.probe(ranks.everywhere, *spoil, late)
    sampled = GREEDY | {"max_tokens": 120, "temperature": 1.0, "seed": 3}
    outputs = engine.generate(prompts, [GREEDY | {"max_tokens": 120}, GREEDY | {"max_tokens": 120}, sampled])
    target = ReferenceTarget(pair.target)
    for prompt, output in zip(prompts[:2], outputs, strict=False):
        assert output.token_ids == target.greedy(prompt, 120)
    first, second = engine.probe(ranks.everywhere, ranks.noted)
    assert [name for name, *_ in first] == [name for name, *_ in second]
    assert [note for note in first if note[0] == "reject_sparse"] == [n for n in second if n[0] == "reject_sparse"]
    faults = engine.probe(ranks.everywhere, ranks.faults)
    assert faults[0] == faults[1]
    if spoiled == ["context"]:
        assert faults[0] == ({"non_finite": 1}, True)
        assert max(accepted for name, _, counts in first if name == "reject_sparse" for accepted in counts) >= 2
    else:
        # What was on its way when the third was heard is counted too.
        counts, enabled = faults[0]
        assert counts["disabled"] == 1 and 3 <= counts["non_finite"] <= 5 and not enabled


@pytest.mark.slow
def test_a_drafter_that_fails_on_the_last_stage(processes, plugin, trained):
    """PP=2: what raises and what is NaN there costs drafts alone, and drafts go on."""
    pair = trained("dflash2")
    engine = several(processes, plugin, "v2", V2_ON_CPU_ASYNCHRONOUS="1")
    prompts = tiny_prompts(pair.target_shape.vocab_size, longest=50)[:6]
    options = {"additional_config": {"dflash": {"metrics": False, "block_length": 7}}, "enable_prefix_caching": False}
    seven = {"num_speculative_tokens": 7}
    engine.start(pair.target, pair.drafter, speculative=seven, pipeline_parallel_size=2, **options)
    engine.probe(ranks.everywhere, ranks.spoil_context, 0, (0, 0))
    engine.probe(ranks.everywhere, ranks.raise_in_forward, 6, 2)
    outputs = engine.generate(prompts, GREEDY | {"max_tokens": 60})
    target = ReferenceTarget(pair.target)
    assert [output.token_ids for output in outputs] == [target.greedy(prompt, 60) for prompt in prompts]
    assert engine.probe(ranks.everywhere, ranks.faults) == [None, ({"non_finite": 1, "exception": 2}, True)]
    counters = engine.counters()
    assert counters["spec_decode_num_accepted_tokens"] > 0.5 * counters["spec_decode_num_drafts"]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["dflash", "dflash2"])
def test_data_parallel_ranks_in_step(processes, plugin, trained, tmp_path, architecture):
    """Experts are spread over data-parallel ranks, which therefore step together, with dummy steps where one is idle.

    `"auto"`: each engine has lengths of its own, and all of them run the drafter's forward every time.
    """
    pair = trained(architecture)
    target = as_mixture(pair.target, tmp_path / "mixture")
    place = {"VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(free_port())}
    engines = [
        several(
            processes,
            plugin,
            "v2",
            VLLM_DP_RANK=str(rank),
            VLLM_DP_RANK_LOCAL=str(rank),
            V2_ON_CPU_ASYNCHRONOUS="1",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            **place,
        )
        for rank in range(2)
    ]
    prompts = tiny_prompts(pair.target_shape.vocab_size, longest=50)[:6]
    # The second engine is idle long before the first one is done.
    shares, most = (prompts[:5], prompts[5:]), (40, 12)
    patterns = [[0, 0, 0, 0, 0, 0, 7, 2, 5], [0, 0, 3, 4]]

    def serve(rank: int) -> tuple[list[list[int]], list[dict]]:
        engine = engines[rank]
        engine.start(target, pair.drafter, speculative={"num_speculative_tokens": 7}, **AUTO)
        engine.probe(ranks.everywhere, ranks.follow, [patterns[rank]])
        outputs = engine.generate(shares[rank], GREEDY | {"max_tokens": most[rank]})
        [steps] = engine.probe(ranks.everywhere, ranks.followed)
        return [output.token_ids for output in outputs], steps

    try:
        with ThreadPoolExecutor(2) as pool:
            served = list(pool.map(serve, range(2)))
    finally:
        close_all(engines)
    # All experts are the dense target's MLP.
    dense = ReferenceTarget(pair.target)
    for share, tokens, (found, steps), pattern in zip(shares, most, served, patterns, strict=True):
        assert found == [dense.greedy(prompt, tokens) for prompt in share]
        assert {step["forwards"] for step in steps} == {1}
        lengths = {length for step in steps for length in (step["lengths"] or {}).values()}
        assert lengths == set(pattern)
    assert any(not any(step["lengths"].values()) for step in served[0][1] if step["lengths"] is not None)
    assert sum(step["lengths"] is None for step in served[1][1]) > 10
    assert abs(len(served[0][1]) - len(served[1][1])) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_ranks_that_torchrun_starts(processes, plugin, trained, runner):
    """`distributed_executor_backend="external_launcher"`: an engine a rank, each with a scheduler and ids of its own.

    Their plans are the first rank's, whatever the other one finds best, and so is the noise of unseeded requests.
    """
    if not plugin:
        pytest.skip("the plug-in under several ranks")
    pair = trained("dflash2")
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    engines = []
    for rank in range(2):
        variables = place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        variables |= {"V2_ON_CPU_ASYNCHRONOUS": "1"} if runner == "v2" else {}
        engines.append(processes(runner=runner, plugin=True, environment=tuple(variables.items())))
    prompts = tiny_prompts(pair.target_shape.vocab_size, longest=50)[:6]
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    greedy = GREEDY | {"max_tokens": 40}
    sampled = greedy | {"temperature": 1.0}

    def serve(rank: int) -> tuple[list[list[int]], dict[str, float]]:
        engine = engines[rank]
        engine.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 7}, **options, **AUTO)
        engine.probe(probes.script_lengths, [[0, 0, 0, 0, 0, 7, 2, 5], [3, 0, 1, 7]][rank])
        outputs = engine.generate(prompts, [greedy] * 3 + [sampled, sampled | {"seed": 5}, sampled | {"top_p": 0.9}])
        return [output.token_ids for output in outputs], engine.counters()

    # vLLM names them alike for every such launch on a machine, and never removes them.
    shared = [Path(f"/dev/shm/-tp:0-[0-1]-cpushm_{rank}") for rank in range(2)]
    try:
        with ThreadPoolExecutor(2) as pool:
            served = list(pool.map(serve, range(2)))
    finally:
        close_all(engines)
        for memory in shared:
            memory.unlink(missing_ok=True)
    target = ReferenceTarget(pair.target)
    expected = [target.greedy(prompt, 40) for prompt in prompts[:3]]
    counts = [
        [counters[f"spec_decode_num_{name}_tokens"] for name in ("draft", "accepted")] for _, counters in served
    ]
    first, second = (tokens for tokens, _ in served)
    assert first == second and first[:3] == expected
    assert counts[0] == counts[1] and counts[0][1] > 0
