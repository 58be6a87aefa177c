# SPDX-License-Identifier: Apache-2.0
"""The operations by their formulas, in torch: the oracle of the tests and the fallback without the
extension."""
