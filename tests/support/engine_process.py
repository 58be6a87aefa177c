# SPDX-License-Identifier: Apache-2.0
"""The process behind tests.support.engine.EngineProcess: takes commands from a pipe, drives `vllm.LLM`.

What is observed is observed on instances (the engine's scheduler, the runner's speculator), whatever their classes,
so that stock vLLM and the plug-in are watched by the same eyes.
"""

import gc
import importlib
import pickle
import sys
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any


@dataclass
class Output:
    """One completion of one request. `logprobs` holds {token id: (logprob, rank)} a token, where asked for."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    cached_tokens: int | None
    logprobs: list[dict[int, tuple[float, int | None]]] | None = None


@dataclass
class DraftStep:
    """A draft made behind `anchor_position`; where it was verified, how much of it was scheduled and accepted."""

    anchor_position: int
    drafts: list[int]
    scheduled: int | None = None
    accepted: int | None = None


@dataclass
class Trace:
    """One request's draft steps in order, its prefill chunks (the last not counted) and its preemptions."""

    steps: list[DraftStep] = field(default_factory=list)
    unfinished_chunks: int = 0
    preemptions: int = 0

    @property
    def verified(self) -> list[DraftStep]:
        return [step for step in self.steps if step.accepted is not None]

    @property
    def stand_ins(self) -> list[DraftStep]:
        """Steps for which rows were verified although there were no drafts."""
        return [step for step in self.verified if step.scheduled and not step.drafts]


def engine_core(llm: Any) -> Any:
    """The EngineCore of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core


def model_runner(llm: Any) -> Any:
    return engine_core(llm).model_executor.driver_worker.worker.model_runner


def runner_name(llm: Any) -> str:
    """Module and class of the model runner: the one certain sign of which runner serves."""
    kind = type(model_runner(llm))
    return f"{kind.__module__}.{kind.__qualname__}"


def drafter(llm: Any) -> Any:
    """V1's proposer or V2's speculator."""
    runner = model_runner(llm)
    return getattr(runner, "speculator", None) or runner.drafter


def draft_model(llm: Any) -> Any:
    """The drafter's network, on either runner."""
    return drafter(llm).model


class Watch:
    """Follows the scheduler of one in-process engine and keeps a Trace a request."""

    def __init__(self, llm: Any) -> None:
        self.traces: dict[str, Trace] = {}
        self.proposed: dict[str, list[int]] = {}
        self.scheduler = engine_core(llm).scheduler
        self.speculator = speculator = getattr(model_runner(llm), "speculator", None)
        # Then the scheduler learns of no draft, and a step's verdicts after the next one's drafts.
        self.asynchronous = engine_core(llm).async_scheduling
        self._wrap(self.scheduler, "update_from_output", self._before_update)
        self._wrap(self.scheduler, "update_draft_token_ids", self._before_drafts)
        self._wrap(self.scheduler, "_preempt_request", self._before_preemption)
        if speculator is not None:
            propose = speculator.propose

            def watched(input_batch: Any, *arguments: Any, **options: Any) -> Any:
                drafts = propose(input_batch, *arguments, **options)
                rows = drafts.tolist()
                if hasattr(speculator, "without"):
                    # The plug-in's says whom it has no drafts for.
                    without = speculator.without[: len(rows)].tolist()
                    rows = [[] if none else row for none, row in zip(without, rows, strict=True)]
                self.proposed = dict(zip(input_batch.req_ids, rows, strict=True))
                if self.asynchronous and not options.get("dummy_run"):
                    # num_sampled and num_rejected.
                    self._in_worker(input_batch, rows, arguments[4].tolist(), arguments[5].tolist())
                return drafts

            speculator.propose = watched

    @staticmethod
    def _wrap(owner: Any, name: str, before: Any) -> None:
        stock = getattr(owner, name)

        def wrapper(*arguments: Any, **options: Any) -> Any:
            before(*arguments, **options)
            return stock(*arguments, **options)

        setattr(owner, name, wrapper)

    def trace(self, request_id: str) -> Trace:
        return self.traces.setdefault(request_id, Trace())

    def _before_update(self, scheduler_output: Any, model_runner_output: Any) -> None:
        for request_id in scheduler_output.num_scheduled_tokens:
            row = model_runner_output.req_id_to_index[request_id]
            if not len(model_runner_output.sampled_token_ids[row]):
                self.trace(request_id).unfinished_chunks += 1
        if self.asynchronous:
            return
        for request_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            row = model_runner_output.req_id_to_index[request_id]
            sampled = model_runner_output.sampled_token_ids[row]
            if not drafts or not len(sampled):
                continue
            steps = self.trace(request_id).steps
            if steps and steps[-1].accepted is None:
                steps[-1].scheduled, steps[-1].accepted = len(drafts), len(sampled) - 1
            else:
                # The scheduler fills a request that starts with one token up with drafts nobody made.
                assert set(drafts) == {-1} and len(sampled) == 1, "placeholders were accepted"

    def _in_worker(self, batch: Any, rows: list[list[int]], sampled: list[int], rejected: list[int]) -> None:
        """The same from what the worker knows at the end of a step: its verdicts, and then its drafts."""
        count = batch.num_reqs
        computed = batch.num_computed_tokens_np[:count] + batch.num_scheduled_tokens[:count]
        past = (computed >= batch.prefill_len_np[:count]).tolist()
        verified = [0] * count if batch.num_draft_tokens_per_req is None else batch.num_draft_tokens_per_req.tolist()
        lengths = batch.seq_lens[:count].tolist()
        for row, request_id in enumerate(batch.req_ids):
            steps = self.trace(request_id).steps
            if verified[row] and steps and steps[-1].accepted is None:
                steps[-1].scheduled, steps[-1].accepted = verified[row], sampled[row] - 1
            if past[row]:
                anchor = lengths[row] - rejected[row]
                fit = max(self.speculator.max_model_len - 1 - anchor, 0)
                steps.append(DraftStep(anchor, rows[row][: min(fit, self.speculator.drafts.lengths[request_id])]))

    def _before_drafts(self, draft_token_ids: Any) -> None:
        if self.asynchronous:
            return
        for request_id, drafts in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.scheduler.requests.get(request_id)
            if request is None or request.is_finished() or request.is_prefill_chunk:
                continue
            anchor = request.num_tokens - 1
            if request_id in self.proposed:
                # On V2 a block is always whole; what reaches past the longest sequence is no draft.
                drafts = self.proposed[request_id][: max(self.speculator.max_model_len - 1 - anchor, 0)]
                # The plug-in's scheduler knows how many of them get rows.
                rows = getattr(self.scheduler, "vllm_dflash_rows", None)
                drafts = drafts if rows is None else drafts[: rows.planned.lengths[request_id]]
            self.trace(request_id).steps.append(DraftStep(anchor, list(drafts)))

    def _before_preemption(self, request: Any, *arguments: Any, **options: Any) -> None:
        self.trace(request.request_id).preemptions += 1


