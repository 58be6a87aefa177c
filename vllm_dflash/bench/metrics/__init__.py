# SPDX-License-Identifier: Apache-2.0
"""What the metrics cost: the work they add to a step, against the step."""
