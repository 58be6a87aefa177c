# SPDX-License-Identifier: Apache-2.0
"""A drafter's faults: the step becomes plain decoding, and the engine lives on."""

import logging
import time
from collections.abc import Callable

from vllm_dflash.spec_decode.outcome import Tally

logger = logging.getLogger(__name__)

IN_A_ROW = 3
FORWARD, WRITING = "its forward", "writing its context"
LOG_EVERY = 60.0  # seconds


class FaultGuard:
    """Counts faults, logs them once a minute, and after three steps in a row that faulted switches drafting off.

    A step that faulted in several places counts once. In a row means that what faulted did not work in between: where
    drafts seldom pay its forward runs seldom, and its context is written in every step.

    now: seconds, for the log's pace. step: the number of the step at hand.
    """

    def __init__(self, tally: Tally, step: Callable[[], int], now: Callable[[], float] = time.monotonic) -> None:
        self.tally = tally
        self._step = step
        self._now = now
        self._failed: dict[int, str] = {}
        """Steps in a row that faulted, and where."""
        self._unlogged = 0
        self._logged_at: float | None = None

    @property
    def enabled(self) -> bool:
        """Whether this worker drafts at all; never True again once it is False."""
        return self.tally.enabled

    def exception(self, stage: str, error: BaseException) -> None:
        """A stage of this step raised: none of the step's requests gets drafts."""
        self._count("exception", f"{stage} raised {type(error).__name__}: {error}", error)
        self._failed_step(stage)

    def non_finite(self, bad: int, requests: int) -> None:
        """`bad` of a step's `requests` drafted ones came out as NaN or infinite; the others' drafts stand.

        All of them: the step failed. Some: it is their context, and no sign that the drafter is broken.
        """
        if bad:
            self._count("non_finite", f"the drafts of {bad} of {requests} requests are not finite")
        if bad and bad == requests:
            self._failed_step(FORWARD)
        elif requests:
            self.worked(FORWARD)

    def worked(self, stage: str) -> None:
        """A stage ran as it should: steps before this one where it did not are in a row no more."""
        if self._failed:
            step = self._step()
            self._failed = {at: where for at, where in self._failed.items() if at == step or where != stage}

    def failed_load(self, error: BaseException) -> None:
        """New weights for the drafter of a running engine could not be loaded, or not all of them."""
        self.tally.fault("load")
        logger.warning(
            "New weights for the DFlash drafter could not be loaded (%s: %s). It may draft badly or fail until the "
            "server is restarted; no token is wrong.",
            type(error).__name__,
            error,
            exc_info=error,
        )

    def _failed_step(self, stage: str) -> None:
        self._failed.setdefault(self._step(), stage)
        if len(self._failed) >= IN_A_ROW and self.enabled:
            self.tally.enabled = False
            self.tally.fault("disabled")
            logger.error(
                "The DFlash drafter failed in %d steps in a row: speculation is OFF from now on, and requests are "
                "decoded plainly. Restart the server to switch it on again; the log above says what failed.",
                len(self._failed),
            )

    def _count(self, kind: str, what: str, error: BaseException | None = None) -> None:
        self.tally.fault(kind)
        self._unlogged += 1
        now = self._now()
        if self._logged_at is not None and now - self._logged_at < LOG_EVERY:
            return
        more = f" ({self._unlogged} faults since the last such line)" if self._unlogged > 1 else ""
        logger.warning("DFlash drafter fault: %s. This step is decoded plainly%s.", what, more, exc_info=error)
        self._logged_at, self._unlogged = now, 0
