# SPDX-License-Identifier: Apache-2.0
"""One speculative step over a batch, with no engine in sight."""

from vllm_dflash.spec_decode.context_validity import ContextValidity
from vllm_dflash.spec_decode.draft_block import DraftBlock
from vllm_dflash.spec_decode.draft_plan import DraftPlan
from vllm_dflash.spec_decode.draft_slots import DraftSlots
from vllm_dflash.spec_decode.faults import FaultGuard
from vllm_dflash.spec_decode.outcome import StepOutcome
from vllm_dflash.spec_decode.row_verification import VerifyRows, verify_rows
from vllm_dflash.spec_decode.timing import StageClock, Timing
from vllm_dflash.spec_decode.verification import VerifyInputs, verify
from vllm_dflash.spec_decode.worker import Anchors, SpecDecodeWorker

__all__ = [
    "Anchors",
    "ContextValidity",
    "DraftBlock",
    "DraftPlan",
    "DraftSlots",
    "FaultGuard",
    "SpecDecodeWorker",
    "StageClock",
    "StepOutcome",
    "Timing",
    "VerifyInputs",
    "VerifyRows",
    "verify",
    "verify_rows",
]
