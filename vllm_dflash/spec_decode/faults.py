# SPDX-License-Identifier: Apache-2.0
"""A drafter's faults: the step becomes plain decoding, and the engine lives on."""

import logging
import time
from collections.abc import Callable

from vllm_dflash.spec_decode.outcome import Tally

logger = logging.getLogger(__name__)

IN_A_ROW = 3
LOG_EVERY = 60.0  # seconds


class FaultGuard:
    """Counts faults, logs them once a minute, and after three steps in a row that faulted switches drafting off.

    now: seconds, for the log's pace.
    """

    def __init__(self, tally: Tally, now: Callable[[], float] = time.monotonic) -> None:
        self.tally = tally
        self._now = now
        self._in_a_row = 0
        self._unlogged = 0
        self._logged_at: float | None = None

    @property
    def enabled(self) -> bool:
        """Whether this worker drafts at all; never True again once it is False."""
        return self.tally.enabled

    def exception(self, stage: str, error: BaseException) -> None:
        """A stage of this step raised: none of the step's requests gets drafts."""
        self._count("exception", f"{stage} raised {type(error).__name__}: {error}", error)
        self._failed_step()

    def non_finite(self, bad: int, requests: int) -> None:
        """`bad` of a step's `requests` drafted ones came out as NaN or infinite; the others' drafts stand.

        All of them: the step failed. Some: it is their context, and no sign that the drafter is broken.
        """
        if bad:
            self._count("non_finite", f"the drafts of {bad} of {requests} requests are not finite")
        if bad and bad == requests:
            self._failed_step()
        elif requests:
            self._in_a_row = 0

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

    def _failed_step(self) -> None:
        self._in_a_row += 1
        if self._in_a_row >= IN_A_ROW and self.enabled:
            self.tally.enabled = False
            self.tally.fault("disabled")
            logger.error(
                "The DFlash drafter failed in %d steps in a row: speculation is OFF from now on, and requests are "
                "decoded plainly. Restart the server to switch it on again; the log above says what failed.",
                self._in_a_row,
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