class Engine:
    """The commands. Each returns something that pickles."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.watch: Watch | None = None

    def start(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM, envs

        self.stop()
        traced = arguments.pop("traced", True)
        self.llm = LLM(**arguments)
        if not envs.VLLM_ENABLE_V1_MULTIPROCESSING and arguments.get("async_scheduling"):
            assert engine_core(self.llm).batch_queue is not None, "the next step is not planned ahead of this one's end"
        if traced and not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
            self.watch = Watch(self.llm)

    def stop(self) -> None:
        if self.llm is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        self.llm = self.watch = None
        cleanup_dist_env_and_memory()
        gc.collect()

    def generate(self, prompts: list[Any], sampling: Any) -> list[Output]:
        assert self.llm is not None, "no engine runs, or it failed in an earlier call"
        from vllm import TokensPrompt

        inputs = [
            prompt if isinstance(prompt, str) else TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts
        ]
        if isinstance(sampling, dict):
            parameters: Any = _sampling_params(sampling)
        else:
            parameters = [_sampling_params(one) for one in sampling]
        return _outputs(self.llm.generate(inputs, parameters, use_tqdm=False))

    def chat(self, conversations: list[Any], sampling: dict[str, Any]) -> list[Output]:
        return _outputs(self.llm.chat(conversations, _sampling_params(sampling), use_tqdm=False))

    def counters(self) -> dict[str, float]:
        counters: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if hasattr(metric, "value"):
                name = metric.name.removeprefix("vllm:")
                counters[name] = counters.get(name, 0) + metric.value
        return counters

    def traces(self) -> dict[str, Trace]:
        assert self.watch is not None, "traces need an in-process engine"
        traces, self.watch.traces = self.watch.traces, {}
        # Inside the engine an id carries a random suffix.
        return {request_id.rsplit("-", 1)[0]: trace for request_id, trace in traces.items()}

    def probe(self, function: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        module, name = function.split(":")
        return getattr(importlib.import_module(module), name)(self.llm, *arguments, **options)


def _sampling_params(keywords: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    structured = keywords.get("structured_outputs")
    if structured is not None:
        keywords = keywords | {"structured_outputs": StructuredOutputsParams(**structured)}
    return SamplingParams(**keywords)


def _outputs(results: list[Any]) -> list[Output]:
    return [
        Output(
            request_id=result.request_id,
            prompt_token_ids=list(result.prompt_token_ids),
            token_ids=list(completion.token_ids),
            text=completion.text,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            cached_tokens=result.num_cached_tokens,
            logprobs=None
            if completion.logprobs is None
            else [
                {token: (entry.logprob, entry.rank) for token, entry in position.items()}
                for position in completion.logprobs
            ],
        )
        for result in results
        for completion in result.outputs
    ]


def serve(connection: Connection) -> None:
    """Answers (True, result) or (False, traceback) until the pipe closes.

    An in-process engine that raised in the midst of a step still holds its requests and would never end the next
    call: it is dropped.
    """
    engine = Engine()
    while True:
        try:
            command, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            engine.stop()
            return
        try:
            answer = (True, getattr(engine, command)(*arguments))
        except Exception:
            answer = (False, traceback.format_exc())
            if command in ("generate", "chat"):
                engine.stop()
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    from tests.support import engine_process

    engine_process.serve(Connection(int(sys.argv[1])))
